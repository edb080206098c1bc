"""vLLM's first model runner, its own code: ``InputBatch`` keeps the requests and ``rejection_sample`` decides, with the
plug-in's hooks on them; its kernels run under Triton's interpreter. Each trap is named by the test that holds it.

Shape legend: R rows, N drafted tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.wheels.setup import enter

enter("vllm")

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()

import vllm.v1.worker.gpu_input_batch as input_batch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from fly.extras.engines.blocks import Blocks, decide
from fly.extras.engines.vllm import first, register
from fly.extras.engines.vllm.requests import TRIED, read_row

SIZE = 11
ORIGINAL = InputBatch.add_request, InputBatch._make_sampling_metadata, rejection_sampler.rejection_sample
input_batch.PIN_MEMORY = False


@pytest.fixture(autouse=True)
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(InputBatch, "add_request", first.add_row(ORIGINAL[0]))
    monkeypatch.setattr(InputBatch, "_make_sampling_metadata", first.attach_rows(ORIGINAL[1]))
    yield


def request(name: str, rule: str | None, temperature: float = 0.0, seed: int = 3) -> Any:
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=40, extra_args=None if rule is None else {"fly": rule}
    )
    generator = torch.Generator().manual_seed(seed) if temperature else None
    return CachedRequestState(name, [1, 2, 3], [], params, generator, ([0],), 3, [4])


def batch_of(requests: list[Any]) -> Any:
    batch = InputBatch(
        max_num_reqs=8,
        max_model_len=64,
        max_num_batched_tokens=64,
        device=torch.device("cpu"),
        vocab_size=SIZE,
        block_sizes=[16],
        max_num_blocks_per_req=[4],
        num_spec_tokens=4,
    )
    for one in requests:
        batch.add_request(one)
    batch.refresh_metadata()
    return batch


def sample(
    batch: Any,
    counts: list[int],
    seed: int,
    drawn: bool = False,
    plugged: bool = True,
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    tokens = torch.randint(0, SIZE, (total,), generator=generator, dtype=torch.int32)
    logits = 2 * torch.randn(total, SIZE, generator=generator)
    probs = torch.randn(total, SIZE, generator=generator).softmax(-1) if drawn else None
    bonus = torch.randint(0, SIZE, (len(counts), 1), generator=generator, dtype=torch.int32)
    function = first.decide_after(ORIGINAL[2]) if plugged else ORIGINAL[2]
    torch.manual_seed(seed)
    ends = torch.tensor(counts).cumsum(0).int()
    metadata = batch.sampling_metadata
    output: Tensor = function(tokens, counts, max(counts), ends, probs, logits, bonus, metadata, **keywords)
    return [[token for token in row if token >= 0] for row in output.tolist()], (tokens, logits, probs, bonus)


RULES = ["exact", "block", "fly(window=1, hold=1)", "exact | regret(4, 1)", "exact | margin(4) & at_most(1)"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drawn", [False, True])
def test_a_relaxed_rule_equals_verify_on_the_same_tensors(rule: str, drawn: bool) -> None:
    requests = [request("a", rule), request("b", None, 0.7), request("c", rule, 0.7), request("d", rule, 1.0)]
    counts = [3, 2, 4, 1]
    found, (tokens, logits, probs, bonus) = sample(batch_of(requests), counts, 1, drawn)
    for b in (0, 2, 3):
        start, count = sum(counts[:b]), counts[b]
        row = read_row(requests[b].sampling_params, SIZE, requests[b].req_id)
        assert row is not None
        certain_1V = torch.full((1, SIZE), -torch.inf)
        certain_1V[0, bonus[b, 0]] = 0.0
        part = slice(start, start + count)
        blocks = Blocks(
            torch.cat([logits[part] * (row.params.temperature or 1), certain_1V]).unsqueeze(0),
            tokens[part].unsqueeze(0),
            torch.tensor([count]),
            torch.tensor([1]),
            None if probs is None else probs[part].unsqueeze(0),
        )
        decided = decide([row], blocks)
        assert found[b] == decided.tokens_BJ[0, : int(decided.counts_B[0])].tolist()


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_rows_without_a_rule_are_as_without_the_plug_in(seed: int, drawn: bool) -> None:
    def plain() -> list[Any]:
        return [request("a", None), request("b", None, 0.7), request("c", None, 1.0)]

    without, _ = sample(batch_of(plain()), [3, 2, 4], seed, drawn, plugged=False)
    assert sample(batch_of(plain()), [3, 2, 4], seed, drawn)[0] == without
    mixed = [*plain()[:2], request("c", "exact | margin(99)", 1.0)]
    assert sample(batch_of(mixed), [3, 2, 4], seed, drawn)[0][:2] == without[:2]


@pytest.mark.parametrize("seed", range(4))
def test_exact_at_temperature_0_gives_vllms_tokens(seed: int) -> None:
    own, ruled = (
        sample(batch_of([request("a", rule), request("b", rule)]), [4, 2], seed)[0] for rule in (None, "exact")
    )
    assert own == ruled


def test_trap_rows_move_when_others_leave() -> None:
    """``condense`` moves the last row into a hole: a row is found by its request's name."""
    requests = [request("a", None), request("b", None), request("c", "exact | margin(99)")]
    batch = batch_of(requests)
    batch.remove_request("a")
    batch.condense()
    batch.refresh_metadata()
    assert batch.sampling_metadata.fly == {batch.req_id_to_index["c"]: requests[2]} and batch.req_id_to_index["c"] == 0
    found, (tokens, *_) = sample(batch, [2, 2], 0)
    assert found[0][:2] == tokens[:2].tolist()


