"""Predict the gains of rules with large models, from the acceptance in a recorded run of other models.

No model is run: the costs of a forward come from the cost model in ``fly.extras.bench.plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fly.drafts import NGramDraft
from fly.extras.bench.plan import Forecast, Machines, Setting, forecast
from fly.extras.eval.replay import Blocks, Replay
from fly.extras.statistics import Estimate
from fly.policies import AcceptancePolicy

__all__ = ["REACHES", "Scaled", "forecast_rounds", "lengths", "replays", "scaled"]

REACHES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.6)


@dataclass(frozen=True)
class Scaled:
    """A rule at the best of the replayed draft lengths.

    Attributes:
        gain: the speed relative to autoregressive decoding; its interval comes from the interval of τ over problems, at
            the same length.
        fits: whether the models fit in the devices' memory.
    """

    replay: Replay
    gain: Estimate
    fits: bool


def lengths(blocks: Blocks) -> list[tuple[int, float]]:
    """Return the kinds of drafts to replay, each as its ``k`` and ``reach``: drafts of fixed lengths and, if a draft
    model's probabilities were recorded, drafts that stop by themselves."""
    fixed_lengths = sorted({k for k in (3, 5, 7, 10, 15, 20, 25) if k < blocks.k} | {blocks.k})
    stopped = [] if blocks.draft is None else [(blocks.k, reach) for reach in REACHES if reach]
    return [*((k, 0.0) for k in fixed_lengths), *stopped]


def replays(blocks: Blocks, policy: AcceptancePolicy, advance: Callable[[], None] = lambda: None) -> list[Replay]:
    """Replay ``policy`` with drafts of all ``lengths``. ``advance`` is called after each.

    Raises ``Unknown`` if the recording lacks what the rule needs.
    """
    by_length = []
    for k, reach in lengths(blocks):
        by_length.append(blocks.replay(policy, k, reach=reach, lookup=NGramDraft()))
        advance()
    return by_length


def forecast_rounds(
    setting: Setting, machines: Machines, tau: float, drafted: float, forwards: float, stops: bool
) -> Forecast:
    """Predict rounds of the models of ``setting`` that emit ``tau`` tokens in the mean, and draft ``drafted`` tokens by
    ``forwards`` forwards of the draft model. ``stops``: drafts stop by themselves."""
    # One more forward is launched before the host knows that a draft has stopped (fly/backends/cuda).
    drafted, forwards = max(drafted, 1e-9), max(forwards + stops, 1e-9)
    return forecast(replace(setting, k=drafted, tau=tau, draft_tau=drafted / forwards), machines)


def scaled(replays: Sequence[Replay], setting: Setting, machines: Machines, levels: int) -> Scaled:
    """Return the best of the ``replays`` for the models of ``setting``. If ``levels`` is 2, prompt lookup drafts
    for the draft model."""

    def of(each: Replay) -> Scaled:
        forwards = each.drafted if levels == 1 else each.forwards or each.drafted
        stops = each.reach > 0 or levels == 2
        expected = forecast_rounds(setting, machines, each.tau.value, each.drafted, forwards, stops)
        gain = Estimate(*(expected.gain() * tau / each.tau.value for tau in each.tau))
        return Scaled(each, gain, expected.fits)

    return max((of(each) for each in replays), key=lambda each: each.gain.value)
