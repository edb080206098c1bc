"""Structured output: whatever drafts and whatever excuses, the output has its form."""

from __future__ import annotations

import json
import random
import re
from collections import Counter, abc
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import pre_tokenizers
from typer.testing import CliRunner

from fly import LLM, SamplingParams, cli
from fly.drafts import CascadeDraft, DraftStrategy, NGramDraft, SingleDraft, TreeDraft
from fly.drafts.base import pad, pad_trees
from fly.models.loading import save_model
from fly.policies import AcceptancePolicy, EntropyGate, Exact, FLy, LossySampling
from fly.runner.request import Row
from fly.runner.structured import Grammars, Matcher
from fly.types import Draft, StructuredOutput
from tests.toys import PADDING, random_llama, save_tokenizer


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target and a draft that spell any text, with random weights."""
    directory = tmp_path_factory.mktemp("bytes")
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), '":', '"}', "},", "ab", "tru", "10", "Ġ{", '",', "Ġ["]
    found = []
    for seed, name in enumerate(("target", "draft")):
        size = save_tokenizer(directory / name, pieces)
        model = random_llama(seed, size + PADDING, hidden=16, heads=2, kv_heads=1, layers=1, max_positions=300)
        save_model(model, directory / name, dtype=torch.float32, eos_token_id=size - 2)
        found.append(directory / name)
    return found


class WildDraft(DraftStrategy):
    """Any tokens, two to follow each or one, which know of no form."""

    def __init__(self, branches: int = 2) -> None:
        self.branches, self.spare = branches, 12

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int]) -> Draft:
        trees = []
        for row, most in zip(rows, max_len):
            rng = random.Random(len(row.tokens))
            nodes = self.branches * most
            tokens = [rng.choice([rng.randrange(266), rng.randrange(32, 127)]) for _ in range(nodes)]
            trees.append((tokens, [node // self.branches - 1 for node in range(nodes)]))
        return pad_trees(trees) if self.branches > 1 else pad([tokens for tokens, _ in trees])


@pytest.fixture(scope="module")
def llms(checkpoints: list[Path]) -> dict[str, LLM]:
    """The same target, drafted for in every way."""
    target, draft = checkpoints

    def small() -> SingleDraft:
        return SingleDraft(draft, dtype="float32")

    strategies: dict[str, DraftStrategy] = {
        "model": small(),
        "ngram": NGramDraft(),
        "cascade": CascadeDraft([NGramDraft(), small()]),
        "tree": TreeDraft(draft, nodes=10, depth=4, dtype="float32"),
        "wild": WildDraft(),
        "wild chain": WildDraft(1),
        "itself": SingleDraft(target, dtype="float32"),  # of which nearly all is accepted
    }
    return {name: LLM(target, strategy, dtype="float32", k=6) for name, strategy in strategies.items()}


# --- requests --------------------------------------------------------------------------------------------


def test_a_form_is_given_in_exactly_one_way() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    spec = SamplingParams(structured={"json_schema": schema}).structured  # type: ignore[arg-type]
    assert spec is not None and spec.kind == "json_schema"
    assert list(json.loads(str(spec.json_schema))["properties"]) == ["b", "a"]  # in the schema's order
    assert spec == StructuredOutput(json_schema=json.dumps(schema)) and hash(spec)
    assert StructuredOutput(regex="").kind == "regex"
    for wrong, reason in (
        ({}, "exactly one"),
        ({"regex": "a", "json_object": True}, "exactly one .*json_object"),
        ({"regexp": "a"}, "regexp"),
        ({"json_schema": "{"}, "no JSON"),
        ({"json_schema": "[1]"}, "a schema is an object"),
        ({"json_schema": {"a": object()}}, "no JSON"),
    ):
        with pytest.raises(ValidationError, match=reason):
            SamplingParams(structured=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"regex": "a(b"}, "structured regex 'a.b' cannot be used.*unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "cannot be used"),
        ({"json_schema": {"type": "strang"}}, "json_schema.*strang"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "[Uu]nsatisfiable"),
        ({"grammar": "start: nowhere"}, "structured grammar.*nowhere"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused_before_anything_runs(
    llms: dict[str, LLM], spec: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        llms["ngram"].generate(["x"], SamplingParams(structured=spec))  # type: ignore[arg-type]


# --- whole outputs ---------------------------------------------------------------------------------------

scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-120, 120),
        st.integers(0, 150),
    ),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(["ab", "a", 1, 10, None, True]), min_size=1)),
)


def _nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "ab", "key", "é", 'q"'])
    return st.one_of(
        st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            inner,
            st.integers(0, 1),
            st.integers(0, 1),
        ),
        st.builds(
            lambda properties, drop: {
                "type": "object",
                "properties": properties,
                "required": list(properties)[drop:],
                "additionalProperties": False,
            },
            st.dictionaries(names, inner, max_size=2),
            st.integers(0, 1),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
    )


schemas = st.recursive(scalars, _nested, max_leaves=3)
regexes = st.sampled_from(
    ["a+b?", "(yes|no|ja|nein)", r"[0-9]{1,3}(\.[0-9])?", "[^a-z]{2,5}", "(ab|ba){1,9}", "é?(x|yz)*", ""]
)
forms = st.one_of(
    st.builds(lambda schema: {"json_schema": schema}, schemas), st.builds(lambda regex: {"regex": regex}, regexes)
)
policies = st.sampled_from(
    [
        Exact(),
        FLy("top3", 0.01, window=0, hold=0),
        Exact() | EntropyGate(0.0),  # excuses whatever it can
        LossySampling(50.0),
    ]
)
ways = st.sampled_from(["model", "ngram", "cascade", "tree", "wild", "wild chain", "itself"])
sampled = st.builds(
    lambda temperature, top_p, seed, max_tokens: SamplingParams(
        temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens
    ),
    st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    st.sampled_from([1.0, 0.9]),
    st.integers(0, 1000),
    st.sampled_from([60, 60, 9]),
)


def has_form(text: str, form: dict[str, Any]) -> bool:
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    jsonschema.validate(json.loads(text), form["json_schema"])
    return True


@cache
def reference(llm: LLM, spec: StructuredOutput) -> Matcher:
    return Grammars(llm.tokenizer, llm.engine.runner.executor.config.vocab_size, llm.eos_ids).matcher(  # type: ignore[arg-type]
        SamplingParams(structured=spec)
    )


@given(
    way=ways,
    requests=st.lists(st.tuples(st.one_of(st.none(), forms), policies, sampled), min_size=1, max_size=3),
    ignore_eos=st.booleans(),
)
def test_outputs_have_their_form_whatever_drafts_and_whatever_excuses(
    llms: dict[str, LLM],
    way: str,
    requests: list[tuple[dict[str, Any] | None, AcceptancePolicy, SamplingParams]],
    ignore_eos: bool,
) -> None:
    """Rows of all forms, and of none, side by side; those cut by ``max_tokens`` are the beginning of such a text."""
    llm = llms[way]
    params = [
        each.model_copy(update={"structured": form and StructuredOutput(**form), "ignore_eos": ignore_eos})
        for form, _, each in requests
    ]
    outs = llm.generate(["{x}"] * len(requests), params, policy=[policy for _, policy, _ in requests])
    for out, (form, _, _), each in zip(outs, requests, params):
        if form is None:
            continue
        event(f"{out.finish_reason}, relaxed: {out.stats.relaxed > 0}")
        text = out.token_ids[:-1] if out.finish_reason == "stop" else out.token_ids
        if out.finish_reason == "stop":
            assert out.token_ids[-1] in llm.eos_ids
            assert has_form(out.text, form)
        assert not llm.tokenizer.control_ids.intersection(text)  # type: ignore[union-attr]
        assert each.structured is not None
        for n in range(len(text)):  # a fresh look at each token
            logits = torch.zeros(1, llm.engine.runner.executor.config.vocab_size)
            reference(llm, each.structured).constrain(logits, text[:n], [], [])
            assert logits[0, text[n]] == 0


@settings(max_examples=40)
@given(way=ways, form=forms, seed=st.integers(0, 99))
def test_at_temperature_zero_speculation_changes_nothing(
    llms: dict[str, LLM], way: str, form: dict[str, Any], seed: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, structured=StructuredOutput(**form))
    prompt = [[seed, 7, seed // 2, 7]]
    plain, fast = (llms[way].generate(prompt, params, k=k, policy=Exact())[0] for k in (0, 6))
    assert (fast.token_ids, fast.finish_reason) == (plain.token_ids, plain.finish_reason)
    assert [token.target_choice for token in fast.provenance] == fast.token_ids


@pytest.mark.parametrize("way", ["wild", "wild chain"])
@pytest.mark.parametrize("policy", [Exact() | EntropyGate(0.0), FLy("top3", 0.0, window=0, hold=0), LossySampling(1e6)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_excuses_a_forbidden_token(
    llms: dict[str, LLM], way: str, policy: AcceptancePolicy, temperature: float
) -> None:
    """Hardly any of what is drafted is allowed, and the gates are open for all of it."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=60, structured={"regex": "[ab]{30}"})  # type: ignore[arg-type]
    (out,) = llms[way].generate(["{x}"], params, policy=policy)
    assert re.fullmatch("[ab]{30}", out.text) and out.finish_reason == "stop"
    assert out.stats.drafted > 10 * out.stats.accepted
    assert all(gate.passed > 10 for gate in out.stats.gates.values() if policy.relaxation == EntropyGate(0.0))


