"""``python -m bench.gpu``: all measurements in one run on one GPU, without network access.

    python -m bench.gpu [--device cuda|cpu] [--dry] [--json FILE] [--only PART,...] [--shard I/N] [--quick]
                        [--seconds N] [--stall N] [--resume] [--collect]

The measuring is done in a process of its own, which is started again behind a case that takes it down. Beside FILE
there are its table, FILE.md, and the journal it is made of, FILE.jsonl, which has each case as soon as it ends. FILE
is replaced in one step every few seconds: a run that is killed leaves a whole one, and --collect makes the last one
from the journal. Several shards may share a FILE.

The exit status is 2 if a result is wrong or a case failed or was lost, and 1 if nothing was measured.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from bench.gpu import console
from bench.gpu.journal import Journal
from bench.gpu.measure import PARTS, chosen, measure, run_name, tell
from bench.gpu.parts import Part, Shard
from bench.gpu.supervisor import Limits, supervise
from bench.harness.environment import named_only
from bench.harness.process import Task

RESULTS = Path("docs/results")
_TERMINATED = 143


def _shard(text: str) -> Shard:
    try:
        return Shard.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    names = [p.name for p in PARTS]
    usual = [p.name for p in PARTS if p.usual]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--dry", action="store_true", help="run on the CPU, with stand-ins for the kernels and tiny shapes"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", nargs="?", const=Path(), help="write FILE, and its .md and .jsonl"
    )
    parser.add_argument("--only", default=",".join(usual), metavar="PART,...", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--shard", type=_shard, default=Shard(), metavar="I/N", help="run every N-th case, starting with the I-th"
    )
    parser.add_argument("--quick", action="store_true", help="run a few cases of each part")
    parser.add_argument("--seconds", type=float, default=450.0, help="seconds for the whole run")
    parser.add_argument("--stall", type=float, default=Limits.stall_s, help="seconds after which a case counts as hung")
    parser.add_argument("--resume", action="store_true", help="keep the results in the journal, and continue the run")
    parser.add_argument("--collect", action="store_true", help="measure nothing: write FILE from its journal")
    args = parser.parse_args(given)
    unknown = [n for n in args.only.split(",") if n not in names]
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; there are {', '.join(names)}")
    if (args.device == "cpu") != args.dry and not args.collect:
        parser.error("--device cpu and --dry go together: without a GPU there is nothing to measure, only to try")
    if (args.resume or args.collect or args.shard.count > 1) and args.json in (None, Path()):
        parser.error("--resume, --collect and --shard need --json FILE, beside which the journal lies")
    return args


def _write(file: Path | None, journal: Journal, parts: Sequence[Part]) -> None:
    """Keeps what the journal has: of these parts, and of those that other runs wrote to it."""
    if file is not None and file != Path():
        there = journal.rows()
        shown = [p for p in PARTS if p in parts or p.name in there]
        console.document(journal, shown).write(file)


def _collected(journal: Journal) -> list[Part]:
    """The parts that the journal has anything of."""
    there = {*journal.rows(), *(part for part, _ in journal.unfinished().values())}
    return [p for p in PARTS if p.name in there]


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(_TERMINATED)


def main(given: Sequence[str] | None = None) -> int:
    """Runs and prints; the exit status."""
    given = list(sys.argv[1:] if given is None else given)
    args = arguments(given)
    signal.signal(signal.SIGTERM, _terminated)  # `timeout` sends it: the process that measures has to end as well
    with tempfile.TemporaryDirectory() as folder:
        named = args.json is not None and args.json != Path()
        path = args.json.with_suffix(".jsonl") if named else Path(folder) / "journal.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return _supervised(args, given, Journal(path, run_name(args)))


def _supervised(args: argparse.Namespace, given: Sequence[str], journal: Journal) -> int:
    began = time.time()
    end = began + args.seconds
    parts = _collected(journal) if args.collect else chosen(args)
    if not args.collect:
        if not args.resume:
            journal.start_anew()
        journal.add(head={"command": " ".join(["python -m bench.gpu", *named_only(given)])})
        task = Task({}, measure, (args, journal.path, end), forked=False)
        stall = 1e9 if args.dry else args.stall
        try:
            supervise(task, journal, Limits(end, stall, lambda: _write(args.json, journal, parts)), tell)
        finally:
            journal.add(head={"seconds": round(time.time() - began)})
            _write(args.json, journal, parts)
    document = console.document(journal, parts, over=args.collect)
    if args.json == Path():
        args.json = RESULTS / f"gpu-{str(document.run.get('device', 'none')).replace(' ', '-').lower()}.json"
        _write(args.json, journal, parts)
    if args.collect:
        document.write(args.json)
    if args.json is None:
        tell(document.markdown())
    tell(console.summary(document))
    tell(f"{time.time() - began:.0f} s" + (f"; written: {args.json}" if args.json else ""))
    return console.status(document)


if __name__ == "__main__":
    sys.exit(main())
