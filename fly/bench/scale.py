"""What rules would gain with large models, by the acceptance that a recorded run of other models measured.

Knows nothing of how a forward is computed: its costs are a model's (``fly.bench.plan``), and no model is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fly.bench.plan import Machines, Setting, forecast
from fly.drafts import NGramDraft
from fly.eval.replay import Blocks, Replay, Unknown
from fly.eval.statistics import Estimate
from fly.policies import AcceptancePolicy

__all__ = ["REACHES", "Scaled", "replays", "scaled"]

REACHES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.6)


@dataclass(frozen=True)
class Scaled:
    """A rule at its best draft length, of those replayed.

    Attributes:
        gain: over autoregressive decoding; the interval is that of τ over problems, at the same length.
        fits: whether the devices hold it.
    """

    replay: Replay
    gain: Estimate
    fits: bool


def replays(blocks: Blocks, policy: AcceptancePolicy) -> list[Replay]:
    """``policy`` replayed with drafts of a fixed length, and with those that stop by themselves (``reach``).

    Raises ``Unknown`` if the recording lacks what the rule needs.
    """
    lengths = sorted({k for k in (3, 5, 7, 10, 15, 20, 25) if k < blocks.k} | {blocks.k})
    found = [blocks.replay(policy, k, lookup=NGramDraft()) for k in lengths]
    with suppress(Unknown):  # no draft model, whose probabilities would stop it
        found += [blocks.replay(policy, reach=reach, lookup=NGramDraft()) for reach in REACHES if reach]
    return found


def scaled(found: Sequence[Replay], setting: Setting, machines: Machines, levels: int) -> Scaled:
    """The best of ``found`` for the models of ``setting``; with 2 ``levels`` prompt lookup drafts for the draft."""

    def of(each: Replay) -> Scaled:
        forwards = each.drafted if levels == 1 else each.forwards or each.drafted
        # One forward more is launched before the host knows that a draft has stopped (fly/backends/cuda).
        forwards = max(forwards + (each.reach > 0 or levels == 2), 1e-9)
        own = replace(setting, k=each.drafted, tau=each.tau.value, draft_tau=each.drafted / forwards)
        expected = forecast(own, machines)
        gain = Estimate(*(expected.gain() * tau / each.tau.value for tau in each.tau))
        return Scaled(each, gain, expected.fits)

    return max((of(each) for each in found), key=lambda each: each.gain.value)
