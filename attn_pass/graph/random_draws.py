"""Which nodes draw random numbers: draws that change with every run, and dropouts that drop."""

from __future__ import annotations

import sys
from typing import Any

from torch.fx import Node

from attn_pass.graph.writes import RANDOM, traits_of

_DRAWN_IN_PLACE = frozenset(
    {"bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform"}
)


def drops_something(node: Node) -> bool:
    """Whether a dropout surely makes a new tensor: training, with a probability that is not 0."""
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    default = "alpha" not in str(getattr(node.target, "__name__", ""))  # of torch.nn.functional; others take no default
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", node.kwargs.get("train", default))
    return training is True and isinstance(p, float) and p > 0


def draws_random_numbers(node: Node) -> bool:
    """Whether a node that counts as pure moves the random stream: a dropout that drops."""
    return traits_of(node.op, node.target).drops and drops_something(node)


def may_draw(node: Node) -> bool:
    """Whether a node gives other numbers each time it runs: a draw, or a dropout that is not known to drop nothing."""
    if node.op not in ("call_function", "call_method"):
        return False
    target = node.target
    schema = getattr(target, "_schema", None)
    name = target if isinstance(target, str) else schema.name if schema else getattr(target, "__name__", "")
    name = name.rpartition("::")[2]
    if name in RANDOM or (name.endswith("_") and name[:-1] in _DRAWN_IN_PLACE):
        return True
    if "attention" in name:
        p = _argument(node, _place_of_dropout(name, schema), ("dropout_p",))
        return p is not None and p != 0
    if "dropout" not in name:
        return False
    p, training = (_argument(node, n, names) for n, names in ((1, ("p",)), (2, ("training", "train"))))
    return p != 0 and training is not False


def _place_of_dropout(name: str, schema: Any) -> int:
    """The number of an attention's argument ``dropout_p``; of none that there is where only its name can tell."""
    if schema is None:
        return 4 if name == "scaled_dot_product_attention" else sys.maxsize
    names = [argument.name for argument in schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else sys.maxsize


def _argument(node: Node, position: int, names: tuple[str, ...]) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[n] for n in names if n in node.kwargs), None)
