"""Collected cases that must be fast, the pass and stock: `python -m bench cases --cases FOLDER [--json FILE]`.

A case is a Python file that starts with its issue's number, with META (kind, issue, dynamic_shapes), `make(device)` and
perhaps `better(device)`, the form a specialist writes for the same inputs. A case with dynamic shapes is packaged.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from bench.harness.programs import Built, Program, Setting

TITLE = "Collected cases that must be fast"
KIND = "must_be_fast"


def load(path: Path) -> ModuleType:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location(f"case_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Dynamo looks for a function's globals
    spec.loader.exec_module(module)
    return module


def paths(folder: Path) -> list[Path]:
    """Files of cases.

    Raises:
        FileNotFoundError: there are none.
    """
    files = [path for path in sorted(folder.glob("*.py")) if path.stem[:6].isdigit()]
    if not files:
        raise FileNotFoundError(f"no cases in {folder} (files such as 151287_name.py); give their folder with --cases")
    return files


def _make(path: Path, device: str) -> Built:
    torch.manual_seed(0)
    module, args, kwargs = load(path).make(device)
    assert not kwargs, f"{path.stem}: keyword inputs are not measured"
    return module.eval(), args


def _better(path: Path, device: str) -> nn.Module:
    module: nn.Module = load(path).better(device)[0]
    return module.eval()


def _program(path: Path) -> Program | None:
    case = load(path)
    meta: dict[str, Any] = case.META
    if meta["kind"] != KIND:
        return None
    shapes = getattr(case, meta["dynamic_shapes"])() if "dynamic_shapes" in meta else None
    return Program(
        path.stem,
        partial(_make, path),
        partial(_better, path) if hasattr(case, "better") else None,
        "the case's better form",
        dynamic_shapes=shapes,
        tolerance=meta.get("tol", 1e-5),
    )


def is_packaged(program: Program) -> bool:
    """Whether it is about AOTInductor."""
    return program.dynamic_shapes is not None


def programs(setting: Setting) -> list[Program]:
    """All of the folder; the first three in quick runs."""
    made = [program for path in paths(Path(setting.folder)) if (program := _program(path)) is not None]
    return made[:3] if setting.quick else made
