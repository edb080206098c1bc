"""EAGLE-3 heads: their checkpoints, held to ``speculators``, and drafting by them."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from fly.backends import executor_of
from fly.backends.cpu import available
from fly.backends.cpu.head import CpuHead, head_refusal
from fly.backends.heads import TorchHead
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.cli import app
from fly.drafts import ChooseDraft, DraftStrategy, Eagle3Draft, NGramDraft, SingleDraft, parse_draft
from fly.extras.train import Answer, Plan, prompts_of, train_head
from fly.extras.train.eagle3 import Eagle3Course, OwnSteps
from fly.extras.train.head import _ALIKE, _order
from fly.extras.train.lessons import Reader
from fly.llm import LLM
from fly.models import Llama, LlamaConfig
from fly.models.bundled import CHECKPOINTS
from fly.models.bundled.tasks import problems
from fly.models.config import CheckpointError
from fly.models.eagle import Eagle3Head, HeadConfig, load_head, save_head
from fly.models.families import FAMILIES
from fly.models.heads import EAGLE3, head_kind
from fly.models.llama import DenseCausal, embedding_scale, record_states
from fly.params import SamplingParams
from fly.runner.executor import Batch, Executor, Head, TokenByToken
from fly.testing import check_draft
from fly.testing.toys import toy_target
from tests.toys import PLAIN

DATA = Path(__file__).parent / "data"
COMPILED = available()[0]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
TARGET = LlamaConfig(vocab_size=24, num_hidden_layers=3, max_position_embeddings=96, **SIZES)
compiled = pytest.mark.skipif(COMPILED == "torch", reason="no compiled kernels here")


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)


def make_head(vocabulary: int = 24, embedding: bool = True, seed: int = 1, **options: Any) -> Eagle3Head:
    layer = TARGET.resized(1)
    states = options.pop("states", (0, 2, 3))
    head = Eagle3Head(
        HeadConfig(layer=layer, draft_vocab_size=vocabulary, target_hidden_size=32, states=states, **options), embedding
    )
    randomise(head, seed)
    head.to_target_U.copy_(torch.arange(24)[:: 24 // vocabulary][:vocabulary])
    return head.eval().requires_grad_(False)


def head_on(head: Eagle3Head, kernels: str) -> Head:
    return TorchHead(head) if kernels == "torch" else CpuHead(head, kernels)


def target_on(kernels: str, config: LlamaConfig = TARGET) -> Executor:
    return executor_of(toy_target(config.vocab_size, config), kernels)


# Checkpoints


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_head_says_what_speculators_says(kind: str) -> None:
    """Logits over three steps, the later ones fed with the head's own features (tools/record_eagle3.py)."""
    path = DATA / f"eagle3-{kind}"
    head, run = load_head(path, torch.float32), load_file(path / "run.safetensors")
    tokens_T, length = run["tokens_T"], len(run["tokens_T"])
    kv, x_TC = OwnSteps(1, length), head.fuse(run["states_TF"])
    for step, logits_TU in enumerate(run["logits_STU"]):
        fed_T = torch.cat([tokens_T[step:], tokens_T.new_zeros(step)])
        x_TC = head(fed_T, x_TC, torch.arange(length) + step, kv)
        torch.testing.assert_close(head.logits(x_TC), logits_TU, atol=1e-4, rtol=1e-4)
    offsets = load_file(path / "model.safetensors")["d2t"]
    assert head.to_target_U.tolist() == (torch.arange(24) + offsets).tolist()
    assert head.config.states == (1, 2, 4)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([6, 12, 24]), st.booleans(),
    st.fixed_dictionaries({name: st.booleans() for name in ("norm_before_residual", "norm_output")}),
    st.sampled_from([{}, {"fc_norm": True}, {"norm_before_fc": True}]),
)  # fmt: skip
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, vocabulary: int, own: bool, flags: dict[str, bool], norms: dict[str, bool]
) -> None:
    head, path = make_head(vocabulary, own, **flags, **norms), tmp_path_factory.mktemp("head")
    save_head(head, path, torch.float32)
    again = load_head(path)
    assert head_kind(path) == EAGLE3 and again.config == head.config and again.shares == (not own)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(head.named_parameters())[name])
    assert torch.equal(again.to_target_U, head.to_target_U)
    names = load_file(path / "model.safetensors").keys()
    assert {"fc.weight", "midlayer.hidden_norm.weight", "midlayer.self_attn.q_proj.weight", "d2t", "t2d"} <= names


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_head(make_head(12), tmp_path / "head", torch.float32)
    return tmp_path / "head"


