"""How a rule learns the meaning of token ids. Knows nothing of tokenizers."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Any, TypeVar

from fly.vocabulary import Vocabulary

__all__ = ["Bindable"]

B = TypeVar("B", bound="Bindable")


class Bindable:
    """A frozen dataclass that can look up the meaning of tokens. Once bound, it has a ``vocabulary``.

    The vocabulary is not a parameter: a bound rule prints the same as an unbound one, is equal to it and has the same
    hash. A pickled or copied rule is unbound.
    """

    _vocabulary: Vocabulary | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """The meaning of token ids. Raises ``ValueError`` before ``bind``."""
        if self._vocabulary is None:
            raise ValueError(
                f"{self} needs the meaning of tokens, but is bound to no vocabulary: fly.LLM and the kit bind the "
                "policies they are given; elsewhere call bind(vocabulary)"
            )
        return self._vocabulary

    def bind(self: B, vocabulary: Vocabulary) -> B:
        """Return a copy with this ``vocabulary``, parts included. ``LLM`` calls this for each request.

        Override it to find missing tokens early: a ``ValueError`` raised here is reported as the request's error.
        """
        if self._vocabulary is vocabulary:
            return self
        bound = copy(self)
        for name, value in vars(bound).items():
            vars(bound)[name] = _bound(value, vocabulary)
        vars(bound)["_vocabulary"] = vocabulary
        return bound

    def __getstate__(self) -> dict[str, Any]:
        """The parameters, without the vocabulary and cached values."""
        cached = {name for kind in type(self).__mro__ for name, part in vars(kind).items() if _is_cached(part)}
        return {name: value for name, value in vars(self).items() if name != "_vocabulary" and name not in cached}


def _is_cached(attribute: object) -> bool:
    return isinstance(attribute, cached_property)


def _bound(value: Any, vocabulary: Vocabulary) -> Any:
    if isinstance(value, Bindable):
        return value.bind(vocabulary)
    return tuple(_bound(part, vocabulary) for part in value) if type(value) is tuple else value
