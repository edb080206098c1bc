"""Random blocks on which an acceptance policy is tested: target, draft and noise of a few rows.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache, partial, wraps
from types import CodeType
from typing import Any, Literal, TypeVar, get_origin

import torch
from torch import Tensor

from fly.expressions import hints_of
from fly.ops import one_hot
from fly.policies import AcceptancePolicy, verify
from fly.policies.binding import Bindable
from fly.runner.sampling import BatchSampling
from fly.testing.report import require
from fly.types import Draft, Noise, SamplingParams, Target, Verdict
from fly.vocabulary import Vocabulary

__all__ = [
    "TICK",
    "TOLERANCE",
    "Case",
    "bind_to",
    "ids_of",
    "make_block",
    "make_cases",
    "make_draft_logits",
    "markers_of",
    "once_for_each",
    "require_same",
    "rounded",
    "toy_vocabulary",
]

TOLERANCE = 1e-5  # for probabilities: distributions are float32, and steps are found to 2^-24
TICK = 2.0**-24  # the smallest step of the engine's uniform numbers

P = TypeVar("P", bound=Bindable)
T = TypeVar("T")
Outcome = tuple[int, int, list[int]]  # accepted tokens, the next token, and a code for each drafted token

_TEXTS = [b" word", b"7", b"\n", b"Name", b"(", b" "]  # the texts of the first tokens
_MARKERS = 3  # at most this many markers are taken from a rule
_IDS, _LARGEST_ID = 8, 2**18  # and at most so many ids, below the largest of a vocabulary
_PLAIN = (str, int, tuple, list, set, frozenset)


@lru_cache
def toy_vocabulary(size: int, markers: tuple[str, ...] = ()) -> Vocabulary:
    """Make a vocabulary of ``size`` tokens of several kinds. The ``markers`` come first, and a control token last.
    Every text has an id, since a rule may ask for a text that only real vocabularies have."""
    marked = [marker.encode() for marker in markers]
    spelled = [*marked, *_TEXTS, *(f" w{number}".encode() for number in range(size))][: size - 1] + [b"<end>"]

    def token_id(text: str) -> int:
        return spelled.index(text.encode()) if text.encode() in spelled else sum(text.encode()) % size

    return Vocabulary(size, spelled, [size - 1], token_id, encode=lambda text: [token_id(text)])


def markers_of(rule: object) -> tuple[str, ...]:
    """Find texts that a rule may look for, so that blocks can hold them."""
    texts = [value for value in _constants(rule) if isinstance(value, str)]
    return tuple(text for text in dict.fromkeys(texts) if 0 < len(text) <= 20)[:_MARKERS]


def ids_of(rule: object) -> tuple[int, ...]:
    """Find numbers of a rule that may be token ids."""
    numbers = [value for value in _constants(rule) if type(value) is int]
    return tuple(number for number in dict.fromkeys(numbers) if 0 <= number < _LARGEST_ID)[:_IDS]


def _constants(rule: object) -> Iterator[object]:
    """Yield the parameters of a rule and of its parts, and the constants in the methods of a user's own class."""
    pending: list[Any] = [rule]
    kinds: dict[type, None] = {}
    while pending:
        node = pending.pop(0)
        if isinstance(node, (tuple, list, set, frozenset)):
            pending += node
        elif isinstance(node, dict):
            pending += [*node.keys(), *node.values()]
        elif not isinstance(node, Bindable):
            yield node
            continue
        hints = hints_of(type(node))
        parameters: Any = fields(node) if is_dataclass(node) else ()
        for parameter in parameters:
            if get_origin(hints.get(parameter.name)) is not Literal:
                pending.append(getattr(node, parameter.name))
        kinds |= dict.fromkeys(k for k in type(node).__mro__ if not k.__module__.startswith(("fly.", "builtins")))
    for kind in kinds:
        for method in vars(kind).values():
            yield from _written(method)


def _written(method: object) -> Iterator[object]:
    """Yield the constants in the code of a method, and those of its module that the method refers to."""
    function = method.fget if isinstance(method, property) else getattr(method, "func", method)
    if not inspect.isfunction(function) or re.fullmatch("__(?!post_init).*__", function.__name__):
        return
    pending: list[Any] = [function.__code__]
    while pending:
        part = pending.pop(0)
        if isinstance(part, CodeType):
            global_values = [function.__globals__.get(name) for name in part.co_names if not name.startswith("__")]
            pending += [*part.co_consts, *(value for value in global_values if isinstance(value, _PLAIN))]
        elif isinstance(part, (tuple, list, set, frozenset)):
            pending += part
        elif part is not function.__doc__:
            yield part


@dataclass(frozen=True, eq=False)
class _Same:
    """A rule as the key of a cache. Only the same object equals it: equal rules, such as a pickled copy, are tried
    apart."""

    rule: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.rule is other.rule

    def __hash__(self) -> int:
        return id(self.rule)


