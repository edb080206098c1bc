"""Drafts for another vocabulary: what maps to what, that no text is lost on the way, and that no distribution is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer
from torch import Tensor

from fly import LLM, SamplingParams
from fly.cache import PagedKVCache
from fly.drafts import CascadeDraft, DraftStrategy, NGramDraft, SingleDraft
from fly.drafts.base import DraftSetup, Loaded
from fly.drafts.setup import translated
from fly.drafts.translate import TranslatedDraft, Vocabularies, _Context
from fly.drafts.tree import TreeDraft
from fly.models import CheckpointError, Llama, LlamaConfig
from fly.models.lengths import byte_alphabet
from fly.models.llama import KV
from fly.models.tokenizer import Tokenizer
from fly.policies import Exact
from fly.runner.executor import Batch
from fly.runner.sampling import BatchSampling
from fly.types import Draft, Target
from tests.test_drafts import make_row, proposals
from tests.toys import caches, dense_logits, random_llama, ready, run

_ALPHABET = byte_alphabet()
ENGLISH = (
    "the cat sat on the mat and then the other cat ate the bat that sat there on the mat with them while some "
    "children were playing near the river under old trees and their mother was reading a book about ships " * 3
)
GERMAN = "schwarze hunde jagen kleine vögel über grüne hügel und große flüsse durch dunkle wälder " * 3


def save(raw: RawTokenizer) -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        raw.save(f"{directory}/tokenizer.json")
        return Tokenizer(directory)


def train(text: str, size: int, specials: tuple[str, ...], begin: str | None = None, prefix: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer; ``begin`` is put before every text."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(special, special=True, normalized=False) for special in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator([text], trainer)
    if begin is not None:
        ids = [(begin, raw.token_to_id(begin))]
        raw.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=ids)
    return save(raw)


def pieces(specials: tuple[str, ...] = ("<unk>", "<s>", "<end>")) -> Tokenizer:
    """Llama 2's kind: pieces with a mark for the space, single bytes as tokens for all else."""
    words = ["▁", "▁the", "▁cat", "▁on", "▁mat", "s", "t", "a", "▁s", "at", "e", "h", "▁a", "▁sat"]
    vocab = {token: i for i, token in enumerate([*specials, *(f"<0x{i:02X}>" for i in range(256)), *words])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[("▁s", "at")], byte_fallback=True, unk_token="<unk>"))
    raw.add_special_tokens([AddedToken(token, special=True) for token in specials])
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return save(raw)


LARGE = train(ENGLISH, 330, ("<bos>", "<end>", "<user>"), begin="<bos>")
SMALL = train(ENGLISH, 290, ("<pad>", "<end>", "<s>"), begin="<s>")  # nearly a part of LARGE, under other ids
OTHER = train(GERMAN, 340, ("<end>",))  # hardly a word in common
PREFIXED = train(ENGLISH, 300, ("<end>",), prefix=True)  # writes a space before every text
PIECES = pieces()
SIZES = {LARGE: 330, SMALL: 290, OTHER: 340, PREFIXED: 300, PIECES: 273}
NAMES = {LARGE: "large", SMALL: "small", OTHER: "other", PREFIXED: "prefixed", PIECES: "pieces"}
LEVEL = [LARGE, SMALL, OTHER, PREFIXED]

# mode -> target's tokenizer and size, draft's tokenizer and size
PAIRS = {
    "padded": (LARGE, 350, LARGE, 336),
    "padded larger": (LARGE, 336, LARGE, 350),
    "text": (LARGE, 330, OTHER, 340),
    "text to a part": (SMALL, 300, LARGE, 352),
    "text to pieces": (PIECES, 275, LARGE, 330),
    "text from pieces": (LARGE, 330, PIECES, 275),
}
every_pair = pytest.mark.parametrize("name", PAIRS)
one_to_one = pytest.mark.parametrize("name", [name for name in PAIRS if not name.startswith("text")])
byte_pairs = st.sampled_from([*permutations(LEVEL, 2)])


@cache
def toy(size: int, seed: int) -> Llama:
    return random_llama(seed, size, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=256)


def speaker(
    tokenizer: Tokenizer | None, size: int, make: Callable[..., SingleDraft] = SingleDraft, **options: object
) -> SingleDraft:
    """A random draft model that speaks ``tokenizer``."""
    return make(Loaded(run(toy(size, 5)), tokenizer), **options)


