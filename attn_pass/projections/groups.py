"""Linear layers of one input: which may be one product, and why the others may not.

One product with the weights above each other gives each layer's result in its own columns, number for number as the
products apart give it (a sum over the same features, perhaps in another order). That needs one input, which has the
same elements for each, weights and biases that are the same when the first product runs as they are later, and one
state of autocast and gradients around all. What is taken from the results has other strides than a result of its own,
so each user is asked whether it can tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attn_pass.graph.effects import Effects
from attn_pass.graph.numbering import Numbers
from attn_pass.graph.regions import Region, Regions
from attn_pass.graph.subgraphs import attribute
from attn_pass.graph.values import PARAMETERS, tensor_value
from attn_pass.model.dtype_name import dtype_name
from attn_pass.projections.linear import Linear, linear_of
from attn_pass.projections.read import ROLES, Operand, marked

ALONE = "no other projection has the same input"
ALREADY = "it is one product already"
IN_BODY = "it is in the body of a higher-order operator"


@dataclass(frozen=True)
class Group:
    """Linear layers of one input, in graph order, and the operands that each makes; ``refusal`` if they stay apart."""

    linears: tuple[Linear, ...]
    makes: tuple[frozenset[Operand], ...]
    refusal: str = ""

    @property
    def roles(self) -> tuple[str, ...]:
        """What each layer makes, in words."""
        roles = ([r for r in ROLES if any(role == r for _, role in operands)] for operands in self.makes)
        return tuple(" and ".join(each) for each in roles)

    @property
    def operands(self) -> frozenset[Operand]:
        """All operands that the layers make."""
        return frozenset().union(*self.makes)

    def only(self, linears: Sequence[Linear], refusal: str = "") -> Group:
        """The same with some of the layers."""
        remaining = [(one, operands) for one, operands in zip(self.linears, self.makes) if one in linears]
        return Group(tuple(one for one, _ in remaining), tuple(operands for _, operands in remaining), refusal)


def of_bodies(gm: GraphModule) -> Iterator[Group]:
    """The layers in bodies of a graph's higher-order operators, which stay as they are: what bodies take is fixed."""
    for name, module in gm.named_modules():
        for node, operands in marked(module.graph).items() if name and isinstance(module, GraphModule) else ():
            linear = linear_of(node)
            if linear is not None:
                yield Group((linear,), (frozenset((f"{name}.{site}", role) for site, role in operands),), IN_BODY)


