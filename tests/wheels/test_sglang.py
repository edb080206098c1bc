"""SGLang's own code, with the plug-in's hooks on it, put there by SGLang's own ``HookRegistry``.

Run are ``eagle_sample`` with the chain sampler's kernel under Triton's interpreter (``--speculative-use-rejection-
sampling``), ``DFlashWorkerV2._accept_block`` in PyTorch, the target's distribution, and the check of requests. Not run,
since they need CUDA: the kernel of trees and its greedy twin. Each trap is named by the test that holds it.

Shape legend: R rows, D slots of a row (slot 0 is the last token), V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.wheels.setup import enter

enter("sglang")

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import dflash_utils, dflash_worker_v2, eagle_utils, ngram_info
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from fly.extras.engines.blocks import Blocks, decide
from fly.extras.engines.sglang import plugin, register
from fly.extras.engines.sglang.requests import TRIED, Served, read_row
from fly.runner.sampling import BatchSampling

SIZE, SLOTS = 11, 4
ORIGINAL = eagle_utils.eagle_sample, DFlashWorkerV2._accept_block
RULES = ["exact", "block", "fly(window=1, hold=1)", "exact | regret(4, 1)", "exact | margin(4) & at_most(1)"]
SERVED = Served(TRIED[-1], "EAGLE", 1, True, "cuda")
group = SimpleNamespace(world_size=1)


@pytest.fixture(autouse=True, scope="module")
def hooked() -> Iterator[None]:
    """The hooks, whichever version this is: whether they fit is what the tests say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang, "__version__", TRIED[-1])
        register()
        HookRegistry.apply_hooks()
    yield


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, no server: what SGLang's code asks its process for."""
    import sglang.srt.layers.dp_attention as attention
    import sglang.srt.runtime_context as context

    drafts = SimpleNamespace(
        speculative_use_rejection_sampling=True,
        speculative_use_block_verification=False,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
    )
    monkeypatch.setattr(plugin, "_find_served", lambda: SERVED)
    monkeypatch.setattr(eagle_utils, "get_spec", lambda: drafts)
    monkeypatch.setattr(eagle_utils, "_is_cpu", False)  # on CPUs it would verify greedily
    monkeypatch.setattr(context, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    monkeypatch.setattr(attention, "is_dp_attention_enabled", lambda: False)
    monkeypatch.setattr(dflash_worker_v2, "is_dflash_sampling_verify_available", lambda: False)

    def softmax(logits: Tensor, temperatures: Tensor) -> Tensor:
        return (logits / temperatures).softmax(-1)  # of a compiled kernel

    monkeypatch.setattr(eagle_utils, "sampling_softmax", softmax)


def request(name: str, rule: str | None, temperature: float, **others: Any) -> SimpleNamespace:
    custom = None if rule is None else {"fly": rule}
    params = SamplingParams(temperature=temperature, custom_params=custom, **others)
    params.normalize(None)
    return SimpleNamespace(
        rid=name, sampling_params=params, eos_token_ids={2}, origin_input_ids=[1, 2, 3], output_ids=[4]
    )


def batch_of(requests: list[Any]) -> SimpleNamespace:
    """What the two functions read of SGLang's batch."""
    params = [one.sampling_params for one in requests]
    info = SimpleNamespace(
        temperatures=torch.tensor([[one.temperature] for one in params]),
        top_ks=torch.tensor([one.top_k for one in params], dtype=torch.int32),
        top_ps=torch.tensor([one.top_p for one in params]),
        need_top_k_sampling=False,
        need_top_p_sampling=False,
        is_all_greedy=all(one.top_k <= 1 for one in params),
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        sampling_seed=None,
        has_watermark_candidates=False,
    )
    return SimpleNamespace(
        reqs=requests,
        seq_lens=torch.arange(len(requests)) + 4,
        sampling_info=info,
        device="cpu",
        forward_mode=SimpleNamespace(is_idle=lambda: False),
    )


def chains(count: int, seed: int) -> tuple[SimpleNamespace, Tensor]:
    """The input of a verification of chains, as EAGLE's workers make it, and logits."""
    generator = torch.Generator().manual_seed(seed)
    following = torch.arange(1, SLOTS + 1).repeat(count, 1)
    following[:, -1] = -1
    verify_input = SimpleNamespace(
        draft_token=torch.randint(0, SIZE, (count * SLOTS,), generator=generator),
        draft_token_num=SLOTS,
        max_tree_depth=SLOTS,
        tree_topk=1,
        retrieve_index=torch.arange(count * SLOTS).view(count, SLOTS),
        retrieve_next_token=following,
        retrieve_next_sibling=torch.full((count, SLOTS), -1),
        draft_probs=torch.randn(count, SLOTS - 1, SIZE, generator=generator).softmax(-1),
    )
    return verify_input, 2 * torch.randn(count * SLOTS, SIZE, generator=generator)


def sample(requests: list[Any], seed: int, plugged: bool = True) -> tuple[list[list[int]], Any, Tensor]:
    """Run ``eagle_sample``. Return each row's tokens as SGLang's workers read them."""
    verify_input, logits = chains(len(requests), seed)
    function = eagle_utils.eagle_sample if plugged else ORIGINAL[0]
    output = SimpleNamespace(next_token_logits=logits.clone())
    torch.manual_seed(seed)  # SGLang's coins, of which a seeded hash is in compiled code
    emitted, counts, index = function(verify_input, batch_of(requests), output)
    tokens = emitted[index.long()]
    return [row[:n].tolist() for row, n in zip(tokens, counts.tolist())], verify_input, logits


def decide_alone(one: Any, b: int, chains: Tensor, logits: Tensor, probs: Tensor | None = None) -> list[int]:
    """Return the tokens that the rule of request ``one``, row ``b``, gives on the same tensors without SGLang."""
    row = read_row(one.sampling_params, SIZE, one.rid, one.eos_token_ids)
    assert row is not None
    blocks = Blocks(
        logits.view(-1, SLOTS, SIZE)[b : b + 1],
        chains.view(-1, SLOTS)[b : b + 1, 1:],
        torch.tensor([SLOTS - 1]),
        torch.tensor([b + 4]),
        None if probs is None else probs[b : b + 1],
    )
    decided = decide([row], blocks)
    return decided.tokens_BJ[0, : int(decided.counts_B[0])].tolist()


def test_hooks_are_where_sglang_puts_them() -> None:
    """Also where the function was imported by name: the workers of EAGLE and of n-grams."""
    from sglang.srt.speculative import eagle_worker_common, ngram_worker

    assert eagle_utils.eagle_sample is not ORIGINAL[0]
    assert eagle_worker_common.eagle_sample is ngram_worker.eagle_sample is eagle_utils.eagle_sample
    assert DFlashWorkerV2._accept_block is not ORIGINAL[1]
    assert inspect.signature(DFlashWorkerV2._accept_block) == inspect.signature(ORIGINAL[1])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_a_relaxed_rule_equals_verify_on_the_same_tensors(rule: str, seed: int) -> None:
    requests = [
        request("a", rule, 0.7),
        request("b", None, 1.0),
        request("c", rule, 1.0, top_k=4, top_p=0.9),
        request("d", rule, 0.0),
    ]
    found, verify_input, logits = sample(requests, seed)
    for b in (0, 2, 3):
        assert found[b] == decide_alone(requests[b], b, verify_input.draft_token, logits, verify_input.draft_probs)


@pytest.mark.parametrize("seed", range(3))
def test_rows_without_a_rule_are_as_without_the_plug_in(seed: int) -> None:
    temperatures = (0.7, 1.0, 0.5)
    plain = [request(f"r{b}", None, temperature) for b, temperature in enumerate(temperatures)]
    other = [*plain[:2], request("r2", "exact | margin(99)", temperatures[2])]
    without, _, _ = sample(plain, seed, plugged=False)
    assert sample(plain, seed)[0] == without
    assert sample(other, seed)[0][:2] == without[:2]


@pytest.mark.parametrize("top_k", [-1, 4, 1])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_trap_the_target_has_the_requests_temperature_and_filters(top_k: int, top_p: float) -> None:
    """The distribution is the one that SGLang builds (``build_speculative_verify_target_probs``)."""
    one = request("a", "exact", 0.7, top_k=top_k, top_p=top_p)
    row = read_row(one.sampling_params, SIZE, "a")
    _, logits = chains(1, 0)
    info = batch_of([one]).sampling_info
    info.need_top_k_sampling, info.need_top_p_sampling = True, True
    wanted = dflash_utils.build_speculative_verify_target_probs(
        next_token_logits=logits, sampling_info=info, draft_token_num=SLOTS, bs=1
    )
    assert row is not None
    found = BatchSampling.of([row.params]).probs(logits.view(1, SLOTS, SIZE))
    assert torch.allclose(found, wanted, atol=1e-5)


def test_trap_ranks_get_the_first_ones_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original copies in one of its branches alone: all three tensors are copied after the rules."""
    copied: list[Any] = []
    ranks = SimpleNamespace(world_size=2, broadcast=lambda tensor, src: copied.append((tensor.shape, src)))
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(tp_group=ranks), raising=True
    )
    sample([request("a", "exact", 0.7)], 0)
    assert copied[-3:] == [((SLOTS,), 0), ((1,), 0), ((1, SLOTS), 0)]


def test_trap_drafts_are_one_hot_without_rejection_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's workers give no distribution of the draft then, and its verification takes none. (Its kernel for that,
    whose decision the rules replace, needs CUDA.)"""
    eagle_utils.get_spec().speculative_use_rejection_sampling = False
    monkeypatch.setattr(eagle_utils, "tree_speculative_sampling_target_only", lambda **_: None, raising=False)
    verify_input, logits = chains(3, 4)
    verify_input.draft_probs = None
    requests = [request(f"r{b}", rule, 0.7) for b, rule in enumerate(RULES[:3])]
    output = SimpleNamespace(next_token_logits=logits.clone())
    emitted, counts, index = eagle_utils.eagle_sample(verify_input, batch_of(requests), output)
    tokens = emitted[index.long()]
    for b, one in enumerate(requests):
        assert tokens[b, : int(counts[b])].tolist() == decide_alone(one, b, verify_input.draft_token, logits)


def test_trap_n_grams_have_chains_that_end_early() -> None:
    """A chain ends where SGLang's tree does, whatever stands in the slots after it."""
    verify_input, logits = chains(1, 3)
    verify_input.retrieve_next_token[0, 1:] = -1
    verify_input.draft_probs[:] = 1 / SIZE
    one = request("a", "exact | margin(99)", 0.7)
    output = SimpleNamespace(next_token_logits=logits.clone())
    emitted, counts, _ = eagle_utils.eagle_sample(verify_input, batch_of([one]), output)
    assert counts.tolist() == [2] and emitted[0] == verify_input.draft_token[1]
    assert ngram_info.NgramVerifyInput.max_tree_depth is not None


def test_trap_no_rule_excuses_what_a_bias_or_a_grammar_forbids() -> None:
    """SGLang writes penalties, biases and grammars into the logits, which the rules read after it."""
    verify_input, logits = chains(3, 3)
    requests = [request(f"r{b}", "exact | margin(99)", 0.7) for b in range(3)]
    batch = batch_of(requests)
    drafted = verify_input.draft_token.view(3, SLOTS)[:, 1]
    for name, row in (("acc_additive_penalties", 0), ("logit_bias", 1)):
        added = torch.zeros(3, SIZE)
        added[row, drafted[row]] = -torch.inf
        setattr(batch.sampling_info, name, added)
    mask = SimpleNamespace(apply=lambda logits: logits[2 * SLOTS].index_fill_(0, drafted[2], -torch.inf))
    output = SimpleNamespace(next_token_logits=logits.clone())
    emitted, counts, _ = eagle_utils.eagle_sample(verify_input, batch, output, mask)
    assert counts.tolist() == [1, 1, 1]
    assert not (emitted.view(3, SLOTS)[:, 0] == drafted).any()


def test_trap_a_rule_that_raises_leaves_sglangs_decision() -> None:
    plain, _, _ = sample([request("a", None, 0.7)], 1)
    one = request("a", "exact", 0.7)
    row = read_row(one.sampling_params, SIZE, "a")
    assert row is not None
    row.rule = SimpleNamespace(relaxation=None)  # type: ignore[assignment]  # no rule at all
    one.fly = row
    assert sample([one], 1)[0] == plain


@pytest.mark.parametrize("drawn", [False, True])
def test_exact_at_temperature_1_has_the_targets_distribution(drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of 20,000 rows of one place. Pearson's chi-squared with 10 degrees of freedom passes 29.6 in one
    of 1000; a fault that moves 1.9 % of the probability is found in nine of ten cases (noncentrality 20,000 * 0.038^2 =
    29). SGLang's own decision, which the rule replaces, is left out."""
    count = 20_000
    monkeypatch.setattr(eagle_utils, "chain_speculative_sampling_triton", lambda **_: None)
    verify_input, logits = chains(1, 2)
    verify_input.draft_token = verify_input.draft_token.repeat(count)
    verify_input.draft_probs = verify_input.draft_probs.repeat(count, 1, 1)
    if not drawn:
        verify_input.draft_probs[:] = 0.0
        verify_input.draft_probs.scatter_(-1, verify_input.draft_token.view(count, SLOTS)[:, 1:, None], 1.0)
    else:
        drafts = torch.multinomial(verify_input.draft_probs[0, 0], count, True)
        verify_input.draft_token.view(count, SLOTS)[:, 1] = drafts
    for name in ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling"):
        setattr(verify_input, name, getattr(verify_input, name).repeat(count, 1))
    output = SimpleNamespace(next_token_logits=logits.repeat(count, 1))
    requests = [request(f"r{b}", "exact", 1.0) for b in range(count)]
    emitted, _, index = eagle_utils.eagle_sample(verify_input, batch_of(requests), output)
    counted = torch.bincount(emitted[index[:, 0].long()].long(), minlength=SIZE)
    wanted = count * logits[0].softmax(-1)
    assert float(((counted - wanted) ** 2 / wanted).sum()) < 29.6


# DFlash.


def accept(requests: list[Any], seed: int) -> tuple[Any, Tensor, Tensor]:
    """Run ``_accept_block`` within the worker's step."""
    verify_input, logits = chains(len(requests), seed)
    candidates = verify_input.draft_token.view(-1, SLOTS)
    worker = DFlashWorkerV2.__new__(DFlashWorkerV2)
    worker.__dict__.update(
        block_size=SLOTS,
        _selector_sample=None,
        _use_triton_accept_bonus=False,
        _tp_sync=SimpleNamespace(sync=lambda *_: None),
        fly_batch=None,
    )
    batch = batch_of(requests)
    result = plugin.keep_batch(
        lambda self, batch: self._accept_block(
            candidates=candidates,
            next_token_logits=logits.clone(),
            sampling_info=batch.sampling_info,
            draft_input=None,
            prefix_lens=batch.seq_lens,
            bs=len(requests),
        ),
        worker,
        batch,
    )
    return result, candidates, logits


@pytest.mark.parametrize("rule", RULES)
def test_dflash_commits_what_the_rule_accepts(rule: str) -> None:
    """Committed by SGLang's ``_commit_accept``; the row without a rule keeps its own decision."""
    requests = [request("a", rule, 0.7), request("b", None, 0.0), request("c", rule, 0.0)]
    (accepted, counts, bonus, tokens, lengths), candidates, logits = accept(requests, 5)
    (own, *_), _, _ = accept([request("b", None, 0.0) for _ in requests], 5)
    assert lengths is None and accepted[1] == own[1] and counts.tolist() == (accepted + 1).tolist()
    for b in (0, 2):
        one = requests[b]
        expected = decide_alone(one, b, candidates, logits)
        assert tokens[b, : int(counts[b])].tolist() == expected and bonus[b] == expected[-1]


@pytest.mark.parametrize("seed", range(4))
def test_exact_at_temperature_0_gives_sglangs_tokens(seed: int) -> None:
    (_, counts, _, own, _), _, _ = accept([request("a", None, 0.0), request("b", None, 0.0)], seed)
    (_, ruled_counts, _, ruled, _), _, _ = accept([request("a", "exact", 0.0), request("b", "block", 0.0)], seed)
    assert counts.tolist() == ruled_counts.tolist()
    assert all(torch.equal(one[:n], two[:n]) for one, two, n in zip(own, ruled, counts.tolist()))


def test_trap_dflash_gathers_all_logits_for_a_rule() -> None:
    """With greedy requests alone it would keep the argmax and drop the logits."""
    worker = DFlashWorkerV2.__new__(DFlashWorkerV2)
    worker.__dict__["_selector_sample"] = None
    batch = SimpleNamespace(has_grammar=False, return_logprob=False, reqs=[request("a", None, 0.0)])
    assert worker._can_skip_verify_logits(batch, None)
    batch.reqs.append(request("b", "exact", 0.0))
    assert not worker._can_skip_verify_logits(batch, None)


# Requests.


def test_a_wrong_rule_is_refused_by_sglangs_own_check() -> None:
    request("a", "exact", 0.7).sampling_params.verify(SIZE)
    for rule in ("exat", "exact | margin(1) & above(3)"):  # the second reads the text, which lags under overlap
        with pytest.raises(ValueError, match="fly"):
            request("a", rule, 0.7).sampling_params.verify(SIZE)


def test_trap_several_tokenizers_load_no_plug_ins() -> None:
    """So the scheduler gets requests that nobody checked: it ends the wrong one, by what it ends requests with."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    plain = [request("a", None, 0.7), request("b", None, 0.7)]
    wrong = [request("a", "exat", 0.7), plain[1]]
    assert sample(wrong, 1)[0] == sample(plain, 1)[0]
    assert isinstance(wrong[0].to_finish, FINISH_ABORT) and wrong[0].to_finish.status_code == 400


def test_trap_a_rule_comes_as_custom_params_of_the_openai_interface() -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    chat = ChatCompletionRequest(model="m", messages=[], custom_params={"fly": "exact"})
    assert chat.to_sampling_params([], {})["custom_params"] == {"fly": "exact"}


def test_what_sglang_was_started_with_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of its configuration exist where the plug-in reads them."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    names = namespace_of(ServerArgs)
    for name, place in {
        "speculative_algorithm": "spec",
        "speculative_eagle_topk": "spec",
        "speculative_ngram_max_bfs_breadth": "spec",
        "disable_overlap_schedule": "schedule",
        "device": "device",
        "enable_watermark": "exec.features",
    }.items():
        assert names[name] == place
