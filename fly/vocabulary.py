"""The meaning of a model's token ids. Knows nothing of models, files or policies.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fly.contents import Keyed

__all__ = ["Vocabulary"]

_MASKS = 64  # at most this many masks are kept, or new predicates without end would fill the memory


class Vocabulary:
    """The tokens of a model, with ids from 0 to ``size`` - 1: their bytes and texts, the ids of texts, and masks.

    Args:
        size: V, the number of ids.
        spelled: the bytes of each id (empty for an id without text), or a function that returns them on first use. Ids
            beyond its end have no text. None if the texts are unknown.
        control_ids: end-of-sequence, turn markers and other ids that are never plain text.
        token_id: a function from a text to the id of its one token; it may raise ``ValueError``. None searches
            ``spelled``.
        device: where masks are: the device of the target's logits.
        encode: a function from a text to its ids; it may raise ``ValueError``. None takes the longest token each time.
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
        self.size = size
        self.device = torch.device(device)
        self.control_ids = frozenset(control_ids)
        self._spelled = spelled
        self._token_id = token_id or self._find
        self._encode = encode or self._longest
        self._masks = lru_cache(_MASKS)(self._mask)

    @cached_property
    def bytes(self) -> list[bytes]:
        """The bytes that each id adds to a text. The space before a word is part of its token.

        Raises ``ValueError`` if the model has no tokenizer.
        """
        if self._spelled is None:
            raise ValueError("this model has no tokenizer, so the texts of its tokens are unknown; use token ids")
        spelled = self._spelled() if callable(self._spelled) else self._spelled
        return [*spelled[: self.size], *[b""] * (self.size - len(spelled))]

    @cached_property
    def texts(self) -> list[str]:
        """``bytes`` as text, with replacement characters where a token is only a part of a character."""
        return [data.decode("utf-8", "replace") for data in self.bytes]

    def token_id(self, text: str) -> int:
        """Return the id of the one token with this text. Raises ``ValueError`` unless the text is one token."""
        return self._token_id(text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without a begin token, for instance of a marker to look for. (Inside a longer text
        the first token may differ, if a space comes before it.)

        Raises ``ValueError`` if the model has no tokenizer.
        """
        return self._encode(text)

    def where(self, predicate: Callable[[str], bool]) -> Tensor:
        """Return a mask, bool [V] on ``device``: whether ``predicate`` is true for each token's text. It is False for
        control tokens and ids without text.

        The mask is computed once for each predicate (``fly.contents.content_of``): a named function, a method of a
        rule, a lambda, which is the same one as long as what it captured holds the same. So a predicate must depend on
        nothing but the text and that. Raises ``ValueError`` like ``bytes``.
        """
        return self._masks(Keyed(predicate))

    def _mask(self, predicate: Keyed[Callable[[str], bool]]) -> Tensor:
        pairs = ((i not in self.control_ids and bool(text), text) for i, text in enumerate(self.texts))
        return torch.tensor([is_plain and bool(predicate.value(text)) for is_plain, text in pairs], device=self.device)

    def _longest(self, text: str) -> list[int]:
        by_text = {data: i for i, data in enumerate(self.bytes) if data}
        tokens = []
        data = text.encode()
        while data:
            if (size := next((n for n in range(len(data), 0, -1) if data[:n] in by_text), 0)) == 0:
                raise ValueError(f"{text!r} cannot be written in this vocabulary")
            tokens.append(by_text[data[:size]])
            data = data[size:]
        return tokens

    def _find(self, text: str) -> int:
        if self._spelled is None:
            raise ValueError(f"{text!r} is text, and this model has no tokenizer; use a token id")
        if text not in self.texts:
            raise ValueError(f"{text!r} is not a token of this vocabulary")
        return self.texts.index(text)
