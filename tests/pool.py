"""Processes of Gloo that stand ready for tests of several ranks, and toy checkpoints for them."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fly
from fly.models import LlamaConfig, save_model
from fly.parallel import (
    Ranks,
)
from tests.toys import build_llama

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["tests.pool"])  # torch is imported once


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def serve_jobs(rank: int, size: int, port: int, pipe: Connection) -> None:
    """One process of the pool: does what it is told in the group of the first 1, 2 or 4."""
    torch.set_num_threads(1)
    address = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", **address)
    groups = {n: dist.new_group(list(range(n))) for n in (1, 2, 4) if n <= size}
    ranks = {n: Ranks(group) for n, group in groups.items() if rank < n}
    while (job := pipe.recv()) is not None:
        n, work, arguments = job
        torch.manual_seed(0)
        try:
            pipe.send((True, work(ranks[n], *arguments)))
        except Exception as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()


class Pool:
    def __init__(self, size: int = 4) -> None:
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = FORK.Pipe()
            process = FORK.Process(target=serve_jobs, args=(rank, size, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def outcomes(self, n: int, work: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """Of each of ``n`` ranks, whether ``work(ranks, *arguments)`` succeeded, and its result or error."""
        for pipe in self.pipes[:n]:
            pipe.send((n, work, arguments))
        return [pipe.recv() if pipe.poll(60) else (False, ("Timeout", "", "")) for pipe in self.pipes[:n]]

    def run(self, n: int, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result, which must be the same on every rank."""
        found = self.outcomes(n, work, *arguments)
        for success, result in found:
            assert success, result[-1]
        assert all(result == found[0][1] for _, result in found), found
        return found[0][1]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes):
            pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()


TOY = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)


def checkpoints(directory: Path, config: LlamaConfig, seed: int) -> tuple[str, str]:
    """A target, and a draft that is close to it, so that some of what it proposes stands."""
    model = build_llama(config, seed)
    save_model(model, directory / "target", torch.float32)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    save_model(model, directory / "draft", torch.float32)
    return str(directory / "target"), str(directory / "draft")


def told(outputs: list[fly.Output]) -> list[Any]:
    """All that must be alike."""
    return [
        (o.token_ids, o.finish_reason, [(t.id, int(t.why), t.clause, t.target_choice) for t in o.provenance])
        for o in outputs
    ]
