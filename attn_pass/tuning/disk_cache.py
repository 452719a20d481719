"""The disk cache: small JSON records by key, one file each, written so that no reader sees half of one."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

VARIABLE = "ATTN_PASS_CACHE_DIR"


def folder() -> Path:
    """Where records lie: ``$ATTN_PASS_CACHE_DIR``, else ``attn_pass`` in the user's cache folder."""
    if given := os.environ.get(VARIABLE, "").strip():
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache"
    return Path(cache) / "attn_pass"


def key_of(facts: Any) -> str:
    """A name for facts that JSON can hold: the same facts have the same name in every process."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def load(key: str) -> Any | None:
    """The record, or None if there is none that can be read."""
    try:
        return json.loads((folder() / f"{key}.json").read_text())
    except (OSError, ValueError, RuntimeError):  # the last if the home folder is not known
        return None


def save(key: str, record: Any) -> None:
    """Stores a record. A cache that cannot be written is not an error: the value is measured again then."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder(), suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(record, file, indent=1)
            os.replace(name, folder() / f"{key}.json")
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, RuntimeError):
        return


def drop(key: str) -> bool:
    """Deletes a record; False if there is none, or it cannot be deleted."""
    try:
        (folder() / f"{key}.json").unlink()
    except (OSError, RuntimeError):
        return False
    return True
