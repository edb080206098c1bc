"""The whole of fly on one page: propose, score, verify, commit. For one text at a time, without a cache.

The engine gives the same tokens, for many texts at once and much faster (tests/test_one_page.py). Run this file:
``python examples/one_page.py "fly(theta=0.2)" 0.7``, with any temperature, and any rule but those that read the draft's
logits or what relaxed tokens cost before (nats).

Shape legend: B = 1 row, K drafted tokens, V vocabulary, T tokens of a text.
"""

import sys

import torch

from fly.models import DenseCausal, load_model
from fly.models.bundled import resolve_checkpoint
from fly.models.tokenizer import Tokenizer
from fly.ops import Stream, derive, draw, one_hot, uniforms
from fly.policies import parse_policy, verify
from fly.types import Draft, Noise, Target, Why


def score(model, tokens):
    """Return the logits [T, V] of the token that follows each of ``tokens``: one forward."""
    positions_T = torch.arange(len(tokens))
    return model.logits(model(torch.tensor(tokens), positions_T, DenseCausal(1, len(tokens))))


def process(logits, temperature):
    """Return the distribution that tokens are drawn from: one-hot at temperature 0."""
    return (logits / temperature).softmax(-1) if temperature else one_hot(logits, logits.argmax(-1))


def uniform(seed, position, stream, n):
    """Return ``n`` random numbers: a hash of the seed, the length of the text, the stream and an index."""
    return uniforms(torch.tensor([seed]), torch.tensor([position]), stream, n)


def propose(draft_model, tokens, k, temperature, seed):
    """Draft ``k`` tokens, one forward for each, and keep the distribution that each was drawn from."""
    text = list(tokens)
    probs = []
    for _ in range(k):
        probs.append(process(score(draft_model, text)[-1], temperature))
        text += draw(probs[-1].unsqueeze(0), uniform(seed, len(text), Stream.SAMPLE, 1)[0]).tolist()
    probs_BKV = torch.stack(probs).unsqueeze(0) if probs and temperature else None
    return Draft(torch.tensor([text[len(tokens) :]], dtype=torch.int64).view(1, -1), torch.tensor([k]), probs_BKV)


@torch.inference_mode()
def generate(target_model, draft_model, policy, prompt, max_tokens, k=5, temperature=0.0, seed=0):
    """Yield the tokens that follow ``prompt``, each with the reason why it stands."""
    tokens = list(prompt)
    relaxed = 0
    while (generated := len(tokens) - len(prompt)) < max_tokens:
        # Propose: the draft model writes k tokens, or fewer at the end, as one more follows from the target. The first
        # token comes without a draft.
        length = min(k, max_tokens - generated - 1) if generated else 0
        draft = propose(draft_model, tokens, length, temperature, derive(seed, len(tokens)))
        # Score: one forward of the target says, after each drafted token too, what it would have written itself.
        logits_BKV = score(target_model, tokens + draft.chains[0])[-length - 1 :].unsqueeze(0)
        probs_BKV = process(logits_BKV, temperature) if temperature else None
        so_far = {"generated_B": torch.tensor([generated]), "relaxed_B": torch.tensor([relaxed]), "history": [tokens]}
        target = Target(logits_BKV, probs_BKV, **so_far)
        # Verify: the rule decides which drafted tokens stand; the target's correction, or its bonus token, follows.
        coins_BK = uniform(seed, len(tokens), Stream.ACCEPT, length)
        verdict = verify(policy, target, draft, Noise(coins_BK, uniform(seed, len(tokens), Stream.SAMPLE, 1)[0]))
        accepted = int(verdict.accepted_B)
        reasons = [Why(code) for code in verdict.why_BK[0, :accepted].tolist()]
        relaxed += reasons.count(Why.RELAXED)
        # Commit: the text grows by what stands. There is no cache here that would have to be rolled back.
        emitted = [*draft.chains[0][:accepted], int(verdict.next_token_B)]
        tokens += emitted
        yield from zip(emitted, [*reasons, Why.BONUS if accepted == length else Why.CORRECTION])


if __name__ == "__main__":
    rule = sys.argv[1] if len(sys.argv) > 1 else "fly(theta=0.2)"
    temperature = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    tokenizer = Tokenizer(resolve_checkpoint("fly-target"))
    target_model, draft_model = (load_model(resolve_checkpoint(name)) for name in ("fly-target", "fly-draft"))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Take the list 4 9 5 7. Reverse the list."}])
    policy = parse_policy(rule).bind(tokenizer.vocabulary(target_model.config.vocab_size))
    for token, why in generate(target_model, draft_model, policy, prompt, 40, temperature=temperature):
        print(f"{why.name.lower():10}  {tokenizer.decode([token], skip_special_tokens=False)!r}")
