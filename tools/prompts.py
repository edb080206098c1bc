"""Prompts for training a draft head: code and instructions, made only from Python's standard library and templates.
``python -m tools.prompts OUT`` writes ``train.jsonl``, and one held-out task for ``fly eval`` of each kind.

From the standard library come signatures with docstrings to complete, and short functions to explain, test or change.
From templates come small functions with examples, and instructions about everyday subjects. Held-out functions come
from other modules than those for training, and held-out instructions are about other subjects.
"""

from __future__ import annotations

import ast
import json
import sysconfig
import textwrap
from collections import abc
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple

import typer

app = typer.Typer(add_completion=False)

COMPLETE = (
    "Complete this Python function. Answer with the whole function in one ```python block, imports included.",
    "Write the body of this Python function.",
    "Implement this function in Python.",
    "Please finish the following Python function, and explain briefly how it works.",
)
READ = (
    "Explain what this Python function does.",
    "Write three test cases for this Python function.",
    "Rewrite this Python function with type hints and a clear docstring.",
    "Add comments to this Python function that say what each step is for.",
    "How could this Python function be made simpler? Show the new version.",
)

# Small functions: what to compute, from which numbers. The examples are evaluated with the expressions themselves.
OPERATIONS = {
    "sum": ("the sum of", "sum(found)"),
    "count": ("how many there are of", "len(found)"),
    "largest": ("the largest of", "max(found, default=0)"),
    "smallest": ("the smallest of", "min(found, default=0)"),
    "range": ("the difference of the largest and the smallest of", "max(found, default=0) - min(found, default=0)"),
    "squares": ("the squares, in ascending order, of", "sorted(n * n for n in found)"),
    "reversed": ("in reverse order", "found[::-1]"),
    "distinct": ("without repetitions and sorted,", "sorted(set(found))"),
    "doubled": ("twice each of", "[2 * n for n in found]"),
    "running": ("the running totals of", "[sum(found[: i + 1]) for i in range(len(found))]"),
    "last_digits": ("the last digits of", "[abs(n) % 10 for n in found]"),
    "alternating": ("the sum with alternating signs of", "sum(found[::2]) - sum(found[1::2])"),
}
FILTERS = {
    "all": ("all the numbers", "True"),
    "even": ("the even numbers", "n % 2 == 0"),
    "odd": ("the odd numbers", "n % 2 == 1"),
    "positive": ("the positive numbers", "n > 0"),
    "negative": ("the negative numbers", "n < 0"),
    "multiples_of_three": ("the multiples of three", "n % 3 == 0"),
    "above_ten": ("the numbers above ten", "n > 10"),
    "two_digit": ("the numbers of two digits", "10 <= abs(n) < 100"),
    "primes": ("the prime numbers", "n > 1 and all(n % d for d in range(2, n))"),
    "palindromes": ("the numbers that read the same backwards", "str(n) == str(n)[::-1]"),
    "perfect_squares": ("the perfect squares", "n >= 0 and round(n ** 0.5) ** 2 == n"),
    "repeated": ("the numbers that come up more than once", "numbers.count(n) > 1"),
}
ASK_SMALL = (
    "Write a Python function `{name}(numbers)` that takes a list of integers and returns {what} in it.",
    "I have a list of integers in Python. How do I get {what} in it? Please write a function for that.",
    "Write a short Python program that reads integers from the user and prints {what} among them.",
)