def changed(path: Path, tensors: dict[str, Tensor | None], **config: Any) -> Path:
    stored = load_file(path / "model.safetensors") | {k: v for k, v in tensors.items() if v is not None}
    save_file({k: v for k, v in stored.items() if tensors.get(k, v) is not None}, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        ({"fc.weight": None}, {}, "tensors are missing: fc.weight"),
        ({"d2t": None}, {}, "tensors are missing: d2t"),
        ({"midlayer.odd": torch.zeros(2)}, {}, "unexpected tensors for this configuration: midlayer.odd"),
        ({"norm.weight": torch.zeros(31)}, {}, r"norm.weight has shape \[31\], the configuration asks \[32\]"),
        ({"d2t": torch.full((12,), 40)}, {}, "d2t maps to the ids .* outside 24 tokens"),
        ({"d2t": -torch.arange(12)}, {}, "several draft tokens to one"),
        ({"t2d": torch.zeros(24, dtype=torch.bool)}, {}, "d2t and t2d disagree"),
        ({}, {"num_hidden_layers": 2}, "a head of 2 layers is not supported"),
        ({}, {"draft_vocab_size": 25}, "draft_vocab_size 25 exceeds vocab_size 24"),
        ({}, {"eagle_aux_hidden_state_layer_ids": "2"}, "must list numbers of layers, got '2'"),
        ({}, {"architectures": ["LlamaForCausalLM"]}, "is not a draft head"),
        ({}, {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ({}, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False is not supported"),
        ({}, {"eagle_config": {"use_last_layernorm": False}}, "eagle_config.use_last_layernorm False is not supported"),
        ({}, {"eagle_config": {"parallel_draft_step": 4}}, "eagle_config.parallel_draft_step 4 is not supported"),
        (
            {},
            {"eagle_config": {"use_mtp_layernorm": True}},
            "use_mtp_layernorm True is not supported: nothing",
        ),
        (
            {},
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4]}},
            "that of eagle_config, which counts from 0",
        ),
        ({}, {"speculators_model_type": "eagle"}, "of type 'eagle' is not supported: choices"),
        ({}, {"draft_vocab_size": 0}, "draft_vocab_size"),
        ({}, {"layer_types": ["sliding_attention"]}, "sliding layers are not supported in a head of type 'llama'"),
    ],
)
def test_what_does_not_fit_is_named(checkpoint: Path, tensors: Any, config: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_head(changed(checkpoint, tensors, **config))


def test_other_places_and_files(checkpoint: Path) -> None:
    """``eagle_config`` counts layers from 0 on; weights may be PyTorch's own file."""
    raw = json.loads((checkpoint / "config.json").read_text())
    states = raw.pop("eagle_aux_hidden_state_layer_ids")
    assert HeadConfig.from_hf(raw).states is None
    assert HeadConfig.from_hf(raw).states_of(8) == (2, 4, 5)
    with pytest.raises(ValueError, match=r"the usual \[2, 2, 1\] do not fit a target of 4 layers"):
        HeadConfig.from_hf(raw).states_of(4)
    nested = raw | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}
    assert HeadConfig.from_hf(nested).states == (2, 3) != tuple(states)
    agreeing = nested | {"eagle_aux_hidden_state_layer_ids": [2, 3]}
    assert HeadConfig.from_hf(agreeing).states == (2, 3)
    usual = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "parallel_draft_step": 1}
    assert HeadConfig.from_hf(raw | {"eagle_config": usual}) == HeadConfig.from_hf(raw)
    assert HeadConfig.from_hf(raw | {"a_field_of_the_target": 3}) == HeadConfig.from_hf(raw)
    tensors = load_file(checkpoint / "model.safetensors")
    torch.save(tensors, checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    assert torch.equal(load_head(checkpoint).fc.weight, tensors["fc.weight"])


# Hidden states


def states_of(executor: Executor, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    cache = PagedKVCache.for_model(executor, 64)
    cache.resize(0, len(tokens))
    scores = executor.score(Batch.of([tokens], cache.batch([0], [0], [len(tokens)])), [0], layers)
    assert scores.states_TF is not None and len(scores.logits_NV) == 1
    return scores.states_TF


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernels", dict.fromkeys(["torch", COMPILED]))
def test_every_backend_gives_the_hidden_states_of_every_family(family: str, kernels: str) -> None:
    if kernels != "torch" and FAMILIES[family] not in PLAIN:
        pytest.skip("compiled kernels refuse this family, by name")
    sizes: dict[str, Any] = {"sliding_window": 4} if family in ("mistral", "gemma3_text") else {}
    config = LlamaConfig(
        family=family, vocab_size=40, num_hidden_layers=3, max_position_embeddings=64, **SIZES, **sizes
    )
    model, tokens = toy_target(40, config), [3, 1, 4, 1, 5, 9, 2, 6]
    taken: dict[int, Tensor] = dict.fromkeys((0, 2, 3), torch.empty(0))
    model(torch.tensor(tokens), torch.arange(8), DenseCausal(1, 8), through=record_states(taken))
    executor = executor_of(model, kernels)
    for one in (executor, TokenByToken(executor)):
        found = states_of(one, tokens, (3, 0, 2))
        torch.testing.assert_close(found, torch.cat([taken[3], taken[0], taken[2]], -1), atol=2e-4, rtol=2e-4)
    weight = model.embed_tokens.weight
    assert torch.allclose(executor.embedding(), weight, atol=1e-5)
    assert (embedding_scale(config, torch.float32) == 1) == (family != "gemma3_text")


def test_nobody_asks_nothing_is_kept() -> None:
    llm = LLM(target_on("torch"), SingleDraft(target_on("torch")))
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=8))
    assert llm.engine.runner._watches == [] and llm.engine.runner._states == ()


