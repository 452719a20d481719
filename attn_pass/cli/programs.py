"""The model that a command is given: ``file.py:function`` or ``module:function``, a function that builds it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from attn_pass.cli.failing import fail


def built(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) from the function that ``file.py:function`` or ``module:function`` names."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        file = target.removesuffix(":")
        there = f"; {_instead(_loaded(file), 'net')}" if file.endswith(".py") and Path(file).is_file() else ""
        fail(f"{target!r} does not name a function: give file.py:function or module:function{there}")
    function = _builder(_loaded(where), where, name)
    try:
        result = function()
    except (Exception, SystemExit) as error:
        fail(f"{target} raised {type(error).__name__}: {error}", error)
    return _unpacked(target, result)


def _builder(module: ModuleType, where: str, name: str) -> Callable[[], Any]:
    """The function of this name, if it can be called as a command calls it: without arguments."""
    import torch

    function = getattr(module, name, None)
    if isinstance(function, torch.nn.Module):
        fail(f"{where}:{name} is a model without inputs: {_instead(module, name)}")
    if not callable(function):
        fail(f"{where} has no function {name!r}: {_instead(module, 'net')}")
    if needed := _needed(function):
        call = f"{name}({', '.join(needed)})" if isinstance(function, type) else name
        fail(f"{where}:{name} takes {', '.join(needed)}, but is called without arguments: {_instead(module, call)}")
    return cast(Callable[[], Any], function)


def _instead(module: ModuleType, model: str) -> str:
    """What to name: a function that is there, or one to be written."""
    own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
    names = [f.__name__ for f in own if not f.__name__.startswith(("_", "<")) and not _needed(f)]
    if names:
        return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
    return f"add a function that returns a model with its inputs, such as def model(): return {model}, (x,)"


def _needed(function: Callable[..., Any]) -> list[str]:
    """The parameters that have to be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _unpacked(target: str, result: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Check what the function returned; a tensor or a list may stand for the tuple, a dict is of keyword inputs."""
    import torch

    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        fail(f"{target} returned {_kind(result)}; return (model, args) or (model, args, kwargs)")
    args = result[1]
    if len(result) == 2 and isinstance(args, Mapping):
        result, args = (result[0], (), args), ()
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple | list):
        fail(f"{target} returned {_kind(args)} as args; return a tuple of the model's positional inputs")
    kwargs = result[2] if len(result) == 3 and result[2] is not None else {}
    if not isinstance(kwargs, Mapping):
        fail(f"{target} returned {_kind(kwargs)} as kwargs; return a dict of the model's keyword inputs")
    for name in kwargs:
        if not isinstance(name, str) or name.startswith("attn_pass_"):
            fail(f"{target} returned kwargs with the key {name!r}; return a dict of the model's keyword inputs")
    return result[0], tuple(args), dict(kwargs)


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
