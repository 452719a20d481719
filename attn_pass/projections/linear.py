"""A linear layer in a graph, in every spelling: its input, its weight and its bias."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from attn_pass.graph.values import tensor_value
from attn_pass.reading.vocabulary import Call, one_or_many, operation_of, understand

_PRODUCTS = ("linear", "matmul", "baddbmm")
_TURNS = ("t", "mT", "transpose", "permute")
_TURNED = ("T", "mT", "H", "mH")


@dataclass(frozen=True)
class Linear:
    """``input @ weight.T + bias``.

    Attributes:
        node: the result, (..., N).
        input: (..., K).
        weight: the node that holds it as a layer does, (N, K); (K, N) ``by_columns``.
        bias: (N,), if there is one.
        by_columns: the weight is multiplied as it is, not transposed.
    """

    node: Node
    input: Node
    weight: Node
    bias: Node | None = None
    by_columns: bool = False

    @property
    def is_given(self) -> bool:
        """Whether the program was given the weight, as a parameter, a constant or an input."""
        return self.weight.op in ("placeholder", "get_attr")

    @property
    def parameters(self) -> tuple[Node, ...]:
        """The weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def linear_of(node: Node) -> Linear | None:
    """The linear layer that a node is: a product with a matrix that the program was given; None for anything else."""
    linear = product_of(node)
    return linear if linear is not None and linear.is_given else None


def product_of(node: Node) -> Linear | None:
    """The same where the matrix may be computed by the program, of a size that is known."""
    call = understand(node) if operation_of(node) in _PRODUCTS else None
    if call is None or call.in_place:
        return None
    if call.op == "linear":
        return _linear(node, call["input"], call["other"], call["bias"])
    if call.op == "matmul":
        return _product(node, call["input"], call["other"], None)
    if call["alpha"] == 1 and call["beta"] == 1:
        return _product(node, call["batch1"], call["batch2"], call["input"])
    return None


def _product(node: Node, rows: object, matrix: object, bias: object) -> Linear | None:
    """A product that is a linear layer: with a matrix as it is, or with one that is transposed for it."""
    if not isinstance(matrix, Node) or not isinstance(rows, Node):
        return None
    call = understand(matrix)
    if call is not None and _turns_matrix(matrix, call):
        return _linear(node, rows, call["input"], bias)
    return _linear(node, rows, matrix, bias, by_columns=True)


def _linear(node: Node, rows: object, weight: object, bias: object, by_columns: bool = False) -> Linear | None:
    if not isinstance(rows, Node) or not isinstance(weight, Node) or not isinstance(bias, Node | None):
        return None
    matrix, added, result = tensor_value(weight), tensor_value(bias), tensor_value(node)
    if matrix is None or matrix.dim() != 2 or result is None or (added is not None and added.dim() != 1):
        return None
    is_static = all(type(size) is int for size in matrix.shape)
    return Linear(node, rows, weight, bias, by_columns) if is_static else None


def _turns_matrix(matrix: Node, call: Call) -> bool:
    """Whether a node is another one with its two dimensions swapped."""
    value = tensor_value(matrix)
    if value is None or value.dim() != 2 or call.in_place:
        return False
    if call.op == "getattr":  # Dynamo's for attributes
        return call["name"] in _TURNED
    if call.op not in _TURNS:
        return False
    if call.op == "permute":
        dims = one_or_many(call["dims"])
        return [d % 2 for d in dims] == [1, 0] if all(isinstance(d, int) for d in dims) else False
    return call.op != "transpose" or (call["dim0"] - call["dim1"]) % 2 == 1
