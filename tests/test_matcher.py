"""Matchers: they allow at every place what the language does, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.models.tokenizer import Tokenizer
from fly.policies import Exact
from fly.runner.constraints import constrain
from fly.runner.request import BadWords, Row
from fly.runner.sampling import BatchSampling
from fly.runner.structured import Grammars
from fly.types import Draft, Target
from tests.toys import PADDING, random_llama, save_tokenizer

LETTERS = ["a", "b", "ab", "ba", "aa", "bab"]
END, TURN = len(LETTERS), len(LETTERS) + 1
WIDTH = len(LETTERS) + 2 + PADDING


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that knows nothing but a and b."""
    directory = tmp_path_factory.mktemp("letters")
    save_tokenizer(directory, LETTERS)
    return Tokenizer(directory)


def test_a_form_needs_a_tokenizer_and_an_end(letters: Tokenizer) -> None:
    params = SamplingParams(structured={"regex": "a"}, max_tokens=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        LLM(random_llama(0)).generate([[1]], params)
    with pytest.raises(ValueError, match="names none"):
        Grammars(letters, WIDTH, ()).matcher(params)
    with pytest.raises(ValueError, match="no text of this vocabulary"):
        Grammars(letters, WIDTH, [END]).matcher(SamplingParams(structured={"regex": "c"}))  # type: ignore[arg-type]
    own = Grammars(letters, WIDTH, ()).matcher(params.model_copy(update={"stop_token_ids": (TURN,)}))
    logits = torch.zeros(3, WIDTH)
    own.constrain(logits, [], [0, END], [-1, 0])
    assert (logits == 0).nonzero().tolist() == [[0, 0], [1, TURN], *([2, v] for v in range(WIDTH))]


def test_each_form_is_compiled_once(letters: Tokenizer) -> None:
    grammars = Grammars(letters, WIDTH, [END])
    specs = [{"regex": "a+"}, {"regex": "a+", "json_object": False}, {"regex": "b+"}]
    matchers = [grammars.matcher(SamplingParams(structured=spec)) for spec in specs]  # type: ignore[arg-type]
    assert len(grammars._kept) == 2 and matchers[0]._start is matchers[1]._start
    assert matchers[0]._matcher is not matchers[1]._matcher


def allowed_after(words: set[str], path: list[int], params: SamplingParams) -> set[int] | None:
    """From the definitions: what may follow tokens, of a language that is written out; None if they lie outside."""
    if any(token >= len(LETTERS) for token in path):
        return None
    text = "".join(LETTERS[token] for token in path)
    if not any(word.startswith(text) for word in words):
        return None
    found = {t for t, piece in enumerate(LETTERS) if any(word.startswith(text + piece) for word in words)}
    ends = {TURN} & set(params.stop_token_ids)
    if text in words:
        found |= ends if params.ignore_eos else ends | {END}
        found |= set() if found else {END}
    return found


token_ids = st.one_of(st.integers(0, len(LETTERS) - 1), st.integers(0, WIDTH - 1))


@settings(max_examples=150)
@given(
    words=st.sets(st.text("ab", max_size=7), min_size=1, max_size=5),
    asks=st.lists(
        st.tuples(
            st.lists(token_ids, max_size=3),
            st.lists(token_ids, max_size=6),
            st.lists(st.integers(0, 5), min_size=6, max_size=6),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    ignore_eos=st.booleans(),
    own_stop=st.booleans(),
    min_tokens=st.integers(0, 3),
    bad=st.lists(st.integers(0, len(LETTERS) - 1), max_size=2),
    biases=st.booleans(),
)
def test_every_place_allows_what_the_language_does(
    letters: Tokenizer,
    words: set[str],
    asks: list[tuple[list[int], list[int], list[int], bool]],
    ignore_eos: bool,
    own_stop: bool,
    min_tokens: int,
    bad: list[int],
    biases: bool,
) -> None:
    """One matcher, asked about one text after another (forks, rejected drafts, trees, nonsense), allows at each place
    just what follows from the words of the language; bans hold but where they leave nothing of that."""
    params = SamplingParams(
        structured={"regex": "|".join(sorted(words))},  # type: ignore[arg-type]
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        stop_token_ids=(TURN,) if own_stop else (),
        presence_penalty=1.5 if biases else 0.0,
        bad_words=("so",) if bad else (),
    )
    matcher = Grammars(letters, WIDTH, [END]).matcher(params)
    prompt = [END, 0, TURN]
    for text, draft, choices, chain in asks:
        row = Row(
            prompt + text,
            len(prompt),
            params,
            Exact(),
            0,
            6,
            frozenset([END, *params.stop_token_ids]),
            bad=BadWords(tuple((token,) for token in bad)),
            matcher=matcher,
        )
        parents = [node - 1 if chain else choices[node] % (node + 1) - 1 for node in range(len(draft))]
        raw = torch.randn(1, len(draft) + 2, WIDTH)
        got = constrain(raw, [row], [draft], None if chain else [parents])[0]
        plain = constrain(raw, [row.fork(Exact(), 1)], [draft], None if chain else [parents])[0]
        assert torch.equal(got, plain)  # a fork asks the same matcher
        assert torch.equal(got[-1], raw[0, -1])  # padding
        for place in range(len(draft) + 1):
            path, at = [], place - 1
            while at >= 0:
                path.insert(0, draft[at])
                at = parents[at]
            allowed = allowed_after(words, text + path, params)
            event(f"reachable: {allowed is not None}")
            early = len(text + path) < min_tokens and row.generated < min_tokens
            banned = set(bad) | (row.stop_ids if early else set())
            forbidden = set((got[place] == -torch.inf).nonzero().flatten().tolist())
            if allowed is None:  # never reached: the grammar has no say
                assert forbidden == banned
                continue
            # A fresh look. Where only one character can follow, the library may ask for the usual spelling.
            fresh = torch.zeros(1, WIDTH)
            Grammars(letters, WIDTH, [END]).matcher(params).constrain(fresh, text + path, [], [])
            follows, so_far = (fresh[0] == 0).nonzero().flatten().tolist(), "".join(LETTERS[t] for t in text + path)
            firsts = {word[len(so_far) : len(so_far) + 1] for word in words if word.startswith(so_far)}
            forced = len(firsts) == 1 and firsts != {""}
            event(f"forced: {forced}")
            assert follows and set(follows) <= allowed if forced else set(follows) == allowed
            allowed = set(follows)
            wanted = allowed - banned or allowed
            assert forbidden == set(range(WIDTH)) - wanted
            kept = torch.tensor(sorted(wanted))
            lifted = not allowed - banned
            penalty = torch.tensor([1.5 if biases and not lifted and t in text + path else 0.0 for t in sorted(wanted)])
            assert torch.allclose(got[place, kept], raw[0, place, kept] - penalty)


def test_rows_without_a_form_are_left_alone(letters: Tokenizer) -> None:
    params = SamplingParams(structured={"regex": "(ab?|ab)?"})  # type: ignore[arg-type]
    rows = [Row([0], 1, SamplingParams(), Exact(), 0, 2), Row([0], 1, params, Exact(), 0, 2)]
    logits = torch.randn(2, 2, WIDTH)
    assert constrain(logits, rows[:1], [[]]) is logits
    rows[1].matcher = Grammars(letters, WIDTH, [END]).matcher(params)
    got = constrain(logits, rows, [[0], [0]])
    assert torch.equal(got[0], logits[0])
    assert (got[1] > -torch.inf).nonzero().tolist() == [[0, 0], [0, 2], [0, END], [1, 1], [1, END]]


def test_masks_of_the_drafter_are_not_computed_again(letters: Tokenizer) -> None:
    params = SamplingParams(structured={"regex": "[ab]*"})  # type: ignore[arg-type]
    matcher, asked = Grammars(letters, WIDTH, [END]).matcher(params), 0

    class Counting:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            nonlocal asked
            asked += name == "compute_bitmask"
            return getattr(self.inner, name)

    matcher._matcher = Counting(matcher._matcher)  # type: ignore[assignment]
    for length in range(5):
        matcher.constrain(torch.zeros(1, WIDTH), [0] * length, [], [])
    matcher.constrain(torch.zeros(6, WIDTH), [], [0, 0, 0, 0, 1], range(-1, 4))
    assert asked == 6


@given(seed=st.integers(0, 1000), temperature=st.sampled_from([0.5, 1.0]), top_p=st.sampled_from([0.7, 1.0]))
def test_exact_speculation_gives_the_distribution_under_the_mask(
    letters: Tokenizer, seed: int, temperature: float, top_p: float
) -> None:
    """Summed over every token that may be drafted: kept mass and corrections are the target's distribution under the
    mask."""
    params = SamplingParams(
        structured={"regex": "(a|ba)b?"},  # type: ignore[arg-type]
        temperature=temperature,
        top_p=top_p,
    )
    row = Row([0], 1, params, Exact(), 0, 1, frozenset([END]))
    row.matcher = Grammars(letters, WIDTH, [END]).matcher(params)
    generator = torch.Generator().manual_seed(seed)
    target_11V, draft_11V = (
        constrain(torch.randn(1, 1, WIDTH, generator=generator) * 2, [row], [[]]) for _ in range(2)
    )
    distribution = BatchSampling.of([params])
    wanted_V, drafted_V = distribution.probs(target_11V)[0, 0], distribution.probs(draft_11V)[0, 0]
    # a block for every token that could be drafted
    blocks = Target(target_11V.expand(WIDTH, 2, -1), wanted_V.expand(WIDTH, 2, -1))
    drafts = Draft(
        torch.arange(WIDTH).unsqueeze(1),
        torch.ones(WIDTH, dtype=torch.int64),
        drafted_V.expand(WIDTH, 1, -1),
    )
    kept_V = drafted_V * Exact().accept_probs(blocks, drafts).squeeze(1)
    rest_V = Exact().correction(blocks, drafts, torch.zeros(WIDTH, dtype=torch.int64))[0]
    found_V = kept_V + (1 - kept_V.sum()) * rest_V / rest_V.sum().clamp_min(1e-30)
    assert torch.allclose(found_V, wanted_V, atol=1e-5)
    assert set(wanted_V.nonzero().flatten().tolist()) <= {0, 1, 2, 3, 5}  # no end before the first letter


def test_a_matcher_goes_on_after_a_dead_end(letters: Tokenizer) -> None:
    matcher = Grammars(letters, WIDTH, [END]).matcher(SamplingParams(structured={"regex": "aac|ab*"}))  # type: ignore[arg-type]
    for _ in range(2):
        logits = torch.zeros(4, WIDTH)
        matcher.constrain(logits, [], [0, 0, 1], [-1, 0, 0])
        found = [set((place == 0).nonzero().flatten().tolist()) for place in logits]
        assert found[1] >= {1, END} and found[2] == {END} and found[3] == {1, END}
        matcher.check(1)
        with pytest.raises(ValueError, match="after 2 tokens"):
            matcher.check(2)