def pair(name: str, **options: object) -> TranslatedDraft:
    target, size, draft, own_size = PAIRS[name]
    return attached(speaker(draft, own_size, **options), target, size)  # type: ignore[arg-type]


def attached(draft: DraftStrategy, target: Tokenizer | None, size: int) -> Any:
    """``draft``, and what translates it, for a target that speaks so."""
    return ready(draft, toy(size, 2), target)


def between(target: Tokenizer, draft: Tokenizer) -> Vocabularies:
    return Vocabularies(target, SIZES[target], draft, SIZES[draft])


def spelled(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    """The bytes of plain byte-level tokens, by the library's own table of characters; none for ids without a token."""
    vocabulary = {i: text for text, i in tokenizer.raw.get_vocab().items()}
    return bytes(_ALPHABET[c] for i in ids for c in vocabulary.get(i, ""))


def converted(tokens: list[int], vocabularies: Vocabularies) -> list[int]:
    context = _Context()
    context.follow(tokens, vocabularies)
    return context.ids


def ids_of(tokenizer: Tokenizer, size: int | None = None) -> st.SearchStrategy[list[int]]:
    """Any ids, and ids of real text: English, German, emoji."""
    text = st.lists(st.sampled_from(["the", " cat", " sat", "on", "vögel ", "\n", "😀", "é", "  ", "a"]), max_size=8)
    written = text.map(lambda words: tokenizer.encode("".join(words), add_special_tokens=False))
    return st.one_of(st.lists(st.integers(0, (size or SIZES[tokenizer]) - 1), max_size=12), written)


# --- the map ---------------------------------------------------------------------------------------------


@given(byte_pairs)
def test_shared_tokens_are_special_ones_of_the_same_text(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    target, draft = tokenizers
    vocabularies = between(target, draft)
    texts_t, texts_d = (
        {i: text for text, i in t.raw.get_vocab().items() if i in t.control_ids} for t in (target, draft)
    )
    wanted = {(i, draft.raw.token_to_id(text)) for i, text in texts_t.items() if text in texts_d.values()}
    assert set(vocabularies.to_draft.items()) == wanted
    assert {(t, d) for d, t in vocabularies.to_target.items()} == wanted
    for t, d in wanted:
        assert target.decode([t], skip_special_tokens=False) == draft.decode([d], skip_special_tokens=False)


def test_a_special_token_is_not_the_plain_text_it_looks_like() -> None:
    plain = train(ENGLISH, 300, ("<bos>",))
    plain.raw.add_tokens(["<end>"])
    size = plain.raw.get_vocab_size()
    assert plain.token_id("<end>") not in plain.control_ids
    vocabularies = Vocabularies(LARGE, 330, plain, size)
    assert LARGE.token_id("<end>") not in vocabularies.to_draft
    assert plain.token_id("<end>") not in vocabularies.to_target
    # and the other way: plain text that looks like a special token stays plain
    typed = plain.encode("the <end>", add_special_tokens=False)
    ids = converted(typed, Vocabularies(plain, size, LARGE, 330))
    assert not set(ids) & LARGE.control_ids and spelled(LARGE, ids) == b"the <end>"


def test_one_tokenizer_is_padded_and_two_go_by_text() -> None:
    assert Vocabularies(LARGE, 352, LARGE, 330).mode == "padded"
    assert all(between(target, draft).mode == "text" for target, draft in permutations(SIZES, 2))


# --- what the draft model reads --------------------------------------------------------------------------


@settings(max_examples=150)
@given(byte_pairs, st.data())
def test_byte_level_text_goes_over_exactly(which: tuple[Tokenizer, Tokenizer], data: st.DataObject) -> None:
    target, draft = which
    tokens = data.draw(ids_of(target))
    vocabularies = between(target, draft)
    ids = converted(tokens, vocabularies)
    # special tokens are mapped where they are shared and left out where not; the bytes between them stay
    kept = [i for i in tokens if i not in target.control_ids or i in vocabularies.to_draft]
    parts: list[bytes | int] = [
        vocabularies.to_draft[i] if i in target.control_ids else spelled(target, [i]) for i in kept
    ]
    back: list[bytes | int] = [i if i in draft.control_ids else spelled(draft, [i]) for i in ids]
    assert merged(back) == merged(parts)


def merged(parts: list[bytes | int]) -> list[bytes | int]:
    """Neighbouring pieces of plain text as one."""
    out: list[bytes | int] = []
    for part in parts:
        if isinstance(part, bytes) and out and isinstance(out[-1], bytes):
            out[-1] += part
        elif part != b"":
            out.append(part)
    return out


def test_text_is_cut_where_the_tokenizer_cuts_it_anyway() -> None:
    """In real text the draft model reads just what its own tokenizer makes of it."""
    for text in ("the cat sat on the mat\n and  then\n\nthem", ENGLISH, GERMAN, "vögel 😀 the 日本 cat"):
        tokens = LARGE.encode(text, add_special_tokens=False)
        assert converted(tokens, between(LARGE, OTHER)) == OTHER.encode(text, add_special_tokens=False)
        assert converted(tokens, between(LARGE, PIECES)) == PIECES.encode(text, add_special_tokens=False)


edits = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 350), max_size=6)), min_size=1, max_size=8)


