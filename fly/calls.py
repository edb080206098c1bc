"""The calls that a program makes: generate, chat and stream, from threads and from coroutines, with all forms of
prompts and options. Knows nothing of HTTP, or of how models are loaded."""

from __future__ import annotations

import asyncio
import threading
import warnings
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Self, TypeAlias, Unpack, overload

import numpy as np
import torch
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from fly.engine.job import Job, Request, outputs_of
from fly.engine.stream import AsyncStream, Stream
from fly.engine.worker import Worker
from fly.errors import explain, instead, short
from fly.models.tokenizer import Tokenizer
from fly.output import Output
from fly.params import Sampling
from fly.policies import AcceptancePolicy, Condition, load_policy
from fly.types import SamplingParams

__all__ = ["Calls", "ChatOptions", "Options", "PolicyLike", "Prompt", "as_policy", "for_chat", "listed", "one_bar"]

Prompt: TypeAlias = str | abc.Sequence[int] | np.ndarray[Any, Any] | torch.Tensor
Prompts: TypeAlias = Prompt | abc.Iterable[Prompt]
Conversation: TypeAlias = str | abc.Sequence[abc.Mapping[str, Any]]
PolicyLike: TypeAlias = AcceptancePolicy | str | abc.Mapping[str, Any]
Params: TypeAlias = SamplingParams | abc.Sequence[SamplingParams] | None

_LONG = 1.0  # seconds after which a call shows its progress
_OWN = ("policy", "k", "priority", "draft")  # options of a call that ``SamplingParams`` lacks
_OF_TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template", "documents", "enable_thinking")
_bars = threading.Lock()


class Options(Sampling, total=False):
    """The keywords of a call: the fields of ``SamplingParams``, and these."""

    sampling_params: Params  # another name for ``params``
    policy: PolicyLike | abc.Sequence[PolicyLike] | None
    k: int | abc.Sequence[int] | None
    priority: int
    draft: str | abc.Sequence[str] | None


class ChatOptions(Options, total=False):
    """Further keywords of a chat, for its template (see ``Calls.chat_prompt``)."""

    tools: abc.Sequence[abc.Mapping[str, Any]] | None
    chat_template_kwargs: abc.Mapping[str, Any] | None


class Calls(ABC):
    """Completes prompts and answers conversations. ``LLM`` makes the ``requests``, and a ``worker`` runs them."""

    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    default_params: SamplingParams
    worker: Worker
    _leads = True  # whether this rank shows progress
    _hinted = False  # whether the hint to use ``chat`` was given

    @abstractmethod
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
        """Make and check the requests that ``generate`` would run."""

    def generate(
        self, prompts: Prompts, params: Params = None, *, progress: bool = True, **options: Unpack[Options]
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
        requests = self._asked(given := listed(prompts), params, options)
        if requests:
            with _shown(requests, progress and self._leads):
                self.worker.run(Job(requests))
        return self._answers(given, requests)

    async def agenerate(self, prompts: Prompts, params: Params = None, **options: Unpack[Options]) -> list[Output]:
        """Do what ``generate`` does, for coroutines: any number of them may wait, on any event loop, without threads of
        their own. Cancelling the task ends its requests. Arguments, result and errors are those of ``generate``,
        without ``progress``."""
        requests = self._asked(given := listed(prompts), params, options)
        if requests:
            await self.worker.arun(Job(requests, loop=asyncio.get_running_loop()))
        return self._answers(given, requests)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]) -> Stream:
        """Yield the completion's text as it is decided, in strings that know their tokens (``piece.tokens``).

        No piece ends within a character or has a part of a stop string. Joined, the pieces are the ``text`` of
        ``generate``. The request starts with the first fetch. It then runs in one batch with all other calls, whether
        the stream is read or not. ``close`` frees everything that the request holds; dropping the stream does the same.
        Arguments and errors are those of ``generate``. A model without a tokenizer, or n > 1, also raises
        ``ValueError``.
        """
        return Stream(self.worker, Job(self._streamed(prompt, params, options), stepwise=True))

    def astream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]) -> AsyncStream:
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
        prompts, rest = self._conversations(messages, options)
        outputs = self.generate(prompts, params, progress=progress, **rest)
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
        prompts, rest = self._conversations(messages, options)
        outputs = await self.agenerate(prompts, params, **rest)
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
        return self.tokenizer.apply_chat_template(talk, **variables)

    def close(self) -> None:
        """End the engine's thread. Open calls raise ``Stopped``, and so do all later ones."""
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _asked(self, prompts: list[Any], params: Params, options: Options, streamed: bool = False) -> list[Request]:
        """Make the requests of a call with these options."""
        fields: dict[str, Any] = {**options}
        named = fields.pop("sampling_params", None)
        if params is not None and named is not None:
            raise ValueError("params and sampling_params are two names of one argument; give one of them")
        asked = named if params is None else params
        own = {name: fields.pop(name) for name in _OWN if name in fields}
        _refuse_unknown(fields, ("sampling_params", *_OWN))
        if fields:
            asked = self.default_params if asked is None else asked
            several = isinstance(asked, (list, tuple))
            changed = [_changed(one, fields) for one in (asked if several else [asked])]
            asked = changed if several else changed[0]
        return self.requests(prompts, asked, **own, streamed=streamed)

    def _streamed(self, prompt: Prompt, params: SamplingParams | None, options: Options) -> list[Request]:
        requests = self._asked([prompt], params, options, streamed=True)
        if len(requests) > 1:
            n = requests[0].row.params.n
            raise ValueError(f"n {n}: a stream has one completion; open several streams, or use generate")
        return requests

    def _conversations(self, messages: Any, options: ChatOptions) -> tuple[list[list[int]], Any]:
        """Return the prompts of one or several conversations, and the other options, for ``generate``."""
        fields: dict[str, Any] = {**options}
        if name := next((name for name in fields if name in _OF_TEMPLATE), None):
            value = short(fields[name])
            raise ValueError(
                f"{name!r} is for the chat template; give it as chat_template_kwargs={{{name!r}: {value}}}"
            )
        _refuse_unknown(fields, ("sampling_params", *_OWN, "tools", "chat_template_kwargs"))
        tools, variables = options.pop("tools", None), options.pop("chat_template_kwargs", None) or {}
        each = messages if _several(messages) else [messages]
        return [self.chat_prompt(one, tools=tools, **variables) for one in each], options

    def _answers(self, prompts: list[Any], requests: list[Request]) -> list[Output]:
        """Return the outputs. If a chat model gave an empty answer to a plain text, warn once, with the likely
        reason."""
        outputs = outputs_of(requests)
        if not self._hinted and self.tokenizer is not None and self.tokenizer.templates:
            for prompt, output in zip(prompts, outputs):
                silent = not output.text.strip() and not self.eos_ids.isdisjoint(output.token_ids[-1:])
                if isinstance(prompt, str) and silent:
                    self._hinted = True
                    message = f"the answer to {short(prompt)} is empty: this model has a chat template, which generate"
                    warnings.warn(f"{message} does not apply; chat does, and chat_prompt for streams", stacklevel=3)
                    break
        return outputs


