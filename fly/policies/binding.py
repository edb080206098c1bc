"""How a rule learns the meaning of token ids. Knows nothing of tokenizers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import copy
from functools import cache, cached_property
from typing import Any, ClassVar, TypeVar

from fly.contents import Keyed
from fly.vocabulary import Vocabulary

__all__ = ["Bindable", "parts_of"]

B = TypeVar("B", bound="Bindable")


class Bindable:
    """A frozen dataclass that may look up the meaning of tokens in the ``vocabulary`` that ``bind`` gives it.

    ``also_reads`` names what it reads in some blocks only, beside what deciding a few blocks shows
    (``fly.policies.AcceptancePolicy.reads``).

    The vocabulary is not a parameter. So a bound rule prints like the unbound one, equals it and has the same hash. A
    pickled or copied rule is unbound.
    """

    _vocabulary: Vocabulary | None = None
    also_reads: ClassVar[Collection[str]] = ()

    @property
    def vocabulary(self) -> Vocabulary:
        """The meaning of token ids. Raises ``ValueError`` before ``bind``."""
        if self._vocabulary is None:
            raise ValueError(
                f"{self} needs the meaning of tokens, but is bound to no vocabulary: fly.LLM and the kit bind their "
                "policies; elsewhere call bind(vocabulary)"
            )
        return self._vocabulary

    def bind(self: B, vocabulary: Vocabulary) -> B:
        """Return a copy that is bound to ``vocabulary``, with all its parts. ``LLM`` calls this for each request.

        Override it to find missing tokens early. A ``ValueError`` raised here becomes the request's error.
        """
        if self._vocabulary is vocabulary:
            return self
        bound = copy(self)
        for name, value in vars(bound).items():
            vars(bound)[name] = _bound(value, vocabulary)
        vars(bound)["_vocabulary"] = vocabulary
        return bound

    @cached_property
    def keyed(self: B) -> Keyed[B]:
        """The rule as a key: it equals rules of the same class and parameters, whether these can be hashed or not, and
        also where ``compare=False`` leaves them out of ``==``. They are written the same too, since what a condition
        decides is recorded under its text."""
        return Keyed(self, str(self))

    def __getstate__(self) -> dict[str, Any]:
        """Return the parameters, without the vocabulary and cached values."""
        kind: type = type(self)
        left_out = _cached_names(kind)
        return {name: value for name, value in vars(self).items() if name != "_vocabulary" and name not in left_out}


def parts_of(rule: Bindable) -> Iterator[Bindable]:
    """Yield a rule or condition, and those that its parameters hold."""
    yield rule
    for value in vars(rule).values():
        for part in value if type(value) is tuple else (value,):
            if isinstance(part, Bindable):
                yield from parts_of(part)


@cache
def _cached_names(kind: type) -> frozenset[str]:
    """Return the names of a class's cached properties."""
    parts = ((name, part) for each in kind.__mro__ for name, part in vars(each).items())
    return frozenset(name for name, part in parts if isinstance(part, cached_property))


def _bound(value: Any, vocabulary: Vocabulary) -> Any:
    if isinstance(value, Bindable):
        return value.bind(vocabulary)
    return tuple(_bound(part, vocabulary) for part in value) if type(value) is tuple else value
