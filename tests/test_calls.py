"""What users of other libraries type first: every form of prompts and options, and outputs that show themselves."""

from __future__ import annotations

import asyncio
import html
import inspect
import io
import json
import pickle
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly import LLM, Output, Piece, SamplingParams, Stats, Token, Why
from fly import llm as interface
from fly.config import Config
from fly.drafts import NGramDraft
from fly.engine.worker import Stopped
from fly.extras.eval.plan import Plan
from fly.extras.eval.task import load_task
from fly.llm import ChatOptions, listed
from fly.models.thinking import ChatPrompt
from fly.params import Sampling, StructuredOutput
from fly.policies import AfterTokens, AgreeingWindow, Exact, FLy
from tests import user
from tests.toys import random_llama

VOCAB = 1024
MODEL = random_llama(2, VOCAB, hidden=32, heads=2, kv_heads=1, layers=1, max_positions=128)
TEXT = "Take the list 4 9 5 7."
ONE = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("fly-tiny", "ngram", "fly(theta=0.3)", k=4)


def test_a_users_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """What ``mypy`` makes of it is a matter of ``make types``."""
    user.main()
    assert capsys.readouterr().out.strip()


# --- options ---------------------------------------------------------------------------------------------


def every_way(llm: LLM, prompt: str, **options: Any) -> list[Output]:
    """The same call in every form that gives outputs, of the same ids."""
    ids = llm.chat_prompt(prompt)
    stream = llm.stream(ids, **options)
    text = "".join(stream)

    async def coroutines() -> list[Output]:
        [one], two = await llm.agenerate([ids], **options), await llm.achat(prompt, **options)
        assert "".join([piece async for piece in llm.astream(ids, **options)]) == text
        return [one, two, *await llm.achat([prompt], **options)]

    found = [llm.generate([ids], **options)[0], llm.chat(prompt, **options), *llm.chat([prompt], **options)]
    found += asyncio.run(coroutines())
    assert {output.text for output in found} == {text}
    return found


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ("fly(theta=0.5)", FLy(theta=0.5)),
        ("fly.paper", FLy.paper()),
        ("exact | entropy(0.3) & after(2)", None),
        ({"name": "fly", "theta": 0.5}, FLy(theta=0.5)),
        (FLy(theta=0.5) & AfterTokens(2), FLy(theta=0.5) & AfterTokens(2)),
    ],
)
def test_a_policy_is_a_text_a_preset_or_a_mapping_everywhere(llm: LLM, given: Any, policy: Any) -> None:
    wanted = str(policy or given)
    assert {str(output.policy) for output in every_way(llm, TEXT, policy=given, max_tokens=5)} == {wanted}
    made = LLM(llm, "ngram", policy=given)
    assert str(made.policy) == str(Config(policy=given).policy) == str(made.generate("a", max_tokens=1)[0].policy)
    assert [str(output.policy) for output in llm.generate(["a", "b"], max_tokens=1, policy=[given, Exact()])] == [
        wanted,
        "exact",
    ]


def test_sampling_parameters_are_keywords_everywhere(llm: LLM) -> None:
    wanted = SamplingParams(temperature=1.5, max_tokens=9, seed=3)
    [out] = llm.generate([llm.chat_prompt(TEXT)], wanted)
    for one in every_way(llm, TEXT, temperature=1.5, max_tokens=9, seed=3, policy="fly"):
        assert len(one.token_ids) == 9
    exact = every_way(llm, TEXT, temperature=1.5, max_tokens=9, seed=3)
    named = every_way(llm, TEXT, sampling_params=wanted)
    assert {tuple(one.token_ids) for one in exact + named} == {tuple(out.token_ids)}
    # keywords change what the parameters say, of each prompt
    outs = llm.generate(["a", "b"], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5)], temperature=0)
    again = llm.generate(["a", "b"], [SamplingParams(temperature=0, max_tokens=n) for n in (3, 5)])
    assert [one.token_ids for one in outs] == [one.token_ids for one in again]
    assert [len(one.token_ids) for one in llm.generate(["a"] * 2, n=2, max_tokens=2)[1].others] == [2]
    # what keywords do not say is the checkpoint's
    other = LLM(llm)
    other.default_params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    assert len(other.generate("a", seed=1)[0].token_ids) == 7


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("speculative_config", "draft"),
        ("num_speculative_tokens", "k"),
        ("max_model_len", "max_context"),
        ("dytpe", "dtype"),
    ],
)
def test_an_unknown_option_of_a_model_is_an_error_that_names_the_choices(option: str, meant: str) -> None:
    with pytest.raises(TypeError) as caught:
        LLM("fly-tiny", **{option: 1})
    assert f"'{option}' is no option of LLM (did you mean '{meant}'?)" in str(caught.value)
    assert "choices" not in str(caught.value)  # only where nothing is like it
    with pytest.raises(TypeError, match=r"'qqqq' is no option of LLM; choices: \['model', .*'cache'"):
        LLM("fly-tiny", qqqq=1)  # type: ignore[arg-type]  # what is tested


