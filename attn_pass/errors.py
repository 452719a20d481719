"""What attn_pass raises and warns: each message says what was given, what is accepted and what to do."""

from __future__ import annotations


class AttnPassError(Exception):
    """Base of every error attn_pass raises on purpose; anything else that escapes is a defect of attn_pass."""


class OptionError(AttnPassError, ValueError):
    """An option has an unknown name or a value that is not accepted."""


class CaptureError(AttnPassError, RuntimeError):
    """The model could not be captured as a graph: unsupported Python, or inputs and dynamic shapes that contradict."""


class PackageError(AttnPassError, OSError):
    """A package (.pt2) cannot be written to, or read from, the path that was given."""


class VersionError(AttnPassError, RuntimeError):
    """The torch that is installed lacks something this entry point needs."""


class RewriteError(AttnPassError, RuntimeError):
    """A graph could not be rewritten: its metadata is missing, or a site failed under ``on_error="raise"``."""


class AttnPassWarning(UserWarning):
    """A site or a graph was left as it was because something in attn_pass failed (``on_error="warn"``)."""


def first_line(error: Exception) -> str:
    """What a table has room for of a message."""
    return (str(error).splitlines() or [""])[0][:200]
