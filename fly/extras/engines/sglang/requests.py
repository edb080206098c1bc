"""A request of SGLang: its rule, and what of SGLang's configuration refuses it."""

from __future__ import annotations

from typing import Any, NamedTuple

from fly.extras.engines.blocks import Row, name_seed, read_rule
from fly.types import SamplingParams

__all__ = ["ALGORITHMS", "TRIED", "Served", "check_request", "find_rule", "read_row"]

TRIED = ("0.5.23",)  # versions of SGLang that this was tried on; others are refused
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH")  # ways to draft whose decision is hooked
_ZERO = 1e-6  # SGLang takes lower temperatures as 0


class Served(NamedTuple):
    """How SGLang was started."""

    version: str
    algorithm: str | None = None  # of drafts; None is none
    branches: int = 1  # of a tree of drafts, at most; 1 is chains
    overlap: bool = True  # the host prepares a step while the one before still runs
    device: str = "cuda"
    watermark: bool = False


def find_rule(params: Any) -> Any:
    """Return the rule that sampling parameters name, as the request wrote it; None if they name none."""
    return params.custom_params.get("fly") if isinstance(params.custom_params, dict) else None


def read_row(params: Any, size: int, name: str, eos_ids: Any = ()) -> Row | None:
    """Return the row of a request with these sampling parameters, or None if it names no rule.

    ``name`` is the request's. It gives the seed of a request without one: a seed must be the same on every rank.
    SGLang writes temperature 0 as ``top_k`` 1 at temperature 1. Its drafts are verified without min-p.
    """
    rule = read_rule(find_rule(params), size)
    if rule is None:
        return None
    sampling = SamplingParams(temperature=0)
    if params.top_k != 1 and params.temperature >= _ZERO:
        top_k = params.top_k if 0 < params.top_k < size else 0
        sampling = SamplingParams(temperature=params.temperature, top_k=top_k, top_p=params.top_p)
    seed = name_seed(name) if params.sampling_seed is None else params.sampling_seed
    return Row(rule, size, sampling, seed, {*(params.stop_token_ids or ()), *(eos_ids or ())})


def check_request(params: Any, size: int, served: Served) -> None:
    """Raise ``ValueError`` for a request whose rule cannot be applied rightly in this engine. ``size`` is V."""
    row = read_row(params, size, name="")
    if row is None:
        return
    if served.version not in TRIED:
        raise ValueError(f"fly: SGLang {served.version} was not tried with fly's rules; tried: {list(TRIED)}")
    if served.algorithm is None:
        raise ValueError("fly: this engine has no draft, so there is nothing to decide")
    if served.algorithm not in ALGORITHMS:
        raise ValueError(
            f"fly: drafts of --speculative-algorithm {served.algorithm} cannot be decided by a rule; choices: "
            f"{list(ALGORITHMS)}"
        )
    if served.branches != 1:
        raise ValueError(
            f"fly: SGLang drafts trees of {served.branches} branches, and rules decide on chains; start it with "
            "--speculative-eagle-topk 1 (n-grams: --speculative-ngram-max-bfs-breadth 1)"
        )
    if served.overlap and row.reads_text:
        raise ValueError(
            f"fly: {row.rule} asks for the text so far, which lags under overlap scheduling; start SGLang with "
            "--disable-overlap-schedule"
        )
    if served.device == "cpu" and row.params.temperature > 0:
        raise ValueError("fly: on CPUs SGLang verifies drafts greedily at any temperature; ask for temperature 0")
    if served.watermark:
        raise ValueError("fly: SGLang was started with a watermark, which a rule's tokens would not carry")
