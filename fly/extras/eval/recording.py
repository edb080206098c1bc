"""Record blocks as they are decided, with all that an acceptance rule could ask about them: one file per completion.

A recorder wraps the target's executor, sees what a rule sees, and changes nothing. While it is in place, rounds are
taken one by one.

Shape legend: N blocks, T drafted tokens in all blocks, P = T + N places (one more than drafted tokens in each block), B
rows, K longest draft, J places of one block, n most likely tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fly.drafts import CascadeDraft, DraftStrategy, LookupDraft, SingleDraft
from fly.drafts.base import word_of
from fly.drafts.trained import HeadDraft
from fly.llm import LLM
from fly.ops import top
from fly.policies import AcceptancePolicy
from fly.runner.executor import Executor, Wrapped
from fly.runner.runner import Runner
from fly.types import Decision, Draft, Target

__all__ = ["LIKELIEST", "Outputs", "Recorder", "Recording", "describe_drafter", "recorded"]

LIKELIEST = 16  # how many of the most likely tokens are kept at each place
_FORMAT = "fly blocks 1"


@dataclass(frozen=True)
class Outputs:
    """A model's outputs at some places: parts of the raw distributions, before temperature."""

    ids: Tensor  # [P, n] int32, the most likely tokens, in order
    logits: Tensor  # [P, n] float32, their logits
    mass: Tensor  # [P] float32, ln of the sum of exp(logit - largest) over the vocabulary
    entropy: Tensor  # [P] float32, nats of the whole distribution

    @staticmethod
    def of(logits_JV: Tensor, n: int = LIKELIEST) -> Outputs:
        """Return the outputs at the places of a block, from their logits."""
        values_Jn, ids_Jn = top(logits_JV, n)
        ids_Jn, order_Jn = ids_Jn.sort(-1)  # among equal logits the lowest id comes first, as in ``argmax``
        values_Jn, order_Jn = values_Jn.gather(-1, order_Jn).sort(dim=-1, descending=True, stable=True)
        ids_Jn = ids_Jn.gather(-1, order_Jn)
        masses, entropies = [], []
        # Take one place at a time, so that its logits stay in the processor's caches.
        for logits_V, peak in zip(logits_JV, values_Jn[:, 0]):
            probs_V = logits_V.softmax(-1)
            mass = -probs_V.amax().log()
            mean = probs_V @ logits_V
            if not mean.isfinite():  # a banned token: 0 times -inf
                mean = probs_V @ logits_V.clamp_min(torch.finfo(logits_V.dtype).min)
            masses.append(mass)
            entropies.append((mass + peak - mean).clamp_min(0))
        return Outputs(ids_Jn.int(), values_Jn, torch.stack(masses), torch.stack(entropies))

    @staticmethod
    def unknown(places: int, n: int = LIKELIEST) -> Outputs:
        """Make places without outputs: their ids are -1, and all else is NaN."""
        numbers = (torch.full(shape, torch.nan) for shape in ((places, n), (places,), (places,)))
        return Outputs(torch.full((places, n), -1, dtype=torch.int32), *numbers)

    @staticmethod
    def join(parts: abc.Sequence[Outputs]) -> Outputs:
        """Join the places of all ``parts``, one after another."""
        return Outputs(*(torch.cat([getattr(part, name) for part in parts]) for name in Outputs.__dataclass_fields__))

    def at(self, places: Tensor) -> Outputs:
        """Return the outputs at some places (int64, of any shape)."""
        return Outputs(*(getattr(self, name)[places] for name in Outputs.__dataclass_fields__))


@dataclass(frozen=True)
class Recording:
    """The blocks of one completion under exact speculation, in order. It is stored as a safetensors file."""

    about: dict[str, Any]  # the completion's key, k, the drafter, size of the vocabulary, control and stop ids
    text: Tensor  # int32, prompt and completion
    prompt: int  # tokens of the prompt
    start_N: Tensor  # int32, tokens of the text before each block
    length_N: Tensor  # int32, tokens drafted
    accepted_N: Tensor  # int32, tokens that the exact rule kept
    drafted_T: Tensor  # int32, the drafted tokens
    logit_T: Tensor  # float32, the target's raw logit of each drafted token
    rank_T: Tensor  # int32, how many tokens the target finds more likely
    target: Outputs  # [P]
    draft: Outputs | None  # [T]; None if neither a model nor a head drafted, or their outputs are unknown

    def save(self, path: Path) -> None:
        """Write the file under another name first, so that a killed process leaves no incomplete file."""
        columns = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        columns |= {f"target.{part}": value for part, value in vars(self.target).items()}
        if self.draft is not None:
            columns |= {f"draft.{part}": value for part, value in vars(self.draft).items()}
        about = {"format": _FORMAT, "prompt": self.prompt, **self.about}
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        save_file({name: value.contiguous() for name, value in columns.items()}, fresh, {"about": json.dumps(about)})
        fresh.replace(path)

    @staticmethod
    def load(path: Path) -> Recording:
        """Read a file. Raises ``ValueError`` if it is not a recording."""
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get("about", "{}"))
                columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} holds no recorded blocks: {error}") from None
        if about.pop("format", None) != _FORMAT:
            raise ValueError(f"{path} holds no recorded blocks of the format {_FORMAT!r}")

        def outputs(name: str) -> Outputs:
            return Outputs(*(columns.pop(f"{name}.{part}") for part in Outputs.__dataclass_fields__))

        draft = outputs("draft") if "draft.ids" in columns else None
        return Recording(about, prompt=about.pop("prompt"), target=outputs("target"), draft=draft, **columns)


