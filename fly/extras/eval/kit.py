"""A check of acceptance policies that ``fly check`` adds to the kit (``fly.testing``): on a recorded block a rule
decides as on a live one.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import torch

from fly.extras.eval.recording import Recorder
from fly.extras.eval.replay import Accounts, Blocks, Unknown
from fly.ops import Stream, uniforms
from fly.policies import AcceptancePolicy, Exact, verify
from fly.policies.base import accepts_exactly
from fly.testing.blocks import bind_to, make_block
from fly.testing.report import require
from fly.testing.toys import make_executor, toy_target
from fly.types import Noise, Target, Why

__all__ = ["check_in_a_recording"]

_LONGEST = 8  # K
_SIZE = 40  # V, beyond what a recording keeps of each place
_SEED = 7  # the row's


def check_in_a_recording(policy: AcceptancePolicy) -> str:
    """On a recorded block the rule decides as on the live one, at temperature 0."""
    for number in range(12):
        case = make_block(number, 1, _LONGEST, _SIZE, 0.0)
        rule = bind_to(policy, case.target)
        assert case.target.history is not None
        (text,) = case.target.history
        at = len(text)
        # Record the block, as a run of exact speculation would.
        recorder = Recorder(make_executor(toy_target(_SIZE)))
        (exact,) = recorder.decide_group(Exact(), case.target, case.draft, [_SEED], [at])
        recorder.close()
        about = {"k": _LONGEST, "vocabulary": _SIZE, "control": [_SIZE - 1], "stop": [], "row_seed": _SEED}
        emitted = [*(exact.drafted[node] for node in exact.path), exact.next_token]
        blocks = Blocks([recorder.recording({**about, "task": "", "problem": ""}, text + emitted, at - 1)])
        # Let the rule decide on both. The token before the block was relaxed.
        row_B = torch.tensor([0])
        at_B = torch.tensor([at])
        places = [[at - 1]]
        accounts = Accounts(1)
        accounts.charge(row_B, torch.tensor([[True]]), torch.tensor([[0.5]]), {})
        chain = blocks.chain(row_B, at_B, _LONGEST)
        try:
            accepted_B, relaxes_BK, _ = blocks.judge(rule, row_B, at_B, chain, accounts, places)
        except Unknown as error:
            return str(error)
        noise = None
        if not accepts_exactly(rule):
            coins_B1 = uniforms(torch.tensor([_SEED]), at_B, Stream.SAMPLE, 1)
            noise = Noise(uniforms(torch.tensor([_SEED]), at_B, Stream.ACCEPT, _LONGEST), coins_B1.squeeze(1))
        target = Target(
            case.target.logits_BKV,
            control_V=case.target.control_V,
            generated_B=torch.tensor([1]),
            **accounts.columns(row_B),
            relaxed_at=places,
            history=[text],
        )
        live = verify(rule, target, case.draft, noise)
        replayed = int(accepted_B), relaxes_BK[0].nonzero().flatten().tolist()
        expected = int(live.accepted_B), (live.why_BK[0] == int(Why.RELAXED)).nonzero().flatten().tolist()
        require(
            replayed == expected,
            f"(accepted, relaxed) are {expected} on a live block, and {replayed} on it in a recording: {case.show()}",
        )
    return "decides 12 recorded blocks as live ones"
