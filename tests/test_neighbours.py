"""What a request gets does not depend on what others ask for: a row beside a neighbour of any kind, and alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.backends import executor_of
from fly.backends.cpu import CpuDFlashHead, CpuHead, CpuPEagleHead, available, why_not
from fly.drafts import (
    AdaptiveDraft,
    BlockDraft,
    CascadeDraft,
    ChooseDraft,
    DraftStrategy,
    Eagle3Draft,
    NGramDraft,
    SingleDraft,
    SuffixDraft,
    TreeDraft,
)
from fly.drafts.base import Loaded
from fly.models.eagle import Eagle3Head, HeadConfig
from fly.models.tokenizer import Tokenizer
from fly.policies import AcceptancePolicy, Exact, parse_policy
from fly.types import Guarantee
from tests.test_block import make_block_head
from tests.test_drafts import perturbed
from tests.test_eagle import randomise
from tests.test_same_rule import RULES as OWN_RULES
from tests.toys import random_llama, save_tokenizer

VARIANTS = [name for name in available() if name != "torch"]
pytestmark = pytest.mark.skipif(not VARIANTS, reason=why_not() or "compiled kernels are here")

VOCAB = 24
# In bfloat16, so that a number that is rounded in one way and not in another shows.
PLAIN = random_llama(0, vocab_size=VOCAB, hidden=32, heads=2, kv_heads=1, layers=2, max_positions=200).to(
    torch.bfloat16
)
NEAR = perturbed(PLAIN, 0.05)
HEADS = ["eagle3", "dflash", "dspark", "gated", "rnn", "p-eagle"]
DRAFTS = [
    *("none", "ngram", "suffix", "model", "ngram below a model", "lookup in a model", "three levels", "tree"),
    *("tree of a head", "adaptive", "choose", *HEADS),
]
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
    {"max_tokens": 5},
    {"prompt_logprobs": 1},
    {"n": 2},
    {"stop": ("ab", "c", "v")},
    {"structured": {"regex": "([a-f][g-r]?){40}"}, "stop_token_ids": (22,)},
    {"structured": {"regex": "[a-v]*"}, "logit_bias": {3: 0.5}, "stop_token_ids": (22,)},
]
# A rule of each kind: compiled, and such as only Python knows, that read the draft's logits, or the text.
RULES = [
    *map(parse_policy, ("exact", "fly(theta=0.1, window=1)", "lossy(lenience=3)", "block", "near")),
    *map(parse_policy, ("exact | regret(2, 1) & budget(0.3)", "exact | regret(2, 1) & regret_budget(4) & above(9)")),
    *OWN_RULES.values(),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of 22 letters, and two tokens that are none."""
    directory = tmp_path_factory.mktemp("letters")
    save_tokenizer(directory, list("abcdefghijklmnopqrstuv"))
    return Tokenizer(directory)


