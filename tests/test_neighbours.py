"""What a request gets does not depend on what others ask for: a row beside a neighbour of any kind, and alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.backends import executor_of
from fly.backends.cpu import available, why_not
from fly.backends.cpu.dflash import CpuDFlashHead
from fly.backends.cpu.head import CpuHead
from fly.drafts import BlockDraft, CascadeDraft, DraftStrategy, Eagle3Draft, NGramDraft, SingleDraft, SuffixDraft
from fly.models.eagle import Eagle3Head, HeadConfig
from fly.policies import parse_policy
from tests.test_block import make_block_head
from tests.test_eagle import randomise
from tests.toys import random_llama

VARIANTS = [name for name in available() if name != "torch"]
pytestmark = pytest.mark.skipif(not VARIANTS, reason=why_not() or "compiled kernels are here")

VOCAB = 24
# In bfloat16, so that a number that is rounded in one way and not in another shows.
PLAIN = random_llama(0, vocab_size=VOCAB, hidden=32, heads=2, kv_heads=1, layers=2, max_positions=200).to(
    torch.bfloat16
)
HEADS = ["eagle3", "dflash", "dspark", "gated", "rnn"]
DRAFTS = ["none", "ngram", "suffix", "model", "ngram below a model", "lookup in a model", *HEADS]
ENDINGS = ["", "-w8a8"]  # of kernels
# Everything that sends a row another way through the engine.
NEIGHBOURS: list[dict[str, Any]] = [
    {},
    {"logit_bias": {3: 0.5}},
    {"presence_penalty": 0.7},
    {"repetition_penalty": 1.2},
    {"bad_words_ids": ((4, 5),)},
    {"min_tokens": 9, "stop_token_ids": (1, 2)},
    {"logprobs": 2},
    {"explain": True},
    {"top_p": 0.8, "top_k": 5},
    {"temperature": 0.0},
]
RULES = [
    "exact",
    "fly(theta=0.1, window=1)",
    "lossy(lenience=3)",
    "block",
    "exact | regret(2, 1) & budget(0.3)",
    "near",
]


def make_strategy(name: str, ending: str = "") -> DraftStrategy | None:
    kernels = VARIANTS[0] + ending
    if name == "eagle3":
        head = Eagle3Head(
            HeadConfig(layer=PLAIN.config.resized(1), draft_vocab_size=VOCAB, target_hidden_size=32, states=(0, 1))
        )
        randomise(head, 1)
        head.to_target_U.copy_(torch.arange(VOCAB))
        return Eagle3Draft(CpuHead(head.to(torch.bfloat16).eval().requires_grad_(False), VARIANTS[0]))
    if name in HEADS:
        options = {"layer": PLAIN.config.resized(2, family="qwen3"), "states": (0, 1)}
        if name == "gated":
            options |= {"markov": "gated", "markov_rank": 4}
        block_head = make_block_head("dflash" if name == "gated" else name, **options)
        return BlockDraft(CpuDFlashHead(block_head.to(torch.bfloat16), kernels))
    model = executor_of(PLAIN, kernels)
    made: dict[str, Any] = {
        "none": lambda: None,
        "ngram": NGramDraft,
        "suffix": SuffixDraft,
        "model": lambda: SingleDraft(model),
        "lookup in a model": lambda: SingleDraft(model, NGramDraft()),
        "ngram below a model": lambda: CascadeDraft([NGramDraft(), SingleDraft(model)]),
    }
    strategy: DraftStrategy | None = made[name]()
    return strategy


@settings(max_examples=100)
@given(
    drafting=st.sampled_from(DRAFTS),
    rules=st.tuples(st.sampled_from(RULES), st.sampled_from(RULES)),
    ending=st.sampled_from(ENDINGS),
    asked=st.tuples(st.sampled_from(NEIGHBOURS), st.sampled_from(NEIGHBOURS)),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 99),
    ks=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_a_row_beside_any_neighbour_is_as_it_is_alone(
    drafting: str,
    rules: tuple[str, str],
    ending: str,
    asked: tuple[dict[str, Any], dict[str, Any]],
    temperature: float,
    seed: int,
    ks: tuple[int, int],
) -> None:
    usual = SamplingParams(temperature=temperature, seed=seed, max_tokens=24, ignore_eos=True)
    own, other = (usual.model_copy(update={"seed": seed + n, **each}) for n, each in enumerate(asked))
    policies = [parse_policy(rule) for rule in rules]
    target = executor_of(PLAIN, VARIANTS[0] + ending)

    def decode(count: int) -> Any:
        llm = LLM(target, make_strategy(drafting, ending), k=5)
        prompts = [[5, 6, 7, 5, 6], [9, 1, 4, 9]]
        (first, *_) = llm.generate(prompts[:count], [own, other][:count], policy=policies[:count], k=[*ks][:count])
        llm.close()
        return first.token_ids, [(token.why, token.clause) for token in first.provenance], first.stats.nats

    assert decode(1) == decode(2)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_carries_the_same_numbers_whoever_is_beside(kind: str, ending: str) -> None:
    """One request that asks for something between rounds once took all rows the way of PyTorch: the features of an
    EAGLE-3 head were rounded to bfloat16, and the weights of a Markov head were not rounded to 8 bits."""
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(60)]
    biased = params[0].model_copy(update={"logit_bias": {3: 0.5}})
    texts = []
    for more in ([], [biased]):
        llm = LLM(executor_of(PLAIN, VARIANTS[0] + ending), make_strategy(kind, ending), k=5)
        outputs = llm.generate([[5, 6, 7, 5, 6]] * len([*params, *more]), [*params, *more])
        texts.append([output.token_ids for output in outputs[: len(params)]])
        llm.close()
    assert texts[0] == texts[1]