def test_parts_of_a_message_are_one_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]
    assert llm.chat_prompt([{"role": "user", "content": parts}]) == llm.chat_prompt(ONE)


# Lines of a configuration that are right, and lines with an error and what it says.
RIGHT = ["model: fly-tiny", "draft: ngram", "max_rows: 4", "policy:\n  name: fly\n  theta: 0.1", "prefix_reuse: true"]
WRONG = [
    ("k: 3\nk: 5", 1, "'k' is given twice"),
    ('{"k": 3,\n "k": 3}', 1, "'k' is given twice"),
    ("kernels:\n  a: 1\n  b: 2\n  a: 3", 3, "'a' is given twice"),
    ("k: many", 0, "'many'"),
    ("cache:\n  - 1\n  - 2", 0, "[1, 2]"),
    ("polcy: exact", 0, "did you mean 'policy'?"),
    ("kernels: 2024-13-01", 0, "month"),
    ("kernels: !mine x", 0, "'!mine'"),
    ("kernels: ]", 0, "not valid YAML"),
    ('kernels: "\x07"', 0, "not allowed"),
    ("policy:\n  name: fly\n  tetha: 0.1", 2, "did you mean 'theta'?"),
    ("policy:\n  name: fly\n  # high\n  theta: high", 3, "'high'"),
    (
        "policy:\n  name: relaxed\n  base: {name: exact}\n  condition:\n    name: all\n    parts:\n"
        "      - {name: room}\n      - name: window\n        window: 2.5",
        8,
        "2.5",
    ),
]


@given(st.permutations(RIGHT), st.sampled_from(WRONG), st.integers(0, len(RIGHT)), st.integers(0, 3))
def test_an_error_in_a_file_names_its_line(
    right: list[str], wrong: tuple[str, int, str], before: int, comments: int
) -> None:
    """Wherever it stands; lines count from 1, as editors show them."""
    text, line, said = wrong
    parts = [] if text.startswith("{") else [each for each in right if each.split(":")[0] != text.split(":")[0]]
    above = "".join(f"{each}\n" for each in ["# a setup", *parts[:before], *["# -"] * comments])
    with TemporaryDirectory() as folder:
        (path := Path(folder) / "setup.yaml").write_text(
            above + text + "\n" + "\n".join(parts[before:]), encoding="utf-8"
        )
        with pytest.raises(ValueError) as caught:
            Config.read(path)
        assert str(caught.value).startswith(f"{path}, line {above.count(chr(10)) + line + 1}: "), caught.value
        assert said in str(caught.value)


@pytest.mark.parametrize("read", [Config.read, Plan.read, load_task])
def test_a_file_has_fields_and_each_once(read: Callable[[str], object], tmp_path: Path) -> None:
    path = tmp_path / "setup.yaml"
    for empty in ("", "# nothing\n", "---\n", "{}\n"):  # a default model would run, and the user would not know
        path.write_text(empty, encoding="utf-8")
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: this \w+ is empty; fields: \["):
            read(str(path))
    for text, line in (("a: 3\nb: 4\na: 5\n", 3), ('{"a": 3, "a": 3}', 1)):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}, line {line}: .*'a' is given twice, first on"):
            read(str(path))
    path.write_text("- 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"is a mapping of fields, not \[1\]"):
        read(str(path))
    path.write_bytes(b"about: x\nprompt: \xff\n")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}, line 2: not in UTF-8"):
        read(str(path))


def test_json_may_be_indented_by_tabs(tmp_path: Path) -> None:
    (path := tmp_path / "setup.json").write_text('{\n\t"model": "fly-tiny",\n\t"k":\t3\n}\n', encoding="utf-8")
    assert Config.read(path).k == 3


