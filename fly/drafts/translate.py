"""Drafting for a target with another vocabulary: translate the draft model's ids to the target's.

The translation by text is string-level exact match (SLEM, arXiv 2502.05202, section 3). The paper's other method
(section 4) drafts only tokens that both vocabularies have. It was slower in every measurement, so it is not implemented
(docs/how-to/drafts.md).

Shape legend: B rows, K longest draft, T packed tokens, N places, F hidden states side by side, V vocabulary.
"""

from __future__ import annotations

import re
from collections import abc
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import torch
from tokenizers import decoders, models

from fly.cache import OutOfBlocks
from fly.drafts.base import DraftStrategy, StopsByChance, pad, until_end
from fly.drafts.model import SingleDraft
from fly.models.lengths import byte_level
from fly.models.tokenizer import Tokenizer
from fly.ops import common_prefix, derive, first_branch
from fly.runner.executor import Batch, Executor, Scores, Wrapped
from fly.runner.request import Row
from fly.types import Draft, SamplingParams, Target

__all__ = ["Restricted", "TranslatedDraft", "Vocabularies"]

_GREEDY = SamplingParams(temperature=0.0)
_LOOK_BACK = 8  # the decoding of a token may depend on this many tokens before it
# In these texts a lone surrogate stands for a byte that is not part of a whole character (PEP 383).
_BYTES = re.compile("([\udc80-\udcff]+)")
_UNFINISHED = re.compile("[\udc80-\udcff\ufffd]+$")


