"""``fly serve``."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated, Any, Literal

import typer

from fly.cli.options import (
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
from fly.cli.run import command, kernels_of, loaded, options_of, ranks_of, setup_of
from fly.config import COLLECTIVE_TIMEOUT, HEARTBEAT_TIMEOUT
from fly.llm import LLM


@command
def serve(
    context: typer.Context,
    model: Model = "fly-target",
    draft: DraftOption = None,
    policy: Annotated[str, typer.Option(help="What requests get that say nothing.")] = "exact",
    k: K = 15,
    host: Annotated[str, typer.Option(help="0.0.0.0 to be reached from elsewhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any that is free.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; its path otherwise.")] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policies",
            help="What requests may name: rules ('fly', with any parameters) or whole policies ('fly & after(2)'); may "
            "be given several times. All installed rules otherwise.",
        ),
    ] = None,
    require_lossless: Annotated[bool, typer.Option("--require-lossless", help="Refuse any other policy.")] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Requests must bear one of these; may be given several times. Else $FLY_API_KEY."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name to answer to besides its own ('*.example.org', '*'); may be given several times."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="A page that may send requests ('https://example.org', '*'); may be given several times."),
    ] = None,
    max_connections: Annotated[int, typer.Option(min=16, help="Most connections open at the same time.")] = 1000,
    access_log: Annotated[bool, typer.Option("--access-log", help="A line for every request, keys hashed.")] = False,
    max_waiting: Annotated[int, typer.Option(min=0, help="Completions that may wait; more get a 429.")] = 256,
    max_open: Annotated[
        int | None,
        typer.Option(min=1, help="Completions that a client (a key; without keys an address) may have at once."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of a completion.")] = None,
    max_k: Annotated[
        int | None, typer.Option(min=0, help="Most tokens a request may have drafted a round; 64, or --k, otherwise.")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Most completions in one step of the engine.")] = 256,
    cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the KV caches hold; eight full contexts otherwise.")
    ] = None,
    cache_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Most memory for the KV caches; 4 GiB or half of what is free if not given."),
    ] = None,
    share_prefixes: Annotated[
        Literal["key", "all"],
        typer.Option(help="Whose requests share what is cached of equal beginnings: those of one API key, or all."),
    ] = "key",
    stream_interval: Annotated[
        float, number(0, 1, help="Seconds for which tokens are held back to send several rounds' at once.")
    ] = 0.01,
    timeout: Annotated[float, typer.Option(help="Seconds for a request, its wait included.")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds to finish what runs when told to end.")] = 600.0,
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
        """A rank is gone: whoever waits for an answer hears of it before this process ends."""
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
        typer.echo(f"{service.name} · {by} · context {service.context} · kernels {kernels_of(llm)}", err=True)
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
    """The keys of the command line, or else of the environment. Raises ``ValueError`` for what is no key: where one is
    meant to be, nothing is served without."""
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
