"""DFlash, DSpark and P-EAGLE heads on compiled kernels, held to PyTorch's way, and rounds with them in one call.

Shape legend: B rows, T tokens, K places of a block, F hidden states of the target side by side, C hidden width, U draft
vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import copy
from collections import abc
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fly.backends.choice import load
from fly.backends.cpu import CpuDFlashHead, CpuPEagleHead, available
from fly.backends.cpu.drafting import CompiledBlockHead
from fly.backends.cpu.library import split
from fly.backends.heads import TorchDFlashHead, TorchPEagleHead
from fly.cache import PagedKVCache
from fly.drafts import BlockDraft, DraftStrategy, LookupDraft, NGramDraft
from fly.drafts.model import seed_of
from fly.llm import LLM
from fly.models.dflash import DFlashHead, save_dflash_head
from fly.models.eagle import Eagle3Head, HeadConfig, save_head
from fly.params import SamplingParams
from fly.policies import Exact
from fly.runner.drafting import DraftSpec, Marginals
from fly.runner.executor import Batch, BlockHead, Executor
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling
from fly.testing import check_draft
from tests.kernels import NARROW, VARIANTS, built
from tests.test_block import KINDS, SMALL, make_block_head, make_parallel_head, runs, small_runs
from tests.test_dflash import KINDS as ALL_KINDS
from tests.test_dflash import MASK, SLIDING, VOCABULARY, make_head, make_layer
from tests.test_eagle import PARAMS, check_texts, randomise, target_on
from tests.twins import in_steps, rounded_weight

pytestmark = built
COMPILED = available()[0]


# Kinds of P-EAGLE heads: options of ``HeadConfig``, beside the sizes.
PARALLEL: dict[str, dict[str, Any]] = {
    "p-eagle": {},
    "p-eagle, one layer": {"layers": {"num_hidden_layers": 1}, "norm_output": True},
    "p-eagle, reduced": {"draft_vocab_size": 24, "layers": {"family": "qwen3"}},
    "p-eagle, normed": {"norm_before_residual": True, "layers": {"num_key_value_heads": 1, "attention_bias": True}},
    "p-eagle, sliding": {"layers": {"family": "qwen3", **SLIDING}},
}


def random_head(kind: str, seed: int) -> DFlashHead | Eagle3Head:
    """A head of any kind, with an embedding and an output matrix of its own."""
    if kind in ALL_KINDS:
        return make_head(seed, torch.float32, **ALL_KINDS[kind])
    options = {"draft_vocab_size": VOCABULARY, **PARALLEL[kind]}
    layers = {"family": "llama", **options.pop("layers", {})}
    sizes: dict[str, Any] = {"target_hidden_size": 32, "states": (1, 2, 4), "mask_token_id": MASK, "drafts": 7}
    config = HeadConfig(layer=make_layer(**layers), **sizes, **options)
    head = Eagle3Head(config)
    randomise(head, seed)
    size = config.draft_vocab_size
    head.to_target_U.copy_(torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:size].sort()[0])
    return head.eval().requires_grad_(False)


def pytorch_twin(head: DFlashHead | Eagle3Head, kernels: str) -> BlockHead:
    """The head on PyTorch, in float32, with weights and inputs of products rounded as ``kernels`` round them."""
    head = copy.deepcopy(head)
    variant, ending = split(kernels)
    taken = torch.float32 if variant == "avx2" else torch.bfloat16  # what is then rounded to 8 bits (tests/twins.py)

    def take(linear: nn.Linear, given: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = given
        width = None if ending == "w8a8" else 32
        return (in_steps(x.flatten(0, -2).to(taken), width).float().view_as(x),)

    def keys_and_values(attention: Any, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor]:
        return attention.project(x_TC, cos_T1D, sin_T1D)[1:]  # through ``take``

    for module in head.modules():
        if isinstance(module, nn.Linear) and ending and module.out_features > 1:  # not the confidence head
            markov = getattr(head, "markov_head", None)
            wide = module is head.lm_head or (markov is not None and module is markov.markov_w2)
            module.weight = nn.Parameter(rounded_weight(module.weight, ending, wide).float(), requires_grad=False)
            module.register_forward_pre_hook(take)
        if hasattr(module, "keys_and_values"):
            module.keys_and_values = partial(keys_and_values, module)  # type: ignore[assignment]
    return TorchPEagleHead(head) if isinstance(head, Eagle3Head) else TorchDFlashHead(head)


class Texts:
    """Rows of random text, with the hidden states before each token, in the caches of several executors."""

    def __init__(self, executors: list[BlockHead], lengths: list[int], cuts: list[int], seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.executors, self.lengths = executors, lengths
        config = executors[0].head.config
        features = config.inputs * config.target_hidden_size
        self.tokens = [torch.randint(0, VOCABULARY - 1, (n + 1,), generator=random).tolist() for n in lengths]
        self.states = [torch.randn(n, features, generator=random) for n in lengths]
        self.caches = []
        for executor in executors:
            room = executor.room(executor.longest or 0, DraftSpec())
            cache = PagedKVCache(executor.config, sum(3 + (n + room) // 4 for n in lengths), 4, torch.float32)
            for b, n in enumerate(lengths):
                cache.resize(f"hole {b}", 3)
                cache.resize(b, n + room)
            self.caches.append(cache)
        self.starts = [0] * len(lengths)
        for cut in cuts:
            ends = [min(start + cut, n - 1) for start, n in zip(self.starts, lengths)]
            rows = [b for b, (start, end) in enumerate(zip(self.starts, ends)) if start < end]
            if rows:
                for executor, (batch, states_TF) in zip(executors, self.parts(rows, ends)):
                    executor.read(batch, states_TF)
            self.starts = ends

    def parts(self, rows: list[int], ends: list[int]) -> list[tuple[Batch, Tensor]]:
        """For each executor, the batch of the tokens of these rows up to ``ends``, and their hidden states."""
        found = []
        for cache in self.caches:
            starts, counts = [self.starts[b] for b in rows], [ends[b] - self.starts[b] for b in rows]
            new = [self.tokens[b][1 + self.starts[b] : 1 + ends[b]] for b in rows]
            states_TF = torch.cat([self.states[b][self.starts[b] : ends[b]] for b in rows])
            found.append((Batch.of(new, cache.batch(rows, starts, counts)), states_TF))
        return found

    @property
    def last(self) -> list[tuple[Batch, Tensor]]:
        """The batches of what is not read yet."""
        return self.parts([*range(len(self.lengths))], self.lengths)


def near(found: Tensor, wanted: Tensor, kernels: str) -> bool:
    """Whether values are those of the twin, to float32's rounding. Inputs of 8 bits may lie so near the middle of two
    steps that the twin takes the other one."""
    allowed = 3e-2 if split(kernels)[1] else 2e-4
    return float((found - wanted).norm() / wanted.norm()) < allowed


def prepared(head: DFlashHead | Eagle3Head, kernels: str) -> BlockHead:
    """The head on compiled kernels. It has all matrices of its own, so no target shares any."""
    head = copy.deepcopy(head)
    executor = CpuPEagleHead(head, kernels) if isinstance(head, Eagle3Head) else CpuDFlashHead(head, kernels)
    executor.share(target_on("torch"))
    return executor


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([*ALL_KINDS]), st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 5),
    st.lists(st.integers(1, 9), max_size=3), st.sampled_from([*VARIANTS, *NARROW]),
)  # fmt: skip
def test_a_block_is_that_of_pytorch(kind: str, lengths: list[int], seed: int, cuts: list[int], kernels: str) -> None:
    """Hidden states and logits, in ragged batches, for contexts that are read in one call or several."""
    head = random_head(kind, seed)
    texts = Texts([pytorch_twin(head, kernels), prepared(head, kernels)], lengths, cuts, seed)
    anchors = [tokens[-1] for tokens in texts.tokens]
    (wanted, wanted_logits), (found, found_logits) = (
        cast(TorchDFlashHead, executor).places(*last, anchors, executor.longest or 0)
        for executor, last in zip(texts.executors, texts.last)
    )  # fmt: skip
    assert near(found, wanted, kernels) and near(found_logits, wanted_logits, kernels)


@pytest.mark.parametrize("anchored", [True, False])
def test_a_window_may_be_the_largest_number_there_is(anchored: bool) -> None:
    """With the largest window of 32 bits, places see what they see without a window."""
    layers = {**SLIDING, "sliding_window": 2**31 - 1}
    head = make_head(1, torch.float32, layers=layers, causal=(False,) * 3, anchored=anchored)
    texts = Texts([pytorch_twin(make_head(1, torch.float32), COMPILED), prepared(head, COMPILED)], [9, 2], [4], 1)
    (wanted, _), (found, _) = (
        cast(TorchDFlashHead, executor).places(*last, [1, 2], 4) for executor, last in zip(texts.executors, texts.last)
    )
    assert near(found, wanted, COMPILED)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([*PARALLEL]), st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(0, 5),
    st.lists(st.integers(1, 9), max_size=3), st.sampled_from([*VARIANTS, *NARROW]), st.data(),
)  # fmt: skip
def test_places_of_a_parallel_head_are_those_of_pytorch(
    kind: str, lengths: list[int], seed: int, cuts: list[int], kernels: str, data: st.DataObject
) -> None:
    """Logits in ragged batches, for drafts of any length, and contexts that are read in one call or several: by the
    step that serves penalties and forms, and by the draft in one call."""
    head = random_head(kind, seed)
    texts = Texts([pytorch_twin(head, kernels), prepared(head, kernels)], lengths, cuts, seed)
    max_len = [data.draw(st.integers(1, 7)) for _ in lengths]
    rows = [Row(tokens, 1, SamplingParams(temperature=0.0), Exact(), 0, 15) for tokens in texts.tokens]
    said = list[list[Tensor]]()
    for executor, last in zip(texts.executors, texts.last):
        follow = executor.block(*last, [0] * len(rows), max_len)
        drafted = executor.draft(*last, DraftSpec(with_logits=True), rows, max_len)
        assert isinstance(follow, Marginals) and drafted.logits_BKV is not None
        said.append([values_BKV[..., head.to_target_U] for values_BKV in (follow.logits_BKV, drafted.logits_BKV)])
    wanted_BKU = said[0][0]
    for found_BKU in said[1]:
        for b, n in enumerate(max_len):
            assert near(found_BKU[b, :n], wanted_BKU[b, :n], kernels)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([*ALL_KINDS, *PARALLEL]), st.lists(st.integers(2, 20), min_size=1, max_size=4), st.integers(0, 99),
    st.sampled_from([0.0, 0.7]), st.sampled_from(list(VARIANTS)), st.data(),
)  # fmt: skip
def test_a_draft_is_that_of_pytorch(
    kind: str, lengths: list[int], seed: int, temperature: float, kernels: str, data: st.DataObject
) -> None:
    """Tokens, and what they are drawn from, of drafts of any length, which stop by chance, at a token or nowhere."""
    head = random_head(kind, seed % 7)
    executors = [pytorch_twin(head, kernels), prepared(head, kernels)]
    texts = Texts(executors, lengths, [], seed)
    stop_ids = data.draw(st.sampled_from([(), (3, 5, 7, 11), tuple(range(20))]))
    max_len = [data.draw(st.integers(1, executors[0].longest or 0)) for _ in lengths]
    reach = data.draw(st.sampled_from([(), (0.0, 0.1, 0.3, 0.05)[: len(lengths)]]))
    spec = DraftSpec(data.draw(st.sampled_from([0.0, 0.2, 0.6])), reach, with_logits=data.draw(st.booleans()))
    params = [SamplingParams(temperature=temperature * (b % 3 < 2), top_k=9, stop_token_ids=stop_ids) for b in range(4)]
    rows = [Row(tokens, 1, each, Exact(), b, 15) for b, (tokens, each) in enumerate(zip(texts.tokens, params))]
    sampling = BatchSampling.of([row.params for row in rows]) if temperature else None
    seeds = [seed_of(row) for row in rows]
    wanted, found = (
        executor.draft(*last, spec, rows, max_len, sampling, seeds)
        for executor, last in zip(executors, texts.last)
    )  # fmt: skip
    assert found.tokens == wanted.tokens
    for own, other in ((found.probs_BKV, wanted.probs_BKV), (found.logits_BKV, wanted.logits_BKV)):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            torch.testing.assert_close(own[:, : other.shape[1]], other, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kernels", [VARIANTS[0], *(name for name in NARROW if name.startswith(VARIANTS[0]))])
@pytest.mark.parametrize("kind", ["rnn", "sliding", "p-eagle", "p-eagle, sliding"])
def test_a_block_depends_on_its_row_alone(kind: str, kernels: str) -> None:
    """To the last bit, also where there are more blocks than fit into a tile of 256 tokens, and where rows between them
    are biased."""
    compiled = prepared(random_head(kind, 1), kernels)
    lengths = [1 + 7 * b % 11 for b in range(60)]
    texts = Texts([compiled], lengths, [], 0)
    spec = DraftSpec(with_logits=True)
    params = [SamplingParams(temperature=0.0, logit_bias={3: 0.5} if b % 3 else {}) for b in range(60)]
    rows = [Row(tokens, 1, own, Exact(), 0, 15) for tokens, own in zip(texts.tokens, params)]
    (last,) = texts.last
    together = compiled.draft(*last, spec, rows, [4] * 60)
    for b in range(0, 60, 7):
        ((batch, states_TF),) = texts.parts([b], lengths)
        alone = compiled.draft(batch, states_TF, spec, [rows[b]], [4])
        assert alone.tokens == together.tokens[b : b + 1]
        assert alone.logits_BKV is not None and together.logits_BKV is not None
        assert torch.equal(alone.logits_BKV[0], together.logits_BKV[b])


@pytest.mark.parametrize("ending", ["w8a8", "w4"])
def test_a_large_parallel_head_drafts_for_each_row_alone(ending: str) -> None:
    """As many tokens, rows and outputs as in use: several tiles, of which one ends among a row's mask tokens; an output
    matrix with a sketch."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
    layer = make_layer(family="llama", vocab_size=17_000, num_hidden_layers=4, max_position_embeddings=512, **sizes)
    options: dict[str, Any] = {"target_hidden_size": 160, "states": (1, 2, 4), "mask_token_id": MASK, "drafts": 15}
    head = Eagle3Head(HeadConfig(layer=layer, draft_vocab_size=16_500, **options)).eval().requires_grad_(False)
    randomise(head, 0)
    head.to_target_U.copy_(torch.arange(16_500) + 400)
    compiled = prepared(head, f"{COMPILED}-{ending}")
    lengths = [(29 * b) % 101 + 1 for b in range(24)]
    texts = Texts([compiled], lengths, [90], 0)
    params = SamplingParams(temperature=0.0)
    rows = [Row(tokens, 1, params, Exact(), 0, 15) for tokens in texts.tokens]
    (last,) = texts.last
    together = compiled.draft(*last, DraftSpec(with_logits=True), rows, [15] * 24)
    assert together.logits_BKV is not None and {len(chain) for chain in together.tokens} == {15}
    for b in range(0, 24, 5):
        ((batch, states_TF),) = texts.parts([b], lengths)
        alone = compiled.draft(batch, states_TF, DraftSpec(with_logits=True), [rows[b]], [15])
        assert alone.logits_BKV is not None and torch.equal(alone.logits_BKV[0], together.logits_BKV[b])
        assert alone.tokens == [together.tokens[b]] and min(together.tokens[b]) >= 400


