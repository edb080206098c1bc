"""``fly audit``."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fly.cli.options import RUNNING, Json, number, option, takes
from fly.cli.run import alone, options_of, refuse_idle
from fly.cli.show import console, errors, note, print_list, table, write_json

if TYPE_CHECKING:
    from fly.extras.audit import Finding, Report

_COLOURS = {"pass": "green", "fail": "bold red", "undecided": "yellow", "not supported": "dim"}


# Options for the reference server, which fly starts.
_OF_REFERENCE = ("dtype", "kernels")
# Options that go to ``fly.extras.audit.audit`` unchanged.
_ASKED = {
    "name": option(str, "The model's name on the server. Default: the first it lists."),
    "beside_name": option(str, "The model's name on the second server."),
    "beside_key": option(str, "The second server's key.", "--beside-api-key"),
    "endpoint": option(str, "completions, chat, or auto: completions if the server has them.", default="auto"),
    "samples": option(
        int, "Answers drawn for the joint distribution; other checks draw in proportion.", min=16, default=4000
    ),
    "parallel": option(int, "The most requests at the same time.", min=1, default=8),
    "alpha": (
        Annotated[float, number(1e-9, 0.5, help="The probability that an honest server fails, over all checks.")],
        0.001,
    ),
    "seconds": (Annotated[float | None, number(1, help="The most time; checks cut short are undecided.")], None),
    "requests": option(int, "The most requests.", min=1),
    "only": option(list[str], "Run this check; repeatable."),
    "skip": option(list[str], "Leave this check out; repeatable."),
    "timeout": (Annotated[float, number(1, help="The most seconds for one answer.")], 600.0),
}


@alone
@takes(_ASKED, {name: RUNNING[name] for name in _OF_REFERENCE})
def audit(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Argument(help="The server's address: http://127.0.0.1:8000", metavar="URL")
    ] = None,
    beside: Annotated[
        str | None, typer.Option(help="A second server of the same model, which is taken to be right.", metavar="URL")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A reference that fly runs: a bundled name, a directory, a GGUF file."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key. Default: $OPENAI_API_KEY.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts to ask about, one a line. Default: forty of our own.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the checks.")] = False,
    json_: Json = None,
    **_: Any,
) -> None:
    """Judge any OpenAI-compatible server: are its answers those of its model, whatever makes it fast?

    The exit status is 0 if nothing failed, 1 if something did, and 2 if the server could not be tested.
    """
    from fly.extras.audit import audit as run
    from fly.extras.audit import check_names

    if list_:
        print_list(check_names().items(), "check", "tests that")
        return
    if url is None:
        raise ValueError("give the server's address, as in: fly audit http://127.0.0.1:8000")
    if beside is not None and model is not None:
        raise ValueError("--beside and --model are both a reference: give one of them")
    if beside is None:
        refuse_idle(context, ("beside_name", "beside_key"), "without --beside")
    if model is None:
        refuse_idle(context, _OF_REFERENCE, "without --model")
    settings = {name: value for name, value in options_of(context, _ASKED).items() if value is not None}
    if prompts is not None:
        settings["prompts"] = _read(prompts)
    key = api_key or os.environ.get("OPENAI_API_KEY")
    reference = beside if model is None else _reference(model, options_of(context, _OF_REFERENCE))
    with _progress() as show:
        report = run(url, key=key, beside=reference, progress=show, **settings)
    write_json(json_, report.as_dict())
    _show(report, model)
    raise typer.Exit(report.status)


def _read(path: Path) -> list[str]:
    """Return the prompts of a file, one a line; ``\\n`` in a line is a line break."""
    return [line.replace("\\n", "\n") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@contextmanager
def _reference(model: str, running: dict[str, Any]) -> Iterator[str]:
    """Serve the model without a draft until the context ends, and yield the server's address. Raises ``Unreachable``,
    with the cause, if the server does not start or ends before the context does."""
    from fly.extras.audit import Unreachable
    from fly.llm import LLM
    from fly.serve import Server, Service, Settings

    with LLM(model, draft=None, deterministic=True, **running) as llm:
        server = Server(Service(llm, Settings(name=model), draft="none", name=model), log_level="error")
        causes: list[BaseException] = []

        def serve() -> None:
            try:
                server.run(sockets=[listener])
            except BaseException as error:  # SystemExit too
                causes.append(error)

        thread = threading.Thread(target=serve, daemon=True)
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            thread.start()
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            try:
                if server.started:
                    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                if llm.worker.failure is not None:  # read now: an orderly end closes the engine too
                    causes.append(llm.worker.failure)
                ended = bool(causes) or not thread.is_alive()
                server.should_exit = True
                thread.join(30)
                if ended:
                    reason = "".join(f": {type(cause).__name__}: {cause}" for cause in causes[:1])
                    raise Unreachable(f"the reference {model!r} has ended{reason}")


@contextmanager
def _progress() -> Iterator[Any]:
    """Show a bar of the checks that are done, and the one that runs."""
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    hidden = not errors.is_interactive  # where rich prints an empty line in place of the bar
    with Progress(*columns, console=errors, transient=True, disable=hidden) as bar:
        task = bar.add_task("connecting", total=None)
        yield lambda what, done, total: bar.update(task, description=escape(what), completed=done, total=total)


def _show(report: Report, model: str | None) -> None:
    """Print a line for each check, details of some, and how many checks have each verdict."""
    beside = f" · beside {model or report.beside}" if report.beside else ""
    title = f"{report.model} at {report.url} · {report.endpoint}{beside}"
    columns = {
        "check": lambda each: each.check,
        "verdict": lambda each: f"[{'yellow' if each.weak else _COLOURS[each.verdict.value]}]{_verdict(each)}[/]",
        "seen": lambda each: each.seen or "–",
        "p": lambda each: "–" if each.p is None else _p(each.p),
        "finds (probability 0.9)": lambda each: escape(each.finds) or "–",
    }
    text = ("check", "verdict", "seen", "finds (probability 0.9)")
    console.print(table(title, report.findings, columns, text=text, padding=(0, 1, 0, 0), show_edge=False))
    for each in report.findings:
        if each.detail:
            colour = _COLOURS[each.verdict.value]
            console.print(f"[{colour}]{each.check}[/]: {escape(each.detail)}", highlight=False)
    counts = Counter(map(_verdict, report.findings))
    n_drawn = sum(each.p is not None for each in report.findings)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    console.print(f"[bold]{summary}[/] · {report.requests:,} requests in {report.seconds:.0f} s", highlight=False)
    if any(each.weak for each in report.findings):
        note(
            "weak: too little was seen to be sure of finding a fault in a fifth of it; more --prompts or --samples help"
        )
    if n_drawn:
        note(
            "p: how likely such samples are from an honest server, which fails one of these "
            f"{n_drawn} checks with probability {report.alpha:g} at most (Holm)"
        )
    if report.beside is None:
        note("not tested: greedy answers beside a reference (--beside URL or --model NAME)")


def _verdict(each: Finding) -> str:
    return f"{each.verdict.value} (weak)" if each.weak else each.verdict.value


def _p(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}" if value >= 1e-9 else "<1e-9"
