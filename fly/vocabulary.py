"""What the token ids of a model stand for. Knows nothing of models, files or policies.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor

__all__ = ["Vocabulary"]

_MASKS = 64  # masks kept; a predicate that is made anew each time must not fill the memory


class Vocabulary:
    """The tokens of a model by their ids, 0 to ``size`` - 1: ``bytes``, ``texts``, ids of texts, and masks.

    Args:
        size: V, how many ids the model knows.
        spelled: the bytes of each id, empty if it stands for no text, or a function that returns them at first use; ids
            beyond its end stand for no text. None: it is unknown what the ids stand for.
        control_ids: end-of-sequence, turn markers and the like: never plain text.
        token_id: the id of the one token with this text; raises ``ValueError`` if there is none. None looks it up.
        device: the device of masks, which is that of the target's logits.
        encode: the ids of a text; raises ``ValueError`` if there is no tokenizer. None looks for the longest token
            again and again.
    """

    def __init__(
        self,
        size: int,
        spelled: Sequence[bytes] | Callable[[], Sequence[bytes]] | None = None,
        control_ids: Iterable[int] = (),
        token_id: Callable[[str], int] | None = None,
        device: torch.device | str = "cpu",
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.size, self.device, self.control_ids = size, torch.device(device), frozenset(control_ids)
        self._spelled, self._token_id, self._encode = spelled, token_id or self._find, encode or self._longest
        self._masks = lru_cache(_MASKS)(self._mask)

    @cached_property
    def bytes(self) -> list[bytes]:
        """The bytes that each id adds after other text: a word's leading space is part of it.

        Raises ``ValueError`` if the model has no tokenizer.
        """
        if self._spelled is None:
            raise ValueError("this model has no tokenizer, so it is unknown what its tokens stand for; use token ids")
        spelled = self._spelled() if callable(self._spelled) else self._spelled
        return [*spelled[: self.size], *[b""] * (self.size - len(spelled))]

    @cached_property
    def texts(self) -> list[str]:
        """``bytes`` as text, with replacement marks if a token is only a part of a character."""
        return [data.decode("utf-8", "replace") for data in self.bytes]

    def token_id(self, text: str) -> int:
        """The id of the one token whose text this is. Raises ``ValueError`` if it is none, or several."""
        return self._token_id(text)

    def encode(self, text: str) -> list[int]:
        """The ids of a text by itself, without a begin token: what a marker of several tokens looks like in the tokens
        of a row. (Within a text its first token may be another, if a space comes before it.)

        Raises ``ValueError`` if the model has no tokenizer.
        """
        return self._encode(text)

    def where(self, predicate: Callable[[str], bool]) -> Tensor:
        """[V] bool, on ``device``: the plain tokens for whose text ``predicate`` is true.

        Control tokens, and ids that stand for no text, are always False. Computed once for a predicate: a function with
        a name, or a method of a rule (those of equal rules count as one). Raises ``ValueError`` like ``bytes``.
        """
        if isinstance(predicate, MethodType):
            return self._masks(predicate.__func__, predicate.__self__)
        return self._masks(predicate)

    def _mask(self, function: Callable[..., bool], *owner: Any) -> Tensor:
        plain = ((i not in self.control_ids and bool(text), text) for i, text in enumerate(self.texts))
        return torch.tensor([asked and bool(function(*owner, text)) for asked, text in plain], device=self.device)

    def _longest(self, text: str) -> list[int]:
        by_text, found, data = {data: i for i, data in enumerate(self.bytes) if data}, [], text.encode()
        while data:
            if (size := next((n for n in range(len(data), 0, -1) if data[:n] in by_text), 0)) == 0:
                raise ValueError(f"{text!r} cannot be written in this vocabulary")
            found.append(by_text[data[:size]])
            data = data[size:]
        return found

    def _find(self, text: str) -> int:
        if self._spelled is None:
            raise ValueError(f"{text!r} is text, and this model has no tokenizer; use a token id")
        if text not in self.texts:
            raise ValueError(f"{text!r} is no token of this vocabulary")
        return self.texts.index(text)