def on_kernels(kind: str, ending: str = "", **options: Any) -> BlockDraft:
    return BlockDraft(runs(kind, kernels=f"{COMPILED}-{ending}" if ending else COMPILED), **options)


@pytest.mark.parametrize("ending", ["w8a8", "w4a8"])
@pytest.mark.parametrize("kind", [*KINDS, "p-eagle"])
def test_the_texts_are_the_targets_own(kind: str, ending: str) -> None:
    check_texts(f"{COMPILED}-{ending}" if ending else COMPILED, on_kernels(kind, ending))


@pytest.mark.usefixtures("few_seeds")
@pytest.mark.parametrize("kind", ["dspark", "p-eagle"])
def test_the_kit_finds_nothing(kind: str) -> None:
    check_draft(lambda: on_kernels(kind, "w8a8"), target=target_on(COMPILED))


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("dflash", "exact"),
        ("dspark", "fly(theta=0.1, window=1, hold=1)"),
        ("rnn", "typical"),
        ("anchor-first", "exact"),
        ("p-eagle", "exact"),
        ("p-eagle", "near"),
    ],
)
def test_rounds_in_one_call_are_rounds_one_by_one(kind: str, policy: str) -> None:
    """Compiled rounds draft and decide as the engine does, one round after another; PyTorch's way drafts the same."""
    prompts = [[5, 3, 8], [1, 2, 3, 4, 1, 2], [7], [5, 3, 8, 1]]
    found = []
    for stretch, on_torch in ((0.05, False), (0, False), (0, True)):
        draft = BlockDraft(runs(kind)) if on_torch else on_kernels(kind)
        draft.reach = 0.05
        llm = LLM(target_on(COMPILED), draft, policy, k=4)
        llm.engine.stretch = stretch
        outputs = [llm.generate([prompt], params)[0] for prompt, params in zip(prompts, PARAMS)]
        outputs += llm.generate(prompts, PARAMS)
        found.append([(out.token_ids, out.stats.drafted, out.stats.accepted) for out in outputs])
    assert found[0] == found[1] == found[2]
    assert sum(drafted for _, drafted, _ in found[0]) > 100