def test_a_target_that_gives_none_or_does_not_fit_is_refused() -> None:
    class Other(torch.nn.Module):
        config, dtype, device = TARGET, torch.float32, torch.device("cpu")

    with pytest.raises(ValueError, match="Other on 'torch' kernels gives no hidden states"):
        LLM(TorchExecutor(Other()), Eagle3Draft(TorchHead(make_head())))  # type: ignore[arg-type]
    for config, said in (
        (TARGET.resized(3, hidden_size=64, head_dim=16), "its target_hidden_size is 32, the target's hidden_size 64"),
        (TARGET.resized(3, vocab_size=25), "its vocab_size is 24, the target's vocab_size 25"),
        (TARGET.resized(2), r"after \[0, 2, 3\] layers: this model has 2"),
    ):
        with pytest.raises(ValueError, match=said):
            LLM(target_on("torch", config), Eagle3Draft(TorchHead(make_head())))


# Drafting


@pytest.mark.usefixtures("few_seeds")
@pytest.mark.parametrize("kernels", dict.fromkeys(["torch", COMPILED]))
@pytest.mark.parametrize("tree", [{}, {"nodes": 7, "depth": 3, "width": 2}], ids=["chain", "tree"])
def test_the_kit_finds_nothing(kernels: str, tree: dict[str, int]) -> None:
    if tree and kernels == "torch" != COMPILED:
        pytest.skip("test_trees_are_the_same_on_all_kernels")
    head = make_head(12, norm_before_residual=bool(tree))
    check_draft(lambda: Eagle3Draft(head_on(head, kernels), **tree), target=target_on(kernels))


def naive(head: Eagle3Head, target: Llama, tokens: list[int], count: int) -> list[int]:
    """What the head drafts, by the paper's description alone: everything from the start for each token."""
    states = head.config.states or ()
    taken: dict[int, Tensor] = dict.fromkeys(states, torch.empty(0))
    length = len(tokens)
    target(torch.tensor(tokens), torch.arange(length), DenseCausal(1, length), through=record_states(taken))
    x_TC = head.fuse(torch.cat([taken[number] for number in states], -1)[: length - 1])
    drafted: list[int] = []
    for _ in range(count):
        fed = [*tokens, *drafted][1:]
        found_TC = head(torch.tensor(fed), x_TC, torch.arange(len(fed)), DenseCausal(1, len(fed)))
        drafted.append(int(head.to_target_U[head.logits(found_TC[-1:]).argmax()]))
        x_TC = torch.cat([x_TC, found_TC[-1:]])
    return drafted


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 23), min_size=2, max_size=20), st.integers(1, 6), st.integers(0, 9),
    st.sampled_from(list(dict.fromkeys(["torch", COMPILED]))), st.sampled_from([{}, {"norm_before_residual": True}]),
)  # fmt: skip
def test_chains_are_those_of_the_naive_twin(
    prompt: list[int], k: int, seed: int, kernels: str, flags: dict[str, bool]
) -> None:
    """Round after round, whatever stands of a draft: the target's features replace the head's own."""
    head, model = make_head(12, seed=seed, **flags), toy_target(24, TARGET)
    llm = LLM(executor_of(model, kernels), Eagle3Draft(head_on(head, kernels)), k=k)
    llm.engine.stretch = 0  # round by round
    (out,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=12, explain=True))
    tokens, drafted = [*prompt, *out.token_ids], 0
    at = len(prompt) + 1
    while at < len(tokens):
        chain = naive(head, model, tokens[:at], min(k, len(tokens) - at - 1))
        stand = next((n for n, token in enumerate(chain) if token != tokens[at + n]), len(chain))
        drafted += len(chain)
        at += stand + 1
    assert out.stats.drafted == drafted


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30),
    SamplingParams(temperature=1.0, max_tokens=30, seed=3),
    SamplingParams(temperature=0.7, top_k=5, max_tokens=30, seed=4),
    SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.5, min_tokens=5),
]


