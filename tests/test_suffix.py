"""Suffix decoding against literal twins: what it proposes, what it shares, and what it leaves behind."""

from __future__ import annotations

from collections import abc
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import fly
from fly.drafts import DraftStrategy, SingleDraft
from fly.drafts.base import DraftSetup
from fly.drafts.suffix import SuffixDraft
from fly.policies import Exact
from fly.runner.request import Row, Token
from fly.runner.runner import Runner
from fly.types import Draft, SamplingParams, Why
from tests.toys import random_llama, ready, run

VOCAB = 17
FAR = 10**6  # a lookback that reaches everything here


def make_row(tokens: list[int], prompt_length: int = 1, temperature: float = 0.0, seed: int = 0) -> Row:
    return Row(list(tokens), prompt_length, SamplingParams(temperature=temperature), Exact(), seed, 8)


def emit(row: Row, tokens: list[int]) -> None:
    row.tokens += tokens
    row.provenance += [Token(token, Why.BONUS) for token in tokens]


def proposals(draft: Draft) -> list[list[int]]:
    return [tokens[:n] for tokens, n in zip(draft.tokens_BK.tolist(), draft.lengths_B.tolist())]


# --- twins -----------------------------------------------------------------------------------------------

Output = tuple[list[int], int]  # tokens that may match, and where what may follow begins


def naive_match(text: list[int], sources: list[Output], depth: int) -> tuple[int, list[list[int]]]:
    """The longest end of ``text`` that something follows elsewhere, and what follows it there, latest place first."""
    for n in range(min(depth, len(text)), 0, -1):
        after = [
            source[end:]
            for source, first in reversed(sources)
            for end in range(len(source) - 1, 0, -1)
            if end >= max(n, first) and source[end - n : end] == text[-n:]
        ]
        if after:
            return n, after
    return 0, []


def anchored_match(text: list[int], sources: list[Output], depth: int, lookback: int) -> tuple[int, list[list[int]]]:
    """The same among the latest places of the longest of four grams."""
    for anchor in (8, 4, 2, 1):
        places = [
            (source, end)
            for source, first in reversed(sources)
            for end in range(len(source) - 1, 0, -1)
            if anchor <= min(depth, len(text))
            and end >= max(anchor, first)
            and source[end - anchor : end] == text[-anchor:]
        ][:lookback]
        if not places:
            continue
        lengths = [
            max(n for n in range(1, min(depth, len(text), end) + 1) if source[end - n : end] == text[-n:])
            for source, end in places
        ]
        best = max(lengths)
        return best, [source[end:] for (source, end), n in zip(places, lengths) if n == best]
    return 0, []


def naive_follow(after: list[list[int]], most: int, min_prob: float, endless: bool) -> tuple[float, list[int]]:
    """Step by step the token that most places go on with; in the own text what runs out goes on into the draft."""
    drafted: list[int] = []
    score, chance = 0.0, 1.0
    while len(drafted) < most:
        at = len(drafted)
        agreeing = [tokens for tokens in after if (tokens + drafted if endless else tokens)[:at] == drafted]
        following = [(tokens + drafted if endless else tokens)[at : at + 1] for tokens in agreeing]
        if not any(following):
            break
        token = max((f for f in following if f), key=following.count)  # the first of equals: the latest place
        chance *= following.count(token) / len(agreeing)
        if chance < min_prob:
            break
        drafted += token
        score += chance
    return score, drafted


def naive_suffix(
    text: list[int],
    outputs: list[Output],
    most: int,
    depth: int = 64,
    factor: float = 1.0,
    offset: int = 0,
    min_prob: float = 0.1,
    lookback: int = FAR,
) -> list[int]:
    best_score, best = 0.0, list[int]()
    for sources, endless in (([(text, 1)], True), (outputs, False)):
        if lookback == FAR:
            n, after = naive_match(text, sources, depth)
        else:
            n, after = anchored_match(text, sources, depth, lookback)
        limit = min(most, int(factor * n + offset))
        score, drafted = naive_follow(after, limit, min_prob, endless)
        if score > best_score:
            best_score, best = score, drafted
    return best


