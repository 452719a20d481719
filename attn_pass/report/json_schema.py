"""Records in JSON: values that are read have the types a dataclass declares, since a report may come from anywhere."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from typing_extensions import Self

_MOST = 1e300  # a larger integer is not a float


def check_fields(kind: type, values: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the field, where a value is none that the dataclass declares."""
    for name, declared in _declared(kind).items():
        if name in values and not fits(values[name], declared):
            raise ValueError(f"{name!r} is {repr(values[name])[:80]}")


@dataclass(eq=False, kw_only=True)
class Record:
    """A record whose tuples are lists in JSON."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, with lists for tuples: ready for JSON."""
        return {
            f.name: list(value) if isinstance(value := getattr(self, f.name), tuple) else value for f in fields(self)
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`, without fields of other versions; raises ValueError for anything else."""
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in stored.items() if n in known}
        check_fields(cls, values)
        return cls(**values)


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON cannot hold, nan and inf."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fits(value: object, declared: Any) -> bool:
    """Whether the value is of the declared type; an int is a float too, and text is text that can be written out."""
    origin, parts = get_origin(declared), get_args(declared)
    if origin is Literal:
        return value in parts
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(each, parts[0]) for each in value)
    if origin is dict:
        of_name, of_value = parts
        return isinstance(value, dict) and all(fits(k, of_name) and fits(v, of_value) for k, v in value.items())
    if declared is str:
        return isinstance(value, str) and _is_encodable(value)
    if declared in (int, float):
        accepted = isinstance(value, int) or (declared is float and isinstance(value, float))
        return accepted and not isinstance(value, bool) and (isinstance(value, float) or abs(value) < _MOST)  # type: ignore[arg-type]
    return declared is type(None) and value is None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@lru_cache(maxsize=8)
def _declared(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
