"""Compare the predictions of a replay with measured runs of the same rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fly.drafts import CascadeDraft, SingleDraft, parse_draft
from fly.drafts.stops import usual_reach
from fly.extras.eval.plan import Plan, Way
from fly.extras.eval.records import read_records
from fly.extras.eval.replay import Blocks, Replay, Unknown
from fly.extras.eval.statistics import Estimate, bootstrap_ratio
from fly.policies import Exact
from fly.types import Guarantee

__all__ = ["Prediction", "compare_with_run"]


@dataclass
class Prediction:
    """A prediction of a replay, and the measurement of a run on the same problems."""

    task: str
    way: str
    predicted: Replay
    exact: Replay  # the replay of exact speculation with the same drafts
    measured: Estimate  # tokens per round in the run
    relaxed: float  # share of relaxed tokens in the run
    problems: int

    @property
    def off(self) -> float:
        """The relative error of the predicted tokens per round."""
        return self.predicted.tau.value / self.measured.value - 1

    @property
    def unchanged(self) -> float:
        """The relative error of guessing that the rule emits as many tokens per round as exact speculation."""
        return self.exact.tau.value / self.measured.value - 1


def compare_with_run(blocks: Mapping[tuple[str, str], Blocks], run: str | Path) -> tuple[list[Prediction], list[str]]:
    """Predict the ways of a measured ``run`` whose drafts a replay can make: drafts like the recorded ones, shorter
    ones, and ones that confidence or reach stop. Each way is compared on the problems that both runs have. Also returns
    why other ways were left out.

    Raises ``ValueError`` for a folder that is no run.
    """
    run = Path(run)
    plan = Plan.of_run(run)
    ways = {way.label: way for way in plan.ways}
    sums: dict[tuple[str, str], dict[str, list[int]]] = {}
    for key, record in read_records(run).completions.items():
        if key.temperature == 0 and key.way in ways and ways[key.way].k:
            sum_ = sums.setdefault((key.task, key.way), {}).setdefault(key.problem, [0, 0, 0])
            for i, name in enumerate(("emitted", "rounds", "relaxed")):
                sum_[i] += record[name]
    found, left_out = [], []
    for (task, label), problems in sums.items():
        way = ways[label]
        fitting = [
            (known, *limits)
            for (recorded, _), known in blocks.items()
            if recorded == task and (limits := _limits(known, way)) is not None
        ]
        if not fitting:
            left_out.append(
                f"{task}, {label}: nothing was recorded of this task that was drafted so, with as many tokens"
            )
            continue
        known, k, confidence, reach = min(fitting, key=lambda each: each[0].k)
        both = sorted({each.about["problem"] for each in known.recordings} & problems.keys())
        if not both:
            left_out.append(f"{task}, {label}: other problems were recorded")
            continue
        part = known.of(both)
        emitted, rounds, relaxed = ([problems[p][i] for p in both] for i in range(3))
        try:
            predicted, exact = (part.replay(rule, k, confidence, reach) for rule in (way.policy, Exact()))
        except Unknown as error:
            left_out.append(f"{task}, {label}: {error}")
            continue
        measured = bootstrap_ratio([emitted], [rounds])
        found.append(
            Prediction(task, label, predicted, exact, measured, sum(relaxed) / max(sum(emitted), 1), len(both))
        )
    return found, left_out


def _limits(known: Blocks, way: Way) -> tuple[int, float, float] | None:
    """Return the length, confidence and reach with which a replay makes a way's drafts; None if it cannot make them."""
    about = known.recordings[0].about
    if way.k > known.k:
        return None
    ours, theirs = _drafter(about["draft"]), _drafter(way.draft)
    lossless = way.policy.guarantee is Guarantee.LOSSLESS
    if about["draft"] == way.draft and (ours is None or ours.reach is not None or lossless):
        return way.k, 0.0, 0.0
    if ours is None or theirs is None or ours.model != theirs.model or ours.k is not None:
        return None
    if ours.confidence or ours.reach != 0:
        return None
    return min(way.k, theirs.k or way.k), theirs.confidence, usual_reach(theirs.reach, way.policy)


def _drafter(text: str) -> SingleDraft | None:
    """Return the draft model, if it alone decides what is drafted; otherwise None. A lossless level below it changes no
    token."""
    try:
        strategy = parse_draft(text, trusted=True)
    except ValueError:  # the checkpoint no longer exists
        return None
    if not isinstance(strategy, SingleDraft) or type(strategy) not in (SingleDraft, CascadeDraft):
        return None
    return strategy if strategy.policy.guarantee is Guarantee.LOSSLESS else None
