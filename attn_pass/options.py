"""The options of attn_pass: their fields, their checks, and how they are separated from Inductor's."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from attn_pass.errors import OptionError

Choose = Literal["cheapest", "fused", "first"]
Numerics = Literal["default", "strict"]
Verify = Literal["off", "graph", "kernel"]
OnError = Literal["warn", "raise"]
JoinProjections = Literal["constants", "parameters", "off"]
LinearLayers = Literal["best", "off"]
Rules = tuple[tuple[str, tuple[str, ...]], ...]
LEAVE = "leave"
"""In a rule, beside the names of targets: the site is left unchanged."""
ANNOTATION = "attn_pass"
"""The key of `torch.fx.traceback.annotate` under which a program names targets for its attention, as in a rule."""
Runner = Literal["inductor", "hook", "other"]
"""Who runs a rewritten graph: Inductor, with attn_pass's configuration and the original as a fallback; Inductor, with
attn_pass as one of its passes; anything else (another backend, torch.export.save, the graph itself)."""


def _from_environment(variable: str, accepted: Any, default: str) -> Callable[[], Any]:
    """A default that the environment variable overrides; read whenever an Options is created, empty means unset."""

    def read() -> str:
        value = os.environ.get(variable, "").strip()
        if value and value not in get_args(accepted):
            raise OptionError(
                f"environment variable {variable}={value!r}{_nearest(value, list(get_args(accepted)))}; accepted are "
                f"{_listed(get_args(accepted))}; set it to one of these or unset it"
            )
        return value or default

    return read


@dataclass(frozen=True)
class Options:
    """All options of a user, checked on creation; hashable, and with a ``repr`` that is stable between processes.

    Attributes:
        choose: "cheapest" takes the offer with the lowest predicted time; leaving the site unchanged counts as an
            offer. "fused" takes the best fused target that accepts, whatever its predicted time (coverage checks,
            debugging). "first" takes the first of `targets` that accepts, in the given order.
            The environment variable ATTN_PASS_CHOOSE sets the default.
        numerics: "default" equals eager to the dtype's rounding wherever eager's row is defined; "strict" also keeps
            eager's result for fully masked rows, or leaves the site.
        targets: names of the allowed targets; None allows every target of the device.
        rules: the targets for particular sites: pairs of a pattern and names of targets, of which the first that
            accepts is taken, whatever its predicted time; "leave" leaves the site unchanged. A pattern ("*cross_attn",
            "modeling.py:203") is matched like a file name against the site's module path and its source line. The
            first pattern that matches applies, and overrides `choose`, `targets` and `tune`. A dict is accepted.
        poor_cases: names of the poor cases that may be applied; None allows all, an empty tuple none.
        tune: compile the best offers in a worker process and time them on inputs of the site's sizes, strides and
            dtypes, instead of using predictions; the results are cached on disk. mode="max-autotune" and
            "max-autotune-no-cudagraphs" turn it on unless it is given.
        verify: "graph" runs each site before and after the rewrite on random inputs of its shapes, strides and dtypes,
            forward and backward, and compares the results with each other and with float64. If they differ, the site
            is left, with a warning that names a script to reproduce the difference. "kernel" does the same with the
            code that Inductor generates for the rewritten site. ATTN_PASS_VERIFY sets the default.
        on_error: what a failure inside attn_pass does: "warn" leaves the site and warns once, "raise" raises.
            ATTN_PASS_ON_ERROR sets the default.
        assume_constant_buffers: buffers keep their current values, and all modules that share a compiled graph have
            equal buffers, so masks may be named by their values. Constants and non-persistent buffers of exported
            programs need no such promise.
        assume_nonempty_rows: no query has all its keys masked, so a mask with a finite fill may be boolean.
        assume_padding_unused: nobody uses rows of padding where they are in the model's result (``last_hidden_state``):
            they are zeros then, and are not computed.
        unpad: run operations that work row by row without rows of padding, where it is proved that no result depends
            on them.
        join_projections: multiply once where linear layers that make queries, keys and values have one input and that
            is predicted to be faster. "constants" does so where their weights are constants of the compiled code
            (Inductor's ``freezing``); "parameters" also under torch.compile, whose inputs they are: they are laid into
            one buffer, of which each is a slice then. "off" never does.
        linear_layers: "best" has linear layers of a graph whose attention is rewritten multiplied by another kernel
            than torch's call takes, where that was measured to be faster: on AMD's processors the CPU kernel or oneDNN,
            in inference. "off" leaves them.
        shield: keep Inductor's own attention patterns away from the softmaxes of the graph (on the CPU).
        device: decide for this device ("cuda:0", or by name, "H200") instead of the one the tensors are on. A kind
            ("cuda") of which this machine has none is the first of its table, by data sheets: an H200.
        timeline: name each site in torch's profiler: a range around the kernels that compute it, with its id and source
            line. Inductor's caches are not used then, and C++ wrappers (packages among them) have no ranges.
        runtime: decide for a runtime that the program is exported to ("onnx", "openvino", "executorch", "tensorrt"):
            attention becomes the call that its exporter translates, in the form that it runs. It comes before `device`.

    Raises:
        OptionError: a value is not accepted; the message states the given value and the accepted ones.
    """

    choose: Choose = field(default_factory=_from_environment("ATTN_PASS_CHOOSE", Choose, "cheapest"))
    numerics: Numerics = "default"
    targets: tuple[str, ...] | None = None
    rules: Rules = ()
    poor_cases: tuple[str, ...] | None = None
    tune: bool = False
    verify: Verify = field(default_factory=_from_environment("ATTN_PASS_VERIFY", Verify, "off"))
    on_error: OnError = field(default_factory=_from_environment("ATTN_PASS_ON_ERROR", OnError, "warn"))
    assume_constant_buffers: bool = False
    assume_nonempty_rows: bool = False
    assume_padding_unused: bool = False
    unpad: bool = True
    join_projections: JoinProjections = "constants"
    linear_layers: LinearLayers = "best"
    shield: bool = True
    device: str | None = None
    runtime: str | None = None
    timeline: bool = False

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Options).items():
            object.__setattr__(self, name, _checked(name, hint, getattr(self, name)))
        if self.choose == "first" and not self.targets:
            raise OptionError("choose='first' takes the first of `targets` that accepts: name some in targets=(...)")


OPTION_NAMES: tuple[str, ...] = tuple(f.name for f in fields(Options))


def make_options(**values: Any) -> Options:
    """Options of keyword arguments; lists become tuples.

    Raises:
        OptionError: a name is unknown (the nearest is named, the accepted are listed) or a value is not accepted.
    """
    for name in values:
        if name == "options":
            raise OptionError("there is no option 'options': give the options themselves, by name, as choose='fused'")
        if name not in OPTION_NAMES:
            raise unknown_name("attn_pass option", name, OPTION_NAMES)
    return Options(**values)


def underscored(key: Any) -> Any:
    """The name of an option in Python's spelling: dashes are accepted, as in torch."""
    return key.replace("-", "_") if isinstance(key, str) else key


def tuned_by_mode(options: Options, mode: str | None, given: Mapping[str, Any] | None) -> Options:
    """The same, with `tune` where torch's mode says max-autotune and the user does not say otherwise."""
    says = "tune" in map(underscored, given or {})
    return replace(options, tune=True) if (mode or "").startswith("max-autotune") and not says else options


def split_options(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any], str | None]:
    """The ``options`` of torch.compile, split in (attn_pass's, Inductor's, the value of "mode" or None).

    attn_pass's are the fields of Options; Inductor's are the keys of torch._inductor.config ("max_autotune",
    "triton.cudagraphs"), returned in torch's spelling. Dashes are accepted for underscores, as in torch. The value of a
    name that both have ("numerics", since torch 2.15) goes to each that accepts it.

    Raises:
        OptionError: a key is none of these (the nearest is named), is given twice, or has a value of the wrong type.
    """
    if options is None:
        return make_options(), {}, None
    own: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    mode: str | None = None
    seen: dict[str, object] = {}
    for key, value in named_values(options).items():
        name = underscored(key) if isinstance(key, str) else ""
        if name in seen:
            raise OptionError(f"option {name!r} is given twice, as {seen[name]!r} and as {key!r}; keep one of them")
        seen[name] = key
        if name == "mode":
            mode = _checked_mode(value)
        elif name in OPTION_NAMES:
            if _is_inductors_too(name, value):
                inductor[name] = value
            if name not in inductor or value in get_args(get_type_hints(Options)[name]):
                own[name] = value
        elif name in _inductor_keys():
            inductor[name] = _checked_inductor(name, value)
        else:
            raise _unknown_key(key)
    return make_options(**own), inductor, mode