@compiled
@pytest.mark.parametrize("policy", ["exact", "fly(theta=0.1, window=1, hold=1)", "typical"])
def test_rounds_in_one_call_are_rounds_one_by_one(policy: str) -> None:
    """The compiled rounds with a head draft and decide as the engine does, one round after another."""
    head, prompts = make_head(12), [[5, 3, 8], [1, 2, 3, 4, 1, 2], [7], [5, 3, 8, 1]]
    found = []
    for stretch in (0.05, 0):
        llm = LLM(target_on(COMPILED), Eagle3Draft(head_on(head, COMPILED)), policy, k=4)
        llm.engine.stretch = stretch
        outputs = [llm.generate([prompt], params)[0] for prompt in prompts for params in PARAMS]
        outputs += llm.generate(prompts, PARAMS)
        found.append([(out.token_ids, out.stats.drafted, out.stats.accepted) for out in outputs])
    assert found[0] == found[1]
    assert sum(drafted for _, drafted, _ in found[0]) > 100


@compiled
def test_a_head_knows_of_rounds_that_others_took() -> None:
    """Where another member drafts, or nobody, rounds in one call keep the hidden states: the head goes on from them."""
    head, prompts, params = make_head(12), [[5, 3, 8, 5, 3, 8], [1, 2, 3, 4, 1, 2]], PARAMS[0]
    found = []
    for stretch in (0.05, 0):
        mine = Eagle3Draft(head_on(head, COMPILED))
        choice = ChooseDraft(copy=NGramDraft(), nothing=NGramDraft(longest=50, shortest=40), head=mine)
        llm = LLM(target_on(COMPILED), choice, k=4)
        llm.engine.stretch, texts = stretch, []
        for row in (request.row for request in llm.requests(prompts, params, draft="copy")):
            for number in range(60):
                llm.engine.step([row], seconds=1e-4)
                held = mine.runner._held.get(row.id)
                assert held is None or held.first == 1  # never a gap
                if row.finish_reason:
                    break
                row.draft = ("head", "copy", "nothing")[number % 3]
            assert mine.runner._held[row.id].text == row.tokens[: len(mine.runner._held[row.id].text)]
            texts.append(row.tokens)
            row.draft = "copy"
            llm.engine.release(row)
            assert not mine.runner._held and mine.runner.allocator.num_free == mine.runner.allocator.num_blocks
        found.append(texts)
    assert found[0] == found[1]


@compiled
def test_trees_are_the_same_on_all_kernels() -> None:
    head, prompts, found = make_head(12), [[5, 3, 8], [1, 2, 3, 4, 1, 2], [7], [5, 3, 8, 1]], []
    for kernels in ("torch", COMPILED):
        llm = LLM(target_on(kernels), Eagle3Draft(head_on(head, kernels), nodes=9, depth=4, width=3), k=4)
        outputs = llm.generate(prompts, PARAMS) + [llm.generate([prompts[1]], params)[0] for params in PARAMS]
        found.append([(out.token_ids, out.stats.drafted, out.stats.accepted) for out in outputs])
    assert found[0] == found[1]


