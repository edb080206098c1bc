"""Recording blocks as they are decided: everything that an acceptance rule could ask about them, one file for each
completion.

A recorder wraps the target's executor, sees what a rule sees, and changes nothing. Rounds are taken one by one
meanwhile.

Shape legend: N blocks, T their drafted tokens in all, P = T + N places (of each block one after its last token too),
n likeliest tokens, J places of one block, V vocabulary.
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

from fly.drafts import CascadeDraft, DraftStrategy, SingleDraft
from fly.llm import LLM
from fly.ops import top
from fly.policies import AcceptancePolicy
from fly.runtime.executor import Executor, Wrapped
from fly.runtime.runner import Runner
from fly.types import Decision, Draft, Target

__all__ = ["LIKELIEST", "Recorder", "Recording", "Said", "recorded"]

LIKELIEST = 16  # tokens whose logits are kept at each place
_FORMAT = "fly blocks 1"


@dataclass(frozen=True)
class Said:
    """A model's output at places: raw logits, before temperature."""

    ids: Tensor  # [P, n] int32, the likeliest tokens, likeliest first
    logits: Tensor  # [P, n] float32, their logits
    mass: Tensor  # [P] float32, ln of the sum of exp(logit - largest) over the vocabulary
    entropy: Tensor  # [P] float32, nats of the whole distribution

    @staticmethod
    def of(logits_JV: Tensor, n: int = LIKELIEST) -> Said:
        """One place after the other, so that what is gone over again is still near."""
        values_Jn, ids_Jn = top(logits_JV, n)
        ids_Jn, order_Jn = ids_Jn.sort(-1)  # of equals the lowest id comes first, as of ``argmax``
        values_Jn, order_Jn = values_Jn.gather(-1, order_Jn).sort(dim=-1, descending=True, stable=True)
        ids_Jn = ids_Jn.gather(-1, order_Jn)
        masses, entropies = [], []
        for logits_V, peak in zip(logits_JV, values_Jn[:, 0]):
            probs_V = logits_V.softmax(-1)
            mass = -probs_V.amax().log()
            mean = probs_V @ logits_V
            if not mean.isfinite():  # a ban: 0 times -inf
                mean = probs_V @ logits_V.clamp_min(torch.finfo(logits_V.dtype).min)
            masses.append(mass)
            entropies.append((mass + peak - mean).clamp_min(0))
        return Said(ids_Jn.int(), values_Jn, torch.stack(masses), torch.stack(entropies))

    @staticmethod
    def nothing(places: int, n: int = LIKELIEST) -> Said:
        """The entry for places without output: ids of -1, and no numbers."""
        numbers = (torch.full(shape, torch.nan) for shape in ((places, n), (places,), (places,)))
        return Said(torch.full((places, n), -1, dtype=torch.int32), *numbers)

    @staticmethod
    def join(parts: abc.Sequence[Said]) -> Said:
        """The places of all of them."""
        return Said(*(torch.cat([getattr(part, name) for part in parts]) for name in Said.__dataclass_fields__))

    def at(self, places: Tensor) -> Said:
        """Some places only, ``places`` int64 of any shape."""
        return Said(*(getattr(self, name)[places] for name in Said.__dataclass_fields__))


