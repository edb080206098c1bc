"""The block allocator against a plain model of itself, and the paged tensors against a dictionary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

import fly.cache.paged
from fly.cache import BlockAllocator, OutOfBlocks, PagedKVCache
from fly.models import LlamaConfig
from tests.toys import random_llama

NAMES = ("a", "b", "c", "d", "e")
names = st.sampled_from(NAMES)
SALTS = {name: "ours" if number % 3 == 2 else "" for number, name in enumerate(NAMES)}


def snapshot(allocator: BlockAllocator) -> object:
    """All that is seen from outside."""
    known = allocator.sequences()
    return known, [(allocator.length(s), list(allocator.table(s))) for s in known], allocator.num_free


# --- the allocator ---------------------------------------------------------------------------------------


class AllocatorMachine(RuleBasedStateMachine):
    """The naive model: what each page of each sequence holds, by value, with a page shared only by ``fork``.

    A page's content is a list of stamps, one a written token. Growing a sequence writes fresh stamps through its
    table, after the copies that ``resize`` asks for; if any sequence's stamps ever change under it, some page has two
    owners that do not know of each other.
    """

    @initialize(num_blocks=st.integers(1, 14), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.pages = [[0] * block_size for _ in range(num_blocks)]
        self.content: dict[str, list[int]] = {}
        self.published: list[tuple[str, list[int]]] = []  # every content that was ever published, and under which salt
        self.stamp = 0

    def read(self, seq: str) -> list[int]:
        size, table = self.allocator.block_size, self.allocator.table(seq)
        return [self.pages[table[at // size]][at % size] for at in range(self.allocator.length(seq))]

    @rule(seq=names, n_tokens=st.integers(0, 40))
    def resize(self, seq: str, n_tokens: int) -> None:
        allocator, size = self.allocator, self.allocator.block_size
        old = self.content.get(seq, [])
        table, before, free = list(allocator.table(seq)), snapshot(allocator), allocator.num_free
        # Pages it needs by counting: new ones at the end, and one more for a half-filled page that another holds too.
        half_filled = len(old) % size != 0 and n_tokens > len(old)
        shared = half_filled and sum(table[-1] in allocator.table(other) for other in self.content) > 1
        needed = max(-(-n_tokens // size) - len(table), 0) + shared
        if needed > free:
            with pytest.raises(OutOfBlocks, match=f"needs {needed} more blocks.*{free} of"):
                allocator.resize(seq, n_tokens)
            assert snapshot(allocator) == before
            return
        copies = allocator.resize(seq, n_tokens)
        assert len(copies) == shared
        for source, destination in copies:
            assert source == table[-1] and destination == allocator.table(seq)[len(table) - 1] != source
            self.pages[destination] = list(self.pages[source])
        fresh = list(range(self.stamp + 1, self.stamp + 1 + max(n_tokens - len(old), 0)))
        self.stamp += len(fresh)
        self.content[seq] = old[:n_tokens] + fresh
        for at in range(len(old), n_tokens):
            self.pages[allocator.table(seq)[at // size]][at % size] = self.content[seq][at]
        kept = min(len(table), len(allocator.table(seq))) - len(copies)
        assert allocator.table(seq)[:kept] == table[:kept]  # what stays, stays where it is

    @precondition(lambda self: self.content)
    @rule(parent=names, child=names)
    def fork(self, parent: str, child: str) -> None:
        if parent in self.content and child not in self.content and SALTS[parent] != SALTS[child]:
            return  # what is forked is of one request
        if parent not in self.content or child in self.content:
            before = snapshot(self.allocator)
            with pytest.raises(ValueError, match="cannot fork"):
                self.allocator.fork(parent, child)
            assert snapshot(self.allocator) == before
            return
        free = self.allocator.num_free
        self.allocator.fork(parent, child)
        self.content[child] = list(self.content[parent])
        assert self.allocator.table(child) == self.allocator.table(parent)
        assert self.allocator.num_free == free  # sharing takes nothing

    @precondition(lambda self: self.content)
    @rule(seq=names, share=st.floats(0, 1))
    def publish(self, seq: str, share: float) -> None:
        tokens, before = self.content.get(seq, []), snapshot(self.allocator)
        with pytest.raises(ValueError, match="has room for"):
            self.allocator.publish(seq, [*tokens, 0], len(tokens) + 1, SALTS[seq])
        if seq in self.content:
            self.allocator.publish(seq, tokens, int(share * len(tokens)), SALTS[seq])
            self.published.append((SALTS[seq], tokens[: int(share * len(tokens))]))
        assert snapshot(self.allocator) == before  # nobody's pages change

    @precondition(lambda self: self.published)
    @rule(seq=names, data=st.data())
    def adopt(self, seq: str, data: st.DataObject) -> None:
        """What a new sequence adopts is what it asked for, however long ago that was published, and nothing that only
        sequences of other salts have said."""
        salt, tokens = data.draw(st.sampled_from(self.published))
        tokens = tokens + data.draw(st.lists(st.just(-1), max_size=3))
        if seq in self.content:
            with pytest.raises(ValueError, match="has pages already"):
                self.allocator.adopt(seq, tokens, SALTS[seq])
            return
        shared = self.allocator.adopt(seq, tokens, SALTS[seq])
        assert shared % self.allocator.block_size == 0 and shared <= len(tokens)
        assert not shared or any(own == SALTS[seq] and said[:shared] == tokens[:shared] for own, said in self.published)
        self.content[seq] = tokens[:shared]
        if salt != SALTS[seq]:
            return
        # what somebody holds and has published is there to be had
        for other, content in self.content.items():
            pages = self.allocator._of(other).published
            if other != seq and SALTS[other] == salt and content[:shared] == tokens[:shared]:
                whole = pages * self.allocator.block_size
                listed = all(page in self.allocator._keys for page in self.allocator.table(other)[:pages])
                assert shared >= whole or tokens[:whole] != content[:whole] or not listed

    @rule(seq=names)
    def release(self, seq: str) -> None:
        self.allocator.release(seq)
        self.content.pop(seq, None)

    @rule(seq=names, n_tokens=st.integers(-5, -1))
    def negative(self, seq: str, n_tokens: int) -> None:
        before = snapshot(self.allocator)
        with pytest.raises(ValueError, match=str(n_tokens)):
            self.allocator.resize(seq, n_tokens)
        assert snapshot(self.allocator) == before

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        if hasattr(self, "allocator"):
            assert {seq: self.read(seq) for seq in self.content} == self.content

    @invariant()
    def tables_are_as_long_as_needed(self) -> None:
        if hasattr(self, "allocator"):
            assert set(self.allocator.sequences()) == set(self.content)
            for seq in NAMES:
                n = len(self.content.get(seq, []))
                assert self.allocator.length(seq) == n
                assert len(self.allocator.table(seq)) == self.allocator.blocks_for(n)
                assert (self.allocator.blocks_for(n) - 1) * self.allocator.block_size < max(n, 1)
                assert len(set(self.allocator.table(seq))) == len(self.allocator.table(seq))

    @invariant()
    def pages_are_counted(self) -> None:
        if hasattr(self, "allocator"):
            holders = Counter(page for seq in self.content for page in self.allocator.table(seq))
            assert all(0 <= page < self.allocator.num_blocks for page in holders)
            assert self.allocator.num_free == self.allocator.num_blocks - len(holders)
            assert self.allocator._references == [holders[page] for page in range(self.allocator.num_blocks)]
            idle = set(self.allocator._idle)
            assert not idle & set(holders) and len(idle) == self.allocator.num_idle
            assert idle <= set(self.allocator._keys)  # without known content a page would be free
            used = [int(holders[page] > 0 or page in idle) for page in range(self.allocator.num_blocks)]
            assert list(self.allocator._used) == used

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            for seq in NAMES:
                self.allocator.release(seq)
            assert snapshot(self.allocator) == ([], [], self.allocator.num_blocks)
            whole = self.allocator.num_blocks * self.allocator.block_size
            self.allocator.resize("all", whole)
            assert sorted(self.allocator.table("all")) == list(range(self.allocator.num_blocks))


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=80, stateful_step_count=40)


def test_the_page_unused_for_longest_goes_first_and_ends_before_beginnings() -> None:
    allocator = BlockAllocator(4, 2)
    for seq, tokens in (("a", [1, 2, 3, 4]), ("b", [5, 6, 7, 8])):
        allocator.resize(seq, 4)
        allocator.publish(seq, tokens, 4)
        allocator.release(seq)
    assert (allocator.num_free, allocator.num_idle) == (4, 4)
    allocator.resize("c", 1)  # takes the end of a
    allocator.resize("d", 3)  # takes the beginning of a, and the end of b
    assert allocator.num_idle == 1
    assert allocator.adopt("e", [1, 2, 3, 4]) == 0
    assert allocator.adopt("f", [5, 6, 7, 8]) == 2
    allocator.release("f")
    with pytest.raises(OutOfBlocks, match=r"2 more blocks.*1 of 4"):
        allocator.resize("g", 4)


def test_a_page_that_is_written_again_is_no_longer_known_by_what_it_held() -> None:
    allocator = BlockAllocator(8, 2)
    allocator.resize("a", 4)
    allocator.publish("a", [1, 2, 3, 4], 4)
    allocator.resize("a", 3)
    assert allocator.adopt("b", [1, 2, 3, 4]) == 4  # nothing was written yet
    assert allocator.resize("a", 4) == [(allocator.table("b")[1], allocator.table("a")[1])]  # so it writes elsewhere
    allocator = BlockAllocator(8, 2)
    allocator.resize("a", 4)
    allocator.publish("a", [1, 2, 3, 4], 4)
    allocator.resize("a", 3)
    assert allocator.resize("a", 4) == []  # it has the page to itself and writes there
    assert allocator.adopt("b", [1, 2, 3, 4]) == 2
    allocator.publish("a", [1, 2, 3, 9], 4)
    assert allocator.adopt("c", [1, 2, 3, 9]) == 4


def test_one_content_is_kept_once_and_known_through_any_of_its_holders() -> None:
    allocator = BlockAllocator(8, 2)
    for seq in "ab":  # both work out the same, at the same time
        allocator.resize(seq, 5)
        allocator.publish(seq, [1, 2, 3, 4, 5], 4)
    assert allocator.next_key("a", [1, 2, 3, 4, 5, 6]) == allocator.next_key("b", [1, 2, 3, 4, 5, 6]) is not None
    assert allocator.next_key("a", [1, 2, 3, 4, 5]) is None
    assert allocator.adopt("c", [1, 2, 3, 4]) == 4 and allocator.table("c") == allocator.table("a")[:2]
    allocator.publish("b", [1, 2, 3, 4, 5, 6], 5)
    for seq in "abc":
        allocator.release(seq)
    assert allocator.num_idle == 2


def consecutive(table: list[int]) -> bool:
    return table == list(range(table[0], table[0] + len(table))) if table else True


@given(st.integers(1, 40), st.integers(1, 4), st.lists(st.integers(1, 9), max_size=40))
def test_a_sequence_alone_is_always_consecutive(num_blocks: int, block_size: int, steps: list[int]) -> None:
    allocator, length = BlockAllocator(num_blocks, block_size), 0
    for step in steps:
        length = min(length + step, num_blocks * block_size)
        allocator.resize("a", length)
        assert consecutive(allocator.table("a"))


@given(st.integers(2, 40), st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=60))
def test_two_growing_sequences_stay_consecutive_until_their_room_is_used_up(
    num_blocks: int, block_size: int, steps: list[tuple[bool, int]]
) -> None:
    """Each has at least the half of what the first left free; rolling back and growing again changes nothing."""
    allocator = BlockAllocator(num_blocks, block_size)
    allocator.resize("a", 1)
    allocator.resize("b", 1)
    room = {"a": allocator.table("b")[0], "b": num_blocks - allocator.table("b")[0]}
    assert min(room.values()) >= num_blocks // 2
    length = {"a": 1, "b": 1}
    for which, step in steps:
        seq = "ab"[which]
        length[seq] = min(length[seq] + step, room[seq] * block_size)
        allocator.resize(seq, length[seq])
        allocator.resize(seq, max(length[seq] - 2, 1))
        allocator.resize(seq, length[seq])
        assert consecutive(allocator.table("a")) and consecutive(allocator.table("b"))


def test_a_sequence_starts_in_the_largest_gap_if_it_fits_nowhere_better() -> None:
    allocator = BlockAllocator(10, 1)
    for i in range(10):
        allocator.resize(i, 1)
    for seq in range(10):
        if allocator.table(seq)[0] in (2, 4, 5, 6, 8):
            allocator.release(seq)
    allocator.resize("new", 3)
    assert sorted(allocator.table("new")) == [4, 5, 6] and consecutive(allocator.table("new"))
    allocator.resize("more", 2)
    assert sorted(allocator.table("more")) == [2, 8]  # scattered, but served


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 1)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks {num_blocks} and block_size {block_size}"):
        BlockAllocator(num_blocks, block_size)


def test_unknown_sequences_hold_nothing() -> None:
    allocator = BlockAllocator(4, 2)
    allocator.release("nobody")
    assert allocator.table("nobody") == [] and allocator.length("nobody") == 0 and allocator.sequences() == []
    with pytest.raises(ValueError, match="unknown sequence 'nobody'"):
        allocator.fork("nobody", "child")


# --- the paged tensors -----------------------------------------------------------------------------------

CONFIG = LlamaConfig(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)


def kv_of(token: int, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values [G, D] that say which write of which layer they are."""
    return torch.full((1, 4), float(token * 10 + layer)), torch.full((1, 4), -float(token * 10 + layer))


