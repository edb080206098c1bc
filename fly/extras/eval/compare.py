"""Decode the same problems with several settings, and measure what each gains and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fly.extras.eval.scorers import check_many
from fly.extras.eval.timed import Setting, Times, timed
from fly.models.bundled.tasks import Problem
from fly.runner.request import Stats
from fly.types import SamplingParams

__all__ = ["Result", "compare", "decode", "in_turns"]

_TOGETHER = 8  # how many prompts a turn has
_Setting = TypeVar("_Setting")
_Prompt = TypeVar("_Prompt")


@dataclass
class Result:
    """The results of a setting over all prompts; ``right`` is empty if there is nothing to check."""

    setting: Setting
    stats: Stats
    times: Times
    texts: list[str]
    right: list[bool]

    @property
    def seconds(self) -> float:
        """The time of all completions, prompts included."""
        return self.times.prompt + self.times.decoding

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, the time of prompts included."""
        return self.stats.generated / self.seconds

    @property
    def decoding_speed(self) -> float:
        """Tokens per second, without the time of prompts and the tokens that came with them."""
        return self.stats.emitted / self.times.decoding

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)


def in_turns(
    settings: Sequence[_Setting], prompts: Sequence[_Prompt], together: int = _TOGETHER
) -> Iterator[tuple[_Setting, _Prompt]]:
    """Yield every setting with every prompt. Settings take turns of ``together`` prompts."""
    for first in range(0, len(prompts), together):
        for setting in settings:
            for prompt in prompts[first : first + together]:
                yield setting, prompt


def decode(
    settings: Sequence[Setting],
    prompts: Sequence[str | list[int]],
    params: SamplingParams,
    advance: Callable[[str], None] = lambda name: None,
    clocked: bool = False,
    together: int = _TOGETHER,
) -> list[Result]:
    """Decode every prompt (a chat message, or token ids) with every setting, one request at a time.

    Settings take turns of a few prompts (``together``). A busy moment of the machine then affects all of them, and no
    setting always finds another's data in the processor's caches. Each is warmed up first, on another prompt, since a
    strategy may remember texts. ``advance(name)`` is called after every completion. ``clocked`` also times the models;
    this waits for a GPU after every forward.
    """
    if not settings or not prompts:
        raise ValueError(f"need at least one setting and one prompt, got {len(settings)} and {len(prompts)}")
    results = [Result(setting, Stats(), Times(), [], []) for setting in settings]
    warm = params.model_copy(update={"ignore_eos": True, "max_tokens": 24})
    for result in results:
        timed(result.setting, [0, 1, 2, 3], warm)
    for result, prompt in in_turns(results, prompts, together):
        llm = result.setting.llm
        llm.scheduler.forget()  # otherwise the next setting would find the prompt in the cache
        ids = llm.chat_prompt(prompt) if isinstance(prompt, str) else prompt
        output, times = timed(result.setting, ids, params, clocked)
        result.times += times
        result.stats += output.stats
        result.texts.append(output.text)
        advance(result.setting.name)
    return results


def compare(
    settings: Sequence[Setting],
    problems: Sequence[Problem],
    params: SamplingParams,
    advance: Callable[[str], None] = lambda name: None,
    clocked: bool = False,
    together: int = _TOGETHER,
) -> list[Result]:
    """Decode every problem with every setting, as ``decode`` does, and check the answers."""
    results = decode(settings, [problem.prompt for problem in problems], params, advance, clocked, together)
    for result in results:
        result.right = check_many(list(zip(problems, result.texts)))
    return results