def once_for_each(function: Callable[..., T]) -> Callable[..., T]:
    """Decorate a function of a rule and of further arguments: remember what it returns for the last rules."""
    remembered = lru_cache(64)(lambda same, *arguments: function(same.rule, *arguments))

    @wraps(function)
    def call(rule: Any, *arguments: Any) -> T:
        return remembered(_Same(rule), *arguments)

    return call


def bind_to(policy: P, target: Target) -> P:
    """Bind a policy, or a condition, to a vocabulary of the target's size that has its markers. As in an engine, the
    bound policy is the same for all blocks."""
    return _bind(policy, target.logits_BKV.shape[-1])


@once_for_each
def _bind(policy: Any, size: int) -> Any:
    return policy.bind(toy_vocabulary(size, markers_of(policy)))


@dataclass(frozen=True)
class Case:
    """A block with everything a verdict depends on."""

    target: Target
    draft: Draft
    noise: Noise

    def verdict(self, policy: AcceptancePolicy) -> Verdict:
        return verify(bind_to(policy, self.target), self.target, self.draft, self.noise)

    def chances(self, policy: AcceptancePolicy) -> Tensor:
        """Return the ``accept_probs`` of a policy, [B, K] float. True and False become 1 and 0."""
        return bind_to(policy, self.target).chances(self.target, self.draft).float()

    def correction(self, policy: AcceptancePolicy, j: int) -> Tensor:
        """Return the ``correction`` of a policy after token ``j`` was rejected, [B, V]."""
        at_B = torch.full((len(self.numbers),), j)
        return bind_to(policy, self.target).correction(self.target, self.draft, at_B)

    def outcomes(self, policy: AcceptancePolicy) -> list[Outcome]:
        """Return the outcome of each row under a policy."""
        verdict = self.verdict(policy)
        why = [codes[:n] for codes, n in zip(verdict.why_BK.tolist(), self.draft.lengths_B.tolist())]
        return list(zip(verdict.accepted_B.tolist(), verdict.next_token_B.tolist(), why))

    @property
    def numbers(self) -> range:
        """The numbers of the rows."""
        return range(len(self.draft.lengths_B))

    def reversed(self) -> Case:
        """Reverse the order of the rows."""
        order = torch.tensor(self.numbers[::-1])
        return Case(self.target.rows(order), self.draft.rows(order), self.noise.rows(order))

    def alone(self, b: int, padding: int = 0) -> Case:
        """Take row ``b`` alone, with ``padding`` further columns on the right that hold other content."""
        index_B, n = torch.tensor([b]), int(self.draft.lengths_B[b])
        row = Case(self.target.rows(index_B), self.draft.rows(index_B), self.noise.rows(index_B))
        columns = torch.arange(n + padding).clamp_max(max(n - 1, 0))
        case = row._select(columns, torch.arange(n + padding + 1).clamp_max(n), row.draft.lengths_B)
        case.target.logits_BKV[:, n + 1 :] *= -1
        case.draft.tokens_BK[:, n:] = (case.draft.tokens_BK[:, n:] + 1) % case.target.logits_BKV.shape[-1]
        if case.draft.logits_BKV is not None:
            case.draft.logits_BKV[:, n:] *= -1
        case.noise.accept_BK[:, n:] = 0.0
        return case

    def cut(self, first: int, last: int) -> Case:
        """Take the tokens ``first`` to ``last`` of every draft, as if nothing else was drafted. The place after them
        repeats the target's output at ``last``."""
        columns = torch.arange(first, last + 1)
        lengths_B = (self.draft.lengths_B - first).clamp(0, last + 1 - first)
        return self._select(columns, torch.tensor([*columns, last]), lengths_B)

    def _select(self, columns: Tensor, places: Tensor, lengths_B: Tensor) -> Case:
        """Copy these columns of the draft and its coins, and these places of the target."""
        t, d = self.target, self.draft
        probs = None if t.all_greedy else t.probs_BKV[:, places]
        target = t.about(torch.tensor(self.numbers), t.logits_BKV[:, places], probs)
        values = (None if each is None else each[:, columns] for each in (d.probs_BKV, d.parents_BK, d.logits_BKV))
        draft = Draft(d.tokens_BK[:, columns], lengths_B, *values)
        return Case(target, draft, Noise(self.noise.accept_BK[:, columns], self.noise.sample_B))

    def show(self, b: int = 0) -> str:
        """Describe a row in one line. A short row is described completely."""
        n = int(self.draft.lengths_B[b])
        kind = "temperature 0" if bool(self.target.greedy_B[b]) else "sampled"
        parts = [f"{kind}, draft {self.draft.tokens_BK[b, :n].tolist()}"]
        if n <= 3:
            parts.append(f"target {rounded(self.target.probs_BKV[b, : n + 1])}")
            if self.draft.probs_BKV is not None:
                parts.append(f"draft distribution {rounded(self.draft.probs_BKV[b, :n])}")
            parts.append(f"coins {rounded(self.noise.accept_BK[b, :n])}")
        return ", ".join(parts)


