"""Sets what libtpu reads before anything imports JAX, and finds the project."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from bench.suites.seeds import tpu_aot  # noqa: E402

tpu_aot.prepare()
