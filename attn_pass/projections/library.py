"""Linear layers, around attentions and inside them, that another kernel computes faster than torch's call.

They are most of a model's time, and each is what it was, a product with a bias: nothing has to be proved but that its
operands and its result have one dtype, or are cast to one by autocast, and that nobody asks for a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from attn_pass.devices.base import FasterLinear, LinearLayer
from attn_pass.devices.device import Device
from attn_pass.devices.registry import of_type
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.values import FOLDS_CONSTANTS, Sizes, memory_order, tensor_value, value_key, wants_gradient
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.index import product
from attn_pass.projections.linear import Linear, product_of
from attn_pass.report.alike import merged
from attn_pass.report.linear_layers import LinearLayersReport
from attn_pass.report.places import source_line

LINEAR_LAYERS = "linear layers"
"""What a second try is without, beside names of targets."""
_ACTIVATIONS: Mapping[Any, str] = {
    torch.nn.functional.gelu: "gelu",
    torch.ops.aten.gelu.default: "gelu",
    torch.nn.functional.silu: "silu",
    torch.ops.aten.silu.default: "silu",
}
_CAST = (torch.float32, torch.bfloat16, torch.float16)
"""What autocast casts on a CPU; float64 stays."""
DeviceOf = Callable[[torch.device], Device]


def give_to_libraries(
    gm: GraphModule, program: str, sizes: Sizes, region: Region, device: DeviceOf
) -> list[LinearLayersReport]:
    """Changes a graph that Inductor compiles, in place; returns a record of what changed.

    ``program`` is "compile" or "aoti", ``region`` the state around the graph, ``device`` the one that is decided for.
    """
    folds = bool(gm.meta.get(FOLDS_CONSTANTS))
    regions = Regions(gm.graph, region)
    found: list[tuple[Linear, LinearLayer, FasterLinear, Node | None]] = []
    for node in gm.graph.nodes:
        linear = product_of(node)
        if linear is None or regions.of(node).functorch:
            continue
        if program == "compile" and _may_be_trained(linear, regions.of(node)):
            continue
        # With ``freezing`` as an option of one compile Dynamo passes weights as inputs all the same.
        is_constant = folds and linear.weight.op == "get_attr"
        packaged = folds and program == "aoti"
        layer = _facts(linear, regions.of(node), sizes, is_constant=is_constant, is_packaged=packaged)
        faster = None if layer is None else _faster(linear, layer, device)
        if layer is not None and faster is not None:
            found.append((linear, layer, faster, _applied(node, regions, faster)))
    records: list[LinearLayersReport] = []
    replaced: dict[Node, Node] = {}
    for linear, layer, faster, applied in found:
        activation = "none" if applied is None else _activation(applied)
        records.append(_record_of(linear, layer, faster, activation))
        # An operand may be a layer that has been replaced by now; its result has the dtype that the node's had.
        operands = [None if x is None else replaced.get(x, x) for x in (linear.input, linear.weight, linear.bias)]
        old = linear.node if applied is None else applied
        replaced[old] = _replace(gm.graph, linear, operands, old, faster.operator, activation)
    return merged(records)


def _applied(node: Node, regions: Regions, faster: FasterLinear) -> Node | None:
    """The activation of a layer's result that nothing else reads, if the library applies it in the same call."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    before, after = tensor_value(node), tensor_value(user)
    is_same = before is not None and after is not None and before.dtype == after.dtype
    known = is_same and _activation(user) in faster.activations and regions.of(user) == regions.of(node)
    return user if known and user.all_input_nodes == [node] else None


def _activation(node: Node) -> str:
    """What a node applies to its input: "gelu", "gelu, tanh" or "silu"; "" if none of these."""
    name = _ACTIVATIONS.get(node.target) if node.op == "call_function" and len(node.args) <= 1 else None
    if name == "gelu":
        approximate = node.kwargs.get("approximate", "none")
        return {"none": "gelu", "tanh": "gelu, tanh"}.get(str(approximate), "")
    return "" if name is None or node.kwargs.get("inplace") else name


def _may_be_trained(linear: Linear, region: Region) -> bool:
    """Whether a gradient may be asked for; that of the result says less, as ``detach_()`` changes it afterwards."""
    operands = (linear.input, *linear.parameters)
    return region.grad_enabled is not False and any(wants_gradient(operand) for operand in operands)


