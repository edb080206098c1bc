"""A checkpoint's tokenizer: encoding, decoding, chat templates, end-of-sequence ids. Knows nothing of tensors."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel, DecodeStream
from tokenizers.models import WordLevel

from fly import models
from fly.models.checkpoint import Checkpoint
from fly.models.config import CheckpointError
from fly.models.lengths import Lengths, byte_level
from fly.models.opening import open_checkpoint
from fly.models.thinking import ChatPrompt, Thinking
from fly.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch

__all__ = ["TextStream", "Tokenizer", "TooLong", "read_eos_ids"]

_LONG = 2**14  # this many characters take about ten milliseconds to encode
_TOGETHER = 1024  # texts to encode per call; their encodings take a hundred times the memory of the texts
_LISTS = {"tools": None, "documents": None}  # variables that are None unless they are given
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
            sources = {} if (chat_template := settings.get("chat_template")) is None else chat_template
            if isinstance(sources, list):  # several named templates
                sources = {entry["name"]: entry["template"] for entry in sources}
            sources = sources if isinstance(sources, dict) else {"default": sources}
            if bad := [source for source in sources.values() if not isinstance(source, str)]:
                raise TypeError(f"chat_template must be text, got {bad[0]!r}")
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{checkpoint.place_of('tokenizer_config.json')}: {error!r}") from error
        self.special_names = checkpoint.special_names
        # Templates in files of their own replace those in the settings.
        self.template_sources: dict[str, str] = checkpoint.templates() or sources

    @staticmethod
    def load(checkpoint: str | Path | Checkpoint) -> Tokenizer | None:
        """Return the checkpoint's tokenizer, or None if it has none."""
        checkpoint = open_checkpoint(checkpoint)
        return Tokenizer(checkpoint) if checkpoint.has_tokenizer else None

    @cached_property
    def templates(self) -> dict[str, models.chat.ChatTemplate]:
        """The chat templates by name."""
        return {name: models.chat.ChatTemplate(source, name) for name, source in self.template_sources.items()}

    def warm(self) -> None:
        """Build all lazy tables now, by encoding a short text."""
        self.check_length(self.decode(self.encode("a")), 100)
        with suppress(ValueError):  # there is no chat template, or it refuses this message
            self.apply_chat_template([{"role": "user", "content": "a"}])

    @cached_property
    def controls(self) -> dict[int, AddedToken]:
        """The special tokens by id, such as end-of-sequence and turn markers. They are never plain text."""
        return {i: token for i, token in self.raw.get_added_tokens_decoder().items() if token.special}

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids of ``controls``."""
        return frozenset(self.controls)

    def token_id(self, text: str) -> int:
        """Return the id of the token that spells ``text``. Raises ``ValueError`` unless ``text`` is a single token."""
        ids = self.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens of this vocabulary; a marker must be exactly one")
        return ids[0]

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return the token sequences of a word at the start of a text and inside a text."""
        encodings = {tuple(self.encode(text, add_special_tokens=False)) for text in (word, f" {word.lstrip()}")}
        return sorted(ids for ids in encodings if ids)

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
        [encoding] = _encoded(self.raw, [text], add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ``ids`` to text; special tokens are left out by default."""
        if len(ids) < _LONG:
            return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return self.raw.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]  # see _encoded

    def offsets(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the character offset at which each token of a prompt begins. A prompt of token ids is decoded with
        special tokens. Tokens that share a character begin at its start or end."""
        if isinstance(prompt, str):
            [encoding] = _encoded(self.raw, [prompt], add_special_tokens=True, offsets=True)
            return [start for start, _ in encoding.offsets]
        decoder = DecodeStream(skip_special_tokens=False)
        begins = list[int]()
        at = 0
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
        chat_template = self.templates.get("default")
        return None if chat_template is None else chat_template.source

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

        Only the template can write control tokens. A message or variable that spells one stays plain text, whatever
        the template does with it. The role of a message counts as the template's own if it is a name, so that a
        template may build control tokens from roles.

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

        Raises ``ValueError`` if the checkpoint has no template, or the template refuses the messages, shows nothing of
        one that has a text, does not read a variable, or makes it impossible to tell who wrote a control token;
        ``TooLong`` if there must be more than ``at_most`` tokens.
        """
        template = models.chat.pick(self.templates, chat_template, bool(tools))
        lists = {"tools": tools, "documents": documents}
        untrusted = {**{name: value for name, value in lists.items() if value is not None}, **variables}
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if unread := sorted(untrusted.keys() - template.variables):  # they would have no effect
            variable_names = sorted(template.variables - {"messages", "add_generation_prompt", *self.special_names})
            raise template.refusal(f"it does not read {unread}; it reads {variable_names}")
        trusted = {**self.special_names, **_LISTS, "add_generation_prompt": add_generation_prompt}
        text = template.render(models.chat.conversation(messages), trusted, untrusted, continue_final_message)
        if at_most is not None:
            self.check_length(text, at_most)
        ids = self._encode_rendered(text, template.name)
        if template.tags is None:
            return ChatPrompt(ids)
        last = text.rstrip()[-len(template.tags.open) :]
        by_template = set(models.traced.writers_of(last)) == {models.traced.TEMPLATE}
        begun = add_generation_prompt and last == template.tags.open and by_template
        return ChatPrompt(ids, Thinking(template.tags, begun))

    def render(self, messages: Iterable[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as text, for callers that cannot use token ids. If a message spells a control token, it
        becomes a real one when the text is encoded: use ``apply_chat_template`` for messages that you do not trust.
        Raises the same errors as ``apply_chat_template``."""
        trusted = {**self.special_names, **_LISTS, "add_generation_prompt": add_generation_prompt}
        template = models.chat.pick(self.templates, None, False)
        return str.__str__(template.render(models.chat.conversation(messages), trusted, {}))

    def _encode_rendered(self, rendered: models.traced.Traced, name: str) -> list[int]:
        """Encode what the template ``name`` rendered. Control tokens that it wrote become tokens; those that messages
        spell are encoded as plain text."""
        traced = models.traced
        text, writers = str.__str__(rendered), traced.writers_of(rendered)
        spelled = self._find_controls(text)
        controls = spelled
        if any(not set(writers[token.start : token.end]) <= {traced.TEMPLATE, traced.ROLE} for token in spelled):
            controls = self._find_controls(self._hide_messages(text, writers))
        if unsure := [token for token in controls if traced.UNKNOWN in writers[token.start : token.end]]:
            spelling = text[unsure[0].start : unsure[0].end]
            raise ValueError(
                f"the chat template {name!r} changes {spelling!r} so that nothing tells who wrote this control token, "
                "the template or a message"
            )
        controls = [token for token in controls if traced.TEMPLATE in writers[token.start : token.end]]
        if controls == spelled:
            [encoding] = _encoded(self.raw, [text])
            control_ids = [token.id for token in controls if token.id in self._spelled_ids]
            if [i for i in encoding.ids if i in self._spelled_ids] == control_ids:
                return encoding.ids
        begins = [0, *(token.until for token in controls)]
        ends = [*(token.since for token in controls), len(text)]
        first, *later_ids = self._encode_plain([text[begin:end] for begin, end in zip(begins, ends)])
        return first + [i for token, other in zip(controls, later_ids) for i in (token.id, *other)]

    def _hide_messages(self, text: str, writers: str) -> str:
        """Replace the characters that messages wrote, so that they spell no control token."""
        pieces, last = [], 0
        for run in models.traced.MESSAGES.finditer(writers):
            pieces += [text[last : run.start()], text[run.start() : run.end()].translate(self._hidden)]
            last = run.end()
        return "".join([*pieces, text[last:]])

    def _find_controls(self, text: str) -> list[_Control]:
        """Find the control tokens that the tokenizer reads in ``text``, in order."""
        [encoding] = _encoded(self._finder, [text], offsets=True)
        controls = []
        for token, (since, until) in zip(encoding.ids, encoding.offsets):
            if (kind := self.controls.get(token)) is not None:
                span = text[since:until]
                start = since + (len(span) - len(span.lstrip()) if kind.lstrip else 0)
                end = until - (len(span) - len(span.rstrip()) if kind.rstrip else 0)
                controls.append(_Control(token, start, end, since, until))
        return controls

    def _encode_plain(self, pieces: Sequence[str]) -> list[list[int]]:
        """Encode the pieces of a text as plain text. All but the first stand behind a special token: to some
        tokenizers the first word of a text is not like others."""
        texts = [pieces[0], *(self._mark + piece for piece in pieces[1:])]
        unique = list(dict.fromkeys(texts))  # turns often have the same text between them
        ids = {}
        for text, encoding in zip(unique, _encoded(self._plain, unique, offsets=True)):
            # Some models (Unigram, whole words) know control tokens as words. Cut these, so that they are no words.
            words = [(i, *span) for i, span in zip(encoding.ids, encoding.offsets) if i in self._spelled_ids]
            for i, start, end in words:
                if end - start == 1 and text[start] == self.controls[i].content:
                    raise ValueError(f"the tokenizer has no token for {text[start]!r} but a control token")
            if cuts := [start + 1 for _, start, end in words if end - start > 1]:
                parts = self._encode_plain([text[start:end] for start, end in pairwise([0, *cuts, len(text)])])
                ids[text] = [i for part in parts for i in part]
            else:
                ids[text] = encoding.ids
        return [ids[texts[0]], *(ids[text][1:] for text in texts[1:])]

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """The variables that the chat templates read, such as ``messages`` and ``tools``; empty without templates."""
        return frozenset[str]().union(*(template.variables for template in self.templates.values()))

    @cached_property
    def _spelled_ids(self) -> frozenset[int]:
        """The ids of control tokens that a text can only have by spelling them: all but that of unknown words."""
        unknown = self.special_names.get("unk_token"), getattr(self.raw.model, "unk_token", None)
        return frozenset(i for i, token in self.controls.items() if token.content not in unknown)

    @cached_property
    def _mark(self) -> str:
        """The text of a token of ``_plain``. No other text contains it."""
        return f"<{secrets.token_hex(16)}>"

    @cached_property
    def _plain(self) -> RawTokenizer:
        """The same tokenizer, except that it reads special tokens as plain text."""
        plain = RawTokenizer.from_str(self.raw.to_str())
        plain.encode_special_tokens = True
        plain.add_tokens([AddedToken(self._mark, normalized=False)])
        return plain

    @cached_property
    def _finder(self) -> RawTokenizer:
        """A tokenizer that finds the same added tokens and leaves the text between them as it is."""
        added = self.raw.get_added_tokens_decoder()
        between = {"": max(added, default=-1) + 1}
        finder = RawTokenizer(WordLevel(between | {token.content: i for i, token in added.items()}, ""))
        if self.raw.normalizer is not None:
            finder.normalizer = self.raw.normalizer
        finder.add_tokens(list(added.values()))
        finder.model = WordLevel(between, "")  # added tokens keep their ids
        return finder

    @cached_property
    def _hidden(self) -> _Hidden:
        return _Hidden("".join(token.content for token in self.controls.values()))


class _Control(NamedTuple):
    """A control token in a text. ``since`` and ``until`` also enclose the whitespace that it takes in."""

    id: int
    start: int
    end: int
    since: int
    until: int


class _Hidden(dict[int, str]):
    """Replaces characters, for ``str.translate``, by one that occurs in no control token. Words stay words, and
    whitespace stays whitespace, as some control tokens are found only beside or within them."""

    def __init__(self, spelled: str) -> None:
        super().__init__()
        letters, signs = map(chr, range(0x250, 0x2B0)), map(chr, range(0x2500, 0x2580))
        spaces = "\u2028\u2029\x0b\x0c\x85 \t\n\r"
        self._letter, self._sign, self._space = (
            next(c for c in choices if c not in spelled) for choices in (letters, signs, spaces)
        )

    def __missing__(self, code: int) -> str:
        character = chr(code)
        word = character.isalnum() or character == "_"
        self[code] = self._space if character.isspace() else self._letter if word else self._sign
        return self[code]


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
    ``finish`` returns the rest. Special tokens are left out, except those in ``shown``; but a stop string that spells
    whole special tokens is found where they come. With ``keep_stop`` the text ends after the stop string instead of
    before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), shown: Iterable[str] = (), keep_stop: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        shown = tuple(shown)
        self._options = tokenizer, self._stop, shown, keep_stop
        ids = {tokenizer.raw.token_to_id(text): text for text in shown}
        self._shown = {i: text for i, text in ids.items() if i in tokenizer.control_ids}
        controls = {i: token.content for i, token in tokenizer.controls.items() if i not in self._shown}
        # If a stop string spells any of them, all are held: one that it does not spell stands between those it does.
        spelled = any(text in each for text in controls.values() for each in self._stop)
        self._silent = controls if spelled else {}
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []  # the tokens of the decoder's last text, and those that it has read since
        self._settled = 0  # number of the former
        self._held = ""  # decoded, but perhaps the beginning of a stop string; with the texts of ``_silent`` tokens
        self._kinds = ""  # for each character of ``_held``: "." in the text, "(" a silent token's first, "-" its others
        self.text = ""  # all text given out so far
        self.stopped = False

    def fresh(self) -> TextStream:
        """Make a stream with the same options, at the start of a text."""
        return TextStream(*self._options)

    def push(self, token: int, stoppable: bool = True) -> str:
        """Add a token and return the text that is now final. Set ``stopped`` if a stop string is complete, unless the
        text is not ``stoppable`` yet."""
        self._hold(self._decode(token))
        if silent := self._silent.get(token):
            self._held += silent
            self._kinds += "(" + "-" * (len(silent) - 1)
        return self._settle(stoppable)

    def finish(self) -> str:
        """Return the rest of the text after the last token, unfinished characters included."""
        if self.stopped:
            return ""
        self._hold(self._unfinished())
        self._ids = []
        self._settled = 0
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
        if settled:  # the decoder forgets the tokens of the text before
            self._ids = self._ids[self._settled :]
            self._settled = len(self._ids)
        return settled

    def _restart(self) -> None:
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids = []
        self._settled = 0

    def _unfinished(self) -> str:
        """Return the characters whose last bytes are missing, as replacement marks."""
        settled, text = self._tokenizer.decode(self._ids[: self._settled]), self._tokenizer.decode(self._ids)
        if text.startswith(settled):
            return text[len(settled) :]
        return self._tokenizer.decode(self._ids[self._settled :])  # a bad byte has turned settled characters into marks

    def _hold(self, text: str) -> None:
        self._held += text
        self._kinds += "." * len(text)

    def _settle(self, stoppable: bool, keep: bool = True) -> str:
        """Return the held text up to a stop string. With ``keep``, also hold back what may be the beginning of one."""
        stops = self._stop if stoppable else ()
        if complete := [(at, len(stop), stop) for stop in stops if (at := self._find(stop)) is not None]:
            end, _, stop = min(complete)
            rest = len(self._held)
            self.stopped = True
        else:
            end = rest = min(map(self._find_beginning, stops), default=len(self._held)) if keep else len(self._held)
            stop = ""
        settled = "".join(c for c, kind in zip(self._held[:end], self._kinds) if kind == ".")
        settled += stop if self._keep_stop else ""
        self._held, self._kinds = self._held[rest:], self._kinds[rest:]
        self.text += settled
        return settled

    def _views(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield what is held with silent tokens, and without, each with the places of its characters in the former."""
        yield self._held, range(len(self._held))
        if "(" in self._kinds:
            places = [at for at, kind in enumerate(self._kinds) if kind == "."]
            yield "".join(self._held[at] for at in places), places

    def _find(self, stop: str) -> int | None:
        """Return the place at which ``stop`` begins in what is held, or None. It never has a part of a silent token."""
        begins = []
        for text, places in self._views():
            at = text.find(stop)
            while at >= 0 and "-" in (self._kinds[places[at]], self._kinds[places[at + len(stop) - 1] + 1 :][:1]):
                at = text.find(stop, at + 1)
            if at >= 0:
                begins.append(places[at])
        return min(begins, default=None)

    def _find_beginning(self, stop: str) -> int:
        """Return the place from which what is held may be the beginning of ``stop``."""
        begins = [len(self._held)]
        for text, places in self._views():
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                begin = places[len(text) - length]
                if text.endswith(stop[:length]) and self._kinds[begin] != "-":
                    begins.append(begin)
                    break
        return min(begins)
