"""The reader's element of a node equals the value that the graph computes, at the time it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from against_eager import randn
from read_graphs import captured, inputs_of, nodes_of, reader_of, result_of
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional as F

from attn_pass.graph.regions import Region
from attn_pass.graph.values import tensor_value
from attn_pass.model.expression import Const, Expr, Load, loads
from attn_pass.model.index import Axis, axis_index
from attn_pass.model.reference import Evaluation
from attn_pass.reading.operands import operand
from attn_pass.reading.reader import Caller, Reader
from attn_pass.reading.unreadable import Unreadable

N = 6


class Kept(Interpreter):
    """Runs a graph and keeps what each node gave, as it is at the end."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)


def axes_of(reader: Reader, node: Node) -> tuple[Axis, ...]:
    return tuple(Axis(f"i{n}", size) for n, size in enumerate(reader.shape(node)))


def evaluated(reader: Reader, expression: Expr, axes: Sequence[Axis], values: dict[Node, Any]) -> Tensor:
    """The expression at every index, of the values that its sources have."""
    sources = [torch.as_tensor(values[n]) for n in reader.source_nodes]
    value = Evaluation(tuple(axes), sources, {}).expression(expression)
    return value.expand([int(a.size) for a in axes])  # type: ignore[arg-type]


def element(program: Callable[..., Tensor], *inputs: Tensor) -> tuple[Expr, Reader]:
    """The element of what a program returns, checked against what it returns."""
    gm = captured(program, *[x.clone() for x in inputs])
    reader, result = reader_of(gm), result_of(gm)
    axes = axes_of(reader, result)
    end = len(reader.order)
    expression = reader.element(result, tuple(axis_index(a) if a.size != 1 else 0 for a in axes), end)
    run = Kept(gm)
    (value,) = run.run(*[x.clone() for x in inputs])
    expected = value.double() if value.is_floating_point() else value
    torch.testing.assert_close(evaluated(reader, expression, axes, run.env).to(expected.dtype), expected)
    return expression, reader


def rows_and_columns() -> tuple[Tensor, Tensor]:
    return torch.arange(N)[:, None], torch.arange(N)[None]


def causal() -> Tensor:
    row, column = rows_and_columns()
    return column <= row


def filled_in_part(x: Tensor) -> Tensor:
    mask = torch.zeros(N, N)
    mask += 3
    return mask.masked_fill(causal(), 1.0)


def filled_whole(x: Tensor) -> Tensor:
    mask = torch.empty(N, N)
    mask.fill_(float("-inf"))
    mask.triu_(1)
    return mask


def filled_twice(x: Tensor) -> Tensor:
    mask = torch.zeros(N, N)
    lower = mask.fill_(2.5).tril()
    mask.fill_(True)
    return lower + mask


def filled_behind_a_view(x: Tensor) -> Tensor:
    mask = torch.zeros(N, N)
    mask[2:].fill_(1.0)
    return mask


def filled_by_a_tensor(x: Tensor) -> Tensor:
    mask = torch.zeros(N, N)
    mask.fill_(x[0, 0])
    return mask


def after(*writes: Callable[[Tensor], object], dtype: torch.dtype = torch.bool) -> Callable[[Tensor], Tensor]:
    """A program that writes to parts of a matrix of zeros."""

    def run(x: Tensor) -> Tensor:
        mask = torch.zeros(N, N + 2, dtype=dtype)
        for write in writes:
            write(mask)
        return mask

    return run


def put(mask: Tensor, index: Any, value: Any) -> None:
    mask[index] = value