def named_values(options: object) -> Mapping[str, Any]:
    """The options as they were given, if they are a dict.

    Raises:
        OptionError: they are something else.
    """
    if isinstance(options, Mapping):
        return options
    raise OptionError(f"options must be a dict of option names to values, got {_shown(options)}")


def annotated_targets(value: object) -> tuple[str, ...]:
    """The names that a program's annotation gives, as those of a rule.

    Raises:
        OptionError: it is neither a name nor a list or tuple of names.
    """
    names = (value,) if isinstance(value, str) else value
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    accepted = f"the name of a target, a list or tuple of such names, or {LEAVE!r}"
    raise OptionError(f"the annotation {ANNOTATION!r} got {_shown(value)}; accepted: {accepted}")


def unknown_name(kind: str, name: str, accepted: Iterable[str], more: str = "") -> OptionError:
    """The error for a name that is not among the accepted ones: names the nearest and lists all of them.

    ``more`` says what else is accepted, and begins with a comma or a semicolon.
    """
    names = list(accepted)
    now = _RENAMED.get(name)
    near = _nearest(name, names) if now is None else f"; it is called {now!r} now"
    return OptionError(f"unknown {kind} {name!r}{near}; accepted are {_listed(names)}{more}")


# What names of targets and poor cases were before they became identifiers.
_RENAMED = {
    "keys nobody sees": "key_range",
    "shared K/V over the batch": "shared_kv",
    "grouped heads": "grouped_heads",
    "values": "single_key",
}