class PagedMachine(RuleBasedStateMachine):
    """Sequences grow, are written through packed batches, fork, roll back; the twin is a dictionary of lists."""

    @initialize(num_blocks=st.integers(2, 10), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.cache = PagedKVCache(CONFIG, num_blocks, block_size)
        self.twin: dict[Hashable, list[int]] = {}
        self.token = 0

    @rule(rows=st.dictionaries(names, st.integers(1, 7), min_size=1, max_size=3))
    def write(self, rows: dict[str, int]) -> None:
        """One forward that adds tokens to several sequences; rows there is no room for are left out."""
        fed = {}
        for seq, count in rows.items():
            try:
                self.cache.resize(seq, len(self.twin.get(seq, [])) + count)
                fed[seq] = count
            except OutOfBlocks:
                continue
        if not fed:
            return
        starts = [len(self.twin.get(seq, [])) for seq in fed]
        batch = self.cache.batch(list(fed), starts, list(fed.values()))
        tokens = list(range(self.token + 1, self.token + 1 + sum(fed.values())))
        self.token = tokens[-1]
        for layer in range(CONFIG.num_hidden_layers):
            keys, values = (torch.stack(x) for x in zip(*(kv_of(token, layer) for token in tokens)))
            batch.attend(layer, torch.zeros(len(tokens), 2, 4), keys, values)
        for seq, count in fed.items():
            self.twin[seq] = [*self.twin.get(seq, []), *tokens[:count]]
            del tokens[:count]

    @rule(seq=names, share=st.floats(0, 1))
    def roll_back(self, seq: str, share: float) -> None:
        if seq in self.twin:
            kept = int(share * len(self.twin[seq]))
            self.cache.resize(seq, kept)
            del self.twin[seq][kept:]

    @rule(parent=names, child=names)
    def fork(self, parent: str, child: str) -> None:
        if parent in self.twin and child not in self.twin:
            self.cache.allocator.fork(parent, child)
            self.twin[child] = list(self.twin[parent])

    @rule(seq=names)
    def release(self, seq: str) -> None:
        self.cache.allocator.release(seq)
        self.twin.pop(seq, None)

    @invariant()
    def every_layer_holds_what_was_written(self) -> None:
        for seq, tokens in getattr(self, "twin", {}).items():
            slots = self.cache.slots(seq, 0, len(tokens))
            for layer in range(CONFIG.num_hidden_layers):
                expected = torch.tensor([float(token * 10 + layer) for token in tokens])
                keys, values = self.cache.keys[layer][slots], self.cache.values[layer][slots]
                assert torch.equal(keys, expected[:, None, None].expand(-1, 1, 4)), (seq, layer)
                assert torch.equal(values, -keys)


TestPagedCache = PagedMachine.TestCase
TestPagedCache.settings = settings(max_examples=60, stateful_step_count=30)


def scattered(num_blocks: int, block_size: int, config: LlamaConfig = CONFIG) -> PagedKVCache:
    """An empty cache in which no two free pages are neighbours; ``num_blocks`` of them."""
    cache = PagedKVCache(config, 2 * num_blocks, block_size)
    for page in range(2 * num_blocks):
        cache.resize(("other", page), block_size)
    for owner in cache.allocator.sequences():
        if cache.allocator.table(owner)[0] % 2:
            cache.allocator.release(owner)
    return cache


@given(st.integers(1, 6), st.integers(0, 30), st.integers(0, 30), st.booleans())
def test_slots_are_the_positions_one_by_one_or_a_slice_of_them(
    block_size: int, start: int, count: int, spread: bool
) -> None:
    cache = scattered(64, block_size) if spread else PagedKVCache(CONFIG, 64, block_size)
    cache.resize("x", start + count)
    table = cache.allocator.table("x")
    slots = cache.slots("x", start, start + count)
    expected = [table[at // block_size] * block_size + at % block_size for at in range(start, start + count)]
    assert (list(range(slots.start, slots.stop)) if isinstance(slots, slice) else slots) == expected
    if count:
        pages = {at // block_size for at in range(start, start + count)}
        assert isinstance(slots, slice) == (not spread or len(pages) == 1)


def attended(cache: PagedKVCache, chunks: list[list[int]], seed: int) -> Tensor:
    """Attention output of two interleaved sequences "x" and "y", written chunk by chunk; [T, H, D] of all chunks."""
    generator = torch.Generator().manual_seed(seed)
    length, outs = {"x": 0, "y": 0}, []
    for chunk in chunks:
        rows = {seq: count for seq, count in zip("xy", chunk) if count}
        starts = [length[seq] for seq in rows]
        for seq, count in rows.items():
            length[seq] += count
            cache.resize(seq, length[seq])
        q, k, v = (torch.randn(sum(rows.values()), heads, 4, generator=generator) for heads in (2, 1, 1))
        outs.append(cache.batch(list(rows), starts, list(rows.values())).attend(1, q, k, v))
    return torch.cat(outs)


def naive_attention(chunks: list[list[int]], seed: int) -> Tensor:
    """The twin of ``attended``, one query and head at a time, in float64."""
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, list[tuple[Tensor, Tensor]]] = {"x": [], "y": []}
    outs = []
    for chunk in chunks:
        owners = [seq for seq, count in zip("xy", chunk) for _ in range(count)]
        q, k, v = (torch.randn(len(owners), heads, 4, generator=generator).double() for heads in (2, 1, 1))
        for t, seq in enumerate(owners):
            stored[seq].append((k[t, 0], v[t, 0]))
            keys, values = (torch.stack(parts) for parts in zip(*stored[seq]))
            weights = ((q[t] @ keys.T) / 4**0.5).softmax(-1)
            outs.append(weights @ values)
    return torch.stack(outs)


chunk_lists = st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2).filter(any), min_size=1, max_size=5)


@given(chunk_lists, st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_attention_is_each_token_over_its_own_past_wherever_its_pages_lie(
    chunks: list[list[int]], block_size: int, seed: int
) -> None:
    expected = naive_attention(chunks, seed)
    for cache in (PagedKVCache(CONFIG, 80, block_size), scattered(80, block_size)):
        cache.keys.fill_(1e3), cache.values.fill_(1e3)  # reading what was never written shows
        ours = attended(cache, chunks, seed)
        torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=0)


class Attention:
    """Stands in for ``scaled_dot_product_attention`` and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.calls.append((k, v))
        return F_ATTENTION(q, k, v, **options)


F_ATTENTION = F.scaled_dot_product_attention


def shares(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_consecutive_pages_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Attention()
    monkeypatch.setattr(fly.cache.paged.F, "scaled_dot_product_attention", spy)
    model = random_llama(0)
    cache = PagedKVCache(model.config, 20, 4)
    for start, count in ((0, 5), (5, 1), (6, 7)):  # prefill, one token, a draft
        cache.resize("x", start + count)
        kv = cache.batch(["x"], [start], [count])
        model(torch.arange(count), torch.arange(start, start + count), kv)
    assert len(spy.calls) == 3 * 2
    for i, (k, v) in enumerate(spy.calls):
        layer = i % 2
        assert shares(k, cache.keys) and shares(v, cache.values)
        at = cache.allocator.table("x")[0] * 4
        assert k.data_ptr() == cache.keys[layer, at].data_ptr() and v.data_ptr() == cache.values[layer, at].data_ptr()
        assert k.shape[2] == v.shape[2] == [5, 6, 13][i // 2]


def test_scattered_pages_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Attention()
    monkeypatch.setattr(fly.cache.paged.F, "scaled_dot_product_attention", spy)
    cache = scattered(8, 2)
    attended(cache, [[5, 3]], 0)
    assert [k.shape[2] for k, _ in spy.calls] == [5, 3]
    assert not any(shares(k, cache.keys) for k, _ in spy.calls)


def test_copy_on_write_isolates_forks() -> None:
    cache = PagedKVCache(CONFIG, 12, 4)

    def write(seq: str, start: int, token: int) -> None:
        cache.resize(seq, start + 1)
        batch = cache.batch([seq], [start], [1])
        for layer in range(2):
            k, v = kv_of(token, layer)
            batch.attend(layer, torch.zeros(1, 2, 4), k[None], v[None])

    def read(seq: str, layer: int) -> list[float]:
        return cache.keys[layer][cache.slots(seq, 0, cache.allocator.length(seq))][:, 0, 0].tolist()

    for at in range(6):
        write("parent", at, at)
    cache.allocator.fork("parent", "child")
    assert cache.allocator.num_free == 10
    write("child", 6, 50)
    assert cache.allocator.num_free == 9  # the half-filled page alone was copied
    write("parent", 6, 60)
    assert cache.allocator.num_free == 9  # and is the parent's own now
    assert cache.allocator.table("parent")[0] == cache.allocator.table("child")[0]
    for layer in range(2):
        common = [float(10 * at + layer) for at in range(6)]
        assert read("child", layer) == [*common, 500.0 + layer]
        assert read("parent", layer) == [*common, 600.0 + layer]
    # rolling back into the shared page and going another way leaves the parent alone
    cache.resize("child", 2)
    write("child", 2, 70)
    assert read("child", 0) == [0.0, 10.0, 700.0]
    assert read("parent", 0) == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 600.0]


def test_exhaustion_leaves_tensors_and_tables_alone() -> None:
    cache = PagedKVCache(CONFIG, 3, 2)
    attended(cache, [[3, 2]], 0)
    before = snapshot(cache.allocator), cache.keys.clone(), cache.values.clone()
    with pytest.raises(OutOfBlocks, match="'x' needs 1 more blocks of 2 tokens for 5 tokens; 0 of 3 are free"):
        cache.resize("x", 5)
    assert snapshot(cache.allocator) == before[0]
    assert torch.equal(cache.keys, before[1]) and torch.equal(cache.values, before[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cost_of_a_token_is_what_the_tensors_take(dtype: torch.dtype) -> None:
    cache = PagedKVCache(CONFIG, 5, 3, dtype=dtype)
    taken = sum(stored.numel() * stored.element_size() for stored in (cache.keys, cache.values))
    assert PagedKVCache.bytes_per_token(CONFIG, dtype) * 15 == taken


def test_a_narrow_cache_gives_back_the_dtype_of_the_model() -> None:
    cache = PagedKVCache(CONFIG, 8, 4, dtype=torch.bfloat16)
    out = attended(cache, [[5, 0], [1, 3], [2, 2]], 0)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, naive_attention([[5, 0], [1, 3], [2, 2]], 0).float(), atol=0.05, rtol=0)


def test_writing_beyond_the_reserved_room_is_refused() -> None:
    cache = PagedKVCache(CONFIG, 8, 4)
    cache.resize("x", 4)
    for start, count in ((0, 5), (4, 1), (8, 4)):
        with pytest.raises(ValueError, match=f"'x' has room for 4 tokens, not for {start + count}"):
            cache.batch(["x"], [start], [count])
    with pytest.raises(ValueError, match="'nobody' has room for 0"):
        cache.batch(["nobody"], [0], [1])
