"""Rows of the census as Markdown: a table by family, what is left and why, and what is wrong."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

from attn_pass.projections.groups import ALREADY
from bench.harness.document import markdown_table
from bench.suites.census.rows import Row

_BENCHES = ("export", "sdpa", "rotary", "padding", "projections", "runtimes", "speed")

# What a row can be that says nothing about the pass: nothing was there to be rewritten.
NOT_OURS = (
    "unbuildable",
    "no padding",
    "not exportable",
    "not decomposable",
    "does not run as exported",
    "not for this runtime",
)


def markdown(rows: Sequence[Row]) -> str:
    """All tables the rows are good for."""
    of = {bench: [row for row in rows if row["bench"] == bench] for bench in _BENCHES}
    parts: list[str] = []
    if exports := of["export"]:
        parts += [export_table(exports), left_table(exports), troubles(exports)]
    if calls := of["sdpa"]:
        parts += [sdpa_table(calls), mask_table(calls), left_table(calls), troubles(calls)]
    if operands := of["rotary"]:
        parts += [rotary_table(operands), unread_table(operands), troubles(operands)]
    if regions := of["padding"]:
        for stage in dict.fromkeys(row["stage"] for row in regions):
            of_stage = [row for row in regions if row["stage"] == stage]
            parts += [f"{stage.capitalize()}:", padding_table(of_stage), stops_table(of_stage)]
        parts.append(troubles(regions))
    if layers := of["projections"]:
        parts += [projections_table(layers), apart_table(layers), troubles(layers)]
    if translated := of["runtimes"]:
        for stage in dict.fromkeys(row["stage"] for row in translated if "attentions" in row):
            of_stage = [row for row in translated if row["stage"] == stage]
            ran = [row for row in of_stage if row["status"] == "ok"]
            parts += [f"Runtime {stage}:", runtimes_table(of_stage), left_table(ran)]
        parts.append(troubles(translated))
    if timed := of["speed"]:
        for stage in dict.fromkeys(row["stage"] for row in timed if "speedup" in row):
            of_stage = [row for row in timed if row["stage"] == stage and "speedup" in row]
            parts += [f"{stage.capitalize()}:", speed_table(of_stage), slowest_table(of_stage)]
        parts.append(troubles(timed))
    return "\n\n".join(part for part in parts if part)


def _by_family(cells: Callable[[Sequence[Row]], Row]) -> Callable[[Sequence[Row]], str]:
    """A Markdown table with a line a family: its models, and the cells of its rows by their titles."""

    @wraps(cells)
    def table(rows: Sequence[Row]) -> str:
        counted = [(label, len({row["name"] for row in of}), cells(of)) for label, of in by_family(rows)]
        lines = [{"family": label, "models": models, **made} for label, models, made in counted]
        return _table(list(lines[0]), (line.values() for line in lines))

    return table


# ---- exported programs ----


@_by_family
def export_table(rows: Sequence[Row]) -> Row:
    """A line a family; sites and what became of them before and after run_decompositions()."""
    cells = {"exportable": len({row["name"] for row in rows if "sites" in row})}
    for stage, of_stage in (("export", ""), ("decomposed", ", decomposed")):
        ran = [row for row in rows if row["stage"] == stage and "sites" in row]
        sites = sum(row["sites"].get("hand", 0) for row in ran)
        changed = sum(row.get("rewritten", 0) for row in ran)
        counted = {"sites": sites, "rewritten": changed, "%": percent(changed, sites)}
        cells |= {f"{title}{of_stage}": cell for title, cell in counted.items()}
    return cells | _bad(rows)


def _bad(rows: Sequence[Row]) -> Row:
    failures = sum(row["status"] not in ("ok", *NOT_OURS) for row in rows)
    return {"wrong numbers": sum(is_wrong(row) for row in rows), "failures": failures}


def is_wrong(row: Row) -> bool:
    """Whether the rewritten program computes something else."""
    return (row.get("numerics") or {}).get("ok") is False


# ---- models that call SDPA ----


@_by_family
def sdpa_table(rows: Sequence[Row]) -> Row:
    """A line a family: calls in Dynamo's graphs, and what the pass made of them."""
    ran = [row for row in rows if "sites" in row]
    calls = sum(row["sites"].get("sdpa", 0) for row in ran)
    read = sum(sum(call_masks(row).values()) for row in ran)
    return {
        "with SDPA calls": sum(row["sites"].get("sdpa", 0) > 0 for row in ran),
        "calls": calls,
        "read": read,
        "% read": percent(read, calls),
        "rewritten": sum(row["calls_rewritten"] for row in ran),
        "hand-written beside": sum(row["sites"].get("hand", 0) for row in ran),
        **_bad(rows),
    }


