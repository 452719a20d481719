"""Reports as plain text: tables, and the cells in them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from io import StringIO

from attn_pass.report.progress import is_terminal
from attn_pass.report.site import SiteReport
from attn_pass.report.units import duration

WIDTH = 160
"""Of tables, in characters, where the output is no terminal."""
_BOX = "    \n    \n -- \n    \n    \n    \n    \n    \n"  # for rich: a rule under the header, nothing else

_BUFFER = re.compile(r"(?<=\bif )[\w. ]+(?= is constant)")  # "layers.0.attn.tril" in a hint

_TENSOR = re.compile(r"\bt\d+\b")

COLUMNS = (
    ("sites", None),
    ("outcome", 4),
    ("form", 2),
    ("where", 8),
    ("shapes", 7),
    ("mask", 4),
    ("why", 14),
)


def plain_table(
    columns: Sequence[tuple[str, int | None]], rows: Sequence[Sequence[str]], width: int | None = None
) -> list[str]:
    """A table as lines of plain text.

    Args:
        columns: titles, and the share of the width that each gets; None for its natural width.
        rows: of cells, which may have several lines.
        width: in characters; None takes the terminal's, or 160 if the output is not a terminal.
    """
    # Here, so that compiling needs no rich: only showing does.
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=Box(_BOX, ascii=True), pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for title, ratio in columns:
        table.add_column(title, overflow="fold", ratio=ratio, no_wrap=title == "sites")
    for row in rows:
        table.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
    out = StringIO()
    console = Console(file=out, width=width or _width(), color_system=None, force_terminal=False, force_jupyter=False)
    console.print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return [line for line in lines if line]


def row_of(group: Sequence[SiteReport], verbose: bool) -> tuple[str, ...]:
    site = group[0]
    number = f"x{len(group)}" if len(group) > 1 else "1"
    if site.count > 1:
        number += f" ({site.count} calls)"
    module = common_module([member.module for member in group])
    why = "\n".join(_why(site, verbose))
    if len(group) > 1:
        for name in (*site.fixed, *_BUFFER.findall(site.hint)):
            why = why.replace(name, without_numbers(name))
    return (
        number,
        site.became,
        site.form,
        "\n".join(place_lines(site, module)),
        "\n".join(filter(None, (*shape_lines(site), place_and_dtype(site)))),
        site.mask,
        why,
    )


def row_key(site: SiteReport) -> str:
    """Equal for sites whose rows may be shown as one: all fields but the layer and the buffers they are of."""
    fields = site.to_dict()
    del fields["node"], fields["module"], fields["id"], fields["measured_spread"]
    numbers: dict[str, str] = {}
    for name in ("formula", "score_mod"):  # in which tensors are called by their number in the whole program
        text = json.dumps(fields[name])
        fields[name] = _TENSOR.sub(lambda tensor: numbers.setdefault(tensor[0], f"t{len(numbers)}"), text)
    fields["where"] = "\n".join(place_lines(site, without_numbers(site.module)))
    fields["hint"] = _BUFFER.sub(lambda path: without_numbers(path[0]), site.hint)
    fields["predicted_us"] = {name: f"{time:.4g}" for name, time in site.predicted_us.items()}
    text = json.dumps(fields, sort_keys=True)
    for name in site.fixed:
        text = text.replace(json.dumps(name)[1:-1], without_numbers(name))
    return text + "/" + without_numbers(site.module)


def printable(text: str) -> str:
    """Without control characters except line ends: a terminal would execute those of a stored report."""
    return "".join(c for c in text if c == "\n" or c.isprintable())


def digits(microseconds: float) -> float:
    """A time as records hold it: short, but shown as in the reason, which is made of the time itself."""
    return float(f"{microseconds:.6g}")


def common_module(modules: Sequence[str]) -> str:
    """One path for all, of sites in one group: "model.layers.*.self_attn" where only layer numbers differ."""
    parts = [module.split(".") for module in modules]
    return ".".join(part[0] if len(set(part)) == 1 else without_numbers(part[0]) for part in zip(*parts, strict=True))


def place_lines(site: SiteReport, module: str) -> list[str]:
    """Where a site is, and its module unless that is part of it: "in TransformerEncoderLayer (layers.*)".

    Args:
        site: the record, or the first of a group.
        module: one path for the whole group.
    """
    inside = f"({site.module})"
    if not site.module or not site.where.endswith(inside):
        return [line for line in (site.where, module) if line]
    return [f"{site.where.removesuffix(inside)}({module})"]


def place_and_dtype(site: SiteReport) -> str:
    """ "float32 cpu", or "float32 cpu, decided for H200"."""
    here = f"{site.dtype} {site.device}".strip()
    return f"{here}, decided for {site.decided_for}" if site.decided_for else here


def without_numbers(path: str) -> str:
    """A path with its numbers left open: "layers.*.tril", "block*.mask"."""
    return re.sub(r"\d+", "*", path)


def shape_lines(site: SiteReport) -> list[str]:
    """One line for each shape, with the operands that have it: "query (1, 8, 1, 64)", "key, value (1, 8, 77, 64)"."""
    names: dict[str, list[str]] = {}
    for name, shape in site.shapes.items():
        names.setdefault(f"({', '.join(map(str, shape))})", []).append(name)
    return [f"{', '.join(having)} {shape}" if len(names) > 1 else shape for shape, having in names.items()]


def prologue_lines(site: SiteReport) -> list[str]:
    """One line for each way operands are made, with the operands: "query, key: rotary over all 64 elements"."""
    names: dict[str, list[str]] = {}
    for name, text in site.prologue.items():
        names.setdefault(text, []).append(name)
    return [f"{', '.join(having)}: {text}" for text, having in names.items()]


def _why(site: SiteReport, verbose: bool) -> Iterator[str]:
    yield site.reason
    if site.poor_cases:
        yield f"poor cases: {', '.join(site.poor_cases)}"
    if site.score_mod:
        yield f"score function: {site.score_mod.partition('return ')[2]}"
    if site.assumptions:
        yield f"assumed: {'; '.join(site.assumptions)}"
    if site.hint:
        yield f"hint: {site.hint}"
    if site.predicted_us:
        times = dict(site.predicted_us)
        if site.stock_by_pattern and site.stock_us is not None:
            times[f"stock ({site.stock})"] = site.stock_us
        cheapest_first = sorted(times.items(), key=lambda offer: offer[1])
        yield "predicted: " + ", ".join(f"{name} {duration(time)}" for name, time in cheapest_first)
    if site.verified_error is not None:
        yield f"verified: error {site.verified_error:.2g}"
    if site.not_verified:
        yield f"not verified: {site.not_verified}"
    if verbose:
        yield from prologue_lines(site)
    if verbose and site.id:
        yield f"id: {site.id}"
    if verbose or site.outcome == "left":
        same: dict[str, list[str]] = {}
        for target, why in site.refusals.items():
            if verbose or target not in site.other_devices:
                same.setdefault(why, []).append(target)
        yield from (f"{', '.join(targets)}: {why}" for why, targets in same.items() if why != site.reason)


def _width() -> int:
    return max(100, shutil.get_terminal_size().columns) if is_terminal(sys.stdout) else WIDTH