def test_each_sample_has_a_matcher_of_its_own(llms: dict[str, LLM]) -> None:
    """A matcher tells what it was last asked about, so rows that go on side by side must not share one."""
    params = SamplingParams(structured={"regex": "a+"}, n=2)  # type: ignore[arg-type]
    first, second = (request.row for request in llms["ngram"].requests(["x"], params))
    assert first.matcher is not None and second.matcher is not None and first.matcher is not second.matcher
    assert first.fork(Exact(), 0).matcher is first.matcher


def test_samples_of_one_request_have_their_form_each(llms: dict[str, LLM]) -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=40, structured={"regex": "([ab]{2}-){6}"}, n=4)  # type: ignore[arg-type]
    for name in ("model", "wild"):
        (out,) = llms[name].generate(["x"], params)
        texts = [out.text, *(other.text for other in out.others)]
        assert len(texts) == 4 and len(set(texts)) > 1 and all(re.fullmatch("([ab]{2}-){6}", text) for text in texts)
        assert texts[0] == llms[name].generate(["x"], params.model_copy(update={"n": 1}))[0].text


def test_a_model_drafts_within_the_form(llms: dict[str, LLM]) -> None:
    """Its own draft, all of which the target keeps: the two were told the same."""
    params = SamplingParams(temperature=0, max_tokens=40, structured={"regex": "(ab|ba|[0-9]{2}){30}"})  # type: ignore[arg-type]
    for name in ("itself", "model"):
        (out,) = llms[name].generate(["x"], params, policy=Exact() | EntropyGate(0.0))
        assert out.stats.drafted and (name == "model" or out.stats.accepted == out.stats.drafted)
        # within a fork of ten ways nothing but the forbidden is ever refused
        assert Counter(token.why.name for token in out.provenance)["CORRECTION"] == 0