@every_pair
@settings(max_examples=40)
@given(start=st.data(), history=edits)
def test_a_context_depends_on_the_tokens_alone(
    name: str, start: st.DataObject, history: list[tuple[int, list[int]]]
) -> None:
    vocabularies = pair(name).vocabularies
    target, size, *_ = PAIRS[name]
    tokens, context = start.draw(ids_of(target, size)), _Context()
    for dropped, added in history:
        tokens = [*tokens[: max(0, len(tokens) - dropped)], *(i % size for i in added)]
        context.follow(tokens, vocabularies)
        assert context.ids == converted(tokens, vocabularies) and context.tokens == tokens


def test_growing_text_changes_the_end_only() -> None:
    """What the draft's cache holds stays valid but for the last word."""
    vocabularies, context = between(LARGE, OTHER), _Context()
    tokens = LARGE.encode(ENGLISH + GERMAN, add_special_tokens=False)
    changed = 0
    for n in range(1, len(tokens) + 1):
        before = list(context.ids)
        context.follow(tokens[:n], vocabularies)
        common = next((i for i, (a, b) in enumerate(zip(before, context.ids)) if a != b), len(before))
        changed += len(before) - common
        assert len(before) - common <= 16
    assert changed < len(tokens)


@every_pair
def test_ids_without_a_token_over_there_are_left_out(name: str) -> None:
    vocabularies = pair(name).vocabularies
    tokenizer, size, _, own_size = PAIRS[name]
    ids = converted(list(range(size)), vocabularies)
    assert ids and all(0 <= i < own_size for i in ids)
    without = range(min(own_size, size) if vocabularies.mode == "padded" else tokenizer.raw.get_vocab_size(), size)
    assert converted([*without, 100, *without], vocabularies) == converted([100], vocabularies)


def test_the_draft_model_reads_its_own_begin_token() -> None:
    draft = attached(speaker(SMALL, 290), LARGE, 330)
    own = draft._in_draft_ids(make_row(LARGE.encode("the cat")))  # "<bos>" is no token of the draft's
    assert own.tokens == SMALL.encode("the cat") and own.tokens[0] == SMALL.token_id("<s>")
    back = attached(speaker(LARGE, 330), LARGE, 352)
    assert back._in_draft_ids(make_row(LARGE.encode("the cat"))).tokens == LARGE.encode("the cat")
    shared = train(ENGLISH, 290, ("<end>", "<bos>"), begin="<bos>")
    both = attached(speaker(shared, 290), LARGE, 330)
    assert both._in_draft_ids(make_row(LARGE.encode("the cat"))).tokens == shared.encode("the cat")  # not twice


# --- distributions ------------------------------------------------------------------------------------------------


rows_of = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=10), min_size=1, max_size=3)


