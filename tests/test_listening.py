"""Tests that ``fly serve`` refuses an address on which it cannot listen, before it loads the model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fly.serve.listening import require_free
from tests.commands import plain, run


@pytest.fixture
def busy() -> Iterator[int]:
    """A port at which another server listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_busy_port_is_told_before_the_model_is_loaded(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("fly.cli.serving.LLM.from_config", load)
    result = run("serve", "--port", str(busy))
    assert result.exit_code == 2, result.output
    assert f"port {busy} of '127.0.0.1': it is in use; take another by --port" in plain(result.output)


def test_of_several_ranks_the_first_tells_it(busy: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*torchrun, "-m", "fly.serve", "--model", "fly-target", "--draft", "ngram", "--port", str(busy)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = plain(ran.stderr)
    assert ran.returncode != 0 and said.count(f"port {busy} of '127.0.0.1': it is in use") == 1, ran.stderr
    assert "fly/serve/listening.py" not in said, ran.stderr  # a line and no traceback


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])
def test_a_free_port_stays_free(host: str) -> None:
    """Also one whose last server has just ended, though its connections linger."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # first, so that the server's side lingers
            assert client.recv(1) == b""
    require_free(host, port)
    require_free(host, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("192.0.2.7", r"port 8123 of '192\.0\.2\.7': this machine does not have this address; --host takes"),
        ("no-such-host.invalid", "--host 'no-such-host.invalid' is not an address of this machine"),
    ],
)
def test_an_address_of_another_machine_is_refused(host: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        require_free(host, 8123)
