"""Early exits: what leaves says what its layers so far say, what it skips is filled, and the way from answers to a
target that leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from fly import LLM, Guarantee, SamplingParams
from fly.backends import executor_of
from fly.backends.cpu import available
from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.cli import app
from fly.drafts import DraftStrategy, NGramDraft, SingleDraft, TreeDraft
from fly.extras import early_exit
from fly.extras.early_exit import EarlyExit, ExitConfig, Exits, load_exits, save_exits
from fly.extras.eval.timed import Clock
from fly.models import Llama, LlamaConfig
from fly.models.config import CheckpointError
from fly.models.families import FAMILIES
from fly.ops import tree_mask
from fly.policies import AcceptancePolicy, policy_types
from fly.runner.executor import Batch
from fly.serve.rules import Rules
from fly.serve.service import Service
from fly.serve.settings import Settings
from fly.testing.toys import toy_target

VOCAB, LAYERS = 29, 5
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@lru_cache
def target(family: str = "llama") -> Llama:
    sizes: dict[str, Any] = {"sliding_window": 4} if family in ("mistral", "gemma3_text") else {}
    config = LlamaConfig(
        family=family, vocab_size=VOCAB, num_hidden_layers=LAYERS, max_position_embeddings=96, **SIZES, **sizes
    )
    return toy_target(VOCAB, config)


def exits_of(layers: tuple[int, ...], thresholds: tuple[float, ...], looked: int = VOCAB, seed: int = 0) -> Exits:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    exits = Exits(ExitConfig(layers=layers, candidates=3, looked_through=looked, thresholds=thresholds, **sizes))
    for look in exits.looks:
        torch.nn.init.normal_(look[0].weight, std=2.0)
    exits.ids_U.copy_(torch.randperm(VOCAB)[:looked].sort().values)
    return exits.eval().requires_grad_(False)


def naive(model: Llama, exits: Exits, rows: list[list[int]], starts: list[int], parents: list[list[int]]) -> list[Any]:
    """Written out for fresh rows, without a cache: keys and values of each token and layer are listed. Of each row the
    layers it went through and its logits after the tokens from its start on, which were fed in a second forward."""
    found = []
    for tokens, start, tree in zip(rows, starts, parents):
        keys: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(LAYERS)]
        out: list[Tensor] = []
        passed = LAYERS
        for begin, end in ((0, start), (start, len(tokens))):
            if begin == end:
                continue
            places = list(range(begin, end))
            positions, sees = [], []
            for t in places:
                above = []
                node = t - (len(tokens) - len(tree))
                while tree and node >= 0:
                    above.append(node + len(tokens) - len(tree))
                    node = tree[node]
                inside = begin == start and bool(tree) and t >= len(tokens) - len(tree)
                root = len(tokens) - len(tree)
                sees.append(sorted([*range(root), *above]) if inside else list(range(t + 1)))
                positions.append(len(sees[-1]) - 1)
            x = model.embed_tokens(torch.tensor(tokens)[places])
            if model.config.traits.scaled_embedding:
                x = x * model.config.hidden_size**0.5
            rotary = [(cos[positions], sin[positions]) for cos, sin in model.rotary()]
            earlier: Tensor | None = None
            left: Tensor | None = None
            for number, layer in enumerate(model.layers):
                if begin == start and left is None and number in exits.config.layers:
                    look = exits.config.layers.index(number)
                    left, earlier = leaves(model, exits, look, x, tokens[begin:end], tree, earlier)
                    passed = number if left is not None else passed
                q, k, v = layer.prepare_attention(x, *rotary[layer.rope])
                for i, t in enumerate(places):
                    keys[number][t] = k[i], v[i]
                if left is not None:
                    continue  # keys and values only: the hidden state stays
                attended = []
                for i in range(len(places)):
                    window = layer.self_attn.window
                    seen = sees[i] if window is None else sees[i][-window:]
                    k_SGD, v_SGD = (torch.stack([keys[number][s][which] for s in seen]) for which in (0, 1))
                    k_SHD, v_SHD = (each.repeat_interleave(2, 1) for each in (k_SGD, v_SGD))
                    scale = layer.self_attn.scale or q.shape[-1] ** -0.5
                    weights = (torch.einsum("hd,shd->hs", q[i], k_SHD) * scale).softmax(-1)
                    attended.append(torch.einsum("hs,shd->hd", weights, v_SHD).flatten())
                x = layer.finish(x, torch.stack(attended))
            out = list(model.logits(model.norm(x)))
        found.append((passed, torch.stack(out)))
    return found


def leaves(
    model: Llama, exits: Exits, look: int, x: Tensor, tokens: list[int], tree: list[int], earlier: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Whether a row leaves at a look, and all its logits there."""
    logits = model.logits(model.norm(x))
    known = exits.ids_U.tolist()
    sure, best, candidates = [], [], []
    for i, row in enumerate(logits):
        ids = [*known]
        if not tree and i + 1 < len(tokens) and tokens[i + 1] not in known:
            ids.append(tokens[i + 1])
        top = sorted(ids, key=lambda token: -row[token])[: exits.config.candidates]
        before = None if earlier is None else earlier[i, top].unsqueeze(0)
        chance = exits.chance(look, exits.features(row[top].unsqueeze(0), before))
        sure.append(bool(chance >= exits.config.thresholds[look]))
        best.append(top[0])
        candidates.append(top)
    matter = len(tokens)
    if not tree:
        matter = next((i + 1 for i in range(len(tokens) - 1) if best[i] != tokens[i + 1]), len(tokens))
    agreed = all(int(logits[i].argmax()) in candidates[i] for i in range(matter))
    return (logits if all(sure[:matter]) and agreed else None), logits


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_rows_leave_as_it_is_written_out(data: st.DataObject) -> None:
    """Whatever families, looks and thresholds there are, rows side by side, chains, trees and prompts."""
    model = target(data.draw(st.sampled_from(sorted(FAMILIES))))
    layers = tuple(sorted(data.draw(st.sets(st.integers(1, LAYERS - 1), min_size=1, max_size=3))))
    thresholds = tuple(data.draw(st.sampled_from([0.0, 0.0, 0.3, 0.6, 2.0])) for _ in layers)
    exits = exits_of(layers, thresholds, data.draw(st.sampled_from([5, 12, VOCAB])), data.draw(st.integers(0, 99)))
    executor = EarlyExit(TorchExecutor(model), exits)
    rows, starts, parents = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        text = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
        draft = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=4))
        tree = [data.draw(st.integers(-1, i - 1)) for i in range(len(draft))] if data.draw(st.booleans()) else []
        rows.append([*text, *draft])
        starts.append(len(text) - 1)
        parents.append(tree)
    cache = PagedKVCache(executor.config, 64, 4)
    for b, row in enumerate(rows):
        cache.resize(b, len(row))
    before = [b for b, start in enumerate(starts) if start]
    if before:  # the texts, as a prompt: only the logits after their last tokens are asked for
        texts = [rows[b][: starts[b]] for b in before]
        kv = cache.batch(before, [0] * len(before), list(map(len, texts)))
        _, layers = executor.score_rows(Batch.of(texts, kv), [0] if len(texts[0]) > 1 else (), ())
        assert not layers
    counts = [len(row) - start for row, start in zip(rows, starts)]
    masks = [tree_mask(start, start + 1, tree) if tree else None for start, tree in zip(starts, parents)]
    kv = cache.batch(range(len(rows)), starts, counts, masks)
    batch = Batch.of([row[start:] for row, start in zip(rows, starts)], kv)
    end = 0
    for start, count, tree in zip(starts, counts, parents):
        end += count
        depth: list[int] = []
        for parent in tree:
            depth.append(1 if parent < 0 else depth[parent] + 1)
        if tree:
            batch.positions[end - len(tree) : end] = [start + d for d in depth]
    scores, layers = executor.score_rows(batch, None, (0, LAYERS))
    wanted = naive(model, exits, rows, starts, parents)
    assert layers == {row: passed for row, (passed, _) in enumerate(wanted)}
    torch.testing.assert_close(scores.logits_NV, torch.cat([logits for _, logits in wanted]), atol=2e-4, rtol=2e-4)
    last_TC = scores.states_TF[:, 32:]  # of what left, the hidden state at its exit
    torch.testing.assert_close(model.logits(model.norm(last_TC)), scores.logits_NV, atol=2e-4, rtol=2e-4)
    event(f"layers {sorted(layers.values())}")


