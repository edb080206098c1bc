"""``fly serve``."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fly.cli.options import (
    CacheBytes,
    CollectiveTimeout,
    ConfigFile,
    Device,
    DraftOption,
    Dtype,
    Exits,
    HeartbeatTimeout,
    K,
    Kernels,
    MaxContext,
    Model,
    number,
)
from fly.cli.run import command, computed, loaded, options_of, ranks_of, setup_of
from fly.cli.show import errors
from fly.config import COLLECTIVE_TIMEOUT, HEARTBEAT_TIMEOUT, Config
from fly.llm import LLM


@command
def serve(
    context: typer.Context,
    model: Model = "fly-target",
    draft: DraftOption = None,
    policy: Annotated[str, typer.Option(help="The policy of requests that name none.")] = "exact",
    k: K = 15,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 is reachable from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option("--name", "--served-model-name", help="The model's name for clients. Default: its path."),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policies",
            help="What requests may name: rules ('fly', with any parameters) or whole policies ('fly & after(2)'); may "
            "be given several times. Default: all installed rules.",
        ),
    ] = None,
    require_lossless: Annotated[
        bool, typer.Option("--require-lossless", help="Refuse every policy that is not lossless.")
    ] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that requests must bear; may be given several times. Other users of the machine can see it: "
            "better use --api-keys-file. Default: $FLY_API_KEY."
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(help="A file with one key a line; requests must bear one of them. It is read again on SIGHUP."),
    ] = None,
    trusted_proxies: Annotated[
        list[str] | None,
        typer.Option(
            "--trusted-proxies",
            help="Addresses and networks of proxies whose X-Forwarded-For is believed ('10.0.0.1,192.168.0.0/16'); may "
            "be given several times. Default: none.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name to answer to besides its own ('*.example.org', '*'); may be given several times."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="A page that may send requests ('https://example.org', '*'); may be given several times."),
    ] = None,
    max_connections: Annotated[int, typer.Option(min=16, help="The most connections open at the same time.")] = 1000,
    access_log: Annotated[bool, typer.Option("--access-log", help="A line for every request, keys hashed.")] = False,
    max_waiting: Annotated[int, typer.Option(min=0, help="The most completions that wait; more get a 429.")] = 256,
    max_open: Annotated[
        int | None,
        typer.Option(min=1, help="The most completions that a client (a key; without keys an address) has at once."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The most tokens of a completion.")] = None,
    max_k: Annotated[
        int | None,
        typer.Option(min=0, help="The most tokens that a request may have drafted in a round. Default: 64, or --k."),
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="The most completions in one step of the engine.")] = 256,
    cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the KV caches hold. Default: eight full contexts.")
    ] = None,
    cache_bytes: CacheBytes = None,
    share_prefixes: Annotated[
        Literal["key", "all"],
        typer.Option(help="Which requests share cached beginnings: those of one API key ('key'), or all."),
    ] = "key",
    stream_interval: Annotated[
        float, number(0, 1, help="Seconds for which tokens may be held back, to send several rounds at once.")
    ] = 0.01,
    timeout: Annotated[float, typer.Option(help="The most seconds for a request, waiting included.")] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds to finish running requests when the server is stopped.")
    ] = 600.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    max_context: MaxContext = None,
    exits: Exits = None,
    heartbeat_timeout: HeartbeatTimeout = HEARTBEAT_TIMEOUT,
    collective_timeout: CollectiveTimeout = COLLECTIVE_TIMEOUT,
    config: ConfigFile = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Serve by replicas on a Ray cluster: the one at hand, or one of this machine.")
    ] = False,
    replicas: Annotated[
        str, typer.Option(help="With --ray: how many replicas, or a range ('1-8') for as many as open requests need.")
    ] = "1",
    ranks_: Annotated[
        int, typer.Option("--ranks", min=1, help="With --ray: processes that share the model of a replica.")
    ] = 1,
    cpus: Annotated[float | None, typer.Option(help="With --ray: CPUs, and so threads, of each process.")] = None,
    gpus: Annotated[
        float | None, typer.Option(help="With --ray: GPUs of each process. Default: 1 if there are any.")
    ] = None,
) -> None:
    """Serve the model over HTTP as OpenAI does, with a playground at /."""
    services: list[Any] = []
    _die_at_once()
    if api_keys_file is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # while the model is loaded: the file is read after that
    keys = _keys(api_key, api_keys_file)

    def lost(message: str) -> None:
        """A rank is lost: open requests get an error before this process ends."""
        for service in services:
            service.llm.worker.fail(RuntimeError(message))
            time.sleep(0.5)

    with ranks_of(context, config, lost) as ranks:
        from fly.serve import Server, Service, Settings

        # torchrun kills its processes 30 seconds after it has asked them to end.
        drain_timeout = drain_timeout if ranks is None else min(drain_timeout, 22.0)
        given = options_of(context, Settings.model_fields)
        # click gives an empty list for a repeatable option that was left out.
        lists = {
            "api_keys": keys,
            "policies": None if policies is None else tuple(policies),
            "trusted_proxies": tuple(part for each in trusted_proxies or () for part in each.split(",")),
            "allowed_hosts": tuple(allowed_host or ()),
            "cors_origins": tuple(cors_origin or ()),
        }
        settings = Settings(**{**given, **lists, "drain_timeout": drain_timeout})
        setup = setup_of(context, config)
        if ray:
            _serve_on_ray(setup, settings, replicas=replicas, ranks=ranks_, cpus=cpus, gpus=gpus)
            return
        llm = LLM.from_config(setup, ranks)
        memory = loaded(ranks)
        if ranks is not None:
            if not ranks.leads:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)  # this rank ends after the first one has
                llm.follow()
                return
            llm.lead()
        services.append(service := Service(llm, settings, draft=setup.draft, name=setup.model))
        by = f"draft {setup.draft} · policy {llm.policy} · k {llm.k}"
        line = f"{service.name} · {by} · context {service.context} · {computed(llm)}"
        errors.print(line, markup=False, highlight=False, soft_wrap=True)
        if api_key:
            seen = "other users of this machine can see the keys of --api-key; use --api-keys-file"
            warnings.warn(seen, stacklevel=1)
        services[0].metrics.loaded([of_rank["peak"] for of_rank in memory])
        server = Server(services[0])
        server.obey()
        warnings.simplefilter("always")  # otherwise Python would remember each warning for ever
        logging.captureWarnings(True)  # warnings go to the log, which limits their number
        try:
            server.run()
        finally:
            llm.close()
        if server.lost or server.failed:
            raise typer.Exit(1)


def _serve_on_ray(setup: Config, settings: Any, **options: Any) -> None:
    """Serve by replicas until a signal; exit status 1 if requests were lost."""
    try:
        from fly.ray import Deployed
        from fly.ray.running import run
    except ModuleNotFoundError as error:
        raise ValueError(f"--ray: Ray is not installed ({error}): pip install 'flyspec[ray]'") from None
    if run(Deployed(setup=setup, settings=settings, **options)):
        raise typer.Exit(1)


def _die_at_once() -> None:
    """Write no core file if the process dies: its connections would stay open until the file is written. To get one,
    run ``prlimit --core=unlimited --pid`` while the server runs."""
    with suppress(ImportError, ValueError, OSError):
        import resource  # of Unix alone

        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        # With a limit of 1 byte there is no file. With 0, Linux would still hand the memory to a program that wants it.
        resource.setrlimit(resource.RLIMIT_CORE, (0 if hard == 0 else 1, hard))


def _keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """The keys of the command line, or else the key of the environment. Raises ``ValueError`` for a bad key, in the
    file too, so that a server that should have keys never runs without; ``OSError`` if there is no such file."""
    from fly.serve.clients import read_keys
    from fly.serve.settings import wrong_with_key

    if file is not None:
        read_keys(file)
    if not given and (key := os.environ.get("FLY_API_KEY")) is not None:
        if wrong := wrong_with_key(key):
            advice = "; unset the variable to serve without keys, and give several by --api-keys-file"
            raise ValueError(f"the environment variable FLY_API_KEY {wrong}{advice}")
        return (key,)
    for key in given or ():
        if wrong := wrong_with_key(key):
            raise ValueError(f"--api-key {wrong}; leave the option out to serve without keys")
    return tuple(given or ())
