"""Drafting whole blocks in one forward: DFlash, DSpark and P-EAGLE heads as strategies.

Shape legend: T tokens, F hidden states of the target side by side, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter, abc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from fly.backends import executor_of
from fly.backends.cpu import CpuDFlashHead, CpuPEagleHead, available
from fly.backends.heads import TorchDFlashHead, TorchPEagleHead
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.drafts import BlockDraft, LookupDraft, NGramDraft, pad, parse_draft
from fly.drafts.base import split_rows
from fly.drafts.model import seed_of
from fly.extras.eval.timed import HeadClock
from fly.llm import LLM
from fly.models import Llama
from fly.models.config import CheckpointError
from fly.models.dflash import DFlashConfig, DFlashHead, save_dflash_head
from fly.models.eagle import Eagle3Head, HeadConfig, load_head, save_head
from fly.models.llama import DenseCausal, record_states
from fly.params import SamplingParams
from fly.policies import Exact
from fly.runner.drafting import DraftSpec, Marginals, draft_at_once, draft_chains
from fly.runner.executor import Batch, BlockHead
from fly.runner.request import Row
from fly.runner.sampling import BatchSampling
from fly.testing import check_draft
from fly.testing.stage import DraftKit
from fly.testing.toys import toy_target
from fly.types import Draft
from tests.test_dflash import naive_block, naive_logits, need_speculators
from tests.test_eagle import TARGET, changed, check_texts, make_head, randomise, target_on
from tests.test_lossless import Process, distance

COMPILED = available()[0]
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "anchor-first": {"anchor_first": True, "draft_vocab_size": 12},
    "dspark": {"anchor_first": True, "markov": "vanilla", "markov_rank": 4, "confidence": True,
               "confidence_with_markov": True},
    "rnn": {"markov": "rnn", "markov_rank": 4, "confidence": True, "draft_vocab_size": 12},
}  # fmt: skip


def make_block_head(kind: str = "dflash", seed: int = 1, own: bool = False, **options: Any) -> DFlashHead:
    """A random head for ``TARGET``, whose embedding and output matrix it shares unless it has its ``own``."""
    layer = options.pop("layer", TARGET.resized(2, family="qwen3"))
    config = DFlashConfig(
        layer=layer,
        **{"draft_vocab_size": 24, "target_hidden_size": 32, "states": (0, 2, 3), "block_size": 5, "mask_token_id": 23,
           "causal": (False, False), **KINDS[kind], **options},
    )  # fmt: skip
    head = DFlashHead(config, embedding=own, output=own or config.draft_vocab_size != 24)
    randomise(head, seed)
    head.to_target_U.copy_(torch.arange(24)[:: 24 // config.draft_vocab_size])
    return head.eval().requires_grad_(False)


def make_parallel_head(seed: int = 1, layers: int = 2, **options: Any) -> Eagle3Head:
    """A random P-EAGLE head for ``TARGET``."""
    config = HeadConfig(
        layer=TARGET.resized(layers), draft_vocab_size=12, target_hidden_size=32, states=(0, 2, 3), mask_token_id=23,
        drafts=5, **options,
    )  # fmt: skip
    head = Eagle3Head(config)
    randomise(head, seed)
    head.to_target_U.copy_(torch.arange(24)[::2])
    return head.eval().requires_grad_(False)


def runs(kind: str, seed: int = 1, kernels: str = "torch") -> BlockHead:
    """The executor of a random head."""
    if kind == "p-eagle":
        parallel = make_parallel_head(seed)
        return TorchPEagleHead(parallel) if kernels == "torch" else CpuPEagleHead(parallel, kernels)
    head = make_block_head(kind, seed)
    return TorchDFlashHead(head) if kernels == "torch" else CpuDFlashHead(head, kernels)


# What is drafted


@pytest.mark.usefixtures("few_seeds")
@pytest.mark.parametrize("kind", ["rnn"])
def test_the_kit_finds_nothing(kind: str) -> None:
    """Among others: tokens are drawn from what the draft reports, and caches survive forks, rollbacks and lack of
    room."""
    check_draft(lambda: BlockDraft(runs(kind)), target=target_on("torch"))


def states_before(model: Llama, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """The target's hidden states [T, F] after these numbers of layers, by a forward over the whole text."""
    taken: dict[int, Tensor] = dict.fromkeys(layers, torch.empty(0))
    model(torch.tensor(tokens), torch.arange(len(tokens)), DenseCausal(1, len(tokens)), through=record_states(taken))
    return torch.cat([taken[number] for number in layers], -1)


