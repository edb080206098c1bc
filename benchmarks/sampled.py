"""Rules above temperature 0, on the same recorded blocks: ``python -m benchmarks.sampled``.

``fly replay`` walks through recorded texts of temperature 0, where a draft is known wherever it begins. Above it drafts
are drawn, so every block is judged where it was recorded: at a place that exact speculation reached. Coins and the
tokens that a rule might have emitted are summed over, not drawn. Drafts of a truncated target (top-p, min-p) are
truncated too; the recorded ones are weighted by truncated/recorded probability, which is at most 1 / the mass kept.

Costs are by emitted token, in the distribution of the temperature before truncation: the total variation between what
is emitted and the target, and the surprise, the mean of -ln target(emitted token) less the target's own mean (its
entropy). Truncation lowers the surprise, relaxed rules raise it.

Shape legend: N blocks, R rows (a block for each drawn set of coins), n some places, K longest draft, J = K + 1 places,
U reduced vocabulary. That of a place is ``CONTROL`` (all control tokens), ``OTHER``, and the likeliest tokens of both
models; it differs from place to place, so rules that read texts or histories cannot be tried here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fly.cli.options import DraftLength, Rules, number
from fly.cli.run import alone, rules_of
from fly.cli.show import console, print_list, progress
from fly.drafts import SingleDraft
from fly.extras.eval.replay import Accounts
from fly.extras.eval.report import Costs
from fly.extras.eval.task import load_task
from fly.extras.statistics import Estimate, bootstrap_ratio
from fly.llm import LLM
from fly.ops import pick
from fly.policies import AcceptancePolicy, Block, Exact
from fly.runner.executor import Wrapped
from fly.runner.sampling import BatchSampling
from fly.types import Decision, Draft, SamplingParams, Target

CONTROL, OTHER, LIKELIEST = 0, 1, 126  # ids of the reduced vocabulary, and how many tokens of its own it has
_TINY = 1e-30


@dataclass(frozen=True)
class Sampled:
    """Blocks of exact speculation above temperature 0, with both models' distributions at every place."""

    temperature: float
    problem: Tensor  # [N] int64, the number of the problem
    start: Tensor  # [N] int64, tokens of the answer before the block
    length: Tensor  # [N] int64
    token: Tensor  # [N, K] int64, ids of the reduced vocabulary
    target: Tensor  # [N, J, U] probabilities at the temperature
    draft: Tensor  # [N, K, U]


class Recorder(Wrapped):
    """An executor around the target's. It keeps the distributions of each block, reduced to the likeliest tokens."""

    def __init__(self, inner: Any, control_V: Tensor) -> None:
        super().__init__(inner)
        self.batch_invariant = inner.batch_invariant
        self.control_V, self.blocks = control_V, list[tuple[int, list[int], Tensor, Tensor]]()

    def decide_group(
        self, policy: AcceptancePolicy, target: Target, draft: Draft, seeds: Sequence[int], starts: Sequence[int]
    ) -> list[Decision]:
        decisions = self.inner.decide_group(policy, target, draft, seeds, starts)
        (decision,), (start,) = decisions, starts
        if (n := len(decision.drafted)) and draft.probs_BKV is not None:
            target_JV, draft_JV = target.probs_BKV[0, : n + 1], torch.zeros_like(target.probs_BKV[0, : n + 1])
            draft_JV[:n] = draft.probs_BKV[0, :n]
            drafted_J1 = torch.tensor([*decision.drafted, -1]).unsqueeze(1)
            # The likeliest tokens of either model, the drafted one among them; control tokens have their own id.
            score_JV = target_JV.maximum(draft_JV)
            score_JV.scatter_(1, drafted_J1[:-1], 2.0)
            score_JV[:, self.control_V] = -1.0
            ids_Jn = score_JV.topk(LIKELIEST, -1).indices
            target_JU, draft_JU = (_reduced(probs_JV, ids_Jn, self.control_V) for probs_JV in (target_JV, draft_JV))
            found_Jn = ids_Jn == drafted_J1
            token_J = torch.where(found_Jn.any(-1), found_Jn.long().argmax(-1) + 2, CONTROL)
            self.blocks.append((start, token_J[:n].tolist(), target_JU, draft_JU[:n]))
        return decisions


