"""Sums of products: matmul, mv, baddbmm, einsum, inner, vecdot and others in one form: letters over operands."""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.model.index import Axis, Index, axis_index, divide, product
from attn_pass.reading.views import Position
from attn_pass.reading.vocabulary import Call, one_or_many

PRODUCTS = frozenset({"matmul", "baddbmm", "einsum", "tensordot", "inner", "vecdot", "multi_dot"})


@dataclass(frozen=True)
class Product:
    """``result[out] = alpha * sum_summed factors * left[...] * right[...] + beta * addend``, one letter a dimension.

    ``summed`` are the letters summed over, slowest first; ``summed_size`` is how many elements they run over together.
    """

    node: Node
    left: Node
    right: Node
    out_letters: str
    left_letters: str
    right_letters: str
    summed: str
    summed_size: Index
    left_shape: Position
    right_shape: Position
    addend: Node | None = None
    alpha: Any = 1
    beta: Any = 1
    factors: tuple[tuple[Node, str], ...] = ()  # further operands of an einsum, the same for all that is summed over
    times: Node | None = None  # the multiplication, where the product is a sum of one

    def positions(self, position: Position, summed: Axis) -> tuple[Position, Position]:
        """Where the operands are read for the element at ``position``, ``summed`` being the index summed over."""
        at: dict[str, Index] = dict(zip(self.out_letters, position))
        rest = axis_index(summed)
        for letter in reversed(self.summed[1:]):
            rest, at[letter] = divide(rest, self.left_shape[self.left_letters.index(letter)])
        at[self.summed[0]] = rest
        return (
            tuple(0 if size == 1 else at[c] for c, size in zip(self.left_letters, self.left_shape)),
            tuple(0 if size == 1 else at[c] for c, size in zip(self.right_letters, self.right_shape)),
        )


def product_of(node: Node, call: Call, sizes: Sizes) -> Product | None:
    """The product a call computes, or None when it is none."""
    addend, alpha, beta = None, 1, 1
    if call.op == "einsum":
        return _einsum(node, call, sizes)
    if call.op == "vecdot":
        return _vecdot(node, call, sizes)
    if call.op == "matmul":
        left, right = call["input"], call["other"]
    elif call.op == "multi_dot":
        tensors = one_or_many(call["tensors"])
        if len(tensors) != 2:
            return None
        left, right = tensors
    elif call.op == "baddbmm":
        left, right, addend = call["batch1"], call["batch2"], call["input"]
        alpha, beta = call["alpha"], call["beta"]
    elif call.op == "tensordot":
        return _tensordot(node, call, sizes)
    elif call.op in ("inner", "linear"):
        return _inner(node, call, sizes)
    else:
        return None
    a, b = tensor_value(left), tensor_value(right)
    if a is None or b is None or a.dim() == 0 or b.dim() == 0:
        return None
    batch = string.ascii_lowercase[: max(a.dim(), b.dim(), 2) - 2]
    left_letters = "K" if a.dim() == 1 else batch[len(batch) - (a.dim() - 2) :] + "IK"
    right_letters = "K" if b.dim() == 1 else batch[len(batch) - (b.dim() - 2) :] + "KJ"
    out_letters = batch + ("I" if a.dim() > 1 else "") + ("J" if b.dim() > 1 else "")
    return _make(node, left, right, (left_letters, right_letters, out_letters), sizes, addend, alpha, beta)


def _make(
    node: Node,
    left: Node,
    right: Node,
    letters: tuple[str, str, str],
    sizes: Sizes,
    addend: Node | None = None,
    alpha: Any = 1,
    beta: Any = 1,
    factors: tuple[tuple[Node, str], ...] = (),
) -> Product | None:
    a, b = tensor_value(left), tensor_value(right)
    if a is None or b is None:
        return None
    left_letters, right_letters, out_letters = letters
    summed = "".join(c for c in left_letters if c not in out_letters)
    if not summed or set(summed) != (set(left_letters) | set(right_letters)) - set(out_letters):
        return None
    if not set(summed) <= set(right_letters) or any(len(set(text)) != len(text) for text in letters):
        return None
    left_shape, right_shape = sizes.shape(a), sizes.shape(b)
    lengths = [left_shape[left_letters.index(c)] for c in summed]
    if lengths != [right_shape[right_letters.index(c)] for c in summed]:
        return None
    return Product(
        node,
        left,
        right,
        out_letters,
        left_letters,
        right_letters,
        summed,
        product(lengths),
        left_shape,
        right_shape,
        addend,
        alpha,
        beta,
        factors,
    )


def product_of_sum(node: Node, dim: int, keepdim: bool, times: Node, call: Call, sizes: Sizes) -> Product | None:
    """``(left * right).sum(dim)`` of two tensors that are broadcast against each other; ``call`` multiplies them.

    A dimension that is kept is a letter that neither of them has.
    """
    left, right = call["input"], call["other"]
    a, b = tensor_value(left), tensor_value(right)
    if a is None or b is None or a.dim() != b.dim() or not 0 < a.dim() <= len(string.ascii_lowercase):
        return None
    letters = string.ascii_lowercase[: a.dim()]
    out_letters = letters[:dim] + "K" * keepdim + letters[dim + 1 :]
    product = _make(node, left, right, (letters, letters, out_letters), sizes)
    return None if product is None else replace(product, times=times)


