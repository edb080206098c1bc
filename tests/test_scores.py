"""Log-probabilities of prompts: transformers' own, however the prompt comes in, whoever drafts, whoever runs beside."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.cache import PagedKVCache
from fly.drafts import NGramDraft
from fly.engine import Engine
from fly.engine.scheduler import Scheduler
from fly.policies import Exact, FLy
from fly.runner.request import Row
from fly.runner.runner import Runner
from tests.serving import MODEL, running
from tests.test_model import llama_configs, seeds, transformers_twin, twin_logits
from tests.toys import HashModel, build_llama

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@settings(max_examples=15)
@given(llama_configs(), seeds, st.data())
def test_they_are_those_of_transformers(config: Any, seed: int, data: st.DataObject) -> None:
    """In chunks of any size, by their own or beside others that share their beginning, up to one token more than the
    context; drafts and relaxed policies have no part in them."""
    model, context = build_llama(config, seed), config.max_position_embeddings
    twin = transformers_twin(model)
    ids = st.lists(st.integers(0, config.vocab_size - 1), min_size=1, max_size=context // 2)
    begins = data.draw(ids)
    prompts = [begins + data.draw(ids) for _ in range(3)]
    prompts.append((prompts[0] * context)[: context + 1])
    starts = [data.draw(st.integers(0, len(prompt))) for prompt in prompts]
    llm = LLM(model, NGramDraft(), FLy(), block_size=data.draw(st.integers(1, 8)))
    llm.scheduler.step_tokens, llm.scheduler._max_scored = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 40))
    params = [
        SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=2, prompt_logprobs_start=start) for start in starts
    ]
    with llm:
        outputs = llm.generate(prompts, params)
    for prompt, start, output in zip(prompts, starts, outputs):
        assert (output.token_ids, output.finish_reason) == ([], "length")
        found = output.prompt_logprobs
        assert found is not None and len(found) == len(prompt)
        first = max(1, start)
        assert found[:first] == [None] * first
        if len(prompt) > 1:
            log_JV = twin_logits(twin, prompt[:-1]).log_softmax(-1)
        for place in range(first, len(prompt)):
            entry, wanted_V = found[place], log_JV[place - 1]
            assert entry is not None
            assert all(abs(value - float(wanted_V[token])) < 1e-4 for token, value in entry.items())
            assert prompt[place] in entry and 2 <= len(entry) <= 3
            likeliest = [*entry][:2]
            assert float(wanted_V.max() - wanted_V[likeliest[0]]) < 1e-4
            assert float(wanted_V.topk(2).values[1] - wanted_V[likeliest[1]]) < 1e-4


def test_what_is_not_scored_is_shared_and_what_is_scored_is_not() -> None:
    with LLM(MODEL, dtype="float32", block_size=4) as llm:
        prompt = list(range(5, 45))
        asked = [SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=s) for s in (0, 30, 0, 40)]
        whole, part, again, nothing = (llm.generate([prompt], params)[0] for params in asked)
        assert [each.stats.cached for each in (whole, part, again)] == [0, 28, 0]
        assert whole.prompt_logprobs is not None and part.prompt_logprobs is not None
        assert again.prompt_logprobs == whole.prompt_logprobs and nothing.prompt_logprobs == [None] * 40
        for one, other in zip(whole.prompt_logprobs[30:], part.prompt_logprobs[30:]):
            assert one is not None and other is not None and one == pytest.approx(other, abs=1e-5)


def test_several_completions_have_the_scores_of_their_one_prompt() -> None:
    with LLM(MODEL, draft="ngram", dtype="float32") as llm:
        for most in (0, 3):
            params = SamplingParams(max_tokens=most, n=3, prompt_logprobs=1, seed=1)
            [output] = llm.generate(["Take the list 4 9"], params)
            assert output.prompt_logprobs is not None and all(output.prompt_logprobs[1:])
            assert all(other.prompt_logprobs == output.prompt_logprobs for other in output.others)
            assert {len(one.token_ids) for one in (output, *output.others)} == {most}


def test_a_long_scored_prompt_does_not_block_others() -> None:
    """Those that decode take part in every step meanwhile, and short prompts come in beside it."""
    scheduler = Scheduler(Engine(Runner(HashModel(), PagedKVCache(HashModel().config, 200, 2))), step_tokens=64)
    scheduler._max_scored = 4

    def row(tokens: list[int], client: str, **params: Any) -> Row:
        return Row(tokens, len(tokens), SamplingParams(temperature=0, **params), Exact(), 0, 0, client=client)

    decoding = row([1, 2], "a", max_tokens=90)
    scheduler.add(decoding)
    scheduler.step()
    scored = row([n % 17 for n in range(90)], "b", max_tokens=0, prompt_logprobs=1)
    scheduler.add(scored)
    steps = 0
    while not scored.finish_reason:
        before = decoding.generated
        if steps == 5:
            scheduler.add(late := row([7] * 9, "c", max_tokens=1, prompt_logprobs=1))
        scheduler.step()
        steps += 1
        assert decoding.generated == before + 1
        assert len(scored.prompt_logprobs) <= 4 * steps
        assert steps < 10 or late.finish_reason
    assert 89 / 4 <= steps <= 89 / 2 + 3 and len(scored.prompt_logprobs) == 89


def test_bad_numbers_are_named() -> None:
    for wrong in ({"prompt_logprobs": -1}, {"prompt_logprobs_start": 2}):
        with pytest.raises(ValueError, match="prompt_logprobs"):
            SamplingParams(**wrong)


def test_the_server_gives_them_in_both_forms() -> None:
    text = "Take the list 4 9 — café."
    with running() as here:
        llm = here.service.llm
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(text)
        wanted = llm.generate([ids], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2))[0]
        assert wanted.prompt_logprobs is not None
        own = [None if entry is None else entry[token] for token, entry in zip(ids, wanted.prompt_logprobs)]

        def ask(**change: Any) -> Any:
            body = {"model": MODEL, "prompt": text, "max_tokens": 2, "temperature": 0, **change}
            return httpx.post(f"{here.url}/v1/completions", json=body).json()

        for prompt, most in ((text, 2), (ids, 2), (text, 0), ([ids, ids], 2)):
            answer = ask(prompt=prompt, max_tokens=most, echo=True, logprobs=1, prompt_logprobs=2)
            for choice in answer["choices"]:
                told, given = choice["logprobs"], choice["prompt_logprobs"]
                assert told["token_logprobs"][0] is told["top_logprobs"][0] is given[0] is None
                assert told["token_logprobs"][1 : len(ids)] == pytest.approx(own[1:], abs=1e-4)
                assert {len(each) for each in told.values()} == {len(ids) + most}
                assert all(max(likely.values()) >= value for likely, value in zip(told["top_logprobs"][1:], own[1:]))
                shown = text if isinstance(prompt, str) else llm.tokenizer.decode(ids, False)
                assert choice["text"].startswith(shown)
                for token, at in zip(told["tokens"], told["text_offset"]):
                    plain = "�" not in token and token != "<|begin|>"
                    assert not (plain and token.strip()) or choice["text"][at:].startswith(token)
                for token, place, entry in zip(ids[1:], given[1:], wanted.prompt_logprobs[1:]):
                    assert entry is not None
                    assert {int(key): told["logprob"] for key, told in place.items()} == pytest.approx(entry, abs=1e-4)
                    assert [told["rank"] for told in place.values()] == [1, 2, None][: len(place)]
                    assert str(token) in place
        assert "prompt_logprobs" not in ask(echo=True, logprobs=1)["choices"][0]
        assert ask(logprobs=1)["choices"][0]["logprobs"]["token_logprobs"][0] is not None
        refused = ask(prompt=[[5] * 1000] * 20, prompt_logprobs=20)["error"]
        assert refused["param"] == "prompt" and "420000 entries; at most 262144" in refused["message"]
        info = httpx.get(f"{here.url}/tokenizer_info").json()
        assert info["bos_token"] == "<|begin|>" and info["eos_token"] == "<|end|>"
        assert info["chat_template"] == llm.tokenizer.template and here.all_free


def test_a_prompt_s_places_are_where_its_tokens_are() -> None:
    with LLM(MODEL) as llm:
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        text = "naïve 漢字 🦊 plain"
        ids = tokenizer.encode(text)
        assert tokenizer.offsets(text)[:2] == [0, 0]  # the begin token is not in it
        decoded = tokenizer.decode(ids, False)
        for begins, shown in ((tokenizer.offsets(text), text), (tokenizer.offsets(ids), decoded)):
            assert len(begins) == len(ids) and begins == sorted(begins)
            for token, at in zip(ids, begins):
                if "�" not in (piece := tokenizer.decode([token], False)) and piece in shown:
                    assert shown[at:].startswith(piece)
