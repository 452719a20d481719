"""Documents on a terminal, and progress while they are measured."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Drawn

from bench.harness.document import Document, Table
from bench.harness.environment import no_notices

WIDTH = 190  # a redirected output has no width of its own


def plain_console(width: int = WIDTH) -> Console:
    """A console wide enough for the tables where the output is redirected, and free of the libraries' notices."""
    no_notices()
    console = Console()
    return console if console.is_terminal else Console(width=width)


def teller(console: Console) -> Callable[[str], None]:
    """Prints lines with the seconds since now."""
    began = time.perf_counter()

    def tell(line: str) -> None:
        console.print(f"[{time.perf_counter() - began:6.1f} s] {line}", markup=False, highlight=False)

    return tell


def show(console: Console, document: Document) -> None:
    """All tables, the conditions first."""
    console.print(document.conditions(), markup=False, highlight=False)
    for table in document.tables:
        show_table(console, table)


def show_table(console: Console, table: Table) -> None:
    """The table, its notes, and what failed."""
    console.print(drawn(table))
    for note in table.notes:
        console.print(f"- {note}", markup=False, highlight=False)
    for failure in table.failures():
        console.print(f"FAILED {failure}", markup=False, highlight=False)


def drawn(table: Table) -> Drawn:
    titles, rows = table.cells()
    drawing = Drawn(title=table.title, title_justify="left")
    for number, title in enumerate(titles):
        drawing.add_column(title, justify="left" if number == 0 or title in ("took", "verdict") else "right")
    for row in rows:
        if row[0].startswith("**"):
            drawing.add_section()
            drawing.add_row(f"[bold]{escape(row[0].strip('*'))}[/]", *row[1:])
        else:
            drawing.add_row(*map(escape, row))
    return drawing
