"""``fly serve --ray``: deploys the application, waits for a signal, and lets open requests end."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

from ray import serve
from ray.serve.exceptions import RayServeException

from fly.extras.ray.application import NAME, Deployed, build
from fly.extras.ray.cluster import join

__all__ = ["run"]

_TAKEN = 2.0  # seconds after which the gateway is asked again how many requests are open


def run(wanted: Deployed, address: str | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Then refuse new requests (503), as ``fly serve`` does, and wait for the open ones
    for at most ``drain_timeout``. Return how many were lost.

    Raises ``ValueError`` if there is no cluster, or if the application does not start there.
    """
    settings = wanted.settings
    if not settings.port:
        raise ValueError("port 0: with Ray the port is a number, the same on every node")
    join(address)
    serve.start(proxy_location="EveryNode", http_options={"host": settings.host, "port": settings.port})
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    try:
        handle = serve.run(build(wanted), name=NAME)
    except RuntimeError as error:
        raise ValueError(f"the application does not start on Ray: {error}") from None
    over.wait()

    # Drain the gateways first, since clients connect to them. Then end everything behind them.
    deadline, still_open = time.monotonic() + settings.drain_timeout, 0
    with suppress(RayServeException, TimeoutError):
        while still_open := sum(handle.broadcast("drain").results(timeout_s=10)):
            if time.monotonic() > deadline:
                break
            time.sleep(min(_TAKEN, max(0.0, deadline - time.monotonic())))
    serve.delete(NAME)
    return still_open
