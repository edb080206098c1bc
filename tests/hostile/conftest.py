"""What the attacks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.served import ALICE, MALLORY, NOTES, ROWS, Served, served


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two clients, with an access log."""
    directory = tmp_path_factory.mktemp("keyed")
    keys = [word for key in (ALICE, MALLORY) for word in ("--api-key", key)]
    with served(directory, *keys, "--access-log", "--max-open", "2") as server:
        yield server
        assert server.get("/health")[0] == 200 and "Traceback" not in server.said()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line an attack."""
    if ROWS or NOTES:
        head = f"{'attack':32} {'probes: median':>14} {'worst':>7} {'hi: worst':>10} {'completion':>10} {'MB':>6}"
        terminalreporter.write("\n" + "\n".join([f"{head}  answers", *ROWS, *NOTES]) + "\n")