def test_trap_the_bonus_is_drawn_already() -> None:
    """A draft that is kept completely is followed by the token that vLLM has drawn, at any temperature."""
    requests = [request(name, "exact | margin(99)", heat) for name, heat in (("a", 0.0), ("b", 0.7), ("c", 1.0))]
    found, (tokens, _, _, bonus) = sample(batch_of(requests), [2, 3, 1], 1)
    drafts = [part.tolist() for part in tokens.split([2, 3, 1])]
    assert found == [[*draft, token] for draft, (token,) in zip(drafts, bonus.tolist())]


def test_trap_versions_add_keywords() -> None:
    """0.33 has three more than 0.32: whatever there is reaches vLLM's function, and changes nothing by its default."""
    defaults = {
        name: each.default
        for name, each in inspect.signature(ORIGINAL[2]).parameters.items()
        if each.default is not inspect.Parameter.empty
    }
    assert defaults
    plain, named = (
        sample(batch_of([request("a", None, 0.7), request("b", "exact")]), [3, 2], 1, **each)[0]
        for each in ({}, {"keywords": defaults})
    )
    assert plain == named


def test_trap_placeholders_end_a_draft() -> None:
    """Under asynchronous scheduling a draft may hold -1."""
    batch = batch_of([request("a", "exact | margin(99)", 1.0)])
    tokens = torch.tensor([2, -1, 3], dtype=torch.int32)
    logits = torch.zeros(3, SIZE)
    output = first.decide_after(lambda *_: torch.full((1, 4), 9, dtype=torch.int32))(
        tokens, [3], 3, torch.tensor([3]), None, logits, torch.tensor([[5]], dtype=torch.int32), batch.sampling_metadata
    )
    assert output[0, 0] == 2 and output[0, 1] >= 0 and output[0, 2:].tolist() == [-1, -1]


def test_the_plug_in_wraps_both_runners_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """``register`` finds all functions, and a wrong rule becomes vLLM's error of a request."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    places = [
        (InputProcessor, "_validate_params"),
        (InputBatch, "add_request"),
        (InputBatch, "_make_sampling_metadata"),
        (rejection_sampler, "rejection_sample"),
        (Sampler, "add_request"),
        (GPUModelRunner, "finish_requests"),
        (RejectionSampler, "_verify"),
    ]
    monkeypatch.undo()
    for owner, name in places:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that it is restored
    monkeypatch.setattr(vllm, "__version__", TRIED[-1] + "+cpu")
    originals = [getattr(owner, name) for owner, name in places]
    try:
        register()
        register()
        assert [getattr(owner, name).__wrapped__ for owner, name in places] == originals
        engine = SimpleNamespace(
            vllm_config=SimpleNamespace(speculative_config=None),
            model_config=SimpleNamespace(get_vocab_size=lambda: SIZE),
        )
        for rule, said in (("exat", "exat"), ("exact", "no draft")):
            params = SamplingParams(extra_args={"fly": rule})
            with pytest.raises(VLLMValidationError, match=said):
                InputProcessor._validate_params(engine, params, ())
    finally:
        del InputProcessor.fly