class _Speller:
    """Converts a tokenizer's ids to text, and text to ids.

    ``byte_level`` means that every plain token stands for fixed bytes, and that every byte is a token. Then any piece
    of text is converted exactly. Otherwise the tokenizer's own decoder and pre-tokenizer convert it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        control, vocabulary = tokenizer.control_ids, tokenizer.raw.get_vocab()
        self.specials = {text: i for text, i in vocabulary.items() if i in control}
        self.bytes_of: dict[int, bytes] = {}  # the bytes of each plain token; empty unless ``byte_level``
        model = tokenizer.raw.model
        marked = isinstance(model, models.BPE) and (model.continuing_subword_prefix or model.end_of_word_suffix)
        if isinstance(tokenizer.raw.decoder, decoders.ByteLevel) and isinstance(model, models.BPE) and not marked:
            self.bytes_of = {i: byte_level(text) for text, i in vocabulary.items() if i not in control}
        self.plain = frozenset(vocabulary.values()) - control
        self._byte_ids = {text[0]: i for i, text in sorted(self.bytes_of.items(), reverse=True) if len(text) == 1}
        self.byte_level = len(self._byte_ids) == 256
        encoding = tokenizer.raw.encode("a")
        leading = takewhile(lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask))
        self.begin = [i for i, _ in leading]  # the ids that the tokenizer puts before every text

    def text(self, ids: abc.Sequence[int]) -> str:
        """Return the text of plain ``ids``. The bytes of an unfinished character become lone surrogates or replacement
        marks."""
        if self.byte_level:
            return b"".join(self.bytes_of[i] for i in ids).decode("utf-8", "surrogateescape")
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def text_after(self, before: list[int], ids: list[int]) -> str:
        """Return the text that plain ``ids`` add to the text of ``before``; an empty text if they change that text."""
        if self.byte_level:
            return self.text(ids)
        context = before[-_LOOK_BACK:]
        shorter, longer = self.text(context), self.text(context + ids)
        return longer[len(shorter) :] if longer.startswith(shorter) else ""

    def ids(self, text: str) -> list[int]:
        """Return plain ids of ``text``, which may hold lone surrogates. A special token's text gets plain ids too.

        Byte-level ids spell ``text`` exactly: they spell unfinished characters, and parts that the tokenizer would
        change, byte by byte. Other ids end before the first unfinished character.
        """
        if not self.byte_level:
            complete = re.split("[\udc80-\udcff\ufffd]", text, maxsplit=1)[0]
            return [i for i in self._tokenizer.encode(complete, add_special_tokens=False) if i in self.plain]
        encoded: list[int] = []
        for number, part in enumerate(_BYTES.split(text)):
            spelled = part.encode("utf-8", "surrogateescape")
            ids = [] if number % 2 else self._tokenizer.encode(part, add_special_tokens=False)
            exact = b"".join(self.bytes_of.get(i, b"") for i in ids) == spelled
            encoded += ids if exact else [self._byte_ids[byte] for byte in spelled]
        return encoded

    def continued(self, before: list[int], text: str) -> list[int]:
        """Encode ``text``, up to its last whole character, as it follows the plain ids ``before``.

        The tokenizer encodes both texts together. If the result does not begin with ``before``, it encodes ``text``
        alone.
        """
        joined_text = (self.text(before) + text).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
        ids = self.ids(_UNFINISHED.sub("", joined_text))
        return ids[len(before) :] if ids[: len(before)] == before else self.ids(_UNFINISHED.sub("", text))


class Vocabularies:
    """Translates ids between two vocabularies. There are two modes:

    - ``padded``, if both models have the same tokenizer. They share the ids below both vocabulary sizes, and no
      token has a higher id.
    - ``text``, otherwise. They share special tokens with the same text. All other tokens are decoded and encoded again.

    Args:
        target, draft: the tokenizers, or None.
        target_size, draft_size: the vocabulary sizes of the models.

    Raises:
        ValueError: a model has no tokenizer, or (``CheckpointError``) one that does not fit the model.
    """

    mode: Literal["padded", "text"]
    to_target: dict[int, int]  # draft id -> target id
    to_draft: dict[int, int]  # target id -> draft id

    def __init__(self, target: Tokenizer | None, target_size: int, draft: Tokenizer | None, draft_size: int) -> None:
        if target is None or draft is None:
            who = "neither has" if target is draft else f"the {'target' if target is None else 'draft'} does not have"
            raise ValueError(
                f"the draft's vocabulary has {draft_size} tokens, the target's {target_size}, and {who} a tokenizer "
                "to say what they mean; drafts are translated between checkpoints with tokenizers"
            )
        target.check_fits(target_size)
        draft.check_fits(draft_size)
        self.target_size, self.draft_size = target_size, draft_size
        self.target, self.draft = _Speller(target), _Speller(draft)
        self.exact = self.target.byte_level and self.draft.byte_level  # whether any plain text is converted exactly
        self.begin: list[int] = []  # the draft model reads these ids before any text
        self._spelled: frozenset[int] = frozenset()  # target ids that are converted by their text
        if target.same_as(draft):
            self.mode = "padded"
            self.to_target = self.to_draft = {i: i for i in range(min(target_size, draft_size))}
            return
        self.mode = "text"
        shared = {i: self.draft.specials[t] for t, i in self.target.specials.items() if t in self.draft.specials}
        self.to_draft, self.to_target = shared, {d: t for t, d in shared.items()}
        self.begin, self._spelled = self.draft.begin, self.target.plain

    def joined(self, a: int, b: int) -> bool:
        """Whether the adjacent target ids ``a`` and ``b`` are converted together, as one text.

        Between byte-level vocabularies a word after a space is converted separately. This saves time and changes no id,
        because byte-level pre-tokenizers begin a new word there too.
        """
        if a not in self._spelled or b not in self._spelled:
            return False
        texts = self.target.bytes_of
        return not (self.exact and texts[b].startswith(b" ") and not texts[a][-1:].isspace())

    def convert(self, segment: list[int]) -> list[int]:
        """Convert target ids that belong together to draft ids. Leave out tokens that the draft model lacks."""
        if segment[0] in self._spelled:
            return self.draft.ids(self.target.text(segment))
        return [self.to_draft[i] for i in segment if i in self.to_draft]

    def window(self, segment: list[int]) -> list[int]:
        """Return the part of a segment that may be encoded together with new text."""
        return segment if segment and segment[0] in self._spelled else []

    def is_complete(self, segment: list[int]) -> bool:
        """Whether the draft model may draft after ``segment``. If that ends in an unfinished character, only
        byte-level vocabularies can continue it."""
        return self.exact or not _UNFINISHED.search(self.target.text(self.window(segment)))


@dataclass
class _Context:
    """A row's tokens, converted to draft ids segment by segment.

    Whether a segment ends between two tokens depends only on these two, and a segment's ids depend only on its tokens.
    So the ids are a function of the tokens, whatever the history, and new tokens change only the last segment.
    """

    tokens: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)  # the end of each segment, in tokens and in ids

    def follow(self, tokens: list[int], vocabularies: Vocabularies) -> None:
        """Make it the context of ``tokens``."""
        kept = common_prefix(self.tokens, tokens)
        if kept == len(tokens) == len(self.tokens):
            return
        while self.ends and self.ends[-1][0] >= kept:  # new tokens may extend a segment that ends at ``kept``
            self.ends.pop()
        start, size = self.ends[-1] if self.ends else (0, 0)
        del self.ids[size:]
        for at in range(start + 1, len(tokens) + 1):
            if at == len(tokens) or not vocabularies.joined(tokens[at - 1], tokens[at]):
                self.ids += vocabularies.convert(tokens[start:at])
                self.ends.append((at, len(self.ids)))
                start = at
        self.tokens = list(tokens)

    def last_segment(self) -> list[int]:
        """Return the tokens of the last segment."""
        return self.tokens[self.ends[-2][0] if len(self.ends) > 1 else 0 :]


class TranslatedDraft(StopsByChance):
    """A draft model for a target with another vocabulary. It drafts in its own ids, and this class translates them.

    In the mode ``padded`` (see ``Vocabularies``) the ids are the same. If the draft model has ids that the target
    lacks, its distribution is first restricted to the shared ids and renormalised. Then temperature, top-k, top-p and
    min-p are applied, and a token is drawn. So ``probs_BKV`` holds the distribution that each token was drawn from,
    with 0 for the target's other ids, and a lossless rule stays lossless.

    In the mode ``text`` the model drafts greedily, and the target's tokenizer encodes the text as a deterministic draft
    (``probs_BKV`` None). A lossless rule stays lossless for any proposal that is independent of the round's coins. Take
    a fixed token x first: the rule keeps x with chance target(x), and otherwise draws from the target without x, which
    together emits exactly the target's distribution. An independent proposal is such a fixed token in each of its
    outcomes, so its average emits the target's distribution as well. A randomly drawn draft would be lossless too. But
    it would be kept with chance sum(draft · target), which is at most the chance of the target's most likely token. The
    draft model's most likely token is the best guess of that token.

    The draft model's ids are a function of the row's tokens alone. Unfinished characters are converted byte by byte if
    both tokenizers are byte-level. Otherwise the model drafts nothing for the row until its last character is complete.

    A row may need more tokens in the draft model's cache than in the target's, which the scheduler cannot know. If the
    draft model's cache is full, no row of the round gets a draft. This costs time and changes which tokens a seed
    gives, but not their distribution.

    Args:
        draft: a ``SingleDraft`` or ``CascadeDraft`` with a tokenizer, attached to a ``TranslatingSetup``.
        tokenizer, vocab_size: the target's.

    Raises:
        ValueError: the vocabularies cannot be translated, with the reason.
    """

    def __init__(self, draft: DraftStrategy, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        if not isinstance(draft, SingleDraft):
            raise ValueError(
                f"{type(draft).__name__} for a vocabulary of {draft.vocab_size} tokens cannot draft for another, of "
                f"{vocab_size}; a SingleDraft, or a CascadeDraft, can"
            )
        own_size = draft.runner.executor.config.vocab_size
        self.vocabularies = Vocabularies(tokenizer, vocab_size, draft.runner.tokenizer, own_size)
        self.mode = self.vocabularies.mode
        if self.mode == "padded" and vocab_size < own_size and not isinstance(draft.runner.executor, Restricted):
            raise ValueError(
                f"{type(draft).__name__} drafts {own_size} ids for a target of {vocab_size}; attach it by a "
                "TranslatingSetup, which leaves out the ids that the target lacks"
            )
        self.stops = bool(draft.limits(draft.propose, 0.0))
        self.draft = draft
        self.spare = draft.spare
        self.gives_logits = draft.gives_logits and self.mode == "padded"  # another vocabulary's logits say nothing here
        self.context = draft.context
        self.vocab_size: int = vocab_size
        self._contexts: dict[int, _Context] = {}

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int], worth: float = 0.0) -> Draft:
        translated_rows = [self._in_draft_ids(row) for row in rows]
        most = [
            n if self._may_draft(row, translated_row) else 0
            for row, translated_row, n in zip(rows, translated_rows, max_len)
        ]
        propose = self.draft.propose
        try:
            draft = propose(translated_rows, most, **self.draft.limits(propose, worth))
        except OutOfBlocks:
            self._commit(translated_rows)
            return Draft.empty(len(rows))
        if self.mode == "text":
            return self._retokenise(rows, translated_rows, draft, max_len)
        if draft.probs_BKV is None and draft.logits_BKV is None:
            return draft

        def padded(own_BKV: torch.Tensor | None, fill: float) -> torch.Tensor | None:
            if own_BKV is None:
                return None
            shared = min(self.vocab_size, own_BKV.shape[-1])
            wide_BKV = own_BKV.new_full((*draft.shape, self.vocab_size), fill)
            wide_BKV[..., :shared] = own_BKV[..., :shared]
            return wide_BKV

        probs_BKV, logits_BKV = padded(draft.probs_BKV, 0.0), padded(draft.logits_BKV, -torch.inf)
        return Draft(draft.tokens_BK, draft.lengths_B, probs_BKV, draft.parents_BK, logits_BKV)

    def observe(self, rows: abc.Sequence[Row], draft: Draft, target: Target) -> None:
        """Do nothing: the draft model cannot read the target's output, which is in another vocabulary."""

    def commit(self, rows: abc.Sequence[Row]) -> None:
        self._commit([self._in_draft_ids(row) for row in rows if row.id in self._contexts])

    def release(self, row: Row) -> None:
        self._contexts.pop(row.id, None)
        self.draft.release(row)

    def _commit(self, translated: abc.Sequence[Row]) -> None:
        """Let the draft commit these rows, which are in its own ids."""
        self.draft.commit([translated_row for translated_row in translated if translated_row.tokens])
        for translated_row in translated:
            if not translated_row.tokens:  # no token of this row has a draft id
                self.draft.release(translated_row)

    def _in_draft_ids(self, row: Row) -> Row:
        """Return the row in the draft model's ids, under the same row id."""
        context = self._contexts.setdefault(row.id, _Context())
        context.follow(row.tokens, self.vocabularies)
        begin = self.vocabularies.begin
        to_draft = self.vocabularies.to_draft
        to_target = self.vocabularies.to_target
        ids = list(context.ids) if context.ids[: len(begin)] == begin else begin + context.ids
        return Row(
            tokens=ids,
            prompt_length=len(ids) - row.generated,  # both count the same number of emitted tokens
            params=_GREEDY if self.mode == "text" else _without_bans(row.params),
            policy=row.policy,
            # This seed differs from that of the round's coins. It also differs in each round, even if the number of
            # the draft model's ids stays the same.
            seed=derive(row.seed, len(row.tokens)),
            k=row.k,
            stop_ids=frozenset(to_draft[i] for i in row.stop_ids if i in to_draft and to_target[to_draft[i]] == i),
            id=row.id,
        )

    def _may_draft(self, row: Row, translated: Row) -> bool:
        """Whether the draft model has a text to continue, and a token that may continue it."""
        if self.mode == "text":
            return bool(translated.tokens) and self.vocabularies.is_complete(self._contexts[row.id].last_segment())
        only_ends = row.generated < row.params.min_tokens and self.vocabularies.to_target.keys() <= translated.stop_ids
        return bool(translated.tokens) and not only_ends

    def _retokenise(
        self, rows: abc.Sequence[Row], translated: abc.Sequence[Row], draft: Draft, max_len: abc.Sequence[int]
    ) -> Draft:
        """Encode the drafted text for the target, up to the first special token. Include that token if it is shared."""
        vocabularies, to_target = self.vocabularies, self.vocabularies.to_target
        drafts = []
        for b, (row, ids) in enumerate(zip(rows, draft.chains)):
            if draft.trees is not None:
                ids = [ids[node] for node in first_branch(draft.trees[b])]
            at = next((j for j, i in enumerate(ids) if i not in vocabularies.draft.plain), len(ids))
            text = vocabularies.draft.text_after(translated[b].tokens, ids[:at])
            window = vocabularies.window(self._contexts[row.id].last_segment())
            new = vocabularies.target.continued(window, text) if text else []
            new = [*new, *(to_target[i] for i in ids[at : at + 1] if i in to_target)][: max_len[b]]
            drafts.append(until_end(new, row))
        return pad(drafts)


def _without_bans(params: SamplingParams) -> SamplingParams:
    """Leave out penalties, biases and bans, because they refer to the target's ids. The target still applies them when
    it verifies."""
    off = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}
    return params.model_copy(update={**off, "bad_words": (), "bad_words_ids": ()}) if params.penalises else params


class Restricted(Wrapped):
    """A model that gives ids from ``size`` on a logit of -inf, and so probability 0."""

    def __init__(self, inner: Executor, size: int) -> None:
        super().__init__(inner)
        self._size = size

    def score(self, batch: Batch, places: abc.Sequence[int] | None = None, states: abc.Sequence[int] = ()) -> Scores:
        scores = self.inner.score(batch, places, states)
        logits_NV = scores.logits_NV.clone()
        logits_NV[:, self._size :] = -torch.inf
        return Scores(logits_NV, states_TF=scores.states_TF)
