"""The judge of servers: its arithmetic as exact sums, honest servers pass, and each of the faults is found."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fly import cli
from fly.extras.audit import Report, Unreachable, audit, check_names
from fly.extras.audit.client import Answer, Place, Server
from fly.extras.audit.distributions import Draw, expected, read_draws
from fly.extras.audit.evidence import evidence, power, shares_power, smallest
from fly.extras.audit.greedy import first_difference
from fly.extras.audit.prompts import PROMPTS
from fly.extras.audit.report import Finding, found_in
from fly.extras.statistics import binomial_tail, compare_samples, holm
from tests.commands import words
from tests.faulty import FAULTS, SIZE, VOCABULARY, Asked, Toy, listed, read, serving

PROMPT = "A fox met a crow"
# Which checks are to find a fault, and how many samples that takes for near certain.
FOUND_BY = {
    "bonus": ("later-tokens", 1600),
    "inverted": ("first-tokens", 1600),
    "residual": ("first-tokens", 4000),
    "lenient": ("first-tokens", 2400),
    "verify temperature": ("temperature", 800),
    "unprocessed": ("temperature", 4000),
    "unprocessed target": ("top_p", 800),
    "stale penalties": ("frequency_penalty", 12000),
    "min_p": ("min_p", 400),
    "top_k": ("top_k", 400),
    "repetition_penalty": ("repetition_penalty", 800),
    "logit_bias": ("logit_bias", 400),
    "drafted logit_bias": ("logit_bias", 400),
    "seed": ("seed", 400),
    "seed of bonus": ("seed", 400),
    "greedy": ("greedy", 400),
    "batch": ("batch", 400),
    "stop": ("stop", 400),
    "max_tokens": ("max_tokens", 400),
    "copies": ("n", 400),
    "schema": ("response_format", 400),
    "unknown": ("unknown-field", 400),
    "log-probabilities": ("log-probabilities", 400),
    "some log-probabilities": ("log-probabilities", 400),
    "counts": ("speculation", 400),
}


def verdicts(report: Report) -> dict[str, str]:
    return {each.check: each.verdict.value for each in report.findings}


def finding(report: Report, check: str) -> Finding:
    return next(each for each in report.findings if each.check == check)


# The bets


def draw(group: tuple[object, ...], probs: list[float], at: int | None, rest: float | None, **more: object) -> Draw:
    tokens = tuple("abcdefgh"[: len(probs)])
    return Draw(group, "z" if at is None else tokens[at], tokens, np.array(probs), at, rest, **more)  # type: ignore[arg-type]


@st.composite
def heads(draw: st.DrawFn) -> list[float]:
    weights = draw(st.lists(st.floats(0.01, 1), min_size=2, max_size=3))
    return [weight / sum(weights) for weight in weights]


@given(st.data())
def test_no_bet_gains_in_the_mean(data: st.DataObject) -> None:
    """Over all that two places may draw, weighted by its probability, the gain is 1 at most: exactly summed, whatever
    the second place's distribution has to do with the first, and however much less the rest has than it may."""
    rest, less = data.draw(st.sampled_from([0.01, 0.2])), data.draw(st.sampled_from([0.5, 1.0]))
    first = data.draw(heads())
    second = {at: data.draw(heads()) for at in (*range(len(first)), None)}
    same = data.draw(st.booleans())  # whether the second place counts as after the same text as the first
    mean = 0.0

    def outcomes(probs: list[float]) -> list[tuple[int | None, float]]:
        return [(None, rest * less), *((at, share * (1 - rest * less)) for at, share in enumerate(probs))]

    for one, chance in outcomes(first):
        later = first if same else second[one]
        others = {
            "ignored_H": np.array(list(reversed(later))),
            "earlier_H": np.eye(len(later))[0],
            "lookup": len(later) - 1,
        }
        for other, then in outcomes(later):
            draws = [
                draw((0,), first, one, rest),
                draw((0,) if same else (0, one), later, other, rest, **others),
            ]
            mean += chance * then * math.exp(evidence(draws).log_gain)
    assert mean <= 1 + 1e-9


