"""The stubs of CANN, built once, and processes that load torch_npu over them: one device name a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import stub_libraries

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # the package is not installed in that environment
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # plain `import torch` would import torch_npu
Ask = Callable[..., Any]
ASKED = {
    "Ascend910B3": ("schemas", "shapes", "device", "arguments", "dispatch:1", "rewriting:1", "joint"),
    "Ascend910_9391": ("dispatch:11",),
    "Ascend950DT_9571": ("dispatch:11", "rewriting:0"),
    "Ascend910A": ("dispatch:11",),
    "Ascend910B": ("device",),
    "Ascend310P3": ("device", "dispatch:11"),
}
"""By the name of the device: functions of `probes`, each with its number where it takes one."""


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the libraries."""
    if find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed here: make test-npu does it in an environment of its own")
    folder = tmp_path_factory.mktemp("cann")
    assert stub_libraries.build(Path(sysconfig.get_paths()["purelib"]), folder) > 50
    return folder


@pytest.fixture(scope="session")
def ask(stubs: Path) -> Ask:
    """What a function of `probes` says in a process with torch_npu loaded, as on a device of that name.

    Loading it takes seconds: all that is asked of one name is asked at once.
    """
    told: dict[str, dict[str, Any]] = {}

    def answer(asked: str, soc: str = "Ascend910B3") -> Any:
        if soc not in told:
            printed = process(stubs, soc, [str(HERE / "probes.py"), *ASKED[soc]])
            told[soc] = json.loads(printed.strip().splitlines()[-1])
        return told[soc][asked]

    return answer


def process(stubs: Path, soc: str, command: list[str]) -> str:
    """What a process with torch_npu printed."""
    paths = os.pathsep.join(str(p) for p in (ROOT, ROOT / "tests" / "support", HERE))
    environment = {**stub_libraries.environment(stubs, soc), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=900, cwd=ROOT
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout
