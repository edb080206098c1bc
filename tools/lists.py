"""Problems about lists of words or digits to rearrange, filter, count and join."""

from __future__ import annotations

from random import Random

from tools.wording import Made, answered, ending, opening, step

__all__ = ["WORDS", "make"]

WORDS = (
    "apple", "bird", "cat", "door", "earth", "fish", "gold", "horse", "island", "jar", "king", "lamp",
    "moon", "night", "ocean", "paper", "queen", "river", "snow", "tree", "uncle", "voice", "water", "year",
    "bread", "cloud", "dog", "egg", "fire", "grass", "hat", "ice", "key", "leaf", "milk", "nose",
)  # fmt: skip
_NUMBERS = tuple(str(i) for i in range(10))
_SEPARATORS = ("and", "or", "plus", "then")

_LENGTHS = ((3, 5), (6, 6), (6, 8))  # by level
# Training teaches rearranging; only out-of-domain problems ask to pick items by their kind.
_MOVES = ("reverse", "first", "last", "front", "end", "swap")
_OPS: dict[tuple[bool, bool], tuple[str, ...]] = {  # by (words, out of domain)
    (True, False): _MOVES,
    (True, True): (*_MOVES, "remove", "replace"),
    (False, False): (*_MOVES, "up", "down"),
    (False, True): (*_MOVES, "up", "down", "remove", "above"),
}


def _apply(op: str, rng: Random, items: list[str], pool: tuple[str, ...]) -> tuple[str, str, list[str]]:
    """Return a step's request in the prompt, its clause in the solution, and the list after it."""
    match op:
        case "reverse":
            return "reverse the list", "we reverse the list so that the last one comes first", items[::-1]
        case "first" | "last":
            n = rng.randint(2, max(2, len(items) - 1))
            after = items[:n] if op == "first" else items[-n:]
            return f"keep the {op} {n}", f"we keep only the {op} {n} of the list", after
        case "front" | "end":
            new = rng.choice(pool)
            after = [new, *items] if op == "front" else [*items, new]
            return f"put {new} at the {op}", f"we put {new} at the {op} of the list", after
        case "swap":
            after = [items[-1], *items[1:-1], items[0]] if len(items) > 1 else items
            return "swap the first and the last", "we swap the first and the last of the list", after
        case "up" | "down":
            way = "from low to high" if op == "up" else "from high to low"
            return f"sort {way}", f"we sort the list {way}", sorted(items, key=int, reverse=op == "down")
        case "remove":
            old = rng.choice(items)
            return f"remove every {old}", f"we take every {old} out of the list", [x for x in items if x != old]
        case "replace":
            old, new = rng.choice(items), rng.choice(pool)
            after = [new if x == old else x for x in items]
            return f"replace every {old} with {new}", f"we replace every {old} in the list with {new}", after
        case _:
            k = rng.randint(1, 7)
            return (
                f"keep those above {k}",
                f"we keep only those of the list above {k}",
                [x for x in items if int(x) > k],
            )


def make(rng: Random, level: int) -> Made:
    """Apply one or two operations (out of domain, ``level`` 2: three) to a list; the last may count or join it."""
    words = rng.random() < 0.7
    pool = WORDS if words else _NUMBERS
    ops = _OPS[words, level == 2]
    length = rng.randint(*_LENGTHS[level])
    state: list[str] = []
    while not state:
        items = rng.sample(pool, length)
        if words and rng.random() < 0.5:  # repeats make counting non-trivial
            items[rng.randrange(length)] = rng.choice(items)
        requests, clauses, states, state = [], [], [], items
        for op in rng.sample(ops, 3 if level == 2 else rng.randint(1, 2)):
            request, clause, state = _apply(op, rng, state, pool)
            requests.append(request)
            clauses.append(clause)
            states.append(" ".join(state))
            if not state:
                break
    how = rng.choice(("list", "list", "list", "count", "join"))
    if how == "count":
        target = rng.choice(state if words else items)
        requests.append(f"count how often {target} occurs")
        clauses.append(f"we count how often {target} occurs in the list")
        states.append(str(state.count(target)))
    elif how == "join":
        separator = rng.choice(_SEPARATORS)
        requests.append(f"join them with {separator}")
        clauses.append(f"we join the ones in the list with {separator}")
        states.append(f" {separator} ".join(state))
    answer, listed, wanted = states[-1], " ".join(items), ", then ".join(requests)
    prompt = rng.choice(
        (
            f"Here are some entries: {listed}. Please {wanted}.",
            f"My notes say {listed}. I want you to {wanted}.",
        )
        if level == 2
        else (
            f"The list is {listed}. {wanted[0].upper()}{wanted[1:]}. What is the result?",
            f"Take the list {listed}. {wanted[0].upper()}{wanted[1:]}.",
            f"Given the list {listed}, {wanted}.",
            f"What is the result when you take {listed} and {wanted}?",
        )
    )
    sentences = [opening(rng, f"the list is {listed}")]
    sentences += [step(rng, clause, after) for clause, after in zip(clauses, states)]
    sentences.append(ending(rng, f"the result of the task is {answer}"))
    return answered("text", f"list {listed} {wanted}", prompt, sentences, answer)