def naive_chain(kind: str, seed: int, model: Llama, tokens: list[int], count: int) -> list[int]:
    """The most likely tokens of a block after a text, by the papers' descriptions alone: everything from the start."""
    states_TF = states_before(model, tokens[:-1], (0, 2, 3))
    if kind == "p-eagle":
        head = make_parallel_head(seed)
        count = min(count, head.config.drafts or count)
        masks = head.mask_hidden.view(1, -1).expand(count - 1, -1)
        fed = [*tokens[1:], *[23] * (count - 1)]
        x_TC = head(torch.tensor(fed), head.fuse(torch.cat([states_TF, masks])), torch.arange(len(fed)),
                    DenseCausal(1, len(fed)))  # fmt: skip
        return head.to_target_U[head.logits(x_TC[-count:]).argmax(-1)].tolist()
    head = make_block_head(kind, seed)
    head.embed_tokens, head.shares = model.embed_tokens, False
    head.lm_head = head.lm_head or model.lm_head
    hidden_KC = naive_block(head, states_TF, tokens[-1])
    drafted: list[int] = []
    for place in range(min(count, head.config.drafts)):
        before = [*drafted, *[0] * (head.config.drafts - len(drafted))]
        logits_KU, _ = naive_logits(head, hidden_KC, tokens[-1], before)
        drafted.append(int(head.to_target_U[logits_KU[place].argmax()]))
    return drafted


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 22), min_size=2, max_size=20), st.integers(1, 6), st.integers(0, 9),
    st.sampled_from([*KINDS, "p-eagle"]), st.sampled_from(list(dict.fromkeys(["torch", COMPILED]))),
)  # fmt: skip
def test_chains_are_those_of_the_naive_twin(prompt: list[int], k: int, seed: int, kind: str, kernels: str) -> None:
    """Round after round, whatever stands of a draft. A wrong layer's hidden states would be seen here too."""
    model = toy_target(24, TARGET)
    llm = LLM(executor_of(model, kernels), BlockDraft(runs(kind, seed)), k=k)
    (out,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=12))
    tokens, drafted, at = [*prompt, *out.token_ids], 0, len(prompt) + 1
    while at < len(tokens):
        most = min(k, len(tokens) - at - 1)
        chain = naive_chain(kind, seed, model, tokens[:at], most)[:most] if most else []
        stand = next((n for n, token in enumerate(chain) if token != tokens[at + n]), len(chain))
        drafted += len(chain)
        at += stand + 1
    assert out.stats.drafted == drafted


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_hidden_states_of_a_wrong_layer_are_seen(kind: str) -> None:
    """Layers' numbers that are off by one are a silent trap: drafts are merely worse."""
    model, text = toy_target(24, TARGET), [3, 1, 4, 1, 5, 9, 2, 6]
    expected = [naive_chain(kind, seed, model, text, 4)[:4] for seed in range(3)]
    for states, right in (((0, 2, 3), True), ((0, 1, 3), False), ((0, 2, 2), False), ((1, 2, 3), False)):
        found = list[list[int]]()
        for seed in range(3):
            head = make_block_head(kind, seed, states=states)
            llm = LLM(TorchExecutor(model), BlockDraft(TorchDFlashHead(head)), k=4)
            (request,) = llm.requests([text], GREEDY)
            with torch.inference_mode():
                llm.engine.runner.feed([], [], prefill=[(request.row, len(text) - 1)])
                found += llm.draft.propose([request.row], [4]).chains
        assert (found == expected) is right


