"""The exceptions and warnings of attn_pass: each message says what was given, what is accepted and what to do."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator


class AttnPassError(Exception):
    """Base class of all errors that attn_pass raises on purpose; any other exception is a defect of attn_pass."""


class OptionError(AttnPassError, ValueError):
    """An option has an unknown name or a value that is not accepted."""


class CaptureError(AttnPassError, RuntimeError):
    """The model could not be captured as a graph: unsupported Python, or inputs and dynamic shapes that contradict."""


class PackageError(AttnPassError, OSError):
    """A package (.pt2) cannot be written to, or read from, the given path."""


class VersionError(AttnPassError, RuntimeError):
    """The installed version of torch is too old for this function."""


class EnvironmentFault(AttnPassError, RuntimeError):
    """The compiler cannot work here: there is none, or its folder cannot be written. The rewrite is not to blame."""


class RewriteError(AttnPassError, RuntimeError):
    """A graph could not be rewritten: its metadata is missing, or a site failed under ``on_error="raise"``."""


class AttnPassWarning(UserWarning):
    """A site or a graph was left unchanged because something in attn_pass failed (``on_error="warn"``)."""


def own_version() -> str:
    """The version of the package that is installed."""
    try:
        return importlib.metadata.version("attn-pass")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (run from a source tree that is not installed)"


def first_line(error: Exception) -> str:
    """The first line of a message, cut to the width of a table."""
    return first_line_of(str(error))


def first_line_of(text: str) -> str:
    """The first line of a text, cut to the width of a table."""
    return (text.splitlines() or [""])[0][:200]


def cause_of(error: BaseException) -> str:
    """Type and first line of the original exception, without the wrappers that the compiler puts around it."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0]}" if lines else type(inner).__name__


def in_one_line(error: BaseException) -> str:
    """The message of a capture error on one line, without torch's hints on logging and without repetitions."""
    text = _LOGGING_HINTS.sub("", re.split(_AFTERTHOUGHTS, str(error))[0])
    lines = dict.fromkeys(line.strip() for line in text.splitlines())
    words = " ".join(line for line in lines if line)
    return f"{type(error).__name__}: {words if len(words) <= 800 else words[:797] + '...'}"


_AFTERTHOUGHTS = "The error above occurred when calling|\n *from user code:"
_LOGGING_HINTS = re.compile(
    r"^\s*(Developer debug context|For more |For extended logs|If you suspect|Set TORCH).*$"
    r"|For more information, run with \S+|\(Size-like symbols: none\)",
    re.MULTILINE,
)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised for, innermost last."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = getattr(following, "inner_exception", None) or following.__cause__ or following.__context__
