"""A checkpoint's tokenizer: encoding, decoding, chat templates, end-of-sequence ids. Knows nothing of tensors."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from fly.models.chat import ChatPrompt, ChatTemplate, Thinking, conversation, pick
from fly.models.checkpoint import Checkpoint
from fly.models.config import CheckpointError
from fly.models.lengths import Lengths, byte_level
from fly.models.opening import open_checkpoint
from fly.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch

__all__ = ["TextStream", "Tokenizer", "TooLong", "read_eos_ids"]

_LONG = 2**14  # this many characters take about ten milliseconds to encode
_TOGETHER = 1024  # texts to encode per call; their encodings take a hundred times the memory of the texts
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a token for a single byte, in vocabularies that fall back to bytes


def read_eos_ids(checkpoint: str | Path | Checkpoint, vocab_size: int) -> frozenset[int]:
    """Read the end-of-sequence ids of a checkpoint from ``generation_config.json``, or else from ``config.json``.

    Raises ``CheckpointError`` for an id outside the vocabulary of ``vocab_size`` tokens.
    """
    checkpoint = open_checkpoint(checkpoint)
    for name in ("generation_config.json", "config.json"):
        if (value := checkpoint.settings(name).get("eos_token_id")) is not None:
            ids = value if isinstance(value, list) else [value]
            if bad := [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]:
                where = checkpoint.place_of(name)
                raise CheckpointError(f"{where}: eos_token_id {bad} is outside the vocabulary of {vocab_size} tokens")
            return frozenset(ids)
    return frozenset()


class TooLong(ValueError):
    """A text has more tokens than allowed, whatever they are."""


class Tokenizer:
    """A checkpoint's tokenizer, ``raw``, with the chat template from ``tokenizer_config.json`` or
    ``chat_template.jinja``.

    Raises ``CheckpointError`` if the checkpoint has no tokenizer, or a file is broken.
    """

    def __init__(self, checkpoint: str | Path | Checkpoint) -> None:
        checkpoint = open_checkpoint(checkpoint)
        if not checkpoint.has_tokenizer:
            raise CheckpointError(
                f"{checkpoint.place_of('tokenizer.json')}: not found; this checkpoint has no tokenizer"
            )
        self.raw = checkpoint.raw_tokenizer()
        self.raw.no_padding()  # padding and truncation are for training; prompts stay whole
        self.raw.no_truncation()
        settings, self._source = (
            checkpoint.settings("tokenizer_config.json"),
            checkpoint.place_of("tokenizer.json"),
        )
        try:
            sources = {} if (given := settings.get("chat_template")) is None else given
            if isinstance(sources, list):  # several named templates
                sources = {entry["name"]: entry["template"] for entry in sources}
            sources = sources if isinstance(sources, dict) else {"default": sources}
            if bad := [source for source in sources.values() if not isinstance(source, str)]:
                raise TypeError(f"chat_template must be text, got {bad[0]!r}")
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{checkpoint.place_of('tokenizer_config.json')}: {error!r}") from error
        self.special_names = checkpoint.special_names
        # Templates in files of their own replace those in the settings.
        self.templates = {name: ChatTemplate(source) for name, source in (checkpoint.templates() or sources).items()}

    @staticmethod
    def load(checkpoint: str | Path | Checkpoint) -> Tokenizer | None:
        """Return the checkpoint's tokenizer, or None if it has none."""
        checkpoint = open_checkpoint(checkpoint)
        return Tokenizer(checkpoint) if checkpoint.has_tokenizer else None

    def warm(self) -> None:
        """Build all lazy tables now, by encoding a short text."""
        self.check_length(self.decode(self.encode("a")), 100)
        with suppress(ValueError):  # there is no chat template, or it refuses this message
            self.apply_chat_template([{"role": "user", "content": "a"}])

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids of the special tokens, such as end-of-sequence and turn markers. They are never plain text."""
        return frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)

    def token_id(self, text: str) -> int:
        """Return the id of the token that spells ``text``. Raises ``ValueError`` unless ``text`` is a single token."""
        ids = self.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens of this vocabulary; a marker must be exactly one")
        return ids[0]

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return the token sequences of a word at the start of a text and inside a text."""
        found = {tuple(self.encode(text, add_special_tokens=False)) for text in (word, f" {word.lstrip()}")}
        return sorted(ids for ids in found if ids)

    def vocabulary(self, size: int, device: torch.device | str = "cpu") -> Vocabulary:
        """Return the meaning of the token ids of a model with ``size`` tokens."""
        plain = partial(self.encode, add_special_tokens=False)
        return Vocabulary(size, self._spelled, self.control_ids, self.token_id, device, plain)

    def _spelled(self) -> list[bytes]:
        """Return the bytes that each id adds to a text."""
        pieces = {i: piece for piece, i in self.raw.get_vocab().items()}
        ids = range(max(pieces, default=-1) + 1)
        if isinstance(self.raw.decoder, ByteLevel):
            return [byte_level(pieces.get(i, "")) for i in ids]
        # Decode each id after an "a", to see the space before words.
        before = self.encode("a", add_special_tokens=False)
        start = self.decode(before, skip_special_tokens=False)
        after = self.raw.decode_batch([[*before, i] for i in ids], skip_special_tokens=False)
        spelled = []
        for i, text in zip(ids, after):
            byte = _BYTE.fullmatch(pieces.get(i, ""))
            text = text[len(start) :] if text.startswith(start) else pieces.get(i, "")
            spelled.append(bytes([int(byte[1], 16)]) if byte else text.encode() if i in pieces else b"")
        return spelled

    def check_fits(self, vocab_size: int) -> None:
        """Raise ``CheckpointError`` if a token's id is too large for a model with ``vocab_size`` tokens."""
        if (largest := max(self.raw.get_vocab().values(), default=-1)) >= vocab_size:
            raise CheckpointError(f"{self._source}: has token id {largest}, but the model has only {vocab_size} tokens")

    def same_as(self, other: Tokenizer) -> bool:
        """Whether both tokenizers give every token the same id."""
        return self.raw.get_vocab() == other.raw.get_vocab()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode plain text. By default the tokenizer adds its begin token, if it has one."""
        [found] = _encoded(self.raw, [text], add_special_tokens)
        return found.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ``ids`` to text; special tokens are left out by default."""
        if len(ids) < _LONG:
            return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.raw.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]  # see _encoded

    def offsets(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the character offset at which each token of a prompt begins. A prompt of token ids is decoded with
        special tokens. Tokens that share a character begin at its start or end."""
        if isinstance(prompt, str):
            [found] = _encoded(self.raw, [prompt], add_special_tokens=True, offsets=True)
            return [start for start, _ in found.offsets]
        decoder, begins, at = DecodeStream(skip_special_tokens=False), list[int](), 0
        for token in prompt:
            begins.append(at)
            try:
                at += len(decoder.step(self.raw, token) or "")
            except Exception:  # see TextStream
                decoder = DecodeStream(skip_special_tokens=False)
        return begins

    def check_length(self, text: str, most: int) -> None:
        """Raise ``TooLong`` if ``text`` is so long that it must have more than ``most`` tokens. This looks only at its
        length, since encoding takes time."""
        if (least := self._lengths.min_tokens(text)) > most:
            raise TooLong(f"{len(text)} characters are {least} tokens or more; at most {most} fit")

    @cached_property
    def _lengths(self) -> Lengths:
        return Lengths(self.raw)

    @property
    def template(self) -> str | None:
        """The source of the default chat template, or None."""
        found = self.templates.get("default")
        return None if found is None else found.source

    def apply_chat_template(
        self,
        messages: Iterable[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        at_most: int | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> ChatPrompt:
        """Render a conversation with the checkpoint's template, in a sandbox, and encode it.

        Only the template can produce control tokens. A message or variable that spells one stays plain text.

        Args:
            messages: dictionaries with a role and a content, and whatever else the template reads.
            add_generation_prompt: whether to open the answer's turn.
            tools: JSON schemas of functions that the model may call.
            documents: documents for templates that answer from them.
            chat_template: the name of a template, if there are several. None means ``tool_use`` if there are tools and
                such a template, otherwise ``default``.
            continue_final_message: whether the last message's turn stays open, so that the answer continues it.
            at_most: the most tokens allowed. This limit is checked before anything is encoded.
            variables: other variables of the template, such as ``enable_thinking``.

        Raises ``ValueError`` if the checkpoint has no template, the template refuses the messages, or it does not read
        a variable; ``TooLong`` if there must be more than ``at_most`` tokens.
        """
        template = pick(self.templates, chat_template, bool(tools))
        lists = {"tools": tools, "documents": documents}
        given = {**{name: value for name, value in lists.items() if value is not None}, **variables}
        # Enclose text that must stay plain in two marks. A message cannot contain them, since they are unpredictable.
        marks = (nonce := secrets.token_hex(8)) + "(", ")" + nonce
        listed = conversation(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError("continue_final_message and add_generation_prompt exclude each other")
            if not listed or not isinstance(content := listed[-1].get("content"), str) or not content:
                raise ValueError("continue_final_message: the last message has no text to continue")
            listed[-1]["content"] = content + (end := secrets.token_hex(8))  # the rendered text is cut there
        # Render. Refuse a variable that the template does not read, since it would have no effect.
        try:
            if unread := sorted(given.keys() - template.variables):
                known = sorted(template.variables - {"messages", "add_generation_prompt", *self.special_names})
                raise ValueError(f"it does not read {unread}; it reads {known}")
            text = template.render(
                {**self.special_names, **lists, "add_generation_prompt": add_generation_prompt}
                | self._marked({**given, "messages": listed}, marks)
            )
            if continue_final_message:
                text, open_turn, _ = text.rpartition(end)
                if not open_turn:
                    raise ValueError("it does not show the last message, which the answer would continue")
        except Exception as error:  # a template is a program, so it may raise any error
            raise ValueError(f"the chat template refused the messages: {error}") from error
        # Encode, and note how the answer may begin.
        ids = self._encode_marked(text, marks, at_most)
        begun = add_generation_prompt and template.tags is not None and text.rstrip().endswith(template.tags.open)
        return ChatPrompt(ids, None if template.tags is None else Thinking(template.tags, begun))

    def render(self, messages: Iterable[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as text, for callers that cannot use token ids. If a message spells a control token, it
        becomes a real one when the text is encoded: use ``apply_chat_template`` for messages that you do not trust.
        Raises the same errors as ``apply_chat_template``."""
        template = pick(self.templates, None, False)
        given = {"messages": conversation(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return template.render({**self.special_names, "tools": None, "documents": None, **given})
        except Exception as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error

    def _encode_marked(self, text: str, marks: tuple[str, str], at_most: int | None) -> list[int]:
        """Encode a rendered template. Text between marks comes from messages, and is encoded as plain text."""
        if at_most is not None:
            self.check_length(text.replace(marks[0], "").replace(marks[1], ""), at_most)
        parts, last = [], 0
        for mark in re.finditer("|".join(map(re.escape, marks)), text):  # re.split would block all other threads
            parts.append(text[last : mark.start()])
            last = mark.end()
        parts.append(text[last:])
        found: list[list[int]] = [[] for _ in parts]
        for first, tokenizer in enumerate((self.raw, self._plain)):
            texts = list(dict.fromkeys(parts[first::2]))  # encode each text once: a few special tokens occur often
            ids = dict(zip(texts, (encoding.ids for encoding in _encoded(tokenizer, texts))))
            found[first::2] = [ids[text] for text in parts[first::2]]
        return [i for ids_of_part in found for i in ids_of_part]

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """The variables that the chat templates read, such as ``messages`` and ``tools``; empty without templates."""
        return frozenset[str]().union(*(template.variables for template in self.templates.values()))

    @cached_property
    def _plain(self) -> RawTokenizer:
        """The same tokenizer, except that it reads special tokens as plain text."""
        plain = RawTokenizer.from_str(self.raw.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _spelled_special(self) -> re.Pattern[str] | None:
        """A pattern that matches the texts of special tokens, longest first like the tokenizer. None if the tokenizer
        also reads other spellings or unknown text as special tokens, so that a pattern is not enough."""
        tokens = [token for token in self.raw.get_added_tokens_decoder().values() if token.special]
        unknown = self.special_names.get("unk_token"), getattr(self.raw.model, "unk_token", None)
        if any(token.normalized or token.single_word or token.content in unknown for token in tokens) or not tokens:
            return None
        return re.compile("|".join(sorted((re.escape(token.content) for token in tokens), key=len, reverse=True)))

    def _marked(self, value: Any, marks: tuple[str, str]) -> Any:
        """Put marks around every part of the texts in ``value`` that the tokenizer would read as a special token."""
        if isinstance(value, str):
            if self._spelled_special is not None:
                return self._spelled_special.sub(lambda found: f"{marks[0]}{found[0]}{marks[1]}", value)
            [found] = _encoded(self.raw, [value], offsets=True)
            spans = [span for token, span in zip(found.ids, found.offsets) if token in self.control_ids]
            pieces, last = [], 0
            for start, end in spans:
                pieces += [value[last:start], marks[0], value[start:end], marks[1]]
                last = end
            return "".join([*pieces, value[last:]])
        if isinstance(value, dict):
            return {self._marked(key, marks): self._marked(item, marks) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, marks) for item in value]
        return value


def _encoded(
    tokenizer: RawTokenizer, texts: list[str], add_special_tokens: bool = False, offsets: bool = False
) -> Iterator[Encoding]:
    """Encode each text. Long texts use the library's batch calls, which alone release the interpreter lock. Short texts
    do not, because the library warns at every fork after a batch call. Raises ``ValueError`` for half a surrogate
    pair."""
    try:
        if sum(map(len, texts)) < _LONG:
            for text in texts:
                yield tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return
        encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
        for start in range(0, len(texts), _TOGETHER):
            yield from encode(texts[start : start + _TOGETHER], add_special_tokens=add_special_tokens)
    except TypeError:  # the library's own error names no cause
        raise ValueError("the text has half a surrogate pair, so it is no Unicode") from None


class TextStream:
    """Turns tokens into text as they arrive. It returns only whole characters, up to a stop string.

    ``push`` takes one token and returns the text that is final, which means that no stop string can begin in it.
    ``finish`` returns the rest. Special tokens are left out, except those in ``shown``. With ``keep_stop`` the text
    ends after the stop string instead of before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), shown: Iterable[str] = (), keep_stop: bool = False
    ) -> None:
        self._given = tokenizer, tuple(stop), tuple(shown), keep_stop
        self._tokenizer, self._stop, shown, self._keep_stop = self._given
        ids = {tokenizer.raw.token_to_id(text): text for text in shown}
        self._shown = {i: text for i, text in ids.items() if i in tokenizer.control_ids}
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []  # tokens that the decoder has read
        self._decoded = 0  # number of final characters in their text
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self.text = ""  # all text given out so far
        self.stopped = False

    def fresh(self) -> TextStream:
        """Make a stream with the same options, at the start of a text."""
        return TextStream(*self._given)

    def push(self, token: int, stoppable: bool = True) -> str:
        """Add a token and return the text that is now final. Set ``stopped`` if a stop string is complete, unless the
        text is not ``stoppable`` yet."""
        self._held += self._decode(token)
        return self._settle(stoppable)

    def finish(self) -> str:
        """Return the rest of the text after the last token, unfinished characters included."""
        if self.stopped:
            return ""
        self._held += self._unfinished()
        self._ids, self._decoded = [], 0
        return self._settle(stoppable=True, keep=False)  # the rest may complete a stop string

    def _decode(self, token: int) -> str:
        """Return the characters that ``token`` completes."""
        if token in self._shown:
            before = self._unfinished()
            self._restart()
            return before + self._shown[token]
        try:
            settled = self._decoder.step(self._tokenizer.raw, token) or ""
        except Exception:  # the library raises bare Exception
            # In vocabularies with byte tokens (``<0xF0>``), one bad byte turns a whole run of bytes into replacement
            # marks, which contradicts characters that were already given out. Start a new decoder after them.
            before = self._unfinished()
            self._restart()
            return before + self._decode(token)
        self._ids.append(token)
        self._decoded += len(settled)
        return settled

    def _restart(self) -> None:
        self._decoder, self._ids, self._decoded = DecodeStream(skip_special_tokens=True), [], 0

    def _unfinished(self) -> str:
        """Return the characters whose last bytes are missing, as replacement marks."""
        return self._tokenizer.decode(self._ids)[self._decoded :]

    def _settle(self, stoppable: bool, keep: bool = True) -> str:
        """Return the held text up to a stop string. With ``keep``, also hold back what may be the beginning of one."""
        stops = self._stop if stoppable else ()
        if found := [(at, len(stop)) for stop in stops if (at := self._held.find(stop)) >= 0]:
            at, length = min(found)
            self.stopped, end = True, at + length if self._keep_stop else at
        else:
            end = len(self._held) - (max(map(self._overlap, stops), default=0) if keep else 0)
        settled, self._held = self._held[:end], "" if found else self._held[end:]
        self.text += settled
        return settled

    def _overlap(self, stop: str) -> int:
        """Return the length of the longest suffix of the held text that is a prefix of ``stop``."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:n])), 0)
