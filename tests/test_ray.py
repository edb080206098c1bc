"""Replicas on a Ray cluster of two local nodes: nothing is lost that can be saved when a replica and a node are killed.

Skipped where Ray is not installed; ``make ray-test`` installs it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ray = pytest.importorskip("ray")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402

from fly.extras.ray import Deployed, build  # noqa: E402
from fly.extras.ray.gateway import conversation, merged  # noqa: E402
from tests.serving import eventually  # noqa: E402

ASKED = {"model": "fly-target", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
FULL = 8  # as many requests as a replica takes at a time


def test_requests_of_one_conversation_have_one_name() -> None:
    first = b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}'
    later = first[:-2] + b', {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]}'
    assert conversation({}, first) == conversation({}, later) != conversation({}, first.replace(b"u", b"v"))
    assert conversation({b"authorization": b"Bearer k"}, first) != conversation({}, first)
    assert conversation({b"x-session-id": b"mine"}, first) == "mine"
    long = b'{"prompt": "' + b"x" * 2000
    assert conversation({}, long + b'1"}') == conversation({}, long + b'2"}')
    assert all(conversation({}, wrong) == "" for wrong in (b"", b"{", b"[]", b"{}", b'{"messages": [1]}', b"\xff"))


def test_metrics_of_replicas_become_one_text() -> None:
    text = merged({"a": b"# TYPE x_total counter\nx_total 1\n", "b": b"# TYPE x_total counter\nx_total 2\n"}).decode()
    assert text.count("# TYPE") == 1 and 'x_total{replica="a"} 1.0' in text and 'x_total{replica="b"} 2.0' in text


@pytest.mark.parametrize("wrong", [{"replicas": "0"}, {"replicas": "3-2"}, {"replica": 1}, {"route": "luck"}])
def test_wrong_fields_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Deployed.of(wrong)


def test_the_manifest_for_kuberay_is_understood() -> None:
    """By Ray's own schema, and by ``build``'s."""
    path = Path(__file__).parent.parent / "docs" / "how-to" / "kubernetes" / "rayservice.yaml"
    config = yaml.safe_load(yaml.safe_load(path.read_text())["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "fly.extras.ray:build"
    assert Deployed.of(application.args).bounds == (1, 8)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Any, Any, str]]:
    """Two nodes of one machine, a replica on each, and the address of the head's proxy."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = found.add_node(num_cpus=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(found.address)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build({"setup": {"draft": "fly-draft"}, "replicas": 2, "cpus": 1, "max_ongoing": FULL}), name="fly")
    yield found, second, f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
    found.shutdown()


def counts(url: str) -> dict[str, int]:
    """The gateway's counts."""
    lines = [line.split() for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("fly:gateway")]
    found = {
        name.removeprefix("fly:gateway_").removesuffix("_total"): int(float(n)) for name, n in lines if "_total" in name
    }
    return found


def replicas() -> dict[str, int]:
    """Process ids of the replicas, by the id of their node."""
    found = {}
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["name"].startswith("SERVE_REPLICA::fly#replica#"):
            actor = ray.get_actor(**named)
            where = lambda self: (ray.get_runtime_context().get_node_id(), os.getpid())  # noqa: E731
            node, pid = ray.get(actor.__ray_call__.remote(where))
            found[node] = pid
    return found


async def load(url: str, count: int, stop: Any) -> Counter[str]:
    """Send requests, half of them streams, eight at a time; call ``stop`` when a quarter has been answered."""
    kinds: Counter[str] = Counter()
    tickets = asyncio.Semaphore(8)

    async def ask(number: int) -> None:
        async with tickets:
            asked = {**ASKED, "prompt": f"{number} and", "stream": number % 2 == 0}
            answer = await client.post(f"{url}/v1/completions", json=asked)
            if answer.status_code != 200:
                kinds[answer.json()["error"]["code"]] += 1
            elif asked["stream"]:
                # A stream ends as a whole or with an error, and never with both.
                whole, broken = answer.text.count("data: [DONE]"), answer.text.count("replica_lost")
                assert (whole, broken) in ((1, 0), (0, 1))
                kinds["whole" if whole else "broken off"] += 1
            else:
                kinds["whole"] += len(answer.json()["choices"])
            if number == count // 4:
                await asyncio.to_thread(stop)

    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(ask(number) for number in range(count)))
    return kinds


def by_replica(text: str, *names: str) -> Counter[str]:
    """The sums of some metrics, by replica."""
    found: Counter[str] = Counter()
    for name, labels, number in re.findall(r"^([\w:]+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        if name in names and (replica := re.search(r'replica="(\w+)"', labels)):
            found[replica[1]] += int(float(number))
    return found


def finished(url: str) -> Counter[str]:
    """How many completions each replica has finished."""
    return by_replica(httpx.get(f"{url}/metrics").text, "vllm:request_success_total")


def test_a_full_replica_gets_no_request_although_it_has_the_cache(cluster: tuple[Any, Any, str]) -> None:
    """Of twelve requests of one conversation at once, its replica takes eight and the other one four."""
    _, _, url = cluster

    async def at_once(count: int) -> tuple[set[int], list[int], int]:
        async with httpx.AsyncClient(timeout=120, headers={"x-session-id": "one"}) as client:
            asked = {**ASKED, "prompt": "one beginning", "max_tokens": 900}
            asking = [asyncio.create_task(client.post(f"{url}/v1/completions", json=asked)) for _ in range(count)]
            await asyncio.sleep(0.5)
            # What is asked of full replicas meanwhile is answered.
            health, metrics = await asyncio.gather(client.get(f"{url}/health"), client.get(f"{url}/metrics"))
            assert "fly:gateway_requests_total" in metrics.text
            shown = by_replica(metrics.text, "vllm:request_success_total")
            return {each.status_code for each in await asyncio.gather(*asking)}, sorted(shown), health.status_code

    before = finished(url)
    assert len(before) == 2
    statuses, shown, _ = asyncio.run(at_once(FULL + 4))
    assert statuses == {200} and shown == sorted(before)
    assert eventually(lambda: sorted((finished(url) - before).values()) == [4, FULL]), (before, finished(url))
    statuses, shown, health = asyncio.run(at_once(2 * FULL + 4))  # four of them wait for room
    assert statuses == {200} and shown == sorted(before) and health == 200


def test_a_replica_and_a_node_are_killed_under_load(cluster: tuple[Any, Any, str]) -> None:
    found, second, url = cluster
    assert httpx.get(f"{url}/ready").status_code == 200
    done = finished(url)
    same = [httpx.post(f"{url}/v1/completions", json={**ASKED, "prompt": "one beginning"}) for _ in range(4)]
    assert len({each.json()["choices"][0]["text"] for each in same}) == 1

    def served() -> list[int]:
        return sorted(after - done[replica] for replica, after in finished(url).items())

    assert eventually(lambda: served() == [0, 4])  # one replica had them all

    head = ray.get_runtime_context().get_node_id()
    victim = replicas()[head]
    kinds = asyncio.run(load(url, 60, lambda: os.kill(victim, signal.SIGKILL)))
    print("replica killed:", dict(kinds), counts(url))
    assert sum(kinds.values()) == 60 and set(kinds) <= {"whole", "broken off"}

    before = counts(url)["requests"]
    kinds = asyncio.run(load(url, 60, lambda: found.remove_node(second, allow_graceful=False)))
    print("node killed:", dict(kinds), counts(url))
    assert sum(kinds.values()) == 60 and set(kinds) <= {"whole", "broken off"}
    assert counts(url)["requests"] == before + 60
