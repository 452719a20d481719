"""How a command ends on invalid input: one sentence on stderr, exit status 2, and the traceback on request."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, NoReturn

import typer

from attn_pass.errors import AttnPassError
from attn_pass.report.progress import logged_to_stderr

FAILED, BAD_INPUT, NOTHING_RAN = 1, 2, 3

Traceback = Annotated[bool, typer.Option("--traceback", help="On an error, print the Python traceback as well.")]

_SHOWN: ContextVar[bool] = ContextVar("attn_pass_traceback", default=False)


@contextmanager
def failing(with_traceback: bool) -> Iterator[None]:
    """Around a command: errors of attn_pass are one sentence each, and progress goes to stderr."""
    token = _SHOWN.set(with_traceback)
    try:
        with logged_to_stderr():
            yield
    except AttnPassError as error:
        fail(str(error), error)
    finally:
        _SHOWN.reset(token)


def fail(sentence: str, error: BaseException | None = None) -> NoReturn:
    """Prints the sentence, after the error's traceback if the user wants that, and exits with status 2."""
    if error is not None and _SHOWN.get():
        typer.echo("".join(traceback.format_exception(error)), err=True)
    typer.echo(f"attn-pass: {sentence}", err=True)
    raise typer.Exit(BAD_INPUT)
