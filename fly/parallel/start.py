"""Start the ranks of one machine, and end them in order. torchrun starts ranks on several machines, and starts lost
ones again; after any signal it ends with a traceback and status 1."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

import torch
import torch.distributed as dist

__all__ = ["RUN_ID", "start_ranks"]

RUN_ID = "fly --ranks"  # the value of TORCHELASTIC_RUN_ID in ranks that were started here


def start_ranks(count: int, command: Sequence[str], grace: float = 15.0) -> int:
    """Run ``count`` processes of ``command`` that ``fly.parallel.launch`` joins, and wait until they have ended.

    SIGTERM and SIGINT both reach them as SIGTERM. If one fails, the others get ``grace`` seconds to
    end too.

    Returns the exit status: 0 if all ranks ended with 0, else that of the first rank that did not (128 + n after signal
    n, as shells say). Raises ``KeyboardInterrupt`` if SIGINT ended them otherwise.
    """
    # The ranks' store is here, so that ranks that are left alone notice that this process is gone.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count)),
        **os.environ,
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(count),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    received: set[int] = set()

    def end(number: int, frame: FrameType | None) -> None:
        received.add(number)
        for rank in ranks:
            rank.terminate()  # a rank that is not ready for SIGINT would show a traceback

    old_handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number in range(count):
            variables = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
            # In a session of its own it gets Ctrl+C only from here, once.
            ranks.append(subprocess.Popen([*command], env=variables, start_new_session=True))
        failed_at: float | None = None
        while any(rank.poll() is None for rank in ranks):
            if failed_at is None and any(rank.returncode for rank in ranks):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + grace:
                break
            time.sleep(0.02)
    finally:
        for rank in ranks:
            rank.kill()
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    statuses = [rank.wait() for rank in ranks]
    failed = next((status for status in statuses if status), 0)
    if failed and signal.SIGINT in received:
        raise KeyboardInterrupt
    return failed if failed >= 0 else 128 - failed