def _inner(node: Node, call: Call, sizes: Sizes) -> Product | None:
    """``inner(a, b)`` and ``linear(a, b)``: over the last dimension of both."""
    left, right = call["input"], call["other"]
    a, b = tensor_value(left), tensor_value(right)
    if a is None or b is None or a.dim() == 0 or b.dim() == 0 or call.get("bias") is not None:
        return None
    rows, columns = string.ascii_lowercase[: a.dim() - 1], string.ascii_uppercase[: b.dim() - 1]
    return _make(node, left, right, (rows + "z", columns + "z", rows + columns), sizes)


def _vecdot(node: Node, call: Call, sizes: Sizes) -> Product | None:
    """``vecdot(a, b, dim)``, which conjugates complex numbers; ``dim`` is of both, broadcast against each other."""
    left, right = call["input"], call["other"]
    a, b = tensor_value(left), tensor_value(right)
    if a is None or b is None or a.is_complex() or b.is_complex():
        return None
    rank = max(a.dim(), b.dim())
    if type(call["dim"]) is not int or not -rank <= call["dim"] < rank <= len(string.ascii_lowercase):
        return None
    letters = string.ascii_lowercase[:rank]
    summed = letters[call["dim"]]
    names = (letters[rank - a.dim() :], letters[rank - b.dim() :], letters.replace(summed, ""))
    return _make(node, left, right, names, sizes)


def _tensordot(node: Node, call: Call, sizes: Sizes) -> Product | None:
    left, right = call["input"], call["other"]
    dims = call.get("dims", (call.get("dims_self"), call.get("dims_other")))
    a, b = tensor_value(left), tensor_value(right)
    if a is None or b is None:
        return None
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    pairs = [p if isinstance(p, (list, tuple)) else [p] for p in dims] if isinstance(dims, (list, tuple)) else []
    if len(pairs) != 2 or not all(isinstance(d, int) for p in pairs for d in p):
        return None
    names = list(string.ascii_lowercase[: a.dim()])
    others = list(string.ascii_uppercase[: b.dim()])
    for one, other in zip(*pairs):
        others[other] = names[one]
    summed = {names[one] for one in pairs[0]}
    out = "".join(c for c in (*names, *others) if c not in summed)
    return _make(node, left, right, ("".join(names), "".join(others), out), sizes)


def _einsum(node: Node, call: Call, sizes: Sizes) -> Product | None:
    equation, operands = call["equation"], call.get("operands", ())
    if isinstance(equation, Node):
        equation, operands = _with_equation((equation, *operands))
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) not in (2, 3):
        return None
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    values = [v for v in map(tensor_value, operands) if v is not None]
    if len(parts) != len(operands) or len(values) != len(operands):
        return None
    if not arrow:
        out = "..." * ("..." in inputs) + "".join(c for c in sorted(set(inputs) - set(",.")) if inputs.count(c) == 1)
    unused = [c for c in string.ascii_uppercase if c not in equation]
    hidden = [v.dim() - len(p.replace("...", "")) if "..." in p else 0 for v, p in zip(values, parts)]
    most = max(hidden)
    if most > len(unused):
        return None
    names = "".join(unused[:most])
    letters = [p.replace("...", names[most - h :]) for p, h in zip(parts, hidden)]
    if any(len(text) != v.dim() for text, v in zip(letters, values)):
        return None
    out = out.replace("...", names)
    factors: tuple[tuple[Node, str], ...] = ()
    if len(operands) == 3:
        # One of them is only a factor of the others' product: the one with the fewest dimensions.
        number = min(range(3), key=lambda n: len(letters[n]))
        if not set(letters[number]) <= set(out) or len(set(letters[number])) != len(letters[number]):
            return None
        factors = ((operands[number], letters[number]),)
        operands = [o for n, o in enumerate(operands) if n != number]
        letters = [o for n, o in enumerate(letters) if n != number]
    return _make(node, operands[0], operands[1], (letters[0], letters[1], out), sizes, factors=factors)


def _with_equation(given: tuple[object, ...]) -> tuple[str | None, tuple[object, ...]]:
    """The equation and operands of ``einsum(a, [0, 1], b, [2, 1], [0, 2])``; no equation where it is not one."""
    last = given[-1:] if len(given) % 2 else ()
    lists = [_subscripts(each) for each in (*given[1::2], *last)]
    names = [each for each in lists if each is not None]
    if len(names) != len(lists):
        return None, ()
    inputs = names[: len(given) // 2]
    return ",".join(inputs) + "".join(f"->{each}" for each in names[len(inputs) :]), given[: len(given) - len(last) : 2]


def _subscripts(numbers: object) -> str | None:
    """A list of subscripts as torch spells it; None for anything else."""
    if not isinstance(numbers, (list, tuple)):
        return None
    if any(n is not Ellipsis and (type(n) is not int or not 0 <= n < len(_SUBSCRIPTS)) for n in numbers):
        return None
    return "".join("..." if n is Ellipsis else _SUBSCRIPTS[n] for n in numbers)


_SUBSCRIPTS = string.ascii_uppercase + string.ascii_lowercase