@pytest.mark.parametrize(
    "options", [{}, {"norm_before_residual": True, "fc_norm": True}, {"norm_before_fc": True}], ids=str
)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_parallel_head_says_what_speculators_says(layers: int, options: dict[str, bool], tmp_path: Path) -> None:
    """The logits of a block after each of several places of a text; and what the package saves, we load."""
    need_speculators()
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig as PackagedLayer

    head, length, count = make_parallel_head(layers=layers, **options).double(), 12, 5
    layer = head.config.layer
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(layer, name) for name in (*names, "num_hidden_layers", "max_position_embeddings")}
    packaged = PackagedLayer(**sizes, rope_theta=layer.rope_theta, rms_norm_eps=layer.rms_norm_eps)
    packaged._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=count)
    config = PEagleSpeculatorConfig(
        transformer_layer_config=packaged, draft_vocab_size=12, mask_token_id=23,
        eagle_aux_hidden_state_layer_ids=[0, 2, 3], **options,
        speculators_config=SpeculatorsConfig(
            algorithm="peagle", proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )  # fmt: skip
    model: Any = PEagleDraftModel(config).double().eval()
    lost = model.load_state_dict(head.stored(), strict=False)
    assert not lost.unexpected_keys and {*lost.missing_keys} <= {
        "t2d",
        "d2t",
        "verifier_norm.weight",
        "verifier_lm_head.weight",
    }
    marked_V = torch.zeros(24, dtype=torch.bool).index_fill_(0, head.to_target_U, True)
    model.load_vocab_mappings(marked_V, head.to_target_U - torch.arange(12))
    torch.nn.init.ones_(model.verifier_norm.weight)
    torch.nn.init.ones_(model.verifier_lm_head.weight)
    # Each place of the text, then the chains of mask tokens after some of them.
    generator = torch.Generator().manual_seed(0)
    states_TF = torch.randn(length, 96, dtype=torch.float64, generator=generator)
    tokens = torch.randint(0, 24, (length,), generator=generator).tolist()
    ends = [2, 6, 7]
    anchor_pos = torch.tensor([*range(length), *(end for end in ends for _ in range(count - 1))])
    depth = torch.tensor([0] * length + [*range(1, count)] * len(ends))
    logits = list[Tensor]()
    model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out.detach()[0].clone()))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(core, "generate_cod_sample_indices", lambda **given: (anchor_pos, depth))
        patch.setattr(core, "compute_metrics", lambda **given: (None, {}))
        last = torch.zeros(1, length, 32, dtype=torch.float64)
        document = torch.zeros(1, length, dtype=torch.long)
        model(states_TF[None], torch.tensor([tokens]), document, verifier_last_hidden_states=last)
    worst = 0.0
    executor, starts = TorchPEagleHead(head), [0, 4, 3]
    cache = PagedKVCache.for_model(executor, 128)
    for row, (start, end) in enumerate(zip(starts, ends)):  # tokens before ``start`` are read in a call of their own
        cache.resize(row, end + count)
        if start:
            first = Batch.of([tokens[:start]], cache.batch([row], [0], [start]))
            executor.read(first, states_TF[:start])
    counts = [end + 1 - start for start, end in zip(starts, ends)]
    batch = Batch.of(
        [tokens[start : end + 1] for start, end in zip(starts, ends)], cache.batch(range(3), starts, counts)
    )
    read_TF = torch.cat([states_TF[start : end + 1] for start, end in zip(starts, ends)])
    follow = executor.block(batch, read_TF, [0] * 3, [count, count, 3])
    for place in range(count):
        active = [0, 1, 2] if place < 3 else [0, 1]
        found = follow(active, [0] * len(active)).logits_AV[:, head.to_target_U].double()
        for row, logits_U in zip(active, found):
            at = ends[row] if place == 0 else length + row * (count - 1) + place - 1
            expected_U = logits[0][at]
            worst = max(worst, float((logits_U - expected_U).abs().max() / expected_U.abs().max()))
    assert worst < 3e-6  # its rotary tables are rounded to float32
    model.float().save_pretrained(tmp_path)
    again = load_head(tmp_path, torch.float64)
    assert again.config == head.config.model_copy(update={"layer": again.config.layer})
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter, dict(head.named_parameters())[name])