def test_options_are_the_fields_of_sampling_parameters() -> None:
    own = {"sampling_params", "policy", "k", "priority", "draft", "tools", "chat_template_kwargs"}
    assert Sampling.__optional_keys__ == set(SamplingParams.model_fields)
    assert ChatOptions.__optional_keys__ == {*SamplingParams.model_fields, *own}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda llm: llm.generate("a", temprature=1),
            ["'temprature'", "did you mean 'temperature'"],
        ),
        (lambda llm: llm.generate("a", max_new_tokens=1), ["'max_new_tokens'", "did you mean 'max_tokens'"]),
        (lambda llm: llm.chat("a", polcy="fly"), ["'polcy'", "did you mean 'policy'"]),
        (lambda llm: llm.stream("a", progress=False), ["'progress'", "choices", "'temperature'"]),
        (lambda llm: llm.chat("a", response_format={}), ["'response_format'", "did you mean 'structured'"]),
        (lambda llm: llm.chat("a", tool=[]), ["'tool'", "did you mean 'tools'"]),
        (lambda llm: llm.chat("a", stream=True), ["'stream'", "stream(chat_prompt(messages))"]),
        (
            lambda llm: llm.chat("a", enable_thinking=False),
            ["'enable_thinking'", "chat_template_kwargs={'enable_thinking': False}"],
        ),
        (lambda llm: llm.generate(ONE), ["'user'", "chat takes messages"]),
        (lambda llm: llm.generate(ONE[0]), ["mapping", "chat takes messages"]),
        (lambda llm: llm.stream(ONE), ["'user'", "chat_prompt"]),
        (lambda llm: llm.generate({"prompt_token_ids": [1]}), ["mapping", "'prompt_token_ids'"]),
        (lambda llm: llm.generate(b"abc"), ["b'abc'", "decode"]),
        (lambda llm: llm.chat([]), ["at least one message"]),
        (lambda llm: llm.chat([*ONE, {"role": "user"}]), ["message 1 has no content", "'user'"]),
        (lambda llm: llm.chat([{"role": "user", "content": None}]), ["message 0 has no content"]),
        (lambda llm: llm.chat([{"content": "a"}]), ["message 0 has no role"]),
        (
            lambda llm: llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            ["message 0", "'image_url'", "{'type': 'text', 'text': ...}"],
        ),
        (lambda llm: llm.generate("a\ud83d"), ["half a surrogate pair"]),
        (lambda llm: llm.chat("\ud83d" * 2**15), ["half a surrogate pair"]),
        (lambda llm: llm.generate("a", bad_words=["\ud83d"]), ["half a surrogate pair"]),
        (lambda llm: LLM(None), ["model None", "path"]),
        (lambda llm: LLM(MODEL, block_size=0), ["block_size: ", "equal to 1, got 0"]),
        (lambda llm: LLM(MODEL, cache=0), ["cache 0"]),
        (lambda llm: LLM({"model": MODEL}), ["is no name, path"]),
        (lambda llm: llm.generate("a", temperature=-1), ["temperature", "-1"]),
        (lambda llm: llm.generate("a", max_tokens=2, min_tokens=3), ["min_tokens 3", "max_tokens 2"]),
        (lambda llm: llm.generate("a", structured={"regx": "a"}), ["'regx'", "did you mean 'regex'"]),
        (lambda llm: llm.generate("a", SamplingParams(), sampling_params=SamplingParams()), ["sampling_params", "one"]),
        (lambda llm: llm.generate("a", {"temperature": 0}), ["{'temperature': 0}", "SamplingParams", "temperature=0"]),
        (lambda llm: llm.generate("a", {"temperature": 0}, seed=1), ["{'temperature': 0}", "SamplingParams"]),
        (lambda llm: llm.generate("a", policy="flie"), ["'flie'", "fly.paper"]),
        (lambda llm: llm.generate("a", policy={"name": "fly", "thta": 1}), ["'thta'", "theta"]),
        (lambda llm: llm.generate(["a", "b"], policy=["fly", 3]), ["policy 3", "text"]),
        (lambda llm: llm.generate("a", policy=""), ["policy ''"]),
        (lambda llm: llm.generate("a", policy=AgreeingWindow(2)), ["window(2)", "Exact() | window(2)"]),
        (lambda llm: llm.generate(np.array([1.0])), ["float64", "integers"]),
        (lambda llm: llm.generate(torch.tensor([True])), ["bool", "integers"]),
        (lambda llm: llm.generate(torch.zeros(1, 1, 1, dtype=torch.int64)), ["[1, 1, 1]", "one dimension"]),
        (lambda llm: llm.generate(np.array([[5, VOCAB]])), [str(VOCAB)]),
        (lambda llm: llm.generate({"input_ids": [[1]]}), ["mapping", "input_ids"]),
        (lambda llm: llm.generate(5), ["prompts 5"]),
        (lambda llm: SamplingParams(temprature=1), ["'temprature'", "did you mean 'temperature'"]),
    ],
)
def test_errors_name_what_is_wrong_and_the_choices(llm: LLM, call: Callable[[LLM], object], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        call(llm)
    assert all(word in str(caught.value) for word in words), caught.value


# --- prompts ---------------------------------------------------------------------------------------------


@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), min_size=1, max_size=4),
    dtype=st.sampled_from(["int64", "int32", "int16"]),
)
def test_arrays_and_tensors_are_lists_of_ids(prompts: list[list[int]], dtype: str) -> None:
    for make in (lambda ids: np.array(ids, dtype), lambda ids: torch.tensor(ids, dtype=getattr(torch, dtype))):
        assert listed([make(ids) for ids in prompts]) == prompts == listed(iter(prompts))
        assert listed(make(prompts[0])) == prompts[:1]
        equal = [ids[:1] for ids in prompts]
        assert listed(make(equal)) == equal
        assert all(type(token) is int for ids in listed(make(equal)) for token in ids)


