"""Tests the fuzzer: injects faults into a copy of the package, one at a time, and counts the programs until it is
caught.

``python tests/fuzz/fuzz_faults.py [NAME ..]`` runs the programs of `test_fuzz` on each; minutes a fault that is missed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "attn_pass"


@dataclass(frozen=True)
class Fault:
    """What stands in a file of the package, and what a mistake would make of it."""

    name: str
    file: str
    right: str
    wrong: str


FAULTS = (
    Fault(
        "float32 masks on float16 scores taken for float16's",
        "patterns/lifted_softmax.py",
        "        return reduce(torch.promote_types, types, softmax)",
        "        return _narrowest(scores, softmax)",
    ),
    Fault(
        "numbers that float16 scores absorb made one",
        "targets/masks.py",
        "    low = plan.call(aten.mul.Scalar, low, HALF_ABSORBS)",
        "    low = plan.call(aten.clamp.default, plan.call(aten.mul.Scalar, low, 1e38), _LOWEST, _LOWEST)",
    ),
    Fault(
        "no assumption on masked keys",
        "targets/masks.py",
        "    return filled and setting.eager_form",
        "    return False",
    ),
    Fault(
        "operands written after the result saved as they are",
        "graph/edit.py",
        "        return value if later is None else self.call(aten.clone.default, value)",
        "        return value",
    ),
    Fault("a divisor folded as a factor", "reading/scores.py", "number = 1 / number if inverse else number", "pass"),
    Fault(
        "a bias not scaled with the scores",
        "reading/scores.py",
        'apply("mul", _wide(scores.bias, dtype), Const(number))',
        "_wide(scores.bias, dtype)",
    ),
    Fault("causal off by one", "reading/creation.py", "index_value(row + offset)", "index_value(row + offset + 1)"),
    Fault("less than read as at most", "model/conditions.py", '"lt": right - left - 1', '"lt": right - left'),
    Fault("mask polarity", "reading/scores.py", '        condition = apply("not", condition)', "        pass"),
    Fault("a permutation read backwards", "reading/views.py", "out[come] = position[to]", "out[to] = position[come]"),
    Fault(
        "x.mT read as x",
        "reading/views.py",
        'if call["name"] in ("mT", "mH"):\n            return (*order[:-2], rank - 1, rank - 2)',
        'if call["name"] in ("mT", "mH"):\n            return tuple(order)',
    ),
    Fault("alpha dropped", "reading/pointwise.py", "    if alpha != 1:", "    if False:"),
    Fault(
        "wrong order of grouped heads",
        "reading/views.py",
        "divide(position[dim], repeats)[0]",
        "divide(position[dim], before[dim])[1]",
    ),
    Fault(
        "softmax axis not checked",
        "patterns/sinks.py",
        "    if outside or not isinstance(first, int) or not 0 <= first <= extra:",
        "    if not isinstance(first, int):",
    ),
    Fault(
        "the softmax taken for one over the last dimension",
        "patterns/softmax_forms.py",
        'Softmax(call["input"], dims[0], (node,), not safe,',
        'Softmax(call["input"], value.dim() - 1, (node,), not safe,',
    ),
    Fault("weak fills mask", "reading/scores.py", "WEAKEST_FILL = -0.99e9", "WEAKEST_FILL = -4.0"),
    Fault(
        "writes in the window not seen",
        "patterns/base.py",
        "        if mutation is not None:\n            raise",
        "        if False:\n            raise",
    ),
    Fault(
        "other users of the scores not seen",
        "patterns/base.py",
        "            if user in inside or user in of_a_shape or is_metadata_assertion(user):",
        "            if True:",
    ),
    Fault(
        "the start of a slice ignored",
        "reading/views.py",
        "position[dim] * step + start, *position",
        "position[dim] * step, *position",
    ),
    Fault(
        "the sign of a negative scale lost",
        "targets/sdpa.py",
        "            query = plan.call(aten.neg.default, query)",
        "            pass",
    ),
    Fault(
        "factors of keys taken for factors of rows",
        "reading/scores.py",
        'raise NotAffine("the scores are multiplied by something that differs from key to key")',
        "pass",
    ),
    Fault(
        "fully masked rows proved away",
        "model/structure.py",
        "        return False\n    condition = structure",
        "        return True\n    condition = structure",
    ),
    Fault(
        "detach looked through in training",
        "reading/use_def.py",
        'if call.op == "detach" and value',
        'if call.op == "none" and value',
    ),
)

_RUN = """
import sys, torch
torch.set_num_threads(1)
from fuzz_property import Tally, Wrong
from fuzz_run import batch
import attn_pass
assert attn_pass.__file__.startswith(sys.argv[1]), attn_pass.__file__
tally = Tally()
for part in range(4):
    try:
        batch(part, 450, tally, shrink=False)
    except Wrong as error:
        done = tally.counts["plain"] + tally.counts["near misses"]
        print(f"caught after {done} programs: {str(error).splitlines()[0][:100]}")
        break
else:
    print("missed")
"""


def main(names: list[str]) -> None:
    for fault in (f for f in FAULTS if not names or f.name in names):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(PACKAGE, Path(folder) / "attn_pass", ignore=shutil.ignore_patterns("__pycache__"))
            target = Path(folder) / "attn_pass" / fault.file
            text = target.read_text()
            assert text.count(fault.right) == 1, f"{fault.name}: {text.count(fault.right)} places in {fault.file}"
            target.write_text(text.replace(fault.right, fault.wrong))
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([folder, str(HERE), str(HERE.parent / "support")]),
            }
            ran = subprocess.run(
                [sys.executable, "-c", _RUN, folder], env=environment, capture_output=True, text=True, cwd=folder
            )
            print(f"{fault.name:42s} {ran.stdout.strip() or ran.stderr.strip()[-300:]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
