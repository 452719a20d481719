"""The forms in PyTorch's own test of its attention patterns, collected from that file without running its checks."""

from __future__ import annotations

import importlib
import importlib.util
import re
import unittest
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bench.suites import cases

# Names of torch's test helpers that the file asks for and other releases of torch call otherwise, and what they said.
RENAMED: tuple[tuple[str, str, Callable[[], bool]], ...] = (
    ("torch.testing._internal.inductor_utils", "HAS_CUDA", torch.cuda.is_available),
)
_SUFFIX = re.compile(r"_(cpu|cuda|gpu|xpu)$")


class SuiteError(Exception):
    """The file cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Form:
    """One call of the peers' check, or of a function they compile themselves.

    Attributes:
        test: its test, without "test_" and the device.
        number: which of the test's calls it is, from 1.
        inputs: the arguments, without the one for dropout.
        takes_training: whether the function takes "training" after the inputs.
        draws: whether it draws random numbers in training.
        trains: whether the peers check it in training too.
        gradients: the grad mode it is called in outside training; its inputs need no gradient there.
        static: whether the batch is a number; otherwise dimension 0 of the first three inputs is dynamic.
        fused: whether the peers' own patterns are to match.
        named: whether a test class of this device names the test.
    """

    test: str
    number: int
    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    takes_training: bool
    draws: bool
    trains: bool
    gradients: bool
    static: bool
    fused: bool
    named: bool


@dataclass(frozen=True)
class NotRun:
    """A test that gave no form, and why."""

    test: str
    static: bool
    why: str


def load(path: Path) -> ModuleType:
    """The peers' file as a module.

    Raises:
        SuiteError: it is not there, or imports what is not installed.
    """
    if not path.is_file() or path.suffix != ".py":
        raise SuiteError(f"no file {path}; give test/inductor/test_fused_attention.py of a PyTorch checkout")
    for module, name, value in RENAMED:
        installed = importlib.import_module(module) if importlib.util.find_spec("expecttest") else None
        if installed is not None and not hasattr(installed, name):
            setattr(installed, name, value())
    try:
        return cases.load(path)
    except ImportError as error:
        raise SuiteError(
            f"{path.name} cannot be imported: {error}. torch's test helpers need `pip install expecttest`"
        ) from error


def collect(module: ModuleType, device: str) -> tuple[list[Form], list[NotRun]]:
    """All forms of the file on this device: those its classes name, then those that only other devices' classes name.

    Raises:
        SuiteError: the file has no class with a `_check_common` of its own.
    """
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    templates = [c for c in classes if "_check_common" in vars(c)]
    if not templates:
        raise SuiteError("the file has no class with a `_check_common` of its own: is it test_fused_attention.py?")
    forms: list[Form] = []
    others: list[NotRun] = []
    for template in templates:
        ours = [c for c in classes if issubclass(c, template) and getattr(c, "device", None) == device]
        claimed: set[str] = set()
        for cls in ours:
            for name in sorted(n for n in dir(cls) if n.startswith("test_")):
                claimed.add(_plain(name))
                _collect(module, cls, name, True, forms, others)
        rest = [n for n in vars(template) if n.startswith("_test_") and _plain(n) not in claimed]
        for static in (True, False):
            cls = type("Rest", (template,), {"device": device, "use_static_shapes": static})
            for name in rest:
                _collect(module, cls, name, False, forms, others)
    return forms, others


def _plain(name: str) -> str:
    return _SUFFIX.sub("", name.removeprefix("_").removeprefix("test_"))


def _collect(module: ModuleType, cls: type, name: str, named: bool, forms: list[Form], others: list[NotRun]) -> None:
    # It is never run: without the set-up of torch's, which changes its configuration.
    case: Any = cls.__new__(cls)
    unittest.TestCase.__init__(case)
    static = bool(getattr(case, "use_static_shapes", True))
    collected: list[Form] = []

    def keep(function: Callable[..., Any], inputs: Any, **facts: Any) -> None:
        facts |= {"gradients": torch.is_grad_enabled(), "static": static, "named": named}
        collected.append(Form(_plain(name), len(collected) + 1, function, tuple(inputs), **facts))

    def check(function: Callable[..., Any], args1: Any = None, *positional: Any, **asked: Any) -> None:
        if positional:
            raise SuiteError("the file calls its check in a way that is not known here; read peer_forms.py")
        dropout = asked.get("has_dropout", False)
        if args1 is None:
            kind = asked.get("dtype", torch.float)
            args1 = [torch.randn((4, 2, 16, 32), device=case.device, dtype=kind) for _ in range(3)]
        keep(
            function,
            args1,
            takes_training=dropout,
            draws=dropout and not asked.get("override_check_equal", False),
            trains=asked.get("check_train", True),
            fused=asked.get("has_fuse_pattern", True),
        )

    def compiles(function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        keep(function, inputs, takes_training=False, draws=False, trains=False, fused=False)

    case._check_common = check
    torch.manual_seed(0)
    try:
        with _recording(module, case.device, compiles):
            getattr(case, name)()
    except unittest.SkipTest as skipped:
        others.append(NotRun(_plain(name), static, f"skipped by the peers: {skipped}"))
    except SuiteError:
        raise
    except Exception as error:  # a form of another device
        others.append(NotRun(_plain(name), static, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"))
    forms += collected


@contextmanager
def _recording(module: ModuleType, device: str, compiles: Callable[..., None]) -> Iterator[None]:
    """`torch.compile` keeps the function and what it is called with; "cuda" is `device`."""

    def stand_in(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        if function is None:
            return stand_in

        def called(*inputs: Any) -> Any:
            compiles(function, inputs)
            return function(*inputs)

        return called

    with ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.object(torch, "compile", stand_in))
        if hasattr(module, "run_and_get_code"):
            code = unittest.mock.patch.object(module, "run_and_get_code", lambda f, *inputs: (f(*inputs), ("",)))
            stack.enter_context(code)
        stack.enter_context(_Here(device))
        yield


class _Here(TorchFunctionMode):
    """Tensors that the file makes on a CUDA device are made on this one."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = self.device
        return func(*args, **kwargs)
