"""What a head is trained on: prompts, and the target's own answers to them. Knows nothing of heads."""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fly.bundled.tasks import problems
from fly.calls import Prompt
from fly.llm import LLM
from fly.types import SamplingParams

__all__ = ["Answer", "answers", "prompts_of"]

_AT_ONCE = 64  # prompts that are answered in one batch, and so lost with a process that is killed


class Answer(NamedTuple):
    """Token ids of a prompt, and of what the target answered."""

    prompt: list[int]
    answer: list[int]


def prompts_of(path: Path | None, task: str | None, count: int | None, seed: int = 0) -> list[Any]:
    """Prompts of a file, or of a kind of the bundled tasks (its training split): texts, or lists of messages.

    A ``.jsonl`` file has on each line a text, a list of messages, or an object with ``prompt`` or ``messages``; any
    other a prompt on each line. ``count`` takes the first so many; None is all of a file, and 2000 of a task.

    Raises ``ValueError`` for neither or both, an unknown task, or a line that is no prompt.
    """
    if (path is None) == (task is None):
        raise ValueError("give either a file of prompts or a bundled task")
    if path is None:
        return [problem.prompt for problem in problems(task, "train", seed, 2000 if count is None else count)]
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            found.append(_read(line, f"{path}:{number}") if path.suffix == ".jsonl" else line)
    if not found:
        raise ValueError(f"{path}: holds no prompt")
    return found[:count]


def _read(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON ({error})") from error
    if isinstance(value, dict):
        value = value.get("prompt", value.get("messages"))
    if not isinstance(value, (str, list)) or not value:
        raise ValueError(f"{where}: no prompt: a text, a list of messages, or an object with 'prompt' or 'messages'")
    return value


def answers(
    llm: LLM,
    prompts: abc.Sequence[Any],
    params: SamplingParams,
    path: Path,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Answer]:
    """The target's answers to ``prompts`` under its chat template, where it has one. What is in the file at ``path``
    already is not asked for again; each batch is written there as it comes.

    ``advance`` is told how many more there are. Prompts that leave no room to answer get none.

    Raises ``ValueError`` if the file has answers of another target, to other prompts, or with other ``params``.
    """
    found = [Answer(**json.loads(line)) for line in _whole_lines(path)]
    about, said = path.with_suffix(".json"), json.dumps({"llm": repr(llm), "params": repr(params)})
    same = not found or (about.exists() and about.read_text(encoding="utf-8") == said)
    if not same or any(_ids(llm, prompt) != one.prompt for prompt, one in zip(prompts, found)):
        raise ValueError(
            f"{path} has answers of another target, to other prompts or sampled otherwise; go on elsewhere"
        )
    about.write_text(said, encoding="utf-8")
    advance(len(found))
    with path.open("a", encoding="utf-8") as file:
        for start in range(len(found), len(prompts), _AT_ONCE):
            some = [_ids(llm, prompt) for prompt in prompts[start : start + _AT_ONCE]]
            room = llm.engine.context - 1
            seeds = [params.changed({"seed": start + n}) for n in range(len(some))]
            asked = [n for n, ids in enumerate(some) if len(ids) < room]
            outputs = llm.generate([some[n] for n in asked], [seeds[n] for n in asked], k=0) if asked else []
            given = dict(zip(asked, outputs))
            batch = [Answer(ids, list(given[n].token_ids) if n in given else []) for n, ids in enumerate(some)]
            file.writelines(json.dumps(answer._asdict()) + "\n" for answer in batch)
            file.flush()
            found += batch
            advance(len(batch))
    return found[: len(prompts)]


def _ids(llm: LLM, prompt: Any) -> list[int]:
    ids: Prompt = prompt
    assert llm.tokenizer is not None
    if isinstance(prompt, list) or llm.tokenizer.template is not None:
        ids = llm.chat_prompt(prompt)
    return llm.tokenizer.encode(ids) if isinstance(ids, str) else [int(token) for token in ids]


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that were written to their end; what a kill cut off is removed."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return whole.splitlines()