def check_texts(kernels: str, strategy: DraftStrategy) -> None:
    """A head's drafts change no text of the target. Prompts that begin alike share pages, in the target's cache and
    the head's; several completions of one."""
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, *rest] for rest in ([], [3], [3, 4, 5], [9, 9])]
    plain = LLM(target_on(kernels)).generate(prompts, greedy)
    llm = LLM(target_on(kernels), strategy, k=5)
    for _ in range(2):
        outputs = llm.generate(prompts, greedy)
        assert [one.token_ids for one in outputs] == [one.token_ids for one in plain]
    assert outputs[0].stats.cached >= 4 and all(one.stats.drafted for one in outputs)
    several = llm.generate([prompts[2]], greedy.changed({"n": 3}))[0]
    assert {tuple(one.token_ids) for one in (several, *several.others)} == {tuple(plain[2].token_ids)}
    for allocator in llm.scheduler.allocators:
        assert allocator.num_free == allocator.num_blocks


@pytest.mark.parametrize("kernels", dict.fromkeys(["torch", COMPILED]))
def test_the_texts_are_the_targets_own(kernels: str) -> None:
    for tree in ({}, {"nodes": 6, "depth": 3, "width": 2}):
        check_texts(kernels, Eagle3Draft(head_on(make_head(12), kernels), **tree))


def test_a_row_whose_prompt_nobody_watched_is_drafted_for_all_the_same() -> None:
    llm = LLM(target_on("torch"), Eagle3Draft(TorchHead(make_head(12))), k=4)
    prompt, params = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1], SamplingParams(temperature=0.0, max_tokens=16)
    plain = llm.generate([prompt], params, k=0)[0]
    again = llm.generate([prompt], params)[0]
    assert again.token_ids == plain.token_ids and again.stats.drafted


def test_a_head_of_the_targets_embedding(tmp_path: Path) -> None:
    head, model = make_head(12, embedding=False), toy_target(24, TARGET)
    with pytest.raises(ValueError, match="head has no embedding"):
        head(torch.tensor([1]), torch.zeros(1, 32), torch.tensor([0]), DenseCausal(1, 1))
    save_head(head, tmp_path, torch.float32)
    draft = parse_draft(str(tmp_path), dtype="float32")
    assert isinstance(draft, Eagle3Draft)
    llm = LLM(executor_of(model, "auto"), draft, k=4)
    assert isinstance(draft.head, (CpuHead, TorchHead)) and draft.head.head.embed_tokens is not None
    assert torch.allclose(draft.head.head.embed_tokens.weight, model.embed_tokens.weight, atol=1e-6)
    assert llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=8))[0].stats.drafted


# By name


def test_a_head_by_its_text(checkpoint: Path) -> None:
    tree = parse_draft(f"eagle3({checkpoint}, nodes=9, width=3)")
    assert isinstance(tree, Eagle3Draft) and (tree.nodes, tree.width) == (9, 3) and tree.spare == 18
    for text in (str(checkpoint), f"eagle3('{checkpoint}')"):
        assert isinstance(parse_draft(text), Eagle3Draft)
    with pytest.raises(ValueError, match="nodes -1 must be at least 0"):
        parse_draft(f"eagle3({checkpoint}, nodes=-1)")
    with pytest.raises(ValueError, match="is a model, not a draft head"):
        LLM("fly-tiny", "eagle3(fly-draft)")
    with pytest.raises(ValueError, match=r"is a draft head, not a model by itself; write eagle3\("):
        LLM(target_on("torch"), SingleDraft(checkpoint))
    with pytest.raises(ValueError, match="for another target"):
        LLM("fly-tiny", f"eagle3({checkpoint})")


def test_what_has_no_compiled_code_runs_on_pytorch(checkpoint: Path, tmp_path: Path) -> None:
    assert head_refusal(make_head()) is None
    reason = head_refusal(make_head(norm_output=True))
    assert reason is not None and "norm_output" in reason
    shutil.copytree(checkpoint, tmp_path / "other")
    draft = Eagle3Draft(changed(tmp_path / "other", {}, norm_output=True), dtype="float32")
    llm = LLM(target_on("torch"), draft)
    assert isinstance(draft.head, TorchHead) and llm.draft is draft


# Training


def answers_of(executor: Executor, count: int = 24) -> list[Answer]:
    llm, prompts = LLM(executor), [[n % 24, (3 * n) % 24, 5] for n in range(count)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))
    return [Answer(prompt, list(out.token_ids)) for prompt, out in zip(prompts, outputs)]


PLAN = Plan(width=64, steps=12, batch=6, length=32, test_steps=3, save_every=4, held_out=4, precision="float32")