def test_thresholds_that_nothing_reaches_change_nothing() -> None:
    model, params = target(), SamplingParams(temperature=0.0, max_tokens=20)
    never = EarlyExit(TorchExecutor(model), exits_of((1, 3), (2.0, 2.0)))
    drafts: list[Callable[[], DraftStrategy | None]] = [
        lambda: None, NGramDraft, lambda: SingleDraft(model), lambda: TreeDraft(model),
    ]  # fmt: skip
    for draft in drafts:
        never.passed.clear()
        (plain,) = LLM(model, draft(), k=4).generate([[1, 2, 3]], params)
        (same,) = LLM(never, draft(), k=4).generate([[1, 2, 3]], params)
        assert same.token_ids == plain.token_ids and same.stats.rounds == plain.stats.rounds
        assert never.passed == {LAYERS: same.stats.rounds} and never.mean_layers == LAYERS
        assert same.guarantee is Guarantee.HEURISTIC and plain.guarantee is Guarantee.LOSSLESS


def test_layers_are_counted() -> None:
    always = EarlyExit(TorchExecutor(target()), exits_of((2,), (0.0,)))
    assert math.isnan(always.mean_layers)
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 9, 5)]
    outputs = LLM(always).generate([[1, 2, 3], [4, 5], [6, 7]], params)
    assert [out.stats.rounds for out in outputs] == [0, 8, 4]
    assert always.passed == {2: 12}  # prompts went through all layers, and could not exit
    (sampled,) = LLM(always).generate([[1, 2, 3]], SamplingParams(temperature=0.9, max_tokens=9, seed=3))
    assert always.passed == {2: 12 + sampled.stats.rounds} and always.mean_layers == 2


