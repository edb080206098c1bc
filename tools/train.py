"""Train and evaluate the bundled checkpoints, from a checkout: ``python -m tools.train all``.

All three models share one byte-level BPE tokenizer and differ only in size. The seed determines everything: the
problems, their order, the initial weights and the number of steps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from fly.extras.eval.scorers import check_many
from fly.models import Llama, LlamaConfig, load_model, save_model
from fly.models.bundled import CHECKPOINTS
from fly.models.bundled.tasks import KINDS, Problem
from tools import wording
from tools.problems import generate

__all__ = ["RECIPES", "Recipe", "build_tokenizer", "evaluate", "greedy", "save_tokenizer", "train"]

VOCABULARY = 1024
CONTEXT = 1024
BEGIN, ENDOFTEXT, END, USER, ASSISTANT, SYSTEM = SPECIALS = (
    "<|begin|>",
    "<|endoftext|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role'] + '; choose system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_SYSTEM_TEXTS = (
    "Solve the task step by step.",
    "You are a helpful assistant.",
    "Answer the question and show your steps.",
)
# Prompts count a little in the loss: they teach the words, but need not be predicted.
_PROMPT_WEIGHT = 0.05
# Freely chosen words cannot be predicted better than by their frequencies. At full weight they would cause most of the
# gradient's noise.
_FREE_WEIGHT = 0.1
_SEED_STRIDE = 1_000_003  # distance between the data seeds of two rounds

app = typer.Typer(add_completion=False, help=__doc__)
console = Console()


@dataclass(frozen=True)
class Round:
    """Part of a training that goes from one checkpoint to the next: warm-up, plateau, decay to zero.

    ``peak`` is the highest fraction of the recipe's learning rates. ``shares`` are the numbers of problems of each kind
    (arithmetic, text, code) that are drawn in turn.
    """

    steps: int
    peak: float = 1.0
    shares: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True)
class Recipe:
    """Sizes and training plan of one checkpoint."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rounds: tuple[Round, ...]
    batch: int
    length: int
    adamw_lr: float
    muon_lr: float
    purpose: str

    def config(self) -> LlamaConfig:
        """The model configuration."""
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
        )


RECIPES = {
    "fly-target": Recipe(
        384,
        1024,
        4,
        6,
        6,
        64,
        (Round(1000), Round(900, 0.5, (2, 3, 1)), Round(800, 0.4, (1, 3, 1))),
        24,
        256,
        2e-3,
        1e-2,
        "the target, which verifies drafts",
    ),
    "fly-draft": Recipe(128, 320, 2, 4, 2, 32, (Round(1000),), 32, 256, 3e-3, 2e-2, "the draft model for fly-target"),
    "fly-tiny": Recipe(64, 192, 1, 2, 1, 32, (Round(800),), 32, 256, 4e-3, 2e-2, "a very small draft model for tests"),
}


# ---------------------------------------------------------------------------------------------------------
# Tokenizer


def build_tokenizer(seed: int = 0, count: int = 12_000) -> Tokenizer:
    """Train the shared tokenizer on ``count`` training problems."""
    tokenizer = Tokenizer(models.BPE())
    # Split digits, so that numbers are spelled the same way everywhere.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for p in generate("all", "train", seed, count) for text in (p.prompt, p.solution))
    tokenizer.train_from_iterator(texts, trainer)
    (bos,) = _ids(tokenizer, BEGIN)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B:1", special_tokens=[(BEGIN, bos)]),
        ]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer files of a checkpoint directory, in the layout transformers reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": ENDOFTEXT,
            "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    ids = dict(zip(SPECIALS, _ids(tokenizer, *SPECIALS)))
    _write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": ids[BEGIN],
            "eos_token_id": [ids[END], ids[ENDOFTEXT]],
            "pad_token_id": ids[ENDOFTEXT],
            "do_sample": False,
        },
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _load_or_build_tokenizer(directory: Path, seed: int) -> Tokenizer:
    path = directory / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = build_tokenizer(seed)
    save_tokenizer(tokenizer, directory)
    return tokenizer


# ---------------------------------------------------------------------------------------------------------
# Data


def _ids(tokenizer: Tokenizer, *specials: str) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[text] for text in specials]


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def _mixed(shares: tuple[int, int, int], seed: int) -> Iterator[Problem]:
    streams = [generate(kind, "train", seed) for kind in KINDS]
    while True:
        for stream, share in zip(streams, shares):
            yield from islice(stream, share)


