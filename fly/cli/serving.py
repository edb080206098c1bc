"""``fly serve``."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fly.cli.options import MODEL, RANKS, SETUP, declared_options, option, takes
from fly.cli.run import command, compute_in_words, memory_of, options_of, ranks_of, refuse_idle, setup_of
from fly.cli.show import progress, tell
from fly.config import Config, declared
from fly.llm import LLM
from fly.parallel.start import RUN_ID
from fly.runner.executor import WARM_ROWS
from fly.serve import Settings
from fly.serve.listening import require_free
from fly.serve.settings import wrong_with_key

if TYPE_CHECKING:
    from fly.serve import Service

_of_ray = functools.partial(option, rich_help_panel="Ray")
_RAY = {
    "ray": _of_ray(bool, "Serve by replicas on the Ray cluster at hand, or a new one here.", "--ray", default=False),
    "replicas": _of_ray(str, "How many replicas, or a range ('1-8') that follows the load.", default="1"),
    "cpus": _of_ray(float, "CPUs, and so threads, of each process."),
    "gpus": _of_ray(float, "GPUs of each process. Default: 1 if there are any."),
}
_ROOM = declared_options(declared(), "max_rows", "step_tokens", rich_help_panel="Limits")
# The settings that are options, as the help groups them.
_ACCESS = (
    *("host", "port", "name", "api_keys", "api_keys_file", "allowed_hosts", "cors_origins", "trusted_proxies"),
    *("policies", "require_lossless", "share_prefixes", "access_log"),
)
_LIMITS = (
    *("max_connections", "max_waiting", "max_open", "max_tokens", "max_k", "timeout", "drain_timeout"),
    "stream_interval",
)
_FLAGS = {
    "name": "--name --served-model-name",
    "api_keys": "--api-key",
    "allowed_hosts": "--allowed-host",
    "cors_origins": "--cors-origin",
}
_SETTINGS = {
    **declared_options(Settings.model_fields, *_ACCESS, flags=_FLAGS, rich_help_panel="Access"),
    **declared_options(Settings.model_fields, *_LIMITS, rich_help_panel="Limits"),
}


@command
@takes(MODEL, SETUP, _SETTINGS, _ROOM, RANKS, _RAY)
def serve(context: typer.Context, config: Path | None, ray: bool, **_: Any) -> None:
    """Serve a model over HTTP as OpenAI does, with a playground at /.

    Requests that name no policy, draft or K get those of --policy, --draft and --k.
    """
    services: list[Service] = []
    if not ray:
        refuse_idle(context, _RAY, "without --ray")
    _die_at_once()
    setting_values = {
        name: value for name, value in options_of(context, Settings.model_fields).items() if value is not None
    }
    if "api_keys_file" in setting_values:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the model is loaded; the file is read after that anyway
    setting_values["api_keys"] = _keys(setting_values.get("api_keys"), setting_values.get("api_keys_file"))
    if not ray and os.environ.get("RANK", "0") == "0":  # of several ranks, the first listens
        early_settings = Settings(**setting_values)
        require_free(early_settings.host, early_settings.port)  # now, since loading may take minutes

    def report(message: str) -> None:
        """A rank is lost: open requests get an error before this process ends."""
        for service in services:
            service.llm.worker.fail(RuntimeError(message))
            time.sleep(0.5)

    with ranks_of(context, config, report) as ranks:
        if ranks is not None and os.environ["TORCHELASTIC_RUN_ID"] != RUN_ID:
            # torchrun kills its processes 30 seconds after it asked them to end.
            setting_values["drain_timeout"] = min(setting_values["drain_timeout"], 22.0)
        settings, setup = Settings(**setting_values), setup_of(context, config)
        if ray:
            of_ray = {name: context.params[name] for name in (*_RAY, "ranks_") if name != "ray"}
            _serve_on_ray(setup, settings, **of_ray)
        elif ranks is None or ranks.leads:
            _serve_here(setup, settings, ranks, services, keys_are_seen=bool(context.params["api_keys"]))
        else:
            _follow(setup, ranks)


def _serve_here(setup: Config, settings: Settings, ranks: Any, services: list[Service], keys_are_seen: bool) -> None:
    """Serve from this process, alone or as the first of several ``ranks``, until a signal. The service is added to
    ``services``."""
    from fly.serve import Server, Service

    # Load the model, and say what is served.
    llm = LLM.from_config(setup, ranks)
    memory = memory_of(ranks)
    if ranks is not None:
        llm.lead()
    service = Service(llm, settings, draft=setup.draft, name=setup.model)
    services.append(service)
    decoding = f"draft {setup.draft} · policy {llm.policy} · k {llm.k}"
    tell(f"{service.name} · {decoding} · context {service.context} · {compute_in_words(llm)}")
    if llm.devices:
        kinds = 2 * sum(rows <= llm.scheduler.max_rows for rows in WARM_ROWS)
        with progress(kinds, "capturing CUDA graphs") as advance:
            llm.warm(advance)
        tell(llm.devices)
    if keys_are_seen:
        warnings.warn("other users of this machine can see the keys of --api-key; use --api-keys-file", stacklevel=1)
    service.metrics.loaded([of_rank["peak"] for of_rank in memory])
    # Serve. Warnings now go to the log, which limits their number; else Python would remember each one for ever.
    server = Server(service)
    server.obey()
    warnings.simplefilter("always")
    logging.captureWarnings(True)
    try:
        server.run()
    finally:
        llm.close()
    if server.lost or server.failed:
        raise typer.Exit(1)


def _follow(setup: Config, ranks: Any) -> None:
    """Do what the first rank says, until it ends."""
    llm = LLM.from_config(setup, ranks)
    memory_of(ranks)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # this rank ends after the first rank
    llm.follow()


def _serve_on_ray(setup: Config, settings: Settings, ranks_: int, **options: Any) -> None:
    """Serve by replicas until a signal; exit status 1 if requests were lost."""
    try:
        from fly.extras.ray import Deployed
        from fly.extras.ray.running import run
    except ModuleNotFoundError as error:
        raise ValueError(f"--ray: Ray is not installed ({error}): pip install 'flyspec[ray]'") from None
    if run(Deployed(setup=setup, settings=settings, ranks=ranks_, **options)):
        raise typer.Exit(1)


def _die_at_once() -> None:
    """Write no core file if the process dies: its connections would stay open until the file is written. To get one,
    run ``prlimit --core=unlimited --pid`` while the server runs."""
    with suppress(ImportError, ValueError, OSError):
        import resource  # exists only on Unix

        hard_limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
        # A limit of 1 byte prevents the file. With a limit of 0, Linux may still pipe the memory to another program.
        resource.setrlimit(resource.RLIMIT_CORE, (0 if hard_limit == 0 else 1, hard_limit))


def _keys(option_keys: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """Return the keys of the command line, or else the key of the environment. Raises ``ValueError`` for a bad key, in
    the file too, so that a server that should have keys never runs without; ``OSError`` if there is no such file."""
    from fly.serve.clients import read_keys

    if file is not None:
        read_keys(file)
    variable = os.environ.get("FLY_API_KEY")
    source, keys = "--api-key", tuple(option_keys or ())
    if not keys and variable is not None:
        source, keys = "the environment variable FLY_API_KEY", (variable,)
    for key in keys:
        if problem := wrong_with_key(key):
            raise ValueError(
                f"{source} {problem}; to serve without keys, leave it out; for several keys, use --api-keys-file"
            )
    return keys