# --- ends ------------------------------------------------------------------------------------------------


def test_a_whole_text_ends_even_where_ends_are_ignored_or_too_early(llms: dict[str, LLM]) -> None:
    llm = llms["itself"]
    form = {"regex": "[ab]{3}"}
    for extra in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"ignore_eos": True, "min_tokens": 20}):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, structured=form, **extra)  # type: ignore[arg-type]
            (out,) = llm.generate(["x"], params)
            assert re.fullmatch("[ab]{3}", out.text) and out.finish_reason == "stop"
            assert out.token_ids[-1] in llm.eos_ids
    # where the form could go on, it does
    for extra in ({"ignore_eos": True}, {"min_tokens": 12}):
        params = SamplingParams(temperature=1.0, max_tokens=12, structured={"regex": "[ab]*"}, **extra)  # type: ignore[arg-type]
        (out,) = llm.generate(["x"], params)
        assert len(out.token_ids) == 12 and out.finish_reason == "length" and set(out.text) <= set("ab")


def test_what_cuts_a_text_says_so(llms: dict[str, LLM]) -> None:
    llm = llms["itself"]
    a, x = (llm.tokenizer.token_id(text) for text in ("a", "x"))  # type: ignore[union-attr]
    form = {"regex": "a{5}x"}

    def run(**extra: Any) -> tuple[str, str]:
        (out,) = llm.generate(["x"], SamplingParams(temperature=0, structured=form, **extra))  # type: ignore[arg-type]
        return out.text, out.finish_reason

    assert run() == ("aaaaax", "stop")
    assert run(max_tokens=3) == ("aaa", "length")
    assert run(max_tokens=0) == ("", "length")
    assert run(stop="aax") == ("aaa", "stop")
    assert run(stop_token_ids=[a]) == ("a", "stop")  # text like any other, to the grammar
    assert run(stop_token_ids=[a], min_tokens=4) == ("a", "stop")  # which leaves nothing else to say
    assert run(stop_token_ids=[x]) == ("aaaaax", "stop")
    assert run(logit_bias={a: -100.0}) == ("aaaaax", "stop")


