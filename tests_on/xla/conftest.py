"""Finds the project, and sets the device before torch_xla is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
os.environ.setdefault("PJRT_DEVICE", "CPU")
