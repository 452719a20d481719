"""The modules a new process has loaded after `import torch`, and after `import attn_pass`: asked once for all tests."""

from __future__ import annotations

import json
import subprocess
import sys

from once import once

_QUESTION = """
import json, sys
import torch
before = list(sys.modules)
import attn_pass
print(json.dumps([before, list(sys.modules)]))
"""


def loaded() -> tuple[set[str], set[str]]:
    """Their names, before and after."""

    def ask() -> str:
        done = subprocess.run([sys.executable, "-c", _QUESTION], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[-1]

    before, after = json.loads(once("loaded modules", ask))
    return set(before), set(after)