class Killed(Exception):
    pass


def check_goes_on(plan: Plan, other: Plan, differences: str, folder: Path) -> list[float]:
    """A training that was killed goes on as if it was not, but not with an ``other`` plan. Return its losses."""
    executor = target_on(COMPILED)
    answers = answers_of(executor)
    whole, first = train_head(executor, answers, plan, folder / "whole")

    def kill_after_seven(count: int, said: str, taken: list[int] = []) -> None:  # noqa: B006
        taken.append(count)
        if len(taken) == 7:
            raise Killed

    with pytest.raises(Killed):
        train_head(executor, answers, plan, folder / "killed", kill_after_seven)
    seen: list[int] = []
    again, second = train_head(executor, answers, plan, folder / "killed", lambda count, said: seen.append(count))
    assert seen[0] == 4 and len(seen) == 9  # from the checkpoint on
    assert second.losses == first.losses and second.held_out == first.held_out
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(whole.named_parameters())[name])
    with pytest.raises(ValueError, match=rf"belongs to another training \(its {re.escape(differences)} differ\)"):
        train_head(executor, answers, other, folder / "killed")
    return first.losses


def test_a_training_that_was_killed_goes_on_as_if_it_was_not(tmp_path: Path) -> None:
    losses = check_goes_on(PLAN, replace(PLAN, batch=3), "['batch']", tmp_path)
    executor = target_on(COMPILED)
    _, longer = train_head(executor, answers_of(executor), replace(PLAN, steps=13), tmp_path / "killed")
    assert longer.losses[:12] == losses and longer.step == 13


def test_what_is_trained_drafts_better(tmp_path: Path) -> None:
    """It learns: the loss falls, more of its drafts stand, and measured acceptance is that of drafting."""
    executor = target_on("torch")
    answers = answers_of(executor, 48)
    plan = replace(PLAN, steps=120, learning_rate=0.01, width=None)
    head, training = train_head(executor, answers, plan, tmp_path)
    assert sum(training.losses[-10:]) < 0.85 * sum(training.losses[:10])
    assert load_head(tmp_path).shares and (tmp_path / "config.json").exists()
    assert head.embed_tokens is not None and torch.equal(head.embed_tokens.weight, executor.embedding())
    tau = []
    for one in (make_head(), head):
        llm = LLM(executor, Eagle3Draft(TorchHead(one)), k=3)
        outputs = llm.generate([a.prompt for a in answers[::4]], SamplingParams(temperature=0.0, max_tokens=12))
        tau.append(sum(out.stats.accepted for out in outputs) / sum(out.stats.rounds for out in outputs))
    assert tau[1] > 1.5 * tau[0]
    assert 0.5 * training.held_out[0] < tau[1]


def test_a_head_of_the_targets_width_begins_with_its_output_matrix() -> None:
    executor = target_on("torch")
    answers = answers_of(executor, 48)
    ids_U = torch.arange(24)[::2]
    course = Eagle3Course(executor, replace(PLAN, width=None), ids_U, answers)
    head, reader = course.head, Reader(executor, course.states, 32)
    head.to_target_U.copy_(ids_U)
    course.begin(reader, answers)
    logits_NV, states_TF, places = reader.read(answers[:4], (3,))
    normed_NC = torch.nn.functional.rms_norm(states_TF[places], (32,), eps=TARGET.rms_norm_eps)
    torch.testing.assert_close(head.lm_head(normed_NC), logits_NV[:, ::2], atol=0.02, rtol=0.02)
    _, states_TF, _ = reader.read(answers, reader.states)
    scaled_F = (states_TF / reader.scale_F).square().mean(0).sqrt()
    torch.testing.assert_close(scaled_F, torch.ones_like(scaled_F), atol=0.5, rtol=0.5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(8, 500), min_size=1, max_size=200), st.integers(1, 12), st.integers(0, 3))
def test_every_turn_takes_all_answers_in_batches_of_like_length(lengths: list[int], batch: int, seed: int) -> None:
    steps = max(1, len(lengths) // batch)
    turns = [[_order(tuple(lengths), turn * steps + n, batch, seed) for n in range(steps)] for turn in range(2)]
    for turn in turns:
        taken = [n for some in turn for n in some]
        assert len({*taken}) == len(taken) == (len(lengths) // batch * batch or len(lengths))
        if len(lengths) <= batch * _ALIKE:  # all were drawn together: no two batches overlap
            ends = sorted((min(lengths[n] for n in some), max(lengths[n] for n in some)) for some in turn)
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))


