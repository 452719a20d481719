"""The memory of fake values: their storages, their elements, and the nodes that have any."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from attn_pass.graph.subgraphs import attribute
from attn_pass.graph.values import fake_value

WITHOUT_MEMORY = frozenset({int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size})


def storages(value: Any) -> tuple[int, ...] | None:
    """The storages of a value, empty for a value without memory; None for a tensor whose storage is not known."""
    if type(value) is FakeTensor:
        try:
            return (value.untyped_storage()._cdata,)
        except NotImplementedError:  # sparse and other layouts
            return None
    if isinstance(value, torch.Tensor):
        functorch = torch._C._functorch
        try:
            while functorch.is_functorch_wrapped_tensor(value):  # BatchedTensor, TensorWrapper: no storage of their own
                value = functorch.get_unwrapped(value)
            if is_traceable_wrapper_subclass(value):
                names, _ = value.__tensor_flatten__()
                return storages([getattr(value, name) for name in names])
            return (value.untyped_storage()._cdata,)
        except (NotImplementedError, RuntimeError):
            return None
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        keys_of: dict[int, None] = {}
        for element in value:
            keys = storages(element)
            if keys is None:
                return None
            keys_of.update(dict.fromkeys(keys))
        return tuple(keys_of)
    return storages(list(value.values())) if isinstance(value, dict) else ()


def sees_same_elements(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if a is b:
        return True
    if type(a) is not FakeTensor or type(b) is not FakeTensor:
        return False  # a wrapper shows logical sizes
    return (
        a.layout is torch.strided
        and b.layout is torch.strided
        and a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.dtype == b.dtype
        and a.dim() == b.dim()
        and all(map(_same_size, (*a.shape, *a.stride()), (*b.shape, *b.stride())))
        and _same_size(a.storage_offset(), b.storage_offset())
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def _same_size(a: Any, b: Any) -> bool:
    """Structural equality of two sizes; never asks a SymInt, which could add a guard."""
    if a is b:
        return True
    a, b = (getattr(s.node, "expr", None) if isinstance(s, torch.SymInt) else s for s in (a, b))
    return a is not None and b is not None and bool(a == b)


def tensor_inputs(node: Node) -> list[Node]:
    """The inputs that hold memory, or may; not the modules a higher-order operator calls."""
    return [n for n in node.all_input_nodes if has_memory(n)]


def has_memory(node: Node) -> bool:
    value = fake_value(node)
    if value is None:
        return not isinstance(attribute(node), torch.nn.Module)
    return storages(value) != ()