def _reduced(probs_JV: Tensor, ids_Jn: Tensor, control_V: Tensor) -> Tensor:
    known_Jn, control_J1 = probs_JV.gather(1, ids_Jn), probs_JV[:, control_V].sum(-1, keepdim=True)
    other_J1 = (1 - control_J1 - known_Jn.sum(-1, keepdim=True)).clamp_min(0)
    return torch.cat([control_J1, other_J1, known_Jn], 1)


def record(
    llm: LLM, prompts: Sequence[list[int]], k: int, temperature: float, max_tokens: int, advance: Any = lambda: None
) -> Sampled:
    """Decode each prompt by exact speculation, and return the blocks. The draft must be a model that never stops by
    itself. Blocks that ``max_tokens`` shortens are left out."""
    runner = llm.engine.runner
    inner, found = runner.executor, list[tuple[int, int, int, list[int], Tensor, Tensor]]()
    for problem, prompt in enumerate(prompts):
        runner.executor = recorder = Recorder(inner, runner.control_V.cpu())
        try:
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=problem)
            llm.generate(prompt, params, policy="exact", k=k, progress=False)
        finally:
            runner.executor = inner
        for start, tokens, target_JU, draft_KU in recorder.blocks:
            if len(tokens) == k:  # nothing follows an end token
                length = tokens.index(CONTROL) + 1 if CONTROL in tokens else k
                found.append((problem, start - len(prompt), length, tokens, target_JU, draft_KU))
        advance()
    problems, starts, lengths, tokens_, targets, drafts = zip(*found)
    columns = (torch.tensor(column) for column in (problems, starts, lengths, tokens_))
    return Sampled(temperature, *columns, torch.stack(targets), torch.stack(drafts))


class Outcome(NamedTuple):
    """What a rule does with each block, in expectation over coins: float [N] each, sums over the block."""

    emitted: Tensor  # tokens
    drafted: Tensor  # tokens
    tv: Tensor  # total variation of the emitted tokens
    surprise: Tensor  # nats


def outcome(
    blocks: Sampled,
    policy: AcceptancePolicy,
    reach: float = 0.0,
    copies: int = 16,
    costs: tuple[Tensor, Tensor] | None = None,
) -> Outcome:
    """What ``policy`` does, with drafts that stop at ``reach`` (as in ``SingleDraft``). Rules that excuse mismatches
    take ``copies`` sets of coins, since what they excuse depends on the tokens that follow; others are exact sums, with
    ``place_costs`` at every ``reach``."""
    length_N = _stops(blocks, blocks.draft, reach)
    if policy.relaxation is not None:
        return _by_coins(blocks, policy, length_N, copies)
    tv_NK, surprise_NK = place_costs(blocks, policy) if costs is None else costs
    chance_NK = policy.chances(*_pair(blocks.temperature, blocks.target, blocks.draft, blocks.token, length_N))
    visited_NJ = _visited(chance_NK, length_N)
    drafted_NK = visited_NJ[:, :-1] * (torch.arange(tv_NK.shape[1]) < length_N.unsqueeze(1))
    sums = ((drafted_NK * cost_NK).sum(1) for cost_NK in (tv_NK, surprise_NK))
    return Outcome(visited_NJ.sum(1), length_N.float(), *sums)


def truncated(blocks: Sampled, reach: float = 0.0, top_p: float = 1.0, min_p: float = 0.0) -> Outcome:
    """What exact speculation does if target and draft are truncated: the baseline of every relaxed rule."""
    cut = BatchSampling.of([SamplingParams(temperature=1.0, top_p=top_p, min_p=min_p)])
    target_NJU, draft_NKU = (cut_all(cut, probs) for probs in (blocks.target, blocks.draft))
    length_N, token_NK = _stops(blocks, draft_NKU, reach), blocks.token
    # A recorded draft stands for the truncated ones by the quotient of their probabilities.
    own_NK = pick(blocks.draft, token_NK).clamp_min(_TINY)
    kept_NK = pick(draft_NKU, token_NK).minimum(pick(target_NJU[:, :-1], token_NK)) / own_NK
    drafted_NJ = _visited(pick(draft_NKU, token_NK) / own_NK, length_N)
    visited_NJ = _visited(kept_NK, length_N)
    moved_NJU = target_NJU - blocks.target
    tv_NJ, surprise_NJ = moved_NJU.abs().sum(-1) / 2, (moved_NJU * -blocks.target.clamp_min(_TINY).log()).sum(-1)
    places_J = torch.arange(drafted_NJ.shape[1])
    drafted_N = (drafted_NJ * (places_J < length_N.unsqueeze(1))).sum(1)
    return Outcome(visited_NJ.sum(1), drafted_N, (visited_NJ * tv_NJ).sum(1), (visited_NJ * surprise_NJ).sum(1))