def call_masks(row: Row) -> Counter[str]:
    """Mask names of the SDPA calls that were read, with how many calls have each."""
    form = "sdpa: "
    return Counter({mask[len(form) :]: n for mask, n in row.get("masks", {}).items() if mask.startswith(form)})


def mask_table(rows: Sequence[Row]) -> str:
    """What the masks of the calls are, as the pass names them."""
    calls: Counter[str] = Counter()
    models: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for mask, number in call_masks(row).items():
            calls[mask] += number
            models[mask].append(row["name"])
    header = ("mask of the call", "calls", "%", "models", "such as")
    return _table(
        header,
        (
            (mask, number, percent(number, calls.total()), len(models[mask]), _listed(models[mask]))
            for mask, number in calls.most_common()
        ),
    )


# ---- rotary embeddings ----


@_by_family
def rotary_table(rows: Sequence[Row]) -> Row:
    """A line a family: attentions whose query or key has an angle, and those of which all such are read."""
    sites = [site for row in rows for site in _sites_of(row)]
    rotary = [site for site in sites if any(o["angle"] for o in site)]
    read = sum(all("rotary" in o["read"] for o in site if o["angle"]) for site in rotary)
    return {
        "attentions": len(sites),
        "models with angles": sum(any(o["angle"] for o in row.get("operands", ())) for row in rows),
        "attentions with angles": len(rotary),
        "read": read,
        "% read": percent(read, len(rotary)),
        "with norms": sum(any("norm" in o["read"] for o in site) for site in sites),
        "rotary without an angle": sum(any("rotary" in o["read"] and not o["angle"] for o in site) for site in sites),
    }


def _sites_of(row: Row) -> list[list[Row]]:
    """The operands of each attention."""
    sites: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for operand in row.get("operands", ()):
        sites[operand["graph"], operand["site"]].append(operand)
    return list(sites.values())


def unread_table(rows: Sequence[Row]) -> str:
    """Why operands with an angle were not read as rotary, most frequent first."""
    operands = ((row["name"], operand) for row in rows for operand in row.get("operands", ()) if operand["angle"])
    left = ((o["read"] or "nothing was found", name) for name, o in operands if "rotary" not in o["read"])
    return _reasons("why an angle is not read", "operands", left)


def _reasons(title: str, counted: str, left: Iterable[tuple[str, str]]) -> str:
    """A line a reason, most frequent first: how often it was given, and for which models."""
    names: dict[str, list[str]] = defaultdict(list)
    for why, name in left:
        names[why].append(name)
    ordered = sorted(names.items(), key=lambda item: -len(item[1]))
    header = (title, counted, "models", "such as")
    return _table(header, ((why, len(of), len(set(of)), _listed(of)) for why, of in ordered))


# ---- regions without padding ----


@_by_family
def padding_table(rows: Sequence[Row]) -> Row:
    """A line a family: models whose attentions have a padding mask, and those with a region that is proved."""
    masked = [row for row in rows if row.get("regions")]
    proved = [row for row in masked if any(r["outcome"] == "packed" for r in row["regions"])]
    inside = sum(r["sites"] for row in masked for r in row["regions"])
    packed = sum(r["packed"] for row in masked for r in row["regions"])
    return {
        "with padding": sum(row["status"] not in ("no padding", "unbuildable") for row in rows),
        "with attention": sum(row.get("attentions", 0) > 0 for row in rows),
        "with a padding mask": len(masked),
        "with a region": len(proved),
        "attentions with the mask": inside,
        "in regions": packed,
        "compared": sum(row.get("numerics") is not None for row in rows),
        "rows that are zeros": sum(row.get("zeros", 0) for row in rows),
        **_bad(rows),
    }