def test_what_cannot_be_is_proof() -> None:
    found = evidence([draw((0,), [0.5, 0.5], 0, 0.0)] * 500 + [draw((0, "a"), [0.5, 0.5], None, 0.0)])
    assert found.p == 0 and found.example == "'z' was drawn after prompt 1 and 'a', where it cannot be"


def test_powers_are_those_of_runs() -> None:
    """A fault of the size that is said to be found is found about as often, by bets on draws that are made here."""
    rng, probs, limit = np.random.default_rng(0), [0.5, 0.3, 0.15, 0.05], 1e-4

    def draws(shares: list[float]) -> list[Draw]:
        return [draw((0, "a"), probs, int(at), 1e-5) for at in rng.choice(4, 1200, p=shares)]

    honest = draws(probs)
    size = smallest((0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12), lambda size: shares_power(honest, size, limit, 1))
    assert size is not None and 0.04 <= size <= 0.12
    moved = [0.5 - size, 0.3, 0.15 + size, 0.05]
    caught = sum(evidence(draws(moved), None).p <= limit * 5 for _ in range(40))
    assert caught >= 32
    other = np.array([0.25, 0.25, 0.25, 0.25])
    share = smallest((0.05, 0.1, 0.2, 0.4), power(honest, lambda draw: other, limit))
    assert share is not None
    mixed = [(1 - share) * p + share * 0.25 for p in probs]
    assert sum(evidence(draws(mixed)).p <= limit for _ in range(40)) >= 28
    assert sum(evidence(draws(probs)).p <= 0.05 for _ in range(100)) <= 5


# What a field makes of a reported distribution


def place_of(context: list[int], drawn: int) -> Place:
    logprobs, top = listed(tuple(context[-2:]), 0.0)
    return Place(VOCABULARY[drawn], float(logprobs[drawn]), tuple((VOCABULARY[t], float(logprobs[t])) for t in top))


@given(
    st.sampled_from(
        [
            {"temperature": 0.5},
            {"top_k": 3},
            {"top_p": 0.7},
            {"min_p": 0.1},
            {"presence_penalty": 1.5},
            {"frequency_penalty": 0.7},
            {},
        ]
    ),
    st.lists(st.integers(1, SIZE - 1), min_size=1, max_size=5),
    st.integers(0, SIZE - 1),
)
def test_the_expected_distribution_is_the_samplers(fields: dict[str, float], history: list[int], drawn: int) -> None:
    """Beside a sampler that has the whole vocabulary: the head given the head, and no more outside than is said."""
    ids = read(PROMPT)
    probs = Toy().probs(Asked(ids, fields, np.random.default_rng(0)), history)
    said = tuple(VOCABULARY[token] for token in history)
    found = expected(place_of(ids + history, drawn), fields, said, PROMPT, 20)
    if found is None:
        return
    head = np.array([probs[VOCABULARY.index(token)] for token in found.tokens])
    np.testing.assert_allclose(found.probs_H, head / head.sum(), atol=1e-9)
    others = 1 - head.sum() - probs[0]  # of the rest, the end of text aside
    assert found.rest is not None and others / (others + head.sum()) <= found.rest + 1e-9
    if found.drawn is not None:
        assert found.tokens[found.drawn] == found.text == VOCABULARY[drawn]
    elif found.rest == 0:
        assert probs[drawn] == 0


def test_a_cut_that_rounding_may_move_is_no_proof() -> None:
    def at(*shares: float) -> Place:
        return Place("a", math.log(shares[0]), tuple(zip("abcdefgh", map(math.log, shares))))

    even = at(0.4, 0.15, 0.15, 0.15, 0.1, 0.05)
    assert expected(even, {"top_k": 3}, (), "", 6) is None
    assert expected(even, {"top_p": 0.555}, (), "", 6) is None
    assert expected(even, {"min_p": 0.375}, (), "", 6) is None
    cut = expected(even, {"top_k": 1}, (), "", 6)
    assert cut is not None and cut.probs_H.tolist() == [1.0] and cut.rest == 0