def drafts_of(draft: DraftStrategy, prompts: list[list[int]], temperature: float, stretch: float) -> list[Any]:
    """The text of each request, alone and beside others, and how many tokens each of its rounds drafted and kept."""
    params = [SamplingParams(temperature=temperature * (b % 3 < 2), max_tokens=30, seed=b) for b in range(len(prompts))]
    llm = LLM(target_on(COMPILED, SMALL), draft, k=7)
    llm.engine.stretch = stretch
    rows, step = dict[int, Row](), llm.engine.step

    def noted(going: abc.Sequence[Row], *others: Any, **options: Any) -> Any:
        rows.update({row.id: row for row in going})
        return step(going, *others, **options)

    llm.engine.step = noted  # type: ignore[method-assign]
    llm.generate(prompts[:1], params[:1])
    llm.generate(prompts, params)
    return [(row.tokens, row.drafts) for row in rows.values()]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["dflash", "dspark", "p-eagle"]), st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9),
    min_size=1, max_size=3), st.sampled_from([0.0, 1.0, 3.0]), st.integers(1, 9), st.sampled_from([None, 3, 4]),
    st.sampled_from([0.0, 0.02]),
)  # fmt: skip
def test_a_lookup_beside_a_head_goes_on_in_one_call_as_round_by_round(
    kind: str, prompts: list[list[int]], temperature: float, copied: int, k: int | None, reach: float
) -> None:
    """Where both begin alike, also beyond the tokens that the head drafts. Texts of four tokens repeat themselves."""
    one_call, one_by_one = (
        drafts_of(
            LookupDraft(NGramDraft(3, 1, copied), BlockDraft(small_runs(kind, COMPILED, 6), k=k, reach=reach)),
            prompts, temperature, stretch,
        )
        for stretch in (60, 0)
    )  # fmt: skip
    assert one_call == one_by_one