def _facts(linear: Linear, region: Region, sizes: Sizes, *, is_constant: bool, is_packaged: bool) -> LinearLayer | None:
    """What a layer's speed depends on; None for one that is no product of plain tensors of one dtype."""
    fakes = [tensor_value(node) for node in (linear.node, linear.input, *linear.parameters)]
    if any(type(fake) is not FakeTensor or fake.layout != torch.strided for fake in fakes):
        return None
    result, given, weight = fakes[:3]
    assert result is not None and given is not None and weight is not None
    operands = [fake for fake in fakes[1:] if fake is not None]
    if any(fake.device != result.device for fake in operands) or given.dim() < 2:
        return None
    cast_to = region.autocast_dtype(result.device.type)
    is_cast = any(fake.dtype != result.dtype for fake in operands)
    if is_cast and (cast_to != result.dtype or any(fake.dtype not in _CAST for fake in operands)):
        return None
    if not (_is_contiguous(weight, sizes) and _is_contiguous(result, sizes)):
        return None
    rows = product(sizes.shape(given)[:-1])
    features, width = (int(size) for size in (weight.shape if linear.by_columns else reversed(weight.shape)))
    if features == 0 or any(bias is not None and tuple(bias.shape) != (width,) for bias in fakes[3:]):
        return None  # a bias may be one number for all
    return LinearLayer(
        dtype=result.dtype,
        rows=sizes.hint(rows),
        features=features,
        width=width,
        has_bias=linear.bias is not None,
        has_static_rows=isinstance(rows, int),
        by_columns=linear.by_columns,
        is_constant=is_constant,
        is_packaged=is_packaged,
        is_plain=linear.is_given and not is_cast,
    )


def _is_contiguous(value: torch.Tensor, sizes: Sizes) -> bool:
    order = memory_order(value, sizes)
    shape = sizes.shape(value)
    return order is not None and [d for d in order if shape[d] != 1] == [d for d in range(len(shape)) if shape[d] != 1]


def _faster(linear: Linear, layer: LinearLayer, device: DeviceOf) -> FasterLinear | None:
    """What the family says of the device that it is decided for, if that is the one the tensors are on."""
    value = tensor_value(linear.node)
    assert value is not None
    decided_for = device(value.device)
    if decided_for.type != value.device.type or not decided_for.is_here:
        return None
    return of_type(decided_for.type).faster_linear(layer)


def _replace(
    graph: Graph,
    linear: Linear,
    operands: Sequence[Node | None],
    old: Node,
    operator: Callable[..., Any],
    activation: str,
) -> Node:
    """Puts the library's call in a layer's place.

    ``operands`` are what its input, weight and bias are by now, and ``old`` what is replaced: the layer, or its
    activation.
    """
    node = linear.node
    result = tensor_value(node)
    assert result is not None
    dtype = result.dtype
    with graph.inserting_before(node):
        rows, weight, bias = (_cast(graph, operand, dtype) for operand in operands)
        if linear.by_columns:
            assert weight is not None
            stored, key = weight, value_key(weight)
            weight = graph.call_function(torch.ops.aten.t.default, (stored,))
            weight.meta[key] = stored.meta[key].t()
        given = (rows, weight, bias)
        call = graph.call_function(operator, given if activation == "none" else (*given, activation))
    call.meta = dict(old.meta)
    old.replace_all_uses_with(call)
    for each in dict.fromkeys((old, node)):
        graph.erase_node(each)
    return call


def _cast(graph: Graph, operand: Node | None, dtype: torch.dtype) -> Node | None:
    """An operand as autocast has it multiplied, in front of where the graph inserts."""
    value = None if operand is None else tensor_value(operand)
    if operand is None or value is None or value.dtype == dtype:
        return operand
    cast = graph.call_function(torch.ops.aten.to.dtype, (operand, dtype))
    key = value_key(operand)
    cast.meta[key] = operand.meta[key].to(dtype)
    return cast


def _record_of(linear: Linear, layer: LinearLayer, faster: FasterLinear, activation: str) -> LinearLayersReport:
    return LinearLayersReport(
        library=faster.library,
        reason=faster.reason,
        where=source_line(linear.node.meta),
        features=layer.features,
        width=layer.width,
        dtype=dtype_name(layer.dtype),
        activation=activation,
    )
