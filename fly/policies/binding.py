"""How a rule learns what token ids stand for. Knows nothing of tokenizers."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Any, TypeVar

from fly.vocabulary import Vocabulary

__all__ = ["Bindable"]

B = TypeVar("B", bound="Bindable")


class Bindable:
    """A frozen dataclass that can look up what tokens stand for: once bound, it has a ``vocabulary``.

    The vocabulary is not a parameter: bound or not, a rule prints the same, is equal, and has the same hash. A pickled
    or copied rule is unbound.
    """

    _vocabulary: Vocabulary | None = None

    @property
    def vocabulary(self) -> Vocabulary:
        """What token ids stand for. Raises ``ValueError`` before ``bind``."""
        if self._vocabulary is None:
            raise ValueError(
                f"{self} asks what tokens stand for, and was bound to no vocabulary: fly.LLM and the kit bind what "
                "they are given, elsewhere call bind(vocabulary)"
            )
        return self._vocabulary

    def bind(self: B, vocabulary: Vocabulary) -> B:
        """A copy with this ``vocabulary``, parts included. ``LLM`` calls it for each request.

        Override it to find out early that something is missing: a ``ValueError`` raised here is the request's error.
        """
        if self._vocabulary is vocabulary:
            return self
        bound = copy(self)
        for name, value in vars(bound).items():
            vars(bound)[name] = _bound(value, vocabulary)
        vars(bound)["_vocabulary"] = vocabulary
        return bound

    def __getstate__(self) -> dict[str, Any]:
        """Its parameters, without the vocabulary and computed values."""
        cached = {name for kind in type(self).__mro__ for name, part in vars(kind).items() if _is_cached(part)}
        return {name: value for name, value in vars(self).items() if name != "_vocabulary" and name not in cached}


def _is_cached(attribute: object) -> bool:
    return isinstance(attribute, cached_property)


def _bound(value: Any, vocabulary: Vocabulary) -> Any:
    if isinstance(value, Bindable):
        return value.bind(vocabulary)
    return tuple(_bound(part, vocabulary) for part in value) if type(value) is tuple else value