@pytest.mark.parametrize("kind", ["dflash", "p-eagle"])
def test_a_drawn_draft_goes_on_with_a_shorter_copy_in_one_call_too(kind: str) -> None:
    """Copies have three tokens, and drafts of the head alone five or more."""
    prompts = [[n % 4, n // 4, 1, 3, n % 3] for n in range(12)]
    one_call, one_by_one = (
        drafts_of(LookupDraft(NGramDraft(3, 1, 3), BlockDraft(small_runs(kind, COMPILED, 6))), prompts, 6.0, stretch)
        for stretch in (60, 0)
    )
    assert one_call == one_by_one
    assert any((3, kept) in drafts for _, drafts in one_call for kept in range(4))


@pytest.mark.parametrize("kind", ["dflash", "p-eagle"])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_a_lookup_beside_a_head_shares_a_call_and_drafts_more(kind: str, temperature: float) -> None:
    prompts = [[n % 4, n // 4, 1, 3, n % 3] for n in range(12)]
    block, beside = (BlockDraft(small_runs(kind, COMPILED, 6), k=3) for _ in range(2))
    alone = drafts_of(block, prompts, temperature, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LookupDraft, "propose", lambda *_: pytest.fail("a round was taken by itself"))
        both = drafts_of(LookupDraft(NGramDraft(3, 1, 7), beside), prompts, temperature, 60)
    assert [max(drafted for _, drafts in of for drafted, _ in drafts) for of in (alone, both)] == [3, 7]


@pytest.mark.parametrize("kernels", ["torch", COMPILED, f"{COMPILED}-w8a8", f"{COMPILED}-w4a8"])
def test_the_output_matrix_is_that_of_the_logits(kernels: str) -> None:
    """As an executor gives it, and as the logits of unit vectors give it. The logits of any vector are its products
    with the matrix, but for the vector's rounding to 8 bits."""
    target = target_on(kernels)
    output_VC, hidden_TC = target.output(), torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    allowed = 2e-2 if "a8" in kernels else 1e-5
    for found_VC, wanted_VC in (
        (Executor.output(target), output_VC),
        (target.logits(hidden_TC).T, output_VC @ hidden_TC.T),
    ):
        assert float((found_VC - wanted_VC).norm() / wanted_VC.norm()) < allowed


@pytest.mark.parametrize("kind", ["dspark", "p-eagle"])
def test_rounds_share_a_call(kind: str) -> None:
    llm = LLM(target_on(COMPILED), on_kernels(kind), k=4)
    plans = []
    take = llm.engine.runner.executor.rounds
    llm.engine.runner.executor.rounds = lambda plan: plans.append(plan) or take(plan)  # type: ignore[method-assign, func-returns-value]
    out = llm.generate([[1, 2, 3, 4]], SamplingParams(temperature=0.0, max_tokens=40))[0]
    assert 0 < len(plans) < out.stats.rounds and all(plan.drafter is not None for plan in plans)


@pytest.mark.parametrize("kind", ["dflash", "p-eagle"])
def test_a_text_may_fill_the_context(kind: str) -> None:
    prompt, params = [n % 22 for n in range(70)], SamplingParams(temperature=0.0, max_tokens=26)
    plain = LLM(target_on(COMPILED)).generate([prompt], params)[0]
    drafted = []
    for stretch in (0.05, 0):
        llm = LLM(target_on(COMPILED), on_kernels(kind), k=5)
        llm.engine.stretch = stretch
        out = llm.generate([prompt], params)[0]
        assert out.token_ids == plain.token_ids and len(prompt) + len(out.token_ids) == 96
        drafted.append(out.stats.drafted)
    assert drafted[0] == drafted[1] > 0


@pytest.mark.parametrize("ending", ["", "w8a8", "w4"])
@pytest.mark.parametrize("kind", ["dspark", "p-eagle"])
def test_a_head_by_its_path_runs_as_its_target_does(kind: str, ending: str, tmp_path: Path) -> None:
    kernels = f"{COMPILED}-{ending.replace('w4', 'w4a8')}".removesuffix("-")
    if kind == "p-eagle":
        save_head(make_parallel_head(), tmp_path, torch.float32)
    else:
        save_dflash_head(make_block_head(kind), tmp_path, torch.float32)
    target = target_on(kernels)
    llm = LLM(target, f"block({tmp_path})" if ending != "w4" else f"block({tmp_path}, kernels=w4)", k=4)
    head: Any = llm.draft.runner.head  # type: ignore[union-attr]
    assert isinstance(head, CompiledBlockHead) and head.kernels == f"{COMPILED}-{ending}".removesuffix("-")
    kept = {"markov_head", "confidence_head"} if kind == "dspark" else set()
    assert {*head.head._modules} == kept  # the rest is packed alone
    with pytest.raises(ValueError, match="drafts for another target already"):
        head.share(target_on(kernels))
    assert not isinstance(load(tmp_path, kernels="torch").executor, CompiledBlockHead)
    with pytest.raises(ValueError, match="no target yet"):
        _ = load(tmp_path).executor.packed  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["dflash", "anchor-first", "dspark"])
@pytest.mark.parametrize("kernels", ["torch", COMPILED])
def test_a_trimmed_head_drafts_its_tokens_alone(kind: str, kernels: str) -> None:
    """As the whole head does, if its logits for other tokens are left out."""
    executor = TorchDFlashHead if kernels == "torch" else partial(CpuDFlashHead, variant=kernels)
    kept = [0, 2, 4, 5, 8, 9, 10, 14]
    trimmed = BlockDraft(executor(make_block_head(kind)), vocabulary=kept)
    whole = BlockDraft(TorchDFlashHead(make_block_head(kind)))
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    chains = []
    for draft in (trimmed, whole):
        llm = LLM(target_on(kernels), draft, k=4)
        (request,) = llm.requests([[3, 1, 4, 1, 5, 9]], greedy)
        row = request.row
        with torch.inference_mode():
            llm.engine.runner.feed([], [], prefill=[(row, 5)])
            if draft is whole:
                row.params = greedy.changed({"logit_bias": {n: -100.0 for n in range(24) if n not in kept}})
            chains += draft.propose([row], [4]).chains
    own = set(make_block_head(kind).to_target_U.tolist())
    assert chains[0] == chains[1] and {*chains[0]} <= {*kept} & own
    check_texts(kernels, BlockDraft(executor(make_block_head(kind)), vocabulary=kept))


def test_what_cannot_be_trimmed_is_named() -> None:
    with pytest.raises(ValueError, match="vocabulary trims models, DFlash and DSpark heads; Eagle3Head is neither"):
        LLM(target_on("torch"), BlockDraft(runs("p-eagle"), vocabulary=4))
    with pytest.raises(ValueError, match="drafts none of the 2 tokens to keep"):
        LLM(target_on("torch"), BlockDraft(runs("anchor-first"), vocabulary=[1, 3]))


@pytest.mark.parametrize("kind", ["dspark", "p-eagle"])
def test_a_head_drafts_for_one_target_and_for_it_again(kind: str) -> None:
    head, target = runs(kind, kernels=COMPILED), target_on(COMPILED)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    first, second = (LLM(target, BlockDraft(head), k=3).generate([[1, 2, 3]], params)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    with pytest.raises(ValueError, match="drafts for another target already"):
        LLM(target_on(COMPILED), BlockDraft(head))