# Losslessness


SMALL = TARGET.resized(1, vocab_size=4)


def small_runs(kind: str, kernels: str = "torch", size: int = 3) -> BlockHead:
    """A head for a target of four tokens, with blocks of ``size`` places."""
    if kind == "p-eagle":
        config = HeadConfig(
            layer=SMALL, draft_vocab_size=3, target_hidden_size=32, states=(0, 1), mask_token_id=3
        )  # fmt: skip
        parallel = Eagle3Head(config)
        randomise(parallel, 3)
        parallel.to_target_U.copy_(torch.tensor([0, 1, 3]))
        parallel = parallel.eval().requires_grad_(False)
        return TorchPEagleHead(parallel) if kernels == "torch" else CpuPEagleHead(parallel, kernels)
    options = {**KINDS[kind], "draft_vocab_size": 3, "states": (0, 1), "block_size": size, "mask_token_id": 3}
    config = DFlashConfig(
        layer=SMALL.resized(1, family="qwen3"), target_hidden_size=32, causal=(False,), **options
    )  # fmt: skip
    head = DFlashHead(config, output=True)
    randomise(head, 3)
    head.to_target_U.copy_(torch.tensor([0, 1, 3]))
    head = head.eval().requires_grad_(False)
    return TorchDFlashHead(head) if kernels == "torch" else CpuDFlashHead(head, kernels)


class Reported:
    """A drafter for ``emitted_distribution``: what the strategy reports after each string that it draws."""

    def __init__(self, strings: list[tuple[list[int], Tensor]], temperature: float) -> None:
        self.known: dict[tuple[int, ...], Tensor] = {}
        for tokens, probs_NV in strings:
            for n, probs_V in enumerate(probs_NV):
                known_V = self.known.setdefault(tuple(tokens[:n]), probs_V.double())
                assert torch.equal(known_V, probs_V.double())  # it depends on the tokens before alone

    def distribution(self, string: tuple[int, ...]) -> Tensor:
        return self.known[string] / self.known[string].sum()


class Continued:
    """A target for ``emitted_distribution``: its distribution after a text and each string."""

    vocab, greedy = 4, False

    def __init__(self, model: Llama, text: list[int], temperature: float) -> None:
        self.model, self.text, self.temperature = model, text, temperature
        self.distribution = cache(self._distribution)

    def _distribution(self, string: tuple[int, ...]) -> Tensor:
        tokens = [*self.text, *string]
        x_TC = self.model(torch.tensor(tokens), torch.arange(len(tokens)), DenseCausal(1, len(tokens)))
        return (self.model.logits(x_TC[-1:])[0].double() / self.temperature).softmax(-1)

    joint = Process.joint


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [*((kind, "torch") for kind in (*KINDS, "p-eagle")), ("dspark", COMPILED), ("p-eagle", COMPILED)],
)
def test_what_is_emitted_is_the_targets_by_exact_sums(kind: str, kernels: str) -> None:
    """Over every draft of two tokens and every outcome: the joint distribution of three tokens. And drafts come as
    often as they report."""
    model, temperature, text, count = toy_target(4, SMALL), 6.0, [0, 1, 2, 3, 1], 600
    llm = LLM(executor_of(model, kernels), BlockDraft(small_runs(kind, kernels)), k=2, cache=20_000)
    params = SamplingParams(temperature=temperature, max_tokens=8)
    rows = [
        request.row for request in llm.requests([text] * count, [params.changed({"seed": n}) for n in range(count)])
    ]
    strings = list[tuple[list[int], Tensor]]()
    with torch.inference_mode():
        llm.engine.runner.feed([], [], prefill=[(row, len(text) - 1) for row in rows])
        draft = llm.draft.propose(rows, [2] * count)
        for piece in split_rows(draft):
            assert piece.probs_NV is not None and len(piece.tokens) == 2
            strings.append((piece.tokens, piece.probs_NV))
    reported = Reported(strings, temperature)
    assert len({tuple(tokens) for tokens, _ in strings}) == 9  # all strings of the draft vocabulary
    target: Any = Continued(model, text, temperature)
    drafter: Any = reported
    assert distance(Exact(), target, drafter, 2, stop=None, deterministic=False) < 1e-6
    counts = Counter(tuple(tokens) for tokens, _ in strings)
    statistic = 0.0
    for string, seen in counts.items():
        chance = float(reported.known[()][string[0]] * reported.known[string[:1]][string[1]])
        statistic += (seen - count * chance) ** 2 / (count * chance)
    assert statistic < 8 + 4 * math.sqrt(2 * 8)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 6), st.integers(0, 99))
