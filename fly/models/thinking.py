"""What a chat model's answer consists of: thinking and text. Knows nothing of templates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["TAGS", "ChatPrompt", "Kind", "Splitter", "Tags", "Thinking"]

Kind = Literal["text", "reasoning"]
_BLANKS = 64  # the most whitespace characters that may precede the opening tag


class Tags(NamedTuple):
    """The tags that models write before and after their thinking."""

    open: str
    close: str


# Model families use different tags. If a template mentions one of them, its model thinks.
TAGS = (Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class Thinking:
    """The tags of a model that may begin an answer with thinking. ``begun`` means that the prompt ends with the opening
    tag."""

    tags: Tags
    begun: bool = False


class ChatPrompt(list[int]):
    """Token ids of a conversation.

    Attributes:
        thinking: the tags with which the answer may begin; None if the model does not think. Thinking comes before
            structured output.
        shown: special tokens that stay in the text of the answer, such as the tags around tool calls.
    """

    def __init__(self, ids: Iterable[int], thinking: Thinking | None = None, shown: Iterable[str] = ()) -> None:
        super().__init__(ids)
        self.thinking, self.shown = thinking, tuple(shown)


class Splitter:
    """Splits a streamed answer into thinking and text. The answer may arrive in pieces of any size.

    There is thinking if the answer begins with the opening tag, or the prompt ends with it. It ends at the closing tag.
    Newlines around it belong to neither part. An answer that ends before the closing tag is all thinking. No part of a
    tag is ever returned. If ``thinking`` is None, everything is text.
    """

    def __init__(self, thinking: Thinking | None) -> None:
        self._thinking = thinking
        self._held = ""  # received, but not returned, because it may be the beginning of a tag
        self._newlines = 0  # newlines held back before ``_held``; they are dropped if no more thinking follows
        # "start": thinking may begin; "think": inside it; "answer": after it, before any text; "text": in the text
        self._state = "text" if thinking is None else "think" if thinking.begun else "start"
        self._fresh = True  # no thinking has been returned yet
        self._pushed = 0
        self.tokens = 0  # tokens received up to the closing tag, tags included

    def push(self, text: str, tokens: int = 1) -> list[tuple[Kind, str]]:
        """Add ``text``, which has ``tokens`` tokens. Return the thinking and text that are now final, in order, without
        empty pieces."""
        self._pushed += tokens
        self._held += text
        pieces = [piece for piece in self._settle() if piece[1]]
        if self._state == "think":
            self.tokens = self._pushed
        return pieces

    def finish(self, rest: str = "") -> list[tuple[Kind, str]]:
        """Add the last piece. Return everything that is left, including text that was held back."""
        pieces = self.push(rest, 0)
        kind: Kind = "reasoning" if self._state == "think" else "text"
        held_text, self._held = self._held, ""
        if kind == "reasoning":
            held_text = self._thought(held_text.rstrip("\n"))
        return [*pieces, (kind, held_text)] if held_text else pieces

    def _thought(self, text: str) -> str:
        """Return ``text`` with the newlines that were held back before it. They are dropped if the thinking begins
        here."""
        if not text:
            return ""
        text = text.lstrip("\n") if self._fresh else "\n" * self._newlines + text
        self._fresh, self._newlines = False, 0
        return text

    def _settle(self) -> Iterator[tuple[Kind, str]]:
        # A piece of text can pass through several states, so do not stop after one.
        if self._state == "start":
            assert self._thinking is not None
            begins, tag = self._held.lstrip(), self._thinking.tags.open
            if len(self._held) - len(begins) > _BLANKS:
                self._state = "text"
            elif begins.startswith(tag):
                self._state, self._held = "think", begins[len(tag) :]
                self.tokens = self._pushed
            elif not tag.startswith(begins):  # the text cannot become the tag any more
                self._state = "text"
        if self._state == "think":
            assert self._thinking is not None
            thought, close, after = self._held.partition(tag := self._thinking.tags.close)
            if close:
                self._state = "answer"
                self._held = after
                self.tokens = self._pushed
                yield "reasoning", self._thought(thought.rstrip("\n"))
                self._fresh, self._newlines = False, 0
            else:
                # Hold back the end of the text if it may be the beginning of the closing tag.
                keep = len(thought) - next(n for n in range(len(tag), -1, -1) if thought.endswith(tag[:n]))
                self._held, settled = thought[keep:], thought[:keep].rstrip("\n")
                yield "reasoning", self._thought(settled)
                self._newlines += keep - len(settled)
        if self._state == "answer":
            self._held = self._held.lstrip("\n")
            self._state = "text" if self._held else "answer"
        if self._state == "text":
            settled, self._held = self._held, ""
            yield "text", settled

    @staticmethod
    def split(thinking: Thinking, answer: str) -> tuple[str, str]:
        """Return the thinking and the text of a whole answer."""
        pieces = Splitter(thinking).finish(answer)
        reasoning, text = ("".join(piece for kind, piece in pieces if kind == k) for k in ("reasoning", "text"))
        return reasoning, text
