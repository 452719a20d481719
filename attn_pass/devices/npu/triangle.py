"""Whether the mask beside ``sparse_mode`` 2 to 4 is the triangle that torch_npu requires.

Its elements are computed if the program creates it. An input tensor that is used unchanged is checked by its values
if they are known, and otherwise assumed to be the triangle.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.fx import Node

from attn_pass.compat import held_now
from attn_pass.graph.subgraphs import attribute
from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Apply, Expr, Load, loads
from attn_pass.model.index import Axis, axis_index
from attn_pass.model.reference import Evaluation
from attn_pass.reading.reader import Reader

SIDE = 2048
_ROW, _KEY = Axis("triangle_i", SIDE), Axis("triangle_j", SIDE)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_ASKED = "torch.ones(2048, 2048, dtype=torch.bool).triu(1): True is masked out"
_OTHER = f"the mask beside its sparse_mode is not {_ASKED}"
_UNREAD = f"the mask beside its sparse_mode is computed in a way that is not read, so it may not be {_ASKED}"


def check_triangle(reader: Reader, mask: Node, at: int) -> tuple[str | None, bool]:
    """Why a mask of 2048 x 2048 is not accepted as the triangle, or None; whether it is accepted without a check."""
    value = tensor_value(mask)
    position = (*(0,) * (0 if value is None else value.dim() - 2), axis_index(_ROW), axis_index(_KEY))
    element = reader.element(mask, position, at)
    numbers_of = {load: _number(reader, load) for load in loads(element)}
    if None not in numbers_of.values():
        numbers = tuple((load.source, number) for load, number in numbers_of.items() if number is not None)
        return (None if _is_triangle(element, numbers) else _OTHER), False
    load = element.args[0] if isinstance(element, Apply) and element.op == "cast" else element
    if not isinstance(load, Load) or (isinstance(element, Apply) and element.dtype != torch.bool):
        return _UNREAD, False
    node = reader.source_nodes[load.source]
    whole_load = [(i, size) for i, size in zip(load.index, reader.shape(node)) if size != 1]
    if node.op not in ("placeholder", "get_attr") or whole_load != [(axis_index(_ROW), SIDE), (axis_index(_KEY), SIDE)]:
        return _UNREAD, False
    if reader.effects.mutations(node):
        return _UNREAD, False
    caller = reader.caller
    if caller is not None and node in caller.passed:
        return check_triangle(caller.reader, caller.passed[node], caller.time)
    held = reader.known[node][1] if node in reader.known else attribute(node)
    held = held_now(node) if held is None else held
    if isinstance(held, torch.Tensor) and type(held) in _PLAIN and not held.is_meta:
        return (None if torch.equal(held.reshape(SIDE, SIDE).cpu() != 0, _triangle()) else _OTHER), True
    return None, True


def _number(reader: Reader, load: Load) -> int | None:
    """The one number a tensor is full of, where the program makes it so: of a type index arithmetic is not for."""
    node = reader.source_nodes[load.source]
    call = reader.call(node)
    if call is None or call.in_place or reader.effects.mutations(node):
        return None
    return {"ones": 1, "zeros": 0}.get(call.op)


@lru_cache(maxsize=8)
def _is_triangle(element: Expr, numbers: tuple[tuple[int, int], ...]) -> bool:
    sources = [torch.tensor(0)] * (1 + max((source for source, _ in numbers), default=0))
    for source, number in numbers:
        sources[source] = torch.tensor(number).expand(SIDE, SIDE)
    try:
        values = Evaluation((_ROW, _KEY), sources, {}).expression(element)
    except (KeyError, IndexError):  # a size that is known at run time only
        return False
    return torch.equal((values != 0).expand(SIDE, SIDE), _triangle())


@lru_cache(maxsize=1)
def _triangle() -> torch.Tensor:
    return torch.ones(SIDE, SIDE, dtype=torch.bool).triu(1)