def test_all_places_at_once_are_those_one_by_one(data: st.DataObject, count: int, most: int, seed: int) -> None:
    """Greedy and drawn rows, of other lengths each, that stop by chance, at a token or nowhere."""
    logits_BKV = 2 * torch.randn(count, most, 24, generator=torch.Generator().manual_seed(seed))
    temperatures = data.draw(st.lists(st.sampled_from([0.0, 0.7, 1.5]), min_size=count, max_size=count))
    stop_ids = data.draw(st.sampled_from([(), (3, 5, 7, 11), tuple(range(12))]))
    rows = [
        Row([1, 2, 3, *[4] * b], 3, SamplingParams(temperature=t, top_k=9, stop_token_ids=stop_ids), Exact(), b, 15)
        for b, t in enumerate(temperatures)
    ]  # fmt: skip
    max_len = data.draw(st.lists(st.integers(1, most), min_size=count, max_size=count))
    reach = data.draw(st.sampled_from([(), (0.0, 0.1, 0.3)[:count]]))
    spec = DraftSpec(data.draw(st.sampled_from([0.0, 0.2, 0.6])), reach, with_logits=data.draw(st.booleans()))
    sampling = BatchSampling.of([row.params for row in rows]) if any(temperatures) else None
    model, seeds = runs("dflash"), [seed_of(row) for row in rows]
    expected = draft_chains(model, Marginals(logits_BKV), spec, rows, max_len, sampling, seeds)
    found = draft_at_once(model, logits_BKV, spec, rows, max_len, sampling, seeds)
    assert found.tokens == expected.tokens
    for own, other in ((found.probs_BKV, expected.probs_BKV), (found.logits_BKV, expected.logits_BKV)):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other)


# With an engine


GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.mark.parametrize(
    ("kind", "kernels"), [*((kind, "torch") for kind in (*KINDS, "p-eagle")), ("dflash", COMPILED), ("rnn", COMPILED)]
)
def test_the_texts_are_the_targets_own(kind: str, kernels: str) -> None:
    check_texts(kernels, BlockDraft(runs(kind)))


@pytest.mark.parametrize(
    "policy", ["exact", "block", "lossy(lenience=2)", "fly(theta=0.1, window=4, hold=2)", "typical"]
)
def test_every_rule_decides_on_blocks(policy: str) -> None:
    """Greedy and drawn rows in one batch, with penalties and forms; a cache that has room for few rows at once."""
    params = [
        GREEDY, SamplingParams(temperature=1.0, max_tokens=20, seed=3),
        SamplingParams(temperature=0.7, top_k=5, max_tokens=20, seed=4),
        GREEDY.changed({"repetition_penalty": 1.5, "min_tokens": 5}), GREEDY.changed({"bad_words_ids": ((7,), (8, 9))}),
        SamplingParams(temperature=1.2, max_tokens=20, seed=5, presence_penalty=1.0),
    ]  # fmt: skip
    prompts = [[5, 3, 8], [1, 2, 3, 4, 1, 2], [7], [5, 3, 8, 1], [2, 2], [9, 8, 7]]
    alone = [LLM(target_on("torch")).generate([prompt], one)[0] for prompt, one in zip(prompts, params)]
    llm = LLM(target_on("torch"), BlockDraft(runs("dspark"), cache_tokens=60), policy, k=5, cache=100)
    found = llm.generate(prompts, params)
    for one, plain, each in zip(found, alone, params):
        assert len(one.token_ids) == 20 and one.stats.drafted
        if policy in ("exact", "block") and each.temperature == 0:
            assert one.token_ids == plain.token_ids
    for allocator in llm.scheduler.allocators:  # type: ignore[union-attr]
        assert allocator.num_free == allocator.num_blocks