@one_to_one
@settings(max_examples=25)
@given(
    batch=rows_of,
    temperatures=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=3, max_size=3),
    seed=st.integers(0, 2**62),
    filters=st.sampled_from([{}, {"top_k": 4}, {"top_p": 0.5}]),
)
def test_the_claimed_distribution_is_the_restricted_distribution(
    name: str, batch: list[list[int]], temperatures: list[float], seed: int, filters: dict[str, float]
) -> None:
    strategy = pair(name)
    to_target, begin = strategy.vocabularies.to_target, strategy.vocabularies.begin
    model = toy(PAIRS[name][3], 5)
    rows = [make_row(tokens, t, seed + b, **filters) for b, (tokens, t) in enumerate(zip(batch, temperatures))]
    before = [list(row.tokens) for row in rows]
    draft = strategy.propose(rows, [5, 3, 1][: len(rows)])
    assert [row.tokens for row in rows] == before
    to_draft = {t: d for d, t in to_target.items()}
    for b, (row, drafted) in enumerate(zip(rows, proposals(draft))):
        read = begin + converted(row.tokens, strategy.vocabularies)
        if read == begin:
            assert not drafted or begin
            continue
        assert len(drafted) == [5, 3, 1][b]
        own = [to_draft[i] for i in drafted]
        logits = dense_logits(model, read + own)[len(read) - 1 : -1]
        shared = sorted(to_target)
        if row.greedy:
            assert [shared[i] for i in logits[:, shared].argmax(-1)] == own
            continue
        wanted = torch.zeros(len(drafted), PAIRS[name][1])
        part = BatchSampling.of([row.params]).probs(logits[:, shared].unsqueeze(0))[0]
        if not filters:  # restrict, then renormalise: by hand
            whole = (logits / row.params.temperature).softmax(-1)[:, shared]
            torch.testing.assert_close(part, whole / whole.sum(-1, keepdim=True), atol=1e-5, rtol=1e-3)
        wanted[:, [to_target[i] for i in shared]] = part
        assert draft.probs_BKV is not None
        claimed = draft.probs_BKV[b, : len(drafted)]
        torch.testing.assert_close(claimed, wanted, atol=2e-4, rtol=1e-3)
        assert (claimed[range(len(drafted)), drafted] > 0).all()
        unshared = [i for i in range(PAIRS[name][1]) if i not in to_draft]
        assert not claimed[:, unshared].any()


def emitted_distribution(target_V: Tensor, draft: Draft, first: int) -> Tensor:
    """[V] distribution of the first emitted token under ``Exact`` if ``first`` is drafted, summed over all coins."""
    tokens_BK = torch.tensor([[first]])
    one = Draft(tokens_BK, torch.tensor([1]), None if draft.probs_BKV is None else draft.probs_BKV[:1, :1])
    view = Target(target_V.log().expand(1, 2, -1), target_V.expand(1, 2, -1))
    accept = Exact().accept_probs(view, one)[0, 0]
    residual_V = Exact().correction(view, one, torch.tensor([0]))[0]
    rest_V = residual_V / residual_V.sum() if residual_V.sum() > 0 else torch.zeros_like(residual_V)
    probs_V = (1 - accept) * rest_V
    probs_V[first] += accept
    return probs_V


@every_pair
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), tokens=st.lists(st.integers(0, 255), min_size=1, max_size=8))
def test_exact_verification_emits_the_targets_distribution(name: str, seed: int, tokens: list[int]) -> None:
    """draft · accept + rejected · residual = target, summed over every token the draft can propose."""
    size = PAIRS[name][1]
    g = torch.Generator().manual_seed(seed)
    target_V = (torch.randn(size, generator=g, dtype=torch.float64) * 3).softmax(-1)
    draft = pair(name).propose([make_row(tokens, 1.0, seed)], [1])
    if not draft.tokens_BK.numel():
        event("no draft")
        return
    if draft.probs_BKV is None:
        probs_V = emitted_distribution(target_V, draft, int(draft.tokens_BK[0, 0]))
    else:
        own_V = draft.probs_BKV[0, 0].double()
        draft = Draft(draft.tokens_BK, draft.lengths_B, draft.probs_BKV.double())
        parts = (own_V[i] * emitted_distribution(target_V, draft, i) for i in range(size) if own_V[i] > 0)
        probs_V = torch.stack(list(parts)).sum(0)
    torch.testing.assert_close(probs_V, target_V, atol=1e-6, rtol=1e-5)


@one_to_one
def test_rounds_draw_apart_even_where_the_draft_reads_as_many_tokens(name: str) -> None:
    strategy = pair(name)
    seeds = {strategy._in_draft_ids(make_row([100] * n, 1.0, seed=3)).seed for n in range(1, 20)}
    assert len(seeds) == 19 and 3 not in seeds


# --- decoding with it ------------------------------------------------------------------------------------


SHAPES: dict[str, Callable[[str], DraftStrategy]] = {
    "single": lambda name: speaker(*PAIRS[name][2:], block_size=3),
    "tree": lambda name: speaker(*PAIRS[name][2:], make=TreeDraft, nodes=6, depth=3, width=2),
    "cascade": lambda name: CascadeDraft([NGramDraft(), speaker(*PAIRS[name][2:])]),
}


