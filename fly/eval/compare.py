"""Run the same problems through several decoding settings and say what each gains and costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fly.bundled.tasks import Problem, check_many
from fly.llm import LLM
from fly.policies import AcceptancePolicy, Exact
from fly.types import SamplingParams, Stats

__all__ = ["Result", "Setting", "compare"]


@dataclass(frozen=True)
class Setting:
    """One way to decode: a loaded target with its draft, a policy and a draft length (0 is autoregressive)."""

    name: str
    llm: LLM
    k: int
    policy: AcceptancePolicy = field(default_factory=Exact)


@dataclass
class Result:
    """What a setting did over all problems. ``seconds`` is the time of generation alone, prompts included."""

    setting: Setting
    stats: Stats
    seconds: float
    texts: list[str]
    right: list[bool]

    @property
    def tokens_per_second(self) -> float:
        return self.stats.generated / self.seconds

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)


def compare(
    settings: Sequence[Setting],
    problems: Sequence[Problem],
    params: SamplingParams,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Result]:
    """Decode every problem with every setting, one request at a time, and check the answers.

    Settings take turns problem by problem, so that a busy moment of the machine falls on all of them alike; each
    is warmed up on the first problem before any clock runs. ``advance(name)`` is called after every completion.
    """
    if not settings or not problems:
        raise ValueError(f"need at least one setting and one problem, got {len(settings)} and {len(problems)}")
    results = [Result(setting, Stats(), 0.0, [], []) for setting in settings]
    for result in results:
        _decode(result.setting, problems[0], params)
    for problem in problems:
        for result in results:
            start = time.perf_counter()
            text, stats = _decode(result.setting, problem, params)
            result.seconds += time.perf_counter() - start
            result.stats += stats
            result.texts.append(text)
            advance(result.setting.name)
    for result in results:
        result.right = check_many(list(zip(problems, result.texts)))
    return results


def _decode(setting: Setting, problem: Problem, params: SamplingParams) -> tuple[str, Stats]:
    prompt = setting.llm.chat_prompt(problem.prompt)
    (output,) = setting.llm.generate([prompt], params, policy=setting.policy, k=setting.k)
    return output.text, output.stats
