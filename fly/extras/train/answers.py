"""Training data: prompts, and the target's answers to them. This module knows nothing of heads."""

from __future__ import annotations

import asyncio
import json
from collections import abc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fly.extras.eval.records import Appender, read_lines
from fly.llm import LLM, Prompt
from fly.models.bundled.tasks import problems
from fly.types import SamplingParams

__all__ = ["Answer", "answers", "prompts_of"]


class Answer(NamedTuple):
    """Token ids of a prompt and of the target's answer."""

    prompt: list[int]
    answer: list[int]


def prompts_of(path: Path | None, task: str | None, count: int | None) -> list[Any]:
    """Read prompts from a file, or from the training split of a bundled task: texts, or lists of messages.

    Each line of a ``.jsonl`` file is a text, a list of messages, or an object with ``prompt`` or ``messages``. Each
    line of any other file is a prompt. ``count`` takes the first prompts; None takes the whole file, or 2000 prompts of
    a task.

    Raises ``ValueError`` unless exactly one of ``path`` and ``task`` is given, for an unknown task, too few prompts, or
    an invalid line.
    """
    if (path is None) == (task is None):
        raise ValueError("give either a file of prompts (--prompts) or a bundled task (--task)")
    if path is None:
        return [problem.prompt for problem in problems(task, "train", n=2000 if count is None else count)]
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            prompts.append(_read(line, f"{path}:{number}") if path.suffix == ".jsonl" else line)
    if not prompts:
        raise ValueError(f"{path}: has no prompts")
    return prompts[:count]


def _read(line: str, where: str) -> Any:
    try:
        prompt = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt", prompt.get("messages"))
    if not isinstance(prompt, (str, list)) or not prompt:
        raise ValueError(f"{where}: must be a text, a list of messages, or an object with 'prompt' or 'messages'")
    return prompt


def answers(
    llm: LLM,
    prompts: abc.Sequence[Any],
    params: SamplingParams,
    path: Path,
    advance: Callable[[int], None] = lambda count: None,
    generate: Callable[[abc.Sequence[tuple[int, list[int]]]], Iterator[Answer]] | None = None,
) -> list[Answer]:
    """Generate the target's answers to ``prompts``, with its chat template if it has one. Answers that are in the file
    at ``path`` are not generated again. Answers are written to the file in the order of the prompts.

    ``advance`` is called with the number of new answers. ``generate`` is a function that answers numbered prompts, in
    order; None lets ``llm`` answer them. A prompt that leaves no room for an answer gets an empty one.

    Raises ``ValueError`` if the file is about another target, other prompts or other ``params``.
    """
    answered = [Answer(**line) for line in read_lines(path)]
    about, settings = path.with_suffix(".json"), json.dumps({"llm": repr(llm), "params": repr(params)})
    same = not answered or (about.exists() and about.read_text(encoding="utf-8") == settings)
    prompt_ids = [_ids(llm, prompt) for prompt in prompts]
    if not same or any(ids != answer.prompt for ids, answer in zip(prompt_ids, answered)):
        raise ValueError(
            f"{path} has answers of another target, to other prompts, or sampled in another way; choose another file"
        )
    about.write_text(settings, encoding="utf-8")
    advance(len(answered))
    with Appender(path) as file:
        for answer in (generate or partial(generate_answers, llm, params=params))(
            list(enumerate(prompt_ids))[len(answered) :]
        ):
            file.write(answer._asdict())
            answered.append(answer)
            advance(1)
    return answered[: len(prompts)]


def generate_answers(
    llm: LLM, prompts: abc.Sequence[tuple[int, list[int]]], params: SamplingParams
) -> Iterator[Answer]:
    """Yield the answers to numbered prompts, in order. A prompt's number is its seed. All requests are submitted at
    once, so that a row that ends makes room for the next. No file is written."""

    async def answer(number: int, ids: list[int]) -> Answer:
        if len(ids) >= llm.engine.context - 1:
            return Answer(ids, [])
        (output,) = await llm.agenerate([ids], params.changed({"seed": number}), k=0)
        return Answer(ids, list(output.token_ids))

    async def result(task: asyncio.Task[Answer]) -> Answer:
        return await task

    with asyncio.Runner() as runner:  # leaving it cancels unfinished requests
        for task in [runner.get_loop().create_task(answer(*prompt)) for prompt in prompts]:
            yield runner.run(result(task))


def _ids(llm: LLM, prompt: Any) -> list[int]:
    ids: Prompt = prompt
    assert llm.tokenizer is not None
    if isinstance(prompt, list) or llm.tokenizer.template is not None:
        ids = llm.chat_prompt(prompt)
    return llm.tokenizer.encode(ids) if isinstance(ids, str) else [int(token) for token in ids]