def cut_all(cut: BatchSampling, probs_NJU: Tensor) -> Tensor:
    """Truncate distributions of any shape."""
    flat = probs_NJU.clamp_min(_TINY).log().flatten(0, 1).unsqueeze(0)
    return cut.probs(flat).view_as(probs_NJU)


def _stops(blocks: Sampled, draft_NKU: Tensor, reach: float) -> Tensor:
    """Return the length of each draft, [N], if drafting stops after the first token at which the product of the largest
    probabilities is below ``reach``."""
    before_NK = torch.nn.functional.pad(draft_NKU.amax(-1).cumprod(-1), (1, -1), value=1.0)
    return (before_NK >= reach).long().cumprod(-1).sum(-1).minimum(blocks.length)


def _visited(kept_NK: Tensor, length_N: Tensor) -> Tensor:
    """The chance [N, J] that a token is emitted at each place: that all drafted tokens before it are kept."""
    reached_NJ = torch.nn.functional.pad(kept_NK.cumprod(-1), (1, 0), value=1.0)
    return reached_NJ * (torch.arange(reached_NJ.shape[1]) <= length_N.unsqueeze(1))


def _pair(
    heat: float, target_NJU: Tensor, draft_NKU: Tensor, token_NK: Tensor, length_N: Tensor, **state: Any
) -> tuple[Target, Draft]:
    """The blocks as rules see them. Raw logits follow from the distribution of the temperature ``heat``."""
    control_U = torch.arange(target_NJU.shape[-1]) == CONTROL
    logits_NJU = heat * target_NJU.clamp_min(_TINY).log()
    return Target(logits_NJU, target_NJU, control_V=control_U, **state), Draft(token_NK, length_N, draft_NKU)


def place_costs(blocks: Sampled, policy: AcceptancePolicy) -> tuple[Tensor, Tensor]:
    """The total variation and the surprise [N, K] of the token that a rule emits at each place, if it judges tokens
    alone: sums over the tokens that might have been drafted there."""
    tv_NK, surprise_NK = torch.zeros(blocks.token.shape), torch.zeros(blocks.token.shape)
    chance_NK = policy.chances(*_pair(blocks.temperature, blocks.target, blocks.draft, blocks.token, blocks.length))
    reached_NK = _visited(chance_NK, blocks.length)[:, :-1] * (
        torch.arange(tv_NK.shape[1]) < blocks.length.unsqueeze(1)
    )
    for part_n2 in (reached_NK > 1e-6).nonzero().split(128):
        at = part_n2.unbind(1)  # rows and places
        target_nU, draft_nU, token_n1 = blocks.target[at], blocks.draft[at], blocks.token[at].unsqueeze(1)
        n, size = target_nU.shape
        # One place for each token of the vocabulary: the same distributions, another drafted token.
        tokens_nU, sizes_n = torch.arange(size).expand(n, -1), torch.full((n,), size)
        every = target_nU.unsqueeze(1).expand(-1, size + 1, -1), draft_nU.unsqueeze(1).expand(-1, size, -1)
        keep_nU = policy.chances(*_pair(blocks.temperature, *every, tokens_nU, sizes_n)).masked_fill(draft_nU <= 0, 0.0)
        ones_n = torch.ones(n, dtype=torch.int64)
        pair = _pair(blocks.temperature, every[0][:, :2], every[1][:, :1], token_n1, ones_n)
        rest_nU = policy.correction(*pair, ones_n - 1)
        mass_n1 = rest_nU.sum(-1, keepdim=True)
        rest_nU = torch.where(mass_n1 > 0, rest_nU / mass_n1.clamp_min(_TINY), target_nU)
        kept_nU = draft_nU * keep_nU
        moved_nU = kept_nU + (draft_nU - kept_nU).sum(-1, keepdim=True) * rest_nU - target_nU
        tv_NK[at] = moved_nU.abs().sum(-1) / 2
        surprise_NK[at] = (moved_nU * -target_nU.clamp_min(_TINY).log()).sum(-1)
    return tv_NK, surprise_NK