def naive_output(tokens: list[int], prompt_length: int, depth: int, bound: int) -> Output:
    """An output with up to ``depth`` tokens of its prompt before it, of which nothing but context is made."""
    context = tokens[:prompt_length][-depth:]
    whole = context + tokens[prompt_length:]
    cut = max(0, len(whole) - bound)
    return whole[cut:], max(1, len(context) - cut)


def naive_kept(outputs: list[Output], bound: int) -> list[Output]:
    while sum(len(tokens) for tokens, _ in outputs) > bound:
        outputs = outputs[1:]
    return outputs


def test_the_twin_by_hand() -> None:
    assert naive_suffix([1, 2, 3, 4, 9, 1, 2, 3], [], 9) == [4, 9, 1]  # as long as its match of three
    assert naive_suffix([1, 2, 3, 4, 9, 1, 2, 3], [], 9, factor=0.5, offset=1) == [4, 9]
    assert naive_suffix([2, 3, 2, 4, 2, 4, 2], [], 9, depth=1) == [4]  # twice against once
    assert naive_suffix([2, 3, 2, 4, 2], [], 9, depth=1, offset=9, min_prob=0.6) == []  # one half
    assert naive_suffix([2, 3, 2, 4, 2], [], 2, depth=1, offset=9) == [4, 2]  # the latest of equals
    assert naive_suffix([5, 7, 7], [], 9, offset=3) == [7, 7, 7, 7]  # into itself
    assert naive_suffix([1, 2], [([1, 2, 3], 1)], 9) == [3]
    assert naive_suffix([1, 2], [([1, 2, 3], 1)], 9, factor=2.0) == [3]  # an output ends where it ended
    assert naive_suffix([3, 1, 3], [([9, 3, 2], 1)], 9) == [1]  # the own one among equals
    assert naive_suffix([4, 3, 1, 3], [([9, 1, 3, 2, 5], 1)], 9) == [2, 5]  # the one of higher score


small_texts = st.lists(st.integers(0, 2), max_size=8)
edits = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["emit", "roll back", "commit", "end", "end"]), small_texts),
    max_size=14,
)


@settings(max_examples=300)
@given(
    edits,
    st.sampled_from([1, 2, 3, 5, 9, 64]),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0]),
    st.sampled_from([1, 2, 3, FAR]),
    st.sampled_from([0, 1, 5, 12, 40, 1000]),
    st.integers(0, 12),
    st.sampled_from([None, 1, 3]),
)
def test_it_equals_the_twin_through_any_history(
    history: list[tuple[int, str, list[int]]],
    depth: int,
    factor: float,
    offset: int,
    min_prob: float,
    lookback: int,
    bound: int,
    most: int,
    k: int | None,
) -> None:
    strategy = SuffixDraft(depth, factor, offset, min_prob, lookback, bound, k)
    rows = [make_row([0]), make_row([1, 1, 0], prompt_length=2)]
    outputs: list[Output] = []
    for number, edit, tokens in history:
        row = rows[number]
        if edit == "emit":
            emit(row, tokens)
        elif edit == "roll back":
            del row.tokens[max(row.prompt_length, len(row.tokens) - len(tokens)) :]
        elif edit == "commit":
            strategy.commit([row])
        else:
            strategy.commit([row])
            strategy.release(row)
            if bound and row.provenance:
                outputs = naive_kept([*outputs, naive_output(row.tokens, row.prompt_length, depth, bound)], bound)
            rows[number] = make_row(tokens or [2], prompt_length=max(1, len(tokens) - 1))
        before = [list(row.tokens) for row in rows]
        draft = strategy.propose(rows, [most, 4])
        assert draft.probs_BKV is None
        limits = [m if k is None else min(m, k) for m in (most, 4)]
        wanted = [
            naive_suffix(row.tokens, outputs, m, depth, factor, offset, min_prob, lookback)
            for row, m in zip(rows, limits)
        ]
        assert proposals(draft) == wanted
        assert [row.tokens for row in rows] == before
        assert strategy._held == sum(len(tokens) for tokens, _ in outputs) <= bound
        event(f"found something: {any(wanted)}")
        event(f"shared something: {bool(outputs)}")
    for row in rows:
        row.provenance.clear()
        strategy.release(row)
    assert not strategy._own
    indexed = [place for index in strategy._shared.values() for places in index.ends.values() for place in places]
    assert {id(text) for text, _ in indexed} <= {id(text) for text, _, _ in strategy._outputs}


