"""The pointwise operations of expressions, one row each: their spellings, their meaning, the emitted code.

A program's spelling is a word of `attn_pass.reading.vocabulary`: ``torch.`` a function, ``op.`` one of `operator`,
``aten.`` an overload, ``.`` a method; one that this torch does not have is passed over.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
_PAIR = ("input", "other")


@dataclass(frozen=True)
class Operation:
    """One operation: elements of its operands to an element of its result."""

    name: str
    parameters: str  # of all its spellings, with defaults
    spellings: str
    operands: tuple[str, ...]  # those of its parameters that hold elements
    torch: Callable[..., torch.Tensor]  # what it computes
    aten: OpOverload  # what is emitted for it
    aten_number: OpOverload | None = None  # and where its last operand is a number; None where ``aten`` takes both
    on_numbers: Callable[[Any, Any], Any] | None = None  # what it is of two numbers or indices, where that is folded
    infix: str = ""  # its sign in Python
    cpp: str = ""  # its function in the CPU kernel's `tiles.hpp`

    def overload(self, of_tensors: bool) -> OpOverload:
        """What is emitted, where the last operand is a tensor or a number."""
        return self.aten if of_tensors or self.aten_number is None else self.aten_number


_ROWS = (
    Operation(
        "add", "input, other, alpha=1",
        "torch.add op.add .add .__add__ .__radd__ aten.add.Tensor aten.add.Scalar",
        _PAIR, torch.add, aten.add.Tensor, on_numbers=operator.add, infix="+", cpp="add",
    ),
    Operation(
        "sub", "input, other, alpha=1",
        "torch.sub torch.subtract op.sub .sub .subtract aten.sub.Tensor aten.sub.Scalar "
        "aten.subtract.Tensor aten.subtract.Scalar",
        _PAIR, torch.sub, aten.sub.Tensor, on_numbers=operator.sub, infix="-", cpp="sub",
    ),
    Operation(
        "mul", "input, other",
        "torch.mul torch.multiply op.mul .mul .multiply aten.mul.Tensor aten.mul.Scalar "
        "aten.multiply.Tensor aten.multiply.Scalar",
        _PAIR, torch.mul, aten.mul.Tensor, on_numbers=operator.mul, infix="*", cpp="mul",
    ),
    Operation(
        "div", "input, other, rounding_mode=None",
        "torch.div torch.divide torch.true_divide op.truediv .div .divide .true_divide aten.div.Tensor "
        "aten.div.Scalar aten.div.Tensor_mode aten.div.Scalar_mode aten.true_divide.Tensor aten.true_divide.Scalar "
        "aten.divide.Tensor aten.divide.Scalar aten.divide.Tensor_mode aten.divide.Scalar_mode",
        _PAIR, torch.div, aten.div.Tensor, infix="/", cpp="div",
    ),
    Operation(
        "floordiv", "input, other",
        "torch.floor_divide op.floordiv .floor_divide .__floordiv__ aten.floor_divide.default aten.floor_divide.Scalar",
        _PAIR, torch.floor_divide, aten.floor_divide.default, infix="//",
    ),
    Operation(
        "remainder", "input, other",
        "torch.remainder op.mod .remainder .__mod__ aten.remainder.Tensor aten.remainder.Scalar",
        _PAIR, torch.remainder, aten.remainder.Tensor, aten.remainder.Scalar, infix="%",
    ),
    Operation(
        "neg", "input", "torch.neg op.neg .neg aten.neg.default",
        ("input",), torch.neg, aten.neg.default, cpp="neg",
    ),
    Operation(
        "abs", "input", "torch.abs .abs op.abs aten.abs.default",
        ("input",), torch.abs, aten.abs.default, cpp="abs",
    ),
    Operation(
        "exp", "input", "torch.exp .exp torch.special.exp aten.exp.default",
        ("input",), torch.exp, aten.exp.default, cpp="exp",
    ),
    Operation("log", "input", "torch.log .log aten.log.default", ("input",), torch.log, aten.log.default),
    Operation(
        "tanh", "input", "torch.tanh .tanh aten.tanh.default",
        ("input",), torch.tanh, aten.tanh.default, cpp="tanh",
    ),
    Operation(
        "sigmoid", "input", "torch.sigmoid .sigmoid aten.sigmoid.default",
        ("input",), torch.sigmoid, aten.sigmoid.default, cpp="sigmoid",
    ),
    Operation(
        "maximum", "input, other", "torch.maximum .maximum aten.maximum.default",
        _PAIR, torch.maximum, aten.maximum.default, cpp="maximum",
    ),
    Operation(
        "minimum", "input, other", "torch.minimum .minimum aten.minimum.default",
        _PAIR, torch.minimum, aten.minimum.default, cpp="minimum",
    ),
    Operation(
        "eq", "input, other", "torch.eq op.eq .eq .__eq__ aten.eq.Tensor aten.eq.Scalar",
        _PAIR, torch.eq, aten.eq.Tensor, aten.eq.Scalar, on_numbers=operator.eq, infix="==",
    ),
    Operation(
        "ne", "input, other", "torch.ne torch.not_equal op.ne .ne .__ne__ aten.ne.Tensor aten.ne.Scalar",
        _PAIR, torch.ne, aten.ne.Tensor, aten.ne.Scalar, on_numbers=operator.ne, infix="!=",
    ),
    Operation(
        "lt", "input, other", "torch.lt torch.less op.lt .lt .__lt__ aten.lt.Tensor aten.lt.Scalar",
        _PAIR, torch.lt, aten.lt.Tensor, aten.lt.Scalar, on_numbers=operator.lt, infix="<",
    ),
    Operation(
        "le", "input, other", "torch.le torch.less_equal op.le .le .__le__ aten.le.Tensor aten.le.Scalar",
        _PAIR, torch.le, aten.le.Tensor, aten.le.Scalar, on_numbers=operator.le, infix="<=",
    ),
    Operation(
        "gt", "input, other", "torch.gt torch.greater op.gt .gt .__gt__ aten.gt.Tensor aten.gt.Scalar",
        _PAIR, torch.gt, aten.gt.Tensor, aten.gt.Scalar, on_numbers=operator.gt, infix=">",
    ),
    Operation(
        "ge", "input, other", "torch.ge torch.greater_equal op.ge .ge .__ge__ aten.ge.Tensor aten.ge.Scalar",
        _PAIR, torch.ge, aten.ge.Tensor, aten.ge.Scalar, on_numbers=operator.ge, infix=">=",
    ),
    Operation(
        "and", "input, other",
        "torch.logical_and torch.bitwise_and op.and_ .logical_and .bitwise_and .__and__ aten.logical_and.default "
        "aten.bitwise_and.Tensor aten.__and__.Tensor",
        _PAIR, torch.logical_and, aten.logical_and.default, infix="&",
    ),
    Operation(
        "or", "input, other",
        "torch.logical_or torch.bitwise_or op.or_ .logical_or .bitwise_or .__or__ aten.logical_or.default "
        "aten.bitwise_or.Tensor aten.__or__.Tensor",
        _PAIR, torch.logical_or, aten.logical_or.default, infix="|",
    ),
    Operation(
        "not", "input",
        "torch.logical_not torch.bitwise_not op.invert .logical_not .bitwise_not aten.logical_not.default "
        "aten.bitwise_not.default",
        ("input",), torch.logical_not, aten.logical_not.default,
    ),
    Operation(
        "where", "condition, input, other",
        "torch.where aten.where.self aten.where.ScalarOther aten.where.ScalarSelf aten.where.Scalar",
        ("condition", "input", "other"), torch.where, aten.where.self, cpp="where",
    ),
)  # fmt: skip

OPERATIONS: Mapping[str, Operation] = {row.name: row for row in _ROWS}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
