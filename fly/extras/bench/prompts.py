"""The prompts of benchmarks. Bundled models are asked held-out problems. All others get prompts like those of real
users: code and sums, which suit speculation, and prose and lists, which do not."""

from __future__ import annotations

import random

from fly.extras.bench.loaded import target_of
from fly.llm import LLM
from fly.models.bundled import BUNDLED
from fly.models.bundled.tasks import Problem, problems

__all__ = ["PROMPTS", "asked_of", "usual_amount"]

PROMPTS = (
    "Write a Python function that merges two sorted lists into one sorted list, with type hints and a docstring.",
    "A shop sells pens at 3 for 2 euros. How much do 24 pens cost, and how many pens are in 18 euros' worth? Explain "
    "each step.",
    "Write a Python class for a bank account with deposit, withdraw and transfer. No balance may fall below zero.",
    "Explain to a ten-year-old why the moon looks different from night to night.",
    "Here is a function:\n\ndef total(prices):\n    t = 0\n    for i in range(len(prices)):\n"
    "        t = t + prices[i]\n    return t\n\n"
    "Rewrite it so that it skips values that are None, and keep everything else as it is.",
    "A train leaves at 9:40 and travels 210 km at 84 km/h. It waits for 12 minutes on the way. When does it arrive?",
    "List ten capital cities of Europe, each with its country and the river it lies on.",
    "Write a short, polite letter that asks a landlord to repair a heater before winter.",
)


def usual_amount(parameters: int) -> tuple[int, int]:
    """Return the default number of prompts, and the most tokens of each answer, for a model with this many parameters.

    A model of 100 million parameters or more gets fewer prompts, and fewer tokens the larger it is, down to 64. Up to
    270 million parameters, three turns of all peers take about four minutes on two cores.
    """
    if parameters < 100e6:
        return 24, 400
    return 8, max(64, round(17.5e9 / parameters))


def asked_of(llm: LLM, model: str, count: int) -> tuple[list[Problem], list[list[int]]]:
    """Return the problems and prompts for a model. A bundled checkpoint gets held-out problems with their prompts. Any
    other was not trained on such problems, so it gets prompts from ``PROMPTS`` and no problems."""
    if model in BUNDLED:
        held_out = problems(None, "heldout", 0, count)
        return held_out, [llm.chat_prompt(problem.prompt) for problem in held_out]
    return [], [_prompt_of(llm, number) for number in range(count)]


def _prompt_of(llm: LLM, number: int) -> list[int]:
    """Return one of ``PROMPTS``, as a conversation if the model has a chat template."""
    text, tokenizer = PROMPTS[number % len(PROMPTS)], llm.tokenizer
    if tokenizer is None:
        rng = random.Random(number)
        return [rng.randrange(target_of(llm).config.vocab_size) for _ in range(32)]
    return llm.chat_prompt(text) if tokenizer.template is not None else tokenizer.encode(text)
