"""The model that a command is given: ``file.py:function`` or ``module:function``, a function that builds it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from attn_pass.cli.failing import fail


def built(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) from the function that ``file.py:function`` or ``module:function`` names."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        fail(f"{target!r} does not name a function: give file.py:function or module:function")
    function = getattr(_loaded(where), name, None)
    if not callable(function):
        fail(f"{where} has no function {name!r}: define one that returns (model, args) or (model, args, kwargs)")
    try:
        made = function()
    except (Exception, SystemExit) as error:
        fail(f"{target} raised {type(error).__name__}: {error}", error)
    return _unpacked(target, made)


def _unpacked(target: str, made: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Check what the function returned; a single tensor or a list may stand for the tuple of arguments."""
    import torch

    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        fail(f"{target} returned {_kind(made)}; return (model, args) or (model, args, kwargs)")
    args = made[1]
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        fail(f"{target} returned {_kind(args)} as args; return a tuple of the model's positional inputs")
    kwargs = made[2] if len(made) == 3 and made[2] is not None else {}
    if not isinstance(kwargs, Mapping):
        fail(f"{target} returned {_kind(kwargs)} as kwargs; return a dict of the model's keyword inputs")
    for name in kwargs:
        if not isinstance(name, str) or name.startswith("attn_pass_"):
            fail(f"{target} returned kwargs with the key {name!r}; return a dict of the model's keyword inputs")
    return made[0], tuple(args), dict(kwargs)


def _loaded(where: str) -> ModuleType:
    """The module at a path ending in .py, or of a dotted name looked up from the current directory."""
    path = Path(where)
    if path.suffix == ".py":
        if not path.is_file():
            fail(f"there is no file {where} (looked from {Path.cwd()})")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            fail(f"{where} cannot be imported as Python")
        module = importlib.util.module_from_spec(spec)
        folder = str(path.resolve().parent)
    else:
        spec, module, folder = None, None, str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if spec is None or spec.loader is None or module is None:
            return importlib.import_module(where)
        sys.modules.setdefault(path.stem, module)  # dataclasses and pickling look the module up by name
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        fail(f"{where} cannot be imported: {type(error).__name__}: {error}", error)
    return module


@contextmanager
def in_mode(model: Any, training: bool | None) -> Iterator[None]:
    """Gradients and the model's mode for training or inference; None changes nothing."""
    import torch

    if training is None:
        yield
        return
    if isinstance(model, torch.nn.Module):
        model.train(training)
    with torch.set_grad_enabled(training):
        yield


def _kind(value: Any) -> str:
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{type(value).__name__}{size}"
