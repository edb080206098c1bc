"""Many requests at once: whatever comes, waits, leaves or makes room, each gets what it would have got alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fly.cache import OutOfBlocks, PagedKVCache
from fly.drafts import CascadeDraft, NGramDraft, SingleDraft, TreeDraft
from fly.engine import Engine
from fly.engine.scheduler import Scheduler, _divide
from fly.ops import derive
from fly.policies import AcceptancePolicy, Exact, FLy, LossySampling
from fly.runner.request import Row
from fly.runner.runner import Runner
from fly.types import SamplingParams
from tests.toys import HashModel

TARGET, NEAR, TINY = HashModel(), HashModel(noise=0.2), HashModel(noise=0.5)

STRATEGIES = {
    "none": lambda blocks, size: None,
    "model": lambda blocks, size: SingleDraft(NEAR, cache_tokens=blocks * size, block_size=size),
    "levels": lambda blocks, size: CascadeDraft(
        [
            NGramDraft(),
            SingleDraft(TINY, cache_tokens=blocks * size, block_size=size),
            SingleDraft(NEAR, cache_tokens=blocks * size, block_size=size),
        ]
    ),
    "tree": lambda blocks, size: TreeDraft(
        NEAR, depth=3, nodes=5, width=2, cache_tokens=blocks * size, block_size=size
    ),
}
POLICIES: tuple[AcceptancePolicy, ...] = (Exact(), FLy(window=2, hold=0), LossySampling(2.0))


@dataclass(frozen=True)
class Asked:
    """A request as data."""

    prompt: tuple[int, ...]
    temperature: float = 0.0
    max_tokens: int = 8
    seed: int = 0
    policy: int = 0
    k: int = 3
    stop: tuple[int, ...] = ()
    priority: int = 0
    presence: float = 0.0
    client: str = ""
    scored: int | None = None  # the first prompt token to score

    def row(self) -> Row:
        scores = self.scored is not None and max(1, self.scored) < len(self.prompt)
        params = SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens if scores else max(1, self.max_tokens),
            presence_penalty=self.presence,
            prompt_logprobs=None if self.scored is None else 2,
            prompt_logprobs_start=self.scored or 0,
        )
        return Row(
            list(self.prompt),
            len(self.prompt),
            params,
            POLICIES[self.policy],
            self.seed,
            self.k,
            stop_ids=frozenset(self.stop),
            priority=self.priority,
            client=self.client,
        )


def make_scheduler(name: str, blocks: int, size: int, **options: int) -> Scheduler:
    runner = Runner(TARGET, PagedKVCache(TARGET.config, blocks, size))
    return Scheduler(Engine(runner, STRATEGIES[name](blocks, size)), **options)


def outcome(row: Row) -> tuple[tuple[int, ...], str | None, list[dict[int, float]]]:
    return tuple(row.tokens[row.prompt_length :]), row.finish_reason, row.prompt_logprobs


@cache
def alone(name: str, asked: Asked) -> tuple[tuple[int, ...], str | None, list[dict[int, float]]]:
    """What a request yields by itself: an engine of its own, no scheduler, caches that hold everything."""
    engine = Engine(Runner(TARGET, PagedKVCache(TARGET.config, 64, 4), share=False), STRATEGIES[name](64, 4))
    row = asked.row()
    if not row.params.max_tokens:
        engine.step([], prefill=[(row, len(row.tokens) - 1)])
    while not row.finish_reason:
        engine.step([row])
    return outcome(row)


def run(scheduler: Scheduler, most: int = 2000) -> int:
    """Step to the end; the number of steps."""
    steps = 0
    while scheduler:
        scheduler.step()
        steps += 1
        assert steps < most, "requests are stuck"
    return steps


def whole(scheduler: Scheduler) -> bool:
    return all(a.num_free == a.num_blocks and not a.sequences() for a in scheduler.allocators)


tokens = st.integers(0, 16)
BEGINNINGS = ((), (1, 2, 3, 4, 5, 6), (1, 2, 3, 9, 9, 9, 8, 7), (5,) * 12)
requests = st.builds(
    Asked,
    prompt=st.builds(
        lambda start, rest: (*start, *rest),
        st.sampled_from(BEGINNINGS),
        st.lists(tokens, min_size=1, max_size=14).map(tuple),
    ),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
    max_tokens=st.integers(0, 14),
    seed=st.integers(0, 3),
    policy=st.integers(0, len(POLICIES) - 1),
    k=st.integers(0, 4),
    stop=st.sampled_from([(), (3,), (0, 7)]),
    priority=st.sampled_from([0, 0, 0, 1, -1]),
    presence=st.sampled_from([0.0, 0.0, 1.5]),
    client=st.sampled_from(["a", "a", "a", "b", "c"]),
    scored=st.none() | st.integers(0, 20),
)


class Simulation(RuleBasedStateMachine):
    """Requests arrive, are cancelled, drive each other out of caches that are far too small, and share beginnings."""

    @initialize(
        name=st.sampled_from(list(STRATEGIES)),
        room=st.integers(54, 100),  # of which the largest request takes 26 + 14 + 12 tokens
        size=st.integers(1, 5),
        max_rows=st.integers(1, 6),
        step_tokens=st.integers(1, 60),
        scores=st.integers(0, 20),
    )
    def start(self, name: str, room: int, size: int, max_rows: int, step_tokens: int, scores: int) -> None:
        self.name = name
        self.scheduler = make_scheduler(name, -(-room // size), size, max_rows=max_rows, step_tokens=step_tokens)
        self.scheduler._max_scored = max_rows + scores
        self.open: dict[int, tuple[Row, Asked]] = {}
        self.told: dict[int, list[int]] = {}

    @rule(asked=requests, n=st.sampled_from([1, 1, 1, 3]))
    def arrive(self, asked: Asked, n: int) -> None:
        first = asked.row()
        n = n if first.params.max_tokens else 1  # there is nothing more to say of it
        for number in range(n):
            seed = derive(asked.seed, -number) if number else asked.seed
            row = first.sample(seed) if number else first
            self.scheduler.add(row)
            same = Asked(**{**vars(asked), "seed": seed})
            self.open[row.id], self.told[row.id] = (row, same), []

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        row, _ = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
        self.scheduler.cancel(row)
        assert row.finish_reason == "cancelled"
        assert all(not a.table(row.id) for a in self.scheduler.allocators)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            told = self.scheduler.step()
            for id_, new in told.items():
                self.told[id_] += [token.id for token in new]
            self.check_finished()

    def check_finished(self) -> None:
        for id_, (row, asked) in list(self.open.items()):
            if row.finish_reason:
                assert row.error is None
                assert outcome(row) == alone(self.name, asked)
                assert self.told[id_] == row.tokens[row.prompt_length :]
                del self.open[id_]

    @invariant()
    def pages_belong_to_those_that_run(self) -> None:
        if hasattr(self, "scheduler"):
            for client, of_client in self.scheduler._clients.items():
                assert of_client.rows == sum(row.client == client for row in self.scheduler.running)
                assert of_client.rows or of_client.waiting
            for rows in (self.scheduler.running, *(each.waiting for each in self.scheduler._clients.values())):
                assert rows == sorted(rows, key=lambda row: (row.priority, row.id))
            running = {row.id for row in self.scheduler.running}
            assert {row.id for row in self.scheduler.waiting} | running == set(self.open)
            assert len(running) <= self.scheduler.max_rows
            for allocator in self.scheduler.allocators:
                assert set(allocator.sequences()) <= running

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            for _ in range(3000):
                if not self.scheduler:
                    break
                self.step(1)
            assert not self.open, "requests are stuck"
            assert whole(self.scheduler)


TestSimulation = Simulation.TestCase
TestSimulation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(list(STRATEGIES)),
    st.lists(requests, min_size=1, max_size=8),
    st.integers(27, 60),
    st.integers(1, 80),
)
def test_a_batch_gives_what_each_gives_alone(name: str, batch: list[Asked], blocks: int, step_tokens: int) -> None:
    scheduler = make_scheduler(name, blocks, 2, step_tokens=step_tokens)
    rows = [asked.row() for asked in batch]
    for row in rows:
        scheduler.add(row)
    run(scheduler)
    for row, asked in zip(rows, batch):
        assert outcome(row) == alone(name, asked)
    assert whole(scheduler)


def test_under_pressure_the_latest_makes_room_and_loses_nothing() -> None:
    scheduler = make_scheduler("model", 20, 2)
    batch = [Asked((number, 1, 2), temperature=1.0, seed=number, max_tokens=24) for number in range(5)]
    rows = [asked.row() for asked in batch]
    for row in rows:
        scheduler.add(row)
    run(scheduler)
    assert rows[0].stats.preempted == 0 < sum(row.stats.preempted for row in rows)
    assert [tuple(row.tokens[3:]) for row in rows] == [alone("model", asked)[0] for asked in batch]


def test_a_long_prompt_holds_up_neither_those_that_decode_nor_short_prompts() -> None:
    scheduler = make_scheduler("none", 100, 4, step_tokens=8)
    decoding, long, short = Asked((1, 2), max_tokens=40), Asked((3,) * 80), Asked((4, 5))
    rows = [asked.row() for asked in (decoding, long, short)]
    scheduler.add(rows[0])
    scheduler.step()
    for row in rows[1:]:
        scheduler.add(row)
    for number in range(2, 4):
        told = scheduler.step()
        assert len(told[rows[0].id]) == 1 and rows[0].generated == number
    assert rows[2].generated >= 1  # after all of its prompt in the first of those steps
    assert not rows[1].generated
    run(scheduler)
    assert [tuple(row.tokens[row.prompt_length :]) for row in rows] == [
        alone("none", asked)[0] for asked in (decoding, long, short)
    ]


def test_a_drafter_takes_in_a_long_prompt_by_the_same_chunks() -> None:
    scheduler = make_scheduler("levels", 60, 4, step_tokens=20)
    asked = Asked((3, 1, 4, 1, 5) * 12)
    row = asked.row()
    scheduler.add(row)
    assert scheduler.engine.strategy is not None
    caches = scheduler.allocators
    sizes = []
    while not row.generated:
        scheduler.step()
        sizes.append([cache.length(row.id) for cache in caches])
    assert sizes == [[32, 32, 32], [60, 32, 32]]  # the last chunk gives the first token, and nothing waits for drafters
    run(scheduler)
    assert tuple(row.tokens[60:]) == alone("levels", asked)[0]


def test_priority_goes_first_and_makes_others_wait() -> None:
    scheduler = make_scheduler("none", 20, 2, max_rows=1)
    low, high = Asked((1, 2, 3), max_tokens=10, priority=5).row(), Asked((4, 5), max_tokens=3).row()
    scheduler.add(low)
    scheduler.step()
    scheduler.add(high)
    while not high.finish_reason:
        scheduler.step()
    assert low.generated <= 2 and low.stats.preempted == 1
    run(scheduler)
    assert tuple(low.tokens[3:]) == alone("none", Asked((1, 2, 3), max_tokens=10))[0]


@settings(deadline=None, max_examples=8)
@given(st.sampled_from(["none", "model"]), st.integers(0, 20), st.sampled_from(["rows", "pages"]), st.integers(0, 9))
def test_a_newcomer_has_its_first_token_within_two_steps(name: str, after: int, full: str, seed: int) -> None:
    """Whatever another asked for before, and whether rows or pages are what there is too little of."""
    room = {"rows": {"blocks": 2000, "max_rows": 40}, "pages": {"blocks": 160}}[full]
    scheduler = make_scheduler(name, size=4, **room)
    for number in range(8):
        first = Asked((number, *range(1, 9)), temperature=1.0, seed=number, max_tokens=40, client="heavy").row()
        for row in (first, *(first.sample(derive(number, -sample)) for sample in range(1, 32))):
            scheduler.add(row)
    for _ in range(after):
        scheduler.step()
    assert scheduler.waiting
    asked = Asked((16, *range(16)), temperature=1.0, seed=seed, max_tokens=5, client="new")
    new = asked.row()
    scheduler.add(new)
    scheduler.step()
    scheduler.step()
    assert new.generated
    while not new.finish_reason:
        scheduler.step()
    assert tuple(new.tokens[17:]) == alone(name, asked)[0] and new.stats.preempted == 0


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=4), st.integers(1, 9), st.integers(4, 40))
def test_clients_that_go_on_asking_are_served_alike(sizes: list[int], max_rows: int, steps: int) -> None:
    """In rows, up to one; and where there are fewer rows than clients, in tokens, up to about one request."""
    scheduler = make_scheduler("none", 400, 4, max_rows=max_rows)
    rows: dict[str, list[Row]] = {}
    for number, size in enumerate(sizes):  # the first has asked for everything before the others come
        asked = Asked((number, 1), max_tokens=size, client=str(number))
        rows[str(number)] = [asked.row() for _ in range(1 + steps * max_rows)]
        for row in rows[str(number)]:
            scheduler.add(row)
    for _ in range(steps):
        scheduler._admit()
        counts = [sum(row in scheduler.running for row in own) for own in rows.values()]
        assert sum(counts) == max_rows and max(counts) - min(counts) <= 1
        scheduler.step()
    if max_rows < len(sizes):
        tokens = [sum(row.generated + 2 * bool(row.generated) for row in own) for own in rows.values()]
        assert max(tokens) - min(tokens) <= 2 * (max(sizes) + 2)


def test_rows_are_shared_as_far_as_each_client_wants_them() -> None:
    scheduler = make_scheduler("none", 400, 4, max_rows=8)
    for client, count in (("a", 20), ("b", 1), ("c", 20)):
        for number in range(count):
            scheduler.add(Asked((number % 17, 1), max_tokens=30, client=client).row())
        scheduler.step()
    counts = [sum(row.client == client for row in scheduler.running) for client in "abc"]
    assert counts == [4, 1, 3]
    preempted = [row for row in scheduler.waiting if row.stats.preempted]
    assert len(preempted) == 4 and {row.client for row in preempted} == {"a"}
    run(scheduler)


@given(st.dictionaries(st.integers(), st.integers(0, 50), max_size=8), st.integers(0, 120))
def test_equal_parts(wanted: dict[int, int], amount: int) -> None:
    parts = _divide(amount, wanted)
    assert parts.keys() == wanted.keys() and all(0 <= parts[who] <= most for who, most in wanted.items())
    assert sum(parts.values()) == min(amount, sum(wanted.values()))
    level = max(parts.values(), default=0)
    assert all(parts[who] in (most, level, level - 1) for who, most in wanted.items())  # less than others: all it wants


def test_a_beginning_is_worked_out_once() -> None:
    """Requests that come together wait for the first of them; later ones find it in the cache."""
    scheduler = make_scheduler("model", 200, 4)
    start = tuple(range(1, 17)) * 2
    fed: list[int] = []

    class Counting(HashModel):
        def score(self, batch, places=None):  # type: ignore[no-untyped-def]
            fed.append(len(batch.tokens))
            return super().score(batch, places)

    scheduler.engine.runner.executor = Counting()
    batch = [Asked((*start, number), max_tokens=1) for number in range(6)]
    rows = [asked.row() for asked in batch]
    for row in rows:
        scheduler.add(row)
    run(scheduler)
    assert sum(fed) == 33 + 5  # the first whole, of the others only the last token
    assert [row.stats.cached for row in rows] == [0] + [32] * 5
    late = Asked((*start, 9, 9), max_tokens=1).row()
    scheduler.add(late)
    run(scheduler)
    assert late.stats.cached == 32 and whole(scheduler)
    scheduler.forget()
    anew = Asked((*start, 9, 9), max_tokens=1).row()
    scheduler.add(anew)
    run(scheduler)
    assert anew.stats.cached == 0 and whole(scheduler) and anew.tokens == late.tokens
    assert [tuple(row.tokens[33:]) for row in rows] == [alone("model", asked)[0] for asked in batch]


def test_samples_of_one_prompt_share_its_pages_to_the_last_token() -> None:
    scheduler = make_scheduler("none", 100, 16)
    first = Asked((1, 2, 3, 4, 5, 6, 7), temperature=1.0, max_tokens=6).row()
    rows = [first, *(first.sample(derive(0, -number)) for number in (1, 2, 3))]
    for row in rows:
        scheduler.add(row)
    scheduler.step()
    assert [row.generated for row in rows] == [1, 0, 0, 0]
    scheduler.step()
    assert [row.generated for row in rows] == [2, 1, 1, 1] and [row.stats.cached for row in rows] == [0, 6, 6, 6]
    run(scheduler)
    assert len({tuple(row.tokens) for row in rows}) > 1 and whole(scheduler)


def test_a_sample_of_a_request_that_lost_its_pages_begins_without_them() -> None:
    """Where pages are not shared, a request that made room and joins again holds nothing yet."""
    runner = Runner(TARGET, PagedKVCache(TARGET.config, 34, 1), share=False)
    scheduler = Scheduler(Engine(runner, STRATEGIES["model"](34, 1)))
    batch = [Asked((*range(2, 14), number), max_tokens=9) for number in range(4)]
    rows = [row for asked in batch for first in [asked.row()] for row in (first, first.sample(first.seed))]
    for row in rows:
        scheduler.add(row)
    run(scheduler)
    assert [tuple(row.tokens[13:]) for row in rows] == [alone("model", asked)[0] for asked in batch for _ in range(2)]
    assert sum(row.stats.preempted for row in rows) > 0 and whole(scheduler)


def test_out_of_blocks_in_the_middle_of_a_step_is_no_error_of_anybody() -> None:
    """A strategy that takes more room than it says: the latest makes room, none is lost."""

    engine = Engine(
        Runner(TARGET, PagedKVCache(TARGET.config, 99, 2)), SingleDraft(NEAR, cache_tokens=36, block_size=2)
    )
    engine.setup.caches.clear()
    scheduler = Scheduler(engine)
    batch = [Asked((number, 1), max_tokens=20) for number in range(4)]
    rows = [asked.row() for asked in batch]
    for row in rows:
        scheduler.add(row)
    run(scheduler)
    assert [tuple(row.tokens[2:]) for row in rows] == [alone("model", asked)[0] for asked in batch]
    assert sum(row.stats.preempted for row in rows) > 0


def test_a_request_that_no_cache_holds_is_refused_and_one_that_cannot_go_on_ends_alone() -> None:
    scheduler = make_scheduler("none", 10, 2)
    with pytest.raises(ValueError, match="15 tokens and max_tokens 8 do not fit"):
        scheduler.add(Asked((1,) * 15).row())
    scheduler.engine.runner.cache.allocator.resize("somebody else", 14)
    row = Asked((1, 2, 3)).row()
    scheduler.add(row)
    run(scheduler)
    assert row.finish_reason == "error" and isinstance(row.error, OutOfBlocks)


@pytest.mark.parametrize(("max_rows", "step_tokens"), [(0, 1), (1, 0)])
def test_limits_of_a_step_are_positive(max_rows: int, step_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_rows {max_rows} and step_tokens {step_tokens}"):
        make_scheduler("none", 4, 2, max_rows=max_rows, step_tokens=step_tokens)


class Failing(Exact):
    """Fails once a row has so many tokens behind it."""

    def accept_probs(self, target, draft):  # type: ignore[no-untyped-def]
        if int(target.generated_B.max()) > 2:
            raise RuntimeError("bad rule")
        return super().accept_probs(target, draft)


def test_a_rule_that_fails_ends_its_own_request_only() -> None:
    scheduler = make_scheduler("model", 99, 2)
    good, bad = Asked((1, 2)), Asked((3, 4)).row()
    bad.policy = Failing()
    row = good.row()
    scheduler.add(bad)
    scheduler.add(row)
    with pytest.warns(RuntimeWarning, match="bad rule"):
        run(scheduler)
    assert bad.finish_reason == "error" and "bad rule" in str(bad.error)
    assert tuple(row.tokens[2:]) == alone("model", good)[0] and whole(scheduler)


@pytest.mark.parametrize("itself", [True, False])
def test_a_row_may_be_cancelled_from_within_a_step(itself: bool) -> None:
    scheduler = make_scheduler("model", 60, 4, max_rows=2)
    rows = [Asked((number, 2), max_tokens=12).row() for number in range(3)]  # the third waits

    def cancel(token: int) -> bool:
        if rows[0].generated == 4:
            for other in rows[:1] if itself else rows[1:]:
                scheduler.cancel(other)
        return False

    rows[0].on_token = cancel
    for row in rows:
        scheduler.add(row)
    run(scheduler)
    cancelled = rows[:1] if itself else rows[1:]
    assert all(row.finish_reason == ("cancelled" if row in cancelled else "length") for row in rows)
    assert whole(scheduler)


@pytest.mark.filterwarnings("ignore:a step failed and is taken again")
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("scored", [None, 3])
@pytest.mark.parametrize(
    "length", range(62, 72)
)  # the chunk that fails is the last but one, or the last, or all but it
def test_a_chunk_that_was_read_before_an_error_is_not_read_again(name: str, scored: int | None, length: int) -> None:
    """Its tokens are cached by then, and its scores are noted: what its request yields is what it yields alone."""
    scheduler = make_scheduler(name, 400, 4, max_rows=4, step_tokens=1)
    failing = Row([1, 2, 3], 3, SamplingParams(temperature=0.0, max_tokens=9), Exact(), 0, 0)

    def fail(token: int) -> bool:  # after the forward of a step
        if failing.generated > 2:
            raise RuntimeError("this request fails")
        return False

    failing.on_token = fail

    asked = Asked(tuple(n % 5 for n in range(length)), max_tokens=8 if scored is None else 0, scored=scored)
    scheduler.add(failing)
    scheduler.step()
    row = asked.row()
    scheduler.add(row)
    while scheduler:
        scheduler.step()
    assert failing.finish_reason == "error" and "this request fails" in str(failing.error)
    assert outcome(row) == alone(name, asked)
