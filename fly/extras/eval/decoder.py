"""Decode the completions of a plan: loaded models in, finished records out. No file is written here."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fly.devices import kind_of
from fly.drafts.stops import usual_reach
from fly.extras.eval.plan import AUTOREGRESSIVE, Plan, Turn, Way
from fly.extras.eval.recording import Recorder, Recording, describe_drafter, recorded
from fly.extras.eval.records import Key
from fly.extras.eval.timed import Completion, Setting, complete
from fly.llm import LLM
from fly.models.tokenizer import TextStream
from fly.types import SamplingParams, Why

__all__ = ["Decoder", "Finished", "environment"]

_WARM_TOKENS = 24
_LETTERS = {Why.MATCH: "m", Why.RELAXED: "r", Why.CORRECTION: "c", Why.BONUS: "b"}
_COUNTS = ("prompt_tokens", "generated", "rounds", "emitted", "drafted", "accepted", "relaxed", "nats")


class Finished(NamedTuple):
    """A finished completion."""

    record: dict[str, Any]  # its line in records.jsonl
    environment: dict[str, Any]  # the software and hardware that made it; the record has its id
    recording: Recording | None  # its blocks, if they were recorded; ``record["blocks"]`` names their file


class Decoder:
    """The loaded models of some of a plan's ways, warmed up.

    ``ranks`` are the processes that share the models. All of them make the same calls.
    """

    def __init__(self, plan: Plan, ways: Iterable[Way], ranks: Any = None) -> None:
        if plan.record and ranks is not None:
            raise ValueError("record: blocks are recorded where one process has the whole model, not among ranks")
        self.plan = plan
        self._settings = _load_settings(plan, ways, ranks)
        # Warm every way up, on a prompt that no task has.
        warm = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_WARM_TOKENS)
        for setting in self._settings.values():
            complete(setting, [[0, 1, 2, 3]] * plan.together, [warm] * plan.together, clocked=True)
        self.environment = environment(next(iter(self._settings.values())).llm, plan.model)

    def decode(self, turns: Iterable[Turn], texts: Mapping[Key, str]) -> Iterator[Finished]:
        """Decode ``turns`` in their order. ``texts`` has the answers of earlier calls, since a later turn of a
        conversation continues them.

        Raises ``ValueError`` naming a problem that cannot be decoded, such as a prompt that is too long.
        """
        texts = dict(texts)
        for group in self.plan.together_of(turns):
            for turn, finished in self._decode_together(group, texts):
                texts[turn.key] = finished.record["text"]
                yield finished

    def _decode_together(self, turns: list[Turn], texts: Mapping[Key, str]) -> list[tuple[Turn, Finished]]:
        plan = self.plan
        key = turns[0].key
        task = turns[0].task
        setting = self._settings[key.way]
        llm = setting.llm
        prompts = [task.prompt_ids(llm, turn.problem, turn.earlier(texts)) for turn in turns]
        shared = SamplingParams(
            temperature=key.temperature,
            top_p=plan.top_p,
            top_k=plan.top_k,
            max_tokens=plan.max_tokens or task.max_tokens,
            stop=task.stop,
        )
        params = [shared.changed({"seed": turn.row_seed}) for turn in turns]
        llm.scheduler.forget()  # or the next way would find the prompt in the cache
        watched = plan.record and key.temperature == 0 and turns[0].way.exact
        try:
            with recorded(llm) if watched else nullcontext() as recorder:
                completions = complete(setting, prompts, params, clocked=True)
        except ValueError as error:
            ids = ", ".join(turn.problem.id for turn in turns)
            raise ValueError(
                f"task {key.task!r}, problem {ids}: {error} (the task's 'only' leaves problems out)"
            ) from None
        return [
            (turn, self._finish(turn, prompt, completion, recorder, llm))
            for turn, prompt, completion in zip(turns, prompts, completions)
        ]

    def _finish(self, turn: Turn, prompt: list[int], done: Completion, recorder: Recorder | None, llm: LLM) -> Finished:
        record = {**_record(turn, done, llm), "environment": self.environment["id"]}
        if recorder is None:
            return Finished(record, self.environment, None)
        record["blocks"] = f"blocks/{hashlib.sha256(repr(turn.key).encode()).hexdigest()[:16]}.safetensors"
        runner = llm.engine.runner
        assert turn.way.k is not None  # only a server's is unknown
        about = {
            **turn.key._asdict(),
            "k": turn.way.k,
            "draft": turn.way.draft,
            **describe_drafter(llm.draft, turn.way.k),
            "row_seed": turn.row_seed,
            "vocabulary": runner.executor.config.vocab_size,
            "control": runner.control_V.nonzero().flatten().tolist(),
            "stop": sorted(llm.eos_ids),
        }
        text = [*prompt, *done.output.token_ids]
        return Finished(record, self.environment, recorder.recording(about, text, len(prompt)))


def _load_settings(plan: Plan, ways: Iterable[Way], ranks: Any) -> dict[str, Setting]:
    """Load the models of each way, by its label. All ways share the target's weights, and each draft is loaded once."""
    options: dict[str, Any] = {name: getattr(plan, name) for name in ("dtype", "device", "cache")}
    target = LLM(plan.model, kernels=plan.kernels, deterministic=plan.deterministic, ranks=ranks, **options)
    models = {"none": target}
    settings = {}
    for way in dict.fromkeys(ways):
        assert way.k is not None  # only a server's is unknown
        if way.draft not in models:
            models[way.draft] = LLM(target, way.draft, ranks=ranks, **options)  # a draft's kernels follow the target's
        settings[way.label] = Setting(way.label, models[way.draft], way.k, way.policy)
    return settings


