"""`inspect`: a folder with all available information about what is compiled inside a block."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from attn_pass.report.pages.collect import Collection, collect, warn_once
from attn_pass.report.pages.graphs import GraphRecord
from attn_pass.report.pages.html import index_page, page
from attn_pass.report.pages.model_explorer import collections_of
from attn_pass.report.pages.outputs import Output, Outputs, decompiled, watching

_DRAWING_SECONDS = 60
_NONE_DECIDED = (
    "No graph was decided inside. A function that was compiled before is not compiled again: call "
    "torch.compiler.reset() first, and run the model inside, as torch.compile compiles at the first call."
)


@contextmanager
def inspect(
    directory: str | os.PathLike[str], *, draw: bool = True, output_code: bool = True, bytecode: bool = True
) -> Iterator[Collection]:
    """Writes to a folder what attn_pass and torch do with everything that is compiled, rewritten or explained inside.

    Inside, torch.compile uses attn_pass where your code requests it (`attn_pass.backend`, `wrap`, `enabled`,
    `install`). `inspect` only observes: graphs in this thread, Inductor's code and bytecode in all threads. It writes
    ``index.html``, which links to the other files and says what is missing and why; ``report.html``, ``.txt`` and
    ``.json``; ``model_explorer.json``, which Model Explorer opens; and for each graph ``before.py``, ``after.py``,
    ``changes.diff``, ``score_functions.py``, ``graph.svg``, Inductor's ``output_code.py``, and Dynamo's bytecode.
    A failure to write is a warning, and does not affect compilation.

    Args:
        directory: created if it does not exist; files of the same names are overwritten.
        draw: draw the graphs with torch.fx's drawer, if pydot and graphviz are installed.
        output_code: keep Inductor's generated code.
        bytecode: keep the bytecode that Dynamo runs for each function, decompiled if depyf is installed.

    Yields:
        The collection: ``graphs``, and ``report`` over all of them.
    """
    root = Path(os.fsdecode(directory)).absolute()  # now: what runs inside may change the working directory
    with watching(code=output_code, bytecode=bytecode) as outputs, collect(draw=draw) as collection:
        try:
            yield collection
        finally:
            try:
                _Folder(root).write(collection, outputs, draw=draw)
            except Exception as error:
                warn_once(f"writing to {os.fsdecode(directory)!r}", error)


@dataclass
class Section:
    """A part of the index: files with their descriptions, and missing files with the reasons."""

    title: str
    files: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class _Folder:
    """The folder while it is written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(parents=True, exist_ok=True)

    def write(self, collection: Collection, outputs: Outputs, *, draw: bool) -> None:
        report, graphs = collection.report, collection.graphs
        main = Section("Report")
        self._file(
            main,
            "report.html",
            lambda: page(report, graphs),
            "sites, masks, roofline, code before and after",
        )
        self._file(main, "report.txt", lambda: f"{report.table(160, verbose=True)}\n", "the table")
        self._file(main, "report.json", report.to_json, "for attn-pass compare, and for programs")
        if graphs:
            explored = functools.partial(json.dumps, collections_of(graphs))
            self._file(main, "model_explorer.json", explored, "the graphs before and after, for Model Explorer")
        sections, functions, why_none = [main], *decompiled(outputs)
        rest_code, rest_functions = list(outputs.code), list(functions)
        for number, graph in enumerate(collection.graphs, 1):
            alone = len(collection.graphs) == 1
            code = _of_graph(graph, rest_code, alone)
            own_functions = _of_graph(graph, rest_functions, alone)
            sections.append(self._graph(number, graph, code, own_functions, draw=draw))
        rest = Section("Also compiled in the meantime, for none of the graphs above")
        self._outputs(rest, "other", rest_code, "Inductor's code")
        self._outputs(rest, "other", rest_functions, "a function as Dynamo runs it")
        remarks = [*([] if collection.graphs else [_NONE_DECIDED]), *outputs.remarks, *filter(None, [why_none])]
        if rest.files:
            sections.append(rest)
        title = "What attn_pass and torch compiled"
        self._file(Section(""), "index.html", lambda: index_page(title, report.summary(), sections, remarks), "")

    def _graph(
        self, number: int, graph: GraphRecord, code: list[Output], functions: list[Output], *, draw: bool
    ) -> Section:
        section, name = Section(f"Graph {number}, {graph.title}"), f"graph_{number}"
        self._file(section, f"{name}/before.py", lambda: graph.before, "the graph before the pass")
        self._file(section, f"{name}/after.py", lambda: graph.after, "the graph after it")
        self._file(section, f"{name}/changes.diff", lambda: _diff(graph), "the difference")
        if graph.was_undone:
            section.missing.append("The compiler rejected after.py; before.py runs instead.")
        if functions_of_scores := _score_functions(graph):
            self._file(
                section, f"{name}/score_functions.py", lambda: functions_of_scores, "what FlexAttention was given"
            )
        if graph.drawing:
            self._drawing(section, f"{name}/graph.svg", graph.drawing)
        elif draw:
            section.missing.append(f"The graph was not drawn: {graph.not_drawn}.")
        self._outputs(section, name, code, "Inductor's code")
        self._outputs(section, f"{name}/bytecode", functions, "a function as Dynamo runs it")
        return section

    def _outputs(self, section: Section, folder: str, outputs: list[Output], description: str) -> None:
        used_names: set[str] = set()
        for output in outputs:
            stem, dot, suffix = re.sub(r"[^\w.-]", "_", output.name).rpartition(".")
            numbered = (f"{stem}{f'_{n}' if n > 1 else ''}{dot}{suffix}" for n in count(1))
            name = next(name for name in numbered if name.lower() not in used_names)  # some file systems know no case
            used_names.add(name.lower())
            self._file(section, f"{folder}/{name}", lambda text=output.text: text, description)  # type: ignore[misc]

    def _drawing(self, section: Section, name: str, drawing: str) -> None:
        if shutil.which("dot") is None:
            section.missing.append("The graph was not drawn: graphviz is not installed (its program dot is not found).")
            return
        try:
            drawn = subprocess.run(
                ["dot", "-Tsvg"], input=drawing.encode(), capture_output=True, timeout=_DRAWING_SECONDS, check=True
            )
        except (subprocess.SubprocessError, OSError) as error:
            section.missing.append(f"The graph was not drawn: {str(error).splitlines()[0][:200]}.")
            return
        self._file(section, name, lambda: drawn.stdout.decode(), "a drawing of the graph passed to the compiler")

    def _file(self, section: Section, name: str, make: Callable[[], str], description: str) -> None:
        """Write one file; a failure is one warning and concerns no other."""
        try:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(make(), encoding="utf-8")
        except Exception as error:
            warn_once(f"writing {name}", error)
            section.missing.append(f"{name} could not be written: {type(error).__name__}: {error}")
        else:
            section.files.append((name, description))


def _of_graph(graph: GraphRecord, outputs: list[Output], alone: bool) -> list[Output]:
    """Takes those of the graph's compile out of the list; of a single graph also what no compile is known of."""
    own = [o for o in outputs if (o.compile_id == graph.compile_id if o.compile_id else alone)]
    outputs[:] = [o for o in outputs if o not in own]
    return own


def _diff(graph: GraphRecord) -> str:
    lines = difflib.unified_diff(
        graph.before.splitlines(), graph.after.splitlines(), "before.py", "after.py", lineterm=""
    )
    return "".join(f"{line}\n" for line in lines)


def _score_functions(graph: GraphRecord) -> str:
    sites = [site for site in graph.report.sites if site.score_mod]
    return "\n\n".join(f"# {site.where} {site.module}\n{site.score_mod}\n" for site in sites)