def _by_coins(blocks: Sampled, policy: AcceptancePolicy, length_N: Tensor, copies: int) -> Outcome:
    """The outcome of a rule that excuses mismatches. A relaxed token x replaces a draw from the exact residual, so it
    moves its whole probability, and costs -ln target(x) less the residual's mean."""
    coins = torch.rand(copies, *blocks.token.shape, generator=torch.Generator().manual_seed(0))
    residual_NKU = (blocks.target[:, :-1] - blocks.draft).clamp_min(0)
    nats_NKU = -blocks.target[:, :-1].clamp_min(_TINY).log()
    mean_NK = (residual_NKU * nats_NKU).sum(-1) / residual_NKU.sum(-1).clamp_min(_TINY)
    extra_NK = pick(nats_NKU, blocks.token) - mean_NK
    sums = [torch.zeros(len(blocks.token)) for _ in range(3)]
    problems = int(blocks.problem.max()) + 1
    accounts = Accounts(copies * problems)
    number_N = torch.tensor([int((blocks.problem[:n] == problem).sum()) for n, problem in enumerate(blocks.problem)])
    for turn in range(int(number_N.max()) + 1):  # the next block of every problem, with what its text has spent
        at = (number_N == turn).nonzero().flatten()
        n, each = len(at), at.repeat(copies)
        account_R = (problems * torch.arange(copies).unsqueeze(1) + blocks.problem[at]).flatten()
        target, draft = _pair(
            *(blocks.temperature, blocks.target[each], blocks.draft[each], blocks.token[each], length_N[each]),
            generated_B=blocks.start[each],
            **accounts.columns(account_R),
        )
        mask_RK = draft.mask_BK()
        agree_RK = (coins[:, at].flatten(0, 1) < policy.chances(target, draft)) & mask_RK
        stands_RK = agree_RK | (policy.excused(Block(target, draft, agree_RK)) & mask_RK)
        kept_RK = stands_RK.long().cumprod(-1).bool()
        loose_RK = kept_RK & ~agree_RK
        parts = (kept_RK.sum(1) + 1.0, loose_RK.sum(1).float(), (loose_RK * extra_NK[each]).sum(1))
        for total, part in zip(sums, parts):
            total[at] = part.view(copies, n).mean(0)
        # What the relaxed tokens spent.
        costs = {}
        for budget in () if policy.relaxation is None else policy.relaxation.budgets:
            costs[budget.label] = torch.zeros(loose_RK.shape)
            costs[budget.label][loose_RK] = budget.cost(target, draft, *loose_RK.nonzero().unbind(1)).float()
        accounts.charge(account_R, loose_RK, pick(nats_NKU[each], blocks.token[each]), costs)
    return Outcome(sums[0], length_N.float(), *sums[1:])


def save(path: Path, tasks: dict[str, Sampled]) -> None:
    """Write the blocks of each task into one file."""
    (heat,) = {blocks.temperature for blocks in tasks.values()}
    columns = {
        f"{task}.{each.name}": getattr(blocks, each.name).contiguous()
        for task, blocks in tasks.items()
        for each in fields(Sampled)[1:]
    }
    save_file(columns, path, {"about": json.dumps({"temperature": heat, "tasks": list(tasks)})})


