"""Short hashes of files, for identities that follow what a file holds and not where it lies."""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path

MEGABYTE = 2**20
# What a model is loaded from: weights, configurations, tokenizers and chat templates.
MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".model", ".txt", ".jinja")


def file_digest(path: Path) -> str:
    """Twelve hex digits of the SHA-256 of a file's bytes; read again only when its time or size has changed."""
    return _of_file(*_state(path), whole=True)


def model_digest(path: Path) -> str:
    """Twelve hex digits for a checkpoint folder, or for one file of weights (GGUF).

    A folder counts by name, size and content of the files a model is loaded from (`MODEL_SUFFIXES`, and those in
    `chat_templates/`). Of a file above one megabyte only the size and the first and last megabyte are read: an edit
    in the middle that leaves the size is not seen.
    """
    if not path.is_dir():
        return _of_file(*_state(path), whole=False)
    files = sorted(p for p in (*path.glob("*"), *path.glob("chat_templates/*")) if p.suffix in MODEL_SUFFIXES)
    parts = [[str(p.relative_to(path)), _of_file(*_state(p), whole=False)] for p in files if p.is_file()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _state(path: Path) -> tuple[str, int, int]:
    state = path.stat()
    return os.path.abspath(path), state.st_mtime_ns, state.st_size


@lru_cache(maxsize=4096)
def _of_file(path: str, _mtime_ns: int, size: int, *, whole: bool) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        if whole or size <= MEGABYTE:
            while block := file.read(MEGABYTE):
                found.update(block)
        else:
            found.update(f"{size} ".encode())
            found.update(file.read(MEGABYTE))
            file.seek(-MEGABYTE, os.SEEK_END)
            found.update(file.read(MEGABYTE))
    return found.hexdigest()[:12]
