"""Prompts for models that are not bundled, like those of real users: code and sums, which suit speculation, and prose
and lists, which do not."""

from __future__ import annotations

__all__ = ["PROMPTS"]

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
