"""Checkpoints by their names on the Hugging Face hub, against a small stand-in of it on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from fly.drafts import SingleDraft, parse_draft
from fly.models import CheckpointError, load_model, save_model
from fly.models.bundled import names_a_checkpoint, resolve_checkpoint
from fly.models.hub import HubName, hub_name
from tests.ggufs import write_gguf
from tests.toys import random_llama

COMMITS = {"main": "a" * 40, "v2": "b" * 40}


class Hub(ThreadingHTTPServer):
    """Repositories, each a folder of files by commit; what was asked for is in ``asked``."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.root, self.asked = root, list[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        if (match := re.fullmatch(r"/api/models/(\w+/[\w-]+)(?:/(revision|tree)/([\w%]+).*)?", path)) is not None:
            self._about(match[1], match[2], match[3] or "main")
        elif (match := re.fullmatch(r"/(\w+/[\w-]+)/resolve/(\w+)/(.+)", path)) is not None:
            self._file(*match.groups())
        else:
            self._refuse(404, "EntryNotFound")

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None: ...

    def _about(self, repo: str, what: str | None, revision: str) -> None:
        if not (self.server.root / repo).is_dir():
            return self._refuse(404, "RepoNotFound")
        commit = COMMITS.get(revision, revision)
        folder = self.server.root / repo / commit
        if not folder.is_dir():
            return self._refuse(404, "RevisionNotFound")
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        names = [str(file.relative_to(folder)) for file in files]
        if what == "tree":
            body: Any = [
                {
                    "type": "file",
                    "path": name,
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(name.encode()).hexdigest(),
                }
                for name, file in zip(names, files)
            ]
        else:
            body = {"id": repo, "modelId": repo, "sha": commit, "siblings": [{"rfilename": name} for name in names]}
            body |= {"private": False, "tags": [], "downloads": 0, "likes": 0}
        self._send(json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str) -> None:
        if repo.startswith("gated/"):
            return self._refuse(403, "GatedRepo")
        commit = COMMITS.get(revision, revision)
        if not (file := self.server.root / repo / commit / name).is_file():
            return self._refuse(404, "EntryNotFound")
        data = file.read_bytes()
        self._send(data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit})

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status)

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    for repo, commit, seed in [("me/small", "main", 1), ("me/small", "v2", 2), ("gated/small", "main", 1)]:
        folder = root / repo / COMMITS[commit]
        save_model(random_llama(seed), folder, torch.float32)
        for unwanted in ("pytorch_model.bin", "original/consolidated.safetensors", "model.fp16.safetensors", "a.gguf"):
            (folder / unwanted).parent.mkdir(exist_ok=True)
            (folder / unwanted).write_bytes(b"not to be fetched")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
        for older in ("special_tokens_map.json", "added_tokens.json"):
            (folder / older).write_text("{}")
    files = root / "me/files-GGUF" / COMMITS["main"]
    (files / "q").mkdir(parents=True)
    write_gguf(random_llama(1), files / "q" / "small-f32.gguf", Kind.F32)
    (files / "other.gguf").write_bytes(b"not to be fetched")
    (root / "me/bin" / COMMITS["main"]).mkdir(parents=True)
    (root / "me/bin" / COMMITS["main"] / "config.json").write_text("{}")
    (root / "me/bin" / COMMITS["main"] / "pytorch_model.bin").write_bytes(b"")
    server = Hub(root)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


RESOLVE = """
import json, sys
from fly.models.bundled import resolve_checkpoint
assert "huggingface_hub" not in sys.modules
found = []
for name in sys.argv[1:]:
    try:
        found.append(str(resolve_checkpoint(name)))
    except ValueError as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""


def resolved(hub: str, home: Path, *names: str, **variables: str) -> tuple[list[str], str]:
    """What each name stands for, or why it cannot be had, in a process of its own; and what it printed."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    variables = {**plain, "HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **variables}
    command = [sys.executable, "-c", RESOLVE, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def online(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str], str]:
    """A cache, what was fetched into it (or why not), and what was printed."""
    home = tmp_path_factory.mktemp("home")
    names = ["me/small", "me/small@v2", "me/files-GGUF/q/small-f32.gguf", "gated/small", "me/nothing", "me/small@v9"]
    names += ["me/files-GGUF", "me/files-GGUF/q/none.gguf", "me/bin"]
    found, printed = resolved(hub.url, home, *names)
    return home, dict(zip(names, found)), printed