@settings(max_examples=20)
@given(st.sampled_from([*policy_types().values()]).map(lambda rule: rule()), st.booleans(), st.booleans())
def test_no_rule_promises_anything_on_it(rule: AcceptancePolicy, clocked: bool, off: bool) -> None:
    """Whatever is put around it: its logits are not the target's own (SpecEE), so no rule says more than HEURISTIC."""
    early = EarlyExit(TorchExecutor(target()), exits_of((2,), (0.0,)))
    executor = Clock(early) if clocked else early
    assert executor.promise(rule) == (Guarantee.HEURISTIC, None)
    assert TorchExecutor(target()).promise(rule) == (rule.guarantee, rule.bound)
    rules = Rules(rule, 4, "ngram", promise=executor.promise)
    shown = rules.choose(off=off).as_dict()
    assert (shown["guarantee"], shown["bound"]) == ("heuristic", None)
    with pytest.raises(ValueError, match="is heuristic on this model; this server requires lossless ones"):
        Rules(rule, 4, "ngram", require_lossless=True, promise=executor.promise)


def test_what_is_saved_is_loaded_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    exits = exits_of((1, 4), (0.5, 2.0), 7)
    save_exits(exits, tmp_path / "exits")
    again = load_exits(tmp_path / "exits")
    assert again.config == exits.config
    assert all(torch.equal(one, other) for one, other in zip(again.state_dict().values(), exits.state_dict().values()))
    model = target()
    loaded = early_exit.load(model, tmp_path / "exits")
    assert isinstance(loaded.executor, EarlyExit) and early_exit.load(loaded.executor.inner, tmp_path / "exits")
    with pytest.raises(ValueError, match="hidden_size is 32, this one's 64"):
        early_exit.load("fly-tiny", tmp_path / "exits")
    with pytest.raises(ValueError, match="deterministic: a target that exits early"):
        LLM(loaded, deterministic=True)
    for other in (loaded, *([] if available()[0] == "torch" else [executor_of(model, available()[0])])):
        with pytest.raises(ValueError, match="take a Llama on PyTorch's kernels, kernels='torch', not Llama on"):
            early_exit.load(other, tmp_path / "exits")
    with pytest.raises(CheckpointError, match="nowhere holds no early exits"):
        early_exit.load(model, tmp_path / "nowhere")
    path = tmp_path / "exits" / "config.json"
    said = json.loads(path.read_text())
    for change, problem in (
        ({"layers": [4, 1]}, "must ascend"),
        ({"layers": [1, 5]}, "must be fewer than the target's 5"),
        ({"thresholds": [0.5]}, "one for each of layers"),
        ({"looked_through": 2}, "from the 3 candidates"),
        ({"odd": 1}, "odd"),
        ({"architectures": ["LlamaForCausalLM"]}, "holds no early exits"),
    ):
        path.write_text(json.dumps(said | change))
        with pytest.raises(CheckpointError, match=problem):
            load_exits(tmp_path / "exits")


def test_from_answers_to_a_target_that_leaves(tmp_path: Path) -> None:
    """By the commands alone: trained, again from its own answers, generated with, compared by ``fly eval``."""
    out = tmp_path / "exits"
    words = ["train-exit", str(out), "--model", "fly-target", "--task", "arithmetic", "--count", "24"]
    words += ["--max-tokens", "40", "--layers", "2,3", "--steps", "200", "--agreement", "0.9"]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    tensors, asked = load_file(out / "model.safetensors"), (out / "answers.jsonl").read_bytes()
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (out / "answers.jsonl").read_bytes() == asked
    again = load_file(out / "model.safetensors")
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    card = (out / "README.md").read_text()
    assert "| 3 |" in card and "24 prompts of the bundled task `arithmetic`" in card
    loaded = early_exit.load("fly-target", out)
    assert isinstance(loaded.executor, EarlyExit)
    llm, plain = LLM(loaded, "fly-draft"), LLM("fly-target", kernels="torch")
    assert llm.eos_ids == plain.eos_ids and llm.default_params == plain.default_params
    problem = "Tom has 3 apples and buys 4 more. How many apples has he now?"
    output = llm.generate([llm.chat_prompt(problem)], SamplingParams(temperature=0.0, max_tokens=40))[0]
    assert 1 < loaded.executor.mean_layers < 4 and loaded.executor.passed.total() == output.stats.rounds
    assert output.guarantee is Guarantee.HEURISTIC and "heuristic" in repr(output)
    with pytest.raises(ValueError, match="'exact' is heuristic on this model; this server requires lossless ones"):
        Service(llm, Settings(require_lossless=True), "none", "it")
    shown = Service(llm, Settings(), "none", "it").rules.choose
    assert shown("block").as_dict()["guarantee"] == shown(off=True).as_dict()["guarantee"] == "heuristic"
    bad = CliRunner().invoke(app, ["train-exit", str(out), "--task", "arithmetic", "--layers", "2,x"])
    assert bad.exit_code == 2 and "--layers '2,x' must be numbers with commas" in bad.output