@dataclass(frozen=True)
class Recording:
    """The blocks of one completion under exact speculation, in order; it reads and writes a safetensors file."""

    about: dict[str, Any]  # the completion's key, k, vocabulary, control and stop ids
    text: Tensor  # int32, the prompt and what came of it
    prompt: int  # tokens of the prompt
    start_N: Tensor  # int32, tokens of the text before each block
    length_N: Tensor  # int32, tokens drafted
    accepted_N: Tensor  # int32, those that stood by the exact rule
    drafted_T: Tensor  # int32
    logit_T: Tensor  # float32, the target's raw logit of each drafted token
    rank_T: Tensor  # int32, how many tokens the target found likelier
    target: Said  # [P]
    draft: Said | None  # [T]; None if no model drafted, or its output is unknown

    def save(self, path: Path) -> None:
        """Write it; a file that a kill cut short never has the name."""
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
        """Raises ``ValueError`` for what is no such file."""
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get("about", "{}"))
                columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} holds no recorded blocks: {error}") from None
        if about.pop("format", None) != _FORMAT:
            raise ValueError(f"{path} holds no recorded blocks of the format {_FORMAT!r}")

        def said(name: str) -> Said:
            return Said(*(columns.pop(f"{name}.{part}") for part in Said.__dataclass_fields__))

        draft = said("draft") if "draft.ids" in columns else None
        return Recording(about, prompt=about.pop("prompt"), target=said("target"), draft=draft, **columns)


class Recorder(Wrapped):
    """A target's executor that keeps the outputs about each block of a row, decoded alone."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.batch_invariant = inner.batch_invariant
        self._blocks: list[tuple[int, int, list[int], Tensor, Tensor, Said, Said | None]] = []
        # What the draft model said is gone over beside what the target said, each on a core that has nothing to do.
        self._beside = ThreadPoolExecutor(1, "fly-recorder", inner.enter_thread)

    def decide(
        self,
        policy: AcceptancePolicy,
        target: Target,
        draft: Draft,
        seeds: abc.Sequence[int],
        starts: abc.Sequence[int],
    ) -> list[Decision]:
        if draft.parents_BK is not None:
            raise ValueError("record: drafts that are trees cannot be recorded; draft chains")
        decisions = self.inner.decide(policy, target, draft, seeds, starts)
        (decision,), (start,) = decisions, starts
        logits_JV = target.logits_BKV[0].cpu()
        drafted, own = decision.drafted, None
        if draft.logits_BKV is not None and drafted:
            own = self._beside.submit(Said.of, draft.logits_BKV[0, : len(drafted)].cpu())
        said = Said.of(logits_JV)
        token_J = torch.tensor(drafted, dtype=torch.int64)
        logit_J = logits_JV[torch.arange(len(drafted)), token_J]
        rank_J = (said.logits[:-1] > logit_J[:, None]).sum(-1)
        for j in (rank_J == said.ids.shape[1]).nonzero().flatten().tolist():
            rank_J[j] = (logits_JV[j] > logit_J[j]).sum()
        parts = (logit_J, rank_J, said, None if own is None else own.result())
        self._blocks.append((start, len(decision.path), drafted, *parts))
        return decisions

    def close(self) -> None:
        """End its thread."""
        self._beside.shutdown()

    def recording(self, about: dict[str, Any], text: list[int], prompt: int) -> Recording:
        """All blocks so far, but for the one that came with the prompt; of which this is the text."""
        blocks = [block for block in self._blocks if block[0] > prompt]
        starts, accepted, drafts, logits, ranks, said, own = map(list, zip(*blocks)) if blocks else ([],) * 7
        drafting = None
        if any(part is not None for part in own):
            drafting = Said.join(
                [Said.nothing(len(drafted)) if part is None else part for part, drafted in zip(own, drafts)]
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
            Said.join(said) if said else Said.nothing(0),
            drafting,
        )


@contextmanager
def recorded(llm: LLM) -> Iterator[Recorder]:
    """Record what ``llm`` decides while this context lasts; for a draft by one model, its output too.

    One request at a time, at temperature 0.
    """
    runner: Runner = llm.engine.runner
    executor, level = runner.executor, None
    draft: DraftStrategy | None = llm.draft
    if isinstance(draft, SingleDraft) and type(draft) in (SingleDraft, CascadeDraft):
        level = draft
    runner.executor = recorder = Recorder(executor)
    if level is not None:
        level.says = True
    try:
        yield recorder
    finally:
        runner.executor = executor
        if level is not None:
            level.says = False
        recorder.close()