def test_only_what_a_checkpoint_is_made_of_is_fetched(hub: Hub, online: tuple[Path, dict[str, str], str]) -> None:
    _, found, printed = online
    files = {str(path.relative_to(found["me/small"])) for path in Path(found["me/small"]).rglob("*") if path.is_file()}
    tokens = {"special_tokens_map.json", "added_tokens.json"}
    assert files == {"config.json", "model.safetensors", "additional_chat_templates/rag.jinja"} | tokens
    assert not any(re.search(r"\.bin$|consolidated|fp16|a\.gguf|other\.gguf", path) for path in hub.asked)
    assert "Fetching" in printed  # a bar shows how far it is


def test_names_revisions_and_files_are_what_they_say(online: tuple[Path, dict[str, str], str]) -> None:
    found = online[1]
    first, second, file = (load_model(found[name], device="cpu") for name in list(found)[:3])
    assert torch.equal(first.norm.weight, random_llama(1).norm.weight)
    assert torch.equal(second.norm.weight, random_llama(2).norm.weight)
    assert torch.equal(file.layers[0].self_attn.qkv_proj.weight, first.layers[0].self_attn.qkv_proj.weight)  # type: ignore[union-attr,operator]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gated/small", r"'gated/small' .* is gated: accept its terms at http.*/gated/small, and log in .*HF_TOKEN"),
        ("me/nothing", r"'me/nothing' .* does not exist, or you have no access: .* nor a bundled checkpoint"),
        ("me/small@v9", r"'me/small' .*, revision 'v9' does not exist: the repository has no such branch"),
        ("me/files-GGUF", r"has no config.json; its GGUF files: .*'me/files-GGUF/q/small-f32.gguf'\]"),
        ("me/files-GGUF/q/none.gguf", r"has no file 'q/none.gguf'; its GGUF files: .*small-f32"),
        ("me/bin", r"has no weights in safetensors; its files: \['config.json', 'pytorch_model.bin'\]"),
    ],
)
def test_what_cannot_be_downloaded_is_reported(
    name: str, message: str, online: tuple[Path, dict[str, str], str]
) -> None:
    assert re.match(f"CheckpointError: .*{message}", online[1][name])


def test_what_is_in_the_cache_needs_no_network(hub: Hub, online: tuple[Path, dict[str, str], str]) -> None:
    home, found, _ = online
    before = len(hub.asked)
    offline, _ = resolved(hub.url, home, "me/small", "me/small@v2", "me/other", HF_HUB_OFFLINE="1")
    assert offline[:2] == [found["me/small"], found["me/small@v2"]] and len(hub.asked) == before
    assert re.search(r"'me/other' .*offline mode is on \(HF_HUB_OFFLINE\), and the cache lacks files of it", offline[2])
    away, _ = resolved("http://127.0.0.1:9", home, "me/small", "me/other")
    assert away[0] == found["me/small"]
    assert re.search(r"'me/other' .*http://127.0.0.1:9 cannot be reached, .*check the network", away[1])


@given(
    st.tuples(*[st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)] * 2),
    st.none() | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}(/[a-z0-9]{1,3}){0,2}", fullmatch=True),
    st.none() | st.from_regex(r"([a-z0-9]{1,4}/){0,2}[A-Za-z0-9._-]{1,8}\.gguf", fullmatch=True),
)
def test_names_are_read_as_they_are_written(repo: tuple[str, str], revision: str | None, file: str | None) -> None:
    slashed = revision is not None and "/" in revision
    if repo[1].endswith(".gguf") or (slashed and (file is not None or revision.endswith(".gguf"))):
        return  # the former is a path, the latter has two readings
    name = HubName("/".join(repo), revision, file)
    assert hub_name(str(name)) == name


@pytest.mark.parametrize("text", ["flyy", "./a/b", "/a/b", "../a", "a/b/c", "a/x.gguf", "a/b@", "a b/c", "a//b", ""])
def test_other_texts_are_no_names(text: str) -> None:
    assert hub_name(text) is None and not names_a_checkpoint(text)


def test_drafts_are_named_the_same_way() -> None:
    for text in ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "me/small@v2", "me/files-GGUF/q/small-f32.gguf"):
        strategy = parse_draft(text)
        assert isinstance(strategy, SingleDraft)
        assert type(parse_draft(f"ngram + model({text}, k=3)")).__name__ == "CascadeDraft"


def test_what_names_nothing_lists_what_was_tried() -> None:
    with pytest.raises(
        CheckpointError, match=r"'fly-tagret' is neither a bundled checkpoint \(did you mean 'fly-target'"
    ):
        resolve_checkpoint("fly-tagret")