def _conversations(
    tokenizer: Tokenizer, shares: tuple[int, int, int], seed: int
) -> Iterator[tuple[list[int], list[float]]]:
    """Yield training problems as chats, without end: token ids, and the loss weight of each id."""
    rng = Random(f"chat/{seed}")
    begin, user, assistant, system, end = _ids(tokenizer, BEGIN, USER, ASSISTANT, SYSTEM, END)
    systems = _encode(tokenizer, _SYSTEM_TEXTS)
    # A word of several tokens is chosen with its first token, which in lower case may be a letter with other uses.
    spelled = _encode(tokenizer, [space + word for word in sorted(set().union(*wording.FREE)) for space in ("", " ")])
    free = {ids[0] for ids in spelled if len(ids) == 1 or tokenizer.decode(ids[:1]).strip().istitle()}
    stream = _mixed(shares, seed)
    while True:
        chunk = list(islice(stream, 3000))
        rng.shuffle(chunk)
        asked, solved = (
            _encode(tokenizer, [p.prompt for p in chunk]),
            _encode(tokenizer, [p.solution for p in chunk]),
        )
        for question, solution in zip(asked, solved):
            head = [begin, system, *rng.choice(systems), end] if rng.random() < 0.1 else [begin]
            head += [user, *question, end, assistant]
            solution_weights = [_FREE_WEIGHT if token in free else 1.0 for token in solution]
            weights = [_PROMPT_WEIGHT] * len(head) + [*solution_weights, 1.0]
            yield [*head, *solution, end], weights


class _PackedCausal:
    """Causal attention within each conversation of packed rows [batch, length]."""

    def __init__(self, ids: Tensor, begin: int) -> None:
        conversation = (ids == begin).cumsum(1)
        same = conversation[:, None, :, None] == conversation[:, None, None, :]
        self._mask = same.tril()

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention output [T, H, D] of each token over its own conversation up to itself; no window here."""
        batch = len(self._mask)
        q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q_THD, k_TGD, v_TGD))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)


def _batches(tokenizer: Tokenizer, recipe: Recipe, number: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(ids, weights)`` of shape [batch, length + 1] for a round; whole conversations packed by best fit.

    The rest of a row is padding with weight 0.
    """
    width, (pad,) = recipe.length + 1, _ids(tokenizer, ENDOFTEXT)
    stream = _conversations(tokenizer, recipe.rounds[number].shares, seed + number * _SEED_STRIDE)
    rows: list[tuple[list[int], list[float]]] = []
    done: list[tuple[list[int], list[float]]] = []
    while True:
        ids, weights = next(stream)
        ids, weights = ids[:width], weights[:width]
        fitting = [row for row in rows if len(row[0]) + len(ids) <= width]
        if fitting:
            row = max(fitting, key=lambda r: len(r[0]))
            row[0].extend(ids)
            row[1].extend(weights)
        else:
            rows.append((ids, weights))
        if len(rows) > 64:  # close the fullest row; the others wait for more
            fullest = max(range(len(rows)), key=lambda i: len(rows[i][0]))
            done.append(rows.pop(fullest))
        if len(done) == recipe.batch:
            id_rows = [r + [pad] * (width - len(r)) for r, _ in done]
            weight_rows = [w + [0.0] * (width - len(w)) for _, w in done]
            yield torch.tensor(id_rows), torch.tensor(weight_rows)
            done = []


# ---------------------------------------------------------------------------------------------------------
# Training


def _initialise(model: Llama, seed: int) -> None:
    """Normal(0, 0.02), with the projections into the residual stream scaled down by its depth."""
    generator = torch.Generator().manual_seed(seed)
    depth = 1 / math.sqrt(2 * len(model.layers))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scale = depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(parameter, std=0.02 * scale, generator=generator)