@pytest.mark.parametrize("token", ["<eos>", "", "�", "[/INST]"])
def test_tokens_that_their_text_does_not_tell_are_left_out(token: str) -> None:
    top = (("a", math.log(0.5)), (token, math.log(0.3)), ("b", math.log(0.1)))
    assert expected(Place(token, math.log(0.3), top), {}, (), "", 20) is None
    found = expected(Place("b", math.log(0.1), top), {}, (), "", 20)
    assert found is not None and found.tokens == ("a", "b")
    assert found.rest == pytest.approx(0.1 / 0.7)


def test_a_token_with_the_text_of_a_listed_one_is_not_that() -> None:
    found = expected(Place("a", -7.0, (("a", -0.1), ("b", -3.0))), {}, (), "", 20)
    assert found is not None and found.drawn is None


# Other tests


@given(st.integers(1, 30), st.integers(0, 30), st.floats(0.01, 0.9))
def test_at_least_is_a_sum(n: int, hits: int, rate: float) -> None:
    naive = sum(math.comb(n, i) * rate**i * (1 - rate) ** (n - i) for i in range(hits, n + 1))
    assert binomial_tail(hits, n, rate) == pytest.approx(naive, abs=1e-12)


def test_holm_refutes_by_rank() -> None:
    assert holm({"a": 0.0001, "b": 0.004, "c": 0.02, "d": 0.5}, 0.01) == {"a"}
    assert holm({"a": 0.0001, "b": 0.003, "c": 0.004, "d": 0.5}, 0.01) == {"a", "b", "c"}


def test_samples_of_one_source_and_of_two() -> None:
    rng, strata = np.random.default_rng(1), [at % 3 for at in range(300)]
    one, same = (rng.choice(5, 300, p=[0.4, 0.3, 0.1, 0.1, 0.1]).tolist() for _ in range(2))
    other = rng.choice(5, 300, p=[0.2, 0.3, 0.3, 0.1, 0.1]).tolist()
    assert compare_samples(one, same, strata).p > 0.01
    assert compare_samples(one, other, strata).p < 1e-3 and compare_samples(one, other, strata).finds < 0.2


def test_how_near_two_answers_were() -> None:
    def answer(*places: tuple[str, dict[str, float]]) -> Answer:
        made = tuple(Place(token, top[token], tuple(top.items())) for token, top in places)
        return Answer("".join(place.token for place in made), made)

    mine = answer(("a", {"a": -0.1}), ("b", {"b": -0.6, "c": -0.9}))
    theirs = answer(("a", {"a": -0.1}), ("c", {"c": -0.5, "b": -0.7}))
    apart = first_difference(mine, theirs)
    assert apart is not None and (apart.at, apart.mine, apart.theirs) == (1, "b", "c")
    assert apart.gap == pytest.approx(0.5)
    assert first_difference(mine, mine) is None
    shorter = first_difference(answer(("a", {"a": -0.1})), theirs)
    assert shorter is not None and shorter.at == 1 and shorter.gap is None
    ended = replace(answer(("a", {"a": -0.1}), ("<|end|>", {"<|end|>": -0.1})), text="a")
    assert first_difference(answer(("a", {"a": -0.1})), ended) is None
    assert first_difference(ended, replace(ended, text="a<|end|>")) is not None


# Servers


def test_every_fault_has_its_check() -> None:
    assert FOUND_BY.keys() == FAULTS.keys()
    assert {check for check, _ in FOUND_BY.values()} <= check_names().keys()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    check, samples = FOUND_BY[fault]
    with serving(fault) as url:
        report = audit(url, only=[check], samples=samples)
    assert verdicts(report) == {check: "fail"}, finding(report, check)
    assert report.status == 1 and finding(report, check).detail


