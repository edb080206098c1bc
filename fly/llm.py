"""The Python interface: load a target and a draft, choose a backend, wire the engine. Knows nothing of HTTP.

If several ranks share a model, either all make the same calls in the same order, or the first one leads."""

from __future__ import annotations

import random
import sys
from collections import abc
from functools import cached_property, lru_cache, partial
from inspect import signature
from numbers import Integral
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import torch

from fly.backends.choice import LoadExecutor, executor_of, load_executor
from fly.backends.choice import load as load_model
from fly.backends.cpu.library import check_target
from fly.bundled import open_model
from fly.cache import block_size_for
from fly.calls import Calls, Params, PolicyLike, Prompt, Prompts, as_policy, for_chat, listed
from fly.config import Config
from fly.drafts import DraftStrategy, parse_draft
from fly.drafts.translate import TranslatingSetup
from fly.engine import Engine
from fly.engine.caches import find_room, make_caches
from fly.engine.job import Request, read_along
from fly.engine.scheduler import Scheduler, max_scored
from fly.engine.stream import AsyncStream, Stream
from fly.engine.warming import warm_up
from fly.engine.worker import Worker
from fly.errors import instead, short
from fly.models.chat import ChatPrompt
from fly.models.checkpoint import Checkpoint
from fly.models.generation import read_sampling_defaults
from fly.models.loading import resolve_dtype
from fly.models.tokenizer import Tokenizer, read_eos_ids
from fly.ops import derive
from fly.output import Output, Piece
from fly.policies import AcceptancePolicy, Exact
from fly.runner.executor import Executor, Workload
from fly.runner.request import BadWords, Row
from fly.runner.runner import Runner
from fly.runner.structured import Grammars
from fly.types import SamplingParams
from fly.vocabulary import Vocabulary

if TYPE_CHECKING:
    from fly.parallel import Ranks
    from fly.parallel.draft import Placement

__all__ = ["LLM", "AsyncStream", "Output", "Piece", "Request", "Stream"]


