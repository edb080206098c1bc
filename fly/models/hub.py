"""Checkpoints on the Hugging Face hub, downloaded to the cache of the hub library.

A name is ``owner/name``. ``@revision`` after it selects a revision other than ``main``, and ``/file.gguf`` at the end
selects a GGUF file: ``Qwen/Qwen2.5-Coder-1.5B-Instruct``, ``owner/name@v1.0``, ``owner/name-GGUF/model-q8_0.gguf``. The
library's environment variables apply: ``HF_TOKEN``, ``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and others. The
library is imported only when something has to be fetched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fly.models.config import CheckpointError

__all__ = ["HubName", "fetch", "hub_name"]

# The files of a checkpoint. Others, such as weights in other formats, are not fetched.
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "mask_embedding.pt",  # of a draft head, which is refused for it
)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
_LOGIN = "log in with 'hf auth login' or the variable HF_TOKEN"
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(@(?P<revision>[^\s@]+?))?(/(?P<file>(?:[^\s@/]+/)*[^\s@/]+\.gguf))?")


@dataclass(frozen=True)
class HubName:
    repo: str
    revision: str | None = None
    file: str | None = None  # a GGUF file in it

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}{f'/{self.file}' if self.file else ''}"


def hub_name(text: str) -> HubName | None:
    """Parse a hub name. Return None if the text does not have the form of one; the hub is not asked."""
    match = _NAME.fullmatch(text)
    if match is None or text.split("/")[1].endswith(".gguf"):  # owner/file.gguf is a path
        return None
    return HubName(match["repo"], match["revision"], match["file"])


def fetch(name: HubName, weights: bool = True) -> Path:
    """Download the files that are not in the cache yet, and return the path of the directory or GGUF file. If
    ``weights`` is False, a directory may lack the weights.

    Raises ``CheckpointError`` that names the repository, the reason and the remedy if it cannot be downloaded.
    """
    from httpx2 import HTTPError
    from huggingface_hub import constants, errors, snapshot_download

    where = f"{name.repo!r} on the Hugging Face hub" + (f", revision {name.revision!r}" if name.revision else "")
    site = constants.ENDPOINT
    try:
        folder = Path(snapshot_download(name.repo, revision=name.revision, allow_patterns=_patterns(name, weights)))
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{where} is gated: accept its terms at {site}/{name.repo}, and {_LOGIN}") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{where} does not exist, or you have no access: check the name; if it is private, {_LOGIN}. There is no "
            "such directory here, nor a bundled checkpoint of this name"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{where} does not exist: the repository has no such branch, tag or commit") from error
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError, errors.OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            reason = "offline mode is on (HF_HUB_OFFLINE), and the cache lacks files of it; fetch it once online"
        else:
            reason = (
                f"{site} cannot be reached, and the cache lacks files of it ({constants.HF_HUB_CACHE}). There is no "
                "such directory or file here, nor a bundled checkpoint of this name; check the network, or the name"
            )
        cause = error.__cause__ or error
        raise CheckpointError(f"{where}: {reason} ({type(cause).__name__}: {_first_line(cause)})") from error
    except (HTTPError, errors.HfHubHTTPError, errors.FileMetadataError, errors.XetDownloadError) as error:
        raise CheckpointError(
            f"{where} cannot be fetched from {site}: {_first_line(error)}; try again; files fetched so far are kept"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{where}: {_first_line(error)}") from error
    if name.file is not None:
        if not (folder / name.file).exists():
            raise CheckpointError(f"{where} has no file {name.file!r}{_instead(name)}")
        return folder / name.file
    described = (folder / "config.json").exists()
    if not described or (weights and not any(folder.glob("model*.safetensors"))):
        lacking = "weights in safetensors" if described else "config.json"
        raise CheckpointError(f"{where} has no {lacking}{_instead(name)}")
    return folder


def _patterns(name: HubName, weights: bool) -> list[str]:
    if name.file is None:
        return [*_FILES, *(_WEIGHTS if weights else ())]
    first = re.fullmatch(r"(?P<stem>.*)-00001-of-(?P<count>\d{5})\.gguf", name.file)
    parts = f"{_literal(first['stem'])}-?????-of-{first['count']}.gguf" if first else ""
    return [_literal(name.file), *([parts] if parts else [])]


def _literal(text: str) -> str:
    """Return a glob pattern that matches only this text."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def _instead(name: HubName) -> str:
    """Return the end of an error message, which lists a repository's GGUF files."""
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        files = sorted(HfApi().list_repo_files(name.repo, revision=name.revision))
    except (HTTPError, HfHubHTTPError, OSError):
        return ""
    gguf_files = [f"{HubName(name.repo, name.revision)}/{file}" for file in files if file.endswith(".gguf")]
    if gguf_files:
        return f"; its GGUF files: {gguf_files}"
    return f"; its files: {files}" if files else ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