ABOUT = (
    "Explain {} to a child of ten.",
    "Write a short paragraph about {}.",
    "What are the most important facts about {}?",
    "List five tips for somebody who begins with {}.",
    "Give me three reasons why {} matters to people.",
    "Write a short poem about {}.",
    "Write a friendly email to a colleague about {}.",
    "What are the advantages and disadvantages of {}?",
    "Tell me the beginning of a story in which {} plays a part.",
    "Write a product description of a book about {}.",
    "Describe {} in two sentences.",
    "Make a plan of one week for learning about {}.",
    "What questions would you ask an expert on {}?",
    "Summarize the history of {} in a few sentences.",
    "Write a dialogue between two friends who talk about {}.",
    "What are common mistakes with {}, and how can they be avoided?",
    "Give a definition of {} and an example.",
    "Write a blog post of one hundred words on {}.",
    "How has {} changed over the last fifty years?",
    "Compare {} with {}. In what do they differ?",
    "Is {} harder than {}? Give reasons.",
    "What do {} and {} have in common?",
)
SUBJECTS = """
cooking; gardening; chess; photography; running; the solar system; volcanoes; bread; coffee; trains; bicycles; music;
painting; the sea; whales; bees; forests; rivers; mountains; deserts; winter; summer; rain; earthquakes; clocks; maps;
money; taxes; savings; insurance; job interviews; public speaking; time management; friendship; family holidays;
sleep; healthy food; vitamins; exercise; swimming; football; tennis; yoga; meditation; stress; school; homework;
reading; libraries; newspapers; the internet; email; passwords; smartphones; computers; robots; artificial
intelligence; video games; films; theatre; dance; opera; the guitar; the piano; poetry; novels; grammar; translation;
learning a language; spelling; handwriting; mathematics; geometry; probability; statistics; physics; gravity; light;
sound; electricity; magnets; batteries; solar power; wind power; cars; aeroplanes; ships; bridges; houses; cities;
villages; farms; cows; horses; dogs; cats; birds; fish; insects; spiders; trees; flowers; mushrooms; the heart; the
brain; the eyes; teeth; medicine; vaccines; hospitals; doctors; nurses; teachers; engineers; lawyers; shops; markets;
advertising; small companies; remote work; meetings; teamwork; leadership; negotiation; customer service; recycling;
plastic; water; climate; democracy; elections; laws; human rights; museums; castles; the Roman Empire; ancient Egypt;
the Middle Ages; the moon landing; telescopes; stars; comets; tea; chocolate; cheese; rice; potatoes; apples;
breakfast; picnics; camping; hiking; travel by train; hotels; airports; passports; birthdays; weddings; gifts; toys;
puzzles; jokes; dreams; memory; habits; curiosity; honesty; kindness; patience; databases; sorting algorithms;
recursion; version control; web pages; programming languages; unit tests; debugging; operating systems; spreadsheets;
encryption; binary numbers; the Python language
"""


class Asked(NamedTuple):
    """A prompt, its kind, and what it is about: what shares that is held out or trained on together."""

    kind: str
    about: str
    prompt: str


def library(folder: Path) -> abc.Iterator[Asked]:
    """Documented functions of the modules in ``folder``: their heads to complete, the short ones to read."""
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if {"test", "tests", "idlelib", "site-packages", "lib2to3", "__phello__", "_pyrepl"} & {*inside.parts}:
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and 40 <= len(ast.get_docstring(node) or "") <= 800:
                lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
                documented = node.body[0].end_lineno
                assert documented is not None
                head = textwrap.dedent("\n".join(lines[: documented - node.lineno + 1]))
                whole = textwrap.dedent("\n".join(lines))
                about = inside.parts[0].removesuffix(".py")
                for n, text in enumerate(COMPLETE):
                    yield Asked(f"complete-{n}", about, f"{text}\n\n```python\n{head}\n```")
                if 6 <= len(lines) <= 30 and len(whole) < 1200:
                    for n, text in enumerate(READ):
                        yield Asked(f"read-{n}", about, f"{text}\n\n```python\n{whole}\n```")


