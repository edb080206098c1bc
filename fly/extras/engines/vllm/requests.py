"""A request of vLLM: its rule, and what of vLLM's configuration refuses it. Knows no model runner."""

from __future__ import annotations

from typing import Any

from fly.extras.engines.blocks import Row, name_seed, read_rule
from fly.types import SamplingParams

__all__ = ["TRIED", "check_request", "read_row"]

TRIED = ("0.32.0", "0.33.0")  # versions of vLLM that this was tried on; others are refused
_ZERO = 1e-5  # vLLM takes lower temperatures as 0


def read_row(params: Any, size: int, name: str, seed: int | None = None) -> Row | None:
    """Return the row of a request with these sampling parameters, or None if it names no rule.

    ``name`` is the request's. It gives the seed if neither the request nor ``seed`` does: a seed must be the same on
    every rank.
    """
    rule = read_rule((getattr(params, "extra_args", None) or {}).get("fly"), size)
    if rule is None:
        return None
    sampling = SamplingParams(temperature=0.0 if params.temperature < _ZERO else float(params.temperature))
    if seed is None:
        seed = name_seed(name) if params.seed is None else params.seed
    return Row(rule, size, sampling, seed, params.all_stop_token_ids)


def check_request(params: Any, config: Any, size: int, version: str) -> None:
    """Raise ``ValueError`` for a request whose rule cannot be applied rightly in this engine.

    ``config`` is vLLM's, ``size`` is V, ``version`` is vLLM's.
    """
    row = read_row(params, size, name="")
    if row is None:
        return
    if version not in TRIED:
        raise ValueError(f"fly: vLLM {version} was not tried with fly's rules; tried: {list(TRIED)}")
    drafts = config.speculative_config
    if drafts is None:
        raise ValueError("fly: this engine has no draft, so there is nothing to decide")
    if (method := getattr(drafts, "rejection_sample_method", "standard")) != "standard":
        raise ValueError(
            f"fly: vLLM was started with rejection_sample_method={method!r}, which decides for all requests; "
            "requests' rules need 'standard'"
        )
    if getattr(drafts, "enable_adaptive_verification", False):
        raise ValueError("fly: vLLM was started with enable_adaptive_verification, which cuts drafts before the rule")
    if getattr(config, "watermark_config", None) is not None:
        raise ValueError("fly: vLLM was started with a watermark, which a rule's tokens would not carry")
    if not config.use_v2_model_runner:
        if config.scheduler_config.async_scheduling and row.reads_text:
            raise ValueError(
                f"fly: {row.rule} asks for the text so far, which lags under asynchronous scheduling; start vLLM with "
                "--no-async-scheduling"
            )
    elif row.keeps_account and getattr(config.parallel_config, "enable_batch_sharded_sampling", False):
        raise ValueError(f"fly: {row.rule} has a budget, which ranks cannot share under enable_batch_sharded_sampling")