@pytest.mark.parametrize("chat", [False, True])
def test_an_honest_server_passes(chat: bool) -> None:
    """Beside an honest twin whose logits are rounded otherwise; over both endpoints."""
    with serving(chat=chat) as url, serving(rounding=1e-3, chat=chat) as beside:
        report = audit(url, beside=beside, samples=200)
    assert {*verdicts(report).values()} == {"pass"}, [each for each in report.findings if each.detail]
    assert verdicts(report).keys() == check_names().keys() and report.status == 0
    assert report.endpoint == ("chat" if chat else "completions")
    assert all(each.tests and each.seen for each in report.findings)
    json.dumps(report.as_dict())


def test_a_pass_that_saw_little_is_weak(tmp_path: Path) -> None:
    assert found_in(10) > 0.2 > found_in(11) and 1 - (1 - found_in(7)) ** 7 == pytest.approx(0.9)
    (tmp_path / "few").write_text("\n".join(each.replace("\n", "\\n") for each in PROMPTS[:4]))
    with serving() as url:
        few = audit(url, only=["stop", "max_tokens"], prompts=PROMPTS[:4])
        many = audit(url, only=["stop", "max_tokens"])
        status, output = run(url, "--only", "stop", "--only", "max_tokens", "--prompts", str(tmp_path / "few"))
    assert verdicts(few) == verdicts(many) == {"stop": "pass", "max_tokens": "pass"}
    assert [each.weak for each in few.findings] == [each["weak"] for each in few.as_dict()["checks"]]
    assert finding(few, "stop").weak and not finding(few, "max_tokens").weak  # which needs no luck
    assert not any(each.weak for each in many.findings)
    assert status == 0 and "1 pass, 1 pass (weak)" in output and "weak: too little was seen" in output


def test_rounding_is_told_from_a_fault() -> None:
    with serving(rounding=0.03) as url, serving() as beside, serving("greedy") as wrong:
        rounded = audit(url, beside=beside, only=["identity", "reference"])
        relaxed = audit(wrong, beside=beside, only=["identity", "reference"])
    assert verdicts(rounded) == {"identity": "pass", "reference": "pass"}, rounded.findings
    assert finding(rounded, "identity").figures["different"] > 0 and "rounding" in finding(rounded, "identity").detail
    assert verdicts(relaxed) == {"identity": "fail", "reference": "pass"}, relaxed.findings
    assert "nats apart" in finding(relaxed, "identity").detail


def test_another_model_is_not_the_reference() -> None:
    with serving(rounding=0.7) as url, serving() as beside:
        report = audit(url, beside=beside, only=["reference"])
    assert verdicts(report) == {"reference": "fail"}


def test_fields_that_are_refused_are_not_supported() -> None:
    with serving(refuses=("min_p", "logit_bias", "n", "seed")) as url:
        report = audit(url, only=["min_p", "logit_bias", "n", "seed", "top_k"], samples=160)
    assert verdicts(report) == dict.fromkeys(["logit_bias", "seed", "n", "min_p"], "not supported") | {"top_k": "pass"}
    assert report.status == 0 and "min_p is not supported" in finding(report, "min_p").detail


def test_token_ids_are_asked_for_as_llama_cpp_wants_it() -> None:
    with serving(tokenizes="content") as url:
        report = audit(url, only=["logit_bias"])
    assert verdicts(report) == {"logit_bias": "pass"} and "of tokens" in finding(report, "logit_bias").finds


def test_an_error_of_the_server_is_a_fault() -> None:
    with serving(breaks=("logit_bias",)) as url:
        report = audit(url, only=["logit_bias", "unknown-field"])
    assert verdicts(report) == {"unknown-field": "pass", "logit_bias": "fail"}
    assert "out of order" in finding(report, "logit_bias").detail


def test_without_log_probabilities_texts_are_compared() -> None:
    with serving(log_probabilities=False) as url, serving() as beside:
        names = ["greedy", "first-tokens", "later-tokens", "top_k", "presence_penalty", "seed", "stop", "logit_bias"]
        report = audit(url, beside=beside, only=names, samples=400)
    missing = dict.fromkeys(["greedy", "later-tokens"], "not supported")
    assert verdicts(report) == dict.fromkeys(names, "pass") | missing, report.findings
    with serving("top_k", "inverted", log_probabilities=False) as url, serving() as beside:
        report = audit(url, beside=beside, only=["first-tokens", "top_k"], samples=1600)
    assert verdicts(report) == {"first-tokens": "fail", "top_k": "fail"}, report.findings


