"""``fly chat``: a conversation in a terminal, with commands between the turns."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fly.cli.completion import show, show_colours
from fly.cli.options import SETUP, option, takes
from fly.cli.run import alone, compute_in_words, options_of, sampling_of, setup_of
from fly.cli.show import console, errors, fail
from fly.cli.terminal import read_bytes
from fly.config import Config
from fly.errors import describe_error, did_you_mean, shorten
from fly.llm import LLM, Piece, Stream
from fly.models.bundled import BUNDLED
from fly.policies import parse_policy
from fly.types import SamplingParams

MOST = 1024  # default tokens of an answer


_SAMPLING = {
    "max_tokens": option(int, f"The most tokens of an answer. Default: the checkpoint's, or {MOST}.", min=1),
    "temperature": option(float, "0 is greedy. Default: the checkpoint's."),
    "seed": option(int, "Same seed, same answers."),
}


@alone
@takes(_SAMPLING, SETUP)
def chat(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="The target: what --model of other commands takes. Default: fly-target.")
    ] = None,
    named: Annotated[str | None, typer.Option("--model", help="The same as the argument.")] = None,
    system: Annotated[str | None, typer.Option(help="The system prompt. Default: the chat template's own.")] = None,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="Further variables of the chat template, as JSON.", metavar='{"NAME": VALUE}')
    ] = None,
    config: Path | None = None,
    **_: Any,
) -> None:
    """Talk with a model; colours show why each token was kept.

    /help lists the commands. Ctrl+C stops an answer, and Ctrl+D ends the conversation.
    """
    if named is not None:
        if model not in (None, named):
            raise ValueError(f"two models, {model!r} and --model {named!r}; give one")
        context.params["model"] = named
        context.set_parameter_source("model", context.get_parameter_source("named"))  # type: ignore[arg-type]
    if config is None:  # a configuration file names its own model
        context.params["model"] = context.params["model"] or BUNDLED[0]
    sampling_options = options_of(context, _SAMPLING)
    sampling_of(sampling_options, SamplingParams())  # report errors before anything is loaded
    variables = _variables(chat_template_kwargs)
    setup = setup_of(context, config)
    loading = console.status(f"loading {escape(setup.model)}", spinner="line")
    with loading if console.is_terminal else contextlib.nullcontext():
        llm = LLM.from_config(setup)
    if llm.tokenizer is None or not llm.tokenizer.templates:
        raise ValueError(f"{setup.model} has no chat template; 'fly generate' completes plain text")
    default = llm.default_params
    if "max_tokens" not in default.model_fields_set:
        default = default.model_copy(update={"max_tokens": MOST})
    conversation = Conversation(llm, setup, sampling_of(sampling_options, default), system, variables)
    try:
        conversation.run()
    finally:
        conversation.llm.close()


def _variables(text: str | None) -> dict[str, Any]:
    try:
        variables = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ValueError(f"--chat-template-kwargs {text!r} is no JSON: {error}") from None
    if not isinstance(variables, dict):
        raise ValueError(f"--chat-template-kwargs {text!r} must be a JSON object")
    return variables


class Conversation:
    """A conversation and the model that answers. Only ``/drop`` and ``/reset`` change the turns so far.

    Args:
        llm: the model; ``/draft`` replaces it.
        setup: the configuration that ``llm`` was made from.
        params: sampling parameters of the answers.
        system: the system prompt; None for the template's own.
        variables: further variables of the chat template.
    """

    def __init__(
        self, llm: LLM, setup: Config, params: SamplingParams, system: str | None, variables: dict[str, Any]
    ) -> None:
        self.llm = llm
        self.setup = setup
        self.params = params
        self.system = system
        self.variables = variables
        self.policy, self.k = llm.policy, llm.k
        self.turns: list[dict[str, str]] = []  # messages of user and assistant, alternately
        self._saved: set[Path] = set()
        self.commands: dict[str, Callable[[str], None]] = {
            "/policy": self._policy, "/k": self._k, "/draft": self._draft, "/temperature": self._temperature,
            "/system": self._system, "/drop": self._drop, "/reset": self._reset, "/save": self._save,
            "/help": self._help, "/quit": self._quit,
        }  # fmt: skip

    def run(self) -> None:
        """Read lines and answer them, until the input ends."""
        self._tell(f"{self.setup.model} · {self._settings()} · {compute_in_words(self.llm)} · /help lists commands")
        while True:
            try:
                line = _read("» ").strip()
                while line.endswith("\\"):
                    line = line[:-1].rstrip() + "\n" + _read("… ").rstrip()
            except EOFError:
                if sys.stdin.isatty():
                    console.print()
                break
            except KeyboardInterrupt:
                console.print()
                self._tell("Ctrl+D or /quit ends")
                continue
            try:
                line = read_bytes(line, "the line")
                if line.startswith("/") and not line.startswith("//"):
                    self.obey(line)
                elif line:
                    self._answer(line.removeprefix("/"))
            except EOFError:
                break
            except KeyboardInterrupt:
                self._tell("stopped")
            except Exception as error:  # a wrong command, or a faulty plug-in: the conversation goes on
                kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
                fail(kind + describe_error(error))

    def messages(self) -> list[dict[str, str]]:
        """Return all messages so far, the system prompt included."""
        return _messages(self.system, self.turns)

    def _answer(self, text: str) -> None:
        """Answer a message. A message without any answer is not kept."""
        talk = [*self.messages(), {"role": "user", "content": text}]
        prompt, context = self.llm.chat_prompt(talk, **self.variables), self.llm.engine.context
        if len(prompt) >= context:
            raise ValueError(
                f"the conversation takes {len(prompt)} tokens, and the context holds {context}: nothing was sent. "
                f"/drop N forgets its oldest N turns (of {len(self.turns) // 2}), /reset all of it"
            )
        # Show the answer while it is generated; Ctrl+C stops it.
        stream = self.llm.stream(prompt, self.params, policy=self.policy, k=self.k)
        answer, stopped = _Answer(stream), False
        try:
            show(answer)
        except KeyboardInterrupt:
            stopped = True
        finally:
            stream.close()
        console.print()
        # Keep the answer, or the part that came before it was stopped.
        is_kept = not stopped or bool(answer.text or answer.reasoning)
        if is_kept:
            message = {"role": "assistant", "content": answer.text}
            if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
            self.turns += [{"role": "user", "content": text}, message]
        # Say how the answer ended.
        ending = []
        if stopped:
            ending.append("stopped" if is_kept else "stopped before the answer began, so the question is not kept")
        elif stream.finish_reason == "length":
            is_full = len(prompt) + stream.stats.generated >= context
            limit = f"--max-tokens {self.params.max_tokens}"
            ending.append(
                f"the context of {context} tokens is full: /drop N or /reset" if is_full else f"cut by {limit}"
            )
        if is_kept and answer.reasoning and not answer.text:
            ending.append("it was still thinking")
        self._tell(" · ".join([*answer.figures(), *ending]))

    def obey(self, line: str) -> None:
        """Run a command, a line that begins with a slash. An error (``ValueError``, ``OSError``) changes nothing."""
        name, *rest = line.split(maxsplit=1)
        if (run := self.commands.get(name)) is None:
            hint = did_you_mean(name, self.commands)
            raise ValueError(
                f"{name} is no command{hint}; choices: {' '.join(self.commands)} (// begins a text with /)"
            )
        run("".join(rest))

    def _policy(self, text: str) -> None:
        """TEXT: the acceptance policy, such as 'exact' or 'fly(theta=0.3) & after(2)'; without TEXT, show it."""
        if text:
            policy = parse_policy(text, trusted=True)
            policy.bind(self.llm.vocabulary)
            self.policy = policy
        promise = self.llm.engine.runner.executor.promise(self.policy)
        self._tell(f"policy {self.policy} ({promise.guarantee.value})")

    def _k(self, text: str) -> None:
        """N: the most tokens drafted in a round; 0 drafts none."""
        if text:
            self.k = _integer("/k", text, 0, self.llm.engine.context - 1, "what the context has room for")
        self._tell(f"k {self.k}" + (" (there is no draft: /draft)" if self.llm.draft is None and self.k else ""))

    def _draft(self, text: str) -> None:
        """TEXT: the draft, such as 'none', 'ngram', 'fly-draft' or 'model(fly-draft)'. Starts with an empty cache."""
        if text:
            setup = self.setup.model_copy(update={"draft": text})
            # The loaded target keeps its kernels, and a draft takes its kernels by them.
            options: Any = {**setup.options, "kernels": "auto"}
            llm = LLM(self.llm, setup.draft, setup.policy, setup.k, **options)
            self.llm.close()
            self.llm, self.setup = llm, setup
        self._tell(f"draft {self.setup.draft}")

    def _temperature(self, text: str) -> None:
        """X: 0 is greedy."""
        if text:
            try:
                value = float(text)
            except ValueError:
                raise ValueError(f"/temperature {text!r} is no number") from None
            self.params = sampling_of({"temperature": value}, self.params)
        self._tell(f"temperature {self.params.temperature:g}")

    def _system(self, text: str) -> None:
        """TEXT: the system prompt, from the next answer on; "" is the template's own."""
        if text:
            system = None if text == '""' else text
            self.llm.chat_prompt(
                _messages(system, [{"role": "user", "content": "a"}]), **self.variables
            )  # may refuse it
            self.system = system
        self._tell("no system prompt but the template's own" if self.system is None else f"system: {self.system}")

    def _drop(self, text: str) -> None:
        """N: forget the oldest N turns; 1 without N."""
        if not self.turns:
            raise ValueError("/drop: there are no turns to forget")
        turns = len(self.turns) // 2
        del self.turns[: 2 * _integer("/drop", text or "1", 1, turns, "the number of turns there are")]
        self._tell(f"{len(self.turns) // 2} turns are left")

    def _reset(self, text: str) -> None:
        """forget all turns; the settings stay."""
        _refuse_text("/reset", text)
        self.turns.clear()
        self._tell(f"all turns are forgotten · {self._settings()}")

    def _save(self, text: str) -> None:
        """FILE: write the conversation and its settings, as JSON."""
        if not text:
            raise ValueError("/save needs the name of a file")
        try:
            path = Path(text).expanduser()
        except RuntimeError as error:  # such as ~someone
            raise ValueError(f"/save {text!r}: {error}") from None
        if path.exists() and path.resolve() not in self._saved:
            raise ValueError(f"{text} exists already; give another name")
        record = {
            "model": self.setup.model,
            "draft": self.setup.draft,
            "policy": str(self.policy),
            "k": self.k,
            "params": self.params.model_dump(exclude_defaults=True),
            "chat_template_kwargs": self.variables,
            "messages": self.messages(),
        }
        path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self._saved.add(path.resolve())
        self._tell(f"saved {len(self.turns) // 2} turns to {text}")

    def _help(self, text: str) -> None:
        """list the commands, and what the colours mean."""
        _refuse_text("/help", text)
        for name, run in self.commands.items():
            help_text = " ".join((inspect.getdoc(run) or "").split())
            self._tell(textwrap.fill(f"  {name:13}{help_text}", 80, subsequent_indent=" " * 15))
        self._tell("  a line that ends with \\ goes on in the next; // begins a text with /")
        self._tell("  Ctrl+C stops an answer and keeps its beginning; Ctrl+D ends")
        if console.is_terminal:
            show_colours()

    def _quit(self, text: str) -> None:
        """end."""
        _refuse_text("/quit", text)
        raise EOFError

    def _settings(self) -> str:
        return f"draft {self.setup.draft} · policy {self.policy} · k {self.k} · temperature {self.params.temperature:g}"

    @staticmethod
    def _tell(text: str) -> None:
        """Print something that is no part of an answer; on standard error if answers go to a file."""
        (console if console.is_terminal else errors).print(escape(text), style="dim", highlight=False, soft_wrap=True)


