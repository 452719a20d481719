"""Checks the names in the user's options, and finds the rule that applies to a site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.fx import Node

from attn_pass.devices import registry
from attn_pass.errors import OptionError
from attn_pass.options import (
    ANNOTATION,
    LEAVE,
    Options,
    annotated_targets,
    make_options,
    named_values,
    unknown_name,
)
from attn_pass.poor_cases import CASES
from attn_pass.report.site import SiteReport
from attn_pass.targets.registry import all_targets


def named_options(by_name: Mapping[str, Any] | None) -> Options:
    """Options of a dict, with the names in them checked at once: before a model is built, measured or compiled.

    Raises:
        OptionError: a name is unknown, or a value is not accepted.
    """
    options = make_options(**named_values(by_name or {}))
    check_names(options)
    return options


def check_names(options: Options) -> None:
    """Raises `OptionError` for an unknown target, poor case, runtime or device."""
    _check_known("target", options.targets or (), [t.name for t in all_targets()])
    _check_targets("target in a rule", [name for _, names in options.rules for name in names])
    _check_known("poor case", options.poor_cases or (), list(CASES))
    _check_known("runtime", () if options.runtime is None else (options.runtime,), registry.runtimes())
    if options.device is not None and not registry.is_known(options.device):
        _check_device(options.device)


def _check_device(name: str) -> None:
    if name in registry.runtimes():
        raise OptionError(f"{name!r} is a runtime, not a device: give it as runtime={name!r}")
    try:
        torch.device(name)
    except RuntimeError:
        accepted = (*registry.kinds(), *registry.names())
        raise unknown_name("device", name, accepted, ", or a device as torch names it, such as 'cuda:1'") from None


def _check_targets(kind: str, names: Sequence[str]) -> None:
    _check_known(kind, names, [*(t.name for t in all_targets()), LEAVE])


def _check_known(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)


def rule_for(nodes: Iterable[Node], record: SiteReport, options: Options) -> tuple[str, tuple[str, ...]] | None:
    """The user's rule for the site that consists of these nodes: whose it is, in words, and its targets in order.

    An annotation of the program comes before `Options.rules`, which go by module path and by source line. Raises
    `OptionError` for an annotation that names no target.
    """
    for node in nodes:
        annotations = node.meta.get("custom")
        annotation = annotations.get(ANNOTATION) if isinstance(annotations, Mapping) else None
        if annotation is not None:
            names = annotated_targets(annotation)
            _check_targets("target in an annotation", names)
            return "the program's annotation", names
    line = record.where.split(" in ")[0]
    matching = (r for r in options.rules if any(fnmatchcase(name, r[0]) for name in (record.module, line)))
    return next(((f"the rule for {pattern!r}", targets) for pattern, targets in matching), None)


def before_leave(names: tuple[str, ...]) -> tuple[str, ...]:
    """The targets that a rule tries before it leaves the site."""
    return names[: names.index(LEAVE)] if LEAVE in names else names