ALL, SHORT = slice(None), slice(2, None)
WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a cache and a triangle": after(lambda m: put(m, (ALL, slice(2)), True), lambda m: put(m, (ALL, SHORT), causal())),
    "a triangle in the middle": after(lambda m: put(m, (slice(1, 5), slice(3, 7)), causal()[:4, :4])),
    "written over": after(lambda m: put(m, (ALL, SHORT), causal()), lambda m: put(m, slice(1, 3), True)),
    "written over in part": after(lambda m: put(m, slice(3), True), lambda m: put(m, (slice(1, 4), slice(5)), False)),
    "one row": after(lambda m: put(m, 3, True), lambda m: put(m, (..., -1), True)),
    "one element": after(lambda m: put(m, (2, 3), True)),
    "a row for all": after(lambda m: put(m, (slice(1, None),), torch.arange(N + 2) * 2), dtype=torch.int64),
    "a column for all": after(lambda m: put(m, (ALL, slice(-3, -1)), torch.arange(N)[:, None]), dtype=torch.float32),
    "floats in whole numbers": after(lambda m: put(m, (ALL, slice(4)), 2.75), dtype=torch.int64),
    "numbers in truth values": after(lambda m: put(m, (ALL, SHORT), torch.ones(N, N).triu(1) * 2)),
    "truth values in floats": after(lambda m: put(m, (ALL, SHORT), causal()), dtype=torch.float32),
    "a number that is rounded": after(lambda m: put(m, (ALL, SHORT), 0.1), dtype=torch.bfloat16),
    "filled behind a view": filled_behind_a_view,
    "copied behind a view": after(lambda m: m[:, 2:].copy_(causal())),
    "masked behind a view": after(lambda m: m[:, 2:].masked_fill_(causal(), -1.5), dtype=torch.float32),
    "written, and masked behind a view": after(
        lambda m: put(m, slice(3), 2.0), lambda m: m[:, 2:].masked_fill_(causal(), -1.5), dtype=torch.float32
    ),
    "behind views": after(lambda m: put(m.t()[1:][None], (0, slice(1, None)), causal().t())),
    "itself, moved": after(lambda m: put(m, 0, True), lambda m: put(m, slice(1, 3), m[:2].clone())),
    "by its own values": after(
        lambda m: put(m, (ALL, SHORT), causal()), lambda m: put(m, m == 1, -2.5), dtype=torch.float32
    ),
    "by truth values": after(lambda m: put(m, (ALL, torch.arange(N + 2) > 4), True)),
    "by numbers of a triangle": after(lambda m: put(m, tuple(torch.triu_indices(N, N + 2, 1)), True)),
    "by index_put_": after(lambda m: m[:, 2:].index_put_((causal(),), torch.tensor(3.0)), dtype=torch.float32),
    "by index_put": lambda x: torch.index_put(torch.zeros(N, N), (causal(),), torch.tensor(2.0)),
    "a slice, out of place": lambda x: torch.slice_scatter(torch.zeros(N, N + 2), torch.ones(N, N).tril(), 1, 2),
    "a row, out of place": lambda x: torch.select_scatter(torch.zeros(N, N), torch.arange(N) * 1.0, 0, 4),
    "copied out of place": lambda x: torch.ops.aten.copy.default(torch.zeros(2, N), torch.arange(N)),
}
# What cannot be said without reading the matrix.
NOT_WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "every second row": after(lambda m: put(m, slice(0, None, 2), True)),
    "rows by number": after(lambda m: put(m, torch.tensor([1, 4]), True)),
    "added up": after(lambda m: m.index_put_((m == 0,), torch.tensor(1.0), accumulate=True), dtype=torch.float32),
    "a triangle behind a view": after(lambda m: put(m, ALL, True), lambda m: m[:, 2:].tril_()),
    "flattened": after(lambda m: put(m.view(-1), slice(9), True)),
    "bytes": after(lambda m: put(m, (ALL, SHORT), causal()), dtype=torch.uint8),
    "by position of another": after(lambda m: put(m, (ALL, SHORT), causal()), lambda m: m.diagonal().fill_(False)),
}


def pieces(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros(2, dtype=torch.int64), torch.arange(4)])


