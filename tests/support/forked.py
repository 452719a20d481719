"""Several jobs of one script, each in a process of its own: forked where it has imported torch, which takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def ask(script: Path, jobs: Mapping[str, Sequence[str]]) -> str:
    """What `answer` prints in the script, as one object of JSON with the name of each job."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    line = [sys.executable, str(script), json.dumps(jobs)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return json.dumps({name: given for one in answers for name, given in one.items()})


def answer(job: Callable[[str, Sequence[str]], Any]) -> None:
    """Prints what the job gives for each name and its arguments, as a line of JSON."""
    for name, arguments in json.loads(sys.argv[1]).items():
        child = os.fork()
        if child == 0:
            sys.stdout.write("\n" + json.dumps({name: job(name, arguments)}, default=str) + "\n")
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"the process for {name} failed")
