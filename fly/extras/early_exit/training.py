"""Train the predictors of early exits on a target's own answers (SpecEE, arXiv 2504.08850).

A look is a point after some layer where a predictor decides whether the target exits.

Shape legend: L looks, N positions of an answer, M positions in all, E candidates, F features, C hidden width, U tokens
among which candidates are sought, V vocabulary.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.extras.early_exit.predictors import ExitConfig, Exits, save_exits
from fly.extras.train.answers import Answer
from fly.extras.train.head import frequent_tokens
from fly.models import Llama
from fly.runner.executor import Batch, Executor

__all__ = ["ExitPlan", "Look", "exit_card", "looks_of", "train_exits"]

_NEVER = 2.0  # a threshold that no probability reaches
_FEW = 20  # with fewer positions than this, a share is too uncertain


@dataclass(frozen=True)
class ExitPlan:
    """Settings of a training.

    Attributes:
        layers: numbers of layers after which predictors look; None takes about eight, from a third of the depth on.
        candidates: how many of the most likely tokens are candidates.
        vocabulary: number of frequent tokens among which candidates are sought.
        width: hidden width of a predictor.
        agreement: of the held-out positions that exit at a look, at least this share must have the token that the whole
            target chooses. This sets the threshold.
        places: no more answers are read after this many positions.
        held_out: one answer in this many is kept out of the training, to set the thresholds.
    """

    layers: tuple[int, ...] | None = None
    candidates: int = 4
    vocabulary: int = 4096
    width: int = 64
    agreement: float = 0.98
    places: int = 40_000
    steps: int = 1500
    batch: int = 512
    learning_rate: float = 2e-3
    held_out: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Look:
    """The result of a look on held-out answers.

    Attributes:
        settled: the share of all positions whose token no further layer would change.
        leave: the share of positions that exit here, among those that have not exited before.
        agree: among the positions that exit here, the share whose token is the one that the whole target chooses; None
            if no position exits.
    """

    layer: int
    threshold: float
    settled: float
    leave: float
    agree: float | None


def looks_of(layers: int) -> tuple[int, ...]:
    """Return the default numbers of layers after which predictors look."""
    return tuple(range(max(1, layers // 3), layers, max(1, round(layers * 2 / 3 / 8))))


def train_exits(
    executor: Executor,
    answers: abc.Sequence[Answer],
    plan: ExitPlan,
    directory: Path,
    advance: Callable[[int], None] = lambda places: None,
) -> tuple[Exits, list[Look], float]:
    """Train early exits for the target that ``executor`` runs, on the target's ``answers``, and write them to
    ``directory``. Returns the predictors, the result of each look, and the mean share of layers that held-out positions
    use.

    ``advance`` is called with the number of positions just read, about ``plan.places`` in all.

    Raises ``ValueError`` if ``executor`` does not run a Llama on PyTorch, for layers that do not exist, and for too few
    answers.
    """
    if not isinstance(executor, TorchExecutor) or not isinstance(executor.model, Llama):
        raise ValueError(f"exits are trained on PyTorch's kernels, kernels='torch', not {executor.kernels!r}")
    target = executor.config
    answered = [answer for answer in answers if answer.answer]
    size = min(max(plan.vocabulary, plan.candidates), target.vocab_size)
    layers = looks_of(target.num_hidden_layers) if plan.layers is None else plan.layers
    config = ExitConfig(
        hidden_size=target.hidden_size,
        num_hidden_layers=target.num_hidden_layers,
        vocab_size=target.vocab_size,
        layers=layers,
        candidates=plan.candidates,
        looked_through=size,
        width=plan.width,
        thresholds=(_NEVER,) * len(layers),
    )
    torch.manual_seed(plan.seed)
    exits = Exits(config)
    exits.ids_U.copy_(frequent_tokens(answered, size, target.vocab_size))
    exits.to(executor.device)
    # Features and labels, by whether held out.
    examples: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}
    places_left = plan.places
    for number, answer in enumerate(answered):
        if places_left <= 0:
            break
        features_LNF, settled_LN = _seen(executor, exits, answer)
        examples[number % plan.held_out == 0].append((features_LNF.cpu(), settled_LN.cpu()))
        places_left -= settled_LN.shape[1]
        advance(settled_LN.shape[1])
    if not all(examples.values()):
        raise ValueError(f"{len(answered)} answers are too few to train on, and to try it on others")
    tests, lessons = (tuple(torch.cat(parts, 1) for parts in zip(*examples[held_out])) for held_out in (True, False))
    exits.cpu()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small are slower on several threads
    try:
        _learn(exits, lessons[0], lessons[1], plan)
    finally:
        torch.set_num_threads(threads)
    looks, passed = _calibrate(exits, tests[0], tests[1], plan)
    exits.config = config.model_copy(update={"thresholds": tuple(look.threshold for look in looks)})
    save_exits(exits, directory)
    return exits.eval().requires_grad_(False), looks, passed


@torch.no_grad()
def _seen(executor: TorchExecutor, exits: Exits, one: Answer) -> tuple[Tensor, Tensor]:
    """Compute the features [L, N, F] of each look at the positions of an answer, and [L, N] whether the token is
    settled: whether the most likely token at this look is the one that the whole target chooses, and a candidate."""
    model, layers = executor.model, exits.config.layers
    assert isinstance(model, Llama)
    row = [*one.prompt, *one.answer][: executor.config.max_position_embeddings]
    places = list(range(len(one.prompt) - 1, len(row) - 1))
    cache = PagedKVCache.for_model(executor, len(row))
    cache.resize(0, len(row))
    scores = executor.score(Batch.of([row], cache.batch([0], [0], [len(row)])), places, layers)
    assert scores.states_TF is not None
    choice_N = scores.logits_NV.argmax(-1)
    states_NLC = scores.states_TF[places].unflatten(-1, (len(layers), -1))
    features, settled = [], []
    earlier_NU = None
    for look in range(len(layers)):
        logits_NV = model.logits(model.norm(states_NLC[:, look]))
        logits_NU = logits_NV[:, exits.ids_U]
        logits_NE, at_NE = logits_NU.topk(exits.config.candidates, -1)
        features.append(exits.features(logits_NE, None if earlier_NU is None else earlier_NU.gather(1, at_NE)))
        best_N, earlier_NU = logits_NV.argmax(-1), logits_NU
        settled.append((best_N == choice_N) & (exits.ids_U[at_NE] == best_N.unsqueeze(1)).any(-1))
    return torch.stack(features), torch.stack(settled)


def _learn(exits: Exits, features_LMF: Tensor, settled_LM: Tensor, plan: ExitPlan) -> None:
    exits.mean_LF.copy_(features_LMF.mean(1))
    exits.scale_LF.copy_(features_LMF.std(1).clamp_min(1e-3))
    optimiser = torch.optim.AdamW(exits.parameters(), plan.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, plan.steps)
    generator = torch.Generator().manual_seed(plan.seed)
    for _ in range(plan.steps):
        drawn = torch.randint(settled_LM.shape[1], (plan.batch,), generator=generator)
        losses = [
            F.binary_cross_entropy(exits.chance(look, features_MF[drawn]), settled_M[drawn].float())
            for look, (features_MF, settled_M) in enumerate(zip(features_LMF, settled_LM))
        ]
        optimiser.zero_grad()
        torch.stack(losses).sum().backward()
        optimiser.step()
        schedule.step()


@torch.no_grad()
def _calibrate(exits: Exits, features_LMF: Tensor, settled_LM: Tensor, plan: ExitPlan) -> tuple[list[Look], float]:
    """Find the thresholds, one look after the other: each is the lowest at which the positions that exit agree often
    enough with the whole target. Return the results of the looks, and the mean share of layers used."""
    count = settled_LM.shape[1]
    going_M = torch.ones(count, dtype=torch.bool)
    looks, passed = [], 0.0
    for look, layer in enumerate(exits.config.layers):
        chance_M = exits.chance(look, features_LMF[look])
        order = chance_M.masked_fill(~going_M, -1.0).argsort(descending=True)[: int(going_M.sum())]
        right = settled_LM[look][order].float().cumsum(0) / torch.arange(1, len(order) + 1)
        enough = ((right >= plan.agreement) & (torch.arange(1, len(order) + 1) >= _FEW)).nonzero()
        threshold = _NEVER if not len(enough) else round(float(chance_M[order[int(enough[-1])]]), 4)
        leaves_M = going_M & (chance_M >= threshold)
        leaving = int(leaves_M.sum())
        agree = float(settled_LM[look][leaves_M].float().mean()) if leaving else None
        settled = float(settled_LM[look].float().mean())
        looks.append(Look(layer, threshold, settled, leaving / max(int(going_M.sum()), 1), agree))
        passed += layer * leaving
        going_M &= ~leaves_M
    layers = exits.config.num_hidden_layers
    return looks, (passed + layers * int(going_M.sum())) / (layers * count)


def exit_card(
    name: str, target: str, data: str, exits: Exits, plan: ExitPlan, looks: abc.Sequence[Look], passed: float
) -> str:
    """Write the README.md of a directory of early exits. ``data`` is a sentence about the training data."""
    config, parameters = exits.config, sum(p.numel() for p in exits.parameters())
    rows = "\n".join(
        f"| {look.layer} | {look.settled:.1%} | {'never' if look.threshold > 1 else f'{look.threshold:g}'} | "
        f"{look.leave:.1%} | {'' if look.agree is None else f'{look.agree:.1%}'} |"
        for look in looks
    )
    return f"""# {name}

Early exits for `{target}` with {parameters:,} parameters, written by `fly train-exit`; `DIR` is this directory:

```python
import fly
from fly.extras import early_exit

llm = fly.LLM(early_exit.load("{target}", "DIR"))
```

The text is then no longer the target's own, so every acceptance rule is heuristic.

{data}
Candidates are the {config.candidates} likeliest of {config.looked_through} frequent tokens and the drafted one.
Thresholds are the lowest at which {plan.agreement:g} of the held-out positions that exit have the whole target's
choice. Held-out positions, given all tokens before them, use {passed:.1%} of the {config.num_hidden_layers} layers. The
tokens of one draft exit together, so drafts use more.

| after layers | settled | threshold | leave, of those left | of these agree |
| ---: | ---: | ---: | ---: | ---: |
{rows}
"""