@every_pair
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=5)
@given(data=st.data())
def test_greedy_output_is_the_autoregressive_one(name: str, shape: str, data: st.DataObject) -> None:
    target, size, *_ = PAIRS[name]
    model = toy(size, 2)
    prompts = data.draw(st.lists(ids_of(target, size).filter(len), min_size=1, max_size=3))
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=(1,))
    strategy = SHAPES[shape](name)
    llm = LLM(Loaded(run(model), target), strategy, k=5)
    outs = llm.generate(prompts, params)
    plain = LLM(model).generate(prompts, params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert all(a.num_free == a.num_blocks and not a.sequences() for a in llm.scheduler.allocators)
    assert isinstance(llm.draft, TranslatedDraft) and not llm.draft._contexts


@every_pair
@settings(max_examples=8)
@given(
    start=rows_of,
    pattern=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 255), st.integers(0, 6)), min_size=1, max_size=5),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_after_any_history_it_proposes_what_a_fresh_one_would(
    name: str, start: list[list[int]], pattern: list[tuple[int, int, int]], temperature: float
) -> None:
    strategy = pair(name)
    rows = [make_row(tokens, temperature, seed=11) for tokens in start]
    for number, (kept, token, most) in enumerate(pattern):
        limits = [0 if (b + number) % 3 == 0 else most for b in range(len(rows))]
        draft = strategy.propose(rows, limits)
        fresh = pair(name).propose([make_row(row.tokens, temperature, seed=11) for row in rows], limits)
        assert proposals(draft) == proposals(fresh)
        assert (draft.probs_BKV is None) == (fresh.probs_BKV is None)
        if draft.probs_BKV is not None and fresh.probs_BKV is not None:
            torch.testing.assert_close(draft.probs_BKV, fresh.probs_BKV, atol=2e-4, rtol=1e-3)
        for row, drafted in zip(rows, proposals(draft)):
            row.tokens += [*drafted[:kept], token]
        strategy.commit(rows)
    for row in rows:
        strategy.release(row)
    assert not strategy._contexts
    for allocator in caches(strategy):
        assert allocator.num_free == allocator.num_blocks and not allocator.sequences()


@every_pair
def test_nothing_is_proposed_where_the_drafts_cache_is_full(name: str) -> None:
    strategy = pair(name, cache_tokens=24, block_size=2)
    rows = [make_row([68, 69, 70, 71] * 2), make_row([68, 69, 70, 71] * 2)]
    assert strategy.propose(rows, [14, 14]).lengths_B.tolist() == [0, 0]
    strategy.commit(rows)
    alone = strategy.propose(rows[:1], [4])
    assert proposals(alone) == proposals(pair(name).propose([make_row(rows[0].tokens)], [4]))
    for row in rows:
        strategy.release(row)
    assert all(a.num_free == a.num_blocks for a in caches(strategy))


class Script:
    """A model that recites: whatever it reads, after n tokens it says the n-th of ``tokens``."""

    device = torch.device("cpu")

    def __init__(self, tokens: list[int], size: int) -> None:
        self.config = LlamaConfig(
            vocab_size=size, hidden_size=2, intermediate_size=2, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=2, max_position_embeddings=256,
        )  # fmt: skip
        self.tokens, self.dtype = tokens, torch.float32

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, kv: KV) -> Tensor:
        return positions_T.unsqueeze(1).float()

    def logits(self, hidden_TC: Tensor) -> Tensor:
        says_T = torch.tensor(self.tokens + [0] * 256)[hidden_TC[:, 0].long() + 1]
        return 9.0 * torch.nn.functional.one_hot(says_T, self.config.vocab_size).float()


def reciting(text: str, target: Tokenizer, draft: Tokenizer, end: str = "") -> SingleDraft:
    """A draft model that knows ``text`` by heart."""
    script = draft.encode(text) + ([draft.token_id(end)] if end else [])
    return SingleDraft(Loaded(run(Script(script, SIZES[draft])), draft))


