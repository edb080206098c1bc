"""A checkpoint in Hugging Face's layout: a directory with ``config.json``, safetensors, tokenizer and settings."""

from __future__ import annotations

import json
import os.path
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as RawTokenizer

from fly.models.added_tokens import added_tokens
from fly.models.checkpoint import Checkpoint, Stored, join_names
from fly.models.config import CheckpointError, LlamaConfig, read_json

__all__ = ["Directory"]

_INDEX = "model.safetensors.index.json"
_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Tables that old exporters saved with the weights. The decoder computes them itself.
_DERIVED = (".rotary_emb.inv_freq",)


class Directory(Checkpoint):
    """A checkpoint in a directory."""

    @cached_property
    def raw(self) -> dict[str, Any]:
        path = self.path / "config.json"
        if not path.exists():
            raise CheckpointError(f"{path}: not found; a checkpoint directory needs a config.json")
        return read_json(path)

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        tensors: dict[str, Stored] = {}
        for file in self.weight_files():
            for key, stored in _tensors(file).items():
                if key in tensors:
                    raise CheckpointError(f"{file}: tensor {key} is stored twice")
                if not key.endswith(_DERIVED):
                    tensors[key] = stored
        if self.config.traits.fused:
            tensors = dict(part for key, stored in tensors.items() for part in _parts(key, stored, self.config))
        if odd := sorted(key for key, stored in tensors.items() if stored.dtype is None):
            kinds = sorted({tensors[key].kind for key in odd})
            raise CheckpointError(f"{self.path}: {join_names(odd)} are stored as {kinds}; choices: {[*_DTYPES]}")
        return tensors

    def settings(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name)

    def place_of(self, name: str) -> str:
        return str(self.path / name)

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer.json").exists()

    def raw_tokenizer(self) -> RawTokenizer:
        return self._tokenizer[0]

    @property
    def special_names(self) -> dict[str, str]:
        return self._tokenizer[1]

    @cached_property
    def _tokenizer(self) -> tuple[RawTokenizer, dict[str, str]]:
        """The tokenizer with the tokens that all files of the directory add, and its special tokens by their names."""
        raw, settings = self._saved_tokenizer(), self.settings(_TOKEN_FILES[0])
        try:
            names, tokens = added_tokens(raw, settings, *map(self.settings, _TOKEN_FILES[1:]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            files = [name for name in _TOKEN_FILES if (self.path / name).exists()]
            raise CheckpointError(f"{self.path}: the tokens in {files} cannot be read ({error!r})") from error
        new = [token.content for token in tokens if raw.token_to_id(token.content) is None]
        raw.add_tokens(tokens)
        # Leave out new tokens that the model has no embedding for, so that texts which spell them can be computed.
        rows = self.settings("config.json").get("vocab_size")
        beyond = [text for text in new if isinstance(rows, int) and (raw.token_to_id(text) or 0) >= rows]
        if beyond:
            message = (
                f"the model has {rows} tokens, and no embedding for the added tokens {beyond}: they stay plain text"
            )
            warnings.warn(f"{self.path}: {message}", stacklevel=2)
            raw = self._saved_tokenizer()
            raw.add_tokens([token for token in tokens if token.content not in beyond])
        raw.encode_special_tokens = bool(settings.get("split_special_tokens"))
        return raw, names

    def _saved_tokenizer(self) -> RawTokenizer:
        file = self.path / "tokenizer.json"
        try:
            return RawTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{file}: not a readable tokenizer ({error})") from error

    def templates(self) -> dict[str, str]:
        files = {file.stem: file for file in (self.path / "additional_chat_templates").glob("*.jinja")}
        files["default"] = self.path / "chat_template.jinja"
        return {name: file.read_text("utf-8") for name, file in files.items() if file.exists()}

    def weight_files(self) -> list[Path]:
        """List the files of the weights. Raises ``CheckpointError`` if one is missing."""
        index, files = self.path / _INDEX, [self.path / "model.safetensors"]
        if index.exists():
            try:
                listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                inside = {name: self._inside(name) for name in listed}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index}: not a safetensors index ({error!r})") from error
            if outside := sorted(name for name, file in inside.items() if file is None):
                raise CheckpointError(f"{index}: names files outside the directory: {outside}")
            files = sorted({file for file in inside.values() if file is not None})
        if missing := [str(file.relative_to(self.path)) for file in files if not file.exists()]:
            raise CheckpointError(f"{index if index.exists() else self.path}: weight files are missing: {missing}")
        return files

    def _inside(self, name: str) -> Path | None:
        """Return the path of a file in the directory, however an index spells it; None if it is not inside. Links are
        not followed, since the hub's cache consists of links."""
        folder = os.path.abspath(self.path)
        file = Path(os.path.normpath(os.path.join(folder, name)))
        return self.path / file.relative_to(folder) if file.is_relative_to(folder) and file != Path(folder) else None


def _parts(key: str, stored: Stored, config: LlamaConfig) -> Iterator[tuple[str, Stored]]:
    """Split a fused matrix of a file into the matrices that it joins; yield any other tensor as it is."""
    parts = config.fused_rows.get(module := key.split(".")[-2] if "." in key else "", {})
    if not parts or stored.shape[0] != sum(parts.values()):  # ``check_tensors`` reports a wrong shape
        yield key, stored
        return
    row_nbytes, at = stored.nbytes // stored.shape[0], stored.offset
    for part, rows in parts.items():
        shape, size = (rows, *stored.shape[1:]), row_nbytes * rows
        yield key.replace(f".{module}.", f".{part}."), replace(stored, offset=at, nbytes=size, shape=shape)
        at += size


def _tensors(file: Path) -> dict[str, Stored]:
    """List the tensors of a safetensors file. The library checks that each of them lies within the file."""
    try:
        with safe_open(file, framework="np"), open(file, "rb") as stream:  # torch would map the file once more
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file ({error})") from error
    tensors = {}
    for key, entry in header.items():
        if key != "__metadata__":
            start, stop = entry["data_offsets"]
            shape, kind = tuple(entry["shape"]), entry["dtype"]
            tensors[key] = Stored(file, 8 + size + start, stop - start, shape, kind, _DTYPES.get(kind))
    return tensors
