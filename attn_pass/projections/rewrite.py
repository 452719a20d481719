"""The projections of one graph: every group that may be one product, and is to be, becomes one; all are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from attn_pass.devices.device import Device
from attn_pass.devices.registry import of_type
from attn_pass.errors import first_line
from attn_pass.graph.edit import SizeNodes
from attn_pass.graph.regions import Region
from attn_pass.graph.values import FOLDS_CONSTANTS, Sizes, tensor_value
from attn_pass.model.index import product
from attn_pass.options import Options
from attn_pass.projections.cost import predicted, too_little
from attn_pass.projections.gradients import gets_gradient
from attn_pass.projections.groups import Group, Grouping, of_bodies
from attn_pass.projections.join import SEEN, planned
from attn_pass.projections.layout import refusal
from attn_pass.projections.linear import Linear
from attn_pass.projections.read import Operand, has_marks
from attn_pass.report.alike import merged
from attn_pass.report.places import source_line
from attn_pass.report.projection import ProjectionReport

JOINED = "joined projections"
"""What a second try is without, beside names of targets."""
Complain = Callable[[str, Exception], None]
_NOT_CONSTANT = {
    "compile": "its weights are inputs of the compiled code; they are joined as constants, with Inductor's `freezing`, "
    "or in one buffer, with `join_projections='parameters'`",
    "aoti": "the package keeps every weight under its own name for load_constants; with Inductor's `freezing`, and "
    "without gradients, it does not",
    "export": "the program is exported to be run elsewhere",
}
_NOT_LAID_OUT_HERE = "only attn_pass.backend moves parameters into one buffer, because it makes the called function"


@dataclass(frozen=True)
class Graph:
    """A graph whose attentions are rewritten.

    Attributes:
        gm: the graph.
        program: "compile", "export" or "aoti", where it comes from.
        sizes: those of the graph.
        region: the state around the graph.
        options: the user's.
        device: what a node runs on.
        without: why nothing is to be joined; empty where it may be.
        may_lay_out: whether parameters may be laid into one buffer.
        any_strides: operators that take operands with any strides, beside torch's own.
    """

    gm: GraphModule
    program: str
    sizes: Sizes
    region: Region
    options: Options
    device: Callable[[Node], Device]
    without: str = ""
    may_lay_out: bool = False
    any_strides: Sequence[Any] = ()


def join_projections(graph: Graph, complain: Complain) -> list[ProjectionReport]:
    """Makes one product of every group of a graph that is to be one, in place; returns a record of all projections.

    ``complain`` is told what failed, where something did; the group is left then.
    """
    if not has_marks(graph.gm):
        return []
    grouping = Grouping(graph.gm, graph.region, graph.any_strides)
    size_nodes: SizeNodes | None = None
    records: list[ProjectionReport] = []
    counted_operands: set[Operand] = set()
    for group in [*of_bodies(graph.gm), *grouping.groups()]:
        record = _record_of(graph, group)
        record.operands = len(group.operands - counted_operands)
        counted_operands |= group.operands
        record.reason = group.refusal or _refusal(graph, grouping, group, record)
        if not record.reason:
            size_nodes = size_nodes or SizeNodes(graph.gm, graph.sizes)
            size_nodes.made.clear()  # of another group, which may stand behind this one
            try:
                records += _joined(graph, grouping, size_nodes, group, record)
                continue
            except Exception as error:
                record.reason = f"internal error: {type(error).__name__}: {first_line(error)}"
                complain("projections are left as products of their own", error)
        records.append(record)
    return merged(records)


def _refusal(graph: Graph, grouping: Grouping, group: Group, record: ProjectionReport) -> str:
    """Why a group that may be one product is left all the same; empty where it is not."""
    if graph.without:
        return graph.without
    device = graph.device(group.linears[0].node)
    if graph.options.choose == "cheapest":
        if not of_type(device.type).joins_projections or not device.is_measured:
            return f"joining projections has not been measured on {device.name}"
        if reason := too_little(record.predicted_us):
            return reason
    if _is_constant(graph, grouping, group):
        return ""
    if graph.may_lay_out:
        joins = of_type(device.type).joins_projections
        return _not_laid_out(grouping, group) if joins else f"parameters are not moved into one buffer on {device.name}"
    asked_for = graph.program == "compile" and graph.options.join_projections == "parameters"
    return _NOT_LAID_OUT_HERE if asked_for else _NOT_CONSTANT[graph.program]


def _is_constant(graph: Graph, grouping: Grouping, group: Group) -> bool:
    """Whether what is joined of a group's weights and biases is folded by the compiler."""
    if not graph.gm.meta.get(FOLDS_CONSTANTS) or graph.program not in ("compile", "aoti"):
        return False
    if graph.program == "aoti":
        return all(grouping.value_of(n) is not None for one in group.linears for n in one.parameters)
    return all(one.weight.op == "get_attr" for one in group.linears)


