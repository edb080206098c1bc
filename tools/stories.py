"""Word problems: what people have, buy and compare, in whole numbers up to 99."""

from __future__ import annotations

from random import Random

from tools.wording import Made, answered, ending, opening, step

__all__ = ["make"]

_PEOPLE = (
    ("Mia", "she"), ("Tom", "he"), ("Anna", "she"), ("Ben", "he"), ("Lily", "she"), ("Sam", "he"),
    ("Eva", "she"), ("Max", "he"), ("Rosa", "she"), ("Paul", "he"), ("Nina", "she"), ("Leo", "he"),
    ("Clara", "she"), ("Omar", "he"), ("Jane", "she"), ("Hugo", "he"),
)  # fmt: skip
_NAMES = [name for name, _ in _PEOPLE]
_ITEMS = (
    "apples", "pears", "books", "coins", "stamps", "cards", "shells", "pens",
    "marbles", "cookies", "stones", "flowers", "tickets", "balls", "eggs", "buttons",
)  # fmt: skip
_PLACES = ("market", "park", "school", "shop", "beach", "garden")
_MAX = 99
_TIMES = {2: "doubles in size", 3: "triples in size"}
_FREE_CLAUSES = {
    "add": (
        "{pronoun} buys {k} more {items}",
        "{pronoun} finds {k} {items} at the {place}",
        "{pronoun} gets {k} {items} from {friend}",
        "{friend} brings {k} more {items}",
    ),
    "sub": (
        "{pronoun} gives {k} {items} to {friend}",
        "{pronoun} loses {k} {items} at the {place}",
        "{pronoun} sells {k} of the {items}",
        "{friend} takes {k} of the {items}",
    ),
}
_CLAUSES = {
    "mul": "the pile of {items} {grows}",
    "div": "{pronoun} splits the {items} into {k} equal bags and keeps one bag",
    "boxes": "{pronoun} opens {k} boxes with {m} {items} each",
}
_STEPS = ((2, 4), (4, 4), (5, 6))  # of a story, by level
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "boxes": "+", "more": "+", "fewer": "-", "times": "*"}


