"""The disk cache: small JSON records by key, one file each, written so that no reader sees half of one."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import platformdirs

from attn_pass.errors import AttnPassWarning

VARIABLE = "ATTN_PASS_CACHE_DIR"


def folder() -> Path:
    """Where records lie: ``$ATTN_PASS_CACHE_DIR``, else ``attn_pass`` in the user's cache folder on this system."""
    if chosen := os.environ.get(VARIABLE, "").strip():
        return Path(chosen)
    path = platformdirs.user_cache_path("attn_pass", appauthor=False)
    if path.parts[:1] == ("~",):  # which would be a folder of that name
        raise RuntimeError("the home folder of this user is not known")
    return path


def key_of(facts: Any) -> str:
    """A name for facts that JSON can hold: the same facts have the same name in every process."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def package_sources() -> str:
    """A hash of this package's source files."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(p for kind in ("*.py", "*.hpp") for p in root.rglob(kind)):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def load(key: str) -> Any | None:
    """The record, or None if there is none that can be read."""
    try:
        return json.loads((folder() / f"{key}.json").read_text())
    except (OSError, ValueError, RuntimeError):  # the last if the home folder is not known
        return None


def save(key: str, record: Any) -> bool:
    """Stores a record; whether it could. A cache that cannot be written is one warning: the value is measured again."""
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
    except (OSError, RuntimeError) as error:
        _warn_once(f"{type(error).__name__}: {error}")
        return False
    return True


@functools.cache
def _warn_once(why: str) -> None:
    warnings.warn(
        f"attn_pass: what was measured could not be stored ({why}), so it will be measured again; set {VARIABLE} to a "
        "folder that can be written",
        AttnPassWarning,
        stacklevel=3,
    )


def drop(key: str) -> bool:
    """Deletes a record; False if there is none, or it cannot be deleted."""
    try:
        (folder() / f"{key}.json").unlink()
    except (OSError, RuntimeError):
        return False
    return True
