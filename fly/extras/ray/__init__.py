"""Beyond one machine, on Ray: replicas behind one address (``build``), and evaluations spread over a cluster.

Needs the extra ``flyspec[ray]``. ``fly/cli`` imports it only within commands; Ray Serve imports
``fly.extras.ray:build``.
"""

from fly.extras.ray.application import Deployed, build

__all__ = ["Deployed", "build"]
