"""Plots of committed results: the speedup and the memory over the length, the roofline, the never-slower curve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness import variants as w
from bench.harness.document import Document, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of a palette that keeps its order for the colour-blind (Okabe and Ito).
COLOURS: Mapping[str, str] = {
    w.EAGER: "#999999",
    w.STOCK: "#E69F00",
    w.PASS: "#0072B2",
    w.HAND: "#009E73",
    "reported": "#CC79A7",
}
FORMATS = ("png", "svg")


def _figure(wide: float = 7.0, high: float = 4.2) -> tuple[Figure, Axes]:
    import matplotlib

    matplotlib.use("Agg")
    # Names of elements that change with every run would change the file with every run.
    matplotlib.rcParams.update({"svg.hashsalt": "attn_pass", "svg.fonttype": "none", "font.size": 10})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(wide, high), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", alpha=0.25)
    return figure, axes


def save(figure: Figure, path: Path) -> list[Path]:
    """Writes PATH.png and PATH.svg."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    made = [path.with_suffix(f".{kind}") for kind in FORMATS]
    for file in made:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {"Software": None})
    plt.close(figure)
    return made


def _series(rows: Iterable[Row], way: str, field: str) -> tuple[list[int], list[float]]:
    points = sorted((row["length"], row[field]) for row in rows if row.get("way") == way and row.get(field) is not None)
    return [x for x, _ in points], [y for _, y in points]


def _look(way: str) -> dict[str, Any]:
    """The form by hand is broken and wide, since the pass often lies on it."""
    over = {"linestyle": "--", "linewidth": 3.5, "alpha": 0.6} if way == w.HAND else {"zorder": 3}
    return {"marker": "o", "color": COLOURS[way], "label": way, **over}


def _over_the_length(rows: Sequence[Row], ways: Sequence[str], field: str) -> tuple[Figure, Axes]:
    """What each way has of a field, over the sequence length."""
    figure, axes = _figure()
    lengths: list[int] = []
    for way in ways:
        measured, values = _series(rows, way, field)
        lengths = measured or lengths
        axes.plot(measured, values, **_look(way))
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("sequence length")
    return figure, axes


def speed_up(rows: Sequence[Row]) -> Figure:
    """The speedup over eager, over the sequence length, with the reported curve beside it."""
    figure, axes = _over_the_length(rows, (w.STOCK, w.PASS, w.HAND), "over_eager")
    reported = _series(rows, w.PASS, "reported_speedup")
    axes.plot(*reported, marker="s", linestyle="--", color=COLOURS["reported"], label="reported, NPU")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(ylabel="speedup over unfused (eager)", title="S5: causal attention by hand, speedup over the length")
    axes.legend(frameon=False)
    return figure


def memory(rows: Sequence[Row]) -> Figure:
    """What one call adds to the process, over the sequence length."""
    mib = [{**row, "MiB": max(row["peak_bytes"], 2**17) / 2**20} for row in rows if row.get("peak_bytes") is not None]
    figure, axes = _over_the_length(mib, (w.EAGER, w.STOCK, w.PASS, w.HAND), "MiB")
    axes.set(yscale="log", ylabel="MiB one call adds at its peak")
    axes.set_title("S5: causal attention by hand, memory over the length")
    axes.legend(frameon=False)
    return figure


def roofline(documents: Sequence[Document]) -> Figure:
    """Every program in float32: FLOPs a byte, GFLOP/s reached by stock and by the pass, and the measured roof."""
    figure, axes = _figure(7.0, 4.8)
    rates = max((document.run["rates"] for document in documents), key=lambda r: r["gflops"]["float32"])
    product = rates["gflops"]["float32"]
    dots = placed(documents)
    for both in dots.values():
        if len(both) == 2:
            axes.plot(*zip(*both.values()), color="#cccccc", linewidth=0.8, zorder=1)
    for way in (w.STOCK, w.PASS):
        points = [both[way] for both in dots.values() if way in both]
        if points:
            axes.scatter(*zip(*points), s=26, color=COLOURS[way], label=way, zorder=2)
    across = [x for both in dots.values() for x, _ in both.values()] or [1.0]
    intensities = [max(min(across) / 2, 1e-2), max(across) * 2]
    ridge = product / rates["gbs"]
    roof = sorted({*intensities, ridge})
    axes.plot(roof, [min(product, x * rates["gbs"]) for x in roof], color="black", linewidth=1.2)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte of inputs and outputs", ylabel="GFLOP/s")
    axes.set_title(f"Roofline: {product:.0f} GFLOP/s, {rates['gbs']:.0f} GB/s measured")
    axes.legend(frameon=False, loc="lower right")
    return figure


def placed(documents: Sequence[Document]) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """By table and program, of stock and of the pass: FLOPs a byte, and GFLOP/s."""
    dots: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for document in documents:
        for table in document.tables:
            for row in table.rows:
                if row.get("way") in (w.STOCK, w.PASS) and row.get("dtype") == "float32" and row["flops"]:
                    at = row["flops"] / row["bytes"], row["flops"] / row["median_us"] / 1e3
                    dots.setdefault((table.title, row["program"]), {})[row["way"]] = at
    return dots


def speedups(bars: Sequence[tuple[str, float]]) -> Figure:
    """The speedup over stock of named programs, as bars from 1 on."""
    figure, axes = _figure(7.6, 0.8 + 0.34 * len(bars))
    names = [name for name, _ in bars][::-1]
    values = [value for _, value in bars][::-1]
    axes.barh(names, values, color=[COLOURS[w.PASS] if value >= 1 else COLOURS[w.STOCK] for value in values])
    for at, value in enumerate(values):
        axes.text(value, at, f" {value:.2f}x", va="center")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.grid(False, axis="y")
    axes.set_xlim(0, 1.15 * max([1.0, *values]))
    axes.set(xlabel="speedup over stock: medians, two CPU cores")
    return figure


def never_slower(rows: Sequence[Mapping[str, Any]], rule: str = "") -> Figure:
    """Stock's time over the pass's for every shape of the grid, sorted; stock against itself behind it."""
    figure, axes = _figure()
    good = [row["median_us"] for row in rows if row["status"] == "ok"]
    gains = sorted(us["stock"] / us["pass"] for us in good)
    noise = sorted(us["stock"] / us["stock again"] for us in good)
    axes.plot(gains, color=COLOURS[w.PASS], label="stock / attn_pass")
    axes.plot(noise, color=COLOURS[w.STOCK], linewidth=1.0, label="stock / stock (noise)")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axhline(1 / 1.1, color="black", linewidth=0.8, linestyle=":", label="slower by 10 %")
    axes.set_yscale("log")
    ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50, 100) if t <= max(gains) * 1.1]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    slower = sum(row.get("verdict") == "slower" for row in rows)
    axes.set(xlabel=f"{len(gains)} shapes, sorted; by the rule {slower} are slower", ylabel="speedup over stock")
    axes.set_title(f"Never slower: {rule}", fontsize=10)
    axes.legend(frameon=False)
    return figure
