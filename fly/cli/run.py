"""What every command needs: short errors, the ranks of torchrun, the configuration file."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.markup import escape

from fly.backends.choice import why_not_compiled
from fly.cache.allocator import OutOfBlocks
from fly.cli.show import errors, fail, tell
from fly.cli.terminal import read_bytes
from fly.config import Config, check_sharing
from fly.errors import describe_error, fault_place, origin
from fly.expressions import grid
from fly.llm import LLM
from fly.models.bundled import usual_draft
from fly.policies import AcceptancePolicy, Exact, parse_policy
from fly.types import SamplingParams

ARGUMENTS = "fly.arguments"  # where a context keeps the arguments of the whole command

_Command = TypeVar("_Command", bound=Callable[..., None])


def command(run: _Command, alone: bool = False) -> _Command:
    """Decorate a command: errors of input end it with one line and exit status 2 instead of a traceback. An error in a
    plug-in does too, with its place. Other errors are faults of this package and show their traceback. ``alone``
    refuses to run under torchrun, where each rank would do the whole work."""

    @functools.wraps(run)
    def guarded(*arguments: Any, **options: Any) -> None:
        if "" not in sys.path:  # find modules in the working directory, as python -m does
            sys.path.insert(0, "")
        try:
            if alone and "TORCHELASTIC_RUN_ID" in os.environ:
                raise ValueError("this command is for one process; several run generate, serve and eval")
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return run(*arguments, **_read_options(options))
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:  # the reader has closed the pipe, so nothing more can be written
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            errors.print("interrupted")
            raise typer.Exit(130) from None
        except (ValueError, OSError, OutOfBlocks, MemoryError) as error:
            message = describe_error(error)
            if place := fault_place(error):
                message = f"{type(error).__name__}: {message} ({place})"
        except Exception as error:
            place = origin(error)
            if any(part in place for part in ("site-packages", "/bin/fly", "<string>", "/importlib/")):
                raise
            message = f"{type(error).__name__}: {error} ({place})"
        fail(message)
        raise typer.Exit(2)

    return guarded  # type: ignore[return-value]


def _read_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a command, and change those of its context, with texts as they were typed."""

    def read(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(read(name, each) for each in value)
        return read_bytes(value, name) if isinstance(value, str) else value

    for values in (options, *(value.params for value in options.values() if hasattr(value, "params"))):
        values.update({name: read(name, value) for name, value in values.items()})
    return options


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, without its place in the code."""
    errors.print(f"[yellow]warning:[/] {escape(str(message))}", highlight=False, soft_wrap=True)


alone = functools.partial(command, alone=True)


@contextmanager
def ranks_of(context: typer.Context, config: Path | None = None, on_fault: Any = None) -> Iterator[Any]:
    """Yield the ranks that --ranks or torchrun started, or None without them. Only the first rank reads and prints.

    With --ranks, this process starts the ranks and then ends as they do: it raises ``typer.Exit``.
    """
    from fly.parallel import launch, start_ranks
    from fly.parallel.start import RUN_ID

    run_id, count = os.environ.get("TORCHELASTIC_RUN_ID"), context.params["ranks_"]
    if count > 1 and run_id not in (None, RUN_ID):
        raise ValueError(f"--ranks {count} starts processes of its own; run it without torchrun")
    if run_id is None and count > 1 and not context.params.get("ray"):
        raise typer.Exit(start_ranks(count, [sys.executable, "-m", "fly", *context.meta[ARGUMENTS]]))
    sharing = {name: context.params[name] for name in Config.of_ranks}
    if run_id is None:
        check_sharing(sharing)
        if not context.params.get("ray"):
            refuse_idle(context, ("draft_placement", "whole_sums"), "without --ranks or torchrun")
        yield None
        return
    with suppress(ValueError):  # errors of the file are reported once, after the ranks have started
        sharing = _given(context, config, sharing)
    with launch(**check_sharing(sharing), on_fault=on_fault) as ranks:
        if not ranks.leads:
            sys.stdout = errors.file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the process ends)
        yield ranks


def grid_of(ray: str | None, actors: int | None, ranks: Any = None) -> Any:
    """Return the actors of ``--ray``; None without that option."""
    if ray is None:
        if actors is not None:
            raise ValueError(f"--actors {actors} does nothing without --ray")
        return None
    if ranks is not None:
        raise ValueError("--ray starts its own processes; run it without torchrun")
    try:
        from fly.extras.ray.grid import Grid
    except ModuleNotFoundError as error:
        raise ValueError(f"--ray: Ray is not installed ({error}): pip install 'flyspec[ray]'") from None
    return Grid(ray, actors)


def setup_of(context: typer.Context, path: Path | None) -> Config:
    """Return the setup of a configuration file, with the options of the command line in place of the file's; or of the
    options alone."""
    fields = Config.model_fields
    options = options_of(context, fields) if path is None else {name: context.params.get(name) for name in fields}
    if path is None and options["draft"] is None:
        options["draft"] = usual_draft(options["model"])
    return Config.model_validate(_given(context, path, options), context={"trusted": True})


def options_of(context: typer.Context, fields: Collection[str]) -> dict[str, Any]:
    """Return the options of a command whose names are in ``fields``. A repeatable option that was left out is None."""
    return {name: None if value == () else value for name, value in context.params.items() if name in fields}


def sampling_of(options: Mapping[str, Any], default: SamplingParams) -> SamplingParams:
    """Return ``default`` with the options that are not None. Raises ``ValidationError``."""
    return default.changed({name: value for name, value in options.items() if value is not None})


def rules_of(patterns: list[str] | None) -> list[AcceptancePolicy]:
    """Return the rules of a comparison: exact speculation, then the rules of the command line, each once."""
    texts = [text for pattern in patterns or () for text in grid(pattern)]
    return list(dict.fromkeys([Exact(), *(parse_policy(text, trusted=True) for text in texts)]))


def typed_in(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_idle(context: typer.Context, names: Collection[str], when: str) -> None:
    """Raise ``ValueError`` if the command line has one of these options, which does nothing ``when`` it says."""
    for option in context.command.params:
        if option.name in names and typed_in(context, option.name):
            raise ValueError(f"{option.opts[0]} does nothing {when}")


def _given(context: typer.Context, path: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, with the values of the file (if there is one) for those that are not on the command line."""
    if path is None:
        return options
    file_config = Config.read(path)
    return {name: value if typed_in(context, name) else getattr(file_config, name) for name, value in options.items()}


def memory_of(ranks: Any, quiet: bool = False) -> list[dict[str, int]]:
    """Return the memory of every rank after loading, which is printed if there are several. All ranks must call
    this."""
    from fly.parallel import memory_here

    memory = [memory_here()] if ranks is None else ranks.collect(memory_here())
    if ranks is not None and not quiet:
        tell(f"fly: {len(memory)} ranks; {memory_in_words(memory)}")
    return memory


def memory_in_words(memory: list[dict[str, int]]) -> str:
    """Return the result of ``loaded`` as a sentence."""

    def megabytes(name: str) -> str:
        return ", ".join(f"{of_rank[name] / 1e6:,.0f}" for of_rank in memory)

    device = f", of their devices {megabytes('device')} MB" if any(of_rank["device"] for of_rank in memory) else ""
    return f"memory by rank, loaded: at most {megabytes('peak')} MB{device}; of their own {megabytes('own')} MB"


def kernels_of(llm: LLM) -> str:
    """Return the kernels that run the target; for PyTorch on a CPU, with the reason why they are not compiled."""
    executor = llm.engine.runner.executor
    reason = why_not_compiled(executor)
    return f"{executor.kernels} ({reason})" if reason else executor.kernels


def compute_in_words(llm: LLM) -> str:
    """Return the kernels and dtypes of the target and of the draft, as a phrase."""
    (_, dtype), *drafts = llm.computed
    drafts_text = "".join(f", draft {kernels} in {draft_dtype}" for kernels, draft_dtype in dict.fromkeys(drafts))
    return f"kernels {kernels_of(llm)} in {dtype}{drafts_text}"
