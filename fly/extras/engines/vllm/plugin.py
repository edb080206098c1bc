"""The plug-in: carries each request's rule to vLLM's rejection sampler, and lets the rule decide there.

vLLM calls ``register`` in each of its processes (entry point group ``vllm.general_plugins``). It wraps four functions.
The first checks requests when they come in, the second keeps a request's rule beside its row, the third adds the rows'
rules to the batch's metadata, and the fourth, the rejection sampler, asks the rules. Rows without a rule keep vLLM's
decision.

On CPUs without triton-cpu, ``register`` also replaces ``expand_batch_to_tokens``. There vLLM 0.32 fills a copy of the
result and drops it. So in every batch that samples, the logits of drafted tokens are divided by temperatures from
uninitialized memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fly.extras.engines.vllm.rows import Row, read_rule

__all__ = ["TRIED", "deciding", "expand_batch_to_tokens", "register"]

TRIED = ("0.32.0",)  # versions of vLLM that this was tried on; others are refused
_log = logging.getLogger("vllm.fly")


def register() -> None:
    """Wrap vLLM's functions, once in a process."""
    import vllm
    from vllm.exceptions import VLLMValidationError
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.engine import input_processor
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker import gpu_input_batch

    if getattr(rejection_sampler.rejection_sample, "by_fly", False):
        return
    version = vllm.__version__.partition("+")[0]

    def check(processor: Any, params: Any) -> None:
        """Refuse a request whose rule cannot be applied rightly here, with an error of the request (400 over HTTP)."""
        config = processor.vllm_config
        try:
            rule = read_rule(getattr(params, "extra_args", None), processor.model_config.get_vocab_size())
            if rule is None:
                return
            if version not in TRIED:
                raise ValueError(f"fly: vLLM {version} was not tried with fly's rules; tried: {list(TRIED)}")
            if config.use_v2_model_runner:
                raise ValueError("fly: vLLM's second model runner takes no rules; set VLLM_USE_V2_MODEL_RUNNER=0")
            if config.scheduler_config.async_scheduling:
                raise ValueError("fly: rules need the tokens so far; start vLLM with --no-async-scheduling")
            if config.speculative_config is None:
                raise ValueError("fly: this engine has no draft, so there is nothing to decide")
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="extra_args") from None

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def validate(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            check(self, params)
            return original(self, params, *args, **kwargs)

        return validate

    processor, batch = input_processor.InputProcessor, gpu_input_batch.InputBatch
    processor._validate_params = checked(processor._validate_params)
    if version not in TRIED:
        _log.warning("fly's rules are refused: vLLM %s was not tried; tried: %s", version, TRIED)
        return
    batch.add_request, batch._make_sampling_metadata = (
        _adding(batch.add_request),
        _carrying(batch._make_sampling_metadata),
    )
    rejection_sampler.rejection_sample = deciding(rejection_sampler.rejection_sample)
    if current_platform.is_cpu() and not HAS_TRITON:
        _log.warning("fly: replaces vLLM's expand_batch_to_tokens, which leaves its result unwritten on CPUs")
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Repeat each row's value for its drafted tokens: ``x`` [B] becomes [T]. ``cu_num_tokens`` [B] has the running sums
    of the rows' counts."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def _adding(original: Callable[..., int]) -> Callable[..., int]:
    """Keep a request's rule beside its row. The rule stays with a request that is preempted and comes back."""

    @functools.wraps(original)
    def add_request(self: Any, request: Any) -> int:
        params = request.sampling_params
        if not hasattr(request, "fly"):
            rule = None if params is None else read_rule(params.extra_args, self.vocab_size)
            request.fly = None if rule is None else Row(rule, frozenset(params.all_stop_token_ids))
        self.__dict__.setdefault("fly", {})[request.req_id] = request
        return original(self, request)

    return add_request


def _carrying(original: Callable[..., Any]) -> Callable[..., Any]:
    """Attach the requests that have a rule to the batch's metadata, by row number."""

    @functools.wraps(original)
    def make_sampling_metadata(self: Any) -> Any:
        made, at = original(self), self.req_id_to_index
        self.fly = {name: request for name, request in self.__dict__.get("fly", {}).items() if name in at}
        made.fly = {at[name]: request for name, request in self.fly.items() if request.fly is not None}
        return made

    return make_sampling_metadata


def deciding(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap vLLM's ``rejection_sample``: after it, each rule decides its row again."""

    @functools.wraps(original)
    def rejection_sample(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        given = (num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits, bonus_token_ids)
        output: Tensor = original(draft_token_ids, *given, sampling_metadata, *args, **kwargs)
        ends = torch.tensor(num_draft_tokens).cumsum(0).tolist()
        for b, request in getattr(sampling_metadata, "fly", {}).items():
            if b >= len(ends) or not (count := num_draft_tokens[b]):
                continue  # nothing was drafted for this row, so vLLM's own sample stands
            rows = slice(ends[b] - count, ends[b])
            temperature = 0.0 if sampling_metadata.all_greedy else float(sampling_metadata.temperature[b])
            generator = sampling_metadata.generators.get(b)
            try:
                tokens = request.fly.decide(
                    draft_token_ids[rows],
                    target_logits[rows],
                    None if draft_probs is None else draft_probs[rows],
                    int(bonus_token_ids[b]),
                    temperature,
                    request.prompt_token_ids or [],
                    request.output_token_ids,
                    torch.rand(count + 1, generator=generator, device=target_logits.device),
                )
            except Exception:  # a user's rule may raise anything, and must not end the engine
                _log.exception("fly: %s failed; vLLM's own decision stands for this block", request.fly.rule)
                continue
            output[b] = -1  # vLLM's mark of no token
            output[b, : len(tokens)] = torch.tensor(tokens, dtype=output.dtype, device=output.device)
        return output

    rejection_sample.by_fly = True  # type: ignore[attr-defined]
    return rejection_sample