def stops_table(rows: Sequence[Row]) -> str:
    """Reasons why a mask's attentions have no region, most frequent first."""
    regions = ((row["name"], region) for row in rows for region in row.get("regions", ()))
    left = ((without_places(region["reason"]), name) for name, region in regions if region["outcome"] == "left")
    return _reasons("why there is no region", "masks", left)


# ---- projections ----


@_by_family
def projections_table(rows: Sequence[Row]) -> Row:
    """A line a family: queries, keys and values, how many linear layers that are read make, and which are joined."""
    counted = [row for row in rows if row.get("operands")]
    operands, read = (sum(row[name] for row in counted) for name in ("operands", "read"))
    return {
        "with attention": len(counted),
        "queries, keys, values": operands,
        "read": read,
        "%": percent(read, operands),
        "one product already": sum(
            p["operands"] for row in counted for p in row["projections"] if p["reason"] == ALREADY
        ),
        "joined": sum(row["joined"] for row in counted),
        **_bad(rows),
    }


def apart_table(rows: Sequence[Row]) -> str:
    """Reasons why projections stay products of their own, most frequent first."""
    projections = ((row["name"], p) for row in rows for p in row.get("projections", ()) if p["outcome"] == "left")
    apart = ((p["reason"], name) for name, p in projections if p["reason"] != ALREADY for _ in range(p["operands"]))
    return _reasons("why they stay apart", "queries, keys, values", apart)


# ---- other runtimes ----


@_by_family
def runtimes_table(rows: Sequence[Row]) -> Row:
    """A line a family: attentions in exported programs, and how many end as the runtime's operator."""
    ran = [row for row in rows if "operators" in row]
    sites = sum(row["attentions"] for row in ran)
    stock, ours = (sum(row.get(name, 0) for row in ran) for name in ("stock", "operators"))
    wrong = sum((row.get("stock_numerics") or {}).get("ok") is False for row in ran)
    return {
        "translated": len(ran),
        "attentions": sites,
        **{"operators, stock": stock, "% stock": percent(stock, sites)},
        **{"operators, rewritten": ours, "% rewritten": percent(ours, sites)},
        **{"not for it, stock neither": sum(row["status"] == "not for this runtime" for row in rows)},
        "stock is wrong": wrong,
        **_bad(rows),
    }


# ---- times ----

_SLOWEST = 10


@_by_family
def speed_table(rows: Sequence[Row]) -> Row:
    """A line a family: how many models are faster than with stock, the same within the noise, and slower."""
    counted = Counter(row["verdict"] for row in rows)
    speedups = [row["speedup"] for row in rows]
    return {
        "attentions": sum(_attentions(row) for row in rows),
        "rewritten": sum(row["rewritten"] + row["calls_rewritten"] for row in rows),
        **{what: counted[what] for what in ("faster", "same", "slower")},
        **{"speedup, geometric mean": f"{statistics.geometric_mean(speedups):.2f}", "least": f"{min(speedups):.2f}"},
        **{"greatest": f"{max(speedups):.2f}", "wrong numbers": sum(map(is_wrong, rows))},
    }


def _attentions(row: Row) -> int:
    left = sum(site["kind"] == "attention" for site in row["left"])
    return int(row["rewritten"] + row["calls_rewritten"] + left)


def slowest_table(rows: Sequence[Row]) -> str:
    """The models with the least speedup."""
    header = ("model", "stock ms", "A/A ms", "attn_pass ms", "speedup", "by 10th percentiles", "noise", "verdict")
    slowest = sorted(rows, key=lambda row: row["speedup"])[:_SLOWEST]
    return _table(
        header,
        (
            (
                *(row["name"], *(f"{row[f'{way}_ms']:.2f}" for way in ("stock", "A/A", "attn_pass"))),
                *(f"{row['speedup']:.3f}", f"{row['speedup_p10']:.3f}", f"{row['noise']:.1%}", row["verdict"]),
            )
            for row in slowest
        ),
    )


