"""`attn_pass::attention_backward` under Inductor: the template of `template.py` with the source of the gradients.

Importing this file registers the lowering.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided, register_lowering
from torch._inductor.virtualized import V

from attn_pass.devices.cpu.kernel.gradients import BACKWARD_OPERATOR, NAMES
from attn_pass.devices.cpu.kernel.source import BACKWARD
from attn_pass.devices.cpu.kernel.template import (
    Filled,
    TemplateCall,
    emitted,
    floats_of,
    is_wanted,
    laid_out,
    numbers_of,
    operands_of,
    result_layout,
    strides_in,
)

_OPERANDS = {"query": ("q", "dq"), "key": ("k", "dk"), "value": ("v", "dv")}
_READ = ("grad", "result", "rest", "lse_grad")


class _Backward(TemplateCall):
    """One call of the backward; the first gradient is the template's result, the others are written beside it."""

    name = "attn_pass_attention_backward"
    wanted: tuple[str, ...] = ()

    def filled(self, kernel: Any, out: Any) -> Filled:
        return _Filled(self, kernel, out)

    def chosen_kernel(self) -> str:
        return BACKWARD


class _Filled(Filled):
    template: _Backward

    def __str__(self) -> str:
        lines = [*self.inputs("args.a"), *self.read(), *self.results()]
        return "\n".join(f"  {line}" for line in lines)

    def read(self) -> list[str]:
        """What the forward left, and the gradients of its results."""
        operands = self.template.operands
        rows = list(operands["grad"].get_size())
        lines = []
        for name in _READ:
            if name in operands:
                strides = strides_in(operands[name], rows[:3] if name == "lse_grad" else rows)
                lines.append(f"args.{name} = {{{self.pointer(name)}, {self.strides([*strides, 0][:4])}}};")
        return [*lines, f"args.statistics = reinterpret_cast<const float*>({self.pointer('statistics')});"]

    def results(self) -> list[str]:
        """The gradients."""
        first, *others = self.template.wanted
        lines = [self._result(first, self.out, "out")] if is_wanted(self.out) else []
        for name in others:
            node = self.template.operands[_written(name)]
            argument = f"const_cast<void*>(static_cast<const void*>({self.template.argument(node)}))"
            lines.append(self._result(name, node, argument))
        return lines

    def _result(self, name: str, node: Any, at: str) -> str:
        if name == "sink":
            return f"args.sink_rows = static_cast<float*>({at});"
        member = _OPERANDS[name][1] if name in _OPERANDS else "summed[0]"
        if name.startswith("captured"):
            member = f"summed[{1 + int(name[8:])}]"
        size, stride = list(node.get_size()), list(node.get_layout().stride)
        if name not in _OPERANDS:
            ones = [V.graph.sizevars.statically_known_equals(s, 1) for s in size]
            stride = [0] * (4 - len(size)) + [0 if one else s for one, s in zip(ones, stride)]
        if name == "distances":
            stride[2:] = (-1, 1)  # as `gradients` has it
        return f"args.{member} = {{{at}, {self.strides(stride)}}};"


def _written(name: str) -> str:
    """What a gradient is called among the operands."""
    return f"gradient of {name}"


def _layout(name: str, operands: dict[str, Any]) -> ir.FixedLayout:
    """As `gradients.gradient_like` has it."""
    q = operands["q"]
    if name == "sink":
        size = [*q.get_size()[:3], 1]
        dtype = torch.float32
    elif name in _OPERANDS:
        of = operands[_OPERANDS[name][0]]
        return result_layout(of, of.get_size()[3])
    else:
        of = operands[f"captured[{name[8:]}]" if name.startswith("captured") else name]
        size, dtype = list(of.get_size()), of.get_dtype()
    return ir.FixedLayout(q.get_device(), dtype, size, ir.FlexibleLayout.contiguous_strides(size))


@register_lowering(BACKWARD_OPERATOR, type_promotion_kind=None)
def lower(
    grad: Any, lse_grad: Any, result: Any, statistics: Any, rest: Any, wanted: list[str], *values: Any, **more: Any
) -> list[Any]:
    """The first gradient as the template's buffer, the others as ones that it writes to."""
    by_name = dict(zip(NAMES, values, strict=False)) | more
    q, k, v, scale = (by_name.pop(name) for name in NAMES[:4])
    operands = operands_of(q, k, v, by_name)
    numbers = numbers_of(operands, by_name)
    # Beside convolutions Inductor saves what has four dimensions with the second one last in memory.
    statistics = ir.ExternKernel.require_contiguous(statistics)
    of_results = {"grad": grad, "result": result, "lse_grad": lse_grad, "statistics": statistics}
    if q.get_dtype() != torch.float32:
        of_results["rest"] = rest
    operands |= {name: laid_out(x) for name, x in of_results.items() if x is not None}
    layouts = {name: _layout(name, operands) for name in wanted}
    others = {}
    for name in wanted[1:]:
        at = layouts[name]
        others[name] = empty_strided(at.size, at.stride, dtype=at.dtype, device=at.device)
    operands |= {_written(name): laid_out(x) for name, x in others.items()}
    written = tuple(map(_written, others))
    template = _Backward(
        operands, layouts[wanted[0]], floats_of(scale, by_name), by_name.get("score", ""), numbers, written
    )
    template.wanted = tuple(wanted)
    return [emitted(template), *others.values()]
