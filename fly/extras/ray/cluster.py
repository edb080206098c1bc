"""Joins a Ray cluster, and chooses the CPUs and GPUs that each process gets by default."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import ray
import torch

__all__ = ["join", "nodes", "set_threads", "share"]


def join(address: str | None) -> None:
    """Connect to the cluster at ``address``. ``"auto"`` is the running one (``ray start``, ``RAY_ADDRESS``). None is
    the running one too or, if there is none, a new one on this machine, which ends with this process.

    Raises ``ValueError`` if there is no cluster.
    """
    # A new cluster reports nothing to Ray's makers, unless the user sets this variable.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        return
    try:
        ray.init(address, include_dashboard=False if address is None else None, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        raise ValueError(f"no Ray cluster at {address!r}: {error}; 'ray start --head' starts one") from None


def nodes() -> list[Mapping[str, float]]:
    """Return the resources of each living node: ``CPU``, ``GPU`` and others."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def share(count: int | None, cpus: float | None, gpus: float | None) -> tuple[float, float]:
    """Return the CPUs and GPUs for each of ``count`` processes (None: one per node, or one per GPU). If the user named
    none, a process gets one GPU if the cluster has any, and an equal part of the smallest node's CPUs."""
    cpu_nodes = [each for each in nodes() if each.get("CPU")]
    if not cpu_nodes:
        raise ValueError("the Ray cluster has no node with CPUs")
    if gpus is None:
        gpus = float(any(each.get("GPU") for each in cpu_nodes))
    if cpus is None:
        of_node = (
            math.ceil(count / len(cpu_nodes))
            if count
            else max(int(each.get("GPU", 0)) if gpus else 1 for each in cpu_nodes)
        )
        cpus = max(1, min(each["CPU"] for each in cpu_nodes) // max(of_node, 1))
    return cpus, gpus


def set_threads() -> int:
    """Use one thread for each CPU that Ray gave this actor, in PyTorch and compiled kernels. Return their number."""
    resources: dict[str, Any] = ray.get_runtime_context().get_assigned_resources()
    # In a placement group, names of resources end with the group's id: CPU_group_0_3fa85...
    cpus = max((value for name, value in resources.items() if name == "CPU" or name.startswith("CPU_group")), default=1)
    torch.set_num_threads(max(1, int(cpus)))
    return torch.get_num_threads()