class Recorder(Wrapped):
    """An executor around the target's executor. It keeps both models' outputs for each block, one row at a time."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.batch_invariant = inner.batch_invariant
        self._blocks: list[tuple[int, int, list[int], Tensor, Tensor, Outputs, Outputs | None]] = []
        # The outputs of the two models are computed at the same time, on two cores that would otherwise be idle.
        self._helper = ThreadPoolExecutor(1, "fly-recorder", inner.enter_thread)

    def decide_group(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> list[Decision]:
        if draft.parents_BK is not None:
            raise ValueError("record: drafts that are trees cannot be recorded; draft chains")
        decisions = self.inner.decide_group(policy, target, draft, seeds, starts)
        (decision,), (start,) = decisions, starts
        logits_JV = target.logits_BKV[0].cpu()
        drafted, drafter_outputs = decision.drafted, None
        if draft.logits_BKV is not None and drafted:
            drafter_outputs = self._helper.submit(Outputs.of, draft.logits_BKV[0, : len(drafted)].cpu())
        outputs = Outputs.of(logits_JV)
        token_J = torch.tensor(drafted, dtype=torch.int64)
        logit_J = logits_JV[torch.arange(len(drafted)), token_J]
        rank_J = (outputs.logits[:-1] > logit_J[:, None]).sum(-1)
        for j in (rank_J == outputs.ids.shape[1]).nonzero().flatten().tolist():
            rank_J[j] = (logits_JV[j] > logit_J[j]).sum()
        parts = (logit_J, rank_J, outputs, None if drafter_outputs is None else drafter_outputs.result())
        self._blocks.append((start, len(decision.path), drafted, *parts))
        return decisions

    def close(self) -> None:
        """End the thread."""
        self._helper.shutdown()

    def recording(self, about: dict[str, Any], text: list[int], prompt: int) -> Recording:
        """Return the blocks so far, without the first, which came with the prompt. ``text`` has ``prompt`` tokens of
        the prompt, and then the completion."""
        blocks = [block for block in self._blocks if block[0] > prompt]
        starts, accepted, drafts, logits, ranks, outputs, drafter_outputs = (
            map(list, zip(*blocks)) if blocks else ([],) * 7
        )
        drafting = None
        if any(part is not None for part in drafter_outputs):
            drafting = Outputs.join(
                [
                    Outputs.unknown(len(drafted)) if part is None else part
                    for part, drafted in zip(drafter_outputs, drafts)
                ]
            )
        return Recording(
            about,
            torch.tensor(text, dtype=torch.int32),
            prompt,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([len(drafted) for drafted in drafts], dtype=torch.int32),
            torch.tensor(accepted, dtype=torch.int32),
            torch.tensor([token for drafted in drafts for token in drafted], dtype=torch.int32),
            torch.cat([torch.empty(0), *logits]),
            torch.cat([torch.empty(0, dtype=torch.int32), *(rank.int() for rank in ranks)]),
            Outputs.join(outputs) if outputs else Outputs.unknown(0),
            drafting,
        )


@contextmanager
def recorded(llm: LLM) -> Iterator[Recorder]:
    """While this context lasts, record the blocks that ``llm`` decides, one request at a time and at temperature 0.
    If the draft is a single model or a trained head, record its outputs too."""
    runner: Runner = llm.engine.runner
    executor, drafter = runner.executor, drafter_of(llm.draft)
    runner.executor = recorder = Recorder(executor)
    if drafter is not None:
        drafter.with_logits = True
    try:
        yield recorder
    finally:
        runner.executor = executor
        if drafter is not None:
            drafter.with_logits = False
        recorder.close()


def drafter_of(draft: DraftStrategy | None) -> SingleDraft | HeadDraft | None:
    """Return the draft, if it is the model or the trained head that chooses every token; otherwise None."""
    model = type(draft) in (SingleDraft, CascadeDraft)
    return draft if isinstance(draft, HeadDraft) or (model and isinstance(draft, SingleDraft)) else None


def describe_drafter(draft: DraftStrategy | None, k: int) -> dict[str, Any]:
    """Return what a replay must know of a draft that is asked for ``k`` tokens: the ``longest`` draft, the word for the
    ``head`` that drafts, also beside a lookup ("" if none does), and whether that head has its ``own_chance``, an
    estimate by which it stops."""
    drafter = drafter_of(draft)
    about = {"longest": k if drafter is None or drafter.k is None else min(k, drafter.k), "head": ""}
    beside = draft.members[-1] if isinstance(draft, LookupDraft) else drafter
    if isinstance(beside, HeadDraft):
        about |= {"head": word_of(beside.head), "own_chance": getattr(beside.head.options, "confidence", False)}
    return about