def make_block(seed: int, rows: int = 4, longest: int = 9, vocab: int = 6, temperature: float | None = None) -> Case:
    """Make a random ragged block. It has certain and uncertain positions, drafts that mostly agree with the target, and
    distributions with zeros.

    ``temperature`` None mixes greedy and sampled rows; with 0 all are greedy. Tensors and lists are the caller's own: a
    policy that changes its inputs spoils no other check.
    """
    target, draft, noise = _make_parts(seed, rows, longest, vocab, temperature)
    return Case(Target(**_copied(target)), Draft(**_copied(draft)), Noise(**_copied(noise)))


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """Copy arguments that are tensors or lists of lists."""
    copies = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            copies[name] = value.clone()
        elif isinstance(value, list):
            copies[name] = [list(row) for row in value]
    return copies


@lru_cache(256)
def _make_parts(
    seed: int, rows: int, longest: int, vocab: int, temperature: float | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Make the arguments of a block's target, draft and noise."""
    generator = torch.Generator().manual_seed(seed)
    rand, randn = partial(torch.rand, generator=generator), partial(torch.randn, generator=generator)
    logits = (0.3 + 6 * rand(rows, longest + 1, 1)) * randn(rows, longest + 1, vocab)
    temperatures = [(0.7, 0.0)[b % 2] if temperature is None else temperature for b in range(rows)]
    sampling = BatchSampling.of(
        [SamplingParams(temperature=t, top_k=0 if b % 3 else vocab - 1) for b, t in enumerate(temperatures)]
    )
    drawn_from = sampling.probs(logits[:, :-1] + randn(rows, longest, vocab))
    sampled = torch.multinomial(drawn_from.flatten(0, 1) + 1e-9, 1, generator=generator).view(rows, longest)
    tokens = torch.where(rand(rows, longest) < 0.6, logits[:, :-1].argmax(-1), sampled)
    # A drafted token must have mass in the distribution it was drawn from, so mix some in. Greedy rows are one-hot.
    certain = one_hot(drawn_from, tokens)
    drawn_from = torch.where(sampling.greedy_B.view(-1, 1, 1), certain, 0.9 * drawn_from + 0.1 * certain)
    lengths = torch.randint(0, longest + 1, (rows,), generator=generator)
    lengths[0] = longest
    all_greedy = not any(temperatures)
    target = {
        "logits_BKV": logits,
        "probs": None if all_greedy else sampling.probs(logits),
        "greedy_B": sampling.greedy_B,
        "control_V": torch.arange(vocab) == vocab - 1,
        "generated_B": torch.arange(rows),
        "relaxed_B": torch.arange(rows) // 2,
        "nats_B": torch.arange(rows) / 2,
        "spent": lambda label: torch.arange(rows) / 3,
        "relaxed_at": [list(range(5, 5 + b // 2)) for b in range(rows)],
        "history": [torch.randint(0, vocab, (5 + b,), generator=generator).tolist() for b in range(rows)],
    }
    is_drawn = not (all_greedy or seed % 2)
    draft: dict[str, Any] = {"tokens_BK": tokens, "lengths_B": lengths, "probs_BKV": drawn_from if is_drawn else None}
    draft["logits_BKV"] = make_draft_logits(Draft(**draft), vocab)
    return target, draft, {"accept_BK": rand(rows, longest), "sample_B": rand(rows)}


def make_draft_logits(draft: Draft, vocab: int, surer: int = 0) -> Tensor:
    """Return logits of a draft model that drafts these tokens, [B, K, V]: logarithms of the distributions that they
    were drawn from. For a deterministic draft, the token is the likeliest one. Its id, its place
    and ``surer`` say how sure of it the model is, of a vocabulary of three: 40 %, 79 %, 99 % or 99.99 %."""
    if draft.probs_BKV is not None:
        return draft.probs_BKV.clamp_min(1e-6).log()
    leads = torch.tensor([0.3, 2.0, 5.0, 10.0])  # of the token's logit over all others
    leads_BK = leads[(draft.tokens_BK + torch.arange(draft.shape[1]) + surer) % len(leads)]
    return torch.zeros(*draft.shape, vocab).scatter_(-1, draft.tokens_BK.unsqueeze(-1), leads_BK.unsqueeze(-1))


def make_cases(count: int = 12) -> list[Case]:
    """Make random blocks, small ones first, so that the first failure is a small counterexample."""
    return [
        make_block(seed, 1 + seed % 5, 1 + 11 * seed // max(count - 1, 1), 3 + seed % 4, (0.0, 1.0, None)[seed % 3])
        for seed in range(count)
    ]


def require_same(case: Case, how: str, expected: list[Outcome], other: str, outcomes: list[Outcome]) -> None:
    """Raise ``ConformanceError`` for the first row whose outcome differs from the expected one."""
    for b, (one, two) in enumerate(zip(expected, outcomes)):
        require(one == two, f"row {b} {how} gives (accepted, next, why) {one}, {other} {two}: {case.show(b)}")


def rounded(values: Tensor) -> str:
    """Write numbers [...] as a list, with four decimals."""
    return str([[round(v, 4) for v in row] if isinstance(row, list) else round(row, 4) for row in values.tolist()])
