"""``fly serve``."""

from __future__ import annotations

import os
import signal
import time
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
from fly.config import COLLECTIVE_TIMEOUT, HEARTBEAT_TIMEOUT
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
        typer.Option(help="A key that requests must bear; may be given several times. Default: $FLY_API_KEY."),
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
) -> None:
    """Serve the model over HTTP as OpenAI does, with a playground at /."""
    services: list[Any] = []
    keys = _keys(api_key)

    def lost(message: str) -> None:
        """A rank is lost: open requests get an error before this process ends."""
        for service in services:
            service.llm.worker.fail(RuntimeError(message))
            time.sleep(0.5)

    with ranks_of(context, config, lost) as ranks:
        from fly.serve import Server, Service, Settings

        # torchrun kills its processes 30 seconds after it has asked them to end
        drain_timeout = drain_timeout if ranks is None else min(drain_timeout, 22.0)
        given = options_of(context, Settings.model_fields)
        # an option that may be repeated is empty, not None, in what click hands on
        lists = {
            "api_keys": keys,
            "policies": None if policies is None else tuple(policies),
            "allowed_hosts": tuple(allowed_host or ()),
            "cors_origins": tuple(cors_origin or ()),
        }
        settings = Settings(**{**given, **lists, "drain_timeout": drain_timeout})
        setup = setup_of(context, config)
        llm = LLM.from_config(setup, ranks)
        memory = loaded(ranks)
        if ranks is not None:
            if not ranks.leads:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)  # it ends when the first rank has finished what it has
                llm.follow()
                return
            llm.lead()
        services.append(service := Service(llm, settings, draft=setup.draft, name=setup.model))
        by = f"draft {setup.draft} · policy {llm.policy} · k {llm.k}"
        typer.echo(f"{service.name} · {by} · context {service.context} · {computed(llm)}", err=True)
        services[0].metrics.loaded([of_rank["peak"] for of_rank in memory])
        server = Server(services[0])
        server.obey()
        try:
            server.run()
        finally:
            llm.close()
        if server.lost:
            raise typer.Exit(1)


def _keys(given: list[str] | None) -> tuple[str, ...]:
    """The keys of the command line, or else of the environment. Raises ``ValueError`` for a bad key, so that a server
    that should have keys never runs without."""
    from fly.serve.settings import wrong_with_key

    if not given and (key := os.environ.get("FLY_API_KEY")) is not None:
        if wrong := wrong_with_key(key):
            advice = "; unset the variable to serve without keys, and give several by --api-key"
            raise ValueError(f"the environment variable FLY_API_KEY {wrong}{advice}")
        return (key,)
    for key in given or ():
        if wrong := wrong_with_key(key):
            raise ValueError(f"--api-key {wrong}; leave the option out to serve without keys")
    return tuple(given or ())