def small() -> abc.Iterator[Asked]:
    """Functions on lists of integers, with an example or two worked out; asked for in words too."""
    random = Random(0)
    for operation, (of, value) in OPERATIONS.items():
        for chosen, (which, condition) in FILTERS.items():
            name = f"{operation}_of_{chosen}"
            what = f"{which} {of}" if operation in ("reversed", "distinct") else f"{of} {which}"
            what = what.rstrip(",")
            examples = []
            for _ in range(random.randint(1, 3)):
                numbers = [random.choice((random.randint(-9, 30), 11, 25)) for _ in range(random.randint(3, 6))]
                found = [n for n in numbers if eval(condition, {"n": n, "numbers": numbers})]
                examples.append(f"    >>> {name}({numbers})\n    {eval(value, {'found': found})}")
            shown = "\n".join(examples)
            head = f'def {name}(numbers):\n    """Return {what} in a list of integers.\n{shown}\n    """'
            for n, text in enumerate(COMPLETE):
                yield Asked(f"small-{n}", name, f"{text}\n\n```python\n{head}\n```")
            for n, text in enumerate(ASK_SMALL):
                yield Asked(f"small-words-{n}", name, text.format(what=what, name=name))


def instructions() -> abc.Iterator[Asked]:
    """Every template about every subject, and another one where it takes two."""
    subjects = [" ".join(subject.split()) for subject in SUBJECTS.split(";")]
    for n, subject in enumerate(subjects):
        for template in ABOUT:
            other = subjects[(n * 7 + 3) % len(subjects)]
            yield Asked("instruction", subject, template.format(subject, other))


def drawn(some: abc.Iterable[Asked], count: int, held_out: int, random: Random) -> tuple[list[Asked], list[Asked]]:
    """``count`` prompts to train on and ``held_out`` others, about nothing that the first are about."""
    groups: dict[str, list[Asked]] = {}
    for one in some:
        groups.setdefault(one.about, []).append(one)
    names = sorted(groups)
    random.shuffle(names)
    apart = names[: max(1, len(names) // 8)]

    def take(chosen: abc.Iterable[str], wanted: int) -> list[Asked]:
        found = [one for name in chosen for one in groups[name]]
        random.shuffle(found)
        return found[:wanted]

    return take(names[len(apart) :], count), take(apart, held_out)


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="Folder to write to.")],
    count: Annotated[int, typer.Option(min=4, help="Prompts to train on; half of them about code.")] = 3000,
    held_out: Annotated[int, typer.Option(min=1, help="Prompts held out of each kind.")] = 60,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer to one that is held out.")] = 256,
    seed: Annotated[int, typer.Option(help="Of what is drawn, and of the order.")] = 0,
    source: Annotated[
        Path | None, typer.Option("--library", help="Folder of Python modules; if not given, the standard library.")
    ] = None,
) -> None:
    """Write the prompts."""
    random = Random(seed)
    of_library = [*library(source or Path(sysconfig.get_paths()["stdlib"]))]
    shares = {"complete": 0.25, "read": 0.15, "small": 0.2, "instruction": 0.4}
    sources = {kind: [one for one in of_library if one.kind.startswith(kind)] for kind in ("complete", "read")}
    sources |= {"small": [*small()], "instruction": [*instructions()]}
    out.mkdir(parents=True, exist_ok=True)
    train: list[Asked] = []
    for kind, share in shares.items():
        lessons, apart = drawn(sources[kind], round(share * count), held_out, random)
        typer.echo(f"{kind}: {len(lessons)} of {len(sources[kind])} to train on, {len(apart)} held out")
        train += lessons
        _write(out / f"held-out-{kind}.jsonl", apart)
        task = f'data: held-out-{kind}.jsonl\nid: "{kind}-{{{{ number }}}}"\nprompt: "{{{{ prompt }}}}"\n'
        task += f"scorer: none\nmax_tokens: {max_tokens}\n"
        (out / f"held-out-{kind}.yaml").write_text(task, encoding="utf-8")
    random.shuffle(train)
    _write(out / "train.jsonl", train)


def _write(path: Path, some: abc.Iterable[Asked]) -> None:
    path.write_text("".join(json.dumps(one._asdict()) + "\n" for one in some), encoding="utf-8")


if __name__ == "__main__":
    app()
