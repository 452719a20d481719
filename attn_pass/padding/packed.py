"""The operations that take padding out and put it back: which rows there are, packed operands, and rows in their place.

All sizes but the number of rows are the program's own. That number is known at run time only, so that one program
serves every batch. A sequence whose keys are all masked is kept whole: its rows average over all of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from attn_pass.compat import sizes_at_run_time
from attn_pass.graph.effects import is_pure
from attn_pass.graph.provenance import origin_of
from attn_pass.graph.random_draws import may_draw
from attn_pass.graph.regions import Regions
from attn_pass.graph.values import PROJECTION, Sizes, fake_value, tensor_value, value_key
from attn_pass.model.index import Index, Symbol, atoms, product
from attn_pass.model.mask import ABSORBING
from attn_pass.padding.exits import Exit
from attn_pass.padding.layouts import Layout, Rows
from attn_pass.padding.masks import PaddingMask, Places
from attn_pass.padding.row_operators import PUT, TAKE
from attn_pass.padding.rules import first_tensor

aten = torch.ops.aten


class CannotPackError(Exception):
    """A region that is proved cannot be written down, and why."""


class Emitter:
    """Inserts calls into a graph, run on fake values as they are, and can take all of them back."""

    def __init__(self, gm: GraphModule, sizes: Sizes, like: Node, before: Node, regions: Regions) -> None:
        self.graph, self.sizes, self.regions = gm.graph, sizes, regions
        self.like, self.cursor, self.region = like, before, regions.of(before)
        self.inserted: list[Node] = []
        value = first_tensor(like)
        self._mode: FakeTensorMode = value.fake_mode  # type: ignore[union-attr]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Calls are added in this context; an error takes them back."""
        if self._mode.shape_env is None:
            raise CannotPackError("the graph was traced without symbols, which the number of packed rows is one of")
        with ExitStack() as stack:
            stack.enter_context(sizes_at_run_time(self._mode.shape_env))
            stack.enter_context(self._mode)
            stack.enter_context(enable_python_dispatcher())
            try:
                yield
            except BaseException:
                for node in reversed(self.inserted):
                    self.graph.erase_node(node)
                raise

    @contextmanager
    def standing(self, before: Node, like: Node) -> Iterator[None]:
        """Calls are inserted in front of a node, under its state, as part of what another one was."""
        before_state = self.cursor, self.like, self.region
        self.cursor, self.like, self.region = before, like, self.regions.of(before)
        try:
            yield
        finally:
            self.cursor, self.like, self.region = before_state

    def call(self, target: Any, *args: Any, op: str = "call_function", **kwargs: Any) -> Node:
        """One call, with its fake value."""
        fakes, named = _fakes(args), _fakes(kwargs)
        with self.region.restore():
            fake = getattr(fakes[0], target)(*fakes[1:], **named) if op == "call_method" else target(*fakes, **named)
        with self.graph.inserting_before(self.cursor):
            node = self.graph.create_node(op, target, args, kwargs)
        marked = {PROJECTION: self.like.meta[PROJECTION]} if PROJECTION in self.like.meta else {}
        node.meta = {**origin_of(self.like), **marked, value_key(self.like): fake, **node.meta}
        self.inserted.append(node)
        return node

    def size(self, index: Index) -> Any:
        """A size as an argument: a number, or a node in front of the cursor that holds it."""
        if isinstance(index, int):
            return index
        for node in self.graph.nodes:
            if node is self.cursor:
                break
            value = fake_value(node)
            if isinstance(value, torch.SymInt) and self.sizes.index(value) == index:
                return node
            if isinstance(value, torch.Tensor) and node.op != "output":
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt) and self.sizes.index(size) == index:
                        return self.call(aten.sym_size.int, node, dim)
        raise CannotPackError(f"no value holds the size {index}")

    def shape(self, node: Node) -> tuple[Index, ...]:
        """The shape of a node's tensor."""
        value = tensor_value(node)
        assert value is not None
        return self.sizes.shape(value)

    def order_in_memory(self, node: Node) -> list[int] | None:
        """The dimensions of a node's tensor from the slowest in memory to the fastest, asked without a guard.

        Those of size 1 come last. None where elements are apart, or lie over each other.
        """
        value = tensor_value(node)
        assert value is not None
        shape = self.sizes.shape(value)
        strides = [self.sizes.index(s) for s in value.stride()]
        waiting = [d for d, size in enumerate(shape) if size != 1]
        order = [d for d, size in enumerate(shape) if size == 1]
        step: Index = 1
        while waiting:
            fastest = next((d for d in reversed(waiting) if strides[d] == step), None)
            if fastest is None:
                return None
            waiting.remove(fastest)
            order.insert(0, fastest)
            step = product((step, shape[fastest]))
        return order


