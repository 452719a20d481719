"""Part 0: the checks of the first minute: versions, tools, each path."""

from __future__ import annotations

import subprocess
import tempfile
from functools import partial
from pathlib import Path

import torch

import attn_pass
from attn_pass.measuring.timing import relative_error, worst
from bench.gpu import correctness, decode_cases, toolchain
from bench.gpu.environment import Environment, decision_row, facts, one_line
from bench.gpu.parts import Case, Column, Part, Row
from bench.harness.programs import Setting
from bench.suites.seeds import s4

_CLOCKS = (
    "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,utilization.gpu,memory.used"
)
# One package is not worth compiling torch's headers ahead for, which takes longer than the package.
_OF_A_DRY_RUN = {"aot_inductor.precompile_headers": False, "cpp_cache_precompile_headers": False}
# A kind of `correctness.KINDS`, the target it is forced on, whether gradients are asked for, all through Inductor.
PATHS: tuple[tuple[str, str, bool], ...] = (
    ("five queries", "decode", False),
    *(("causal", target, train) for target in ("cudnn", "flash", "efficient") for train in (False, True)),
    ("window", "flex", False),
)


def versions(env: Environment) -> Row:
    """Versions, and the clocks as they are before any work."""
    known = facts(env)
    row: Row = {"found": one_line(known)}
    if not env.dry:
        line = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
        try:
            row["clocks"] = subprocess.run(line, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            row["clocks"] = f"nvidia-smi did not answer: {error}"
        row["found"] += f"; {row['clocks']}"
    return row


def tools(env: Environment) -> Row:
    """What AOTInductor needs beside torch; a machine without it can still measure everything that is not packaged."""
    tools = toolchain.find()
    row: Row = {"compiler": tools.compiler, "cuda_home": tools.cuda_home, "libcuda": tools.libcuda}
    row["linking"] = toolchain.links_libcuda(tools)
    row["loading"] = "not tried" if row["linking"] else toolchain.loads(tools.compiler)
    row["found"] = one_line({name: value or "none" for name, value in row.items()})
    if row["linking"] and not env.dry:
        raise RuntimeError(f"AOTInductor will not link here: {row['linking']}")
    if row["loading"] and not env.dry:
        raise RuntimeError(f"packages of AOTInductor will not load here: {row['loading']}")
    return row


def packaged_shared_keys(env: Environment) -> Row:
    """Seed S4 as a package, with its batch open, against float64."""
    if not env.dry:
        toolchain.require()
    quick = torch._inductor.config.patch(_OF_A_DRY_RUN if env.dry else {})
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder, quick:
        *_, program = s4.programs(Setting(env.device, quick=env.dry))
        assert program.reference is not None
        model, _ = program.make(env.device)
        sets = [other(env.device) for other in program.others]
        path, options = str(Path(folder) / "s4.pt2"), {"on_error": "raise"}
        with attn_pass.record() as report:
            attn_pass.aot_compile(
                model, sets[0], dynamic_shapes=program.dynamic_shapes, package_path=path, options=options
            )
        run = torch._inductor.aoti_load_package(path)
        off = worst(relative_error(run(*given), program.reference(*given)) for given in sets)
    right = off <= program.tolerance
    return {**decision_row(report), "error_abs": off, "verdict": "right" if right else "WRONG"}


def cases(env: Environment) -> list[Case]:
    """Versions and tools first; then one of each way a kernel is reached, most doubtful first."""
    direct = [c for c in decode_cases.CASES if c.name in ("plain", "window")][: 1 if env.quick else None]
    listed = [Case("versions and clocks", partial(versions, env)), Case("tools of AOTInductor", partial(tools, env))]
    listed += [Case(f"decode: {c.name}, direct", partial(correctness.decode_case, env, c)) for c in direct]
    listed += [correctness.check_case(env, kind, target, train, inductor=True) for kind, target, train in PATHS]
    return [*listed, Case("S4 through AOTInductor", partial(packaged_shared_keys, env))]


PART = Part(
    "smoke",
    "What there is, and one of each path",
    0.10,
    (
        Column("case", "name"),
        Column("found", "found"),
        *correctness.PART.columns[1:],
        Column("seconds", "seconds", ".1f"),
    ),
    cases,
    timed=False,
    usual=False,
)