class Grouping:
    """The groups of one graph, read once its attentions are rewritten.

    ``any_strides`` are operators that take operands with any strides, beside torch's own.
    """

    def __init__(self, gm: GraphModule, region: Region, any_strides: Sequence[Any] = ()) -> None:
        self.gm, self.any_strides = gm, any_strides
        self.parameters: Mapping[str, torch.Tensor] = gm.meta.get(PARAMETERS, {})
        inputs = (n for n in gm.graph.nodes if n.op == "placeholder" and n.name in self.parameters)
        self.effects = Effects(gm.graph, parameters=inputs)
        self.regions = Regions(gm.graph, region)
        held = (self.value_of(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr"))
        self._readers = Counter(id(value) for value in held if value is not None)

    def groups(self) -> Iterator[Group]:
        """Every linear layer that makes an operand of an attention, in groups of one input each."""
        found = ((linear_of(node), operands) for node, operands in marked(self.gm.graph).items())
        layers = [(linear, operands) for linear, operands in found if linear is not None]
        number = Numbers(self.effects, self.regions).among(linear.input for linear, _ in layers)
        by_input: dict[object, list[tuple[Linear, frozenset[Operand]]]] = {}
        for linear, operands in layers:
            key = (number[linear.input], self.regions.of(linear.node), self._kind(linear))
            by_input.setdefault(key, []).append((linear, operands))
        for of_one in by_input.values():
            yield from self._split(of_one)

    def _kind(self, linear: Linear) -> object:
        """What layers of one product have in common beside their input: types and places, and how weights lie."""
        fakes = (tensor_value(n) for n in (linear.input, linear.weight, linear.node))
        return tuple(None if v is None else (v.dtype, v.device) for v in fakes)

    def _split(self, layers: list[tuple[Linear, frozenset[Operand]]]) -> Iterator[Group]:
        all_layers = Group(tuple(one for one, _ in layers), tuple(operands for _, operands in layers))
        usable: list[Linear] = []
        for linear in all_layers.linears:
            if refusal := self._refusal(linear, usable):
                yield all_layers.only([linear], refusal)
            else:
                usable.append(linear)
        if len(usable) > 1:
            yield all_layers.only(usable)
        elif usable:
            (operands,) = all_layers.only(usable).makes
            is_all = len({role for _, role in operands}) > 1
            yield all_layers.only(usable, ALREADY if is_all else ALONE)

    def _refusal(self, linear: Linear, before: Sequence[Linear]) -> str:
        """Why a layer cannot be joined with those before it; empty where it can."""
        if self.regions.of(linear.node).functorch:
            return "it runs under a transform of torch.func"
        if linear.by_columns:
            return "its weight is stored by columns, unlike a linear layer's"
        if any(linear.weight is one.weight for one in before):
            return "another product of the same input has the same weight"
        for tensor in (linear.weight, linear.bias):
            if tensor is not None and (reason := self._changes(tensor)):
                return reason
        weight, bias = tensor_value(linear.weight), tensor_value(linear.bias)
        if weight is not None and bias is not None and (weight.dtype, weight.device) != (bias.dtype, bias.device):
            return "its bias has another type than its weight"
        if weight is not None and bias is not None and bias.shape[0] != weight.shape[0]:
            return "its bias is one number for all features"
        if self._is_shared(linear):
            return "its weight or its bias is used elsewhere as well"
        if weight is not None and (narrow := self._other_autocast(linear.node, weight)) is not None:
            return f"autocast to {dtype_name(narrow)} joins no tensors of {dtype_name(weight.dtype)}"
        if self.effects.mutations(linear.node):
            return "its result is written in place"
        if before:
            first, last = self.effects.position[before[0].node], self.effects.position[linear.node]
            for node in dict.fromkeys((before[0].input, linear.input)):
                if self.effects.mutation_between(node, first, last) is not None:
                    return "its input is written between the products"
        return ""

    def _other_autocast(self, node: Node, weight: torch.Tensor) -> torch.dtype | None:
        """What autocast computes a product in, if the weight is of the other half precision: torch.cat refuses that."""
        dtype = self.regions.of(node).autocast_dtype(weight.device.type)
        return dtype if weight.dtype.itemsize == 2 and dtype != weight.dtype else None

    def _changes(self, tensor: Node) -> str:
        """Why a weight or a bias may not be read with others; empty where it may."""
        if self.effects.mutations(tensor):
            return "the program writes its weight or its bias"
        value = self.value_of(tensor)
        if value is None:
            is_parameter = tensor.op == "placeholder" and isinstance(tensor_value(tensor), torch.nn.Parameter)
            return "" if is_parameter else "its weight or its bias is no parameter of the program"
        return refused(value)

    def _is_shared(self, linear: Linear) -> bool:
        """Whether something else reads the weight or the bias, by this node or by another one that holds the same."""
        nodes = [n for n in (linear.weight, linear.bias) if n is not None]
        transposes = [n for n in linear.node.all_input_nodes if n not in (linear.input, *nodes)]
        return any(len(n.users) > 1 for n in (*nodes, *transposes)) or any(
            self._readers[id(self.value_of(n))] > 1 for n in nodes
        )

    def value_of(self, tensor: Node) -> torch.Tensor | None:
        """The tensor that an input or an attribute of the graph holds; None where it is not known to be constant."""
        value = attribute(tensor) if tensor.op == "get_attr" else self.parameters.get(tensor.name)
        return value if isinstance(value, torch.Tensor) else None


def refused(value: torch.Tensor) -> str:
    """Why a parameter cannot be laid beside others; empty where it can."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"its weight or its bias is a {type(value).__name__}, a subclass of torch.Tensor"
    if value.layout != torch.strided:
        return f"its weight or its bias is sparse ({value.layout})"
    if not value.dtype.is_floating_point or value.dtype.itemsize < 2:
        return f"its weight or its bias is quantised ({value.dtype})"
    return ""