class Packing:
    """The rows of one region: which are there, and operands with and without the others."""

    def __init__(
        self,
        emit: Emitter,
        mask: PaddingMask,
        rows: Rows,
        exits: Sequence[Exit],
        device: Any,
        places: Places = "any",
        averages: bool = False,
        least: float = 0.0,
    ) -> None:
        self.emit, self.rows, self._device = emit, rows, device
        self._at = emit.cursor
        self._order = {n: i for i, n in enumerate(emit.graph.nodes)}
        self.batch, self.length = emit.size(rows.batch), emit.size(rows.length)
        call = emit.call
        self._kept = self._kept_keys(mask)
        empty = call(aten.logical_not.default, call(aten.any.dim, self._kept, 1, True))
        self.there = call(aten.logical_or.default, self._kept, empty)
        for read in dict.fromkeys((e.reads, e.position, e.tensor, e.at) for e in exits):
            if (also := self._read(*read)) is not None:
                self.there = call(aten.logical_or.default, self.there, also)
        if averages:  # a row that is there and keeps not itself may average all values of its sequence
            alone = call(aten.logical_and.default, self.there, call(aten.logical_not.default, self._keeps_itself()))
            self.there = call(aten.logical_or.default, self.there, call(aten.any.dim, alone, 1, True))
        self._fill(places)
        if least:  # what a number of rows that is new costs
            share = call(aten.mean.default, call(aten.to.dtype, self.there, torch.float32))
            self.there = call(aten.logical_or.default, self.there, call(aten.gt.Scalar, share, 1 - least))
        self._flat = call(aten.reshape.default, self.there, [-1])
        self.index = call(aten.squeeze.dim, call(aten.nonzero.default, self._flat), 1)
        self.count = call(aten.sym_size.int, self.index, 0)
        for count in atoms(emit.sizes.index(fake_value(self.count))):
            if isinstance(count, Symbol):  # without padding it is the most that there may be
                emit.sizes.hints[count.key] = emit.sizes.hint(product(rows))
        ends = call(aten.cumsum.default, call(aten.sum.dim_IntList, self.there, [1]), 0)
        self.offsets = call(aten.constant_pad_nd.default, ends, [1, 0], 0)
        self.keep = self._packed_keep()
        self._packed: dict[tuple[Any, ...], Node] = {}

    # ------------------------------------------------------------ which rows

    def _fill(self, places: Places) -> None:
        """Rows that nobody needs, in whose places others would be."""
        call = self.emit.call

        def begun(rows: Node) -> Node:
            return call(aten.gt.Scalar, call(aten.cumsum.default, rows, 1), 0)

        if places == "any":
            return
        ended = call(aten.flip.default, begun(call(aten.flip.default, self.there, [1])), [1])
        self.there = call(aten.logical_and.default, begun(self.there), ended) if places == "between" else ended

    def _positions(self) -> Node:
        return self.emit.call(aten.arange.default, self.length, device=self._device)

    def _kept_keys(self, mask: PaddingMask) -> Node:
        """The mask as (B, S)."""
        call, shape = self.emit.call, [self.batch, self.length]
        key_mask: Node | None = None
        self._pairs: Node | None = None
        keep = mask.keep if mask.added is None else self._condition(mask.added)
        if keep is not None and mask.is_of_pairs:
            self._pairs = call(aten.reshape.default, self._from_bytes(keep), [-1, self.length, self.length])
            key_mask = call(aten.any.dim, self._pairs, 1)
        elif keep is not None:
            key_mask = call(aten.reshape.default, self._from_bytes(keep), [-1, self.length])
        for bound, compare in ((mask.starts, aten.ge.Tensor), (mask.ends, aten.lt.Tensor)):
            if bound is not None:
                inside = call(compare, self._positions(), call(aten.reshape.default, bound, [-1, 1]))
                key_mask = inside if key_mask is None else call(aten.logical_and.default, key_mask, inside)
                if self._pairs is not None:
                    beside = call(aten.unsqueeze.default, inside, 1)
                    self._pairs = call(aten.logical_and.default, self._pairs, beside)
        assert key_mask is not None
        return call(aten.expand.default, key_mask, shape)

    def _condition(self, mask: Node) -> Node:
        """A mask as truth values: numbers that are added keep a key where they do not absorb its score."""
        value = tensor_value(mask)
        if value is None or value.dtype == torch.bool:
            return self._from_bytes(mask)
        return self.emit.call(aten.logical_not.default, self.emit.call(aten.le.Scalar, mask, ABSORBING))

    def _from_bytes(self, keep: Node) -> Node:
        """A condition that was stored as bytes: Inductor's vectors have none that are seen as truth values (2.13.0)."""
        source = keep.args[0] if keep.target is aten.view.dtype else None
        value = tensor_value(source)
        if value is None or value.dtype != torch.uint8:
            return keep
        return self.emit.call(aten.ne.Scalar, source, 0)

    def _keeps_itself(self) -> Node:
        """Rows that certainly keep a key, themselves."""
        return self._kept if self._pairs is None else self.emit.call(aten.diagonal.default, self._pairs, 0, 1, 2)

    def _packed_keep(self) -> Node:
        """The mask as the kernel takes it beside packed rows."""
        call = self.emit.call
        if self._pairs is None:
            selected = call(aten.index_select.default, call(aten.reshape.default, self._kept, [-1]), 0, self.index)
            return call(aten.reshape.default, selected, [1, 1, 1, self.count])
        of_rows = call(aten.reshape.default, self._pairs, [-1, self.length])
        selected = call(aten.index_select.default, of_rows, 0, self.index)
        return call(aten.reshape.default, selected, [1, 1, self.count, self.length])

    def _read(self, kind: str, position: int, tensor: Node | None, at: Layout | None) -> Node | None:
        """Which rows an exit reads, broadcastable to (B, L); None for none beside those that are kept."""
        call = self.emit.call
        if kind == "nothing":
            return None
        if kind == "position":
            where = self._positions()
            if position < 0:
                where, position = call(aten.flip.default, where, [0]), -position - 1
            return call(aten.eq.Scalar, where, position)
        assert tensor is not None
        in_front = self._in_front(tensor, {})
        if kind == "positions":
            column = call(aten.reshape.default, in_front, [-1, 1])
            counted = call(aten.add.Scalar, column, self.length)
            column = call(aten.where.self, call(aten.lt.Scalar, column, 0), counted, column)
            return call(aten.eq.Tensor, self._positions(), column)
        if kind == "other than":
            return call(aten.reshape.default, call(aten.ne.Scalar, in_front, position), [self.batch, self.length])
        if kind == "keys":
            return self._keys_of(self._condition(in_front))
        assert at is not None
        flat = call(aten.ne.Scalar if kind == "nonzero" else aten.eq.Scalar, in_front, 0)
        if at.batch > at.length:
            flat = call(aten.transpose.int, flat, at.batch, at.length)
        shape = self.emit.shape(in_front)
        return call(aten.reshape.default, flat, [self._or_one(shape[d], d == at.batch) for d in (at.batch, at.length)])

    def _keys_of(self, keep: Node) -> Node:
        """The keys that some row of another attention keeps; all of a sequence where one of its rows keeps none."""
        call = self.emit.call
        empty = call(aten.logical_not.default, call(aten.any.dim, keep, -1, True))
        return call(aten.logical_or.default, call(aten.any.dims, keep, [1, 2]), call(aten.any.dims, empty, [1, 2]))

    def _or_one(self, size: Index, is_batch: bool) -> Any:
        return 1 if size == 1 else self.batch if is_batch else self.length

    def _in_front(self, node: Node, copies: dict[Node, Node]) -> Node:
        """A node in front of the region, computed once more if it stands behind its beginning."""
        if self._order.get(node, -1) < self._order[self._at]:
            return node
        if node not in copies:
            computed = node.op in ("call_function", "call_method") and is_pure(node) and not may_draw(node)
            if not computed or not self._is_same_here(node):
                raise CannotPackError(f"{node.name}, which says which rows are read, is computed too late")
            args, kwargs = mapped(node, lambda n: self._in_front(n, copies))
            copies[node] = self.emit.call(node.target, *args, op=node.op, **kwargs)
        return copies[node]

    def _is_same_here(self, node: Node) -> bool:
        """Whether a node gives the same under the state that rows are counted under: autocast leaves integers alone."""
        values = [tensor_value(n) for n in (node, *node.all_input_nodes)]
        integers = not any(v is not None and v.is_floating_point() for v in values)
        return integers or self.emit.regions.of(node) == self.emit.region

    # ------------------------------------------------------------ operands

    @cached_property
    def _position_of_row(self) -> Node:
        return self._of_rows(self._positions())

    @cached_property
    def _batch_of_row(self) -> Node:
        numbers = self.emit.call(aten.arange.default, self.batch, device=self._device)
        return self._of_rows(self.emit.call(aten.unsqueeze.default, numbers, 1))

    def _of_rows(self, numbers: Node) -> Node:
        """The number that each packed row has, of numbers that are broadcast over all rows."""
        call = self.emit.call
        all_rows = call(aten.reshape.default, call(aten.expand.default, numbers, [self.batch, self.length]), [-1])
        return call(aten.index_select.default, all_rows, 0, self.index)

    def packed(self, node: Node, layout: Layout) -> Node:
        """A tensor with all rows as the rows that are there."""
        return self._once((node, layout, None, None), lambda: self._pack(node, layout))

    def spread(self, node: Node, batch: int | None, length: int | None) -> Node:
        """A tensor that has positions alone, or sequences alone, with the dimension of rows in the place of those."""
        return self._once((node, None, batch, length), lambda: self._spread(node, batch, length))

    def packed_here(self, node: Node, layout: Layout) -> Node:
        """The same, which nothing that stands elsewhere has made or will read."""
        return self._pack(node, layout)

    def _once(self, key: Any, make: Callable[[], Node]) -> Node:
        key = (*key, self.emit.region.grad_enabled)  # what is packed under no_grad passes no gradient on
        if key not in self._packed:
            self._packed[key] = make()
        return self._packed[key]

    def _pack(self, node: Node, layout: Layout) -> Node:
        call = self.emit.call
        if layout.merged:
            return self._take(node, layout.batch)
        node, order = self._rows_first(node, layout)
        rest = self._rest(node)
        flat = call(aten.reshape.default, node, [-1, *rest]) if rest else call(aten.reshape.default, node, [-1])
        selected = self._take(flat, 0)
        # By a reshape its strides are known not to be 0, which Inductor asks for where products are frozen.
        selected = call(aten.reshape.default, selected, [1, self.count, *rest])
        return self._back(selected, order)

    def _spread(self, node: Node, batch: int | None, length: int | None) -> Node:
        call, value = self.emit.call, tensor_value(node)
        assert value is not None
        if value.requires_grad and value.dtype in (torch.bfloat16, torch.float16):  # gradients are sums over sequences
            return call(
                aten.to.dtype, self._spread(call(aten.to.dtype, node, torch.float32), batch, length), value.dtype
            )
        if batch is None:
            assert length is not None
            return call(aten.index_select.default, node, length, self._position_of_row)
        selected = call(aten.index_select.default, node, batch, self._batch_of_row)
        return selected if length is None else call(aten.transpose.int, selected, batch, length)

    def unpacked(self, node: Node, layout: Layout, like: Node) -> Node:
        """A packed tensor with all rows in their places, and zeros in the places of those that are not there.

        It lies in memory in the order of ``like``, which it stands for: users may see it in another shape.
        """
        result, order = self._unpacked(node, layout), self.emit.order_in_memory(like)
        if order is None or self.emit.order_in_memory(result) == order:
            return result
        is_permuted = order != sorted(order)
        result = self.emit.call(aten.permute.default, result, order) if is_permuted else result
        copied = self.emit.call(aten.clone.default, result, memory_format=torch.contiguous_format)
        return self._back(copied, order if is_permuted else None)

    def _unpacked(self, node: Node, layout: Layout) -> Node:
        call = self.emit.call
        if layout.merged:
            return self._put(node, layout.batch)
        node, order = self._rows_first(node, layout)
        all_rows = call(aten.reshape.default, self._put(node, 1), [self.batch, self.length, *self._rest(node)])
        return self._back(all_rows, order)

    def _take(self, node: Node, dim: int) -> Node:
        if self._has_gradient(node):
            return self.emit.call(TAKE, node, self.index, self._place, self._flat, dim)
        return self.emit.call(aten.index_select.default, node, dim, self.index)

    def _put(self, node: Node, dim: int) -> Node:
        call = self.emit.call
        if self._has_gradient(node):
            return call(PUT, node, self.index, self._place, self._flat, dim)
        gathered = call(aten.index_select.default, node, dim, self._place)
        shape = [-1 if d == dim else 1 for d in range(len(self.emit.shape(node)))]
        return self._zeroed(gathered, call(aten.reshape.default, self._flat, shape))

    def _has_gradient(self, node: Node) -> bool:
        value = tensor_value(node)
        return value is not None and value.requires_grad

    @cached_property
    def _place(self) -> Node:
        """For every row of the padded tensors the packed row that it is."""
        number = self.emit.call(aten.cumsum.default, self._flat, 0)
        return self.emit.call(aten.clamp_min.default, self.emit.call(aten.sub.Tensor, number, 1), 0)

    def prepare(self, spreads: bool, leaves: bool) -> None:
        """Computes what operands, results and gradients need, in front of the region."""
        for needed, name in ((spreads, "_position_of_row"), (spreads, "_batch_of_row"), (leaves, "_place")):
            if needed:
                getattr(self, name)

    def _zeroed(self, value: Node, there: Node) -> Node:
        fake = tensor_value(value)
        if fake is not None and fake.dtype == torch.bool:
            return self.emit.call(aten.logical_and.default, value, there)
        return self.emit.call(aten.where.ScalarOther, there, value, 0)

    def _rows_first(self, node: Node, layout: Layout) -> tuple[Node, list[int] | None]:
        if layout == (0, 1):
            return node, None
        order = [*layout, *(d for d in range(len(self.emit.shape(node))) if d not in layout)]
        return self.emit.call(aten.permute.default, node, order), order

    def _back(self, node: Node, order: list[int] | None) -> Node:
        if order is None:
            return node
        return self.emit.call(aten.permute.default, node, [order.index(d) for d in range(len(order))])

    def _rest(self, node: Node) -> list[int]:
        rest = self.emit.shape(node)[2:]
        if not all(isinstance(s, int) for s in rest):
            raise CannotPackError("a size beside the rows is known at run time only")
        return [s for s in rest if isinstance(s, int)]


def mapped(node: Node, by: Callable[[Node], Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node with other nodes in them."""
    args: Any = torch.fx.node.map_arg(node.args, by)
    kwargs: Any = torch.fx.node.map_arg(node.kwargs, by)
    return args, dict(kwargs)


def _fakes(value: Any) -> Any:
    return torch.fx.node.map_arg(value, fake_value)