def test_prompts_come_as_arrays_of_ids_or_of_texts() -> None:
    llm = LLM(MODEL)
    wanted = [out.token_ids for out in llm.generate([[1, 2, 3], [4, 5, 6]], max_tokens=4)]
    ids = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.uint16)
    for prompts in (ids, torch.tensor(ids.tolist(), dtype=torch.int32), [ids[0], torch.tensor([4, 5, 6])], (*ids,)):
        assert [out.token_ids for out in llm.generate(prompts, max_tokens=4)] == wanted
    assert [out.token_ids for out in llm.generate(ids[1], max_tokens=4)] == wanted[1:]
    assert [out.token_ids for out in llm.generate([4, 5, 6], max_tokens=4)] == wanted[1:]
    assert listed(np.array(["a", "bc"])) == ["a", "bc"]
    assert llm.generate([]) == llm.generate(np.zeros((0, 3), dtype=int)) == []


def test_several_conversations_are_answered_at_once(llm: LLM) -> None:
    asked = [[{"role": "user", "content": text}] for text in ("Take 1 2.", "Add 3 to 4.", TEXT)]
    alone = [llm.chat(one, max_tokens=8, temperature=0).token_ids for one in asked]
    for given_messages in (asked, tuple(asked), ["Take 1 2.", "Add 3 to 4.", TEXT]):
        outputs = llm.chat(given_messages, max_tokens=8, temperature=0, policy=["exact"] * 3)
        assert [out.policy for out in outputs] == [Exact()] * 3
        assert [out.token_ids for out in llm.chat(given_messages, max_tokens=8, temperature=0)] == alone
    assert [len(out.token_ids) for out in llm.chat(asked, [SamplingParams(max_tokens=n) for n in (1, 2, 3)])] == [
        1,
        2,
        3,
    ]


# --- outputs ---------------------------------------------------------------------------------------------


def test_outputs_are_written_short(llm: LLM) -> None:
    [out] = llm.generate("x" * 30, temperature=0, max_tokens=60)
    assert len(repr(out)) < 200 and repr(out).startswith(f"Output({out.text[:20]!r}"[:20])
    assert f"{len(out.token_ids)} tokens, {out.finish_reason}, fly (heuristic)" in repr(out)
    [ids] = LLM(MODEL).generate([[1, 2]], max_tokens=3)
    assert repr(ids) == f"Output(token_ids={ids.token_ids}, 3 tokens, length, exact (lossless))"
    runs = "{} in {}".format(*llm.computed[0])
    assert repr(llm) == f"LLM('fly-tiny', draft='ngram', policy='fly', k=4, runs={runs!r})"
    lookup = LLM(llm, NGramDraft())
    assert repr(lookup) == f"LLM('fly-tiny', draft=NGramDraft, policy='exact', k=15, runs={runs!r})"
    assert repr(LLM(MODEL)) == "LLM(Llama, draft=None, policy='exact', k=15, runs='torch in float32')"
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(temperature=0.0, stop="a")) == "SamplingParams(temperature=0.0, stop=('a',))"
    assert repr(StructuredOutput(regex="a|b")) == "StructuredOutput(regex='a|b')"
    assert eval(repr(SamplingParams(n=2, structured={"regex": "a"}))) == SamplingParams(n=2, structured={"regex": "a"})
    assert repr(Stats(rounds=2, emitted=5, drafted=4)) == "Stats(rounds=2, emitted=5, drafted=4, tau=2.5)"