def environment(llm: LLM, model: str) -> dict[str, Any]:
    """Return the software, kernels and hardware that make records; ``id`` is a digest of them."""
    executor = llm.engine.runner.executor
    facts = {
        "kind": "environment",
        "fly": version("flyspec"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": kind_of(executor.device).name(executor.device) or _processor(),
        "threads": torch.get_num_threads(),
        "device": str(executor.device),
        "dtype": str(executor.dtype).removeprefix("torch."),
        "kernels": executor.kernels,
        "model": model,
    }
    return {"id": hashlib.sha256(repr(facts).encode()).hexdigest()[:8], **facts}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _record(turn: Turn, done: Completion, llm: LLM) -> dict[str, Any]:
    """Return the record of a completion. ``why`` has one letter per token (m: match, r: relaxed, c: correction, b:
    bonus), and ``ends`` says where each token's text ends. ``excused`` has, for each relaxed token, its place, the
    clause, and the token that the target would have chosen, as id and as text."""
    output = done.output
    seconds = asdict(done.times)
    return {
        **turn.facts(AUTOREGRESSIVE),
        "text": output.text,
        "token_ids": output.token_ids,
        "why": "".join(_LETTERS[token.why] for token in output.provenance),
        "ends": _ends(output.text, output.token_ids, llm),
        "excused": [
            [place, token.clause, token.target_choice, _text_of(llm, token.target_choice)]
            for place, token in enumerate(output.provenance)
            if token.why == Why.RELAXED
        ],
        "finish_reason": output.finish_reason,
        **{name: getattr(output.stats, name) for name in _COUNTS},
        "gates": {name: [gate.asked, gate.passed] for name, gate in output.stats.gates.items()},
        "drafts": done.drafts,
        "policy": str(output.policy),
        "guarantee": output.guarantee.value,
        "reach": _reach(llm, turn.way),
        "drafting": llm.computed[1:] if turn.way.k else [],  # kernels and dtype of each model that drafts
        "judged": seconds.pop("judged"),
        "seconds": seconds,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _reach(llm: LLM, way: Way) -> float | None:
    """Return the reach at which a way's drafts stop by themselves; None if they do not stop, or if measured times
    decide."""
    reach = getattr(llm.draft, "reach", 0.0)
    return usual_reach(reach, way.policy) if way.k and reach != 0.0 else None


def _text_of(llm: LLM, token: int | None) -> str:
    return "" if token is None or llm.tokenizer is None else llm.tokenizer.decode([token], skip_special_tokens=False)


def _ends(text: str, tokens: list[int], llm: LLM) -> list[int]:
    """Return, for each token, the length of the text that is final once this token has been emitted."""
    if llm.tokenizer is None:
        return []
    stream = TextStream(llm.tokenizer)
    ends = []
    end = 0
    for number, token in enumerate(tokens, start=1):
        end += len(stream.push(token)) + (len(stream.finish()) if number == len(tokens) else 0)
        ends.append(min(end, len(text)))
    return ends
