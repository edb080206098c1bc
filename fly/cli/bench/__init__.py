"""``fly bench``: what the modules of ``fly.bench`` measure, shown as tables, plots and JSON."""

from __future__ import annotations

import typer

from fly.cli.bench.drafts import bench_drafts
from fly.cli.bench.load import bench_batch
from fly.cli.bench.peers import bench_peers
from fly.cli.bench.plan import bench_plan
from fly.cli.bench.policy import bench_policy
from fly.cli.bench.speed import bench_speed
from fly.cli.bench.twins import bench_twins

__all__ = ["bench"]

bench = typer.Typer(help="Speed, as ratios within one run.", no_args_is_help=True)

for _command in (bench_policy, bench_drafts, bench_plan, bench_batch, bench_speed, bench_peers, bench_twins):
    bench.command(_command.__name__.removeprefix("bench_"))(_command)
