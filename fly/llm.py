"""The Python interface: load a target and a draft, choose a backend, wire the engine, and answer calls of all forms,
from threads and from coroutines. Knows nothing of HTTP.

If several ranks share a model, either all make the same calls in the same order, or the first one leads."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import warnings
from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from inspect import Parameter, Signature, signature
from numbers import Integral
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, Unpack, overload

import numpy as np
import torch
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from fly import parallel, runner
from fly.backends.choice import LoadExecutor, executor_of, load_executor
from fly.backends.choice import load as load_model
from fly.backends.cpu.library import check_target
from fly.cache import block_size_for
from fly.config import DEFAULT_K, Config, EngineOptions, check_options, declared
from fly.contents import Keyed
from fly.drafts.base import DraftStrategy
from fly.drafts.limits import check_rule
from fly.drafts.registry import parse_draft
from fly.drafts.setup import TranslatingSetup
from fly.engine import Engine
from fly.engine.caches import find_room, make_caches
from fly.engine.job import Job, Request, outputs_of, read_along
from fly.engine.scheduler import Scheduler, max_scored
from fly.engine.stream import AsyncStream, Stream
from fly.engine.warming import warm_up
from fly.engine.worker import Worker
from fly.errors import explain, shorten, suggest
from fly.models.bundled import open_model
from fly.models.checkpoint import Checkpoint
from fly.models.generation import read_sampling_defaults
from fly.models.loading import resolve_dtype
from fly.models.messages import for_template
from fly.models.thinking import ChatPrompt
from fly.models.tokenizer import Tokenizer, read_eos_ids
from fly.ops import derive
from fly.output import Output, Piece
from fly.params import Sampling
from fly.policies import AcceptancePolicy, Condition, Exact, load_policy
from fly.runner.executor import Executor, Workload
from fly.runner.memory import CacheSize
from fly.runner.request import BadWords, Row
from fly.runner.runner import Runner
from fly.types import SamplingParams
from fly.vocabulary import Vocabulary

if TYPE_CHECKING:
    from fly.parallel import Ranks
    from fly.runner.structured import Vet

__all__ = [
    "LLM",
    "AsyncStream",
    "CallOptions",
    "ChatOptions",
    "Output",
    "Piece",
    "PolicyLike",
    "Prompt",
    "Request",
    "Stream",
    "as_policy",
    "for_chat",
    "listed",
    "one_bar",
]

Prompt: TypeAlias = str | abc.Sequence[int] | np.ndarray[Any, Any] | torch.Tensor
Prompts: TypeAlias = Prompt | abc.Iterable[Prompt]
Conversation: TypeAlias = str | abc.Sequence[abc.Mapping[str, Any]]
PolicyLike: TypeAlias = AcceptancePolicy | str | abc.Mapping[str, Any]
Params: TypeAlias = SamplingParams | abc.Sequence[SamplingParams] | None

_LONG = 1.0  # seconds after which a call shows its progress
_OWN = ("policy", "k", "priority", "draft")  # options of a call that ``SamplingParams`` lacks
_OF_TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template", "documents", "enable_thinking")
_bars = threading.Lock()


class CallOptions(Sampling, total=False):
    """The keywords of a call: the fields of ``SamplingParams``, and these."""

    sampling_params: Params  # another name for ``params``
    policy: PolicyLike | abc.Sequence[PolicyLike] | None
    k: int | abc.Sequence[int] | None
    priority: int
    draft: str | abc.Sequence[str] | None


class ChatOptions(CallOptions, total=False):
    """Further keywords of a chat, for its template (see ``LLM.chat_prompt``)."""

    tools: abc.Sequence[abc.Mapping[str, Any]] | None
    chat_template_kwargs: abc.Mapping[str, Any] | None


class LLM:
    """A target model with its tokenizer, a draft strategy and an acceptance policy.

    Calls may come from any thread and any event loop. Calls that are open at the same time run in one batch, on the
    engine's own thread, which starts with the first call. ``close`` (or the end of a ``with`` block) ends that thread;
    otherwise it ends with the object. A call that is given up (by an exception, Ctrl+C, ``task.cancel()``, or by
    dropping its stream) frees its resources after the current round.

    Args:
        model: a bundled name (``fly-target``), the path of a Hugging Face directory or a GGUF file, a name on the
            Hugging Face hub (``owner/name``, ``owner/name@revision``, ``owner/name/file.gguf``), an open checkpoint, a
            loaded model, or another ``LLM``. A loaded model is what ``fly.backends.load`` returns, or a module or an
            executor alone, which takes token ids only. The other ``LLM`` shares its loaded model, tokenizer and end
            tokens, but neither its caches nor its draft.
        draft: a ``DraftStrategy``, its text (a checkpoint's name as for ``model``, ``ngram``, a cascade such as
            ``ngram+fly-draft``, cheapest first, or ``module:Class``, which is imported; see ``parse_draft``), or None
            for autoregressive decoding.
        policy: decides which drafted tokens are kept: an ``AcceptancePolicy``, its text (``"fly(theta=0.3)"``), a
            preset (``"fly.paper"``) or its mapping (``{"name": "fly"}``); None is ``Exact()``. ``module:Class`` is
            imported.
        k: the most tokens that are drafted in a round.
        ranks: the processes that share the models (``fly.parallel.launch``); None for a single process. Either all
            ranks make the same calls in the same order and get the same answers, or the first rank calls ``lead`` and
            the others call ``follow``.
        options: how the models run; see below, and ``fly.config.EngineOptions``.

    A draft that is loaded by its name has the target's dtype, device and kernels, or four bits if it is large and the
    target's kernels are compiled (``fly.backends.load``); its own text may say otherwise, as
    ``"model(fly-draft, kernels=w8a8)"`` does, and so may this call if ``model`` is loaded already. A loaded model keeps
    its kernels (``fly.backends.executor_of`` gives it others). With a loaded ``model`` and no draft to load by its
    name, another dtype than the model's, or other kernels, are errors.

    ``deterministic``: requests, drafts and chunks of a prompt in the same forward do not change a token's bits. At
    temperature 0 a lossless policy then gives exactly the text of autoregressive decoding, in bfloat16 too. This is
    free for kernels that add up in a fixed order (the compiled ones in one process). Other kernels then feed one token
    per forward (``fly.runner.executor.TokenByToken``).

    Memory of caches is taken when it is first used. A draft model with a cache size of its own is not counted in
    ``cache``. If the caches hold less than a full context, the log says so, with the reason. On CUDA, weights, and
    rounds and prompts of ``max_rows`` rows, take their part first (``fly.runner.memory.divide_device``); if rounds
    would need more than a quarter of what the weights leave, ``max_rows`` is lowered, with a warning.

    Attributes:
        policy, k: the defaults of calls; may be set.
        default_params: the default sampling parameters: what the checkpoint recommends, or greedy.
        tokenizer: the checkpoint's, or None.
        vocabulary: the meaning of the target's token ids (``fly.vocabulary``), to which rules and drafts are bound.
        eos_ids: tokens that end a text.
        draft: the draft strategy, or None.
        engine, scheduler, worker: the parts of ``fly.engine`` that run requests.

    Raises:
        CheckpointError: the checkpoint cannot be used (see ``load_model``).
        ValueError: a bad argument, or a draft whose vocabulary cannot be translated to the target's.
        TypeError: an unknown option; the error names the choices.
    """

    __signature__: ClassVar[Signature]

    def __init__(
        self,
        model: object,
        draft: str | Path | DraftStrategy | None = None,
        policy: PolicyLike | None = None,
        k: int = DEFAULT_K,
        *,
        ranks: Ranks | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.engine: Engine
        settings = check_options(options)
        self.k = _check_k(k)
        self.policy = Exact() if policy is None else as_policy(policy)
        _check_draft(draft, ranks)
        self._named = _name_of(model), _name_of(draft)
        self._hinted = False  # whether the hint to use ``chat`` was given

        # The target. Each rank loads its own part.
        load_part = load_executor if ranks is None else _part_loader(ranks)
        executor = self._load_target(model, settings, load_part)
        loads_target = isinstance(model, (str, Path, Checkpoint))
        if not (loads_target or isinstance(draft, (str, Path))):  # these options would do nothing
            _check_loaded(executor, settings["dtype"], settings["kernels"])
        if settings["deterministic"]:
            executor = executor.deterministic()
        self.vocabulary = self._vocabulary_of(executor.config.vocab_size, executor.device)
        # Policies that hold the same become one object, whose cached values are computed once.
        self._bind = lru_cache(256)(partial(_bind_to, self.vocabulary))
        control = self.eos_ids | (self.tokenizer.control_ids if self.tokenizer else frozenset())
        target = Runner(executor, None, control, settings["prefix_reuse"], self.tokenizer)

        # The draft. A strategy loads its models when it is attached.
        setup = TranslatingSetup(target, self.vocabulary, partial(load_model, context=settings["max_context"]))

        def make_draft() -> DraftStrategy | None:
            if not isinstance(draft, (str, Path)):
                return draft
            # The kernels of this call are the target's, unless that is loaded.
            kernels = "auto" if loads_target else settings["kernels"]
            return parse_draft(
                str(draft), trusted=True, dtype=settings["dtype"], device=settings["device"], kernels=kernels
            )

        if ranks is not None:
            strategy = parallel.place_draft(make_draft, setup, ranks, load_part)
        elif (strategy := make_draft()) is not None:
            strategy = setup.attach(strategy)

        if strategy is not None and self.k:
            check_rule(self._bind(self.policy.keyed), strategy)

        # The caches, whose size depends on all models.
        block_size = settings["block_size"] or block_size_for(executor.device)
        size = CacheSize.parse(settings["cache"])
        max_rows = settings["max_rows"]
        step_tokens = settings["step_tokens"]
        workload = Workload(
            rows=max_rows,
            k=0 if strategy is None else self.k,
            policy=self._bind(self.policy.keyed),
            step_tokens=step_tokens,
            scored=min(step_tokens, max_scored(max_rows, executor.config.vocab_size)),
            block_size=block_size,
            drafter=next((each.executor for each in setup.drafters), None),
        )
        room, max_rows = find_room(executor, workload, size, ranks)
        make_caches(target, setup, size, block_size, room, ranks)

        # The engine. An error on one rank alone is no request's fault: the other ranks would wait for this one.
        self.engine = Engine(target, strategy, setup)
        scheduler_options = {} if ranks is None else {"failed": ranks.agree_on}
        self.scheduler = Scheduler(self.engine, max_rows, step_tokens, **scheduler_options)
        self.worker = Worker(self.scheduler, ranks)
        self._leads = ranks is None or ranks.leads
        self._random: random.Random = random.SystemRandom() if ranks is None else ranks.random

    def _load_target(self, model: object, settings: EngineOptions, by: LoadExecutor) -> Executor:
        """Load the target, with its tokenizer, end tokens and sampling defaults; or share those of another ``LLM``."""
        kernels = settings["kernels"]
        max_context = settings["max_context"]
        self.tokenizer: Tokenizer | None = None
        self.eos_ids: frozenset[int] = frozenset()
        self.default_params = SamplingParams(temperature=0.0)
        if isinstance(model, LLM):
            self.tokenizer = model.tokenizer
            self.eos_ids = model.eos_ids
            self.default_params = model.default_params
            executor = model.engine.runner.executor
        else:
            check_target(kernels)
            checkpoint = open_model(model) if isinstance(model, (str, Path, Checkpoint)) else None
            model_context = sys.maxsize if checkpoint is None else checkpoint.config.max_position_embeddings
            if max_context is not None and max_context > model_context:
                raise ValueError(f"max_context {max_context} is more than the {model_context} tokens that {model} has")
            loaded = load_model(checkpoint or model, settings["dtype"], settings["device"], kernels, by, max_context)
            executor = loaded.executor
            self.tokenizer = loaded.tokenizer
            if loaded.checkpoint is not None:
                self.eos_ids = read_eos_ids(loaded.checkpoint, executor.config.vocab_size)
                self.default_params = read_sampling_defaults(loaded.checkpoint, executor.config.vocab_size)
        if max_context is not None and max_context != executor.config.max_position_embeddings:
            context = executor.config.max_position_embeddings
            raise ValueError(f"max_context {max_context}: this model is loaded already, with a context of {context}")
        check_target(executor.kernels)  # that of a loaded model, or of FLY_KERNELS
        if self.tokenizer is not None:
            self.tokenizer.check_fits(executor.config.vocab_size)
        return executor

    @classmethod
    def from_config(cls, config: Config | str | Path, ranks: Ranks | None = None) -> LLM:
        """Build an ``LLM`` from a configuration, or from its YAML or JSON file (see ``fly.config.Config``)."""
        config = config if isinstance(config, Config) else Config.read(config)
        return cls(config.model, config.draft, config.policy, config.k, ranks=ranks, **config.options)

    @property
    def draft(self) -> DraftStrategy | None:
        """The draft strategy, or None."""
        return self.engine.strategy

    @property
    def draft_names(self) -> list[str]:
        """The names that a request may choose its draft from (``ChooseDraft``)."""
        return [] if self.draft is None else list(self.draft.names)

    def __repr__(self) -> str:
        target, *drafts = (f"{kernels} in {dtype}" for kernels, dtype in self.computed)
        runs = f", runs={target!r}" + (f", draft_runs={' + '.join(drafts)!r}" if drafts else "")
        return "LLM({}, draft={}, policy={!r}, k={}{})".format(*self._named, str(self.policy), self.k, runs)

    @property
    def computed(self) -> list[tuple[str, str]]:
        """Kernels and dtype of the target, and then of each model that drafts."""
        executors = [self.engine.runner.executor, *(each.executor for each in self.engine.setup.drafters)]
        return [(each.kernels, str(each.dtype).removeprefix("torch.")) for each in executors]

    def _vocabulary_of(self, size: int, device: torch.device) -> Vocabulary:
        return Vocabulary(size, device=device) if self.tokenizer is None else self.tokenizer.vocabulary(size, device)

    def warm(self, advance: abc.Callable[[str], None] = lambda text: None) -> None:
        """Prepare a CUDA device for requests: capture the graphs of 1 to 32 rows at temperature 0 and at the sampled
        default, with this draft, policy and K, and compile what they need. Such requests then need not wait for it. On
        other devices this does nothing. ``advance`` is called after each number of rows."""
        warm_up(self.engine, self.scheduler.max_rows, self.k, self.default_params, self.generate, advance)

    @property
    def devices(self) -> str:
        """What is used on a CUDA device and what is not, with the reason, in one line; empty on other devices."""
        facts = self.engine.runner.executor.describe()
        if facts:
            cache = self.engine.runner.cache
            tokens = cache.allocator.num_blocks * cache.allocator.block_size
            size = 2 * cache.keys.nbytes
            facts.append(f"a cache of {tokens:,} tokens ({size / 1e9:.1f} GB), at most {self.scheduler.max_rows} rows")
        return " · ".join(facts)

    def lead(self) -> None:
        """Make this, the first of several ranks, the only one that is called from now on, from any thread. The others
        ``follow`` until ``close``."""
        self._random = random.SystemRandom()  # the common random numbers must be drawn by all ranks or none
        self.worker.lead()

    def follow(self) -> None:
        """Take part, on another rank than the first, in the first one's calls until it is closed. Raises the engine's
        failure."""
        self.worker.follow(lambda values: self.requests(*values))

    def generate(
        self, prompts: Prompts, params: Params = None, *, progress: bool = True, **options: Unpack[CallOptions]
    ) -> list[Output]:
        """Complete every prompt. The outputs are in the order of the prompts.

        As many prompts run at once as fit in the caches, in one batch with the calls of other threads and coroutines.

        Args:
            prompts: one or several, each a text or its token ids: a list, or a NumPy array or tensor of integers (with
                two dimensions, each row is a prompt). The text "" is allowed if the tokenizer adds a begin token; the
                model then continues from this token.
            params: one ``SamplingParams`` for all prompts, or one for each; None is ``default_params``, the
                checkpoint's sampling defaults. ``sampling_params`` is another name for this argument.
            progress: on a terminal, show progress if the call takes longer than a second.
            options: any field of ``SamplingParams`` (``temperature=0, max_tokens=64``), which overrides ``params``; and
                the following, one for all prompts or one for each. None takes the default of this object:

                policy: an ``AcceptancePolicy``, its text (``"fly(theta=0.3)"``), a preset (``"fly.paper"``) or its
                    mapping (``{"name": "fly", "theta": 0.3}``).
                k: the most tokens drafted in a round; 0 decodes autoregressively.
                draft: the name of one of several loaded drafts (``"choose(small=fly-tiny, copy=ngram)"``); None or ""
                    is the first.
                priority: one for all prompts. Smaller numbers are served first, and may make others wait and start
                    again.

        Raises:
            ValueError: an unknown option or a value out of range; a prompt that is empty or too long; a token id
                outside the vocabulary; a request that does not fit the caches. Nothing has run then.
            Exception: an error of a policy or a strategy on one of these prompts. Other calls go on.
            Stopped: the engine was closed or has failed. Calls that were waiting raise the failure itself.
        """
        requests = self._requests_of(prompts, params, options)
        if requests:
            with _shown(requests, progress and self._leads):
                self.worker.run(Job(requests))
        return self._answers(requests)

    async def agenerate(self, prompts: Prompts, params: Params = None, **options: Unpack[CallOptions]) -> list[Output]:
        """Do what ``generate`` does, for coroutines: any number of them may wait, on any event loop, without threads of
        their own. Cancelling the task ends its requests. Arguments, result and errors are those of ``generate``,
        without ``progress``."""
        requests = self._requests_of(prompts, params, options)
        if requests:
            await self.worker.arun(Job(requests, loop=asyncio.get_running_loop()))
        return self._answers(requests)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]) -> Stream:
        """Yield the completion's text as it is decided, in strings that know their tokens (``piece.tokens``).

        No piece ends within a character or has a part of a stop string. Joined, the pieces are the ``text`` of
        ``generate``. The request starts with the first fetch. It then runs in one batch with all other calls, whether
        the stream is read or not. ``close`` frees everything that the request holds; dropping the stream does the same.
        Arguments and errors are those of ``generate``. A model without a tokenizer, or n > 1, also raises
        ``ValueError``.
        """
        return Stream(self.worker, Job(self._streamed(prompt, params, options), stepwise=True))

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> AsyncStream:
        """Do what ``stream`` does, for coroutines: ``async for piece in llm.astream(...)``. Call it where an event loop
        runs."""
        requests = self._streamed(prompt, params, options)
        return AsyncStream(self.worker, Job(requests, stepwise=True, loop=asyncio.get_running_loop()))

    @overload
    def chat(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, messages: Conversation, params: Params = None, *, progress: bool = True, **options: Unpack[ChatOptions]
    ) -> Output: ...

    @overload
    def chat(
        self,
        messages: abc.Sequence[Conversation],
        params: Params = None,
        *,
        progress: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[Output]: ...

    def chat(
        self, messages: Any, params: Params = None, *, progress: bool = True, **options: Unpack[ChatOptions]
    ) -> Output | list[Output]:
        """Answer a conversation, or each of a list of them, by the checkpoint's chat template.

        Args:
            messages: dictionaries with a role and a content (a text, or parts of text as OpenAI's clients have them);
                a text is one message of the user. A list of either kind gives a list of outputs, which run at once.
            params, progress, options: as in ``generate``; also ``tools`` and ``chat_template_kwargs``, for the template
                (see ``chat_prompt``).

        If the model thinks before it answers, ``reasoning`` has its thinking, and ``text`` the answer. Errors are those
        of ``generate`` and ``chat_prompt``.
        """
        prompts, call_options = self._conversations(messages, options)
        outputs = self.generate(prompts, params, progress=progress, **call_options)
        return outputs if _several(messages) else outputs[0]

    @overload
    async def achat(  # type: ignore[overload-overlap]
        self, messages: Conversation, params: Params = None, **options: Unpack[ChatOptions]
    ) -> Output: ...

    @overload
    async def achat(
        self, messages: abc.Sequence[Conversation], params: Params = None, **options: Unpack[ChatOptions]
    ) -> list[Output]: ...

    async def achat(
        self, messages: Any, params: Params = None, **options: Unpack[ChatOptions]
    ) -> Output | list[Output]:
        """Do what ``chat`` does, for coroutines, without ``progress``."""
        prompts, call_options = self._conversations(messages, options)
        outputs = await self.agenerate(prompts, params, **call_options)
        return outputs if _several(messages) else outputs[0]

    def chat_prompt(self, messages: Conversation, **variables: Any) -> list[int]:
        """Return the token ids of a conversation (or of one user message) by the checkpoint's chat template, for
        ``generate`` and ``stream``. ``variables`` are ``tools``, ``documents`` and anything else that the template
        reads, such as ``enable_thinking``. Errors are those of ``Tokenizer.apply_chat_template``."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it has no chat template; give token ids")
        talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not talk:
            raise ValueError("a conversation has at least one message")
        return self.tokenizer.apply_chat_template(for_template(talk), **variables)

    def close(self) -> None:
        """End the engine's thread. Open calls raise ``Stopped``, and so do all later ones."""
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests_of(
        self, prompts: Prompts, params: Params, options: CallOptions, streamed: bool = False
    ) -> list[Request]:
        """Make the requests of a call with these options."""
        fields: dict[str, Any] = {**options}
        sampling_params = fields.pop("sampling_params", None)
        if params is not None and sampling_params is not None:
            raise ValueError("params and sampling_params are two names of one argument; give one of them")
        chosen_params = sampling_params if params is None else params
        call_options = {name: fields.pop(name) for name in _OWN if name in fields}
        _refuse_unknown(fields, ("sampling_params", *_OWN))
        if fields:
            chosen_params = self.default_params if chosen_params is None else chosen_params
            if isinstance(chosen_params, (list, tuple)):
                chosen_params = [_changed(each, fields) for each in chosen_params]
            else:
                chosen_params = _changed(chosen_params, fields)
        return self.requests(prompts, chosen_params, **call_options, streamed=streamed)

    def requests(
        self,
        prompts: Prompts,
        params: Params = None,
        policy: PolicyLike | abc.Sequence[PolicyLike] | None = None,
        k: int | abc.Sequence[int] | None = None,
        priority: int = 0,
        draft: str | abc.Sequence[str] | None = None,
        client: str = "",
        *,
        streamed: bool = False,
        vet: Vet | None = None,
    ) -> list[Request]:
        """Make and check the requests that ``generate`` would run, for a ``Job`` of ``worker``. May be called from any
        thread. The n completions of a prompt follow one another. ``streamed`` requests give ``News``, which needs a
        tokenizer. ``client`` names their owner: clients share the engine fairly. ``vet`` may refuse a form of
        structured output (``fly.runner.structured.Grammars``). The other arguments and the errors are those of
        ``generate``."""
        prompt_list = listed(prompts)
        if not isinstance(priority, int):
            raise ValueError(f"priority {priority!r} must be an integer, smaller first")
        if streamed and self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it has no text to stream; use generate with token ids")
        rule = self.policy if policy is None else policy
        rules = [as_policy(each) for each in rule] if isinstance(rule, (list, tuple)) else as_policy(rule)
        row_settings = zip(
            prompt_list,
            _one_each(self.default_params if params is None else params, len(prompt_list), "params"),
            _one_each(rules, len(prompt_list), "policy"),
            _one_each(self.k if k is None else k, len(prompt_list), "k"),
            _one_each("" if draft is None else draft, len(prompt_list), "draft"),
        )
        requests = []
        for number, (prompt, *settings) in enumerate(row_settings):
            row = self._row(prompt, *settings, priority=priority, client=client, vet=vet)
            try:
                self.scheduler.check(row)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from None
            promise = self.engine.runner.executor.promise(row.policy)
            others = [row.sample(derive(row.seed, -sample)) for sample in range(1, row.params.n)]
            if not row.params.max_tokens:  # the first completion scores the prompt for all
                for other in others:
                    other.finish_reason = "length"
                    other.prompt_logprobs = row.prompt_logprobs
            # Under a grammar there is no reasoning, unless the prompt has begun it.
            chat = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(())
            thinking = chat.thinking if row.matcher is None or chat.shown else None
            plain = prompt if isinstance(prompt, str) else None
            for sample in (row, *others):
                text = read_along(sample, self.tokenizer, streamed, thinking, chat.shown)
                requests.append(Request(sample, promise, self.tokenizer, text, streamed, thinking, plain))
        return requests

    def _row(
        self,
        prompt: Prompt,
        params: SamplingParams,
        policy: AcceptancePolicy,
        k: int,
        draft: str,
        *,
        priority: int,
        client: str,
        vet: Vet | None,
    ) -> Row:
        """Make the row of a request, and check everything that depends on the model, the drafts or the tokenizer."""
        if draft and draft not in self.draft_names:
            names = self.draft_names or "none; LLM(..., draft='choose(small=fly-draft, copy=ngram)') loads two"
            raise ValueError(f"draft {draft!r} is not loaded; choices: {names}")
        config = self.engine.runner.executor.config
        tokens = self._tokens_of(prompt)
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params {shorten(params)} must be SamplingParams; or give keywords, as in temperature=0")
        if not tokens:
            need = "some text: this tokenizer adds no begin token" if isinstance(prompt, str) else "at least one"
            raise ValueError(f"the prompt is empty, so there is no token to continue from; give {need}")
        if bad_ids := [token for token in tokens if not 0 <= token < config.vocab_size]:
            raise ValueError(f"prompt has token ids {bad_ids[:5]} outside the vocabulary of {config.vocab_size}")
        # A prompt that is only scored may be one token longer: its last token is not fed to the model.
        scored = not params.max_tokens and params.prompt_logprobs is not None
        if len(tokens) >= config.max_position_embeddings + (not params.max_tokens) + scored:
            raise ValueError(
                f"prompt has {len(tokens)} tokens; the model's context of {config.max_position_embeddings} leaves no "
                "room to answer"
            )
        params.check_ids(config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which this model lacks; use stop_token_ids")
        if params.bad_words and self.tokenizer is None:
            raise ValueError("bad_words need a tokenizer, which this model lacks; use bad_words_ids")
        spellings = [ids for word in params.bad_words if self.tokenizer for ids in self.tokenizer.spellings(word)]
        matcher = None if params.structured is None else self.grammars.matcher(params, vet)
        # Under a grammar a row ends where nothing else may follow, even with ``ignore_eos``.
        eos = frozenset() if params.ignore_eos and matcher is None else self.eos_ids
        row = Row(
            tokens=tokens,
            prompt_length=len(tokens),
            params=params,
            policy=self._bind(policy.keyed),
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            k=_check_k(k),
            stop_ids=eos | set(params.stop_token_ids),
            bad=BadWords((*params.bad_words_ids, *spellings)),
            priority=priority,
            client=client,
            draft=draft,
            matcher=matcher,
        )
        row.stats.prompt_tokens = len(tokens)
        if not params.max_tokens and not row.scores:
            row.finish_reason = "length"
        return row

    def _tokens_of(self, prompt: Any) -> list[int]:
        """Return the token ids of a prompt. Raises ``ValueError`` if it is neither text nor ids."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer; give prompts as lists of token ids")
            return self.tokenizer.encode(prompt)
        # Plain integers are checked first, because checking for every kind of number is slow.
        if not isinstance(prompt, abc.Sequence) or not (
            set(map(type, prompt)) <= {int} or all(isinstance(n, Integral) for n in prompt)
        ):
            raise ValueError(f"prompt {shorten(prompt)} is neither a text nor a list of token ids{for_chat(prompt)}")
        return [int(token) for token in prompt]

    @cached_property
    def grammars(self) -> runner.Grammars:
        """The grammars of structured outputs."""
        if self.tokenizer is None:
            raise ValueError("structured output needs a tokenizer, which this model lacks")
        return runner.Grammars(self.tokenizer, self.engine.runner.executor.config.vocab_size, self.eos_ids)

    def _streamed(self, prompt: Prompt, params: SamplingParams | None, options: CallOptions) -> list[Request]:
        requests = self._requests_of([prompt], params, options, streamed=True)
        if len(requests) > 1:
            n = requests[0].row.params.n
            raise ValueError(f"n {n}: a stream has one completion; open several streams, or use generate")
        return requests

    def _conversations(self, messages: Any, options: ChatOptions) -> tuple[list[list[int]], Any]:
        """Return the prompts of one or several conversations, and the other options, for ``generate``."""
        fields: dict[str, Any] = {**options}
        if name := next((name for name in fields if name in _OF_TEMPLATE), None):
            value = shorten(fields[name])
            raise ValueError(
                f"{name!r} is for the chat template; give it as chat_template_kwargs={{{name!r}: {value}}}"
            )
        _refuse_unknown(fields, ("sampling_params", *_OWN, "tools", "chat_template_kwargs"))
        tools = options.pop("tools", None)
        variables = options.pop("chat_template_kwargs", None) or {}
        conversations = messages if _several(messages) else [messages]
        return [self.chat_prompt(conversation, tools=tools, **variables) for conversation in conversations], options

    def _answers(self, requests: list[Request]) -> list[Output]:
        """Return the outputs. If a chat model gave an empty answer to a plain text, warn once, with the likely
        reason."""
        outputs = outputs_of(requests)
        if not self._hinted and self.tokenizer is not None and self.tokenizer.template_sources:
            firsts = [request for request in requests if request.row.parent is None]
            for request, output in zip(firsts, outputs):
                silent = not output.text.strip() and not self.eos_ids.isdisjoint(output.token_ids[-1:])
                if request.prompt is not None and silent:
                    self._hinted = True
                    empty = f"the answer to {shorten(request.prompt)} is empty"
                    reason = "this model has a chat template, which generate does not apply"
                    warnings.warn(f"{empty}: {reason}; chat does, and chat_prompt for streams", stacklevel=3)
                    break
        return outputs


def _check_loaded(executor: Executor, dtype: str | torch.dtype, kernels: str) -> None:
    """Raise ``ValueError`` if a loaded model has another dtype or other kernels than these."""
    executor_of(executor, kernels)
    if dtype != "auto" and resolve_dtype(dtype, {}) != executor.dtype:
        raise ValueError(f"dtype {str(dtype)!r}: this model was loaded in {executor.dtype}")


def _check_draft(draft: object, ranks: Ranks | None) -> None:
    if not (draft is None or isinstance(draft, (str, Path, DraftStrategy))):
        raise ValueError(f"draft {draft!r} is no DraftStrategy, text or path; several make a CascadeDraft([...])")
    if ranks is not None and ranks.draft_placement == "sharded" and isinstance(draft, DraftStrategy):
        raise ValueError("draft_placement 'sharded' needs a draft given as text, which it loads in parts")


def _part_loader(ranks: Ranks) -> LoadExecutor:
    """Return what loads this rank's part of a model."""
    plan = parallel.LLAMA_WHOLE_SUMS if ranks.whole_sums else parallel.LLAMA
    return partial(parallel.load, plan=plan, ranks=ranks)


def _check_k(k: int) -> int:
    if not isinstance(k, int) or isinstance(k, bool) or k < 0:
        raise ValueError(f"k {k!r} must be an integer of at least 0")
    return k


def _name_of(source: object) -> str:
    """Return a short name of a model or a draft."""
    if isinstance(source, LLM):
        return source._named[0]
    if source is None or isinstance(source, (str, Path)):
        return repr(None if source is None else str(source))
    model = getattr(source, "model", None)  # a draft strategy of one model has this
    name = model.name if isinstance(model, Path) else model
    return f"{type(source).__name__}({name!r})" if isinstance(name, str) else type(source).__name__


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
        return list(value)
    return [value] * count


def listed(prompts: Any) -> list[Any]:
    """Return prompts of any form as a list of texts and lists of token ids. Raises ``ValueError`` for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, abc.Mapping):
        hint = for_chat(prompts) or "; give texts, or the token ids alone (its 'input_ids', 'prompt_token_ids')"
        raise ValueError(f"prompts {shorten(prompts)} is a mapping{hint}")
    if isinstance(prompts, (bytes, bytearray)):
        raise ValueError(f"prompts {shorten(prompts)} are bytes; give text: .decode()")
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind in "UO":
        prompts = prompts.tolist()  # texts, or ragged lists of ids
    if isinstance(prompts, (np.ndarray, torch.Tensor)) and prompts.ndim != 2:
        return [_ids(prompts)]
    if not isinstance(prompts, abc.Iterable):
        raise ValueError(f"prompts {shorten(prompts)} are neither texts nor token ids")
    if isinstance(prompts, abc.Sequence) and prompts and isinstance(prompts[0], Integral):
        return [prompts]
    return [_ids(one) if isinstance(one, (np.ndarray, torch.Tensor)) else one for one in prompts]


def for_chat(prompt: object) -> str:
    """If ``prompt`` is a message or a list of messages, return a hint to the methods that take them; else ""."""
    first = prompt[0] if isinstance(prompt, (list, tuple)) and prompt else prompt
    if isinstance(first, abc.Mapping) and "role" in first:
        return "; chat takes messages, and chat_prompt makes a prompt of them, for stream"
    return ""


def _ids(prompt: np.ndarray[Any, Any] | torch.Tensor) -> list[int]:
    """Return the token ids of an array or a tensor. Raises ``ValueError`` if it has anything else."""
    integers = prompt.dtype.kind in "iu" if isinstance(prompt, np.ndarray) else _is_integer(prompt.dtype)
    if prompt.ndim != 1 or not integers:
        shape = list(prompt.shape)
        raise ValueError(f"prompt of {prompt.dtype} and shape {shape}: token ids are integers, of one dimension")
    tokens: list[int] = prompt.tolist()
    return tokens


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _bind_to(vocabulary: Vocabulary, policy: Keyed[AcceptancePolicy]) -> AcceptancePolicy:
    return policy.value.bind(vocabulary)


def as_policy(value: object) -> AcceptancePolicy:
    """Return a policy as it is, or the one that a text or a mapping describes. The program is trusted: its texts may
    import. Raises ``ValueError`` with what is wrong, and the choices."""
    if isinstance(value, (AcceptancePolicy, str, abc.Mapping)):
        return load_policy(value, trusted=True)
    hint = ""
    if isinstance(value, type) and issubclass(value, AcceptancePolicy):
        hint = f"; give one of that class: {value.__name__}()"
    elif isinstance(value, Condition):
        hint = f"; a condition needs a core: Exact() | {value}"
    raise ValueError(f"policy {shorten(value)} is no AcceptancePolicy, nor a text or mapping of one{hint}")


def _changed(params: object, fields: dict[str, Any]) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params {shorten(params)} must be SamplingParams")
    try:
        return params.changed(fields)
    except ValidationError as error:
        raise ValueError(explain(error)) from None


def _refuse_unknown(fields: abc.Iterable[str], others: abc.Iterable[str]) -> None:
    """Raise ``ValueError`` for an option that is neither a field of ``SamplingParams`` nor among the ``others`` of the
    call."""
    option_names = [*SamplingParams.model_fields, *others]
    for name in fields:
        if name == "stream":
            raise ValueError("'stream' is no option: stream(prompt) streams, and stream(chat_prompt(messages))")
        if name not in option_names:
            raise ValueError(f"{name!r} is no option{suggest(name, option_names)}")


def _several(messages: object) -> bool:
    """Whether these are several conversations, whose items are not messages."""
    return (
        isinstance(messages, abc.Sequence)
        and not isinstance(messages, str)
        and bool(messages)
        and not isinstance(messages[0], abc.Mapping)
    )


@contextmanager
def one_bar() -> Iterator[bool]:
    """Yield whether this caller may show a progress bar: a terminal has room for one at a time."""
    free = _bars.acquire(blocking=False)
    try:
        yield free
    finally:
        if free:
            _bars.release()


@contextmanager
def _shown(requests: list[Request], wanted: bool) -> Iterator[None]:
    """On a terminal, show the requests' progress while this context lasts, after the first ``_LONG`` seconds."""
    if not (wanted and (console := Console(stderr=True)).is_terminal):
        yield
        return

    def line() -> Table:
        done = sum(request.row.finish_reason is not None for request in requests)
        tokens = sum(request.row.generated for request in requests)
        table = Table.grid(padding=(0, 1))
        table.add_row(ProgressBar(len(requests), done, width=30), f"{done}/{len(requests)}", f"{tokens:,} tokens")
        return table

    # Do not redirect what the program prints meanwhile.
    live = Live(get_renderable=line, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    timer = threading.Timer(_LONG, live.start)
    timer.daemon = True
    with one_bar() as free:
        if free:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            if free:
                timer.join()
            live.stop()


def _sign(kind: type[LLM]) -> None:
    """Show the declared options in a class's signature and documentation, as if each stood there."""
    init_signature = signature(kind.__init__)
    parameters = [
        each for each in init_signature.parameters.values() if each.name != "self" and each.kind != each.VAR_KEYWORD
    ]
    lines = ["", "Options:"]
    for name, option in declared().items():
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=option.default, annotation=option.annotation))
        lines += wrap(f"{name} ({option.default!r}): {option.description}", 112, subsequent_indent="    ")
    kind.__signature__ = Signature(parameters)
    kind.__doc__ = f"{kind.__doc__}" + "\n    ".join(lines)


_sign(LLM)
