"""A bias that is looked up in products: the kernel reads it where a score needs it. Near misses stay a matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import qkv, randn, same
from test_cpu_kernel import kernel_calls, on_kernel
from torch import Tensor

import attn_pass
from attn_pass.devices.cpu.kernel import build

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
SPAN = 8
Place = Callable[[Tensor], Tensor]


def clamped(distance: Tensor) -> Tensor:
    return torch.clamp(distance + SPAN, 0, 2 * SPAN - 1)


def both(rows: int, keys: int, place: Place = clamped) -> list[Tensor]:
    distance = torch.arange(rows)[:, None] - torch.arange(keys)
    return [place(distance), place(-distance.mT)]


def disentangled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    keep: Tensor | None = None,
    places: list[Tensor] | None = None,
) -> Tensor:
    """As DeBERTa has it: heads are one dimension with the batch, and a place is expanded to it."""
    batch, heads, rows, dim = q.shape
    keys = k.size(2)
    q, k = (x.reshape(batch * heads, -1, dim) for x in (q, k))
    positions = positions.repeat(batch, 1, 1)
    of_rows, of_keys = (x[None].expand(batch * heads, -1, -1) for x in places or both(rows, keys))
    scores = torch.bmm(q, k.transpose(-1, -2) / 8)
    to_position = torch.gather(torch.bmm(q, positions.transpose(-1, -2)), dim=-1, index=of_rows)
    to_content = torch.gather(torch.bmm(k, positions.transpose(-1, -2)), dim=-1, index=of_keys)
    scores = scores + (to_position / 4 - to_content.transpose(-1, -2) * 0.3)
    scores = scores.view(batch, heads, rows, keys)
    if keep is not None:
        lowest = torch.finfo(scores.dtype).min  # in float16 it leaves something of a score
        scores = scores.masked_fill(~keep, lowest if lowest < -1e30 else float("-inf"))
    return scores.softmax(-1) @ v


def inputs(
    rows: int = 33, keys: int = 70, dtype: torch.dtype = torch.float32, masked: bool = True, batch: int = 2
) -> list[Tensor]:
    made = [*qkv(batch, 4, rows, keys, dtype=dtype), randn(4, 2 * SPAN, 16).to(dtype)]
    return [*made, torch.rand(batch, 1, 1, keys) < 0.7] if masked else made


def given(fn: Callable[..., Tensor], *operands: Tensor) -> dict[str, Any]:
    (call,) = kernel_calls(fn, *operands)
    return dict(call.kwargs)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(33, 70), (70, 33), (1, 50), (130, 130), (5, 1)])
def test_numbers_of_two_tables(rows: int, keys: int, dtype: torch.dtype, masked: bool) -> None:
    operands = inputs(rows, keys, dtype, masked)
    kwargs = given(disentangled, *operands)
    assert "bias" not in kwargs and [x.args for x in kwargs["factors"]] == [([], 0.25), ([], -0.3)]
    on_kernel(disentangled, *operands)


def test_lengths_that_are_not_known() -> None:
    on_kernel(disentangled, *inputs(), dynamic=True)


def test_sequences_and_heads_have_one_matrix_of_places() -> None:
    assert [x.meta["example_value"].shape for x in given(disentangled, *inputs())["places"]] == [(1, 1, 33, 70)] * 2


def unclamped(distance: Tensor) -> Tensor:
    return (distance + SPAN).remainder(2 * SPAN)


def too_far(distance: Tensor) -> Tensor:
    """The last clamp allows one number more than the table has; an earlier one is what keeps it there."""
    return torch.clamp(clamped(distance), 0, 2 * SPAN)


def below(distance: Tensor) -> Tensor:
    return torch.clamp(clamped(distance), -1, 2 * SPAN - 1)


def written_to(distance: Tensor) -> Tensor:
    place = clamped(distance)
    place.sub_(1).abs_()
    return place


def of_bits(distance: Tensor) -> Tensor:
    """What is clamped are the tiny floats that these integers are the bits of."""
    return torch.clamp(clamped(distance).view(torch.float64), 0, 2 * SPAN - 1).view(torch.int64)


@pytest.mark.parametrize("place", [unclamped, too_far, below, written_to, of_bits], ids=lambda f: f.__name__)
def test_a_place_that_is_not_proved_to_be_in_the_table(place: Place) -> None:
    def program(q: Tensor, k: Tensor, *operands: Tensor) -> Tensor:
        return disentangled(q, k, *operands, places=both(q.size(2), k.size(2), place))

    assert "tables" not in given(program, *inputs())
    on_kernel(program, *inputs())


def test_a_clamp_whose_minimum_is_above_its_maximum() -> None:
    """All of it is the maximum, which is not in the table: torch says so, and not the kernel."""

    def program(q: Tensor, k: Tensor, *operands: Tensor) -> Tensor:
        places = both(q.size(2), k.size(2), lambda distance: torch.clamp(distance, 5, -1))
        return disentangled(q, k, *operands, places=places)

    with pytest.raises(RuntimeError, match="out of bounds"):
        given(program, *inputs())


def test_a_product_that_is_written_to_between_the_gather_and_the_softmax() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        place = clamped(torch.arange(q.size(2))[:, None] - torch.arange(k.size(2)))
        table = q @ positions.mT
        looked_up = torch.gather(table, -1, place.expand(2, 4, -1, -1))
        table.mul_(3)
        return (q @ k.mT / 8 + looked_up).softmax(-1) @ v + table.sum()

    operands = inputs(masked=False)
    same(program, *operands, rewritten=None, choose="fused", targets=("cpu_kernel",))


def test_a_table_beside_something_else_that_is_added() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, more: Tensor) -> Tensor:
        place = clamped(torch.arange(q.size(2))[:, None] - torch.arange(k.size(2)))
        looked_up = torch.gather(q @ positions.mT, -1, place.expand(2, 4, -1, -1))
        return (q @ k.mT / 8 + looked_up + more).softmax(-1) @ v

    operands = [*inputs(masked=False), randn(1, 4, 33, 70)]
    assert "tables" not in given(program, *operands)
    on_kernel(program, *operands)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_numbers_that_are_rounded_on_their_way_stay_rounded(dtype: torch.dtype) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        place = clamped(torch.arange(q.size(2))[:, None] - torch.arange(k.size(2)))
        looked_up = torch.gather(q @ positions.mT, -1, place.expand(2, 4, -1, -1))
        return (q @ k.mT / 8 + looked_up.to(dtype).float()).softmax(-1) @ v

    operands = inputs(masked=False)
    assert "tables" not in given(program, *operands)
    on_kernel(program, *operands)


def test_a_product_with_a_number_that_is_a_tensor() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, by: Tensor) -> Tensor:
        place = clamped(torch.arange(q.size(2))[:, None] - torch.arange(k.size(2)))
        looked_up = torch.gather(q @ positions.mT, -1, place.expand(2, 4, -1, -1)) * by
        return (q @ k.mT / 8 + looked_up).softmax(-1) @ v

    operands = [*inputs(masked=False), torch.tensor(0.3)]
    assert "tables" in given(program, *operands)
    on_kernel(program, *operands)


def test_with_gradients_it_is_a_matrix() -> None:
    operands = [x.requires_grad_() if x.is_floating_point() else x for x in inputs()]
    same(disentangled, *operands, grad=True, rewritten=1, choose="fused", targets=("cpu_kernel",))


@pytest.mark.slow
def test_in_a_package_for_any_batch(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, *operands: Tensor) -> Tensor:
            return disentangled(*operands)

    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = ({0: batch}, {0: batch}, {0: batch}, {}, {0: batch})
    package = attn_pass.aot_compile(
        Model(),
        tuple(inputs()),
        dynamic_shapes=(shapes,),
        package_path=tmp_path / "m.pt2",
        options={"choose": "fused", "targets": ("cpu_kernel",), "on_error": "raise"},
    )
    run = torch._inductor.aoti_load_package(str(package))
    for size in (2, 3):
        operands = inputs(batch=size)
        expected = disentangled(*(x.double() if x.is_floating_point() else x for x in operands))
        torch.testing.assert_close(run(*operands).double(), expected, rtol=1e-5, atol=1e-5)
