"""Every draft strategy on every kind of task, and on text that nobody can predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from fly.bundled.tasks import KINDS, problems
from fly.drafts import parse_draft
from fly.eval import Result, Setting, compare, decode
from fly.llm import LLM
from fly.policies import AcceptancePolicy
from fly.types import SamplingParams

__all__ = ["STRATEGIES", "Drafted", "measure_drafts"]

STRATEGIES = (
    "fly-draft",
    "fly-tiny",
    "ngram",
    "suffix",
    "recycling",
    "skip",
    "model(fly-draft, confidence=0.4)",
    "tree(fly-draft)",
    "ngram+fly-draft",
    "suffix+fly-draft",
    "ngram+fly-tiny+fly-draft",
    "relay((fly-draft, 10), (ngram, 5))",
    "union(suffix, ngram+fly-draft)",
    "adaptive(ngram)",
    "adaptive(fly-draft)",
    "adaptive(ngram+fly-draft)",
)
"""What ``fly bench drafts`` measures unless told otherwise; the first is the single draft that others are held to."""


@dataclass(frozen=True)
class Drafted:
    """What a strategy did: on each kind of task, and after prompts of random tokens at temperature 1.5, where little
    can be predicted."""

    name: str
    kinds: dict[str, Result]
    random: Result


def measure_drafts(
    names: Sequence[str],
    policy: AcceptancePolicy,
    count: int = 12,
    k: int = 15,
    model: str = "fly-target",
    dtype: str = "auto",
    device: str = "auto",
    kernels: str = "auto",
    advance: Callable[[], None] = lambda: None,
) -> list[Drafted]:
    """Measure autoregressive decoding (``none``, first in the list) and every strategy of ``names``.

    ``count`` held-out problems a kind, greedy, batch 1; and as many random texts of 256 tokens. All take turns prompt
    by prompt. ``advance`` is called after every completion: ``(len(KINDS) + 1) * count`` times for each strategy, and
    as often for none.
    """
    settings = [
        Setting(
            name,
            LLM(
                model,
                draft=parse_draft(name, trusted=True, dtype=dtype, device=device, kernels=kernels),
                dtype=dtype,
                device=device,
                kernels=kernels,
            ),
            k,
            policy,
        )
        for name in ("none", *names)
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=400)
    by_kind = {
        kind: compare(settings, list(problems(kind, "heldout", 0, count)), greedy, lambda name: advance())
        for kind in KINDS
    }
    vocabulary = settings[0].llm.engine.runner.model.config.vocab_size
    rng = Random(0)
    prompts: list[str | list[int]] = [[rng.randrange(vocabulary) for _ in range(32)] for _ in range(count)]
    wild = SamplingParams(temperature=1.5, max_tokens=256, seed=0, ignore_eos=True)
    random = decode(settings, prompts, wild, lambda name: advance())
    return [
        Drafted(setting.name, {kind: results[number] for kind, results in by_kind.items()}, random[number])
        for number, setting in enumerate(settings)
    ]
