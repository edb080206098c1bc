"""The plug-in that vLLM calls in each of its processes (entry point group ``vllm.general_plugins``).

It wraps the function that checks requests, and the functions of both model runners that decide. vLLM has no interface
for this, so a version that was not tried is refused (docs/explanation/engine-hook.md says what one would need).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from fly.extras.engines.vllm import first, second
from fly.extras.engines.vllm.requests import TRIED, check_request

__all__ = ["register"]

_log = logging.getLogger("vllm.fly")


def register() -> None:
    """Wrap vLLM's functions, once in a process."""
    import vllm
    from vllm.v1.engine.input_processor import InputProcessor

    version = vllm.__version__.partition("+")[0]
    if hasattr(InputProcessor, "fly"):
        return
    InputProcessor.fly = version
    InputProcessor._validate_params = _check_before(InputProcessor._validate_params, version)
    if version not in TRIED:
        _log.warning("fly's rules are refused: vLLM %s was not tried; tried: %s", version, TRIED)
        return
    _wrap_first()
    _wrap_second()


def _check_before(original: Callable[..., Any], version: str) -> Callable[..., Any]:
    """Wrap ``InputProcessor._validate_params``: refuse a request with an error of its own (400 over HTTP)."""
    from vllm.exceptions import VLLMValidationError

    @functools.wraps(original)
    def validate(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            check_request(params, self.vllm_config, self.model_config.get_vocab_size(), version)
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="extra_args") from None
        return original(self, params, *args, **kwargs)

    return validate


def _wrap_first() -> None:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

    InputBatch.add_request = first.add_row(InputBatch.add_request)
    InputBatch._make_sampling_metadata = first.attach_rows(InputBatch._make_sampling_metadata)
    rejection_sampler.rejection_sample = first.decide_after(rejection_sampler.rejection_sample)
    if current_platform.is_cpu() and not HAS_TRITON:
        _log.warning("fly: replaces vLLM's expand_batch_to_tokens, which leaves its result unwritten on CPUs")
        rejection_sampler.expand_batch_to_tokens = first.expand_batch_to_tokens


def _wrap_second() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    Sampler.add_request = second.set_row(Sampler.add_request)
    GPUModelRunner.finish_requests = second.forget_rows(GPUModelRunner.finish_requests)
    RejectionSampler._verify = second.decide_after(RejectionSampler._verify)