def test_the_training_time_test_is_drafting(tmp_path: Path) -> None:
    """The features of a place's later steps are those that drafting from there comes to."""
    head, model, tokens = make_head(), toy_target(24, TARGET), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    states = head.config.states or ()
    taken: dict[int, Tensor] = dict.fromkeys(states, torch.empty(0))
    model(torch.tensor(tokens), torch.arange(9), DenseCausal(1, 9), through=record_states(taken))
    given = head.fuse(torch.cat([taken[number] for number in states], -1)[:-1])
    kv, x_TC, found = OwnSteps(1, 8), given, []
    for step in range(3):
        fed_T = torch.tensor([*tokens[1 + step :], *[0] * step])
        x_TC = head(fed_T, x_TC, torch.arange(8) + step, kv)
        found.append(x_TC)
    for place in range(6):
        features = given[: place + 1]
        for step in range(3):
            fed = torch.tensor(tokens[1 : place + 2 + step])
            last = head(fed, features, torch.arange(len(fed)), DenseCausal(1, len(fed)))[-1:]
            torch.testing.assert_close(found[step][place : place + 1], last, atol=1e-5, rtol=1e-4)
            features = torch.cat([features, last])


def test_prompts_of_a_file(tmp_path: Path) -> None:
    lines, objects = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_text("one\n\ntwo\n")
    objects.write_text('"one"\n{"prompt": "two"}\n{"messages": [{"role": "user", "content": "three"}]}\n')
    assert prompts_of(lines, None, None) == ["one", "two"]
    assert prompts_of(objects, None, 2) == ["one", "two"] and len(prompts_of(objects, None, None)) == 3
    objects.write_text('"one"\n{"text": "two"}\n')
    with pytest.raises(ValueError, match=r"b.jsonl:2: must be a text"):
        prompts_of(objects, None, None)
    with pytest.raises(ValueError, match=r"either a file of prompts .--prompts. or a bundled task .--task."):
        prompts_of(None, None, None)


def test_the_command_trains_a_head_and_goes_on(tmp_path: Path) -> None:
    words = "train-head --model fly-tiny --task arithmetic --count 12 --max-tokens 24 --width 32 --steps 3 --batch 2"
    told = [str(tmp_path / "head"), "--states", "0,1", "--draft-vocabulary", "100", "--save-every", "1"]
    first = CliRunner().invoke(app, [*words.split(), *told])
    assert first.exit_code == 0, first.output
    lines = (tmp_path / "head" / "answers.jsonl").read_text().splitlines()
    assert len(lines) == 12
    with (tmp_path / "head" / "answers.jsonl").open("a") as file:
        file.write('{"prompt": [1')  # as a kill leaves it
    again = CliRunner().invoke(app, [*words.split(), *told])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "head" / "answers.jsonl").read_text().splitlines() == lines
    other = CliRunner().invoke(app, [*words.replace("24", "25").split(), *told])
    assert other.exit_code == 2 and "answers of another target, to other prompts, or" in " ".join(other.output.split())
    card = (tmp_path / "head" / "README.md").read_text()
    assert "| depth | 1 | 2 | 3 | 4 | 5 |" in card and "drafts | 100 of the target's 1024" in card
    out = LLM("fly-tiny", str(tmp_path / "head")).generate(["Sam has 4"], temperature=0, max_tokens=8)[0]
    assert out.stats.drafted
    bad = CliRunner().invoke(app, [*words.split(), str(tmp_path / "bad"), "--states", "9"])
    assert bad.exit_code == 2 and "this model has 1, so 0 to 1" in bad.output


# The bundled head


def test_the_bundled_head_beats_prompt_lookup_on_its_kind_of_task() -> None:
    prompts = [problem.prompt for problem in problems("arithmetic", "heldout")[-8:]]
    tau = {}
    for draft in ("fly-eagle3", "ngram"):
        llm = LLM("fly-target", draft, k=7)
        outputs = llm.generate([llm.chat_prompt(prompt) for prompt in prompts], temperature=0, max_tokens=128)
        stats = sum((out.stats for out in outputs[1:]), outputs[0].stats)
        tau[draft] = stats.tau
    assert tau["fly-eagle3"] > 1.3 * tau["ngram"]
    checkpoint = CHECKPOINTS / "fly-eagle3"
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 4e6
