"""A census folder: its modules, the names it lists, and its models, ready to be run and compared."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

SEED = 7
"""Every run of a model starts from this seed; another one tells whether the model draws random numbers."""


class FolderError(Exception):
    """The folder is no census; the message says what is missing."""


class NotMeasured(Exception):
    """The model cannot be built here, or is none that is asked about: nothing is learnt about attn_pass.

    Attributes:
        status: "unbuildable", "not exportable" ..., which its row gets.
    """

    def __init__(self, status: str, why: str = "") -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class Census:
    """The modules of a census folder.

    Attributes:
        path: the folder.
        counting: its `census.py`: count_graph, compare, tensors, sharpen.
        zoo: its `zoo.py`: names, build, family, is_control.
    """

    path: Path
    counting: Any
    zoo: Any

    def names(self, only: str = "", listed: Path | None = None) -> list[str]:
        """Names in `listed` (models.txt if None) that match the regular expression `only`, in the zoo's order."""
        wanted = set((listed or self.path / "models.txt").read_text().split())
        return [name for name in self.zoo.names() if name in wanted and re.search(only, name)]

    def facts(self, name: str) -> dict[str, Any]:
        """What every row says about the model it is about."""
        return {"name": name, "family": self.zoo.family(name), "control": self.zoo.is_control(name)}

    def counted(self, modules: Iterable[torch.nn.Module]) -> dict[str, int]:
        """Attention in graphs, by the census's own walk: "hand" (softmax between products), "sdpa", "loose", ..."""
        total: dict[str, int] = {}
        for module in modules:
            for what, number in self.counting.count_graph(module)[0].items():
                total[what] = total.get(what, 0) + number
        return total

    def compared(self, expected: list[torch.Tensor], got: list[torch.Tensor]) -> dict[str, Any]:
        """{"ok", "rel_l2", "max_abs", ...}; ok is a relative L2 error below 1e-4 or an absolute one below 1e-5."""
        return dict(self.counting.compare(expected, got))


def open_census(path: Path) -> Census:
    """Import the modules of a census folder.

    Raises:
        FolderError: the folder lacks one of its files.
    """
    missing = [name for name in ("census.py", "zoo.py", "models.txt") if not (path / name).is_file()]
    if missing:
        raise FolderError(f"{path} is no census folder: it has no {', '.join(missing)}")
    if str(path.resolve()) not in sys.path:
        sys.path.insert(0, str(path.resolve()))
    return Census(path, importlib.import_module("census"), importlib.import_module("zoo"))


@dataclass
class Subject:
    """A model in eval mode with its inputs, and what it gives in eager mode under no_grad."""

    census: Census
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: list[torch.Tensor]
    deterministic: bool

    def run(self, function: Callable[..., Any], seed: int = SEED) -> list[torch.Tensor]:
        """All tensors that `function` returns for the inputs, copied: outputs may share memory with inputs."""
        return _outputs(self.census, function, self.args, self.kwargs, seed)

    def call(self, function: Callable[..., Any]) -> Callable[[], Any]:
        """What is timed: `function`, called with the inputs."""
        return partial(function, *self.args, **self.kwargs)

    def judged(self, got: list[torch.Tensor], expected: list[torch.Tensor] | None = None) -> dict[str, Any]:
        """The comparison with eager (or with `expected`); "ok" is None if a model that draws numbers differs."""
        verdict = self.census.compared(self.expected if expected is None else expected, got)
        if not self.deterministic and not verdict["ok"]:
            verdict["ok"] = None
        return verdict


def prepared(
    census: Census,
    name: str,
    keep_cache: bool = False,
    refused: Callable[[Mapping[str, Any]], str] | None = None,
    dropout: float | None = None,
) -> Subject:
    """Build a model and run it, unless its inputs are ``refused``, with the status of its row.

    The weights are sharpened, as the census does it: libraries initialise attention to be nearly uniform, which would
    hide a wrong scale or mask. `keep_cache=False` asks transformers models for no key-value cache, which is no output
    torch.export knows. ``dropout`` replaces every probability of dropout that the model's configuration has.

    Raises:
        NotMeasured: it cannot be built or run, or is refused.
    """
    torch.set_num_threads(1)
    try:
        model, inputs = census.zoo.build(name, dropout=dropout)
        if refused is not None and (status := refused(inputs if isinstance(inputs, Mapping) else {})):
            raise NotMeasured(status)
        model.eval()
        if not keep_cache:
            _without_cache(model)
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        with torch.no_grad():
            _sharpen(census, model, args, kwargs)
        expected = _outputs(census, model, args, kwargs)
        again = _outputs(census, model, args, kwargs, SEED + 1)
    except NotMeasured:
        raise
    except Exception as error:
        raise NotMeasured("unbuildable", error_text(error)) from error
    return Subject(census, model, args, kwargs, expected, same_tensors(expected, again))


def error_text(error: BaseException, length: int = 600) -> str:
    """Type and message of an exception, cut to `length`."""
    return f"{type(error).__name__}: {error}"[:length]


def _outputs(
    census: Census, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seed: int = SEED
) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    with torch.no_grad():
        return [tensor.clone() for tensor in census.counting.tensors(function(*args, **kwargs))]


def same_tensors(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether two runs gave the same numbers, NaN as any."""
    same = (x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(some, others))
    return len(some) == len(others) and all(same)


def _sharpen(census: Census, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Sharper weights, unless the model does not survive them."""
    saved = copy.deepcopy(model.state_dict())
    census.counting.sharpen(model)
    try:
        outputs = _outputs(census, model, args, kwargs)
        survived = all(bool(t.isfinite().all()) for t in outputs if t.is_floating_point())
    except Exception:
        survived = False
    if not survived:
        model.load_state_dict(saved)


def _without_cache(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False
