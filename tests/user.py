"""A user's program, with the public names as they are typed first. ``mypy`` reads it as strictly as it can (see
pyproject.toml), so what it asserts is what an editor shows; ``test_calls`` runs it."""

from __future__ import annotations

import asyncio
from typing import assert_type

import numpy as np
import torch

import fly
from fly.drafts import DraftStrategy, NGramDraft
from fly.engine.stream import AsyncStream, Stream
from fly.policies import AcceptancePolicy, AfterTokens, Exact, FLy


def main() -> None:
    with fly.LLM("fly-tiny", draft="ngram", policy="fly(theta=0.3)", k=4) as llm:
        assert_type(llm, fly.LLM)
        assert_type(llm.policy, AcceptancePolicy)
        assert_type(llm.draft, DraftStrategy | None)
        params = fly.SamplingParams(temperature=0, max_tokens=4, stop=["###"], structured=None, logit_bias={5: -1})
        outputs = llm.generate(["a", "b"], params, policy=[Exact(), "fly.paper"], k=[0, 4])
        assert_type(outputs, list[fly.Output])
        llm.generate("a", sampling_params=params, policy={"name": "fly", "theta": 0.2}, progress=False)
        llm.generate([[1, 2], [3]], params)
        llm.generate(np.array([1, 2, 3]), max_tokens=2, policy=FLy() & AfterTokens(2))
        llm.generate([torch.tensor([1, 2]), torch.tensor([3])], max_tokens=2, seed=1, stop_token_ids=[7])
        assert_type(llm.chat("hi", temperature=0, max_tokens=2), fly.Output)
        asked = [{"role": "user", "content": "hi"}]
        assert_type(llm.chat(asked, params), fly.Output)
        assert_type(llm.chat([asked, asked], max_tokens=2), list[fly.Output])
        stream = llm.stream("hi", max_tokens=3, policy="exact")
        assert_type(stream, Stream)
        for piece in stream:
            assert_type(piece, fly.Piece)
            assert_type(piece.tokens, tuple[fly.Token, ...])
        assert_type(stream.stats, fly.Stats)
        (first, _) = outputs
        assert_type(first.text, str)
        assert_type(first.token_ids, list[int])
        assert_type(first.guarantee, fly.Guarantee)
        assert_type([token.why for token in first.provenance], list[fly.Why])
        assert_type(first.stats.tau, float)
        first.to_dict()
        asyncio.run(coroutines(llm))
        fly.LLM(llm, draft=NGramDraft()).close()


async def coroutines(llm: fly.LLM) -> None:
    assert_type(await llm.agenerate(["a"], max_tokens=2), list[fly.Output])
    assert_type(await llm.achat("a", max_tokens=2, policy="exact"), fly.Output)
    stream = llm.astream("a", max_tokens=2)
    assert_type(stream, AsyncStream)
    print("".join([piece async for piece in stream]))


if __name__ == "__main__":
    main()
