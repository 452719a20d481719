"""Puts the helpers that tests share on the path, where it is not pytest that runs programs."""

import sys
from pathlib import Path

SUPPORT = str(Path(__file__).parents[1] / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)
