"""Random calls of the CPU kernel under the compiler's sanitizers: `make sanitize`, or `sanitize.py address avx2`.

A process for each sanitizer and instruction set that this machine has. The address sanitizer knows the parts of the
kernel's own memory, which starts as NaN; the undefined-behaviour sanitizer runs with it. For the thread sanitizer tasks
run on threads of the standard library (`own_threads.hpp`). Python and torch are not instrumented: what they do is not
looked at, but the operands are theirs, with room around them that the sanitizer guards. On a processor without tiles
they are emulated (`emulated_tiles.hpp`); "arm" is plain with as many vectors as on ARM.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
COUNT = 40
SANITIZERS = {
    "address": ("libasan.so", ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")),
    "thread": ("libtsan.so", ("-fsanitize=thread", "-include", str(HERE / "own_threads.hpp"))),
}
EMULATED = ("-include", str(HERE / "emulated_tiles.hpp"))
ARM = "arm"  # the compiler's own vectors in the sizes that they have there
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    "TSAN_OPTIONS": "report_bugs=1:exitcode=66:ignore_noninstrumented_modules=1",
    "OMP_NUM_THREADS": "1",
}


def main(sanitizers: list[str], sets: list[str]) -> int:
    """Runs each in a process of its own; returns how many found something."""
    from attn_pass.devices.cpu.kernel.build import compiler

    bad = 0
    for sanitizer in sanitizers:
        library = _of_compiler(compiler(), SANITIZERS[sanitizer][0])
        for name in sets:
            with tempfile.TemporaryDirectory() as folder:
                reported = {**os.environ, **SETTINGS, "LD_PRELOAD": library, "ATTN_PASS_CPU_ISA": name}
                found = os.pathsep.join(map(str, (HERE, HERE.parents[1] / "support", HERE.parents[2])))
                reported |= {"ATTN_PASS_CACHE_DIR": folder, "PYTHONPATH": found}
                # The thread sanitizer's maps of memory have no room for addresses drawn at random.
                command = ["setarch", platform.machine(), "-R"] if sanitizer == "thread" else []
                command += [sys.executable, str(HERE / "sanitize.py"), "--here", sanitizer, name]
                failed = subprocess.run(command, env=reported, check=False).returncode
            print(f"{sanitizer}, {name}: {f'FAILED ({failed})' if failed else 'clean'}", flush=True)
            bad += failed != 0
    return bad


def _of_compiler(compiler: str, library: str) -> str:
    asked = subprocess.run([compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def here(sanitizer: str, name: str) -> None:
    """The drawn calls in this process, with a kernel that is built for them.

    Raises:
        SystemExit: a result is wrong.
    """
    import test_cpu_attention as drawn
    import test_cpu_backward as drawn_backwards
    import test_cpu_lanes as drawn_lanes
    import test_linear_kernel as drawn_linear
    import test_packed_rows as drawn_packed
    import torch

    from attn_pass.devices.cpu.kernel import build, source

    built, more = built_as(name)
    build._FLAGS = ("-O1", "-g", *build._FLAGS[1:], *SANITIZERS[sanitizer][1], *more)
    wanted = [s for s in source.ALL if s.name == built]
    build.of_this_machine = lambda tiles: (
        tuple(s for s in wanted if tiles or not s.has_tiles) or source.of_this_machine(False)
    )
    torch.set_num_threads(4)
    failed = [text for dtype in drawn.DTYPES for text in drawn.failures(dtype, COUNT, seed=11)]
    failed += drawn.failures(torch.float32, COUNT // 4, seed=12, scored=1.0)
    failed += [text for dtype in drawn.DTYPES for text in drawn_lanes.failures(dtype, COUNT // 2, seed=16)]
    failed += [text for dtype in drawn.DTYPES for text in drawn_backwards.failures(dtype, COUNT // 2, seed=13)]
    failed += drawn_backwards.failures(torch.float32, COUNT // 4, seed=14, scored=1.0)
    failed += [text for dtype in drawn.DTYPES for text in drawn_packed.failures(dtype, COUNT // 2, seed=15)]
    failed += [text for dtype in drawn.DTYPES for text in drawn_linear.failures(dtype, COUNT // 2, seed=17)]
    if failed:
        raise SystemExit("\n".join(failed))


def built_as(name: str) -> tuple[str, tuple[str, ...]]:
    """The instruction set that is built for a name, and with which flags."""
    from attn_pass.devices.cpu.kernel import source

    if name == ARM:
        return "plain", ("-DATTN_AS_ON_ARM",)
    return name, EMULATED if name == "amx" and not source.has_tiles() else ()


def sets_here() -> list[str]:
    """Those that this machine has, as `ATTN_PASS_CPU_ISA` calls them."""
    from torch.cpu import _is_avx2_supported, _is_avx512_bf16_supported, _is_avx512_supported

    from attn_pass.devices.cpu.kernel.source import has_tiles

    has = {
        "amx": has_tiles() or _is_avx512_bf16_supported(),
        "avx512_bf16": _is_avx512_bf16_supported(),
        "avx512": _is_avx512_supported(),
        "avx2": _is_avx2_supported(),
        "plain": True,
        ARM: True,
    }
    return [name for name, here in has.items() if here]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        here(*sys.argv[2:])
    else:
        asked = sys.argv[1:]
        sys.exit(main(asked[:1] or list(SANITIZERS), asked[1:] or sets_here()))
