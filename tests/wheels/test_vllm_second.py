"""vLLM's second model runner, its own code: ``Sampler``, ``RequestState``, ``RejectionSampler`` and their kernels run
under Triton's interpreter, with the plug-in's hooks on them.

The target is a table of logits by the last token, so that the right distribution is known. Each trap of this runner is
named by the test that holds it.

Shape legend: V vocabulary, K most drafted tokens, S slots, L logits rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.wheels.setup import enter

enter("vllm")

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # the build for CUDA asks for a GPU

import triton.language as tl
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.input_batch import expand_idx_mapping, post_update
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler as module
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.states import RequestState

from fly.extras.engines.blocks import Blocks, Row, decide
from fly.extras.engines.vllm import second
from fly.extras.engines.vllm.requests import read_row

SIZE, MOST, SLOTS = 11, 3, 6
# Triton's interpreter knows no libdevice, and CPUs have no memory that a GPU reads too.
rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1 + x))
buffer_utils.is_uva_available = lambda: False
topk_topp_sampler.HAS_TRITON = False  # this kernel alone does not run there; vLLM has the same in PyTorch
ORIGINAL = {
    "add": Sampler.add_request,
    "verify": RejectionSampler._verify,
    "finish": GPUModelRunner.finish_requests,
}


@pytest.fixture(autouse=True)
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hooks are there; ``Engine(plugged=False)`` goes without."""
    monkeypatch.setattr(Sampler, "add_request", second.set_row(ORIGINAL["add"]))
    monkeypatch.setattr(RejectionSampler, "_verify", second.decide_after(ORIGINAL["verify"]))
    monkeypatch.setattr(GPUModelRunner, "finish_requests", second.forget_rows(ORIGINAL["finish"]))
    yield


def params(rule: str | None = None, temperature: float = 0.0, seed: int = 5, **others: Any) -> Any:
    extra = None if rule is None else {"fly": rule}
    return SamplingParams(temperature=temperature, seed=seed, extra_args=extra, max_tokens=40, **others)