def _result(op: str, value: int, k: int) -> int:
    return {"+": value + k, "-": value - k, "*": value * k, "/": value // k}[_SIGNS[op]]


def _story_steps(rng: Random, start: int, count: int) -> list[tuple[str, int, int]] | None:
    """``count`` operations from ``start`` whose results all stay within 1.._MAX, or None."""
    value, steps = start, []
    for _ in range(count):
        op = rng.choice(("add", "add", "sub", "sub", "mul", "div", "boxes"))
        k, m = rng.randint(2, 20), 0
        if op in _CLAUSES:
            k = rng.randint(2, 4 if op == "mul" else 6)
        if op == "boxes":
            m = rng.randint(2, 6)
        if op == "div" and value % k:
            return None
        value = _result(op, value, k * (m or 1))
        if not 1 <= value <= _MAX:
            return None
        steps.append((op, k, m))
    return steps


def _story(rng: Random, level: int) -> Made:
    """One person's things are added to, taken from, multiplied and shared."""
    steps = None
    while steps is None:
        start = rng.randint(2, 60)
        steps = _story_steps(rng, start, rng.randint(*_STEPS[level]))
    name, pronoun = rng.choice(_PEOPLE)
    friend = rng.choice([other for other in _NAMES if other != name])
    items = rng.choice(_ITEMS)
    place = rng.choice(_PLACES)
    value = start
    asked, said = [f"{name} has {start} {items}."], [opening(rng, f"{name} has {start} {items}")]
    for op, k, m in steps:
        before, extra, by = value, "", k
        if m:
            extra, by = f", so {k} * {m} = {k * m} more", k * m
        value = _result(op, value, by)
        form = rng.choice(_FREE_CLAUSES[op]) if op in _FREE_CLAUSES else _CLAUSES[op]
        grows = _TIMES.get(k, f"grows to {k} times its size")
        clause = form.format(pronoun=pronoun, friend=friend, items=items, place=place, grows=grows, k=k, m=m)
        asked.append(f"{clause[0].upper()}{clause[1:]}.")
        said.append(step(rng, clause + extra, f"{before} {_SIGNS[op]} {by} = {value} {items}"))
    said.append(ending(rng, f"the number of {items} that {name} has is {value}"))
    question = rng.choice(
        (f"Find the final count of {items} for {name}.", f"Tell me {name}'s {items} after all of this.")
        if level
        else (
            f"How many {items} does {name} have now?",
            f"How many {items} does {name} have in the end?",
            f"What is the number of {items} that {name} has now?",
        )
    )
    return _made(f"story {start} {steps}", [*asked, question], said, value)


def _shop(rng: Random, ood: bool) -> Made:
    """Several things are bought at unit prices; out of domain, change is returned as well."""
    count = 3 if ood else 2
    total = _MAX + 1
    while total > _MAX:
        lines = [(rng.randint(2, 9), rng.randint(2, 9)) for _ in range(count)]
        total = sum(k * price for k, price in lines)
    name, pronoun = rng.choice(_PEOPLE)
    items = rng.sample(_ITEMS, count)
    place = rng.choice(_PLACES)
    bought = " and ".join(f"{k} {item} for {price} dollars each" for (k, price), item in zip(lines, items))
    asked = [f"{name} buys {bought} at the {place}."]
    said = [
        step(rng, f"{pronoun} pays for the {k} {item}", f"{k} * {price} = {k * price} dollars", first=i == 0)
        for i, ((k, price), item) in enumerate(zip(lines, items))
    ]
    said += _added_up(rng, [k * price for k, price in lines], ["both of the costs are added up"] * count, "dollars")
    answer, gets = total, "pays"
    if ood:
        asked.append(f"{name} hands over 100 dollars. Find the change.")
        answer, gets = 100 - total, "gets"
        said.append(step(rng, "the cost is taken from 100 dollars", f"100 - {total} = {answer} dollars"))
    else:
        asked.append(rng.choice(("How much is the total cost?", f"How many dollars does {name} pay?")))
    said.append(ending(rng, f"the number of dollars that {name} {gets} is {answer}"))
    return _made(f"shop {lines}", asked, said, answer)


def _compare(rng: Random, ood: bool) -> Made:
    """People whose counts are given relative to each other; asks for the sum."""
    counts = [0]
    while min(counts) < 1 or sum(counts) > _MAX:
        counts = [rng.randint(5, 30)]
        relations: list[tuple[str, int]] = []
        for _ in range(3 if ood else rng.randint(1, 2)):
            relation = rng.choice(("more", "fewer", "times"))
            k = rng.randint(2, 4) if relation == "times" else rng.randint(2, 20)
            counts.append(_result(relation, counts[-1], k))
            relations.append((relation, k))
    names = rng.sample(_NAMES, len(counts))
    items = rng.choice(_ITEMS)
    asked, said = [f"{names[0]} has {counts[0]} {items}."], [opening(rng, f"{names[0]} has {counts[0]} {items}")]
    for i, (relation, k) in enumerate(relations, start=1):
        than = "times as many as" if relation == "times" else f"{relation} {items} than"
        clause = f"{names[i]} has {k} {than} {names[i - 1]}"
        asked.append(f"{clause}.")
        said.append(step(rng, clause, f"{counts[i - 1]} {_SIGNS[relation]} {k} = {counts[i]} {items}"))
    said += _added_up(rng, counts, ["", *(f"we add the {items} of {name}" for name in names[1:])], items)
    asked.append(f"Find the sum of all the {items}." if ood else f"How many {items} do they have together?")
    said.append(ending(rng, f"the number of {items} that they have is {sum(counts)}"))
    return _made(f"compare {counts[0]} {relations}", asked, said, sum(counts))


def _added_up(rng: Random, parts: list[int], clauses: list[str], unit: str) -> list[str]:
    """A sentence for each part after the first, which is added to those before it."""
    sums = [sum(parts[: i + 1]) for i in range(len(parts))]
    return [step(rng, clauses[i], f"{sums[i - 1]} + {parts[i]} = {sums[i]} {unit}") for i in range(1, len(parts))]


def _made(key: str, asked: list[str], said: list[str], answer: int) -> Made:
    return answered("arithmetic", key, " ".join(asked), said, answer)


def make(rng: Random, level: int) -> Made:
    """A word problem; at ``level`` 1 as long as training ever has, and asked in other words; at 2 longer than that."""
    if level == 1:
        return _story(rng, level)
    kind = rng.choice((_story, _story, _shop, _compare))
    return _story(rng, level) if kind is _story else kind(rng, level == 2)