# Programs that read no tensor: their elements are index arithmetic and constants alone.
ARITHMETIC: dict[str, Callable[[Tensor], Tensor]] = {
    "arange": lambda x: torch.arange(3, 3 + N),
    "in steps": lambda x: torch.arange(N) * 3 - 2,
    "tril": lambda x: torch.ones(N, N).tril(-1),
    "triu": lambda x: torch.triu(torch.full((N, N), float("-inf")), diagonal=1),
    "a comparison": lambda x: causal(),
    "distances": lambda x: (lambda i, j: (i - j).abs() // 2)(*rows_and_columns()),
    "remainders": lambda x: (lambda i, j: (i + 2 * j) % 4)(*rows_and_columns()),
    "logic": lambda x: (lambda i, j: (j <= i) & ~(j < i - 2) | (j == 0))(*rows_and_columns()),
    "where": lambda x: torch.where(causal(), 0.0, -1e9),
    "filled": lambda x: torch.zeros(N, N).masked_fill(~causal(), float("-inf")),
    "a view": lambda x: torch.arange(4 * N).view(4, N).t().reshape(2, -1)[:, 1:],
    "expanded": lambda x: torch.arange(N)[None, :, None].expand(2, N, 3),
    "clamped": lambda x: torch.arange(N).clamp(min=1, max=3),
    "cast": lambda x: (torch.arange(N).float() * 0.5).to(torch.int64),
    "negative numbers as truth": lambda x: (torch.arange(N) - 2).bool(),
    "in pieces": pieces,
    "index by index": lambda x: torch.arange(10, 10 + N)[torch.arange(N) // 2],
    "rsub": lambda x: torch.rsub(torch.arange(N), torch.tensor(5), alpha=2),
    "maximum": lambda x: torch.maximum(torch.arange(N), torch.tensor(3)),
    "one of several": lambda x: torch.stack([torch.zeros(3), torch.ones(3)])[1],
    "written in place, all of it": filled_in_part,
    "filled in place": filled_whole,
    "filled again": filled_twice,
    "filled by a function": lambda x: torch.fill(torch.zeros(N, 2, dtype=torch.int64), 7),
    "stacked side by side": lambda x: torch.hstack([torch.zeros(N, 2), torch.ones(N, N).tril()]),
    "columns": lambda x: torch.column_stack((torch.ones(2, 3, 2).triu(), torch.zeros(2, 1, 2))),
    "one below the other": lambda x: torch.vstack([torch.zeros(2, N, 3), torch.ones(1, N, 3)]),
    "padded": lambda x: F.pad(torch.ones(N, N).tril(), (2, 1)),
    "padded with a number": lambda x: F.pad(torch.arange(12).view(3, 4), (0, 1, 2, 0), value=-1),
    "padded truth values": lambda x: F.pad(causal(), (3, 0), value=True),
    "a grid": lambda x: torch.meshgrid(torch.arange(N), torch.arange(4) * 2, indexing="ij")[0],
    "a grid's columns": lambda x: torch.meshgrid(torch.arange(N), torch.arange(4) * 2, indexing="ij")[-1],
    "a grid of x": lambda x: torch.meshgrid([torch.arange(N), torch.arange(4) * 2], indexing="xy")[0],
    "a grid of y": lambda x: torch.meshgrid([torch.arange(N), torch.arange(4) * 2], indexing="xy")[1],
    "a grid of x, y and z": lambda x: torch.meshgrid(
        torch.arange(N), torch.arange(4), torch.arange(2) * 3, indexing="xy"
    )[2],
    "a grid of one": lambda x: torch.meshgrid(torch.arange(N), torch.tensor(3), torch.arange(1), indexing="ij")[1],
    "a grid, written before": lambda x: torch.meshgrid(torch.arange(N).add_(2), torch.arange(4), indexing="ij")[0],
    "cut by padding": lambda x: F.pad(torch.arange(12).view(3, 4), (-1, 2, 1, -2), value=5),
    **{f"written: {name}": program for name, program in WRITTEN.items()},
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_index_arithmetic_is_read_as_indices(name: str) -> None:
    value, _ = element(ARITHMETIC[name], randn(2))
    assert not loads(value), value


def steps_then_more(x: Tensor) -> Tensor:
    y = x.exp()
    y.add_(1.0)
    return y * 2


def partly_written(x: Tensor) -> Tensor:
    y = x + 1
    y[0] = 0.0
    return y * 2


# Programs that read their input, and what is loaded of the graph: the furthest back that is known to hold it.
LOADING: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "pointwise": (lambda x: (x * 2 + 1).neg().maximum(torch.tensor(0.5)), {"l_x_"}),
    "views": (lambda x: x.t()[1:].reshape(-1), {"l_x_"}),
    "a copy": (lambda x: x.t().contiguous() + 1, {"l_x_"}),
    "sub with alpha": (lambda x: torch.sub(x, x.t(), alpha=3), {"l_x_"}),
    "floor": (lambda x: torch.div(x, 0.5, rounding_mode="floor"), {"l_x_"}),
    "where": (lambda x: torch.where(causal()[:4, :4], x, 2.0), {"l_x_"}),
    "written in place": (steps_then_more, {"l_x_"}),
    "filled by a tensor": (filled_by_a_tensor, {"mask"}),
    "vectors side by side": (lambda x: torch.hstack([torch.zeros(2), torch.ones(3)]), {"hstack"}),
    "vectors as columns": (lambda x: torch.column_stack([torch.zeros(2), torch.ones(2)]), {"column_stack"}),
    "vectors below each other": (lambda x: torch.vstack([torch.zeros(2), torch.ones(2)]), {"vstack"}),
    "padded input": (lambda x: F.pad(x, (1, 2)), {"pad"}),
    "padded by what is there": (lambda x: F.pad(torch.ones(1, N, N).tril(), (1, 2), mode="replicate"), {"pad"}),
    "written in part": (partly_written, {"l_x_"}),
    "written from what is read": (lambda x: after(lambda m: put(m, (ALL, slice(4)), x[0] > 0))(x), {"mask"}),
    "written from one number": (lambda x: after(lambda m: put(m, (ALL, slice(4)), x[0, 0] > 0))(x), {"l_x_"}),
    **{f"written: {name}": (program, {"mask"}) for name, program in NOT_WRITTEN.items()},
    "something else": (lambda x: x.cumsum(0) + 1, {"cumsum"}),
}


@pytest.mark.parametrize("name", LOADING)
def test_what_is_not_is_loaded_from_as_far_back_as_it_is_known(name: str) -> None:
    program, expected = LOADING[name]
    value, reader = element(program, randn(4, 4))
    assert {reader.source_nodes[x.source].name for x in loads(value)} == expected


def test_trunc_is_not_floor() -> None:
    value, reader = element(lambda x: torch.div(x, 0.5, rounding_mode="trunc"), randn(4, 4))
    assert isinstance(value, Load) and reader.source_nodes[value.source].name != "l_x_"


# ---------------------------------------------------------------- time


def in_between(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.zeros(3)
    a = y + 0
    y += 5
    y[1] = 7
    return a, y + 0


def test_an_element_is_what_it_was_at_the_time() -> None:
    gm = captured(in_between, randn(2))
    reader, (zeros,), (added,) = reader_of(gm), nodes_of(gm, "zeros"), nodes_of(gm, "iadd")
    (set_,) = nodes_of(gm, "setitem")

    def at(time: int) -> Expr:
        return reader.element(zeros, (2,), time)

    order = reader.order
    assert at(order[added]) == Const(0.0) and at(order[set_]) == Const(5.0)
    assert at(order[set_] + 1) == Const(5.0) and reader.element(zeros, (1,), order[set_] + 1) == Const(7.0)
    assert reader.definition(zeros, order[added])[0] is zeros
    assert reader.definition(zeros, order[set_])[0] is added
    assert reader.definition(zeros, order[set_] + 1) == (zeros, None), "what wrote a part is not what it is"


def test_what_changes_its_shape_in_place_has_no_definition() -> None:
    gm = captured(lambda x: (lambda y: y.t_().add_(1) + 1)(x.clone()), randn(3, 3))
    reader, (clone,) = reader_of(gm), nodes_of(gm, "clone")
    assert reader.is_reshaped_in_place(clone) and reader.definition(clone, 99) == (clone, None)
    with pytest.raises(Unreadable, match="changes its shape in place"):
        reader.source(clone)


# ---------------------------------------------------------------- operands


def forms(program: Callable[[Tensor], Tensor], x: Tensor, *, factors: bool = True) -> list[tuple[str, float, int]]:
    """The ways to see what a program returns: the node, the scale and the number of factors."""
    gm = captured(program, x)
    reader, node = reader_of(gm), result_of(gm)
    position = tuple(axis_index(a) for a in axes_of(reader, node))
    made = operand(reader, node, position, len(reader.order), Region.ambient(), factors)
    run = Kept(gm)
    (value,) = run.run(x.detach().clone())
    for form in made:  # each way gives the same elements
        source = reader.source(form.node)
        elements = evaluated(reader, Load(source, form.position), axes_of(reader, node), run.env) * form.scale
        for factor, inverse in form.factors:
            other = evaluated(reader, factor, axes_of(reader, node), run.env)
            elements = elements / other if inverse else elements * other
        torch.testing.assert_close(elements, value.double(), rtol=1e-5, atol=1e-5)
    return [(f.node.name.removeprefix("l_").removesuffix("_"), f.scale, len(f.factors)) for f in made]


def test_every_way_to_see_an_operand() -> None:
    def names(*given: Any, **options: Any) -> list[str]:
        return [name for name, _, _ in forms(*given, **options)]

    x = randn(4, 4)
    assert names(lambda x: x.t()[1:], x)[-1] == "x"
    assert names(lambda x: x.sin(), x) == ["sin"]
    assert forms(lambda x: x.t() * 0.25 / 2, x)[-1] == ("x", 0.125, 0)
    assert names(lambda x: x.t() * 0.25, x, factors=False) == ["mul"]
    assert forms(lambda x: x / x.sum(0), x)[-1] == ("x", 1.0, 1)
    assert names(lambda x: x * 0.0, x) == ["mul"], "0 times infinity is none"
    assert names(lambda x: x + 1, x) == ["add"]
    assert names(lambda x: 1 / x, x) == ["truediv"]
    assert names(lambda x: x.bfloat16().float(), x.bfloat16().float())[-1] != "x", "it rounds"
    assert names(lambda x: x.float(), x.bfloat16())[-1] == "x", "a wider type loses nothing"
    assert names(lambda x: x.clone().mul_(2.0), x) == ["mul"], "what it was applied to is overwritten"


def test_detach_is_passed_where_no_gradient_flows() -> None:
    assert forms(lambda x: x.detach().t(), randn(3, 3))[-1][0] == "x"
    assert forms(lambda x: x.detach().t(), randn(3, 3).requires_grad_())[-1][0] == "detach"


# ---------------------------------------------------------------- what reaches a node


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * 0.5 + 1).softmax(-1).bfloat16().float() @ v


def test_what_reaches_a_node() -> None:
    gm = captured(attention, *(randn(2, 4, 4, seed=n) for n in range(3)))
    reader = reader_of(gm)
    scores, result = nodes_of(gm, "matmul")
    (softmax,), (added,), (cast,) = nodes_of(gm, "softmax"), nodes_of(gm, "add"), nodes_of(gm, "float")
    assert reader.products[scores] == {scores} and reader.products[added] == {scores}
    assert reader.softmaxes[cast] == {softmax} == reader.softmaxes[softmax]
    assert softmax not in reader.products and result not in reader.softmaxes, "a softmax and a product begin anew"


def test_a_softmax_that_is_written_out_begins_anew() -> None:
    gm = captured(lambda q: (lambda e: e / e.sum(-1, keepdim=True) + 1)((q @ q.mT).exp()), randn(2, 4, 4))
    reader, (quotient,), (exp,) = reader_of(gm), nodes_of(gm, "truediv"), nodes_of(gm, "exp")
    assert exp in reader.products and quotient not in reader.products
    assert reader.softmaxes[result_of(gm)] == {quotient}


@pytest.mark.parametrize(("number", "known"), [(8, True), (9, False)])
def test_of_many_products_none_is_known(number: int, known: bool) -> None:
    def program(x: Tensor) -> Tensor:
        total = x @ x
        for n in range(number - 1):
            total = total + (x + n) @ x
        return total

    gm = captured(program, randn(3, 3))
    assert len(reader_of(gm).products.get(result_of(gm), ())) == (number if known else 0)


def test_a_product_in_the_place_of_others() -> None:
    gm = captured(lambda x: (x @ x + x @ x.t()).exp(), randn(3, 3))
    reader, (add,), (exp,) = reader_of(gm), nodes_of(gm, "add"), nodes_of(gm, "exp")
    first, second = nodes_of(gm, "matmul")
    assert reader.products[exp] == {first, second}
    add.replace_all_uses_with(first)
    assert reader.call(exp)["input"] is add, "as it was read"  # type: ignore[index]
    reader.put_in_place(first, (second, add))
    assert reader.call(exp)["input"] is first  # type: ignore[index]
    assert reader.instead_of(first) == (second, add) and reader.instead_of(second) == ()
    assert reader.products[first] == {first}


# ---------------------------------------------------------------- one site


def test_the_use_of_constants_is_recorded_per_site() -> None:
    gm = captured(lambda x, y: x + y, randn(3), randn(3))
    x, y = inputs_of(gm)
    reader = reader_of(gm, known={y: ("buffer y", torch.full((3,), 2.0))})
    with reader.site() as used:
        reader.load(x, (0,), 7)
        reader.load(x, (1,), 5)
        reader.load(x, (2,), 9)
        assert reader.element(y, (0,), 9) == Const(2.0)
    assert used.read_times == {x: 5} and used.known == ["buffer y"]
    with reader.site() as again:
        assert again.read_times == {}
        with reader.site() as inner:
            reader.element(y, (0,), 9)
        assert inner.known == ["buffer y"], "reported again, although it was read before"
        assert again.known == []
        reader.load(x, (0,), 3)
    assert again.read_times == {x: 3} and used.read_times == {x: 5}
    reader.load(x, (0,), 1)
    assert again.read_times == {x: 3}


def test_a_body_reads_what_its_only_caller_passes() -> None:
    outside = captured(lambda x: torch.arange(3) + 1, randn(3))
    body = captured(lambda x, y: x + y, torch.arange(3), randn(3))
    caller = reader_of(outside, known={})
    first, second = inputs_of(body)
    result = result_of(outside)
    reader = reader_of(body, caller=Caller(caller, {first: result}, len(caller.order)))
    axis = Axis("i", 3)
    assert str(reader.element(first, (axis_index(axis),), 0)) == "1+i"
    assert isinstance(reader.element(second, (axis_index(axis),), 0), Load)
    assert isinstance(reader_of(body).element(first, (axis_index(axis),), 0), Load), "without it, it is any tensor"


def test_what_the_caller_assumed_is_assumed_in_the_body() -> None:
    outside = captured(lambda x: x * 1, randn(3))
    body = captured(lambda x: x + 1, randn(3))
    (x,), (inner,) = inputs_of(outside), inputs_of(body)
    caller = reader_of(outside, known={x: ("buffer x", torch.zeros(3))})
    reader = reader_of(body, caller=Caller(caller, {inner: x}, 1))
    with reader.site() as used:
        assert reader.element(inner, (0,), 0) == Const(0.0)
    assert used.known == ["buffer x"]


def test_a_literal_is_a_number_until_it_is_written() -> None:
    def program(x: Tensor, one: Tensor) -> Tensor:
        y = one.clone()
        y = y.detach()
        z = y + 0
        one.add_(1)
        return z * x

    gm = captured(program, randn(3), torch.tensor(4.0))
    one = next(n for n in inputs_of(gm) if "one" in n.name)
    (clone,), (add,) = nodes_of(gm, "clone"), nodes_of(gm, "add_")
    reader = reader_of(gm, constants={one: torch.tensor(4.0)})
    assert reader.element(clone, (), reader.order[add]) == Const(4.0)
    assert reader.element(one, (), reader.order[add]) == Const(4.0)
    assert reader.element(one, (), reader.order[add] + 1) != Const(4.0)


def test_a_scalar_is_a_number_a_symbol_or_an_element() -> None:
    gm = captured(lambda x, y: x * x.shape[0] * y, randn(6, 2), torch.tensor([2.0]), dynamic=True)
    reader = reader_of(gm)
    size = next(n for n in gm.graph.nodes if isinstance(n.meta.get("example_value"), torch.SymInt))
    tensors = [n for n in inputs_of(gm) if tensor_value(n) is not None]
    assert reader.scalar(3, 0) == Const(3) and reader.scalar("3", 0) is None
    assert reader.scalar(size, 0) == Load(reader.source(size), ())
    assert reader.scalar(tensors[0], 9) is None, "a tensor of several elements"
    assert reader.scalar(tensors[1], 9) == Load(reader.source(tensors[1]), (0,))