def _not_laid_out(grouping: Grouping, group: Group) -> str:
    """Why the parameters of a group cannot be laid into one buffer; empty where they can."""
    weights = [one.weight for one in group.linears]
    biases = [one.bias for one in group.linears if one.bias is not None]
    if any(n.op != "placeholder" for n in (*weights, *biases)):
        return "its weights are not inputs of the compiled code"
    if biases and len(biases) < len(weights):
        return "some of its layers have no bias, and biases would be joined at every call"
    if len({gets_gradient(one.node) for one in group.linears}) > 1:
        return "only some of its layers get a gradient, and the parameters of the others would get zeros"
    for nodes in (weights, biases):
        values = [v for n in nodes if (v := grouping.value_of(n)) is not None]
        if len(values) < len(nodes):
            return "its weights are not known when the program is compiled"
        if values and (reason := refusal(values)):
            return reason
    return ""


def _joined(
    graph: Graph, grouping: Grouping, size_nodes: SizeNodes, group: Group, record: ProjectionReport
) -> Iterator[ProjectionReport]:
    """The records of a group that was to be joined, once it is: layers whose users can tell are left."""
    join, apart = planned(grouping, size_nodes, group)
    if join is None:
        record.reason = SEEN
        return iter([record])
    left = [_record_of(graph, group.only([one], SEEN)) for one in apart]
    operands, record = record.operands, _record_of(graph, group.only(join.linears))
    for each in left:
        each.operands = min(operands, each.operands)
        operands -= each.operands
    record.operands = operands
    join.apply(laid_out=not _is_constant(graph, grouping, group))
    record.outcome, record.reason = "joined", "they multiply the same input, and nothing observes the difference"
    return iter([record, *left])


def _record_of(graph: Graph, group: Group) -> ProjectionReport:
    first = group.linears[0]
    widths, features = _widths(group), _features(first)
    rows = _rows(graph, first)
    record = ProjectionReport(
        outcome="left",
        reason=group.refusal,
        where=source_line(first.node.meta),
        roles=group.roles,
        widths=widths,
        features=features,
        operands=len(group.operands),
    )
    value = tensor_value(first.node)
    if not group.refusal and value is not None:
        buffers, trained = _buffers_of(graph, group), any(gets_gradient(one.node) for one in group.linears)
        record.predicted_us = predicted(
            graph.device(first.node),
            value.dtype,
            rows,
            features,
            widths,
            buffers=buffers,
            trained=trained and buffers > 0,
        )
    return record


def _buffers_of(graph: Graph, group: Group) -> int:
    """How many buffers the parameters of a group would lie in; 0 where they are constants of the compiled code."""
    if not graph.may_lay_out or all(one.weight.op == "get_attr" for one in group.linears):
        return 0
    return 1 + any(one.bias is not None for one in group.linears)


def _widths(group: Group) -> tuple[int, ...]:
    return tuple(int(_weight(one)[1 if one.by_columns else 0]) for one in group.linears)


def _features(linear: Linear) -> int:
    return int(_weight(linear)[0 if linear.by_columns else 1])


def _weight(linear: Linear) -> tuple[int, ...]:
    value = tensor_value(linear.weight)
    assert value is not None
    return tuple(value.shape)


def _rows(graph: Graph, linear: Linear) -> int:
    value = tensor_value(linear.input)
    return 1 if value is None else graph.sizes.hint(product(graph.sizes.shape(value)[:-1]))
