"""Conditions on the text of the drafted token. They look this text up in the vocabulary.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fly.expressions import Checked
from fly.policies.conditions import Block, Clause, Condition
from fly.vocabulary import Vocabulary

__all__ = ["TextCondition", "TokenText"]


class TextCondition(Condition):
    """A condition on the drafted token's text alone. A subclass implements ``holds_for``, which is called once for each
    token of the vocabulary. The condition never holds for control tokens and for ids without a text.

    ``bind`` raises ``ValueError`` if the model has no tokenizer.
    """

    @abstractmethod
    def holds_for(self, text: str) -> bool:
        """Return whether the condition holds for a token with this text, which may begin with a space. The text of a
        token that is only part of a character is a replacement mark."""

    def bind(self, vocabulary: Vocabulary) -> TextCondition:
        vocabulary.where(self.holds_for)  # build the mask now, not between two forwards
        return super().bind(vocabulary)

    def evaluate(self, block: Block) -> Tensor:
        return self.vocabulary.where(self.holds_for)[block.draft.tokens_BK]


@dataclass(frozen=True)
class TokenText(TextCondition, Checked):
    """The drafted token's text is of a certain kind. ``token(digits)`` holds if it contains a digit,
    ``token(capitals)`` if it begins with a capital letter (after an optional space), and ``token(newlines)`` if it
    contains a newline. ``token(letters)``, ``token(punctuation)`` and ``token(blanks)`` hold if it consists of nothing
    else, apart from spaces around it.

    ``fly & ~token(digits)`` never excuses a token with a digit.
    """

    name: ClassVar[str] = "token"
    kind: Literal["digits", "capitals", "letters", "punctuation", "blanks", "newlines"]

    def _compile(self) -> Clause | None:
        if self._vocabulary is None:
            return None
        return Clause.of("token", mask=self.vocabulary.where(self.holds_for))

    def holds_for(self, text: str) -> bool:
        return _KINDS[self.kind](text)


_KINDS: Mapping[str, Callable[[str], bool]] = {
    "digits": lambda text: any(map(str.isdigit, text)),
    "capitals": lambda text: text.strip()[:1].isupper(),
    "letters": lambda text: text.strip().isalpha(),
    "punctuation": lambda text: bool(text.strip()) and not any(c.isalnum() or c.isspace() for c in text.strip()),
    "blanks": str.isspace,
    "newlines": lambda text: "\n" in text,
}