class LLM(Calls):
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
        dtype: ``"auto"`` (as the checkpoint states), bfloat16, float16 or float32. A draft that is loaded by its name
            has the target's dtype, device and kernels, or four bits if it is large and the target's kernels are
            compiled (``fly.backends.load``). This call (with a loaded ``model``) or the draft's own text may say
            otherwise, as ``"model(fly-draft, kernels=int8)"`` does. With a loaded ``model`` and no draft to load by
            its name, another dtype than the model's, or other kernels, are errors.
        device: ``"auto"`` or any torch device.
        deterministic: the target computes the same bits for a token, whatever else is fed in the same forward: other
            requests, drafts, chunks of a prompt. At temperature 0 a lossless policy then gives exactly the text of
            autoregressive decoding, in bfloat16 too. This is free for kernels that add up in a fixed order (the
            compiled ones in one process). Other kernels then feed one token per forward
            (``fly.runner.executor.TokenByToken``).
        cache_tokens: how many tokens each KV cache holds over all requests; None is eight full contexts, or as many
            tokens as fit in ``cache_bytes``, if these are fewer. Memory is taken when it is first used. Of the sizes of
            caches (this, the next two and ``memory_share``) one may be given.
        cache_bytes: memory for the keys and values of target and draft together; None is 4 GiB, or half of the device's
            free memory after loading, if that is less. A draft model with a cache size of its own is not counted. If
            the caches hold less than a full context, the log says so, with the reason.
        cache_share: the share (up to 1) of the device's free memory that the caches take, in place of a size.
        memory_share: the share of a CUDA device's memory that this process takes in all, if none of the three above is
            given; None is 0.9. Weights take their part, rounds and prompts of ``max_rows`` rows take theirs, and the
            caches get the rest (``fly.runner.memory.divide_device``). If rounds would need more than a quarter of what
            the weights leave, ``max_rows`` is lowered, with a warning.
        max_context: the most tokens of a text (prompt and completion), at most the model's own context. A smaller one
            makes the model's tables and the default caches smaller. It also holds for a draft given as text.
        block_size: tokens in a page of the target's cache; None chooses by the device.
        max_rows, step_tokens: the most requests, and about how many tokens, in one step (see ``Scheduler``).
        prefix_reuse: whether requests that begin with the same tokens share their cache pages.
        kernels: what computes a model on the CPU: ``"auto"`` (compiled code if there is any for this processor and
            dtype), ``"torch"``, or one of ``fly.backends.cpu.available()``. ``"int8"`` rounds the weights to 8 bits,
            ``"w8a8"`` the activations too, ``"w4a8"`` has weights of 4 bits in all layers, and ``"w4"``, for drafts, in
            the head too. ``"stored"`` computes with the blocks of a GGUF file as they are, and ``"auto"`` does so for
            such a file (``fly.backends.cpu.chosen``). A loaded model keeps its kernels (``fly.backends.executor_of``
            gives it others). On other devices torchao rounds the weights for ``"int8"``, layer by layer as they are
            loaded (``fly.backends.int8``). On CUDA ``"int4"`` rounds the layers' weights to 4 bits
            (``fly.backends.cuda.int4``).
        ranks: the processes that share the models (``fly.parallel.launch``); None for a single process. Either all
            ranks make the same calls in the same order and get the same answers, or the first rank calls ``lead`` and
            the others call ``follow``.
        draft_placement: where a draft given as text runs among ranks (see ``fly.parallel.place_draft``).
        whole_sums: split no sum among ranks, so that the number of ranks does not change rounding
            (``fly.parallel.LLAMA_WHOLE_SUMS``). Ranks then exchange more data.

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

    def __init__(
        self,
        model: object,
        draft: str | Path | DraftStrategy | None = None,
        policy: PolicyLike | None = None,
        k: int = 15,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        deterministic: bool = False,
        *,
        cache_tokens: int | None = None,
        cache_bytes: int | None = None,
        cache_share: float | None = None,
        memory_share: float | None = None,
        max_context: int | None = None,
        block_size: int | None = None,
        max_rows: int = 256,
        step_tokens: int = 2048,
        prefix_reuse: bool = True,
        kernels: str = "auto",
        ranks: Ranks | None = None,
        draft_placement: Placement = "auto",
        whole_sums: bool = False,
        **unknown: Never,
    ) -> None:
        self.engine: Engine
        _refuse_unknown(unknown)
        self.k, self.policy = _check_k(k), Exact() if policy is None else as_policy(policy)
        _check_draft(draft, draft_placement)
        sizes = {"cache_tokens": cache_tokens, "cache_bytes": cache_bytes, "cache_share": cache_share}
        sizes["memory_share"] = memory_share
        if len(given := [f"{name} {value}" for name, value in sizes.items() if value is not None]) > 1:
            raise ValueError(f"{' and '.join(given)} both give a size; give one of them")
        self._named = _name_of(model), _name_of(draft)

        # The target. Each rank loads its own part.
        by = load_executor if ranks is None else _part_loader(ranks, whole_sums)
        executor = self._load_target(model, dtype, device, kernels, by, max_context)
        loads = isinstance(model, (str, Path, Checkpoint)), isinstance(draft, (str, Path))
        if not any(loads):  # these options would do nothing
            _check_loaded(executor, dtype, kernels)
        if deterministic:
            executor = executor.deterministic()
        self.vocabulary = self._vocabulary_of(executor.config.vocab_size, executor.device)
        # Equal policies become one object, since rows with the same policy object are decided together.
        self._bind_once = lru_cache(256)(methodcaller("bind", self.vocabulary))
        control = self.eos_ids | (self.tokenizer.control_ids if self.tokenizer else frozenset())
        target = Runner(executor, None, control, share=prefix_reuse)
        target.tokenizer = self.tokenizer

        # The draft. A strategy loads its models when it is attached.
        setup = TranslatingSetup(target, self.vocabulary, partial(load_model, context=max_context))

        def make_draft() -> DraftStrategy | None:
            if not isinstance(draft, (str, Path)):
                return draft
            # The kernels of this call are the target's, unless that is loaded.
            own = "auto" if loads[0] else kernels
            return parse_draft(str(draft), trusted=True, dtype=dtype, device=device, kernels=own)

        if ranks is not None:
            from fly.parallel import place_draft

            strategy = place_draft(make_draft, setup, ranks, draft_placement, by)
        elif (strategy := make_draft()) is not None:
            strategy = setup.attach(strategy)

        # The caches, whose size depends on all models.
        block_size = block_size_for(executor.device) if block_size is None else block_size
        scored = min(step_tokens, max_scored(max_rows, executor.config.vocab_size))
        work = Workload(
            max_rows, 0 if strategy is None else self.k, self._bind(self.policy), step_tokens, scored, block_size,
            next((each.executor for each in setup.drafters), None),
        )  # fmt: skip
        room, max_rows = find_room(executor, work, memory_share, ranks)
        make_caches(target, setup, cache_tokens, cache_bytes, cache_share, block_size, room, ranks)

        # The engine. An error on one rank alone is no request's fault: the other ranks would wait for this one.
        self.engine = Engine(target, strategy, setup)
        failed = {} if ranks is None else {"failed": ranks.agree_on}
        self.scheduler = Scheduler(self.engine, max_rows, step_tokens, **failed)
        self.worker = Worker(self.scheduler, ranks)
        self._leads = ranks is None or ranks.leads
        self._random: random.Random = random.SystemRandom() if ranks is None else ranks.random

    def _load_target(
        self,
        model: object,
        dtype: str | torch.dtype,
        device: str | torch.device,
        kernels: str,
        by: LoadExecutor,
        max_context: int | None,
    ) -> Executor:
        """Load the target, with its tokenizer, end tokens and sampling defaults; or share those of another ``LLM``."""
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
            most = sys.maxsize if checkpoint is None else checkpoint.config.max_position_embeddings
            if max_context is not None and max_context > most:
                raise ValueError(f"max_context {max_context} is more than the {most} tokens that {model} has")
            loaded = load_model(checkpoint or model, dtype, device, kernels, by, max_context)
            executor, self.tokenizer = loaded.executor, loaded.tokenizer
            if loaded.checkpoint is not None:
                self.eos_ids = read_eos_ids(loaded.checkpoint, executor.config.vocab_size)
                self.default_params = read_sampling_defaults(loaded.checkpoint, executor.config.vocab_size)
        if max_context is not None and max_context != executor.config.max_position_embeddings:
            has = executor.config.max_position_embeddings
            raise ValueError(f"max_context {max_context}: this model is loaded already, with a context of {has}")
        check_target(executor.kernels)  # that of a loaded model, or of FLY_KERNELS
        if self.tokenizer is not None:
            self.tokenizer.check_fits(executor.config.vocab_size)
        return executor

    @classmethod
    def from_config(cls, config: Config | str | Path, ranks: Ranks | None = None) -> LLM:
        """Build an ``LLM`` from a configuration, or from its YAML or JSON file (see ``fly.config.Config``)."""
        config = config if isinstance(config, Config) else Config.read(config)
        own = (name for name in Config.model_fields if name not in Config.of_ranks)
        return cls(**{name: getattr(config, name) for name in own}, ranks=ranks)

    @property
    def draft(self) -> DraftStrategy | None:
        """The draft strategy, or None."""
        return self.engine.strategy

    @property
    def draft_names(self) -> list[str]:
        """The names that a request may choose its draft from (``ChooseDraft``)."""
        return getattr(self.draft, "names", [])

    def __repr__(self) -> str:
        own, *drafts = (f"{kernels} in {dtype}" for kernels, dtype in self.computed)
        runs = f", runs={own!r}" + (f", draft_runs={' + '.join(drafts)!r}" if drafts else "")
        return "LLM({}, draft={}, policy={!r}, k={}{})".format(*self._named, str(self.policy), self.k, runs)

    @property
    def computed(self) -> list[tuple[str, str]]:
        """Kernels and dtype of the target, and then of each model that drafts."""
        executors = [self.engine.runner.executor, *(each.executor for each in self.engine.setup.drafters)]
        return [(each.kernels, str(each.dtype).removeprefix("torch.")) for each in executors if each is not None]

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
        found = self.engine.runner.executor.describe()
        if found:
            cache = self.engine.runner.cache
            tokens, size = cache.allocator.num_blocks * cache.allocator.block_size, 2 * cache.keys.nbytes
            found.append(f"a cache of {tokens:,} tokens ({size / 1e9:.1f} GB), at most {self.scheduler.max_rows} rows")
        return " · ".join(found)

    def lead(self) -> None:
        """Make this, the first of several ranks, the only one that is called from now on, from any thread. The others
        ``follow`` until ``close``."""
        self._random = random.SystemRandom()  # the common random numbers must be drawn by all ranks or none
        self.worker.lead()

    def follow(self) -> None:
        """Take part, on another rank than the first, in the first one's calls until it is closed. Raises the engine's
        failure."""
        self.worker.follow(lambda values: self.requests(*values))

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
    ) -> list[Request]:
        """Make and check the requests that ``generate`` would run, for a ``Job`` of ``worker``. May be called from any
        thread. The n completions of a prompt follow one another. ``streamed`` requests give ``News``, which needs a
        tokenizer. ``client`` names their owner: clients share the engine fairly. The other arguments and the errors are
        those of ``generate``."""
        given = listed(prompts)
        if not isinstance(priority, int):
            raise ValueError(f"priority {priority!r} must be an integer, smaller first")
        if streamed and self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it has no text to stream; use generate with token ids")
        rule = self.policy if policy is None else policy
        each = zip(
            _one_each("" if draft is None else draft, len(given), "draft"),
            given,
            _one_each(self.default_params if params is None else params, len(given), "params"),
            _one_each(rule if isinstance(rule, (list, tuple)) else as_policy(rule), len(given), "policy"),
            _one_each(self.k if k is None else k, len(given), "k"),
        )
        requests = []
        for number, (name, *asked) in enumerate(each):
            if name and name not in self.draft_names:
                have = self.draft_names or "none; LLM(..., draft='choose(small=fly-draft, copy=ngram)') loads two"
                raise ValueError(f"draft {name!r} is not loaded; choices: {have}")
            row = self._row(*asked)
            row.priority = priority
            row.draft = name
            row.client = client
            try:
                self.scheduler.check(row)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from None
            promise = self.engine.runner.executor.promise(row.policy)
            others = [row.sample(derive(row.seed, -sample)) for sample in range(1, row.params.n)]
            if not row.params.max_tokens:  # the first completion scores the prompt for all
                for other in others:
                    other.finish_reason, other.prompt_logprobs = "length", row.prompt_logprobs
            # Under a grammar there is no reasoning, unless the prompt has begun it.
            chat = asked[0] if isinstance(asked[0], ChatPrompt) else ChatPrompt(())
            thinking = chat.thinking if row.matcher is None or chat.shown else None
            for sample in (row, *others):
                text = read_along(sample, self.tokenizer, streamed, thinking, chat.shown)
                requests.append(Request(sample, promise, self.tokenizer, text, streamed, thinking))
        return requests

    def _row(self, prompt: Prompt, params: SamplingParams, policy: PolicyLike, k: int) -> Row:
        """Make the row of a request, and check everything that depends on the model or the tokenizer."""
        tokens, config = self._tokens_of(prompt), self.engine.runner.executor.config
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params {short(params)} must be SamplingParams; or give keywords, as in temperature=0")
        if not tokens:
            need = "some text: this tokenizer adds no begin token" if isinstance(prompt, str) else "at least one"
            raise ValueError(f"the prompt is empty, so there is no token to continue from; give {need}")
        if bad := [token for token in tokens if not 0 <= token < config.vocab_size]:
            raise ValueError(f"prompt has token ids {bad[:5]} outside the vocabulary of {config.vocab_size}")
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
        spelled = [ids for word in params.bad_words if self.tokenizer for ids in self.tokenizer.spellings(word)]
        matcher = None if params.structured is None else self.grammars.matcher(params)
        # Under a grammar a row ends where nothing else may follow, even with ``ignore_eos``.
        eos = frozenset() if params.ignore_eos and matcher is None else self.eos_ids
        row = Row(
            tokens=tokens,
            prompt_length=len(tokens),
            params=params,
            policy=self._bind(as_policy(policy)),
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            k=_check_k(k),
            stop_ids=eos | set(params.stop_token_ids),
            bad=BadWords((*params.bad_words_ids, *spelled)),
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
            raise ValueError(f"prompt {short(prompt)} is neither a text nor a list of token ids{for_chat(prompt)}")
        return [int(token) for token in prompt]

    def _bind(self, policy: AcceptancePolicy) -> AcceptancePolicy:
        """Bind a policy to the vocabulary, once if it can be hashed."""
        try:
            return self._bind_once(policy)
        except TypeError:
            return policy.bind(self.vocabulary)

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars of structured outputs."""
        if self.tokenizer is None:
            raise ValueError("structured output needs a tokenizer, which this model lacks")
        return Grammars(self.tokenizer, self.engine.runner.executor.config.vocab_size, self.eos_ids)


def _refuse_unknown(options: abc.Collection[str]) -> None:
    if options:
        known = [name for name in signature(LLM).parameters if name != "unknown"]
        name = next(iter(options))
        raise TypeError(f"{name!r} is no option of LLM{instead(name, known)}")


def _check_loaded(executor: Executor, dtype: str | torch.dtype, kernels: str) -> None:
    """Raise ``ValueError`` if a loaded model has another dtype or other kernels than these."""
    executor_of(executor, kernels)
    if dtype != "auto" and resolve_dtype(dtype, {}) != executor.dtype:
        raise ValueError(f"dtype {str(dtype)!r}: this model was loaded in {executor.dtype}")


def _check_draft(draft: object, placement: str) -> None:
    if not (draft is None or isinstance(draft, (str, Path, DraftStrategy))):
        raise ValueError(f"draft {draft!r} is no DraftStrategy, text or path; several make a CascadeDraft([...])")
    if placement == "sharded" and isinstance(draft, DraftStrategy):
        raise ValueError("draft_placement 'sharded' needs a draft given as text, which it loads in parts")


def _part_loader(ranks: Ranks, whole_sums: bool) -> LoadExecutor:
    """Return what loads this rank's part of a model."""
    from fly.parallel import LLAMA, LLAMA_WHOLE_SUMS, load

    return partial(load, plan=LLAMA_WHOLE_SUMS if whole_sums else LLAMA, ranks=ranks)


def _check_k(k: int) -> int:
    if not isinstance(k, int) or isinstance(k, bool) or k < 0:
        raise ValueError(f"k {k!r} must be an integer of at least 0")
    return k


def _name_of(given: object) -> str:
    """Return a short name of a model or a draft."""
    if isinstance(given, LLM):
        return given._named[0]
    if given is None or isinstance(given, (str, Path)):
        return repr(None if given is None else str(given))
    model = getattr(given, "model", None)  # a draft strategy of one model has this
    name = model.name if isinstance(model, Path) else model
    return f"{type(given).__name__}({name!r})" if isinstance(name, str) else type(given).__name__


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
        return list(value)
    return [value] * count
