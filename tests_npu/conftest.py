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
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))  # the package is not installed in that environment
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # plain `import torch` would import torch_npu
Ask = Callable[..., Any]


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
    """Runs a function of `probes` in a process with torch_npu loaded, as on a device of that name."""

    def run(name: str, *numbers: int, soc: str = "Ascend910B3") -> Any:
        told = process(stubs, soc, [str(HERE / "probes.py"), name, *map(str, numbers)])
        return json.loads(told.strip().splitlines()[-1])

    return run


def process(stubs: Path, soc: str, command: list[str]) -> str:
    """What a process with torch_npu printed."""
    paths = os.pathsep.join(str(p) for p in (ROOT, ROOT / "tests", HERE))
    environment = {**stub_libraries.environment(stubs, soc), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=900, cwd=ROOT
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout
