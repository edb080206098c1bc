"""What Python hands to compiled code is checked by who is called: memory that is too short is refused, by its name."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable
from ctypes import byref, c_int32, c_int64, c_uint32
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fly import SamplingParams
from fly.backends import executor_of
from fly.backends.cpu import CpuExecutor, available, library, packed, why_not
from fly.backends.cpu.blocks import KINDS, eight_bits
from fly.backends.cpu.head import CpuHead
from fly.backends.cpu.host import Blocks, lay_rules
from fly.backends.cpu.library import CRounds, Sampling, fast_call, load
from fly.backends.cpu.packed import PackedLlama
from fly.cache import PagedKVCache
from fly.drafts import BlockDraft, DraftStrategy, Eagle3Draft, LookupDraft, NGramDraft, SingleDraft
from fly.engine import Engine
from fly.policies import AcceptancePolicy, Exact, parse_policy
from fly.runner.executor import Batch, DraftSpec, Executor, Lookup, RoundRow
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.runner.sampling import BatchSampling
from fly.testing.blocks import toy_vocabulary
from tests import test_block, test_eagle, test_rounds
from tests.test_same_rule import Sure
from tests.toys import random_llama

VARIANTS = [name for name in available() if name != "torch"]
pytestmark = pytest.mark.skipif(not VARIANTS, reason=why_not() or "compiled kernels are here")
if VARIANTS:
    TARGET, DRAFT, HEADED = test_rounds.TARGET, test_rounds.DRAFTS[1], test_eagle.target_on(VARIANTS[0])
    HEAD = CpuHead(test_eagle.make_head(12), VARIANTS[0])
    BLOCK_HEAD = test_block.runs("dspark", kernels=VARIANTS[0])
    PARALLEL_HEAD = test_block.runs("p-eagle", kernels=VARIANTS[0])
SOURCES = Path(library.__file__).with_name("src")


def packing() -> None:
    """Models in w8a8, in blocks and as they are, with the embedding apart and without."""
    PackedLlama(random_llama(0, layers=1), f"{VARIANTS[0]}-w8a8")
    family = random_llama(0, layers=1, tied=True)
    family.layers[0].self_attn.o_proj.bias = torch.nn.Parameter(torch.ones(32), requires_grad=False)
    PackedLlama(family, VARIANTS[0]).embedding()
    blocked = PackedLlama(family, f"{VARIANTS[0]}-w4a8")
    load().fly_set_embedding(blocked.handle, KINDS["Q8_0"], eight_bits(family.embed_tokens.weight))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packed, "_SKETCHED", 1)
        PackedLlama(family, f"{VARIANTS[0]}-w4")
    CpuHead(test_eagle.make_head(12), VARIANTS[0]).packed  # noqa: B018
    test_block.runs("dspark", kernels=VARIANTS[0]).share(HEADED)


def packing_masks() -> None:
    test_block.runs("p-eagle", kernels=VARIANTS[0]).share(HEADED)


def stored(executor: CpuExecutor) -> tuple[PagedKVCache, Row]:
    """A cache with room for 12 tokens of one row, of whose prompt 5 are stored."""
    cache = PagedKVCache.for_model(executor.packed, 64)
    cache.resize(0, 12)
    return cache, Row([1, 2, 3, 4, 5, 6], 6, SamplingParams(temperature=1.0), Exact(), 1, 4)


def forwards() -> None:
    executor = executor_of(random_llama(0, layers=1), VARIANTS[0])
    cache, _ = stored(executor)
    mask = torch.ones(2, 5, dtype=torch.bool).tril(3)
    tokens, positions = torch.tensor([1, 2, 3]), torch.arange(3)
    executor.packed.logits(executor.packed(tokens, positions, cache.batch([0], [0], [3])))
    executor.score(Batch([4, 5], [3, 4], cache.batch([0], [3], [2], [mask])), [1], states=[1])


def steps() -> None:
    """Of a head, by hidden states of its target and then by its own."""
    cache = PagedKVCache.for_model(HEAD.packed, 64)
    cache.resize(0, 12)
    states_TF = torch.randn(3, 3 * 32)
    _, x_TC = HEAD.begin(Batch([1, 2, 3], [0, 1, 2], cache.batch([0], [0], [3])), states_TF, [2])
    HEAD.step(Batch([4], [3], cache.batch([0], [3], [1])), x_TC, [0])


def drafts() -> None:
    executor = executor_of(random_llama(0, layers=1), VARIANTS[0])
    cache, row = stored(executor)
    executor.score(Batch([1, 2, 3, 4, 5], list(range(5)), cache.batch([0], [0], [5])))
    sampling = BatchSampling.of([row.params])
    spec = DraftSpec(lookup=Lookup(3, 1, 4), with_logits=True)
    executor.extend(Batch([6], [5], cache.batch([0], [5], [1])), spec, [row], [4], sampling, [7])


def rounds(
    target: Executor, strategy: DraftStrategy, temperature: float, rule: AcceptancePolicy | str = "exact"
) -> None:
    """Rounds of one row in one call, as long as they last."""
    made = Engine(Runner(target, PagedKVCache(target.config, 30, 4), control_ids=(3, 4)), strategy)
    made.stretch = test_rounds.FOREVER
    params = SamplingParams(temperature=temperature, max_tokens=12)
    policy = (parse_policy(rule) if isinstance(rule, str) else rule).bind(toy_vocabulary(target.config.vocab_size))
    row = Row([1, 2, 3, 1, 2, 3, 1], 7, params, policy, 1, 4)
    while not row.finish_reason:
        made.step([row])
    made.release(row)


def decisions() -> None:
    """What belongs to no model."""
    logits, probs = torch.randn(3, 11), torch.full((3, 11), 1 / 11)
    how = (Sampling * 1)(Sampling(1.0, 1.0, -torch.inf, 0))
    fast_call("fly_kept")(logits, 3, 11, how, torch.empty(3, 1, 3))
    blocks = Blocks(1, 2, 1, 4)
    blocks.count[0] = 2
    blocks.drafted[1] = 1
    rules = lay_rules([(Exact(), True, 0, RoundRow([1], 1, 2, (), Exact(), 0, True))], None, None, 11)
    fast_call("fly_decide")(byref(rules), byref(blocks.c), array("q", [9]), logits, probs[:2])
    fast_call("fly_uniforms")(array("q", [1, 2]), array("q", [3, 4]), 0, 3, array("f", bytes(24)))


CALLS: dict[str, Callable[[], None]] = {
    "packing": packing,
    "packing of masks": packing_masks,
    "forwards": forwards,
    "steps": steps,
    "drafts": drafts,
    "decisions": decisions,
    "drawn chains": lambda: rounds(TARGET, SingleDraft(DRAFT), 1.0),
    "chains with clauses": lambda: rounds(TARGET, SingleDraft(DRAFT), 0, "exact | ~control & ~token(digits)"),
    "copies": lambda: rounds(TARGET, NGramDraft(3, 1, 4), 0),
    "a rule in Python": lambda: rounds(
        TARGET, SingleDraft(DRAFT), 0, "exact | (control | ~control) & room(1) & room(2) & room(3) & room(4) & room(5)"
    ),
    "a rule that reads the draft": lambda: rounds(TARGET, SingleDraft(DRAFT), 0, Exact() | Sure()),
    "heads": lambda: rounds(HEADED, Eagle3Draft(HEAD), 0),
    "block heads": lambda: rounds(HEADED, BlockDraft(BLOCK_HEAD), 1.0),
    "parallel heads": lambda: rounds(HEADED, LookupDraft(NGramDraft(2, 1, 4), BlockDraft(PARALLEL_HEAD)), 1.0),
}
WILL_DO = {
    "start", "count", "control", "stops", "draft_logits",  # this call does not use it
    # One argument there says by its size how many values there are.
    "score", "step", "uniforms", "mismatch", "decide_compiled", "decisions",
}  # fmt: skip
NAME = re.compile(r"compiled code was given \d+ bytes of '([^']+)', and needs \d+")


@pytest.fixture(scope="module", autouse=True)
def _with_targets_matrices() -> None:
    """A block head copies matrices of its target when it first drafts for it, and not again."""
    CALLS["block heads"]()
    CALLS["parallel heads"]()


def tried(call: Callable[[], None]) -> tuple[set[str], set[str]]:
    """What happens if one piece of memory that ``call`` hands over is a byte short, each in turn, or has nothing where
    a byte less will do: the names that it is refused by, and who handed over what will do in both cases. Of what the
    same argument of the same line hands over again and again, the first three pieces and the last are tried."""
    found, will_do, seen, short, left = set[str](), set[str](), 0, 0, 0
    handed: dict[tuple[Any, ...], list[int]] = {}
    real, label, caller, argument = library._extent, "", (0, 0), 0

    def one_short(values: Any) -> tuple[int, int]:
        nonlocal seen, label, caller, argument
        seen += 1
        at, size = real(values)
        if short and seen != short:
            return at, size
        frame = sys._getframe(1)  # a structure's ``hand`` knows the name
        above: Any = frame.f_back
        name = frame.f_locals.get("name") or above.f_code.co_name
        if short:
            label = name
            return at, size - 1 if left else 0
        argument = argument + 1 if caller == (id(above), above.f_lasti) else 0
        caller = id(above), above.f_lasti
        if size > 0:
            lines = [(each.f_code, each.f_lineno) for each in (frame, above, above.f_back)]
            handed.setdefault((name, argument, *lines), []).append(seen)
        return at, size

    call()  # the first call packs weights, the others hand over the same again and again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_extent", one_short)
        call()
        for piece in sorted({number for each in handed.values() for number in (*each[:3], each[-1])}):
            short = piece
            for byte_less in (True, False):
                seen, left = 0, byte_less
                try:
                    call()
                except ValueError as error:
                    found.update(NAME.findall(str(error)))
                    break
            else:
                will_do.add(label)
    return found, will_do


def test_memory_that_is_too_short_is_refused_by_name() -> None:
    """Whatever it is: each name that the sources check for is met."""
    found = {name: tried(call) for name, call in CALLS.items()}
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCES.iterdir())
    checked = set(re.findall(r'holds(?:_or_none)?\("([^"]+)"', source))
    assert set.union(*(names for names, _ in found.values())) == checked, found
    assert set.union(*(labels for _, labels in found.values())) == WILL_DO, found


@settings(max_examples=600)
@given(data=st.data())
def test_numbers_may_be_anything(data: st.DataObject) -> None:
    """One number of what a call hands over is another one. It is refused, or may do; a sanitizer sees what it reads."""
    library_, name = library.load(), data.draw(st.sampled_from(["fly_score", "fly_draft", "fly_rounds"]))
    real = getattr(library_, name)
    call = data.draw(st.sampled_from([each for each in CALLS if "packing" not in each and each != "decisions"]))

    def changed(*arguments: Any) -> None:
        structures = [each._obj for each in arguments if hasattr(each, "_obj")]
        for structure in list(structures):
            structures += [*vars(structure)["row"]] if isinstance(structure, CRounds) else []
        structure = data.draw(st.sampled_from(structures))
        kinds = {c_int32, c_int64, c_uint32}
        names = [each for each, kind in structure._fields_ if kind in kinds and not each.endswith("_bytes")]
        field = data.draw(st.sampled_from(names))
        now = getattr(structure, field)
        setattr(structure, field, data.draw(st.sampled_from([now - 1, now + 1, 0, -1, -(2**31), 7, 2**31 - 1])))
        real(*arguments)
        raise Over

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library_, name, changed)
        try:
            CALLS[call]()
        except (ValueError, IndexError, MemoryError, Over) as error:
            event(f"{call}: {type(error).__name__}")


class Over(Exception):
    """Nothing is made of the result."""
