"""Structured output: which tokens a JSON schema, a regular expression or a grammar allows at each place of a draft.

llguidance compiles and follows grammars. Knows nothing of models, caches, policies or strategies.

Shape legend: J places of a row's draft (0 follows the row's last token, j + 1 the drafted token j), V vocabulary,
W bytes of a mask.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict, abc
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from torch.nn.functional import embedding

from fly.models.tokenizer import Tokenizer
from fly.ops import common_prefix, nothing_left
from fly.runner.forms import compile_form, explain_failure
from fly.types import SamplingParams, StructuredOutput

__all__ = ["LONGEST", "Grammars", "Matcher", "StructuredError"]

_MASKS = 256  # masks kept for a row, more than any draft has tokens
LONGEST = 256 << 10  # bytes of a schema, an expression or a grammar
# The library does not say how much memory a compiled grammar takes, and a grammar takes more while it is used. So each
# is counted with the most that was measured under the limits of forms.py, rounded up: 26 MB, and 60 bytes for each
# byte of its source.
_KEPT = 1 << 30
_BYTES, _BYTES_A_BYTE = 32 << 20, 64


@cache
def _bias_of_byte(device: torch.device) -> Tensor:
    """Return a table [256, 8] that has for each bit of a byte, lowest first, 0 if it is set, and else -infinity."""
    rows = [[0.0 if byte >> bit & 1 else -torch.inf for bit in range(8)] for byte in range(256)]
    return torch.tensor(rows, device=device)


Vet = Callable[[str, str], None]
_Key = tuple[str, StructuredOutput]  # the salt of a request, and its form


class StructuredError(ValueError):
    """The form that a request asks for cannot be used: an error of the request."""


class Grammars:
    """The grammars that requests ask for, over one vocabulary.

    Compiled grammars are kept while there is room for them (1 GiB). Only requests with the same ``cache_salt`` share a
    grammar: others could tell by the time taken that somebody had asked for it. A grammar that is refused, or exceeds
    the limits while it is followed, is not kept.

    ``matcher`` and ``warm`` may be called from any thread. Their ``vet`` gets the kind and the source of a form before
    it is compiled, and may refuse it (``ValueError`` with the reason).

    Args:
        tokenizer: spells the vocabulary.
        vocab_size: width of the model's logits. Ids without a text in the tokenizer are never allowed.
        eos_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self._kept: OrderedDict[_Key, LLMatcher] = OrderedDict()  # least recently used first
        self._size = 0  # bytes of the kept grammars
        self._looking = threading.Lock()

    def warm(self, vet: Vet | None = None) -> None:
        """Read the vocabulary and compile a first form, so that the first request need not wait for that."""
        with suppress(ValueError):  # a tokenizer of an unknown kind: each request gets this error
            self.matcher(SamplingParams(structured=StructuredOutput(json_object=True)), vet)

    def matcher(self, params: SamplingParams, vet: Vet | None = None) -> Matcher:
        """Make a matcher for one request, at the start of its text.

        The text may end with an end-of-sequence token (under ``ignore_eos`` only where nothing else may follow), or
        with a stop token of the request that is a control token.

        Raises ``ValueError`` with the reason if the grammar cannot be used: it is wrong or unsupported, the tokenizer
        is of an unknown kind, or there is no token to end with.
        """
        assert params.structured is not None
        control_stop_ids = self.tokenizer.control_ids.intersection(params.stop_token_ids)
        if not (self.eos_ids or control_stop_ids):
            raise ValueError(
                "structured output ends with an end-of-sequence token, and this model names none; give a special token "
                "in stop_token_ids"
            )
        key = (params.cache_salt if params.structured.source else "", params.structured)
        refuse = partial(self._forget, key)
        if (start := self._known(key)) is None:
            start = self._compile(params.structured, vet)
            self._keep(key, start)
        if params.ignore_eos:
            return Matcher(start, refuse, self._never, control_stop_ids - self.eos_ids, self.eos_ids)
        return Matcher(start, refuse, self._never, self.eos_ids | control_stop_ids)

    @property
    def spelling(self) -> dict[str, Any]:
        """The keyword arguments of the library's tokenizer."""
        eos = sorted(self.eos_ids or self.tokenizer.control_ids)
        return {"tokenizer": self.tokenizer.raw.to_str(), "n_vocab": self.vocab_size, "eos_token": eos}

    def _known(self, key: _Key) -> LLMatcher | None:
        with self._looking:
            if (start := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
            return start

    def _keep(self, key: _Key, start: LLMatcher) -> None:
        self._forget(key)  # another thread may have compiled it meanwhile
        with self._looking:
            self._kept[key] = start
            self._size += _size(key[1])
            while self._size > _KEPT:
                (_, oldest), _ = self._kept.popitem(last=False)
                self._size -= _size(oldest)

    def _forget(self, key: _Key) -> None:
        with self._looking:
            if self._kept.pop(key, None) is not None:
                self._size -= _size(key[1])

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        try:
            return LLTokenizer(**self.spelling)
        except Exception as error:  # the library may raise anything
            raise ValueError(f"structured output cannot read this tokenizer: {error}") from error

    @property
    def _never(self) -> frozenset[int]:
        """The tokens that the library treats as ends. Each may end a text, or is allowed nowhere."""
        return frozenset(self._vocabulary.eos_tokens)

    def _compile(self, structured: StructuredOutput, vet: Vet | None) -> LLMatcher:
        source = structured.source
        label = f"structured {structured.kind} {source if len(source) <= 60 else source[:57] + '...'!r}"
        if (size := len(source.encode("utf-8", "replace"))) > LONGEST:
            raise ValueError(f"{label} has {size} bytes; at most {LONGEST} are compiled")
        vocabulary = self._vocabulary
        try:
            if vet is not None:
                vet(structured.kind, source)
            matcher = compile_form(vocabulary, structured.kind, source)
        except ValueError as error:
            raise ValueError(f"{label} cannot be used: {error}") from None
        for warning in matcher.get_grammar_warnings():
            warnings.warn(f"{label}: {warning}", stacklevel=2)
        return matcher


def _size(structured: StructuredOutput) -> int:
    """Return the most bytes that a compiled grammar takes."""
    return _BYTES + _BYTES_A_BYTE * len(structured.source)


def _allow(bits: bytearray, tokens: Iterable[int]) -> None:
    for token in tokens:
        bits[token // 8] |= 1 << token % 8


class Matcher:
    """Follows the text of one request and of its forks, and computes which tokens may come next.

    It keeps the last text that it was asked about and the masks along it, so that masks computed while a draft model
    drafted are not computed again when the target verifies.

    Args:
        start: the compiled grammar at its start; it is copied.
        refuse: called if the grammar cannot be followed to its end.
        never: tokens that are not text, and are never allowed.
        ends: tokens that end the text, and are allowed exactly where the grammar may end.
        last_ends: further tokens that end the text, allowed only where the grammar may end and no other token may
            follow.
    """

    def __init__(
        self,
        start: LLMatcher,
        refuse: Callable[[], None],
        never: frozenset[int],
        ends: frozenset[int],
        last_ends: frozenset[int] = frozenset(),
    ) -> None:
        self._start = start
        self._matcher = start.deep_copy()
        self._refuse = refuse
        self._never = never
        self._ends = ends
        self._last_ends = last_ends
        self._no_text = never | ends | last_ends
        self._text: list[int] = []  # what the matcher has consumed
        self._masks: dict[int, tuple[bytearray, str]] = {}  # by length of text
        self._stuck: dict[int, str] = {}  # in the last call, places where nothing can follow, and why
        self._wrong = ""  # why the grammar cannot be followed, once this is known

    def fresh(self) -> Matcher:
        """Make a matcher of the same form for another request, at the start of its text."""
        return Matcher(self._start, self._refuse, self._never, self._ends, self._last_ends)

    def close(self) -> None:
        """Free what this matcher holds. It must not be used afterwards."""
        self._masks.clear()
        del self._start, self._matcher

    def constrain(
        self,
        logits_JV: Tensor,
        text: list[int],
        draft: list[int],
        parents: abc.Sequence[int],
        raw_JV: Tensor | None = None,
        numbers: Callable[[list[int] | Tensor], Tensor] | None = None,
    ) -> None:
        """Set to -inf, in place, the logits of tokens that the grammar does not allow after ``text`` or after a drafted
        token.

        If earlier bans (bad words, ends before ``min_tokens``) forbid everything that the grammar allows, the grammar
        wins: ``raw_JV`` are the logits without those bans (None if there are none). Places after a forbidden token can
        never be reached, and stay as they are. ``draft`` and ``parents`` are as in ``Draft``. J is at least 1 + the
        number of drafted tokens. ``numbers`` puts numbers on the logits' device.
        """
        masks = sorted(self._along(text, draft, parents).items())
        if not masks:
            return
        to_tensor, device = numbers or partial(torch.as_tensor, device=logits_JV.device), logits_JV.device
        bits_JW = torch.frombuffer(bytearray().join(bits for _, bits in masks), dtype=torch.uint8).view(len(masks), -1)
        bias_JV = embedding(to_tensor(bits_JW).int(), _bias_of_byte(device)).flatten(1)[:, : logits_JV.shape[1]]
        places = [place for place, _ in masks]
        # Usually the whole chain is allowed, and nothing is copied.
        at = slice(len(places)) if places[-1] == len(places) - 1 else to_tensor(places)
        logits_JV[at] += bias_JV
        if raw_JV is not None:
            logits_JV[at] = torch.where(nothing_left(logits_JV[at]), raw_JV[at] + bias_JV, logits_JV[at])

    def masks(
        self, text: list[int], draft: list[int], parents: abc.Sequence[int] | None = None
    ) -> dict[int, bytearray]:
        """Return which tokens may follow ``text`` (key 0) and each drafted token j (key j + 1), a bit for each token.
        There is no entry for a forbidden drafted token, or for those after it. ``parents`` is as in ``Draft``."""
        return self._along(text, draft, range(-1, len(draft) - 1) if parents is None else parents)

    def check(self, place: int) -> None:
        """Raise ``StructuredError`` if the text up to ``place`` of the last draft is incomplete and nothing can follow:
        the vocabulary cannot spell what must follow, or the grammar exceeds the library's limits."""
        if place in self._stuck:
            raise StructuredError(f"structured output cannot go on: {self._stuck[place]}")

    def _along(self, text: list[int], draft: list[int], parents: abc.Sequence[int]) -> dict[int, bytearray]:
        """Return the mask of each place that the grammar can reach, branch by branch."""
        self._stuck = {}
        if not self._follow(text):
            self._stuck[0] = self._wrong or f"the {len(text)} tokens so far are no beginning of such a text"
            return {}
        after: list[list[int]] = [[] for _ in range(len(draft) + 1)]
        for node, parent in enumerate(parents):
            after[parent + 1].append(node)
        masks = {}
        waiting = [(-1, len(text))]
        while waiting:
            node, depth = waiting.pop()
            if node < 0 or self._step(depth - 1, draft[node]):
                masks[node + 1], wrong = self._mask(depth)
            elif wrong := self._wrong:
                masks[node + 1] = self._nothing()
            else:
                continue
            if wrong:  # a draft ends here; if the target's own text comes here, ``check`` raises
                self._stuck[node + 1] = f"{wrong} after {depth} tokens"
            waiting += [(child, depth + 1) for child in after[node + 1]]
        return masks

    def _follow(self, text: list[int]) -> bool:
        """Make sure that the matcher has consumed at least ``text``. Return False if the grammar forbids this text."""
        shared = common_prefix(self._text, text)
        return all(self._step(depth, token) for depth, token in enumerate(text[shared:], start=shared))

    def _step(self, depth: int, token: int) -> bool:
        """Consume ``token`` after the first ``depth`` tokens. Return False if the grammar forbids it there."""
        if depth < len(self._text) and self._text[depth] == token:
            return True
        if token in self._no_text:
            return False
        self._roll_back(depth)
        if self._matcher.try_consume_tokens([token]) == 1:
            self._text.append(token)
            return True
        if self._matcher.is_error():
            self._give_up()
        return False

    def _mask(self, depth: int) -> tuple[bytearray, str]:
        """Return which tokens may follow the first ``depth`` tokens, one bit each; and the reason if none may."""
        if (mask := self._masks.get(depth)) is None:
            self._roll_back(depth)
            bits = bytearray(self._matcher.compute_bitmask())
            may_end = self._matcher.is_accepting()
            wrong = ""
            if self._matcher.is_error():
                self._give_up()
                bits = self._nothing()
                may_end = False
                wrong = self._wrong
            for token in () if wrong else self._no_text:
                bits[token // 8] &= ~(1 << token % 8)
            if may_end:
                _allow(bits, self._ends)
                if not any(bits):
                    _allow(bits, self._last_ends)
            mask = self._masks[depth] = bits, wrong
            self._masks.pop(depth - _MASKS, None)
        return mask

    def _roll_back(self, depth: int) -> None:
        """Roll back to the first ``depth`` consumed tokens."""
        if (more := len(self._text) - depth) > 0:
            self._matcher.rollback(more)
            del self._text[depth:]
            self._masks = {length: mask for length, mask in self._masks.items() if length <= depth}

    def _nothing(self) -> bytearray:
        """Return the mask of a place after which only an end may come."""
        bits = bytearray(len(self._start.deep_copy().compute_bitmask()))
        _allow(bits, self._ends or self._last_ends)
        return bits

    def _give_up(self) -> None:
        """Note why the matcher has failed. The library's matcher does not recover from an error, so replace it by a new
        one that has consumed as much of the same text as possible."""
        self._wrong = explain_failure(self._matcher)
        self._refuse()
        self._matcher = self._start.deep_copy()
        consumed = self._matcher.try_consume_tokens(self._text)
        del self._text[consumed:]
        self._masks = {length: mask for length, mask in self._masks.items() if length <= consumed}