# ---- what is left, what is wrong ----


def left_table(rows: Sequence[Row]) -> str:
    """Reasons of sites that are left, most frequent first, with the stages, models and lines they occur in."""
    groups: dict[tuple[str, str], list[tuple[Row, Row]]] = defaultdict(list)
    for row in rows:
        for site in row.get("left", ()):
            groups[site["kind"], without_places(site["reason"])].append((row, site))
    lines = []
    for (kind, reason), members in sorted(groups.items(), key=lambda item: -len(item[1])):
        models = _listed(row["name"] for row, _ in members)
        stages = _listed(row.get("stage", "") for row, _ in members)
        lines.append((len(members), kind, reason, stages, models, _listed(site["where"] for _, site in members)))
    return _table(("sites left", "kind", "reason", "stage", "models", "where"), lines)


def without_places(reason: str) -> str:
    """The reason without source lines and without the numbers of nodes, so that equal reasons read the same."""
    reason = re.sub(r" \([^()]*:\d+ in [^()]*\)", "", reason)
    return re.sub(r"\b([a-z_]+?)_\d+\b", r"\1", reason)


def troubles(rows: Sequence[Row]) -> str:
    """Wrong numbers, failures, warnings, sites without a row in the report, and models that are not counted."""
    lists: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        name = f"{row['name']} ({row['stage']})" if row.get("stage") else row["name"]
        if is_wrong(row):
            lists["Wrong numbers"].append(f"{name} {_numbers(row['numerics'])}")
        if row["status"] not in ("ok", "no padding"):
            lists[row["status"].capitalize()].append(f"{name}: {first_line(row.get('error', ''))}")
        for warning in row.get("warnings", ()):
            lists["Warned"].append(f"{name}: {warning[:300]}")
        if (exported := row.get("exported")) and exported["ok"] is False:
            lists["Wrong before the rewrite"].append(f"{name} {_numbers(exported)}")
        if row.get("saved", "ok") not in ("ok", "not tried"):
            lists["Not the same after torch.export.save and load"].append(
                f"{name}: {row['saved'].splitlines()[0][:160]}"
            )
        if unseen := unseen_sites(row):
            lists["Sites the report has no row for"].append(f"{name}: {unseen}")
    return "\n\n".join(
        f"{what} ({len(items)}):\n\n" + "\n".join(f"- {item}" for item in items) for what, items in lists.items()
    )


def unseen_sites(row: Row) -> int:
    """Hand-written sites, by the census's count, that the report neither rewrote nor left."""
    if "sites" not in row or row["status"] != "ok":
        return 0
    left = sum(site["form"] != "sdpa" for site in row.get("left", ()))
    return max(0, int(row["sites"].get("hand", 0)) - row.get("rewritten", 0) - left)


def _numbers(numerics: Row) -> str:
    told = f"rel {numerics['rel_l2']:.1e}, max {numerics['max_abs']:.1e}"
    if "nonfinite" in numerics:
        told += f", {numerics['nonfinite']} finite where the other is not"
    return f"{told}, {numerics['why']}" if "why" in numerics else told


# ---- helpers ----


def by_family(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """(family, rows) in alphabetical order, then all of them; controls, which hold no attention, stand alone."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if not row.get("control"):
            families[row["family"]].append(row)
    yield from sorted(families.items())
    yield "**all**", [row for row in rows if not row.get("control")]
    if controls := [row for row in rows if row.get("control")]:
        yield "controls", controls


def first_line(text: str, length: int = 200) -> str:
    return next(iter(text.splitlines()), "")[:length]


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _listed(items: Iterable[str], most: int = 6) -> str:
    distinct = list(dict.fromkeys(items))
    rest = len(distinct) - most
    return ", ".join(distinct[:most]) + (f" and {rest} more" if rest > 0 else "")


def _table(header: Sequence[str], lines: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; "" without a line."""
    rows = [list(map(str, line)) for line in lines]
    return "\n".join(markdown_table(header, rows)) if rows else ""