def _messages(system: str | None, turns: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the turns, after the system prompt if there is one."""
    return [*([] if system is None else [{"role": "system", "content": system}]), *turns]


def _integer(command: str, text: str, least: int, most: int, limit: str) -> int:
    """Read the number that a command takes. Raises ``ValueError``, which says that ``most`` is the ``limit``."""
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise ValueError(f"{command} {shorten(text)} must be an integer in {least}..{most}, {limit}")
    return int(text)


def _refuse_text(command: str, text: str) -> None:
    """Raise ``ValueError`` if there is text after a command that takes none."""
    if text:
        raise ValueError(f"{command} takes nothing, got {shorten(text)}")


class _Answer:
    """The pieces of an answer while it is generated, and their sums."""

    def __init__(self, stream: Stream) -> None:
        self.text = self.reasoning = ""
        self._stream, self._started = stream, time.perf_counter()
        self._first: float | None = None

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._stream:
            self._first = self._first or time.perf_counter()
            setattr(self, piece.kind, getattr(self, piece.kind) + piece)
            yield piece

    def figures(self) -> list[str]:
        """Return the figures of the answer so far."""
        elapsed, stats = time.perf_counter() - self._started, self._stream.stats
        figures = [
            f"τ {stats.tau:.2f}",
            f"{stats.generated / max(elapsed, 1e-9):,.1f} tokens/s",
            f"{stats.relaxed / max(stats.generated, 1):.0%} relaxed",
            f"cached {stats.cached} of {stats.prompt_tokens} prompt tokens",
        ]
        return figures if self._first is None else [*figures, f"first after {self._first - self._started:.2f} s"]


def _read(prompt: str) -> str:
    """Read a line, which can be edited on a terminal. Raises ``EOFError`` at the end of the input."""
    if not sys.stdin.isatty():
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line.rstrip("\n")
    with contextlib.suppress(ImportError):  # some systems have no readline
        import readline  # noqa: F401  (lets input() edit lines and remember them)
    # input() measures the prompt, so colour codes, which have no width, must stand between \x01 and \x02.
    return input(f"\x01\x1b[1;34m\x02{prompt}\x01\x1b[0m\x02" if console.is_terminal else prompt)
