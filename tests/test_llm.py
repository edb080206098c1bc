"""The Python interface: names that are promised, defaults, errors that name the choices, text in and out."""

from __future__ import annotations

import copy
import importlib
import json
import shutil
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import fly
from fly import LLM, Piece, SamplingParams
from fly.backends.cpu.library import available, split, why_not
from fly.drafts import CascadeDraft, NGramDraft, SingleDraft
from fly.models import CheckpointError
from fly.models.bundled import BUNDLED, CHECKPOINTS
from fly.models.loading import save_model
from fly.ops import derive
from fly.policies import Exact, FLy, LossySampling, parse_policy
from fly.types import Guarantee
from tests.toys import dense_logits, random_llama

VOCAB = 1024
MODEL = random_llama(2, VOCAB, hidden=32, heads=2, kv_heads=1, layers=1, max_positions=128)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without tokenizer files."""
    directory = tmp_path_factory.mktemp("bare")
    save_model(MODEL, directory, dtype=torch.float32, eos_token_id=7)
    return directory


@pytest.fixture
def speaker(bare: Path, tmp_path: Path) -> Path:
    """The same with the bundled tokenizer, a chat template and sampling defaults."""
    for path in bare.iterdir():
        shutil.copy(path, tmp_path)
    shutil.copy(CHECKPOINTS / "fly-target" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 1], "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40})
    )
    return tmp_path


# --- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("fly", "LLM SamplingParams"),
        ("fly.policies", "AcceptancePolicy Exact LossySampling FLy verify EntropyGate AgreeingWindow ControlToken"),
        ("fly.drafts", "DraftStrategy SingleDraft NGramDraft CascadeDraft"),
        ("fly.cache", "BlockAllocator PagedKVCache OutOfBlocks"),
        ("fly.models", "Llama LlamaConfig load_model"),
        ("fly.types", "Draft Target Noise Verdict SamplingParams"),
        ("fly.runner.request", "Row Stats Token"),
    ],
)
def test_public_names(module: str, names: str) -> None:
    room = importlib.import_module(module)
    assert set(names.split()) <= set(room.__all__)
    assert all(hasattr(room, name) for name in room.__all__)


def test_the_output_says_what_is_promised() -> None:
    (out,) = LLM(MODEL, NGramDraft()).generate([[1, 2, 1, 2]], GREEDY)
    assert (out.text, out.finish_reason, out.logprobs) == ("", "length", None)
    assert len(out.token_ids) == len(out.provenance) == 12
    assert {"rounds", "drafted", "accepted", "relaxed"} <= set(vars(out.stats)) and out.stats.tau >= 1
    assert out.guarantee is Guarantee.LOSSLESS
    assert BUNDLED == ("fly-target", "fly-draft", "fly-tiny")


# --- arguments -------------------------------------------------------------------------------------------


def test_one_for_all_or_one_for_each() -> None:
    llm = LLM(MODEL, NGramDraft(), policy=LossySampling(2), k=3)
    prompts = [[1, 2, 1, 2], [3], [4, 4]]
    policies = [Exact(), FLy(), LossySampling(3)]
    params = [GREEDY.model_copy(update={"max_tokens": n}) for n in (1, 5, 9)]
    outs = llm.generate(prompts, params, policy=policies, k=[0, 1, 9])
    assert [len(out.token_ids) for out in outs] == [1, 5, 9]
    assert [out.guarantee for out in outs] == [policy.guarantee for policy in policies]
    assert [out.prompt_token_ids for out in outs] == prompts
    for out, (prompt, param, policy, k) in zip(outs, zip(prompts, params, policies, [0, 1, 9])):
        assert llm.generate([prompt], param, policy=policy, k=k)[0].token_ids == out.token_ids
    assert {out.guarantee for out in llm.generate(prompts, GREEDY)} == {Guarantee.HEURISTIC}
    assert all(out.stats.drafted == 0 for out in llm.generate(prompts, GREEDY, k=0))
    for name, value in (("params", [GREEDY]), ("policy", [Exact()] * 2), ("k", [1] * 4)):
        options = {"params": GREEDY, name: value}
        with pytest.raises(ValueError, match=f"{name} has {len(value)} entries for 3 prompts"):
            llm.generate(prompts, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: LLM("no-such-model"), ("'no-such-model'", *BUNDLED)),
        (lambda: LLM(MODEL, "no-such-draft"), ("'no-such-draft'", *BUNDLED)),
        (lambda: LLM(MODEL, k=-1), ("k", "-1")),
        (lambda: LLM(MODEL, k=True), ("k", "True")),
        (lambda: LLM(MODEL, k=1.5), ("k", "1.5")),
        (lambda: LLM(MODEL).generate([[1]], GREEDY, k=-3), ("k", "-3")),
        (lambda: LLM(MODEL).generate([[1]], GREEDY, k=[-4]), ("k", "-4")),
        (lambda: LLM(MODEL, SingleDraft(random_llama(0, VOCAB + 1))), (str(VOCAB), str(VOCAB + 1))),
        (lambda: LLM(MODEL, CascadeDraft([NGramDraft(), SingleDraft(random_llama(0, 5))])), (str(VOCAB), "5")),
        (lambda: LLM(MODEL).generate([1, "2"]), ("prompt [1, '2']", "token ids")),
        (lambda: LLM(MODEL).generate("text"), ("tokenizer", "token ids")),
        (lambda: LLM(MODEL).generate(["text"]), ("tokenizer", "token ids")),
        (lambda: LLM(MODEL).stream([1]), ("tokenizer",)),
        (lambda: LLM(MODEL).chat([{"role": "user", "content": "hi"}]), ("tokenizer", "token ids")),
        (lambda: LLM(MODEL).generate([[1]], SamplingParams(stop=("x",))), ("stop_token_ids",)),
        (lambda: LLM(MODEL).generate([[1]], SamplingParams(stop_token_ids=(VOCAB,))), (f"{VOCAB}",)),
        (lambda: LLM(MODEL).generate([[1]], GREEDY, policy=7), ("7", "AcceptancePolicy", "text")),
        (lambda: LLM(MODEL).generate([[1]], GREEDY, policy=FLy), ("FLy()",)),
        (lambda: LLM(MODEL, policy="flie"), ("'flie'", "fly.paper")),
        (lambda: parse_policy("flie"), ("flie", "exact", "lossy", "fly")),
    ],
)
def test_errors_name_the_value_and_the_choices(call: Callable[[], object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temprature": 1.0}, ("temprature",)),
        ({"temperature": -0.1}, ("temperature", "-0.1")),
        ({"temperature": float("nan")}, ("temperature", "nan")),
        ({"temperature": float("inf")}, ("temperature", "inf")),
        ({"top_p": 0.0}, ("top_p", "0.0")),
        ({"top_p": 1.01}, ("top_p", "1.01")),
        ({"top_k": -2}, ("top_k", "-2")),
        ({"top_k": 2**63}, ("top_k", str(2**63))),
        ({"min_p": 1.5}, ("min_p", "1.5")),
        ({"max_tokens": -1}, ("max_tokens", "-1")),
        ({"min_tokens": 9, "max_tokens": 8}, ("min_tokens 9", "max_tokens 8")),
        ({"seed": 2**63}, ("seed",)),
        ({"stop": ("a", "")}, ("empty stop",)),
        ({"stop": ""}, ("empty stop",)),
        ({"logprobs": -1}, ("logprobs", "-1")),
    ],
)
def test_sampling_params_refuse_what_they_do_not_know(fields: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert all(word in str(caught.value) for word in words)


def test_top_k_of_minus_one_is_off_as_in_vllm() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    with pytest.raises(ValidationError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]


# --- directories -----------------------------------------------------------------------------------------


def test_a_directory_without_tokenizer_takes_token_ids(bare: Path) -> None:
    llm = LLM(bare, bare, dtype="float32", k=4)
    assert llm.tokenizer is None and llm.eos_ids == {7} and isinstance(llm.draft, SingleDraft)
    (out,) = llm.generate([[5, 6]], GREEDY)
    text = [5, 6]
    while len(text) < 14 and text[-1] != 7:
        text.append(int(dense_logits(MODEL, text)[-1].argmax()))
    assert out.token_ids == text[2:] and out.text == ""
    assert llm.generate([[5, 6]])[0].token_ids[:12] == out.token_ids  # greedy by default
    with pytest.raises(ValueError, match="token ids"):
        llm.generate(["text"])


def test_generation_config_is_the_default(speaker: Path) -> None:
    llm = LLM(speaker, dtype="float32")
    assert llm.default_params == SamplingParams(temperature=0.6, top_p=0.9, top_k=40)
    assert llm.eos_ids == {1, 2}
    asked = llm.default_params.model_copy(update={"seed": 4, "max_tokens": 8})
    torch.manual_seed(1)
    assert llm.generate(["a"], asked)[0].token_ids == llm.generate(["a"], asked)[0].token_ids
    (speaker / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.6}))
    with pytest.warns(UserWarning, match=r"generation_config\.json: temperature 0.6 without effect"):
        again = LLM(speaker, dtype="float32")
    assert again.default_params == SamplingParams(temperature=0) and again.eos_ids == {2}
    for broken, words in (({"do_sample": True, "top_p": 7}, "top_p"), ({"eos_token_id": [VOCAB]}, str(VOCAB))):
        (speaker / "generation_config.json").write_text(json.dumps(broken))
        with pytest.raises(CheckpointError, match=words):
            LLM(speaker, dtype="float32")


def test_a_draft_of_another_vocabulary_is_translated(speaker: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    for path in speaker.iterdir():
        shutil.copy(path, other)
    raw = json.loads((other / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(raw))
    params = GREEDY.model_copy(update={"ignore_eos": True})
    plain = LLM(speaker, dtype="float32").generate(["Hello"], params)[0].token_ids
    for draft, mode in ((other, "text"), (f"ngram+{other}", "text"), (speaker, None)):
        llm = LLM(speaker, draft, dtype="float32")
        assert getattr(llm.draft, "mode", None) == mode
        assert llm.generate(["Hello"], params)[0].token_ids == plain
    (other / "tokenizer.json").unlink()
    save_model(random_llama(2, VOCAB + 1), other, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"1025 .*1024.* the draft does not have a tokenizer"):
        LLM(speaker, other, dtype="float32")


def test_a_bad_word_never_comes_up(speaker: Path) -> None:
    llm = LLM(speaker, speaker, dtype="float32", k=4)
    params = GREEDY.model_copy(update={"ignore_eos": True, "max_tokens": 60})
    plain = llm.generate(["Hello"], params)[0]
    word = llm.tokenizer.decode([plain.token_ids[3]])  # type: ignore[union-attr]
    for words in ((word,), (plain.text[4:9],)):
        if words[0].strip() and "\ufffd" not in words[0]:
            out = llm.generate(["Hello"], params.model_copy(update={"bad_words": words}))[0]
            assert out.token_ids != plain.token_ids
            again = llm.generate(["Hello"], params.model_copy(update={"bad_words": words}), k=0)[0]
            assert out.token_ids == again.token_ids
    with pytest.raises(ValueError, match=r"logit_bias .*99999"):
        llm.generate(["Hello"], SamplingParams(logit_bias={99999: 1.0}))
    with pytest.raises(ValueError, match="empty bad word"):
        SamplingParams(bad_words=("",))


# --- text ------------------------------------------------------------------------------------------------


def test_pieces_know_their_tokens(speaker: Path) -> None:
    llm = LLM(speaker, speaker, dtype="float32", k=4, prefix_reuse=False)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (out,) = llm.generate(["Hello"], params)
    stream = llm.stream("Hello", params)
    pieces = list(stream)
    assert all(isinstance(piece, Piece) and isinstance(piece, str) for piece in pieces)
    assert "".join(pieces) == out.text
    assert [token for piece in pieces for token in piece.tokens] == out.provenance
    assert stream.stats == out.stats and stream.finish_reason == "length"
    assert all(piece.tokens for piece in pieces) and len(pieces) > 1
    with pytest.raises(StopIteration):
        next(stream)


def test_a_stream_checks_its_arguments_at_once(speaker: Path) -> None:
    llm = LLM(speaker, dtype="float32")
    with pytest.raises(ValueError, match="empty"):
        llm.stream([])
    with pytest.raises(ValueError, match="-1"):
        llm.stream("a", k=-1)
    assert list(llm.stream("a", SamplingParams(max_tokens=0))) == []


def test_two_streams_at_once(speaker: Path) -> None:
    llm = LLM(speaker, speaker, dtype="float32", k=4)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outs = llm.generate(["One", "Two more"], params)
    streams = [llm.stream(prompt, params) for prompt in ("One", "Two more")]
    turns = list(zip_longest(*streams, fillvalue=""))
    assert ["".join(pieces) for pieces in zip(*turns)] == [out.text for out in outs] and len(turns) > 2
    assert all(a.num_free == a.num_blocks for a in llm.scheduler.allocators)


def test_stop_strings_hold_for_generate_and_stream(speaker: Path) -> None:
    llm = LLM(speaker, speaker, dtype="float32", k=5)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (free,) = llm.generate(["Hello"], params)
    stop = (free.text[12:15], free.text[7:9])
    stopping = params.model_copy(update={"stop": stop})
    (out,) = llm.generate(["Hello"], stopping)
    assert out.finish_reason == "stop"
    assert out.text == free.text[: min(free.text.index(s) for s in stop)]
    assert "".join(llm.stream("Hello", stopping)) == out.text
    both = llm.generate(["Hello", "Hello"], [params, stopping])
    assert [o.text for o in both] == [free.text, out.text]


def test_chat_goes_through_the_template(speaker: Path) -> None:
    llm = LLM(speaker, NGramDraft(), dtype="float32")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("[user]hi[assistant]yes>", add_special_tokens=False)
    assert llm.chat_prompt(messages) == ids
    assert llm.chat_prompt("hi") == llm.chat_prompt([{"role": "user", "content": "hi"}])
    out = llm.chat(messages, GREEDY, k=3)
    assert out.prompt_token_ids == ids
    assert out.token_ids == llm.generate([ids], GREEDY)[0].token_ids
    (speaker / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        LLM(speaker, dtype="float32").chat(messages)


def test_a_text_and_its_tokens_are_one_prompt(speaker: Path) -> None:
    llm = LLM(speaker, dtype="float32", prefix_reuse=False)
    assert llm.tokenizer is not None
    (text,), (ids,) = llm.generate("Hello", GREEDY), llm.generate([llm.tokenizer.encode("Hello")], GREEDY)
    assert text == ids and text.text == llm.tokenizer.decode(text.token_ids)
    assert fly.LLM is LLM


@pytest.mark.parametrize("reuse", [True, False])
def test_prefix_reuse_is_of_all_caches(reuse: bool) -> None:
    llm, prompt = LLM("fly-tiny", "fly-tiny", prefix_reuse=reuse), [*range(3, 300)]
    llm.generate([prompt], temperature=0, max_tokens=4)
    assert [each.adopt("another", prompt) > 0 for each in llm.scheduler.allocators] == [reuse, reuse]


def test_open_streams_share_the_cache_and_make_room_for_each_other() -> None:
    """Where the cache holds one request at a time, the later one waits; nothing of the earlier one is lost."""
    llm = LLM(random_llama(0), SingleDraft(random_llama(1)), cache=64, block_size=4)
    llm.tokenizer = LLM("fly-tiny").tokenizer
    params = SamplingParams(temperature=0, max_tokens=40)
    assert llm.tokenizer is not None
    (alone,) = llm.generate([[1, 2, 3]], params)
    first = llm.stream([1, 2, 3], params)
    pieces = [next(first)]
    assert llm.generate([[4, 5, 6]], params)[0].stats.generated == 40
    pieces += list(first)
    assert "".join(pieces) == alone.text
    first = llm.stream([1, 2, 3], params)
    next(first)
    first.close()
    assert llm.generate([[4, 5, 6]], params)[0].stats.generated == 40
    assert all(allocator.num_free == allocator.num_blocks for allocator in llm.scheduler.allocators)


# --- many requests at once -------------------------------------------------------------------------------


def test_several_completions_of_one_prompt_are_those_of_their_seeds() -> None:
    llm = LLM(MODEL, SingleDraft(random_llama(5, VOCAB)), k=3)
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=10, n=3)
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    outs = llm.generate(prompts, params)
    single = params.model_copy(update={"n": 1})
    for out, prompt in zip(outs, prompts):
        assert len(out.others) == 2 and not any(other.others for other in out.others)
        seeds = [11, derive(11, -1), derive(11, -2)]
        for sample, seed in zip((out, *out.others), seeds):
            (alone,) = llm.generate([prompt], single.model_copy(update={"seed": seed}))
            assert sample.token_ids == alone.token_ids and sample.prompt_token_ids == prompt
        assert len({tuple(sample.token_ids) for sample in (out, *out.others)}) == 3
    assert all(a.num_free == a.num_blocks for a in llm.scheduler.allocators)


def test_a_stream_is_of_one_completion(speaker: Path) -> None:
    with pytest.raises(ValueError, match=r"n 2.*one completion"):
        LLM(speaker, dtype="float32").stream("Hello", SamplingParams(n=2))


def test_the_end_token_in_a_prompt_ends_nothing_and_no_token_asked_for_gives_none(bare: Path) -> None:
    llm = LLM(bare, NGramDraft(), dtype="float32")
    assert llm.eos_ids == {7}
    params = SamplingParams(temperature=0, max_tokens=5)
    with_end, without = [1, 7, 2], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (out,) = llm.generate([with_end], params)
    (free,) = llm.generate([with_end], without)
    assert out.token_ids == (free.token_ids[: free.token_ids.index(7) + 1] if 7 in free.token_ids else free.token_ids)
    for most in (0, 1):
        (out,) = llm.generate([with_end], params.model_copy(update={"max_tokens": most}), k=15)
        assert len(out.token_ids) == most and out.finish_reason in ("length", "stop")


def test_a_share_of_free_memory_sizes_all_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fly.runner.memory.free_memory", lambda device: 1_000_000)
    llm = LLM(MODEL, SingleDraft(random_llama(5, VOCAB)), cache=0.5)
    stored = sum(
        2 * cache.keys.numel() * cache.keys.element_size()
        for cache in (llm.engine.runner.cache, llm.draft.runner.cache)  # type: ignore[union-attr]
    )
    assert 0.45e6 < stored <= 0.5e6


def test_streams_of_different_rules_run_in_one_batch(speaker: Path) -> None:
    """To fetch of one advances all; each gives what it gives alone."""
    llm = LLM(speaker, NGramDraft(), dtype="float32")
    asked = [("Hello", Exact(), 4, 0.0), ("one two one two", FLy(), 7, 0.0), ("abc", LossySampling(2), 2, 0.9)]
    rules = [
        (text, SamplingParams(temperature=t, seed=3, max_tokens=20), {"policy": rule, "k": k})
        for text, rule, k, t in asked
    ]
    alone = ["".join(llm.stream(text, params, **options)) for text, params, options in rules]  # type: ignore[arg-type]
    streams = [llm.stream(text, params, **options) for text, params, options in rules]  # type: ignore[arg-type]
    pieces: list[list[str]] = [[], [], []]
    for turn in zip_longest(*streams):
        for got, piece in zip(pieces, turn):
            got += [piece] if piece else []
    assert ["".join(got) for got in pieces] == alone
    assert not llm.scheduler


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_tokens_tell_what_the_target_thought_of_them(temperature: float) -> None:
    """Of the unprocessed distribution, whatever it was sampled from; nothing is worked out unasked."""
    model = random_llama()
    params = SamplingParams(temperature=temperature, top_k=5, seed=1, max_tokens=12, explain=True, ignore_eos=True)
    llm = fly.LLM(model, draft=NGramDraft(), k=4)
    [out], [unasked] = (
        llm.generate([[1, 2, 3]], params),
        llm.generate([[1, 2, 3]], params.model_copy(update={"explain": False})),
    )
    distribution = dense_logits(model, [1, 2, 3, *out.token_ids])[2:-1].softmax(-1)
    assert out.token_ids == unasked.token_ids
    for token, row in zip(out.provenance, distribution):
        assert token.target_choice == int(row.argmax())
        assert token.prob == pytest.approx(float(row[token.id]), abs=1e-5)
        assert token.choice_prob == pytest.approx(float(row.max()), abs=1e-5)
        assert token.entropy == pytest.approx(float(-(row * row.log()).sum()), abs=1e-4)
    assert {(token.prob, token.choice_prob, token.entropy) for token in unasked.provenance} == {(None, None, None)}


def test_another_llm_may_share_the_loaded_model() -> None:
    plain = LLM("fly-target", device="cpu")
    fast = LLM(plain, "ngram+fly-draft")
    assert fast.engine.runner.executor is plain.engine.runner.executor
    assert fast.engine.runner.cache is not plain.engine.runner.cache
    params = SamplingParams(temperature=0.0, max_tokens=40)
    prompt = plain.chat_prompt("Sam has 3 red pens and buys 4 more. How many pens does Sam have?")
    (alone,), (drafted,), (again,) = (llm.generate([prompt], params) for llm in (plain, fast, plain))
    assert drafted.text == alone.text == again.text != ""
    assert drafted.stats.drafted and fast.eos_ids == plain.eos_ids


NARROW = pytest.mark.skipif(available() == ["torch"], reason=why_not())


@NARROW
@pytest.mark.parametrize("kernels", ["w8a8", "torch"])
@pytest.mark.parametrize("draft", ["fly-draft", "ngram+fly-tiny+fly-draft", "fly-eagle3", SingleDraft("fly-draft")])
def test_a_draft_takes_kernels_and_dtype_of_its_target(draft: Any, kernels: str) -> None:
    target = LLM("fly-target", kernels=kernels, dtype="float32")
    (own,) = target.computed
    head = draft == "fly-eagle3"  # its few weights are not rounded
    wanted = (split(own[0])[0] if head else own[0], "float32")
    for llm in (LLM(target, copy.copy(draft)), LLM("fly-target", copy.copy(draft), kernels=kernels, dtype="float32")):
        assert llm.computed[0] == own and set(llm.computed[1:]) == {wanted}
    assert "draft_runs=" in repr(llm) and f"{wanted[0]} in float32" in repr(llm)


@NARROW
def test_a_draft_may_have_kernels_and_dtype_of_its_own() -> None:
    target = LLM("fly-target", kernels="w8a8")
    best, hooked = available()[0], random_llama(2, VOCAB, hidden=32, heads=2, kv_heads=1, layers=1, max_positions=128)
    hooked.norm.register_forward_hook(lambda *_: None)
    for llm, wanted in (
        (LLM(target, "model(fly-draft, kernels=w4a8)"), (f"{best}-w4a8", "bfloat16")),
        (LLM(target, "model(fly-draft, dtype=float32)"), (f"{best}-w8a8", "float32")),
        (LLM(target, "fly-draft", kernels="torch", dtype="float16"), ("torch", "float16")),
        (LLM(target, SingleDraft("fly-draft", kernels=best)), (best, "bfloat16")),
        # PyTorch runs this target because nothing compiled does, which says nothing about its draft.
        (LLM(hooked, "fly-draft"), (best, "float32")),
    ):
        assert llm.computed[1] == wanted
    # Without a draft to load by its name there is nothing that could have them.
    for draft, options, told in (
        (None, {"kernels": "w4a8"}, "kernels 'w4a8': this model was loaded for '.*-w8a8'"),
        (SingleDraft("fly-draft"), {"dtype": "float32"}, "dtype 'float32': this model was loaded in torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=told):
            LLM(target, draft, **options)
    with pytest.raises(ValueError, match="kernels 'w8a8': this model was loaded for 'torch'"):
        LLM(hooked, kernels="w8a8")
    assert LLM(target, kernels="w8a8").computed == target.computed
