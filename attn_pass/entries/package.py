"""What a package holds beside code: the report of `aot_compile`, and the types that have to be there to load it.

AOTInductor writes ``aot_inductor.metadata`` into the package, and its loaders, in Python and C++, hand it out
(``get_metadata``). The report is one entry of it, as JSON.
"""

from __future__ import annotations

import json
import os
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram

from attn_pass.compat import children_of
from attn_pass.errors import AttnPassWarning, PackageError
from attn_pass.report.record import Report

KEY = "attn_pass"
_SETTING = "aot_inductor.metadata"
_FILE = "_metadata.json"
_UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)
_ALWAYS_THERE = ("builtins", "collections", "torch", "types")  # what torch can load has these
_MOST_BYTES = 64 << 20  # of a metadata file: a package may come from anywhere


def with_report(patches: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Inductor's settings with the report among the metadata of the package."""
    from torch._inductor import config

    given = patches.get(_SETTING, config.aot_inductor.metadata) or {}
    return {**patches, _SETTING: {**given, KEY: report.to_json(indent=None)}}


def warn_of_types(program: ExportedProgram) -> None:
    """One warning where a package of this program loads only where a library has been imported.

    torch stores how the inputs and results are nested by the names of their types, which are looked up while loading:
    a `ModelOutput` of transformers is unknown until the module that defines it is imported.
    """
    kinds: dict[str, set[str]] = {}
    for kind in _types_of([program.call_spec.in_spec, program.call_spec.out_spec]):
        if kind.__module__.partition(".")[0] not in _ALWAYS_THERE:
            kinds.setdefault(kind.__module__, set()).add(kind.__name__)
    if kinds:
        names = ", ".join(sorted(name for type_names in kinds.values() for name in type_names))
        warnings.warn(
            f"attn_pass: the model takes or returns {names}, so that the package loads only in a process that has run "
            f"`import {', '.join(sorted(kinds))}`. To load it anywhere, wrap the model in a module that takes and "
            "returns tensors, tuples, lists or dicts",
            AttnPassWarning,
            stacklevel=4,
        )


def _types_of(specs: Sequence[Any]) -> Iterator[type]:
    """The types of containers in these and everything below them."""
    for spec in specs:
        if spec is None or spec.is_leaf():
            continue
        if isinstance(spec.type, type):
            yield spec.type
        yield from _types_of(children_of(spec))


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
