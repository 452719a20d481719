"""An AOTInductor package for any batch size: compiled, its report read, run in Python, and run from C++.

    python examples/aotinductor.py           # about a minute on two cores
    python examples/aotinductor.py --small   # one small package, compiled for real: some twenty seconds

The model is a table of memory slots that every token of a batch attends to (pytorch/pytorch#151287): one query per row,
and keys and values that all rows share. Stock copies them for every row; the pass turns the batch into query rows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from side_by_side import compare
from torch import Tensor, nn

import attn_pass

CPP = """To run the package without Python, from the repository's folder:

  TORCH=$(python -c 'import torch; print(torch.__path__[0])')
  g++ -std=c++20 examples/cpp/run_package.cpp -o run_package \\
      -I$TORCH/include -I$TORCH/include/torch/csrc/api/include \\
      -L$TORCH/lib -ltorch -ltorch_cpu -lc10 -Wl,-rpath,$TORCH/lib
  ./run_package --report {package}
  ./run_package {package} {inputs} outputs.pt
"""


class Memory(nn.Module):
    def __init__(self, slots: int, heads: int = 4, dim: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.keys = nn.Parameter(torch.randn(1, heads, slots, dim))
        self.values = nn.Parameter(torch.randn(1, heads, slots, dim))

    def forward(self, x: Tensor) -> Tensor:
        query = x.unflatten(-1, (self.heads, 1, -1))  # (B, H, 1, D)
        return F.scaled_dot_product_attention(query, self.keys, self.values).flatten(1)


def main(small: bool = False, folder: Path | None = None) -> float:
    """Returns the error of the package against eager."""
    folder = folder or Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    model, x = Memory(slots=128 if small else 2048).eval(), torch.randn(64 if small else 1000, 128)
    shapes = {"x": {0: torch.export.Dim("batch", min=1, max=2048)}}

    package = attn_pass.aot_compile(model, (x,), dynamic_shapes=shapes, package_path=folder / "memory.pt2")
    print(attn_pass.package_report(package))
    passed = torch._inductor.aoti_load_package(package)

    with torch.no_grad():
        ways = {"eager": lambda: model(x)}
        if not small:
            exported = torch.export.export(model, (x,), dynamic_shapes=shapes)
            stock = torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "stock.pt2"))
            unchanged = torch._inductor.aoti_load_package(stock)
            ways["AOTInductor"] = lambda: unchanged(x)
        ways["attn_pass"] = lambda: passed(x)
        found = compare(ways, rounds=5 if small else 10)
        other = torch.randn(7, 128)  # the package takes any batch size
        torch.testing.assert_close(passed(other), model(other), rtol=1e-4, atol=1e-5)

    torch.save([x], folder / "inputs.pt")
    print(CPP.format(package=package, inputs=folder / "inputs.pt"))
    return found


if __name__ == "__main__":
    typer.run(main)