@pytest.mark.parametrize(
    ("target", "draft"), list(permutations([LARGE, SMALL, OTHER, PIECES], 2)), ids=lambda t: NAMES[t]
)
def test_one_text_in_two_vocabularies_is_accepted(target: Tokenizer, draft: Tokenizer) -> None:
    text = "the cat sat on the mat 😀 and\nthe other vögel ate"
    prompt, script = target.encode("the cat"), target.encode(text) + [target.token_id("<end>")]
    llm = LLM(Loaded(run(Script(script, SIZES[target])), target), reciting(text, target, draft, "<end>"), k=12)
    params = SamplingParams(temperature=0, max_tokens=200, stop_token_ids=(target.token_id("<end>"),))
    (out,) = llm.generate([prompt], params)
    assert out.token_ids == script[len(prompt) :]
    assert out.stats.tau > 3


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("draft", [OTHER, PIECES], ids=["bytes", "pieces"])
def test_half_a_character_goes_over_byte_by_byte_or_waits(draft: Tokenizer, cut: int) -> None:
    whole = LARGE.encode("the 😀 cat")
    row = make_row(whole[: len(LARGE.encode("the ")) + cut])
    assert LARGE.decode(row.tokens).endswith("\ufffd")
    strategy = attached(reciting("the 😀 cat", LARGE, draft), LARGE, SIZES[LARGE])
    (drafted,) = proposals(strategy.propose([row], [12]))
    if draft is PIECES:
        assert drafted == [] and PIECES.decode(strategy._in_draft_ids(row).tokens) == "the "
        row.tokens = whole[: len(LARGE.encode("the 😀"))]
        (drafted,) = proposals(strategy.propose([row], [12]))
    assert (row.tokens + drafted)[: len(whole)] == whole


def test_a_character_drafted_in_part_is_not_proposed_in_part() -> None:
    strategy = attached(reciting("the 😀", LARGE, OTHER), LARGE, SIZES[LARGE])
    row, read = make_row(LARGE.encode("the")), len(OTHER.encode("the"))
    for n in range(1, 5):
        (drafted,) = proposals(strategy.propose([row], [n]))
        strategy.commit([row])
        assert LARGE.decode(drafted) == OTHER.decode(OTHER.encode("the 😀")[read : read + n]).rstrip("\ufffd")


def test_a_word_that_continues_is_spelled_again_from_its_start() -> None:
    """The row has the beginning of a word that the target would write as one token."""
    th = LARGE.encode(" mat and th", add_special_tokens=False)
    strategy = attached(reciting(" mat and then the", LARGE, OTHER), LARGE, SIZES[LARGE])
    (drafted,) = proposals(strategy.propose([make_row(th)], [12]))
    assert LARGE.decode(th + drafted).startswith(" mat and then the")
    assert LARGE.encode(" mat and then the", add_special_tokens=False)[: len(th)] != th


# --- ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [SMALL, OTHER], ids=lambda t: NAMES[t])
def test_a_drafted_end_is_the_targets_end_where_it_is_shared(draft: Tokenizer) -> None:
    end = LARGE.token_id("<end>")
    strategy = attached(reciting("the cat", LARGE, draft, "<end>"), LARGE, SIZES[LARGE])
    row = make_row(LARGE.encode("the"), stop=(end,))
    (drafted,) = proposals(strategy.propose([row], [12]))
    assert drafted[-1] == end and LARGE.decode(drafted[:-1]) == " cat"
    foreign = attached(reciting("the cat", LARGE, SMALL, "<pad>"), LARGE, SIZES[LARGE])  # no token of the target's
    assert LARGE.decode(proposals(foreign.propose([row], [12]))[0], skip_special_tokens=False) == " cat"


@every_pair
@settings(max_examples=15)
@given(batch=rows_of, temperature=st.sampled_from([0.0, 1.0]), data=st.data())
def test_nothing_is_drafted_after_an_end(
    name: str, batch: list[list[int]], temperature: float, data: st.DataObject
) -> None:
    free = proposals(pair(name).propose([make_row(tokens, temperature) for tokens in batch], [8] * len(batch)))
    ends = tuple(data.draw(st.sets(st.sampled_from(sorted({0, *(i for drafted in free for i in drafted)})))))
    bound = pair(name).propose([make_row(tokens, temperature, stop=ends) for tokens in batch], [8] * len(batch))
    for drafted, all_of_it in zip(proposals(bound), free):
        end = next((j for j, i in enumerate(all_of_it, start=1) if i in ends), len(all_of_it))
        assert drafted == all_of_it[:end]


