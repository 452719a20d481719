"""The order in memory of a tensor's dimensions, if it is dense; and what is known of sizes at run time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_pass.graph.values import Sizes, fake_value, memory_order

X = torch.zeros(2, 3, 4, 5)


@pytest.mark.parametrize(
    "tensor, order",
    [
        (X, (0, 1, 2, 3)),
        (X.transpose(1, 2), (0, 2, 1, 3)),
        (X.mT, (0, 1, 3, 2)),
        (X.to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (X[:, :1], None),  # steps over the other two
        (X[:1], (0, 1, 2, 3)),
        (X[..., :2], None),
        (X[:, ::2], None),
        (torch.zeros(1, 3).expand(2, 3), None),
        (torch.zeros(1, 3, 1), (0, 2, 1)),  # dimensions of size 1 come first
        (torch.zeros(()), ()),
    ],
)
def test_memory_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> None:
    assert memory_order(tensor, Sizes()) == order


def test_what_has_no_strides_has_no_order() -> None:
    assert memory_order(torch.eye(3).to_sparse(), Sizes()) is None


def asked(program: Callable[..., torch.Tensor], *lengths: int) -> list[bool]:
    """Whether each number that a program computes of two sizes is proved not to be negative."""
    known: list[bool] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        sizes = Sizes()
        numbers = [fake_value(n) for n in gm.graph.nodes if n.op == "call_function"]
        known.extend(sizes.is_nonnegative(n) for n in numbers if isinstance(n, torch.SymInt))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, dynamic=True)(*(torch.zeros(n) for n in lengths))
    return known


def test_a_guard_says_that_a_size_is_not_negative() -> None:
    def unasked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(()) + (y.shape[0] - x.shape[0])

    def larger(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return unasked(x, y) if y.shape[0] - x.shape[0] > 0 else x

    def by_two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(()) + (y.shape[0] - x.shape[0] - 2) if y.shape[0] >= x.shape[0] + 2 else x

    def by_one_less(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(()) + (y.shape[0] - x.shape[0] - 2) if y.shape[0] >= x.shape[0] + 1 else x

    def smaller(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return unasked(x, y) if y.shape[0] < x.shape[0] else x

    for program, lengths, last in (
        (unasked, (3, 7), False),
        (larger, (3, 7), True),
        (by_two, (3, 7), True),
        (by_one_less, (3, 7), False),
        (smaller, (7, 3), False),
    ):
        assert asked(program, *lengths)[-1] == last, program