def test_the_form_wins_over_bad_words_that_leave_nothing_else(llms: dict[str, LLM]) -> None:
    for regex, wanted in (("(a|b)c", "bc"), ("ac", "ac")):
        params = SamplingParams(temperature=0, structured={"regex": regex}, bad_words=("a",))  # type: ignore[arg-type]
        assert llms["model"].generate(["x"], params)[0].text == wanted


def test_a_vocabulary_that_lacks_what_must_follow_is_named(tmp_path: Path) -> None:
    letters = ["a", "b", "ab", "ba", "aa", "bab"]
    size = save_tokenizer(tmp_path, letters) + PADDING
    save_model(random_llama(1, size), tmp_path, dtype=torch.float32, eos_token_id=len(letters))
    llm = LLM(tmp_path, SingleDraft(tmp_path, dtype="float32"), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=20, structured={"regex": "a{6}c"})  # type: ignore[arg-type]
    for k in (0, 5):
        with pytest.raises(ValueError, match="structured output cannot go on"):
            llm.generate([[0, 1]], params, k=k)
    # nothing is left behind, and a draft that runs into it does no harm to a text that can end before
    (out,) = llm.generate([[0, 1]], params.model_copy(update={"structured": StructuredOutput(regex="a{6}b?")}))
    assert re.fullmatch("a{6}b?", out.text)


# --- the bundled models ----------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("policy", ["exact", "fly"])
def test_the_bundled_target_answers_under_a_schema(policy: str, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    for schema in (json.dumps(SCHEMA), str(tmp_path / "schema.json")):
        arguments = ["generate", "Who are you?", "--json-schema", schema, "--policy", policy, "--json"]
        result = CliRunner().invoke(cli.app, [*arguments, "--dtype", "float32", "--draft", "ngram+fly-draft"])
        assert result.exit_code == 0, result.output
        answer = json.loads(result.output)
        assert answer["finish_reason"] == "stop" and answer["stats"]["drafted"]
        jsonschema.validate(json.loads(answer["text"]), SCHEMA)


def test_the_command_knows_regular_expressions_and_names_what_is_wrong() -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["generate", "Hello", "--dtype", "float32", *arguments])

    assert re.fullmatch("(yes|no), [0-9]{2}", run("--regex", "(yes|no), [0-9]{2}").output.strip())
    for arguments, reason in (
        (("--regex", "("), "unclosed group"),
        (("--regex", "a", "--json-schema", "{}"), "exactly one"),
        (("--json-schema", "nowhere.json"), "nowhere.json"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and reason in result.output