def load(path: Path) -> dict[str, Sampled]:
    """Read a file that ``save`` wrote."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
        return {
            task: Sampled(
                about["temperature"], *(file.get_tensor(f"{task}.{each.name}") for each in fields(Sampled)[1:])
            )
            for task in about["tasks"]
        }


class Line(NamedTuple):
    """A rule at the stop at which it is fastest."""

    name: str
    reach: float
    tau: Estimate
    speed: Estimate
    tv: float  # total variation per emitted token
    surprise: float  # nats per thousand emitted tokens


def line(name: str, blocks: Sampled, found: dict[float, Outcome], costs: Costs) -> Line:
    """The best of a rule's stops, by speed over autoregression: emitted tokens over the time of drafting and
    verifying, where the cost of a verification grows in proportion to the drafted tokens."""

    def sums(column: Tensor) -> list[float]:
        return torch.zeros(int(blocks.problem.max()) + 1).index_add(0, blocks.problem, column).tolist()

    def figures(each: Outcome) -> tuple[Estimate, Estimate]:
        rounds, more = torch.ones_like(each.emitted), costs.c + (costs.v - 1) / blocks.token.shape[1]
        emitted = sums(each.emitted)
        return (
            bootstrap_ratio([emitted], [sums(rounds)]),
            bootstrap_ratio([emitted], [sums(rounds + more * each.drafted)]),
        )

    reach, (tau, speed) = max(((r, figures(each)) for r, each in found.items()), key=lambda item: item[1][1].value)
    best = found[reach]
    tokens = float(best.emitted.sum())
    return Line(name, reach, tau, speed, float(best.tv.sum()) / tokens, 1000 * float(best.surprise.sum()) / tokens)


@alone
def main(
    blocks: Annotated[Path, typer.Argument(help="The file of blocks; it is recorded if it does not exist.")],
    policy: Rules = None,
    top_p: Annotated[list[float] | None, typer.Option(min=0.01, max=1, help="Truncation; repeatable.")] = None,
    min_p: Annotated[list[float] | None, typer.Option(min=0, max=1, help="Truncation; repeatable.")] = None,
    reach: Annotated[list[float] | None, typer.Option(min=0, max=1, help="Where drafts stop; repeatable.")] = None,
    c: Annotated[float, typer.Option("--draft-cost", min=0, help="Cost of a drafted token in target forwards.")] = 0.1,
    v: Annotated[float, typer.Option("--verify-cost", min=1, help="Cost of verifying the longest draft.")] = 1.1,
    model: Annotated[str, typer.Option(help="The target.")] = "fly-target",
    draft: Annotated[str, typer.Option(help="The draft model.")] = "fly-draft",
    task: Annotated[list[str] | None, typer.Option(help="A task, as for 'fly eval'; repeatable.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Problems of each task.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=2, help="The most tokens of an answer.")] = 200,
    temperature: Annotated[float, number(0.01, help="Temperature.")] = 0.7,
    k: DraftLength = 15,
    kernels: Annotated[str, typer.Option(help="As for fly generate.")] = "auto",
) -> None:
    """Rules above temperature 0 beside a truncated target, on the same blocks: speed, total variation, surprise."""
    rules = [rule for rule in rules_of(policy) if str(rule) != "exact"]
    if not blocks.exists():
        tasks = [load_task(text) for text in task or ["bundled-middle"]]
        llm, found = LLM(model, draft=SingleDraft(draft), kernels=kernels), dict[str, Sampled]()
        with progress(len(tasks) * problems, "recording") as advance:
            for each in tasks:
                prompts = [each.prompt_ids(llm, problem) for problem in each.problems[:problems]]
                found[each.name] = record(llm, prompts, k, temperature, max_tokens, advance)
        save(blocks, found)
    for name, known in load(blocks).items():
        stops, lines = reach or [0.0], list[Line]()

        def add(label: str, found: Callable[[float], Outcome]) -> None:
            lines.append(line(label, known, {r: found(r) for r in stops}, Costs(c, v)))  # noqa: B023
            advance()

        with progress(1 + len(rules) + len(top_p or ()) + len(min_p or ()), name) as advance:
            for p in top_p or ():
                add(f"exact, top-p {p:g}", lambda r, p=p: truncated(known, r, top_p=p))  # type: ignore[misc]  # noqa: B023
            for p in min_p or ():
                add(f"exact, min-p {p:g}", lambda r, p=p: truncated(known, r, min_p=p))  # type: ignore[misc]  # noqa: B023
            for rule in (Exact(), *rules):
                costs = place_costs(known, rule) if rule.relaxation is None else None
                add(str(rule), lambda r, rule=rule, costs=costs: outcome(known, rule, r, costs=costs))  # type: ignore[misc]  # noqa: B023
        texts = int(known.problem.max()) + 1
        print_list(
            [
                (
                    *(each.name, f"{each.reach:g}", _interval(each.tau), _interval(each.speed, "×")),
                    *(f"{each.tv:.2%}", f"{each.surprise:+.1f}"),
                )
                for each in lines
            ],
            *("rule", "reach", "τ", "speed", "TV", "surprise"),
            title=f"{name}, temperature {known.temperature:g}: {texts} texts, {len(known.token)} blocks",
        )
    console.print(
        "[dim]speed: over autoregression at these costs, at the reach where it is best; TV: total variation from the "
        "target at this temperature, by emitted token; surprise: -ln target(token) above the target's own mean, in "
        "nats per thousand tokens[/]"
    )


def _interval(figure: Estimate, unit: str = "") -> str:
    return f"{figure.value:.2f}{unit} ({figure.low:.2f}–{figure.high:.2f})"


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