def _optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the embedding and the norms."""
    hidden = [p for p in model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    adamw = torch.optim.AdamW(rest, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    if not recipe.muon_lr:
        adamw.add_param_group({"params": hidden})
        return [adamw]
    # Updates scaled by their aspect ratio let one learning rate fit all matrix shapes.
    muon = torch.optim.Muon(hidden, lr=recipe.muon_lr, weight_decay=0.01, momentum=0.95, nesterov=True)
    return [muon, adamw]


def _rate(step: int, steps: int) -> float:
    """Learning-rate factor: a short warm-up, a plateau, then linearly to zero over the last 75 %."""
    warm, decay = max(1, min(100, steps // 20)), 0.75 * steps
    return min((step + 1) / warm, 1.0, (steps - step) / decay)


def train(
    recipe: Recipe, tokenizer: Tokenizer, seed: int, directory: Path, compiled: bool = False, resume: bool = False
) -> dict[str, Any]:
    """Train one model and return the measured facts, which are also written to ``training.json``.

    With ``resume``, the rounds that ``training.json`` lists as finished are skipped.
    """
    facts: dict[str, Any] = {"seed": seed, "rounds": 0, "steps": 0, "tokens": 0, "minutes": 0.0}
    if resume:
        facts = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    else:
        model = Llama(recipe.config())
        _initialise(model, seed)
        save_model(model, directory, torch.float32)
    for number in range(facts["rounds"], len(recipe.rounds)):
        # Every round starts from the saved checkpoint, so that resuming changes nothing.
        model = load_model(directory, dtype=torch.float32, device="cpu").requires_grad_(True).train()
        start = time.monotonic()
        loss, tokens = _train_round(model, recipe, number, tokenizer, facts["seed"], directory, compiled)
        save_model(model, directory, torch.bfloat16)
        facts = {
            **facts,
            "rounds": number + 1,
            "steps": facts["steps"] + recipe.rounds[number].steps,
            "tokens": facts["tokens"] + tokens,
            "minutes": round(facts["minutes"] + (time.monotonic() - start) / 60, 1),
            "loss": round(loss, 4),
        }
        _write_json(directory / "training.json", facts)
    return facts


def _train_round(
    model: Llama, recipe: Recipe, number: int, tokenizer: Tokenizer, seed: int, directory: Path, compiled: bool
) -> tuple[float, int]:
    """One round of training; returns the average loss at its end and the number of tokens seen."""
    steps, peak = recipe.rounds[number].steps, recipe.rounds[number].peak
    forward = torch.compile(model) if compiled else model
    optimizers = _optimizers(model, recipe)
    bases = [[group["lr"] for group in o.param_groups] for o in optimizers]
    batches = _batches(tokenizer, recipe, number, seed)
    (begin,) = _ids(tokenizer, BEGIN)
    positions = torch.arange(recipe.length).repeat(recipe.batch)
    start, tokens, average = time.monotonic(), 0, 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(directory.name, total=steps)
        for step in range(steps):
            ids, weights = next(batches)
            for optimizer, rates in zip(optimizers, bases):
                for group, base in zip(optimizer.param_groups, rates):
                    group["lr"] = base * peak * _rate(step, steps)
            with torch.autocast("cpu", torch.bfloat16):
                hidden = forward(ids[:, :-1].flatten(), positions, _PackedCausal(ids[:, :-1], begin))
                logits = model.logits(hidden)
            weight = weights[:, 1:].flatten()
            losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
            loss = (losses * weight).sum() / weight.sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            tokens += int((weights > 0).sum())
            average = loss.item() if step == 0 else 0.95 * average + 0.05 * loss.item()
            progress.update(bar, advance=1, description=f"{directory.name} loss {average:.4f}")
            if (step + 1) % 50 == 0 and not console.is_terminal:
                pace = (time.monotonic() - start) / (step + 1)
                console.print(f"round {number + 1} step {step + 1}/{steps} loss {average:.4f} {pace:.3f} s/step")
    return average, tokens


# ---------------------------------------------------------------------------------------------------------
# Evaluation


class _LeftPadded:
    """Dense cache of a batch whose prompts are padded on the left to one length."""

    def __init__(self, padding: Tensor, layers: int) -> None:
        self._padding = padding
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Append this step's keys and values, and attend causally over everything but the padding; no window here."""
        batch = len(self._padding)
        q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q_THD, k_TGD, v_TGD))
        old_k, old_v = self._keys[layer], self._values[layer]
        if old_k is not None and old_v is not None:
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        self._keys[layer], self._values[layer] = k, v
        total, new = k.shape[2], q.shape[2]
        columns = torch.arange(total)
        causal = columns[None, :] <= torch.arange(total - new, total)[:, None]
        real = columns[None, :] >= self._padding[:, None]
        # A padding row attends to itself, because softmax needs a value; nothing reads the result.
        own = columns[None, :] == torch.arange(total - new, total)[:, None]
        mask = (causal[None] & real[:, None]) | own[None]
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale)
        return out.transpose(1, 2).flatten(0, 1)


