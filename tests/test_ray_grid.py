"""Evaluations and answers spread over a Ray cluster of two local nodes: actors, a node and the driver are killed.

Skipped where Ray is not installed; ``make ray-test`` installs it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ray = pytest.importorskip("ray")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from ray.cluster_utils import Cluster  # noqa: E402

from fly import LLM, SamplingParams  # noqa: E402
from fly.extras.eval import Plan, check_folder, remaining, report, score_run, write_run  # noqa: E402
from fly.extras.eval.records import read_records  # noqa: E402
from fly.extras.ray.grid import Grid  # noqa: E402
from fly.extras.ray.pool import Pool  # noqa: E402
from fly.extras.train.answers import generate_answers  # noqa: E402
from tests.test_eval import PLAN, finish, without_times  # noqa: E402

MORE = Plan.of({**PLAN, "limit": 6, "tasks": [{"task": "bundled-middle", "max_tokens": 40}, PLAN["tasks"][1]]})


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Any, Any]]:
    """Two nodes of one machine, and the second of them."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = found.add_node(num_cpus=1)
    ray.init(found.address)
    yield found, second
    ray.shutdown()
    found.shutdown()


class Counting:
    """Returns the items that it gets, with what was given at the start; dies, fails or refuses where it is told to."""

    def __init__(self, given: int) -> None:
        self.given = given

    def load(self) -> None:
        if self.given < 0:
            raise ValueError("there is no such model")

    def work(self, items: list[Any], context: Any) -> Iterator[Any]:
        for item in items:
            if item == "die":
                os._exit(1)
            if item == "fail":
                raise ValueError("it cannot be decoded")
            if isinstance(item, Path) and not item.exists():
                item.touch()
                os._exit(1)
            yield self.given, str(item), context


def made(given: int = 7) -> Any:
    return ray.remote(Counting).options(num_cpus=1).remote(given)


def test_a_pool_gives_what_a_lost_actor_leaves_to_another(cluster: tuple[Any, Any], tmp_path: Path) -> None:
    pool = Pool(2)
    pieces = {"a": [1, 2, tmp_path / "once", 3], "b": [4, 5], "c": [6]}
    found = list(pool.run(made, pieces, len))
    assert sorted(item for _, item, _ in found) == sorted(str(item) for items in pieces.values() for item in items)
    # The piece went on where it was broken off: two items were left then.
    assert {item: left for _, item, left in found}["3"] == 2 and pool.lost == 1 and "1 lost" in pool.status
    with pytest.raises(ValueError, match="b: it cannot be decoded"):
        list(Pool(2).run(made, {"a": [1], "b": [2, "fail"]}, len))
    with pytest.raises(ValueError, match="b: 3 actors were lost with it"):
        list(Pool(2).run(made, {"a": [1], "b": [2, "die"]}, len))
    with pytest.raises(ValueError, match="there is no such model"):
        list(Pool(2).run(lambda: made(-1), {"a": [1]}, len))


def evaluate(plan: Plan, folder: Path, stop: Any = None, after: int = 0) -> Grid:
    """Spread a run, and call ``stop`` with the actor of the record that is the ``after``-th."""
    check_folder(plan, folder)
    records, grid, seen = read_records(folder), Grid("auto"), Counter[str]()

    def advance(record: dict[str, Any]) -> None:
        seen[record["actor"]] += 1
        if sum(seen.values()) == after:
            stop(record["actor"])

    write_run(folder, records, grid.decode(plan, remaining(plan, records), records.texts), advance)
    score_run(plan, folder)
    print(dict(seen), grid.status)
    return grid


def kill_one() -> None:
    """Kill the process of one of our actors that decode."""
    status = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/stat")}
    parents = {pid: int(text.rpartition(")")[2].split()[1]) for pid, text in status.items()}

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    named = [pid for pid in parents if b"ray::_DecodingActor" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(next(filter(ours, named)), signal.SIGKILL)


def test_a_grid_ends_with_the_report_of_one_machine(
    cluster: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, second = cluster
    finish(MORE, tmp_path / "whole")
    whole = without_times(report([tmp_path / "whole"]))
    lines = len(read_records(tmp_path / "whole").completions)

    # Undisturbed: every problem has one actor, and all speeds compare.
    assert evaluate(MORE, tmp_path / "grid").lost == 0
    shown = report([tmp_path / "grid"])
    assert without_times(shown) == whole
    assert all(table.timed == table.rows[0].problems for table in shown.tables)
    assert max(table.makers for table in shown.tables) == 2 and any("decoded by 2 actors" in n for n in shown.notes)

    # An actor is killed in the middle of a problem, which another one ends.
    grid = evaluate(MORE, tmp_path / "killed", lambda _: kill_one(), 13)
    shown = report([tmp_path / "killed"])
    assert without_times(shown) == whole and grid.lost == 1
    assert len((tmp_path / "killed" / "records.jsonl").read_text().splitlines()) == lines + 1  # nothing was done twice

    # A node is lost.
    grid = evaluate(MORE, tmp_path / "node", lambda _: found.remove_node(second, allow_graceful=False), 13)
    assert without_times(report([tmp_path / "node"])) == whole and grid.lost >= 1


def test_the_same_command_goes_on_after_a_killed_driver(cluster: tuple[Any, Any], tmp_path: Path) -> None:
    found, _ = cluster
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(MORE.model_dump(mode="json")), encoding="utf-8")
    asked = ["eval", tmp_path / "plan.yaml", "--out", tmp_path / "run", "--ray", found.address]
    with subprocess.Popen([sys.executable, "-m", "fly", *map(str, asked)], stderr=subprocess.DEVNULL) as driver:
        path = tmp_path / "run" / "records.jsonl"
        while driver.poll() is None and (not path.exists() or path.read_text().count("\n") < 7):
            time.sleep(0.1)
        driver.kill()
    assert remaining(MORE, read_records(tmp_path / "run"))
    subprocess.run([sys.executable, "-m", "fly", *map(str, asked)], check=True)
    finish(MORE, tmp_path / "whole")
    assert without_times(report([tmp_path / "run"])) == without_times(report([tmp_path / "whole"]))


def test_answers_for_a_head_are_those_of_one_machine(cluster: tuple[Any, Any]) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=12)
    options = {"model": "fly-tiny", "dtype": "float32"}
    prompts = [(number, [number, 2, 3]) for number in range(150)]
    own = list(generate_answers(LLM(**options), prompts, params))
    assert list(Grid("auto").answer(options, params, prompts)) == own
