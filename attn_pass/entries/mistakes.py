"""Natural mistakes in a call of `explain`, `check`, `benchmark` or `aot_compile`, and what each should have been."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from attn_pass.errors import AttnPassWarning, OptionError
from attn_pass.options import OPTION_NAMES, unknown_name

_PREFIX = "attn_pass_"
_ALSO_MODELS = ("device", "targets", "rules", "dynamic")  # a model may well have keywords like these
_NO_OTHERS = frozenset(OPTION_NAMES) - {*_ALSO_MODELS, "runtime", "numerics", "verify", "tune", "timeline"}
"""The options that no other backend of torch.compile has."""
_OPTIONS_GO = {
    "explain": ('attn_pass_options={{"{}": {}}}', "attn_pass_options={...}"),
    "benchmark": ('attn_pass_options={{"{}": {}}}', "attn_pass_options={...}"),
    "check": ("backend=attn_pass.wrap('inductor', {}={})", "backend=attn_pass.wrap('inductor', ...)"),
    "aot_compile": ('options={{"{}": {}}}', "options={...}"),
}
"""How options are given to each entry: one by name, and all of them."""


@dataclass(frozen=True)
class UserCall:
    """The inputs that a call passed on to the model."""

    entry: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    error: str = ""  # what it failed with

    @property
    def options(self) -> list[str]:
        """The keywords that were meant for attn_pass, as their names say."""
        return [name for name in self.kwargs if name in (*OPTION_NAMES, "options")]


@dataclass(frozen=True)
class Mistake:
    """What a call looks like where it was made, and what to do instead."""

    looks_so: Callable[[UserCall], bool]
    hint: Callable[[UserCall], str]


def _is_inputs(value: object) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return any(isinstance(item, torch.Tensor) for item in items)


def _unpacked(call: UserCall, inputs: str) -> str:
    if call.entry == "aot_compile":  # which takes a tuple and a dict itself
        inputs = inputs.replace("**inputs", "kwargs=inputs").replace("*", "")
    return f"attn_pass.{call.entry}(model, {inputs})"


def _options_go(call: UserCall) -> str:
    by_name, of_all = _OPTIONS_GO[call.entry]
    name, value = call.options[0], call.kwargs[call.options[0]]
    shown_value = repr(value) if isinstance(value, str | bool | tuple) else "..."
    return of_all if name == "options" else by_name.format(name, shown_value)


MISTAKES = (
    Mistake(
        lambda call: "Cache'> in output" in call.error and "use_cache" not in call.kwargs,
        lambda call: "The model returns its cache: give it use_cache=False, as a keyword input, if it need not.",
    ),
    Mistake(
        lambda call: len(call.args) == 2 and _is_inputs(call.args[0]) and isinstance(call.args[1], Mapping),
        lambda call: f"The inputs are a tuple and a dict here: unpack them, {_unpacked(call, '*args, **kwargs')}.",
    ),
    Mistake(
        lambda call: len(call.args) == 1 and _is_inputs(call.args[0]),
        lambda call: (
            f"The only input is a {type(call.args[0]).__name__} here: if it holds several inputs, unpack it, "
            f"{_unpacked(call, '**inputs' if isinstance(call.args[0], Mapping) else '*inputs')}."
        ),
    ),
    Mistake(
        lambda call: bool(call.options),
        lambda call: (
            f"{', '.join(call.options)} went to the model, as all keywords do: options of attn_pass are given as "
            f"{_options_go(call)}."
        ),
    ),
    Mistake(
        lambda call: call.entry == "explain" and "dynamic" in call.kwargs,
        lambda call: "dynamic went to the model, as all keywords do: explain takes attn_pass_dynamic=True.",
    ),
)


def hint(entry: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: object = "") -> str:
    """What was perhaps meant by a call whose model failed, as a line of its own; "" if it looks as it should.

    ``error`` is what it failed with.
    """
    call = UserCall(entry, args, kwargs, str(error))
    return next((f"\n{mistake.hint(call)}" for mistake in MISTAKES if mistake.looks_so(call)), "")


def check_keywords(entry: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Checks that no keyword for the model is a misspelt one of the entry.

    Raises:
        OptionError: one begins with ``attn_pass_``; the nearest of the entry's own is named.
    """
    accepted = [name for name in inspect.signature(entry).parameters if name.startswith(_PREFIX)]
    for name in kwargs:
        if name.startswith(_PREFIX):
            raise unknown_name(f"keyword of attn_pass.{entry.__name__}", name, accepted)


