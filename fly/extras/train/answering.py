"""What the commands of trainings share: the options of prompts, and the target's answers to these."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from fly.cli.options import option
from fly.cli.show import progress
from fly.extras.train.answers import Answer, answers, prompts_of
from fly.llm import LLM
from fly.types import SamplingParams

__all__ = ["PROMPTS", "answer_prompts", "numbers_of"]

PROMPTS = {
    "prompts": option(
        Path, "A file of prompts: .jsonl (texts, messages, or objects with either), or one prompt a line."
    ),
    "task": option(str, "Instead of --prompts, a kind of the bundled tasks: arithmetic, text, code or all."),
    "count": option(int, "The most prompts. Default: all of a file, 2000 of a task.", min=1),
    "max_tokens": option(int, "The most tokens of an answer.", min=1, default=512),
}


def numbers_of(name: str, text: str | None) -> tuple[int, ...] | None:
    """Read numbers with commas between them, the value ``text`` of the option ``name``. Raises ``ValueError`` for
    anything else."""
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} {text!r} must be numbers with commas, as 1,2,4") from None


def answer_prompts(
    out: Path, temperature: float, wanted: dict[str, Any], loading: dict[str, Any], grid: Any = None
) -> tuple[LLM, list[Answer], str]:
    """Load the target and have it, or the actors of ``grid``, answer the prompts that ``wanted``, the values of
    ``PROMPTS``, names. Returns the target, the answers (kept in ``out``), and a sentence about them for the model
    card."""
    task, max_tokens = wanted["task"], wanted["max_tokens"]
    prompts = prompts_of(wanted["prompts"], task, wanted["count"])
    options = {**loading, "max_rows": 64}
    llm = LLM(**options)
    if llm.tokenizer is None:
        raise ValueError(f"{loading['model']} has no tokenizer, so it can answer no prompts")
    out.mkdir(parents=True, exist_ok=True)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    with progress(len(prompts), "answers by the target") as advance:
        generate = None if grid is None else partial(grid.answer, options, params)
        report = lambda n: advance(grid.status if grid else "", n)  # noqa: E731
        target_answers = answers(llm, prompts, params, out / "answers.jsonl", report, generate)
    llm.close()
    source = f"{len(target_answers):,} prompts" + (
        f" of the bundled task `{task}`" if wanted["prompts"] is None else ""
    )
    return llm, target_answers, f"{source}, answered at temperature {temperature:g}, up to {max_tokens} tokens each."
