"""``python -m bench.gpu``: one run on one GPU, without any network, that measures all there is to ask of it.

    python -m bench.gpu [--device cuda|cpu] [--dry] [--json FILE] [--only PART,...] [--quick] [--sweep] [--seconds N]

The measuring is done in a process of its own, which is started again behind a case that takes it down. FILE is written
after every part, its table beside it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gpu import correctness, decode_grid, floors, rules, seeds, telling, tuned
from bench.gpu.keeper import Limits, keep
from bench.gpu.parts import Journal, Part, run_parts
from bench.gpu.place import Place, facts
from bench.gpu.timing import rates

PARTS: tuple[Part, ...] = (
    correctness.PART,
    decode_grid.PART,
    floors.PART,
    rules.PART,
    seeds.PART,
    tuned.PART,
)
RESULTS = Path("docs/results")


def _tell(line: str) -> None:
    print(line, flush=True)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    names = [p.name for p in PARTS]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dry", action="store_true", help="on the CPU: stand-ins for the kernels, tiny shapes")
    parser.add_argument("--json", type=Path, metavar="FILE", nargs="?", const=Path(), help="write FILE and FILE.md")
    parser.add_argument("--only", default=",".join(names), metavar="PART,...", help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="a few cases of each part")
    parser.add_argument("--sweep", action="store_true", help="the decode kernel with other splits and blocks")
    parser.add_argument("--seconds", type=float, default=450.0, help="of the whole run")
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    unknown = [n for n in args.only.split(",") if n not in names]
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; there are {', '.join(names)}")
    if (args.device == "cpu") != args.dry:
        parser.error("--device cpu and --dry go together: without a GPU there is nothing to measure, only to try")
    return args


def chosen(args: argparse.Namespace) -> list[Part]:
    """The parts asked for, in the order of their importance."""
    return [p for p in PARTS if p.name in args.only.split(",")]


def measure(args: argparse.Namespace) -> None:
    """The process that measures: what the journal has is not measured again."""
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)
    place = Place(args.device, args.quick, args.sweep)
    if place.dry:
        from bench import stand_ins

        stand_ins.install()
        torch.set_num_threads(1)  # for shapes this small threads only wait for each other
    journal = Journal(args.journal)
    if "device" not in journal.head():
        found = rates(place)
        head = {**facts(place), "dry": args.dry, "matmul_tflops": round(found.matmul_tflops, 1)}
        journal.add(head={**head, "copy_tbs": round(found.copy_tbs, 3)})
        _tell(f"{found.matmul_tflops:.0f} TFLOP/s, {found.copy_tbs:.2f} TB/s")
    parts = chosen(args)
    run_parts(place, parts, args.end, journal, _tell, lambda: _write(args, journal, parts))


def _write(args: argparse.Namespace, journal: Journal, parts: list[Part]) -> None:
    if args.json is not None and args.json != Path():
        telling.write(args.json, journal, parts)


def main(given: Sequence[str] | None = None) -> int:
    """Runs and prints; 1 where nothing could be measured."""
    began = time.time()
    given = list(sys.argv[1:] if given is None else given)
    args = arguments(given)
    if args.journal is not None:
        measure(args)
        return 0
    end = began + args.seconds
    parts = chosen(args)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.jsonl")
        journal.add(head={"command": " ".join(["python -m bench.gpu", *(_short(w) for w in given)])})
        line = [sys.executable, "-m", "bench.gpu", *given, "--journal", str(journal.path), "--end", str(end)]
        keep(line, journal, Limits(end, 1e9 if args.dry else Limits.stall_s), _tell)
        journal.add(head={"seconds": round(time.time() - began)})
        found = telling.document(journal, parts)
        if args.json == Path():
            args.json = RESULTS / f"gpu-{str(found['run'].get('device', 'none')).replace(' ', '-').lower()}.json"
        _write(args, journal, parts)
        if args.json is None:
            _tell(telling.markdown(found, parts))
        _tell(telling.summary(found))
        _tell(f"{time.time() - began:.0f} s" + (f"; written: {args.json}" if args.json else ""))
        return 0 if any(part["rows"] for part in found["parts"].values()) else 1


def _short(word: str) -> str:
    """A result says what was run, not where."""
    return Path(word).name if "/" in word else word


if __name__ == "__main__":
    sys.exit(main())
