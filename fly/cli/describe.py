"""``fly policies NAME`` and ``fly drafts NAME``: what a rule or a strategy is, in the words of its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from rich.markup import escape

from fly.backends.cpu.host import clauses_of, is_compiled
from fly.cli.show import console, print_list
from fly.drafts.model import SingleDraft
from fly.drafts.registry import STRATEGIES, checkpoint_type
from fly.expressions import CLASS_PATH, Source
from fly.models.bundled import names_a_checkpoint
from fly.policies import AcceptancePolicy, Condition, Relaxed, parse_policy
from fly.policies.registry import PRESETS, RULES
from fly.types import Guarantee

__all__ = ["describe_call", "describe_compiled", "show_draft", "show_policy", "summarize"]

_BETWEEN_PARAGRAPHS = r"\n\s*\n|\n(?=- )"
_IN_PART = "in part: Python decides the blocks in which it may excuse a mismatch"
_NO_DRAFT = "'none' drafts nothing: the target decodes autoregressively"


def summarize(thing: Any) -> str:
    """Return the first paragraph of a docstring."""
    return next(_paragraphs(thing), "")


def describe_call(name: str, make: Any) -> str:
    """Return a rule or strategy as text, with its parameters and their defaults."""
    parameters = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in _parameters(make)]
    return f"{name}({', '.join(parameters)})" if parameters else name


def show_policy(name: str) -> None:
    """Print what a policy or condition is: its description, guarantee, presets, parameters, and whether it is compiled.
    ``name`` may also be a preset, a class path or an expression. Raises ``ValueError`` for any other name."""
    if re.fullmatch(rf"[\w.]+|{CLASS_PATH.pattern}", name):
        entry = Source(RULES, name, trusted=True).find(name)
    else:
        entry = parse_policy(name, trusted=True)
    if isinstance(entry, type) and issubclass(entry, Condition):
        _show_condition(describe_call(name, entry), entry)
        return
    rule: Any = entry if isinstance(entry, RULES.bases) else entry()
    if isinstance(rule, Condition):
        _show_condition(name, rule)
        return
    bound = f", {rule.bound} for each token" if rule.bound else ""
    facts = {"guarantee": rule.guarantee.value + bound, "compiled": describe_compiled(rule)}
    if not isinstance(entry, type):
        facts["written out"] = str(rule)
    for preset, make in PRESETS.items():
        preset_rule = make()
        if entry is type(preset_rule):
            facts[f"preset {preset}"] = f"{preset_rule}: {summarize(make)}"
    title = describe_call(name, entry) if isinstance(entry, type) else name
    _show(title, entry if name in PRESETS else type(rule), facts)
    if not isinstance(rule, Relaxed):  # whose parts are written out
        _show_parameters(entry if isinstance(entry, type) else rule)


def _show_condition(title: str, condition: Any) -> None:
    """Print what a condition is, or a class of conditions."""
    compiled = "yes, beside a rule that is" if condition.compiles() else _IN_PART
    facts = {"guarantee": Guarantee.HEURISTIC.value, "compiled": compiled, "used as": f"exact | {title}"}
    _show(title, condition if isinstance(condition, type) else type(condition), facts)
    _show_parameters(condition)


def show_draft(name: str) -> None:
    """Print what a draft strategy is: its description and its parameters. ``name`` may also be a class path, or a
    checkpoint, which names a strategy too. Raises ``ValueError`` for any other name."""
    if name == "none":
        console.print(_NO_DRAFT)
        return
    if name not in STRATEGIES.types and names_a_checkpoint(name):
        strategy = checkpoint_type(name)
        (word,) = [word for word, kind in STRATEGIES.ours.items() if kind is strategy]
        lookup = "ngram+" if strategy is SingleDraft else ""
        _show(name, strategy, {"written out": f"{lookup}{word}({name}, reach=None)"})
    else:
        entry = Source(STRATEGIES, name, trusted=True).find(name)
        strategy = entry if isinstance(entry, type) else type(entry)
        _show(describe_call(name, strategy), strategy, {})
    _show_parameters(strategy)


def _show(title: str, described: Any, facts: dict[str, str]) -> None:
    """Print a docstring, and facts below it."""
    console.print(f"[bold]{escape(title)}[/]", highlight=False)
    for paragraph in _paragraphs(described):
        console.print(paragraph, markup=False, highlight=False)
    if facts:
        print_list(((key, escape(text)) for key, text in facts.items()), "", "", show_header=False)


def _show_parameters(thing: Any) -> None:
    """Print the parameters of a class with their defaults, or those of an instance with its values."""
    make, heading = (thing, "default") if isinstance(thing, type) else (type(thing), "value")
    monotone = getattr(make, "monotone", {})
    ways = {1: " (a larger value never accepts less)", -1: " (a larger value never accepts more)"}
    rows = []
    for parameter in _parameters(make):
        name = parameter.name
        value = parameter.default if isinstance(thing, type) else getattr(thing, name)
        meaning = _meaning(make, name).rstrip(";") + ways.get(monotone.get(name, 0), "")
        rows.append((name, "needed" if value is parameter.empty else escape(str(value)), escape(meaning)))
    if rows:
        print_list(rows, "parameter", heading, "meaning", show_lines=True)


def describe_compiled(policy: AcceptancePolicy) -> str:
    """Say whether compiled code decides by a policy, on a CPU that has compiled kernels."""
    if not is_compiled(policy, greedy=True):
        return "no: Python decides every block"
    if clauses_of(policy) is None:
        return _IN_PART
    return "yes" if is_compiled(policy, greedy=False) else "at temperature 0 alone"


def _parameters(make: Any) -> list[inspect.Parameter]:
    """Return the parameters that a text can give."""
    parameters = inspect.signature(make).parameters.values()
    return [each for each in parameters if not callable(each.default) or each.default is each.empty]


def _paragraphs(thing: Any) -> Iterator[str]:
    """Yield the paragraphs and list items of a docstring, without its section of arguments."""
    text, _ = _split(inspect.getdoc(thing) or "")
    yield from filter(None, map(_in_one_line, re.split(_BETWEEN_PARAGRAPHS, text)))


def _split(text: str) -> tuple[str, str]:
    """Split a docstring into its text and the entries of its section of arguments."""
    section = re.compile(r"^Args:\n((?:    .*\n|\n)*)", re.MULTILINE)
    arguments = section.search(f"{text}\n")
    return section.sub("", f"{text}\n"), arguments[1] if arguments else ""


def _meaning(make: Any, name: str) -> str:
    """Return what the docstrings of a class and its bases say of a parameter: its entry in a section of arguments, or
    the sentences that name it."""
    texts = [inspect.cleandoc(vars(kind).get("__doc__") or "") for kind in inspect.getmro(make)[:-1]]
    for text in texts:
        _, entries = _split(text)
        if entry := re.search(rf"^    (?:\w+, )*{name}(?:, \w+)*: (.*\n?(?:     .*\n?)*)", entries, re.MULTILINE):
            return _in_one_line(entry[1])
        if sentences := _sentences_with(f"``{name}``", text):
            return sentences
    return next(filter(None, (_sentences_with(name, text) for text in texts)), "")


def _sentences_with(word: str, text: str) -> str:
    """Return the sentences and list items of a docstring that have a word."""
    parts = (paragraph.removeprefix("- ") for paragraph in re.split(_BETWEEN_PARAGRAPHS, _split(text)[0]))
    sentences = (sentence for part in parts for sentence in re.split(r"(?<=[.;])\s+(?=[A-Z`])", part))
    matching = [each for each in sentences if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", each)]
    return _in_one_line(" ".join(each.removeprefix(f"{word}:") for each in matching))


def _in_one_line(text: str) -> str:
    """Return text of a docstring without line breaks and marks of code."""
    return " ".join(text.split()).replace("``", "")