def test_log_probabilities_of_some_tokens_are_a_fault_and_no_others_are_invented() -> None:
    """llama.cpp's server gives none for the tokens of a round with a draft. Texts are compared then."""
    names = ["log-probabilities", "identity", "reference", "first-tokens", "later-tokens", "top_k", "batch"]
    with serving("some log-probabilities") as url, serving() as beside:
        report = audit(url, beside=beside, only=names, samples=400)
    others = dict.fromkeys(["reference", "later-tokens"], "not supported") | {"log-probabilities": "fail"}
    assert verdicts(report) == dict.fromkeys(names, "pass") | others, report.findings
    assert "7 of 8 tokens have none" in finding(report, "log-probabilities").detail


def test_what_is_cut_short_is_undecided() -> None:
    with serving() as url:
        report = audit(url, only=["later-tokens", "temperature"], requests=60, samples=800)
    assert verdicts(report) == {"later-tokens": "undecided", "temperature": "undecided"}
    assert report.requests == 60 and report.status == 2


def test_a_server_whose_engine_ends_fails_once() -> None:
    """The list of models outlives the engine, as in vLLM: the checks that follow have nothing to judge."""
    with serving(ends=("response_format",)) as url:
        report = audit(url, only=["max_tokens", "response_format", "logit_bias"], samples=400)
    assert verdicts(report) == {"max_tokens": "pass", "response_format": "fail", "logit_bias": "undecided"}
    assert "does not answer any more" in finding(report, "response_format").detail


def test_too_few_samples_prove_nothing() -> None:
    with serving() as url:
        report = audit(url, only=["first-tokens"], samples=16)
    assert verdicts(report) == {"first-tokens": "undecided"}


def test_an_honest_server_fails_as_rarely_as_is_said() -> None:
    """Draws of the toy, without HTTP: the p-values of 60 audits are no smaller than they may be."""
    toy, ids, found = Toy(), read(PROMPT), []
    for run in range(60):
        draws: list[Draw] = []
        for at in range(12):
            tokens, _ = toy.generate(Asked(ids, {"max_tokens": 8}, np.random.default_rng([run, at])))
            places = tuple(place_of(ids + tokens[:n], token) for n, token in enumerate(tokens))
            draws += read_draws(Answer("", places), PROMPT, 0, {}, 20)
        found.append(evidence(draws).p)
    assert sum(p <= 0.1 for p in found) <= 12 and min(found) > 1e-4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"only": ["frist-tokens"]}, "did you mean 'first-tokens'"),
        ({"only": ["identity"]}, "'identity' needs a reference"),
        ({"skip": list(check_names())}, "no check is left"),
        ({"prompts": ["one"]}, "1 prompts are too few"),
        ({"samples": 3}, "3 samples are too few"),
    ],
)
def test_what_is_asked_for_wrongly_is_said(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        audit("http://127.0.0.1:9", **options)  # type: ignore[arg-type]


def test_nothing_there_is_no_verdict() -> None:
    with pytest.raises(Unreachable, match="does not answer"):
        audit("http://127.0.0.1:9")
    with pytest.raises(Unreachable, match=r"'127\.0\.0\.1:9' has no scheme: write 'http://127"):
        audit("127.0.0.1:9")
    with serving() as url, pytest.raises(Unreachable, match="/v1/nope/v1/models answers 404: is the path of"):
        audit(f"{url}/v1/nope")
    with serving() as url, pytest.raises(Unreachable, match="first request"):
        audit(url, name="toy", endpoint="chat")
    with serving() as url, pytest.raises(ValueError, match="choices: \\['auto', 'completions', 'chat'\\]"):
        Server(url, endpoint="other")


# The command


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["audit", *arguments], env={"COLUMNS": "80"})
    return result.exit_code, result.output