@pytest.mark.parametrize("kind", ["dflash", "p-eagle"])
def test_a_text_may_fill_the_context(kind: str) -> None:
    """Where a block has no positions left, nothing is drafted."""
    prompt, params = [n % 22 for n in range(70)], GREEDY.changed({"max_tokens": 26})
    plain = LLM(target_on("torch")).generate([prompt], params)[0]
    out = LLM(target_on("torch"), BlockDraft(runs(kind)), k=5).generate([prompt], params)[0]
    assert out.token_ids == plain.token_ids and len(prompt) + len(out.token_ids) == 96 and out.stats.drafted


def test_a_row_whose_prompt_nobody_watched_is_drafted_for_all_the_same() -> None:
    llm = LLM(target_on("torch"), BlockDraft(runs("dflash")), k=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    plain = llm.generate([prompt], GREEDY, k=0)[0]
    again = llm.generate([prompt], GREEDY)[0]
    assert again.token_ids == plain.token_ids and again.stats.drafted


def test_a_clock_around_a_head_changes_nothing() -> None:
    """As ``fly eval`` puts it there; K is larger than a block."""
    found = []
    for clocked in (False, True):
        llm = LLM(target_on("torch"), draft := BlockDraft(runs("dspark")), k=9)
        if clocked:
            draft.runner.head = HeadClock(draft.runner.head)
        out = llm.generate([[1, 2, 3, 4]], GREEDY)[0]
        found.append((out.token_ids, out.stats.drafted))
    assert found[0] == found[1] and draft.runner.head.seconds > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"target_layers": 9}, {"states": None}], ids=str)
def test_the_kit_makes_a_target_for_a_head_by_its_path(options: dict[str, Any], tmp_path: Path) -> None:
    save_dflash_head(make_block_head(**{"states": (0, 3), **options}), tmp_path, torch.float32)
    kit = DraftKit.of(lambda: BlockDraft(tmp_path, dtype="float32"), None, None)
    ((rows, max_len), *_) = kit.batches()
    with torch.inference_mode():
        assert len(kit.stage().draft(rows, max_len).chains) == len(rows)


# Where a draft stops


