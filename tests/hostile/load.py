"""Attacks that take time: what one client asks for holds up nobody else.

Each attack (``attacks.py``) runs in a process of its own, while this one asks for /health and /metrics, and another
client for its own. What a server has to hold: 50 probes of a median of 0.1 seconds and none above 0.5, another client's
requests answered, memory in bounds, and peace when the attack is over. Limits of time are for a machine that does
nothing else (``SLACK``).
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from pathlib import Path

import pytest

from tests.hostile.attacks import ATTACKS, MODEL, Target, answer
from tests.hostile.served import ALICE, MALLORY, NOTES, ROWS, SLACK, complete, eventually, say_hi, served, timed

PROBES, MEDIAN, WORST = 50, 0.1 * SLACK, 0.5 * SLACK  # seconds
PATIENCE = 60.0 * SLACK  # for all probes of one attack
# The answers that an attack may get: what is right, and what says that this client has enough.
EXPECTED = {
    "wrong_entries": {400}, "small_entries": {200, 400}, "escapes": {400}, "tool_calls": {400},
    "tokenized": {200, 429, 503}, "detokenized": {200, 400, 429}, "echoes": {200, 429}, "forms": {200, 400, 429},
    "completions": {200, 429}, "large_answers": {200}, "large_streams": {200},
}  # fmt: skip
LOAD = [*((name, 1) for name in ATTACKS), ("tokenized", 3), ("forms", 3), ("small_entries", 3), ("completions", 3)]


@pytest.mark.parametrize(("name", "clients"), LOAD, ids=[f"{name}-{clients}" for name, clients in LOAD])
def test_others_are_answered(tmp_path: Path, name: str, clients: int) -> None:
    """While this goes on: probes, and the requests of another client."""
    keys = [f"{MALLORY}-{number}" for number in range(clients)]
    options = [word for key in (ALICE, *keys) for word in ("--api-key", key)]
    with served(tmp_path, *options) as server:
        alice = Target(server.address, ALICE)
        assert say_hi(alice)[1] == 200 == complete(alice)[1]
        context = multiprocessing.get_context("fork")
        seen = context.Array("L", 1000, lock=False)
        targets = [Target(server.address, key, f"127.0.0.{2 + n}", seen) for n, key in enumerate(keys)]
        attackers = [context.Process(target=ATTACKS[name], args=(target,), daemon=True) for target in targets]
        for attacker in attackers:
            attacker.start()
        try:
            time.sleep(1)
            probes, greeted, completed, end = [], [], [], time.monotonic() + PATIENCE
            for number in range(PROBES):
                if time.monotonic() > end:  # it has not held by far
                    break
                probes.append(timed(lambda: server.get("/health" if number % 2 else "/metrics")[0]))  # noqa: B023
                if number % 10 == 5:
                    greeted.append(say_hi(alice))
                    # beside forms, with one of her own that is new
                    form = {"guided_regex": f"[a-z]{{2}}{number}"} if name == "forms" else {}
                    completed.append(complete(alice, **form))
                time.sleep(0.1)
            if name.startswith("large"):  # until one of them was written
                while not sum(seen) and time.monotonic() < end:
                    probes.append(timed(lambda: server.get("/health")[0]))
                    time.sleep(0.1)
        finally:
            for attacker in attackers:
                attacker.kill()
                attacker.join()
        answers = {status: count for status, count in enumerate(seen) if count}
        median, worst = statistics.median(seconds for seconds, _ in probes), max(seconds for seconds, _ in probes)
        hi, completion = (max((seconds for seconds, _ in each), default=PATIENCE) for each in (greeted, completed))
        ROWS.append(
            f"{name + (f' x {clients}' if clients > 1 else ''):32} {median:14.3f} {worst:7.3f} {hi:10.3f} "
            f"{completion:10.3f} {server.megabytes:6.0f}  {answers}"
        )
        print(f"\n{ROWS[-1]}", flush=True)
        assert {status for _, status in probes} == {200} and median <= MEDIAN and worst <= WORST
        assert len(probes) >= PROBES
        assert {status for _, status in (*greeted, *completed)} == {200} and hi < 3 * SLACK and completion < 10 * SLACK
        assert not answers.keys() - EXPECTED.get(name, set()) - {0}, answers
        assert server.megabytes < 2000
        # and then there is peace
        assert eventually(lambda: server.running == 0, 60)
        seconds, status = say_hi(alice)
        assert status == 200 and seconds < SLACK and "Traceback" not in server.said()


def test_the_first_form_is_as_fast_as_the_second(tmp_path: Path) -> None:
    with served(tmp_path, "--api-key", ALICE) as server:
        alice = Target(server.address, ALICE)
        assert complete(alice)[1] == 200

        def ask(title: str) -> tuple[float, int]:
            schema = {"title": title, "type": "object", "properties": {"a": {"type": "integer"}}}
            body = {"model": MODEL, "prompt": "x", "max_tokens": 8, "guided_json": schema}
            return timed(lambda: answer(alice, "/v1/completions", body)[0])

        first, second = ask("first"), ask("second")
        NOTES.append(f"first form {first[0]:.3f} s, second {second[0]:.3f} s")
        assert first[1] == second[1] == 200 and first[0] < second[0] + 0.3 * SLACK