def test_an_output_as_a_dictionary_is_json(llm: LLM) -> None:
    out = llm.chat(TEXT, temperature=1, seed=5, max_tokens=12, n=2, logprobs=2, explain=True)
    data = out.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["token_ids"] == out.token_ids == [token["id"] for token in data["provenance"]]
    assert data["stats"]["tau"] == out.stats.tau and data["policy"] == "fly" and data["guarantee"] == "heuristic"
    assert [other["text"] for other in data["others"]] == [out.others[0].text]
    assert [{int(i): nats for i, nats in one.items()} for one in data["logprobs"]] == out.logprobs
    assert {token["why"] for token in data["provenance"]} <= {why.name.lower() for why in Why}
    for name in Output.__dataclass_fields__.keys() - {"_reader"}:
        assert name in data


def said(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def test_a_notebook_shows_an_output_in_colours_and_escaped() -> None:
    pair = LLM("fly-target", "fly-draft", "fly")
    [out] = pair.generate(pair.chat_prompt(TEXT), temperature=1.2, seed=1, max_tokens=60, n=2, explain=True)
    page = out._repr_html_()
    assert said(page).startswith(out.text + out.others[0].text)
    reasons = {token.why.name.lower() for each in (out, *out.others) for token in each.provenance}
    assert len(reasons) > 2
    for why in reasons:
        assert re.search(rf'title="token \d+: {why}', page)
    # each piece is in the colour of its reason
    colours = {}
    for style, why in re.findall(r'<span style="([^"]*)" title="token \d+: (\w+)[^\n"]*"', page):
        assert colours.setdefault(why, style) == style
    assert len(set(colours.values())) == len(colours)


def test_reasons_and_guarantees_print_as_words() -> None:
    """And a reason stays a number."""
    why, bound = Why.RELAXED, fly.Guarantee.BOUNDED
    assert f"{why} {why!s} {why:>8} {Why.MATCH:s}" == "RELAXED RELAXED  RELAXED MATCH"
    assert f"{why:d} {why:02x}" == "2 02" and why == 2 and json.dumps(why) == "2" and "abc"[why] == "c"
    assert torch.tensor([Why.BONUS]).tolist() == [4]
    assert f"{bound} {bound!s:>8}" == "bounded  bounded"


@given(text=st.text(alphabet="<>&\"'`/ab =\n", min_size=1), clause=st.text(alphabet="<>&\"'/a", max_size=4))
def test_nothing_that_a_model_says_becomes_markup(text: str, clause: str) -> None:
    token = Token(5, Why.RELAXED, clause, 6)
    [plain] = LLM(MODEL).generate([[1]], max_tokens=1)
    made = replace(plain, text=text, provenance=[token])
    made.__dict__["pieces"] = [Piece(text, (token,)), Piece(text, (token,), "reasoning")]
    for each in (made, replace(plain, text=text), replace(plain, provenance=[token]), replace(plain, reasoning=text)):
        page = each._repr_html_()
        tags = re.findall(r"<[^>]*>", page)
        assert all(re.fullmatch(r'</?(div|span)( (style|title)="[^"<>]*")*>', tag) for tag in tags), page
        assert page.count("<") == len(tags) == page.count(">")
    assert said(made._repr_html_()).startswith(text + text)


def test_outputs_and_pieces_travel(llm: LLM) -> None:
    out = llm.chat(TEXT, max_tokens=6)
    assert out.text and "".join(out.pieces) == out.text
    assert deepcopy(out) == out and deepcopy(replace(out)).pieces == out.pieces
    far = pickle.loads(pickle.dumps(replace(out)))
    assert far == out and far.pieces == [] and said(far._repr_html_()).startswith(out.text)
    piece = pickle.loads(pickle.dumps(out.pieces[0]))
    assert (piece, piece.tokens, piece.kind) == (out.pieces[0], out.pieces[0].tokens, "text")


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**62),
    bias=st.sampled_from([{}, {2: 6.0, 3: 6.0}]),
    stop=st.sampled_from([(), ("e",), (" list", "is 4"), ("is the",)]),
    **{name: st.booleans() for name in ("skip_special_tokens", "include_stop_str_in_output", "ignore_eos")},
    min_tokens=st.sampled_from([0, 6]),
    shown=st.booleans(),
)
def test_pieces_are_those_of_a_stream(llm: LLM, seed: int, bias: dict[int, float], shown: bool, **options: Any) -> None:
    """Control tokens that are shown, a stop string that was held back, and tokens without a text included."""
    params = SamplingParams(temperature=0.9, max_tokens=20, seed=seed, logit_bias=bias, **options)
    prompt = ChatPrompt(llm.chat_prompt(TEXT), shown=["<|end|>"] if shown else [])
    streamed, [out] = list(llm.stream(prompt, params)), llm.generate(prompt, params)
    assert "".join(out.pieces) == out.text and [*map(str, out.pieces)] == [*map(str, streamed)]
    for pieces in (out.pieces, streamed):
        assert [token for piece in pieces for token in piece.tokens] == out.provenance


