"""Inductor's code for `attn_pass::linear_by_kernel`: the kernel's template, with the source in the generated code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V

from attn_pass.devices.cpu.kernel.source import LINEAR, LINEAR_FEW, LINEAR_MANY, MOST_FEW
from attn_pass.devices.cpu.kernel.template import Filled, TemplateCall, emitted, laid_out
from attn_pass.devices.cpu.linear.kernel_call import OPERATOR, lies_by_columns


class _LinearCall(TemplateCall):
    name = "attn_pass_linear"

    def chosen_kernel(self) -> str:
        rows = self.rows()
        return LINEAR if rows.free_symbols else LINEAR_FEW if rows <= MOST_FEW else LINEAR_MANY

    def rows(self) -> sympy.Expr:
        """Of the input, as a matrix."""
        return sympy.sympify(sympy_product(self.operands["input"].get_size()[:-1]))

    def filled(self, kernel: Any, out: Any) -> Filled:
        return _FilledLinear(self, kernel, out)


class _FilledLinear(Filled):
    """The statements that fill ``LinearArgs`` in."""

    template: _LinearCall

    def __str__(self) -> str:
        return "\n".join(f"  args.{line};" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        operands = self.template.operands
        for name in operands:
            yield f"{name} = {self.pointer(name)}"
        yield "out = out"
        *_, features = operands["input"].get_size()
        *_, width = self.template.layout.size
        sizes = {"rows": self.template.rows(), "features": features, "width": width}
        for name, number in {**sizes, **self.template.numbers}.items():
            yield f"{name} = {self.number(number)}"


@register_lowering(OPERATOR, type_promotion_kind=None)
def lower(input: Any, weight: Any, bias: Any = None) -> Any:
    """A contiguous buffer."""
    as_traced: Any = V.graph.current_node.args[1]
    by_columns = lies_by_columns(as_traced.meta["val"])
    contiguous = ir.ExternKernel.require_contiguous
    stored = lowerings[torch.ops.aten.permute.default](weight, [1, 0]) if by_columns else weight
    given = {"input": contiguous(input), "weight": contiguous(stored)}
    given |= {} if bias is None else {"bias": contiguous(bias)}
    operands = {name: laid_out(x) for name, x in given.items()}
    size = [*input.get_size()[:-1], weight.get_size()[0]]
    layout = ir.FixedLayout(device=input.get_device(), dtype=input.get_dtype(), size=size)
    return emitted(_LinearCall(operands, layout, {}, "", {"by_columns": int(by_columns)}))
