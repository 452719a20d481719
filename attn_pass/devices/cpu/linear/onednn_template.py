"""Inductor's code for `attn_pass::linear`: torch's call of oneDNN, which packages reach through torch's own shim.

The weight is read as it lies. Nothing is packed ahead: with 512 rows that gained 3 % more, and the packed copy would
stay beside the weight.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.mkldnn_ir import LinearUnary

from attn_pass.devices.cpu.linear.onednn_call import ONEDNNS, OPERATOR


@register_lowering(OPERATOR, type_promotion_kind=None)
def lower(input: Any, weight: Any, bias: Any = None, activation: str = "none") -> Any:
    """A contiguous buffer."""
    realized = ir.ExternKernel.realize_input
    contiguous = ir.ExternKernel.require_contiguous
    operands = [contiguous(realized(input)), realized(weight)]
    name, algorithm = ONEDNNS[activation]
    pointwise: list[Any] = [name, [-1], algorithm]
    if bias is None:
        pointwise.insert(0, None)
    else:
        operands.append(contiguous(realized(bias)))
    size = [*input.get_size()[:-1], weight.get_size()[0]]
    layout = ir.FixedLayout(device=input.get_device(), dtype=input.get_dtype(), size=size)
    return ir.TensorBox.create(LinearUnary(layout=layout, inputs=operands, constant_args=pointwise))