@given(small_texts, small_texts, small_texts, st.integers(0, 9))
def test_what_was_rolled_back_leaves_no_trace(a: list[int], b: list[int], c: list[int], most: int) -> None:
    strategy, fresh = SuffixDraft(offset=3), SuffixDraft(offset=3)
    row = make_row([0, *a, *b])
    strategy.propose([row], [most])
    row.tokens = [0, *a, *c]
    strategy.commit([row])
    fresh.commit([row])
    assert strategy._own[row.id] == fresh._own[row.id]
    assert proposals(strategy.propose([row], [most])) == proposals(fresh.propose([row], [most]))


# --- what is shared --------------------------------------------------------------------------------------


def finished(strategy: SuffixDraft, prompt: list[int], output: list[int]) -> None:
    row = make_row(prompt, len(prompt))
    emit(row, output)
    strategy.commit([row])
    strategy.release(row)


def test_the_first_generated_tokens_are_found_by_the_end_of_the_prompt() -> None:
    strategy = SuffixDraft(offset=9)
    finished(strategy, [8, 1, 2, 3], [4, 5, 6])
    assert proposals(strategy.propose([make_row([7, 2, 3])], [9])) == [[4, 5, 6]]
    assert proposals(strategy.propose([make_row([8])], [9])) == [[]]  # a prompt is context, no output


def test_the_oldest_outputs_leave_first() -> None:
    strategy = SuffixDraft(depth=2, shared_tokens=10)
    finished(strategy, [1], [2, 3, 4])
    finished(strategy, [5], [6, 7, 8])
    assert proposals(strategy.propose([make_row([2, 3]), make_row([6, 7])], [9, 9])) == [[4], [8]]
    finished(strategy, [9], [10, 11])
    assert proposals(strategy.propose([make_row([2, 3]), make_row([6, 7])], [9, 9])) == [[], [8]]
    assert strategy._held == 7
    finished(strategy, [0], list(range(20)))  # longer than all there is room for: its end
    assert strategy._held == 10
    assert proposals(strategy.propose([make_row([8]), make_row([9]), make_row([10])], [1] * 3)) == [[], [], [11]]


def test_only_outputs_of_the_engine_are_shared_and_only_once() -> None:
    strategy = SuffixDraft()
    row = make_row([1, 2, 3])
    strategy.commit([row])
    strategy.release(row)  # nothing of it was emitted
    fork = make_row([1])
    emit(fork, [2, 3])
    strategy.commit([fork])
    strategy.release(fork.fork(Exact(), 0))
    strategy.release(fork)  # its state is gone
    assert not strategy._outputs and not strategy._own
    finished(strategy, [1], [2, 3])
    strategy.release(make_row([1, 2, 3]))
    assert len(strategy._outputs) == 1
    off = SuffixDraft(shared_tokens=0)
    finished(off, [1], [2, 3])
    assert not off._outputs and not off._shared and not off._own


