"""Beyond one machine, on Ray: replicas behind one address (``build``), and evaluations spread over a cluster.

Needs the extra ``flyspec[ray]``. ``fly/cli`` imports it only within commands; Ray Serve imports ``fly.ray:build``.
"""

from fly.ray.application import Deployed, build

__all__ = ["Deployed", "build"]
