"""Reads the report of `aot_compile` from a .pt2 package, where it is stored in the package's own metadata.

AOTInductor writes ``aot_inductor.metadata`` into the package, and its loaders, in Python and C++, hand it out
(``get_metadata``). The report is one entry of it, as JSON.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

from attn_pass.errors import PackageError
from attn_pass.report.record import Report

KEY = "attn_pass"
_SETTING = "aot_inductor.metadata"
_FILE = "_metadata.json"
_UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)
_MOST_BYTES = 64 << 20  # of a metadata file: a package may come from anywhere


def with_report(patches: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Inductor's settings with the report among the metadata of the package."""
    return {**patches, _SETTING: {**(patches.get(_SETTING) or {}), KEY: report.to_json(indent=None)}}


def package_report(path: str | os.PathLike[str]) -> Report:
    """The report of `aot_compile` that is stored in a package. Loads no model code.

    Args:
        path: the .pt2 file.

    Raises:
        PackageError: there is no package at this path, or attn_pass did not write it.
    """
    name = os.fspath(path)
    try:
        with zipfile.ZipFile(path) as archive:
            files = (f for f in archive.infolist() if f.filename.endswith(_FILE) and f.file_size <= _MOST_BYTES)
            stored_metadata = (json.loads(archive.read(f)) for f in files)
            stored = next(
                (metadata[KEY] for metadata in stored_metadata if isinstance(metadata, dict) and KEY in metadata), None
            )
    except FileNotFoundError:
        raise PackageError(f"there is no file {name!r}") from None
    except _UNREADABLE as error:
        raise PackageError(f"{name!r} is not an AOTInductor package: {error}") from error
    if stored is None:
        raise PackageError(
            f"{name!r} holds no report of attn_pass: attn_pass.aot_compile did not write it, or an older version did"
        )
    try:
        return Report.from_dict(json.loads(stored))
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise PackageError(f"the report in {name!r} was not written by attn_pass: {error}") from error