def check_training(value: object) -> None:
    """Checks ``attn_pass_training``: a word would count as yes, whatever it says.

    Raises:
        OptionError: it is neither True nor False nor None.
    """
    if value is not None and not isinstance(value, bool):
        raise OptionError(f"attn_pass_training got {value!r} ({type(value).__name__}); accepted: True, False or None")


def check_seconds(value: object) -> None:
    """Checks ``attn_pass_seconds``, before anything is compiled.

    Raises:
        OptionError: it is no positive number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(
            f"attn_pass_seconds got {value!r} ({type(value).__name__}); accepted: a number of seconds above 0"
        )


def warn_swallowed(entry: str, model: Any, kwargs: Mapping[str, Any]) -> None:
    """One warning if a model that takes any keyword was given options that were meant for attn_pass."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        named = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    call = UserCall(entry, (), {n: v for n, v in kwargs.items() if n not in named and n not in _ALSO_MODELS})
    if call.options:
        warnings.warn(f"attn_pass.{entry}: {hint(entry, (), call.kwargs).strip()}", AttnPassWarning, stacklevel=3)


def refuse_no_backend(backend: object, taker: str) -> None:
    """Raises for what is callable, or looks like a backend, and is none.

    Raises:
        OptionError: it is a module of Python (the package itself), or a model.
    """
    if isinstance(backend, ModuleType):
        raise OptionError(
            f"{taker} got the module {backend.__name__!r} as the backend: the backend is attn_pass.backend, or by name "
            '"attn_pass"'
        )
    if isinstance(backend, torch.nn.Module):
        raise OptionError(
            f"{taker} takes a backend, and got a model, {type(backend).__name__}: write torch.compile(model, "
            "backend=attn_pass.wrap('aot_eager')); to compile with Inductor, backend=attn_pass.backend"
        )


def refuse_own_options(options: object, backend: str) -> None:
    """Raises for options of attn_pass in the ``options`` of torch.compile, which go to a wrapped backend.

    Raises:
        OptionError: an option has a name that no other backend has.
    """
    own = [name for name in options if name in _NO_OTHERS] if isinstance(options, Mapping) else []
    if own:
        raise OptionError(
            f"the options of torch.compile go to the wrapped backend {backend!r}, which has no {', '.join(own)}: give "
            f"options of attn_pass to wrap, as attn_pass.wrap({backend!r}, {own[0]}=...)"
        )


def refuse_inputs(kwargs: object, unexpected: Iterable[str]) -> None:
    """Raises for inputs of `aot_compile` that are not its tuple and its dict.

    Raises:
        OptionError: a second input stands where the keywords are; or options are keywords of the call.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionError(
            f"aot_compile got {type(kwargs).__name__} as kwargs, which are a dict: give all positional inputs as one "
            "tuple, aot_compile(model, (x, y))"
        )
    for name in unexpected:
        if name in OPTION_NAMES or name == "attn_pass_options":
            instead = f"options={{{name!r}: ...}}" if name in OPTION_NAMES else "options={...}"
            raise OptionError(f"aot_compile takes options of attn_pass as a dict: {instead} instead of {name}=...")
        raise OptionError(
            f"aot_compile has no keyword {name!r}: inputs by name are given as kwargs={{{name!r}: ...}}, options of "
            "Inductor as inductor_configs={...}"
        )