def test_outputs_are_shared_among_requests_of_one_salt_alone() -> None:
    strategy = SuffixDraft(shared_tokens=40, offset=4)

    def row(salt: str) -> Row:
        return replace(make_row([1, 2, 3], 3), params=SamplingParams(cache_salt=salt))

    def finish(salt: str, tokens: list[int]) -> None:
        ended = row(salt)
        emit(ended, tokens)
        strategy.commit([ended])
        strategy.release(ended)

    finish("ours", [4, 5, 6, 7])
    finish("theirs", [9, 8, 9, 8])
    drafted = {salt: proposals(strategy.propose([row(salt)], [4])) for salt in ("ours", "theirs", "")}
    assert drafted == {"ours": [[4, 5, 6, 7]], "theirs": [[9, 8, 9, 8]], "": [[]]}
    for _ in range(8):  # what is no longer held is no longer indexed, whoever it was of
        finish("", [4, 5, 6, 7])
    assert list(strategy._shared) == [""]


def test_outputs_are_shared_within_one_vocabulary() -> None:
    strategy, alone = SuffixDraft(), SuffixDraft(shared_tokens=0)
    for vocab in (VOCAB, VOCAB):
        fly.LLM(random_llama(0, vocab), draft=strategy)
        fly.LLM(random_llama(0, vocab + 1), draft=alone)
    with pytest.raises(ValueError, match=r"17 .* 18"):
        fly.LLM(random_llama(0, VOCAB + 1), draft=strategy)
    runner = ready(SingleDraft(run(random_llama(0, VOCAB + 1)))).runner
    assert isinstance(runner, Runner)
    with pytest.raises(ValueError, match=r"17 .* 18"):
        strategy.attach(DraftSetup(runner))


# --- with an engine --------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    seed=st.integers(0, 5),
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=4),
    most=st.integers(1, 40),
    k=st.integers(1, 12),
)
def test_greedy_output_is_that_of_no_draft_at_all(seed: int, prompts: list[list[int]], most: int, k: int) -> None:
    model = random_llama(seed, VOCAB, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=64)
    strategy = SuffixDraft(factor=2.0, offset=1)
    llm = fly.LLM(model, draft=strategy, policy=Exact())
    params = SamplingParams(temperature=0.0, max_tokens=most)
    wanted = [out.token_ids for out in llm.generate(prompts, params, k=0)]
    for _ in range(2):  # the second time finds the first one's outputs
        assert [out.token_ids for out in llm.generate(prompts, params, k=k)] == wanted
    assert not strategy._own
    assert strategy._held == 3 * sum(len(prompt) + most for prompt in prompts)


def test_a_request_asked_again_is_drafted_from_its_output() -> None:
    model = random_llama(2, VOCAB, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=64)
    llm = fly.LLM(model, draft=SuffixDraft(offset=4), policy=Exact(), k=8)
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
    [first] = llm.generate([[1, 2, 3]], params)
    again = SamplingParams(temperature=0.0, max_tokens=30)
    plain = fly.LLM(model).generate([first.prompt_token_ids], again)[0]
    outs = [llm.generate([[1, 2, 3]], again)[0] for _ in range(3)]
    assert [out.token_ids for out in outs] == [plain.token_ids] * 3
    assert outs[1].stats.tau > outs[0].stats.tau


def test_bad_arguments_are_named() -> None:
    cases: abc.Sequence[tuple[dict[str, float], str]] = [
        ({"depth": 0}, "depth 0"),
        ({"lookback": 0}, "lookback 0"),
        ({"k": 0}, "k 0"),
        ({"factor": -1.0}, "factor -1.0"),
        ({"factor": float("nan")}, "factor nan"),
        ({"factor": float("inf")}, "factor inf"),
        ({"offset": -1}, "offset -1"),
        ({"shared_tokens": -1}, "shared_tokens -1"),
        ({"min_prob": 1.5}, "min_prob 1.5"),
    ]
    for arguments, words in cases:
        with pytest.raises(ValueError, match=words):
            SuffixDraft(**arguments)  # type: ignore[arg-type]
    strategy: DraftStrategy = SuffixDraft()
    assert strategy.context is None and strategy.vocab_size is None
