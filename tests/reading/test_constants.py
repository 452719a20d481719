"""Buffers whose values are relied on: when this is allowed, how they are named, and that the report says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_eager import NEG_INF, qkv, same
from torch import Tensor

import attn_pass

Keep = Callable[[Tensor], Tensor]

N = 12
I, J = torch.arange(N)[:, None], torch.arange(N)[None]
ADDED = torch.zeros(N, N).masked_fill(I < J, NEG_INF)


class Masked(torch.nn.Module):
    def __init__(self, mask: Tensor, persistent: bool = True, add: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=persistent)
        self.add = add

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.mask[..., : q.shape[-2], : k.shape[-2]]
        scores = q @ k.transpose(-1, -2) * 0.25
        scores = scores + mask if self.add else scores.masked_fill(mask == 0, NEG_INF)
        return torch.softmax(scores, -1) @ v


MASKS: dict[str, tuple[Tensor, bool, str]] = {
    "tril of bool": ((I >= J), False, "causal"),
    "tril of float": (torch.ones(N, N).tril(), False, "causal"),
    "tril of uint8": ((I >= J).to(torch.uint8), False, "causal"),
    "with batch and head": ((I >= J)[None, None], False, "causal"),
    "repeated for each head": ((I >= J).repeat(1, 2, 1, 1), False, "causal"),
    "an added matrix": (ADDED, True, "causal"),
    "one further": ((I >= J - 1), False, "causal with offset 1"),
    "a window": (((I - J).abs() <= 2), False, "sliding window (2, 2)"),
    "everything": (torch.ones(N, N), False, "none"),
    "one element off": ((I >= J) ^ ((I == 3) & (J == 7)), False, "dense"),
    "another for each head": (torch.stack([I >= J, I <= J])[None], False, "dense"),
    "three values": (ADDED + torch.eye(N), True, "additive"),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("length", [N, 7])
def test_named_by_value(name: str, length: int) -> None:
    mask, add, expected = MASKS[name]
    model, inputs = Masked(mask, add=add), qkv(2, 2, length, length)
    report = same(model, *inputs, rewritten=1, choose="fused", assume_constant_buffers=True, reference=False)
    (site,) = report.sites
    if length == N or expected not in ("sliding window (2, 2)", "dense"):
        assert site.mask == expected
    assumed = "buffer mask keeps the values it has now" in site.assumptions
    assert assumed == (site.mask not in ("dense", "additive"))


def test_not_without_the_option() -> None:
    report = same(Masked(I >= J), *qkv(2, 2, N, N), rewritten=1, choose="fused", reference=False)
    assert report.sites[0].mask == "dense"


@pytest.mark.parametrize("persistent", [True, False])
def test_exported_programs(persistent: bool) -> None:
    """A buffer that no state dict holds is part of the program; another may be loaded later."""
    model, inputs = Masked(I >= J, persistent), qkv(2, 2, N, N)
    program = torch.export.export(model, inputs)
    report = attn_pass.rewrite(program, choose="fused", on_error="raise")
    assert report.sites[0].mask == ("dense" if persistent else "causal")
    assert bool(report.sites[0].assumptions[-1:] == ("buffer mask keeps the values it has now",)) != persistent
    torch.testing.assert_close(program.module()(*inputs), model(*inputs))


def test_the_values_of_a_written_buffer_are_not_relied_on() -> None:
    class Writing(Masked):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.mask[0] = True
            return super().forward(q, k, v)

    report = same(
        Writing(I >= J), *qkv(2, 2, N, N), rewritten=1, choose="fused", assume_constant_buffers=True, reference=False
    )
    assert report.sites[0].mask == "dense"
    program = torch.export.export(Writing(I >= J, persistent=False), qkv(2, 2, N, N))
    assert attn_pass.rewrite(program, choose="fused").sites[0].mask == "dense"


def test_every_site_tells_its_own_assumption() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Masked(I >= J), Masked(I >= J)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = self.second(self.first(q, k, v), k, v)
            return torch.softmax(out @ k.transpose(-1, -2), -1) @ v

    report = same(Two(), *qkv(2, 2, N, N), rewritten=3, choose="fused", assume_constant_buffers=True, reference=False)
    reported = [[a for a in site.assumptions if "buffer" in a] for site in report.sites]
    assert reported == [[f"buffer {n}.mask keeps the values it has now"] for n in ("first", "second")] + [[]]


def test_a_shared_buffer_is_reported_at_each_site() -> None:
    class Twice(Masked):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return super().forward(super().forward(q, k, v), k, v)

    report = same(
        Twice(I >= J), *qkv(2, 2, N, N), rewritten=2, choose="fused", assume_constant_buffers=True, reference=False
    )
    assert all("buffer mask keeps the values it has now" in site.assumptions for site in report.sites)


def test_distances_in_a_buffer() -> None:
    model, inputs = Masked((J - I)[None, None], add=True), qkv(2, 2, N, N)
    report = same(model, *inputs, rewritten=1, choose="fused", assume_constant_buffers=True, reference=False)
    assert report.sites[0].mask == "additive, by distance"


def test_a_buffer_that_wants_a_gradient_gets_it() -> None:
    q, k, v = qkv(1, 2, N, N)
    gradients = []
    for compiled in (False, True):
        model = Masked(torch.zeros(N, N).masked_fill(I < J, -1e9).requires_grad_(), add=True)
        options = {"choose": "fused", "assume_constant_buffers": True, "on_error": "raise"}
        run = (
            torch.compile(model, backend=attn_pass.wrap("aot_eager_default_partitioner", **options))
            if compiled
            else model
        )
        run(q, k, v).square().sum().backward()
        gradients.append(model.mask.grad)
    torch.testing.assert_close(*gradients)


def of_mask(program: Keep) -> type[torch.nn.Module]:
    class Model(Masked):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.transpose(-1, -2)
            return torch.softmax(scores.masked_fill(~program(self.mask), -1e9), -1) @ v

    return Model


TRIL = torch.ones(N, N).tril()
LEAVING: dict[str, tuple[Tensor, Keep]] = {
    "wraps below 0": (TRIL.to(torch.uint8), lambda m: ~((m - 1) > 0)),
    "wraps by its transpose": (TRIL.to(torch.uint8), lambda m: ~((m - m.T) > 1)),
    "wraps when negated": (torch.ones(N, N, dtype=torch.uint8), lambda m: ((-m) > 0) | (I >= J)),
    "overflows int32": (torch.full((N, N), 2**31 - 1, dtype=torch.int32), lambda m: ((m + 1) > 0) | (I >= J)),
    "overflows int64": (torch.full((N, N), 2**63 - 1), lambda m: ((m + 1) > 0) | (I >= J)),
    "positions overflow": (
        torch.arange(N, dtype=torch.int32) * 2**28,
        lambda m: (m[:, None] * 2) >= (m[None] * 2),
    ),
    "bfloat16 stands still": (
        torch.full((N, N), 256.0, dtype=torch.bfloat16),
        lambda m: ((m + 1 + 1 + 1 + 1) >= 260) | (I >= J),
    ),
    "float16 overflows": (torch.full((N, N), 6e4, dtype=torch.float16), lambda m: ((m + m) < 1e6) | (I >= J)),
    "literals overflow": (TRIL, lambda m: ((torch.full((N, N), 2**31 - 1, dtype=torch.int32) + 1) > 0) | (I >= J)),
    "a literal times positions": (
        TRIL,
        lambda m: (torch.arange(N, dtype=torch.int32) * 2**28 * 2)[:, None] >= torch.arange(N)[None],
    ),
}


@pytest.mark.parametrize("name", LEAVING)
def test_numbers_that_leave_their_type(name: str) -> None:
    mask, program = LEAVING[name]
    model, inputs = of_mask(program)(mask, persistent=False), qkv(1, 2, N, N)
    same(model, *inputs, choose="fused", assume_constant_buffers=True, reference=False)
    with torch.no_grad():
        exported = torch.export.export(model, inputs)
        attn_pass.rewrite(exported, choose="fused", on_error="raise")
        torch.testing.assert_close(exported.module()(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)