def test_a_draft_stops_by_confidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DSpark head by what its confidence head says; others by the largest probability. The token where it is unsure
    is drafted too, so that the length depends on the tokens before it alone."""
    said = {0: 0.9, 1: 0.8, 2: 0.3, 3: 0.9}
    correct = DFlashHead.correct

    def correct_with(self: DFlashHead, logits: Tensor, hidden: Tensor, before: Tensor, state: Any) -> Any:
        corrected = correct(self, logits, hidden, before, state)
        places.append(len(places))
        return corrected._replace(chance_B=torch.full((len(before),), said[(len(places) - 1) % 4]))

    places: list[int] = []
    monkeypatch.setattr(DFlashHead, "correct", correct_with)
    for options, length in (({"confidence": 0.5}, 3), ({"reach": 0.75}, 2), ({}, 4), ({"confidence": 0.95}, 1)):
        draft = BlockDraft(runs("dspark"), k=4, **options)
        llm = LLM(target_on("torch"), draft, k=4)
        places.clear()
        (request,) = llm.requests([[1, 2, 3, 4]], GREEDY)
        with torch.inference_mode():
            llm.engine.runner.feed([], [], prefill=[(request.row, 3)])
            assert [len(chain) for chain in draft.propose([request.row], [4]).chains] == [length]
    sure, unsure = (LLM(target_on("torch"), BlockDraft(runs("dflash"), confidence=c), k=4) for c in (0.0, 1.0))
    found = [llm.generate([[1, 2, 3, 4]], GREEDY)[0].stats for llm in (sure, unsure)]
    assert found[1].drafted / found[1].rounds <= 1 < found[0].drafted / found[0].rounds


# Lookup beside it, and by name


class Copies(NGramDraft):
    """A lookup that proposes what the test says."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.tokens = tokens

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        return pad([self.tokens[:n] for n in max_len])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lookup_goes_on_where_both_begin_alike(temperature: float) -> None:
    llm = LLM(target_on("torch"), BlockDraft(runs("dflash")), k=6)
    (request,) = llm.requests([[1, 2, 3, 4]], SamplingParams(temperature=temperature, max_tokens=20, seed=1))
    row = request.row
    with torch.inference_mode():
        llm.engine.runner.feed([], [], prefill=[(row, 3)])
        own = llm.draft.propose([row], [6])
        (chain,) = own.chains
        for looked, expected in (
            ([*chain[:2], 5, 6, 7, 8], [*chain[:2], 5, 6, 7, 8]),
            ([chain[0], chain[1] ^ 1, 5, 6, 7, 8], chain),
            (chain[:3], chain[:3] if temperature else chain),
            (chain[:2], chain),
        ):
            both = LookupDraft(Copies(looked), llm.draft)
            draft = both.propose([row], [6])
            assert draft.chains == [expected]
            if temperature and expected is not chain:
                assert draft.probs_BKV is not None and own.probs_BKV is not None
                torch.testing.assert_close(draft.probs_BKV[0, :2], own.probs_BKV[0, :2])
                assert draft.probs_BKV[0, 2:].argmax(-1).tolist() == expected[2:]
                assert (draft.probs_BKV[0, 2:].amax(-1) == 1).all()


@pytest.mark.parametrize("kind", ["dflash", "dspark", "p-eagle"])
def test_a_drawn_draft_is_the_lookups_whatever_is_drawn_after_both_begin_alike(kind: str) -> None:
    """Each string of tokens has one distribution of the next one, which is the one reported: it may not depend on what
    the head draws later. Here that ends many drafts early, by a stop token or by what the head says of itself."""
    model = toy_target(4, SMALL)
    text = [0, 1, 2, 3, 1]
    count = 300
    block = BlockDraft(small_runs(kind, size=6), confidence=0.5 if kind == "dspark" else 0.0)
    llm = LLM(TorchExecutor(model), block, k=5, cache=20_000)
    params = SamplingParams(temperature=6.0, max_tokens=9, stop_token_ids=(3,))
    requests = llm.requests([text] * count, [params.changed({"seed": n}) for n in range(count)])
    rows = [request.row for request in requests]
    with torch.inference_mode():
        llm.engine.runner.feed([], [], prefill=[(row, len(text) - 1) for row in rows])
        of_head = split_rows(block.propose(rows, [5] * count))
        both = split_rows(LookupDraft(Copies([0, 1, 1, 0]), block).propose(rows, [5] * count))
    Reported([(piece.tokens, piece.probs_NV) for piece in both if piece.probs_NV is not None], 6.0)
    alike = [n for n, piece in enumerate(of_head) if piece.tokens[:2] == [0, 1] and len(piece.tokens) > 2]
    assert len({len(of_head[n].tokens) for n in alike}) > 1 and all(both[n].tokens == [0, 1, 1, 0] for n in alike)
    assert all(both[n].tokens == of_head[n].tokens for n in range(count) if n not in alike)