_NAMED = {"device": 'a device such as "cpu" or "cuda:0"', "runtime": 'a runtime such as "onnx" or "openvino"'}


def _checked(name: str, hint: Any, value: Any) -> Any:
    """The value as the field stores it, or an OptionError that says what the field accepts."""
    if name == "rules":
        return _checked_rules(value)
    kinds = (hint,) if get_origin(hint) in (Literal, tuple) or isinstance(hint, type) else get_args(hint)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if get_origin(kind) is Literal:
            if isinstance(value, str) and value in get_args(kind):
                return value
            near = _nearest(value, list(get_args(kind))) if isinstance(value, str) else ""
            raise _rejected(name, value, _listed(get_args(kind)), near)
        if get_origin(kind) is tuple:
            if isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value):
                return tuple(value)
            near = f"; did you mean ({value!r},)?" if isinstance(value, str) else ""
            raise _rejected(name, value, "a list or tuple of names, or None", near)
        if kind is bool:
            if isinstance(value, bool):
                return value
            raise _rejected(name, value, "True or False")
        if kind is str:
            if isinstance(value, str) and value.strip():
                return value.strip()
            raise _rejected(name, value, f"{_NAMED[name]}, or None")
    raise AssertionError(f"field {name} of Options has a type without a check: {hint}")


def _checked_rules(value: Any) -> Rules:
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        rules = tuple((pattern, tuple([names] if isinstance(names, str) else names)) for pattern, names in pairs)
    except (TypeError, ValueError):
        rules = ((0, ()),)
    if not all(isinstance(word, str) and word for pattern, names in rules for word in (pattern, *names)):
        accepted = 'a dict, or pairs, of a pattern ("*cross_attn", "modeling.py:203") and names of targets'
        raise _rejected("rules", value, accepted)
    return rules


def _checked_mode(value: Any) -> str | None:
    from torch._inductor import list_mode_options

    accepted = list(list_mode_options())
    if value is None or (isinstance(value, str) and value in accepted):
        return value
    near = _nearest(value, accepted) if isinstance(value, str) else ""
    raise _rejected("mode", value, f"{_listed(accepted)} or None", near)


def _checked_inductor(name: str, value: Any) -> Any:
    """The value, if its type is the one torch.compile itself would accept; generic types are not checked there."""
    expected = _inductor_type(name)
    plain = isinstance(expected, type) and get_origin(expected) is None and expected is not type(None)
    if plain and not isinstance(value, (int, float) if expected is float else expected):
        raise OptionError(f"Inductor option {name!r} takes a value of type {expected.__name__}, got {_shown(value)}")
    return value


def _is_inductors_too(name: str, value: Any) -> bool:
    """Whether Inductor has an option of this name as well, and accepts the value."""
    return name in _inductor_keys() and value in get_args(_inductor_type(name))


def _inductor_type(name: str) -> Any:
    from torch._inductor import config

    return cast(Any, config).get_type(name)  # ConfigModule's methods are made at import: no stub knows them


def _inductor_keys() -> frozenset[str]:
    from torch._inductor import list_options

    return frozenset(list_options())


def _unknown_key(key: object) -> OptionError:
    if not isinstance(key, str):
        return OptionError(f"option names are strings, got {_shown(key)}")
    near = _nearest(key.replace("-", "_"), [*OPTION_NAMES, "mode", *sorted(_inductor_keys())])
    return OptionError(
        f"unknown option {key!r}{near}; accepted are {_listed((*OPTION_NAMES, 'mode'))} for attn_pass, and the keys "
        "of torch._inductor.config (torch._inductor.list_options() prints them) for Inductor"
    )


def _rejected(name: str, value: object, accepted: str, near: str = "") -> OptionError:
    return OptionError(f"option {name!r} got {_shown(value)}{near}; accepted: {accepted}")


def _nearest(given: str, accepted: list[str]) -> str:
    in_lower_case = {name.lower(): name for name in reversed(accepted)}
    close = difflib.get_close_matches(given.lower(), list(in_lower_case), n=1, cutoff=0.6)
    return f"; did you mean {in_lower_case[close[0]]!r}?" if close else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
