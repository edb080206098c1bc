"""Run the same problems through several decoding settings and say what each gains and costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fly.bundled.tasks import Problem, check_many
from fly.llm import LLM
from fly.policies import AcceptancePolicy, Exact
from fly.types import SamplingParams, Stats

__all__ = ["Result", "Setting", "compare", "decode", "in_turns"]

_TOGETHER = 8  # prompts of a turn
_Who = TypeVar("_Who")
_Prompt = TypeVar("_Prompt")


@dataclass(frozen=True)
class Setting:
    """One way to decode: a loaded target with its draft, a policy and a draft length (0 is autoregressive)."""

    name: str
    llm: LLM
    k: int
    policy: AcceptancePolicy = field(default_factory=Exact)


@dataclass
class Result:
    """What a setting did over all prompts. ``seconds`` is the time of generation alone, prefill included; ``right``
    is empty where there was nothing to check."""

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


def in_turns(everybody: Sequence[_Who], prompts: Sequence[_Prompt]) -> Iterator[tuple[_Who, _Prompt]]:
    """Everybody with every prompt, a few prompts a turn."""
    for first in range(0, len(prompts), _TOGETHER):
        for one in everybody:
            for prompt in prompts[first : first + _TOGETHER]:
                yield one, prompt


def decode(
    settings: Sequence[Setting],
    prompts: Sequence[str | list[int]],
    params: SamplingParams,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Result]:
    """Decode every prompt (a chat message, or token ids) with every setting, one request at a time.

    Settings take turns of a few prompts, so that a busy moment of the machine falls on all of them alike, and none
    finds the caches of the processor full of another's doings each time; each is warmed up before any clock runs, on
    another prompt, since a strategy may remember what it has seen.
    ``advance(name)`` is called after every completion.
    """
    if not settings or not prompts:
        raise ValueError(f"need at least one setting and one prompt, got {len(settings)} and {len(prompts)}")
    results = [Result(setting, Stats(), 0.0, [], []) for setting in settings]
    for result in results:
        _decode(result.setting, [0, 1, 2, 3], params.model_copy(update={"ignore_eos": True, "max_tokens": 24}))
    for result, prompt in in_turns(results, prompts):
        for allocator in result.setting.llm.scheduler.allocators():
            allocator.forget()  # else who comes later would find the prompt in the cache
        start = time.perf_counter()
        text, stats = _decode(result.setting, prompt, params)
        result.seconds += time.perf_counter() - start
        result.stats += stats
        result.texts.append(text)
        advance(result.setting.name)
    return results


def compare(
    settings: Sequence[Setting],
    problems: Sequence[Problem],
    params: SamplingParams,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Result]:
    """Decode every problem with every setting, as ``decode`` does, and check the answers."""
    results = decode(settings, [problem.prompt for problem in problems], params, advance)
    for result in results:
        result.right = check_many(list(zip(problems, result.texts)))
    return results


def _decode(setting: Setting, prompt: str | list[int], params: SamplingParams) -> tuple[str, Stats]:
    ids = setting.llm.chat_prompt(prompt) if isinstance(prompt, str) else prompt
    (output,) = setting.llm.generate([ids], params, policy=setting.policy, k=setting.k)
    return output.text, output.stats