def listed(prompts: Any) -> list[Any]:
    """Return prompts of any form as a list of texts and lists of token ids. Raises ``ValueError`` for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, abc.Mapping):
        hint = for_chat(prompts) or "; give texts, or the token ids alone (its 'input_ids', 'prompt_token_ids')"
        raise ValueError(f"prompts {short(prompts)} is a mapping{hint}")
    if isinstance(prompts, (bytes, bytearray)):
        raise ValueError(f"prompts {short(prompts)} are bytes; give text: .decode()")
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind in "UO":
        prompts = prompts.tolist()  # texts, or ragged lists of ids
    if isinstance(prompts, (np.ndarray, torch.Tensor)) and prompts.ndim != 2:
        return [_ids(prompts)]
    if not isinstance(prompts, abc.Iterable):
        raise ValueError(f"prompts {short(prompts)} are neither texts nor token ids")
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
    found: list[int] = prompt.tolist()
    return found


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def as_policy(value: object) -> AcceptancePolicy:
    """Return a policy as it is, or the one that a text or a mapping describes. The program is trusted: its texts may
    import. Raises ``ValueError`` with what is wrong, and the choices."""
    if isinstance(value, (AcceptancePolicy, str, abc.Mapping)):
        return load_policy(value, trusted=True)
    made = ""
    if isinstance(value, type) and issubclass(value, AcceptancePolicy):
        made = f"; give one of that class: {value.__name__}()"
    elif isinstance(value, Condition):
        made = f"; a condition needs a core: Exact() | {value}"
    raise ValueError(f"policy {short(value)} is no AcceptancePolicy, nor a text or mapping of one{made}")


def _changed(params: object, fields: dict[str, Any]) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params {short(params)} must be SamplingParams")
    try:
        return params.changed(fields)
    except ValidationError as error:
        raise ValueError(explain(error)) from None


def _refuse_unknown(fields: abc.Iterable[str], own: abc.Iterable[str]) -> None:
    """Raise ``ValueError`` for an option that is neither a field of ``SamplingParams`` nor among the call's ``own``."""
    known = [*SamplingParams.model_fields, *own]
    if unknown := next((name for name in fields if name not in known), None):
        if unknown == "stream":
            raise ValueError("'stream' is no option: stream(prompt) streams, and stream(chat_prompt(messages))")
        raise ValueError(f"{unknown!r} is no option{instead(unknown, known)}")


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
        made = Table.grid(padding=(0, 1))
        made.add_row(ProgressBar(len(requests), done, width=30), f"{done}/{len(requests)}", f"{tokens:,} tokens")
        return made

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