def test_the_command_says_it_in_a_line_a_check(tmp_path: Path) -> None:
    texts, figures = tmp_path / "prompts.txt", tmp_path / "audit.json"
    texts.write_text("\n".join(itertools.islice((f"Tell me about {n}.\\nNow:" for n in "abcdefgh"), 8)))
    asked = ["--only", "unknown-field", "--only", "max_tokens", "--prompts", str(texts), "--json", str(figures)]
    with serving("unknown") as url:
        status, output = run(url, *asked)
        assert status == 1
        assert run(url, *asked, "--skip", "unknown-field")[0] == 0
        assert run(url, *asked, "--skip", "unknown-field", "--requests", "5")[0] == 2
        assert run(f"{url}/v1", "--beside", url, "--model", "fly-tiny")[0] == 2
    assert "unknown-field" in output and "fail" in output and "1 pass" in output
    assert max(map(len, output.splitlines())) <= 80
    record = json.loads(figures.read_text())
    assert record["status"] == 2 and record["checks"][0]["verdict"] == "undecided"


def test_the_command_without_a_server() -> None:
    assert run()[0] == 2 and run("http://127.0.0.1:9")[0] == 2
    assert run("http://127.0.0.1:9")[1].startswith("error: http://127.0.0.1:9 does not answer")
    status, output = run("--list")
    assert status == 0 and all(name in output for name in check_names())


def test_a_wrong_request_is_refused_before_the_reference_is_loaded() -> None:
    missing = ("--model", "no/such/model")
    with serving() as url:
        for wrong, said in ((("--endpoint", "other"), "'completions'"), (("--only", "frist-tokens"), "first-tokens")):
            status, output = run(url, *missing, *wrong)
            assert status == 2 and said in output and "no/such" not in output, output
        status, output = run(url, *missing)
        assert status == 2 and "no/such/model" in output, output
    status, output = run("http://127.0.0.1:9", *missing)
    assert status == 2 and "does not answer" in output and "no/such" not in output, output


def test_a_reference_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from fly.serve import Server as Serving

    async def startup(self: Serving, sockets: object = None) -> None:
        raise OSError("no room for the server")

    monkeypatch.setattr(Serving, "startup", startup)
    with serving() as url:
        status, output = run(url, "--model", "fly-tiny")
    assert status == 2, output
    assert "the reference 'fly-tiny' has ended: OSError: no room for the server" in words(output), output


def test_a_reference_whose_engine_ends_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from fly.engine.scheduler import Scheduler

    step, steps = Scheduler.step, itertools.count()

    def short(self: Scheduler, seconds: float) -> object:
        if next(steps) == 20:
            raise MemoryError("no room for the engine")
        return step(self, seconds)

    monkeypatch.setattr(Scheduler, "step", short)
    with serving() as url:
        status, output = run(url, "--model", "fly-tiny", "--only", "identity")
    assert status == 2, output
    assert "the reference 'fly-tiny' has ended: MemoryError: no room for the engine" in words(output), output


def test_a_reference_that_ends_is_no_fault_of_the_server() -> None:
    gone = pytest.raises(Unreachable, match="the reference does not answer any more, in the check 'identity'")
    with serving() as url, serving(ends=("top_p",)) as beside, gone:
        audit(url, beside=beside, only=["identity"])


def test_fly_serve_passes_beside_a_model_that_fly_runs() -> None:
    from tests.serving import MODEL, running

    with running("ngram") as server:
        status, output = run(server.url, "--model", MODEL, "--dtype", "float32", "--samples", "100")
    assert status == 0, output


def test_the_reference_runs_on_the_kernels_that_are_asked_for() -> None:
    from tests.serving import MODEL, running

    asked = ("--model", MODEL, "--dtype", "float32", "--only", "identity")
    with running("none", {"kernels": "torch"}) as server:
        status, output = run(server.url, *asked, "--kernels", "torch")
        assert status == 0, output
        status, output = run(server.url, *asked, "--kernels", "w8a9")
        assert status == 2 and "w8a9" in output, output
