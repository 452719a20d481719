"""Options of attn_pass on the command line: ``--option name=value``, for every field of `attn_pass.Options`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from attn_pass.errors import OptionError

Option = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="Any field of attn_pass.Options, may be repeated: assume_constant_buffers=true, targets=sdpa,flex, "
        'rules={"*cross_attn": "sdpa"}.',
    ),
]

_LISTS = ("targets", "poor_cases")
_WORDS = {"true": True, "false": False, "none": None}


def checked_options(texts: Sequence[str] | None, **named: Any) -> dict[str, Any]:
    """`options_of` and the options that have a flag of their own; checked, so that nothing is built in vain.

    Raises:
        OptionError: an option is unknown, is given twice, or has a value that is not accepted.
    """
    options = options_of(texts)
    for name, value in named.items():
        if value is not None:
            if name in options:
                raise OptionError(f"--{name} and --option {name} are both given; keep one of them")
            options[name] = value
    importlib.import_module("attn_pass.planner.overrides").named_options(options)  # which imports torch
    return options


def options_of(texts: Sequence[str] | None) -> dict[str, Any]:
    """The options as keyword arguments of `attn_pass.Options`; their values are checked there.

    Raises:
        OptionError: one is not of the form name=value, is given twice, or is JSON that does not parse.
    """
    options: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise OptionError(f"--option {text!r}: give name=value, as in --option assume_constant_buffers=true")
        if name in options:
            raise OptionError(f"--option {name} is given twice; keep one of them")
        options[name] = _value(name, value.strip())
    return options


def _value(name: str, text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text[:1] in ("{", "[", '"'):
        try:
            return json.loads(text)
        except ValueError as error:
            raise OptionError(f"--option {name}={text} is no JSON: {error}") from None
    if name in _LISTS:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text