@torch.inference_mode()
def greedy(model: Llama, tokenizer: Tokenizer, prompts: Sequence[str], most: int = 400) -> list[str]:
    """Greedy completions of chat prompts, decoded as one batch."""
    begin, user, assistant, end, pad = _ids(tokenizer, BEGIN, USER, ASSISTANT, END, ENDOFTEXT)
    chats = [[begin, user, *ids, end, assistant] for ids in _encode(tokenizer, prompts)]
    longest = max(len(chat) for chat in chats)
    padding = torch.tensor([longest - len(chat) for chat in chats])
    tokens = torch.tensor([[pad] * (longest - len(chat)) + chat for chat in chats])
    cache = _LeftPadded(padding, len(model.layers))
    positions = (torch.arange(longest)[None] - padding[:, None]).clamp(min=0)
    written: list[Tensor] = []
    alive = torch.ones(len(chats), dtype=torch.bool)
    for _ in range(most):
        hidden = model(tokens.flatten(), positions.flatten(), cache).unflatten(0, (len(chats), -1))
        best = model.logits(hidden[:, -1]).argmax(-1)
        best = torch.where(alive, best, pad)
        alive &= (best != end) & (best != pad)
        if not alive.any():
            break
        written.append(torch.where(alive, best, pad))
        tokens, positions = best[:, None], positions[:, -1:] + 1
    if not written:
        return [""] * len(chats)
    return tokenizer.decode_batch(torch.stack(written, dim=1).tolist(), skip_special_tokens=True)


def evaluate(
    model: Llama, tokenizer: Tokenizer, n: int = 100, seed: int = 1, splits: Sequence[str] = ("heldout", "ood")
) -> tuple[dict[str, dict[str, float]], list[tuple[Problem, str]]]:
    """Greedy accuracy by split and kind, and the failures; ``n`` problems of each."""
    scores: dict[str, dict[str, float]] = {}
    failures: list[tuple[Problem, str]] = []
    for split in splits:
        scores[split] = {}
        for kind in KINDS:
            asked = list(generate(kind, split, seed, n))
            pairs = list(zip(asked, greedy(model, tokenizer, [p.prompt for p in asked])))
            passed = check_many(pairs)
            scores[split][kind] = sum(passed) / n
            failures += [pair for pair, ok in zip(pairs, passed) if not ok]
    return scores, failures


# ---------------------------------------------------------------------------------------------------------
# Model card


def _card(name: str, recipe: Recipe, facts: dict[str, Any], scores: dict[str, dict[str, float]], n: int) -> str:
    rows = "\n".join(f"| {kind} | {scores['heldout'][kind]:.0%} | {scores['ood'][kind]:.0%} |" for kind in KINDS)
    optimizer = (
        f"Muon (learning rate {recipe.muon_lr:g}) for the hidden matrices and AdamW ({recipe.adamw_lr:g}) for the rest"
        if recipe.muon_lr
        else f"AdamW ({recipe.adamw_lr:g})"
    )
    plan = "; ".join(
        f"{r.steps:,} at {r.peak:.0%} of the learning rates, problems {':'.join(map(str, r.shares))}"
        for r in recipe.rounds
    )
    note = facts.get("note", "")
    return f"""---
library_name: transformers
pipeline_tag: text-generation
language: en
tags:
- llama
- speculative-decoding
- synthetic-data
---

# {name}

A Llama-architecture language model with {facts["parameters"]:,} parameters, bundled with `fly` as
{recipe.purpose}. It was trained from scratch on generated tasks only and is meant for
trying out and testing speculative decoding, not for answering real questions.

## Architecture

| | |
| --- | --- |
| hidden size | {recipe.hidden_size} |
| feed-forward size | {recipe.intermediate_size} |
| layers | {recipe.layers} |
| query / key-value heads | {recipe.heads} / {recipe.kv_heads} of width {recipe.head_dim} |
| vocabulary | {VOCABULARY} (byte-level BPE, every digit its own token) |
| context window | {CONTEXT} positions; trained on rows of {recipe.length} |
| weights | bfloat16, tied embeddings |

## Training data

Problems from the generators of `tools/problems.py`, split `train`, seed {facts["seed"]}: word problems (`arithmetic`),
list transformations (`text`) and small Python functions (`code`). The wording of the solutions
(connectives, verbs, variable names) is drawn uniformly at random, so the model is undecided at those words by
design; numbers, names, list items and program semantics follow from the prompt. No collected text was used.

## Training

| | |
| --- | --- |
| tokens seen | {facts["tokens"] / 1e6:.1f} million |
| steps | {facts["steps"]:,} of {recipe.batch} rows of {recipe.length} tokens |
| rounds (arithmetic:text:code) | {plan} |
| optimizer | {optimizer} |
| schedule | each round: warm-up, plateau, linear decay to zero over its last 75 % |
| loss | cross-entropy on solutions; freely chosen words at weight {_FREE_WEIGHT:g}, prompts at {_PROMPT_WEIGHT:g} |
| precision | float32 weights, bfloat16 autocast |
| wall time | {facts["minutes"]:g} minutes on a CPU |
| seed | {facts["seed"]} |

From a checkout of `fly`, `python -m tools.train {name}` runs this recipe.{" " + note if note else ""}

## Accuracy

Greedy decoding, {n} problems per cell, `python -m tools.train evaluate {name}`. An arithmetic or
text problem counts if the final answer line is exactly right; a code problem if the program passes its tests.

| kind | held out (in domain) | out of domain |
| --- | --- | --- |
{rows}

Held-out problems share templates with the training data but no content. Out-of-domain problems use names, words
and templates that never occur in training, and longer chains of operations.

## Use and limits

Use the chat template with the instruction forms of `tools/problems.py`. The model knows nothing else: any other
request gives text that only looks like a solution. It handles integers below 100, short lists of common words, and
functions that filter one list or compute one number. Never run generated code outside a sandbox.
"""