class Engine:
    """vLLM's request states and samplers. A step does what the model runner does between two forwards."""

    def __init__(self, table_VV: Tensor, most: int = MOST, slots: int = SLOTS) -> None:
        device = torch.device("cpu")
        self.table_VV = table_VV
        self.states = RequestState(slots, 128, 128, most, len(table_VV), device)
        drafts = SimpleNamespace(
            num_speculative_tokens=most,
            enable_adaptive_verification=False,
            rejection_sample_method="standard",
            fly_entropy_threshold=0.3,
            fly_entropy_top_k=3,
            fly_window_size=None,
        )
        config = SimpleNamespace(speculative_config=drafts, reasoning_config=None, num_speculative_tokens=most)
        self.sampler = Sampler(config, slots, len(table_VV), device, self.states, num_speculative_tokens=most)
        self.rejection_sampler = RejectionSampler(self.sampler, drafts, device)
        self.draft_logits: Tensor | None = None

    def add(self, name: str, text: list[int], sampling: Any, output: list[int] | None = None) -> int:
        """Add a request whose last token was sampled after the prefill: drafts are verified from there on. ``output``
        is that of one that was preempted, which is prefilled with the prompt."""
        prompt = [0, *text[:-1]]
        *prefill, last = [0, *text, *(output or [])]
        self.states.add_request(name, len(prompt), prefill, 0, 40)
        slot: int = self.states.req_id_to_index[name]
        self.sampler.add_request(slot, sampling)
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.states.all_token_ids.gpu[slot, len(prefill)] = last
        self.states.total_len.gpu[slot] += 1
        return slot

    def finish(self, finished: set[str] = frozenset(), preempted: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Run ``finish_requests`` of the model runner, of which it uses this."""
        runner = SimpleNamespace(pooling_runner=None, _remove_request=self.states.remove_request, sampler=self.sampler)
        GPUModelRunner.finish_requests(
            runner, SimpleNamespace(finished_req_ids=set(finished), preempted_req_ids=set(preempted))
        )

    def text(self, name: str) -> list[int]:
        slot = self.states.req_id_to_index[name]
        text: list[int] = self.states.all_token_ids.gpu[slot, : int(self.states.total_len.gpu[slot])].tolist()
        return text

    def batch(self, drafts: dict[str, list[int]]) -> SimpleNamespace:
        """A batch of requests with their drafts; -1 is a placeholder."""
        slots = [self.states.req_id_to_index[name] for name in drafts]
        lengths = [len(self.text(name)) for name in drafts]
        counts = np.array([0, *(len(tokens) + 1 for tokens in drafts.values())]).cumsum()
        flat, positions = [], []
        for (name, tokens), length in zip(drafts.items(), lengths):
            flat += [self.text(name)[-1], *tokens]
            positions += range(length - 1, length + len(tokens))
        cu = torch.tensor(counts, dtype=torch.int32)
        mapping = torch.tensor(slots, dtype=torch.int32)
        expanded, local = expand_idx_mapping(mapping, len(flat), cu, MOST + 1)
        ends = torch.tensor([length + len(tokens) for length, tokens in zip(lengths, drafts.values())])
        return SimpleNamespace(
            req_ids=list(drafts), num_reqs=len(drafts), idx_mapping=mapping, idx_mapping_np=mapping.numpy(),
            expanded_idx_mapping=expanded, expanded_local_pos=local, input_ids=torch.tensor(flat, dtype=torch.int32),
            positions=torch.tensor(positions), logits_indices=torch.arange(len(flat)), seq_lens=ends.int(),
            seq_lens_cpu_upper_bound=ends.int(), cu_num_logits=cu, cu_num_logits_np=counts,
            query_start_loc=cu, num_draft_tokens=int(counts[-1]) - len(drafts),
        )  # fmt: skip

    def step(self, drafts: dict[str, list[int]], invalid: Tensor | None = None, logits: Tensor | None = None) -> Any:
        """Verify the drafts and keep what was decided. Return each request's new tokens."""
        batch = self.batch(drafts)
        if logits is None:
            logits = self.table_VV[batch.input_ids.clamp_min(0)].clone()
        if batch.num_draft_tokens == 0:  # as in the model runner
            output = self.sampler(logits, batch)
        else:
            output = self.rejection_sampler(logits, batch, self.draft_logits, invalid)
        post_update(
            batch.idx_mapping, self.states.num_computed_tokens.gpu, self.states.last_sampled_tokens, None,
            output.sampled_token_ids, output.num_sampled, output.num_rejected, batch.query_start_loc,
            self.states.all_token_ids.gpu, self.states.total_len.gpu,
        )  # fmt: skip
        return {
            name: output.sampled_token_ids[b, : int(output.num_sampled[b])].tolist() for b, name in enumerate(drafts)
        }


def table(seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def expect(
    engine: Engine,
    name: str,
    drafts: list[int],
    sampling: Any,
    draft_probs: Tensor | None = None,
    row: Row | None = None,
) -> list[int]:
    """What the shared module decides on tensors that are built here, from vLLM's parameters: it is held to ``verify``
    elsewhere."""
    one = row or read_row(sampling, SIZE, name)
    assert one is not None
    text = engine.text(name)
    logits = engine.table_VV[torch.tensor([text[-1], *drafts])]
    if sampling.temperature and sampling.top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    slot = engine.states.req_id_to_index[name]
    blocks = Blocks(
        logits.unsqueeze(0),
        torch.tensor([drafts]),
        torch.tensor([len(drafts)]),
        torch.tensor([len(text) - 1]),
        None if draft_probs is None else draft_probs.unsqueeze(0),
        torch.tensor([len(text) - int(engine.states.prompt_len.np[slot])]),
        [text],
    )
    decided = decide([one], blocks)
    return decided.tokens_BJ[0, : int(decided.counts_B[0])].tolist()


RULES = [
    "exact",
    "block",
    "fly(window=1, hold=1)",
    "exact | regret(4, 1)",
    "lossy(3)",
    "exact | margin(4) & at_most(1)",
    "exact | margin(4) & after(2)",
    "exact | margin(4) & above(6)",
]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drawn", [False, True])
def test_a_relaxed_rule_equals_verify_on_the_same_tensors(rule: str, temperature: float, drawn: bool) -> None:
    """Two steps of ragged rows beside rows without a rule. ``draft_logits`` are by slot and before the temperature."""
    engine = Engine(table())
    sampling = {
        "a": params(rule, temperature, 1),
        "b": params(None, 0.7, 2),
        "c": params(rule, temperature, 3, top_k=4),
        "d": params(rule, 1.0, 4),
    }
    prompts = {"a": [1, 2, 3], "b": [4], "c": [5, 6], "d": [7]}
    for name, prompt in prompts.items():
        engine.add(name, prompt, sampling[name])
    if drawn:
        engine.draft_logits = table(7).repeat(SLOTS, 1, 1)[:, :MOST].clone()
    for drafts in ({"a": [2, 9, 4], "b": [1, 2], "c": [3], "d": [8, 8, 8]}, {"d": [1, 2], "a": [3, 3, 3], "c": [0, 1]}):
        expected = {}
        for name, tokens in drafts.items():
            if name == "b":
                continue
            probs, slot = None, engine.states.req_id_to_index[name]
            if engine.draft_logits is not None:
                probs = (engine.draft_logits[slot, : len(tokens)] / (sampling[name].temperature or 1)).softmax(-1)
            row = engine.sampler.fly.by_slot[slot]
            expected[name] = expect(engine, name, tokens, sampling[name], probs, row)
        emitted = engine.step(drafts)
        assert {name: emitted[name] for name in expected} == expected


def run_plain(hooks: bool, monkeypatch: pytest.MonkeyPatch, drawn: bool) -> list[Any]:
    """Requests without a rule. ``hooks``: with the plug-in, and beside requests that have one."""
    if not hooks:
        monkeypatch.setattr(Sampler, "add_request", ORIGINAL["add"])
        monkeypatch.setattr(RejectionSampler, "_verify", ORIGINAL["verify"])
    engine = Engine(table())
    engine.add("other", [1], params("exact | margin(9)" if hooks else None, 1.0, 9))
    for number, temperature in enumerate((0.0, 0.7, 1.0)):
        engine.add(f"r{number}", [number + 1], params(None, temperature, number))
    if drawn:
        engine.draft_logits = table(7).repeat(SLOTS, 1, 1)[:, :MOST].clone()
    found = []
    for step in range(3):
        drafts = {f"r{number}": [(step + number + i) % SIZE for i in range(number + 1)] for number in range(3)}
        emitted = engine.step({"other": [step], **drafts})
        found.append({name: tokens for name, tokens in emitted.items() if name != "other"})
    return found


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_without_a_rule_are_as_without_the_plug_in(drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_plain(True, monkeypatch, drawn) == run_plain(False, monkeypatch, drawn)


@pytest.mark.parametrize("seed", range(4))
def test_exact_at_temperature_0_gives_vllms_tokens(seed: int) -> None:
    drafts = torch.randint(0, SIZE, (6, MOST), generator=torch.Generator().manual_seed(seed)).tolist()
    texts = []
    for rule in (None, "exact"):
        engine = Engine(table(seed))
        engine.add("a", [seed + 1], params(rule))
        greedy = engine.table_VV.argmax(-1)
        for tokens in drafts:
            mixed = [int(greedy[engine.text("a")[-1]]), *tokens[1:]]  # the first token agrees
            engine.step({"a": mixed})
        texts.append(engine.text("a"))
    assert texts[0] == texts[1] and len(texts[0]) > 7


@pytest.mark.parametrize("drawn", [False, True])
def test_exact_at_temperature_1_has_the_targets_distribution(drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of the first two tokens of 3,000 blocks against the target's own distribution. (vLLM's decision, which the
    rule replaces, is left out: the interpreter would take ten minutes for it.)

    Pearson's chi-squared over the pairs that are expected five times, at a level of 0.001. With about 60 degrees of
    freedom a noncentrality of 59 is found in nine of ten cases, and a fault that moves a share d of the probability has
    at least 3000 * (2d)^2: so 7 % are found.
    """
    rows, rounds = 100, 30
    monkeypatch.setattr(
        module,
        "rejection_sample",
        lambda logits, *others, **kwargs: (
            torch.zeros(rows, 3, dtype=torch.int64),
            torch.ones(rows, dtype=torch.int32),
        ),
    )
    engine = Engine(table(3, 1.0), most=2, slots=rows)
    target_VV = engine.table_VV.softmax(-1)
    generator = torch.Generator().manual_seed(1)
    if drawn:
        engine.draft_logits = table(4, 1.0)[:2].repeat(rows, 1, 1)
    names = [f"r{b}" for b in range(rows)]
    for b, name in enumerate(names):
        engine.add(name, [1], params("exact", 1.0, b))
    slots_R = torch.tensor([engine.states.req_id_to_index[name] for name in names])
    counted: Counter[tuple[int, int]] = Counter()
    for _ in range(rounds):
        proposed_R2 = torch.tensor([[4, 4]] * rows)
        if engine.draft_logits is not None:
            drawn_2R = torch.multinomial(engine.draft_logits[0].softmax(-1), rows, True, generator=generator)
            proposed_R2 = drawn_2R.T
        for tokens in engine.step(dict(zip(names, proposed_R2.tolist()))).values():
            if len(tokens) == 1:  # the block ended here; the target goes on
                tokens.append(int(torch.multinomial(target_VV[tokens[0]], 1, generator=generator)))
            counted[tokens[0], tokens[1]] += 1
        engine.states.all_token_ids.gpu[slots_R, engine.states.total_len.gpu[slots_R] - 1] = 1  # the same place again
    pairs_VV = rows * rounds * target_VV[1].unsqueeze(1) * target_VV
    wanted = {(a, b): float(pairs_VV[a, b]) for a in range(SIZE) for b in range(SIZE)}
    assert chi_squared(counted, wanted) < bound(sum(value >= 5 for value in wanted.values()))


def chi_squared(counted: Counter[Any], wanted: dict[Any, float]) -> float:
    """Pearson's statistic; cells that are expected fewer than five times count as one."""
    large = {cell: value for cell, value in wanted.items() if value >= 5}
    rest = sum(wanted.values()) - sum(large.values())
    rare = sum(counted.values()) - sum(counted[cell] for cell in large)
    return sum((counted[cell] - value) ** 2 / value for cell, value in large.items()) + (rare - rest) ** 2 / rest


def bound(cells: int, z: float = 3.09) -> float:
    """The value that chi-squared with ``cells`` degrees of freedom passes in one of 1000 (Wilson and Hilferty 1931)."""
    share = 2 / (9 * cells)
    return float(cells * (1 - share + z * math.sqrt(share)) ** 3)


# The traps.


def test_trap_a_slot_is_used_again_by_a_request_without_a_rule() -> None:
    engine = Engine(table())
    slot = engine.add("a", [1], params("exact | margin(99)"))
    engine.finish({"a"})
    assert engine.add("b", [1], params(None)) == slot
    token = int(engine.table_VV[1].argmin())
    assert engine.step({"b": [token, 0, 0]})["b"] == [int(engine.table_VV[1].argmax())]


def test_trap_a_preempted_request_keeps_its_budget_in_another_slot() -> None:
    engine = Engine(table())
    sampling = params("exact | margin(99) & at_most(1)")
    first = engine.add("a", [1], sampling)
    worst = engine.table_VV.argmin(-1)
    token = int(worst[1])
    assert engine.step({"a": [token]})["a"][0] == token  # the one relaxed token
    output = engine.text("a")[2:]
    engine.finish(preempted={"a"})
    engine.add("b", [2], params(None))  # takes the slot
    assert engine.add("a", [1], sampling, output) != first
    last = engine.text("a")[-1]
    assert engine.step({"a": [int(worst[last])]})["a"] == [int(engine.table_VV[last].argmax())]
    engine.finish({"a"})
    engine.add("a", [1], sampling)  # another request of the same name
    assert engine.step({"a": [token]})["a"][0] == token


def test_trap_chunks_cut_between_requests_and_draft_logits_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens whether the batch is verified at once or request by request."""
    texts = []
    for most in (10**9, 1):
        monkeypatch.setattr(module, "get_max_chunk_logits", lambda size, most=most: most)
        engine = Engine(table())
        engine.draft_logits = table(7).repeat(SLOTS, 1, 1)[:, :MOST].clone()
        for number in range(4):
            engine.add(f"r{number}", [number + 1], params(RULES[number], 0.7, number))
        texts.append([engine.step({f"r{number}": [2, 3, number][: number or 1] for number in range(4)}) for _ in "ab"])
    assert texts[0] == texts[1]


def test_trap_placeholders_end_a_draft() -> None:
    """-1 tokens are never emitted, whatever the rule; the tokens before them are judged as a shorter draft."""
    for temperature in (0.0, 1.0):
        engine = Engine(table())
        sampling = params("exact | margin(99)", temperature, 1)
        engine.add("a", [1], sampling)
        engine.add("b", [1], params(None))
        expected = expect(engine, "a", [2, 3], sampling)
        assert engine.step({"a": [2, 3, -1], "b": [1]})["a"] == expected and expected[:2] == [2, 3]
        own = engine.step({"a": [-1, 5, 5], "b": [1]})["a"]  # nothing to decide: vLLM's own token
        assert len(own) == 1 and own != [-1]


def test_trap_a_grammar_forbids_tokens_and_ends_drafts() -> None:
    """The mask of a grammar is in the logits: no rule excuses a masked token. Drafts beyond what the grammar read are
    marked invalid, and end the draft."""
    engine = Engine(table())
    engine.add("a", [1], params("exact | margin(99)"))
    drafts = {"a": [2, 3, 4]}
    logits = engine.table_VV[torch.tensor([1, 2, 3, 4])].clone()
    logits[0, 2] = -torch.inf
    assert engine.step(drafts, logits=logits)["a"] == [int(logits[0].argmax())]
    last = engine.text("a")[-1]
    allowed = engine.table_VV[torch.tensor([last, 2, 3, 4])].clone()
    invalid = torch.tensor([False, False, True, True])
    assert engine.step(drafts, invalid, allowed)["a"] == [2, int(allowed[1].argmax())]


def test_trap_drafts_right_after_the_prefill_are_placeholders() -> None:
    """vLLM makes them so, since nothing was drafted yet: they are no draft, and charge nothing."""
    engine = Engine(table())
    slot = engine.add("a", [1], params("exact | margin(99) & at_most(1)"))
    engine.states.prefill_len.np[slot] += 1
    engine.states.apply_staged_writes()
    assert engine.step({"a": [2, 3, 4]})["a"] == [int(engine.table_VV[1].argmax())]
    assert engine.sampler.fly.by_slot[slot].account_A.tolist() == [0.0, 0.0]


def test_trap_a_step_without_drafts_charges_no_budget() -> None:
    engine = Engine(table())
    slot = engine.add("a", [1], params("exact | margin(99) & at_most(1)", 1.0, 3))
    engine.step({"a": []})
    assert engine.sampler.fly.by_slot[slot].account_A is None
    token = int(engine.table_VV[engine.text("a")[-1]].argmin())
    assert engine.step({"a": [token]})["a"][0] == token
    assert engine.sampler.fly.by_slot[slot].account_A.tolist() == [1.0, 0.0]


def test_trap_the_draft_models_vocabulary_is_smaller() -> None:
    engine = Engine(table())
    engine.draft_logits = table(7)[:, : SIZE - 3].repeat(SLOTS, 1, 1)[:, :MOST].clone()
    sampling = params("exact", 0.7, 1)
    slot = engine.add("a", [1], sampling)
    probs = torch.zeros(2, SIZE)
    probs[:, : SIZE - 3] = (engine.draft_logits[slot, :2] / 0.7).softmax(-1)
    expected = expect(engine, "a", [2, 3], sampling, probs)
    assert engine.step({"a": [2, 3]})["a"] == expected


def test_trap_logits_in_the_models_dtype_when_no_row_is_processed() -> None:
    engine = Engine(table().to(torch.bfloat16))
    engine.add("a", [1], params("exact | regret(4, 1)"))
    engine.table_VV = engine.table_VV.float()
    expected = expect(engine, "a", [2, 3, 4], params("exact | regret(4, 1)"))
    engine.table_VV = engine.table_VV.to(torch.bfloat16)
    assert engine.step({"a": [2, 3, 4]})["a"] == expected


def test_trap_ranks_agree_on_coins() -> None:
    """Two processes of the same state draw the same tokens, with a seed of the request's or vLLM's own."""
    for seed in (3, None):
        texts = []
        for _ in range(2):
            np.random.seed(0)  # as vLLM does in each of its processes
            torch.manual_seed(len(texts))
            engine = Engine(table())
            engine.add("a", [1], params("exact", 1.0, seed))
            for _ in range(4):
                engine.step({"a": [2, 3, 4]})
            texts.append(engine.text("a"))
        assert texts[0] == texts[1]


def test_trap_a_rule_that_raises_leaves_vllms_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for rule in (None, "exact"):
        engine = Engine(table())
        engine.add("a", [1], params(rule, 1.0, 3))
        if rule:
            row = next(iter(engine.sampler.fly.by_slot.values()))
            row.rule = SimpleNamespace(relaxation=None)  # no rule at all
        for _ in range(3):
            engine.step({"a": [2, 3, 4]})
        texts.append(engine.text("a"))
    assert texts[0] == texts[1]


def test_trap_the_warmup_adds_parameters_to_slots_without_a_request() -> None:
    engine = Engine(table())
    engine.sampler.add_request(0, SamplingParams.for_sampler_warmup())
    assert not engine.sampler.fly.by_slot and not engine.sampler.fly.by_name


def test_trap_later_stages_read_the_tokens_and_their_number_alone() -> None:
    """Logprobs and the number of rejected tokens follow what the rule decided."""
    engine = Engine(table())
    engine.add("a", [1], params("exact | margin(99)", logprobs=1))
    batch = engine.batch({"a": [2, 3, 4]})
    logits = engine.table_VV[batch.input_ids]
    output = engine.rejection_sampler(logits, batch, None, None)
    assert output.num_sampled.tolist() == [4] and output.num_rejected.tolist() == [0]
    chosen = output.sampled_token_ids[0].tolist()
    assert chosen[:3] == [2, 3, 4]
    wanted = logits.log_softmax(-1)[torch.arange(4), torch.tensor(chosen)]
    assert torch.allclose(output.logprobs_tensors.logprobs[:, 0], wanted, atol=1e-5)
