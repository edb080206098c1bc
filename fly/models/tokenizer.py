"""Text in and out: the tokenizer of a checkpoint directory, its chat template and its ends. No tensors here."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import ValidationError
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from fly.errors import explain
from fly.models.config import CheckpointError, read_json
from fly.types import SamplingParams
from fly.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch

__all__ = ["TextStream", "Tokenizer", "byte_level", "read_eos_ids", "read_sampling_defaults"]

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a single byte, in vocabularies that fall back to them
_EXTENSIONS = ["jinja2.ext.loopcontrols"]  # of chat templates, as transformers has them


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE (GPT-2) writes bytes as characters: printable ones as they are, the others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def byte_level(piece: str) -> bytes:
    """Bytes of a token by its text in a byte-level vocabulary, just as the library's decoder reads it."""
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return piece.encode("utf-8")


def read_eos_ids(directory: str | Path, vocab_size: int) -> frozenset[int]:
    """End-of-sequence ids: ``generation_config.json`` before ``config.json``; one id or a list of them.

    Raises ``CheckpointError`` for an id outside the vocabulary.
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(directory) / name
        if (value := read_json(path).get("eos_token_id")) is not None:
            ids = value if isinstance(value, list) else [value]
            if bad := [i for i in ids if not isinstance(i, int) or not 0 <= i < vocab_size]:
                raise CheckpointError(f"{path}: eos_token_id {bad} is outside the vocabulary of {vocab_size} tokens")
            return frozenset(ids)
    return frozenset()


def read_sampling_defaults(directory: str | Path) -> SamplingParams:
    """What ``generation_config.json`` asks for where a request says nothing: greedy unless ``do_sample`` is true.

    Raises ``CheckpointError`` for values out of range.
    """
    path = Path(directory) / "generation_config.json"
    settings = read_json(path)
    if not settings.get("do_sample"):
        return SamplingParams(temperature=0.0)
    names = ("temperature", "top_k", "top_p", "min_p")
    try:
        return SamplingParams(**{name: settings[name] for name in names if settings.get(name) is not None})
    except ValidationError as error:
        raise CheckpointError(f"{path}: {explain(error)}") from error


class Tokenizer:
    """``tokenizer.json`` with the chat template of ``tokenizer_config.json`` (or ``chat_template.jinja``).

    Raises ``CheckpointError`` if a file is broken.
    """

    def __init__(self, directory: str | Path) -> None:
        directory = Path(directory)
        path = directory / "tokenizer.json"
        try:
            self.raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a readable tokenizer ({error})") from error
        settings = read_json(directory / "tokenizer_config.json")
        template_file = directory / "chat_template.jinja"
        try:
            template = settings.get("chat_template")
            if isinstance(template, list):  # several named templates; "default" is the conversation
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            if not isinstance(template, str | None):
                raise TypeError(f"chat_template must be text, got {template!r}")
            self._special_names = {
                name: token["content"] if isinstance(token, dict) else token
                for name, token in settings.items()
                if name in ("bos_token", "eos_token", "pad_token", "unk_token") and token is not None
            }
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{directory / 'tokenizer_config.json'}: {error!r}") from error
        self.template: str | None = template_file.read_text("utf-8") if template_file.exists() else template
        self._path = path

    @staticmethod
    def load(directory: str | Path) -> Tokenizer | None:
        """The directory's tokenizer, or None if it has no ``tokenizer.json``."""
        return Tokenizer(directory) if (Path(directory) / "tokenizer.json").exists() else None

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids of the special tokens: ends, turn markers and the like, never plain text."""
        return frozenset(i for i, token in self.raw.get_added_tokens_decoder().items() if token.special)

    def token_id(self, text: str) -> int:
        """The id of the one token whose text this is. Raises ``ValueError`` if it is none, or several."""
        ids = self.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens of this vocabulary; a marker must be exactly one")
        return ids[0]

    def vocabulary(self, size: int, device: torch.device | str = "cpu") -> Vocabulary:
        """What the ids of a model of ``size`` tokens stand for."""
        return Vocabulary(size, self._spelled, self.control_ids, self.token_id, device)

    def _spelled(self) -> list[bytes]:
        """What each id adds to a text."""
        pieces = {i: piece for piece, i in self.raw.get_vocab().items()}
        if isinstance(self.raw.decoder, ByteLevel):
            return [byte_level(pieces.get(i, "")) for i in range(max(pieces, default=-1) + 1)]
        before = self.encode("a", add_special_tokens=False)  # what is put before a word shows after another one
        start = self.decode(before, skip_special_tokens=False)
        ids = range(max(pieces, default=-1) + 1)
        after = self.raw.decode_batch([[*before, i] for i in ids], skip_special_tokens=False)
        spelled = []
        for i, text in zip(ids, after):
            byte = _BYTE.fullmatch(pieces.get(i, ""))
            text = text[len(start) :] if text.startswith(start) else pieces.get(i, "")
            spelled.append(bytes([int(byte[1], 16)]) if byte else text.encode() if i in pieces else b"")
        return spelled

    def check_fits(self, vocab_size: int) -> None:
        """Raise ``CheckpointError`` if some token has an id the model of ``vocab_size`` tokens has no row for."""
        if (largest := max(self.raw.get_vocab().values(), default=-1)) >= vocab_size:
            raise CheckpointError(f"{self._path}: has token id {largest}, the model only {vocab_size} tokens")

    def same_as(self, other: Tokenizer) -> bool:
        """Whether both give every token the same id."""
        return self.raw.get_vocab() == other.raw.get_vocab()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text; with the tokenizer's own begin token where it adds one."""
        return self.raw.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; special tokens are left out unless asked for."""
        return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Iterable[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, rendered by the checkpoint's template in a sandbox.

        Control tokens come from the template alone: what spells one in a message or a variable is plain text.

        Raises ``ValueError`` if the checkpoint has no template, or the template refuses the messages.
        """
        if self.template is None:
            raise ValueError("this checkpoint has no chat template; give the prompt as plain text")
        # Nobody can foresee the marks, so nobody can set or end one.
        marks = (nonce := secrets.token_hex(8)) + "(", ")" + nonce
        try:
            text = self._compiled_template.render(
                messages=self._marked(list(messages), marks),
                add_generation_prompt=add_generation_prompt,
                **{**self._special_names, **self._marked(variables, marks)},
            )
        except Exception as error:  # a template is a program: it fails as it likes
            raise ValueError(f"the chat template refused the messages: {error}") from error
        if marks[0] not in text:
            return self.encode(text, add_special_tokens=False)
        parts, tokenizers = re.split("|".join(map(re.escape, marks)), text), (self.raw, self._plain)
        encoded = [tokenizers[n % 2].encode(part, add_special_tokens=False) for n, part in enumerate(parts)]
        return [i for found in encoded for i in found.ids]

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """What the chat template looks at, such as ``messages`` and ``tools``; empty without a template."""
        tree = jinja2.Environment(extensions=_EXTENSIONS).parse(self.template or "")
        return frozenset(jinja2.meta.find_undeclared_variables(tree))

    @cached_property
    def _compiled_template(self) -> jinja2.Template:
        """The template as code, which takes a hundred times as long to make as to run."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        return environment.from_string(self.template or "")

    @cached_property
    def _plain(self) -> RawTokenizer:
        """The same tokenizer, to which special tokens are text like any other."""
        plain = RawTokenizer.from_str(self.raw.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _exact_specials(self) -> tuple[str, ...]:
        """The texts of the special tokens, where a text without any of them has none of the tokens either: not where
        they stand for other spellings too, or for what the vocabulary lacks."""
        tokens = [token for token in self.raw.get_added_tokens_decoder().values() if token.special]
        unknown = self._special_names.get("unk_token"), getattr(self.raw.model, "unk_token", None)
        vague = any(token.normalized or token.content in unknown for token in tokens)
        return () if vague else tuple(token.content for token in tokens)

    def _marked(self, value: Any, marks: tuple[str, str]) -> Any:
        """``value`` with marks around everything in its texts that would be read as a special token."""
        if isinstance(value, str):
            if self._exact_specials and not any(text in value for text in self._exact_specials):
                return value
            found = self.raw.encode(value, add_special_tokens=False)
            spans = [span for token, span in zip(found.ids, found.offsets) if token in self.control_ids]
            for start, end in reversed(spans):
                value = f"{value[:start]}{marks[0]}{value[start:end]}{marks[1]}{value[end:]}"
            return value
        if isinstance(value, dict):
            return {self._marked(key, marks): self._marked(item, marks) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, marks) for item in value]
        return value


class TextStream:
    """Text of a growing list of tokens: never half a character, and cut exactly before the first stop string.

    ``push`` gives the text that is settled by one more token: characters that are whole and cannot be the
    beginning of a stop string. ``finish`` gives the rest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []  # what the decoder has seen,
        self._decoded = 0  # and how many characters of it it has settled
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self.text = ""  # all that was given out
        self.stopped = False

    def push(self, token: int, stoppable: bool = True) -> str:
        """Settled text after ``token``. Sets ``stopped`` when a stop string is complete (if ``stoppable``)."""
        self._held += self._decode(token)
        return self._settle(stoppable)

    def finish(self) -> str:
        """What was held back when no more tokens come: the rest of the text, unfinished characters included."""
        if self.stopped:
            return ""
        self._held += self._unfinished()
        self._ids, self._decoded = [], 0
        return self._settle(stoppable=True, keep=False)  # what came last may have completed a stop string

    def _decode(self, token: int) -> str:
        """What ``token`` settles of the decoded text."""
        try:
            settled = self._decoder.step(self._tokenizer.raw, token) or ""
        except Exception:  # bare, from the library
            # Where single bytes are tokens (``<0xF0>``), a run of bytes with one bad byte decodes to replacement
            # marks only, which takes back characters that were already given out. Start afresh after them.
            before = self._unfinished()
            self._decoder, self._ids, self._decoded = DecodeStream(skip_special_tokens=True), [], 0
            return before + self._decode(token)
        self._ids.append(token)
        self._decoded += len(settled)
        return settled

    def _unfinished(self) -> str:
        """Characters the decoder keeps to itself because bytes are missing, as replacement marks."""
        return self._tokenizer.decode(self._ids)[self._decoded :]

    def _settle(self, stoppable: bool, keep: bool = True) -> str:
        """Give out what is held, up to a stop string, or what may be the beginning of one (if that is to be kept)."""
        stops = self._stop if stoppable else ()
        if found := [at for stop in stops if (at := self._held.find(stop)) >= 0]:
            self.stopped, end = True, min(found)
        else:
            end = len(self._held) - (max(map(self._overlap, stops), default=0) if keep else 0)
        settled, self._held = self._held[:end], "" if found else self._held[end:]
        self.text += settled
        return settled

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
