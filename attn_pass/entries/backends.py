"""A backend of torch.compile by its name: `check` and `wrap` take any, and say which there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_pass.entries.environment import import_compiler
from attn_pass.errors import OptionError, cause_of, first_line
from attn_pass.options import unknown_name


def backend_named(name: str) -> Callable[..., Any]:
    """The backend that torch.compile knows by this name.

    Raises:
        EnvironmentFault: the compiler's folder cannot be written.
        OptionError: it knows none, and the nearest is named; or the backend's package cannot be imported.
    """
    import_compiler()
    from torch._dynamo import list_backends
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(name)
    except InvalidBackend:
        raise unknown_name("backend of torch.compile", name, list_backends(exclude_tags=())) from None
    except Exception as error:
        raise OptionError(f"the backend {name!r} of torch.compile cannot be loaded: {cause_of(error)}") from error


def raise_if_missing(failure: BaseException, name: str) -> None:
    """Raises for a failure of a backend whose package is not installed: it compiled nothing, right or wrong.

    Raises:
        OptionError: it is one.
    """
    cause = getattr(failure, "inner_exception", None) or failure
    if isinstance(cause, ImportError):
        raise OptionError(f"the backend {name!r} does not run here: {first_line(cause)}") from failure
