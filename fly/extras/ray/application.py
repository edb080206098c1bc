"""The application for Ray Serve: a gateway that clients reach, and replicas of the model behind it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from fly.config import Config
from fly.errors import explain
from fly.extras.ray.cluster import share
from fly.extras.ray.gateway import Gateway
from fly.extras.ray.replica import Replica
from fly.serve import Settings

__all__ = ["NAME", "Deployed", "build"]

NAME = "fly"  # the application's name
# Ray's classes that choose a replica. Each asks how many requests a replica has, and passes over one that is full.
_ROUTERS = {
    "conversation": "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter",
    "load": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}
_FALLBACKS = 1000  # how many replicas are tried after the conversation's own: all of them
_READING = 5.0  # seconds beyond drain_timeout for clients to read the last of their answers


class Deployed(BaseModel):
    """The arguments of ``build`` (``args`` in Ray's configuration file). Unknown fields are errors.

    ``setup`` is the model as ``fly.LLM`` takes it; ``settings`` are the server's. ``replicas`` is a number or a range
    (``"1-8"``). In a range, there is one replica for every ``target_open`` open requests. A replica has ``ranks``
    processes with ``cpus`` and ``gpus`` each, and at most ``max_ongoing`` requests at a time. ``route`` says how
    requests are given to replicas: those of one ``conversation`` to the same replica, or all of them by ``load`` alone.
    ``gateways`` processes pass requests on. A single one runs on the head node, beside Ray's proxy; several run on
    different nodes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    setup: Config = Field(default_factory=Config)
    settings: Settings = Field(default_factory=Settings)
    replicas: str = "1"
    ranks: int = Field(default=1, ge=1)
    cpus: float | None = Field(default=None, gt=0)
    gpus: float | None = Field(default=None, ge=0)
    max_ongoing: int = Field(default=64, ge=1)
    target_open: int = Field(default=16, ge=1)
    route: Literal["conversation", "load"] = "conversation"
    retries: int = Field(default=3, ge=0)
    gateways: int = Field(default=1, ge=1)

    @field_validator("replicas", mode="before")
    @classmethod
    def _is_a_range(cls, value: object) -> str:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(value))
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ValueError(f"replicas {value!r} must be a number of at least 1, or a range such as '1-8'")
        return str(value)

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most replicas."""
        least, _, most = self.replicas.partition("-")
        return int(least), int(most or least)

    @staticmethod
    def of(fields: Mapping[str, Any], where: str = "") -> Deployed:
        """Check the fields of a user's file. Raises ``ValueError``; its message begins with ``where`` and names
        everything that is wrong."""
        try:
            return Deployed.model_validate(dict(fields), context={"trusted": True})
        except ValidationError as error:
            raise ValueError(f"{where}{explain(error, Deployed.model_fields)}") from error


def build(args: Mapping[str, Any] | Deployed) -> Application:
    """Build the application, for ``serve.run`` and for ``import_path: fly.extras.ray:build`` in Ray's configuration.

    Raises ``ValueError`` for fields that are unknown or wrong.
    """
    deployed = args if isinstance(args, Deployed) else Deployed.of(args, "args of fly.extras.ray:build: ")
    settings = deployed.settings
    least, most = deployed.bounds
    cpus, gpus = share(most * deployed.ranks, deployed.cpus, deployed.gpus)

    # A replica is one actor or, with several ranks, a placement group of one actor per rank, on one node if they fit.
    actor = {"num_cpus": cpus, "num_gpus": gpus}
    options: dict[str, Any] = {"ray_actor_options": actor}
    if deployed.ranks > 1:
        bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
        options.update(placement_group_bundles=[bundle] * deployed.ranks, placement_group_strategy="PACK")
    if least == most:
        options["num_replicas"] = most
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=least, max_replicas=most, target_ongoing_requests=deployed.target_open
        )
    kwargs = {"num_fallback_replicas": _FALLBACKS} if deployed.route == "conversation" else {}
    replica = serve.deployment(Replica).options(
        name="replica",
        max_ongoing_requests=deployed.max_ongoing,
        max_queued_requests=settings.max_waiting,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTERS[deployed.route], request_router_kwargs=kwargs
        ),
        # Ray checks the health of replicas, and replaces one whose engine has stopped.
        health_check_period_s=5,
        health_check_timeout_s=30,
        # A replica that is removed has --drain-timeout seconds to finish its requests.
        graceful_shutdown_timeout_s=settings.drain_timeout + _READING,
        graceful_shutdown_wait_loop_s=0.5,
        **options,
    )

    # The gateway holds no model. A single one runs on the head node, beside Ray's proxy. Without this node there is no
    # cluster, so the gateway survives every other loss.
    place: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}}
    if deployed.gateways > 1:
        place = {"ray_actor_options": {"num_cpus": 0}, "max_replicas_per_node": 1}
    gateway = serve.deployment(Gateway).options(
        name="gateway",
        num_replicas=deployed.gateways,
        max_ongoing_requests=settings.max_connections,
        graceful_shutdown_timeout_s=settings.drain_timeout + 2 * _READING,
        graceful_shutdown_wait_loop_s=0.5,
        **place,
    )
    return gateway.bind(settings, deployed.retries, replica.bind(deployed.setup, settings, deployed.ranks))