def make_strategy(name: str, ending: str = "") -> DraftStrategy | None:
    kernels = VARIANTS[0] + ending
    if name in ("eagle3", "tree of a head", "p-eagle"):
        parallel = {"layer": PLAIN.config.resized(2), "mask_token_id": VOCAB - 1} if name == "p-eagle" else {}
        sizes: dict[str, Any] = {"layer": PLAIN.config.resized(1), "draft_vocab_size": VOCAB, "target_hidden_size": 32}
        head = Eagle3Head(HeadConfig(**{**sizes, "states": (0, 1), **parallel}))
        randomise(head, 1)
        head.to_target_U.copy_(torch.arange(VOCAB))
        head = head.to(torch.bfloat16).eval().requires_grad_(False)
        if parallel:
            return BlockDraft(CpuPEagleHead(head, kernels))
        return Eagle3Draft(CpuHead(head, VARIANTS[0]), nodes=0 if name == "eagle3" else 6, depth=3)
    if name in HEADS:
        options = {"layer": PLAIN.config.resized(2, family="qwen3"), "states": (0, 1)}
        if name == "gated":
            options |= {"markov": "gated", "markov_rank": 4}
        block_head = make_block_head("dflash" if name == "gated" else name, **options)
        return BlockDraft(CpuDFlashHead(block_head.to(torch.bfloat16), kernels))
    model, near = executor_of(PLAIN, kernels), executor_of(NEAR, kernels)
    makes: dict[str, Any] = {
        "none": lambda: None,
        "ngram": NGramDraft,
        "suffix": lambda: SuffixDraft(shared_tokens=0),  # by default it copies what finished requests wrote
        "model": lambda: SingleDraft(model),
        "lookup in a model": lambda: SingleDraft(model, NGramDraft()),
        "ngram below a model": lambda: CascadeDraft([NGramDraft(), SingleDraft(model)]),
        "three levels": lambda: CascadeDraft([NGramDraft(), SingleDraft(near), SingleDraft(model)]),
        "tree": lambda: TreeDraft(model, nodes=6, depth=3),
        "adaptive": lambda: AdaptiveDraft(SingleDraft(model)),
        "choose": lambda: ChooseDraft(
            model=SingleDraft(model), copy=NGramDraft(), tree=TreeDraft(near, nodes=6, depth=3)
        ),
    }
    strategy: DraftStrategy | None = makes[name]()
    return strategy


def fit(rule: AcceptancePolicy, strategy: DraftStrategy | None, name: str) -> AcceptancePolicy:
    """The rule, or the exact one if it reads logits that the strategy's drafts lack."""
    lacks = strategy is not None and rule.reads_logits and not strategy.drafter_of(name).gives_logits
    return Exact() if lacks else rule


@settings(max_examples=60)
@given(
    drafting=st.sampled_from(DRAFTS),
    names=st.tuples(st.sampled_from(["model", "copy", "tree"]), st.sampled_from(["model", "copy", "tree"])),
    rules=st.tuples(st.sampled_from(RULES), st.sampled_from(RULES)),
    ending=st.sampled_from(ENDINGS),
    asked=st.tuples(st.sampled_from(NEIGHBOURS), st.sampled_from(NEIGHBOURS)),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 99),
    ks=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_a_row_beside_any_neighbour_is_as_it_is_alone(
    tokenizer: Tokenizer,
    drafting: str,
    names: tuple[str, str],
    rules: tuple[AcceptancePolicy, AcceptancePolicy],
    ending: str,
    asked: tuple[dict[str, Any], dict[str, Any]],
    temperature: float,
    seed: int,
    ks: tuple[int, int],
) -> None:
    """Tokens, why each was kept, its log-probabilities, and what was drafted, to the last bit. ``adaptive`` measures
    batches, so that its drafts may differ, and with them all but a lossless text at temperature 0."""
    usual = {"temperature": temperature, "max_tokens": 24, "ignore_eos": True}
    own, other = (SamplingParams(**{**usual, "seed": seed + n, **each}) for n, each in enumerate(asked))
    target = executor_of(PLAIN, VARIANTS[0] + ending)

    def decode(count: int) -> Any:
        strategy = make_strategy(drafting, ending)
        chosen = [*names] if drafting == "choose" else ["", ""]
        policies = [fit(rule, strategy, name) for rule, name in zip(rules, chosen)]
        llm = LLM(Loaded(target, tokenizer), strategy, k=5)
        prompts = [[5, 6, 7, 5, 6], [9, 1, 4, 9]]
        options = {"policy": policies[:count], "k": [*ks][:count], "draft": chosen[:count]}
        (first, *_) = llm.generate(prompts[:count], [own, other][:count], **options)
        llm.close()
        if drafting == "adaptive":
            settled = not (temperature and own.temperature) and policies[0].guarantee is Guarantee.LOSSLESS
            return first.token_ids if settled else None
        stats = first.stats
        why = [(token.why, token.clause) for token in first.provenance]
        counts = stats.nats, stats.relaxed, stats.rounds, stats.drafted, stats.accepted, stats.gates
        return first.token_ids, why, counts, first.logprobs, first.prompt_logprobs

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