# --- help, ends, hints, progress -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (LLM, [name for name in vars(LLM(MODEL)) if not name.startswith("_")]),
        (Output, [name for name in Output.__dataclass_fields__ if name != "_reader"]),
        (Stats, [*Stats.__dataclass_fields__, "tau", "acceptance_rate"]),
        (Token, Token._fields),
        (Piece, ["tokens", "kind"]),
        (SamplingParams, SamplingParams.model_fields),
        (StructuredOutput, StructuredOutput.model_fields),
    ],
)
def test_help_names_every_attribute(kind: type, names: list[str]) -> None:
    doc = inspect.getdoc(kind) or ""
    assert not [name for name in names if not re.search(rf"\b{name}\b", doc)]


def test_a_with_block_ends_the_engine() -> None:
    with LLM(MODEL) as llm:
        [out] = llm.generate([[1, 2]], max_tokens=2)
        thread = llm.worker._thread
        assert thread is not None and thread.is_alive()
    thread.join()
    with pytest.raises(Stopped):
        llm.generate([[1, 2]], max_tokens=2)
    with pytest.raises(KeyError), LLM(MODEL) as llm:
        raise KeyError("what happens inside goes on")
    assert len(out.token_ids) == 2


def test_generate_names_chat_once_where_a_chat_model_says_nothing(llm: LLM) -> None:
    quiet = LLM(llm)
    end = min(quiet.eos_ids)
    nothing = {"temperature": 0, "logit_bias": {end: 100}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet.chat(TEXT, **nothing)  # the template was applied
        quiet.generate([llm.chat_prompt(TEXT)], **nothing)  # they know what they do
        quiet.generate("a", max_tokens=0)
        quiet.generate("a", max_tokens=3)
        LLM(MODEL).generate([[1]], max_tokens=1)
    with pytest.warns(UserWarning, match=r"the answer to 'a' is empty.*chat") as caught:
        quiet.generate(["a", "b"], **nothing)
        quiet.generate("a", **nothing)
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.warns(UserWarning, match="chat"):
        asyncio.run(LLM(llm).agenerate("a", **nothing))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "progress", "seconds"), [(True, True, 0.0), (True, False, 0.0), (False, True, 0.0), (True, True, 60.0)]
)
def test_a_long_call_shows_how_far_it_is_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, progress: bool, seconds: float
) -> None:
    monkeypatch.setattr(interface, "_LONG", seconds)
    monkeypatch.setattr(sys, "stderr", screen := Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    llm, run = LLM(MODEL), threading.Event()

    def wait(*arguments: Any) -> Any:
        deadline = time.monotonic() + 30
        while "0/2" not in screen.getvalue() and terminal and progress and not seconds and time.monotonic() < deadline:
            time.sleep(0.01)
        run.set()
        return begin(*arguments)

    begin = llm.worker.run
    monkeypatch.setattr(llm.worker, "run", wait)
    llm.generate([[1], [2]], max_tokens=3, progress=progress)
    assert run.is_set() and ("0/2" in screen.getvalue()) == (terminal and progress and not seconds)
    # the terminal is as it was: nothing of ours goes on, and the next call may show its own
    assert interface._bars.acquire(blocking=False)
    interface._bars.release()
    assert sum(isinstance(thread, threading.Timer) for thread in threading.enumerate()) == 0


def test_there_is_one_bar_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_LONG", 0.0)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with interface.one_bar() as free, interface.one_bar() as second:
        assert (free, second) == (True, False)
        LLM(MODEL).generate([[1], [2]], max_tokens=3)
    assert screen.getvalue() == ""


def test_fly_names_what_is_public() -> None:
    assert set(fly.__all__) == {"LLM", "Guarantee", "Output", "Piece", "SamplingParams", "Stats", "Token", "Why"}
