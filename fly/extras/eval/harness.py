"""fly as a model of EleutherAI's lm-evaluation-harness (``lm_eval``, the extra ``lm-eval``): ``--model fly``.

Importing this module registers the model. The harness knows only models that are imported, so its own command does not
find this one. ``fly harness`` imports the module, and is otherwise the same command (``main``).
"""

from __future__ import annotations

import inspect
from collections import abc
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, maybe_truncate, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from fly.devices import default_device, on_host
from fly.llm import LLM
from fly.policies import parse_policy
from fly.runner.request import Stats
from fly.types import SamplingParams

__all__ = ["Fly", "main"]

_NAMED = ("model", "draft", "policy", "device", "ranks")
_OPTIONS = [name for name in inspect.signature(LLM).parameters if name not in _NAMED]
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")  # greedy decoding ignores these
_SAMPLING = (*_SAMPLED, "seed", "repetition_penalty", "presence_penalty", "frequency_penalty")
_ALL = 1024  # requests given to the engine at a time if the batch size is "auto"


@register_model("fly")
class Fly(TemplateLM):  # type: ignore[misc, unused-ignore]  # the harness need not be installed
    """A target with its draft and policy, as a model of the harness.

    Likelihoods are the target's own: drafts and policies do not affect them. Prefixes that requests share are computed
    once. Generation is speculative, under the given policy.

    Args:
        model: as for ``LLM``, or the ``LLM`` itself.
        draft: the draft as a text; None decodes autoregressively.
        policy: the policy as a text; None is ``Exact()``.
        batch_size: requests given to the engine at a time, or ``"auto"`` to give it as many as there are. The engine
            makes its own batches of them.
        max_gen_toks: the most tokens of an answer, if the task gives no limit.
        prefix_token_id: the token that comes before a text without a context; None is the begin token, or the end token
            if there is none.
        max_batch_size: an option of the harness, without effect here.
        device: as for ``LLM``. The harness gives ``cuda:0`` by default; without a GPU, this counts as ``auto``.
        options: those of ``LLM``: ``k``, ``dtype``, ``kernels``, ``max_context``, and so on.

    Raises ``ValueError`` for an option that does not exist, and for a model without a tokenizer or an end token.
    """

    def __init__(
        self,
        model: str | LLM,
        draft: str | None = None,
        policy: str | None = None,
        batch_size: int | str = 1,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        max_batch_size: int | None = None,
        device: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            parameters = [name for name in inspect.signature(Fly).parameters if name != "options"]
            raise ValueError(f"model_args {unknown}: unknown; choose from {', '.join([*parameters, *_OPTIONS])}")
        if batch_size != "auto" and (not str(batch_size).isdigit() or int(batch_size) < 1):
            raise ValueError(f"batch_size {batch_size!r} must be 'auto' or a number of at least 1")
        self.batch_size = _ALL if batch_size == "auto" else int(batch_size)
        if isinstance(model, LLM):
            if draft is not None or policy is not None or options:
                raise ValueError("draft, policy and options: the LLM that is given as the model has its own")
            self.llm, self.name = model, "fly"
        else:
            rule = None if policy is None else parse_policy(policy, trusted=True)
            device = "auto" if device == "cuda:0" and on_host(default_device()) else device
            self.llm, self.name = LLM(model, draft, rule, device=device, **options), model
        if self.llm.tokenizer is None:
            raise ValueError(f"model {model!r} has no tokenizer; the harness asks in texts")
        self.texts = self.llm.tokenizer
        self.max_length, self.max_gen_toks = self.llm.engine.context, max_gen_toks
        self._prefix = prefix_token_id
        self._draft = draft
        self.stats = Stats()

    @property
    def eot_token_id(self) -> int:
        if (end := self.texts.special_names.get("eos_token")) is not None:
            return self.texts.token_id(end)
        if not self.llm.eos_ids:
            raise ValueError(f"model {self.name!r} names no end token; give prefix_token_id")
        return min(self.llm.eos_ids)

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is not None:
            return self._prefix
        begin = self.texts.special_names.get("bos_token")
        return self.eot_token_id if begin is None else self.texts.token_id(begin)

    @property
    def tokenizer_name(self) -> str:
        return self.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if chat_template is False or chat_template is None:
            return None
        name = "default" if chat_template is True else chat_template
        if name not in self.texts.templates:
            raise ValueError(f"chat template {name!r}: model {self.name!r} has {sorted(self.texts.templates)}")
        return self.texts.templates[name].source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation. Without ``add_generation_prompt`` the text stops at the end of the last
        message, so that the answer continues that message."""
        text = self.texts.render(chat_history, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:  # a rendered conversation already starts with the begin token
            begin = self.texts.special_names.get("bos_token")
            add_special_tokens = not (begin and string.startswith(begin))
        return self.texts.encode(string, add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return, for each continuation after its context, the log-probability, and whether greedy decoding would give
        it."""
        likelihoods: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        # Sort requests with the same context next to one another, so that its keys and values are still cached.
        order = sorted(range(len(requests)), key=lambda number: requests[number][1] + requests[number][2])
        with tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm) as bar:
            for numbers in _chunks(order, self.batch_size):
                prompts, params = [], []
                for number in numbers:
                    _, context, continuation = requests[number]
                    if len(continuation) > self.max_length:
                        length = f"a continuation of {len(continuation)} tokens"
                        raise ValueError(f"{length} does not fit the model's context of {self.max_length}")
                    prompts.append((context + continuation)[-(self.max_length + 1) :])
                    start = len(prompts[-1]) - len(continuation)
                    params.append(
                        SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=start)
                    )
                outputs = self.llm.generate(prompts, params)
                for number, output, sampling in zip(numbers, outputs, params):
                    ids = output.prompt_token_ids[sampling.prompt_logprobs_start :]
                    entries = (output.prompt_logprobs or [])[sampling.prompt_logprobs_start :]
                    pairs = [(token, entry) for token, entry in zip(ids, entries) if entry is not None]
                    greedy = all(next(iter(entry)) == token for token, entry in pairs)
                    likelihoods[number] = sum(entry[token] for token, entry in pairs), greedy
                    if (key := requests[number][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", key, likelihoods[number])
                bar.update(len(numbers))
        return likelihoods

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, computed in windows of the model's context length."""
        windows, owners = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            tokens = self.tok_encode(text)
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
            sums[number] += value
        for request, value in zip(requests, sums):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each context, up to one of its stop strings or the end token."""
        answers = []
        end = self.texts.decode([self.eot_token_id], skip_special_tokens=False)
        with tqdm(total=len(requests), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            for chunk in _chunks(requests, self.batch_size):
                prompts, params = [], []
                for context, task_options in (request.args for request in chunk):
                    sampling = self._sampling(task_options, end)
                    prompt, most = maybe_truncate(
                        self.tok_encode(context), max_gen_toks=sampling.max_tokens, max_model_len=self.max_length
                    )
                    prompts.append(prompt)
                    params.append(sampling.model_copy(update={"max_tokens": most}))
                for request, output, sampling in zip(chunk, self.llm.generate(prompts, params), params):
                    answers.append(postprocess_generated_text(output.text, list(sampling.stop), None))
                    self.stats += output.stats
                    self.cache_hook.add_partial("generate_until", request.args, answers[-1])
                bar.update(len(chunk))
        return answers

    def _sampling(self, gen_kwargs: dict[str, Any], end: str) -> SamplingParams:
        """Convert a task's ``generation_kwargs``. Raises ``ValueError`` for those that are unknown here."""
        options: dict[str, Any] = {**normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)}
        stop = [text for text in handle_stop_sequences(options.pop("until"), end) if text]
        most = options.pop("max_gen_toks")
        if not options.pop("do_sample"):
            options = {name: value for name, value in options.items() if name not in _SAMPLED}
        if unknown := sorted(options.keys() - set(_SAMPLING)):
            choices = ", ".join(("until", "max_gen_toks", "do_sample", *_SAMPLING))
            raise ValueError(f"generation_kwargs {unknown}: unknown; choose from {choices}")
        return SamplingParams.model_validate({"temperature": 0.0, **options, "max_tokens": most, "stop": tuple(stop)})

    def get_model_info(self) -> dict[str, Any]:
        """Return facts for the harness's results: the policy and draft, and the statistics of speculation over all
        answers."""
        policy, stats = self.llm.policy, self.stats
        draft = self._draft or (None if self.llm.draft is None else type(self.llm.draft).__name__)
        return {
            "fly_policy": str(policy),
            "fly_guarantee": policy.guarantee.name.lower(),
            "fly_draft": draft,
            "fly_mean_acceptance_length": stats.tau,
            "fly_relaxed": stats.relaxed,
            "fly_generated": stats.generated,
        }


def _chunks(items: abc.Sequence[Any], size: int) -> list[abc.Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def main(arguments: abc.Sequence[str]) -> None:
    """Run the harness's own command, which knows ``--model fly`` now."""
    import sys

    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["fly harness", *arguments]
    cli_evaluate()