@one_to_one
def test_no_end_is_drafted_before_the_least_length(name: str) -> None:
    strategy = pair(name)
    ends = sorted(strategy.vocabularies.to_target.values())[:-2]
    rows = [make_row([100, 101], 1.0, seed, stop=tuple(ends), min_tokens=50) for seed in range(6)]
    for drafted in proposals(strategy.propose(rows, [4] * 6)):
        assert len(drafted) == 4 and not set(drafted) & set(ends)
    every = tuple(strategy.vocabularies.to_target.values())
    early, late = (
        make_row([100, 101], 1.0, stop=every, min_tokens=2),
        make_row([100, 101], 1.0, stop=every, min_tokens=1),
    )
    assert strategy.propose([early, late], [4, 4]).lengths_B.tolist() == [0, 1]


@settings(max_examples=20)
@given(st.integers(330, 340), st.integers(330, 340), ids_of(LARGE).filter(len))
def test_a_model_is_restricted_when_it_is_loaded_and_never_changed(size: int, own_size: int, text: list[int]) -> None:
    """The level below and its setup get the model that drafts for the target: ids that the target lacks have
    probability 0 there, and all other logits are the model's."""

    class Below(NGramDraft):
        def attach(self, setup: DraftSetup) -> None:
            self.above = setup.target.executor
            super().attach(setup)

    below = Below()
    strategy = attached(CascadeDraft([below, speaker(LARGE, own_size)]), LARGE, size)
    level = strategy.draft if size != own_size else strategy
    assert level.runner.executor is below.above
    cache = PagedKVCache.for_model(level.runner.executor, len(text))
    cache.resize(0, len(text))
    batch = Batch(text, list(range(len(text))), cache.batch([0], [0], [len(text)]))
    logits_NV = level.runner.executor.score(batch).logits_NV
    assert logits_NV[:, size:].isneginf().all()
    torch.testing.assert_close(logits_NV[:, :size], dense_logits(toy(own_size, 5), text)[:, :size])


# --- choosing and refusing -------------------------------------------------------------------------------


def test_a_draft_of_the_same_vocabulary_stays_as_it_is() -> None:
    level, lookup = speaker(LARGE, 330), NGramDraft()
    assert attached(level, LARGE, 330) is level
    assert translated(level, None, 330) is level  # nothing says that it differs
    assert attached(lookup, LARGE, 330) is lookup
    bare = speaker(None, 330)
    assert attached(bare, LARGE, 330) is bare


def test_a_draft_of_another_vocabulary_is_translated() -> None:
    for target, size, draft, own_size in PAIRS.values():
        strategy = attached(speaker(draft, own_size), target, size)
        assert isinstance(strategy, TranslatedDraft)
        assert strategy.vocab_size == size
        assert strategy.mode == Vocabularies(target, size, draft, own_size).mode
    swapped = train(ENGLISH, 330, ("<end>", "<bos>", "<user>"))
    strategy = attached(speaker(swapped, 330), LARGE, 330)  # same size, other ids
    assert isinstance(strategy, TranslatedDraft) and strategy.mode == "text"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: attached(speaker(None, 336), LARGE, 330), "336 .*330.* the draft does not have a tokenizer"),
        (lambda: attached(speaker(LARGE, 330), None, 336), "330 .*336.* the target does not have a tokenizer"),
        (lambda: attached(speaker(None, 330), None, 336), "neither has a tokenizer"),
        (
            lambda: TranslatedDraft(attached(speaker(LARGE, 350), LARGE, 350), LARGE, 336),
            "350 .*336.* TranslatingSetup",
        ),
        (lambda: TranslatedDraft(NGramDraft(), LARGE, 330), "NGramDraft .*cannot draft for another.*SingleDraft"),
    ],
)
def test_a_pair_that_cannot_work_is_refused_with_the_reason(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused() -> None:
    sizes = SIZES[LARGE], SIZES[SMALL]
    for target, draft in ((sizes[0] - 1, sizes[1]), (sizes[0], sizes[1] - 1)):
        with pytest.raises(CheckpointError, match=f"only {target if target < sizes[0] else draft} tokens"):
            Vocabularies(LARGE, target, SMALL, draft)


def test_a_spelling_with_marks_at_words_ends_is_not_byte_level() -> None:
    raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(_ALPHABET)}, merges=[], end_of_word_suffix="</w>"))
    raw.decoder = decoders.ByteLevel()
    assert not Vocabularies(save(raw), 256, LARGE, 330).exact and between(SMALL, LARGE).exact
