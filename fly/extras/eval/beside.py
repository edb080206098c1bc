"""Compare the predictions of a replay with measured runs of the same rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fly.drafts import CascadeDraft, SingleDraft, parse_draft
from fly.drafts.stops import usual_reach
from fly.extras.eval.archive import Archive
from fly.extras.eval.plan import AUTOREGRESSIVE, WrittenWay
from fly.extras.eval.records import Key
from fly.extras.eval.replay import Blocks, Replay, Unknown
from fly.extras.statistics import Estimate, bootstrap_ratio
from fly.policies import AcceptancePolicy, Exact
from fly.types import Guarantee

__all__ = ["Comparison", "Prediction", "compare_with_run"]


@dataclass
class Prediction:
    """A prediction of a replay, and the measurement of a run on the same problems."""

    task: str
    way: str
    predicted: Replay
    exact: Replay  # the replay of exact speculation with the same drafts
    measured: Estimate  # tokens per round in the run
    relaxed: float | None  # share of relaxed tokens in the run; None if a server did not tell it
    problems: int

    @property
    def off(self) -> float:
        """The relative error of the predicted tokens per round."""
        return self.predicted.tau.value / self.measured.value - 1

    @property
    def unchanged(self) -> float:
        """The relative error of guessing that the rule emits as many tokens per round as exact speculation."""
        return self.exact.tau.value / self.measured.value - 1


@dataclass
class Comparison:
    """What ``compare_with_run`` found.

    Attributes:
        predictions: one for each way that could be compared.
        left_out: the other ways, each as task, way and reason.
        unlike: what differs between the two runs besides rules, so that predictions are off for another reason.
    """

    predictions: list[Prediction]
    left_out: list[tuple[str, str, str]]
    unlike: list[str]


def compare_with_run(
    blocks: Mapping[tuple[str, str], Blocks], recorded: str | Path, measured: str | Path
) -> Comparison:
    """Predict the ways of a ``measured`` run whose drafts a replay of ``recorded`` can make: drafts like the recorded
    ones, shorter ones, and ones that confidence or reach stop. Each way is compared on the problems that both runs
    have. ``blocks`` are those of the recorded run (``load_blocks``).

    Raises ``ValueError`` for a folder that is no run.
    """
    before, run = Archive.read(recorded), Archive.read(measured)
    ways = {way.label: way for way in run.ways}
    sums: dict[tuple[str, str], dict[str, list[float]]] = {}
    for key, record in run.records.completions.items():
        if key.temperature == 0 and key.way in ways and ways[key.way].drafts:
            sum_ = sums.setdefault((key.task, key.way), {}).setdefault(key.problem, [0, 0, 0])
            for i, name in enumerate(("emitted", "rounds", "relaxed")):
                sum_[i] += record.get(name, math.nan)  # which a server did not tell
    comparison = Comparison([], [], [*_other_settings(before, run), *_other_texts(before, run)])
    drafts: dict[tuple[str, str], list[str]] = {}
    for (task, label), problems in sums.items():
        try:
            prediction, recorded_draft = _predict(blocks, task, ways[label], run, problems)
        except ValueError as error:
            comparison.left_out.append((task, label, error.reason if isinstance(error, Unknown) else str(error)))
            continue
        comparison.predictions.append(prediction)
        measured_draft = f"{ways[label].draft}, k {ways[label].k}"
        if measured_draft != recorded_draft:
            drafts.setdefault((recorded_draft, measured_draft), []).append(f"{task}, {label}")
    for (recorded_draft, measured_draft), names in drafts.items():
        comparison.unlike.append(f"drafts: {recorded_draft} recorded, {measured_draft} measured ({'; '.join(names)})")
    return comparison


def _predict(
    blocks: Mapping[tuple[str, str], Blocks], task: str, way: WrittenWay, run: Archive, problems: dict[str, list[float]]
) -> tuple[Prediction, str]:
    """Compare a way of a measured run with the replay of its rule. ``problems`` has the tokens emitted, the rounds and
    the relaxed tokens of each problem, NaN where they are unknown. Also returns the recorded draft and its k.

    Raises ``ValueError`` (``Unknown`` if the recording lacks what the rule needs), which says why it cannot be
    compared.
    """
    of_task = [recorded_blocks for (recorded, _), recorded_blocks in blocks.items() if recorded == task]
    if not of_task:
        raise ValueError("nothing was recorded of this task")
    if any(map(math.isnan, (value for sums in problems.values() for value in sums[:2]))):
        raise ValueError("the server did not say how many drafted tokens it accepted")
    rule = run.rule(way)
    candidates = [
        (recorded_blocks, *limits)
        for recorded_blocks in of_task
        if (limits := _limits(recorded_blocks, way, rule)) is not None
    ]
    if not candidates:
        recorded = " or ".join(dict.fromkeys(map(_drafted, of_task)))
        raise ValueError(f"a replay cannot make the drafts of {way.draft}, k {way.k}, from those of {recorded}")
    recorded_blocks, k, confidence, reach = min(candidates, key=lambda each: each[0].k)
    shared = sorted({each.about["problem"] for each in recorded_blocks.recordings} & problems.keys())
    if not shared:
        raise ValueError("other problems were recorded")
    part = recorded_blocks.of(shared)
    emitted, rounds, relaxed = ([problems[p][i] for p in shared] for i in range(3))
    predicted, exact = (part.replay(each, k, confidence, reach) for each in (rule, Exact()))
    share = None if any(map(math.isnan, relaxed)) else sum(relaxed) / max(sum(emitted), 1)
    measured = bootstrap_ratio([emitted], [rounds])
    return Prediction(task, way.label, predicted, exact, measured, share, len(shared)), _drafted(recorded_blocks)


def _drafted(known: Blocks) -> str:
    about = known.recordings[0].about
    return f"{about['draft']}, k {about['k']}"


def _other_settings(recorded: Archive, measured: Archive) -> list[str]:
    """Return the settings that change texts or lengths at temperature 0, and that differ between two runs."""
    names = ("model", "max_tokens", "dtype", "device", "kernels", "deterministic")
    values = [(name, getattr(recorded.plan, name), getattr(measured.plan, name)) for name in names]
    lines = [f"{name}: {before!r} recorded, {now!r} measured" for name, before, now in values if before != now]
    if measured.plan.server is not None:
        lines.append("tokens per round: all rounds recorded, those with a draft measured, since a server counts these")
    if 0.0 not in measured.plan.temperatures:  # nothing else is recorded
        lines.append(f"temperature: 0 recorded, {', '.join(map(str, measured.plan.temperatures))} measured")
    return lines


def _other_texts(recorded: Archive, measured: Archive) -> list[str]:
    """Compare what the target alone wrote in two runs, for the problems of both. Two runs that are alike in all but
    their rules and drafts have the same texts."""
    before, now = ({k: r for k, r in run.records.completions.items() if _alone(k)} for run in (recorded, measured))
    lines = []
    for task in dict.fromkeys(key.task for key in before):
        keys = [key for key in before if key.task == task and "token_ids" in now.get(key, ())]
        pairs = [(before[key]["token_ids"], now[key]["token_ids"]) for key in keys]
        unlike = sum(a[: len(b)] != b[: len(a)] for a, b in pairs)
        if unlike:
            lines.append(f"{task}: the target alone wrote other texts for {unlike} of the {len(pairs)} prompts of both")
        elif sum(len(a) for a, _ in pairs) != sum(len(b) for _, b in pairs):
            tokens = " recorded, ".join(str(sum(map(len, texts))) for texts in zip(*pairs))
            lines.append(f"{task}: tokens of the target alone for the {len(pairs)} prompts of both: {tokens} measured")
    return lines


def _alone(key: Key) -> bool:
    return key.way == AUTOREGRESSIVE and key.temperature == 0


def _limits(known: Blocks, way: WrittenWay, rule: AcceptancePolicy) -> tuple[int, float, float] | None:
    """Return the length, confidence and reach with which a replay makes a way's drafts; None if it cannot make them."""
    about = known.recordings[0].about
    if way.k is None or way.k > about["k"]:
        return None
    recorded_drafter, drafter = _drafter(about["draft"]), _drafter(way.draft)
    lossless = rule.guarantee is Guarantee.LOSSLESS
    if about["draft"] == way.draft and (recorded_drafter is None or recorded_drafter.reach is not None or lossless):
        return min(way.k, known.k), 0.0, 0.0
    if (
        recorded_drafter is None
        or drafter is None
        or recorded_drafter.model != drafter.model
        or recorded_drafter.k is not None
    ):
        return None
    if recorded_drafter.confidence or recorded_drafter.reach != 0:
        return None
    return min(way.k, known.k, drafter.k or way.k), drafter.confidence, usual_reach(drafter.reach, rule)


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