@pytest.mark.parametrize("draft", ["ngram+{}", "suffix+{}", "adaptive({})", "{}", "choose(a={}, b=ngram)"])
def test_by_its_text(draft: str, tmp_path: Path) -> None:
    save_dflash_head(make_block_head("dspark", own=True), tmp_path, torch.float32)
    prompts = [[5, 3, 8, 5, 3, 8], [1, 2, 3, 4, 1, 2]]
    plain = LLM(target_on(COMPILED)).generate(prompts, GREEDY)
    for text in (str(tmp_path), f"block({tmp_path}, confidence=0.1)"):
        strategy = parse_draft(draft.format(text))
        llm = LLM(target_on(COMPILED), strategy, k=5)
        found = llm.generate(prompts, GREEDY)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        assert any(one.stats.drafted for one in found)
        assert all(one.token_ids for one in llm.generate(prompts, GREEDY.changed({"temperature": 1.0})))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save_dflash_head(make_block_head(), tmp_path / "block", torch.float32)
    save_head(make_head(12), tmp_path / "eagle", torch.float32)
    save_head(make_parallel_head(), tmp_path / "parallel", torch.float32)
    assert isinstance(parse_draft(str(tmp_path / "parallel")), BlockDraft)
    again = load_head(tmp_path / "parallel")
    assert again.config == make_parallel_head().config
    flat = load_file(tmp_path / "parallel" / "model.safetensors")["mask_hidden"].flatten()
    assert torch.equal(load_head(changed(tmp_path / "parallel", {"mask_hidden": flat})).mask_hidden, again.mask_hidden)
    with pytest.raises(CheckpointError, match=r"unexpected tensors for this configuration: .*layers.1.input_layernorm"):
        load_head(changed(tmp_path / "parallel", {}, mask_token_id=None, num_hidden_layers=1))
    with pytest.raises(CheckpointError, match="mask_token_id is missing, which a P-EAGLE head needs"):
        load_head(changed(tmp_path / "parallel", {}, architectures=["PEagleDraftModel"]))
    with pytest.raises(CheckpointError, match="num_depths 8 is not supported: nothing is known of it"):
        load_head(changed(tmp_path / "parallel", {}, mask_token_id=23, num_depths=8))
    with pytest.raises(ValueError, match=r"is a head of another kind; write eagle3\("):
        LLM(target_on("torch"), f"block({tmp_path}/eagle)")
    with pytest.raises(ValueError, match=r"is a head of another kind; write block\("):
        LLM(target_on("torch"), f"eagle3({tmp_path}/block)")
    with pytest.raises(ValueError, match=r"is a draft head, not a model by itself; write block\("):
        LLM(target_on("torch"), f"model({tmp_path}/block)")
    with pytest.raises(ValueError, match="is a model, not a draft head"):
        LLM("fly-tiny", "block(fly-draft)")
    with pytest.raises(ValueError, match="SingleDraft stands below a block drafter, which verifies nothing"):
        parse_draft(f"model(fly-tiny)+{tmp_path}/block")
    with pytest.raises(ValueError, match="level 2 of a cascade is BlockDraft"):
        parse_draft(f"ngram+fly-tiny+{tmp_path}/block")
    for options, said in (
        ({"target_layers": 36}, r"for a target of 36 layers \(num_target_layers\), not 3"),
        ({"states": (1, 2, 9)}, r"after \[1, 2, 9\] layers: this model has 3"),
    ):
        with pytest.raises(ValueError, match=said):
            LLM(target_on("torch"), BlockDraft(TorchDFlashHead(make_block_head(**options))))
    wide = make_block_head(layer=TARGET.resized(2, family="qwen3", hidden_size=16, head_dim=8), own=True)
    wide.lm_head = None
    with pytest.raises(ValueError, match="no output matrix, and the target's is 32 wide, not 16"):
        LLM(target_on("torch"), BlockDraft(TorchDFlashHead(wide)))
    with pytest.raises(ValueError, match="Other on 'torch' kernels gives no hidden states"):
        LLM(TorchExecutor(Other()), BlockDraft(runs("dflash")))  # type: ignore[arg-type]


class Other(torch.nn.Module):
    config, dtype, device = TARGET, torch.float32, torch.device("cpu")