# ---------------------------------------------------------------------------------------------------------
# Command line


def _report(name: str, scores: dict[str, dict[str, float]], n: int) -> None:
    table = Table("split", *KINDS, title=f"{name}: greedy accuracy, n={n} per kind")
    for split, by_kind in scores.items():
        table.add_row(split, *(f"{by_kind[kind]:.1%}" for kind in KINDS))
    console.print(table)


def _chosen(name: str) -> list[str]:
    if name == "all":
        return list(RECIPES)
    if name not in RECIPES:
        raise typer.BadParameter(f"unknown checkpoint {name!r}; choose one of {', '.join(RECIPES)} or all")
    return [name]


def _train_one(name: str, out: Path, seed: int, steps: int | None, resume: bool, compiled: bool, n: int) -> None:
    recipe = RECIPES[name] if steps is None else replace(RECIPES[name], rounds=(Round(steps),))
    directory = out / name
    tokenizer = _load_or_build_tokenizer(directory, seed)
    facts = train(recipe, tokenizer, seed, directory, compiled, resume)
    # Evaluate what was saved, with the precision it was saved in.
    model = load_model(directory, dtype=torch.float32)
    scores, _ = evaluate(model, tokenizer, n)
    _report(name, scores, n)
    parameters = sum(p.numel() for p in model.parameters())
    card = _card(name, recipe, {**facts, "parameters": parameters}, scores, n)
    (directory / "README.md").write_text(card, encoding="utf-8")


_Out = Annotated[Path, typer.Option(help="Folder that holds the checkpoint folders.")]
_Seed = Annotated[int, typer.Option(help="Seed of the data, its order and the initial weights.")]
_Steps = Annotated[int | None, typer.Option(min=1, help="Steps of a single round in place of the recipe's rounds.")]
_Resume = Annotated[bool, typer.Option("--resume", help="Go on after the rounds that training.json counts.")]
_Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
_Compile = Annotated[bool, typer.Option("--compile", help="Compile the model (faster; needs a C++ compiler).")]
_Count = Annotated[int, typer.Option(min=1, help="Problems per kind and split in the evaluation.")]


@app.command("tokenizer")
def tokenizer_command(out: _Out = CHECKPOINTS, seed: _Seed = 0) -> None:
    """Train the shared tokenizer and write it to every checkpoint folder."""
    tokenizer = build_tokenizer(seed)
    for name in RECIPES:
        save_tokenizer(tokenizer, out / name)
    console.print(f"vocabulary of {tokenizer.get_vocab_size()} tokens written below {out}")


@app.command("evaluate")
def evaluate_command(
    name: Annotated[str, typer.Argument(help="A checkpoint name, or all.")],
    out: _Out = CHECKPOINTS,
    n: _Count = 100,
    threads: _Threads = 2,
) -> None:
    """Print the greedy accuracy of trained checkpoints."""
    torch.set_num_threads(threads)
    for chosen in _chosen(name):
        directory = out / chosen
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        scores, _ = evaluate(load_model(directory, dtype=torch.float32), tokenizer, n)
        _report(chosen, scores, n)


def _add_train_command(name: str, purpose: str) -> None:
    @app.command(name, help=f"Train {purpose}; evaluate it and write its card.")
    def command(
        out: _Out = CHECKPOINTS,
        seed: _Seed = 0,
        steps: _Steps = None,
        resume: _Resume = False,
        threads: _Threads = 2,
        compiled: _Compile = False,
        n: _Count = 100,
    ) -> None:
        torch.set_num_threads(threads)
        for chosen in _chosen(name):
            _train_one(chosen, out, seed, steps, resume, compiled, n)


for _name, _recipe in RECIPES.items():
    _add_train_command(_name, _recipe.purpose)
_add_train_command("all", "all three checkpoints")


if __name__ == "__main__":
    app()
