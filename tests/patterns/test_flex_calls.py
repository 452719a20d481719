"""Calls of FlexAttention as sites: how their masks and score functions are read, and which calls stay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from against_eager import qkv, randn, same, same_each
from gym_programs import GYM
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import attn_pass
from attn_pass.devices import registry
from attn_pass.targets.base import FLEX, Setting

N, SIZE = 96, 32  # positions, and rows and keys of a block
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Scores = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
HALF = (torch.bfloat16, torch.float16)
FUSED = {"choose": "fused", "targets": ("sdpa",)}

pytestmark = pytest.mark.usefixtures("quiet_torch")


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def blocks(
    mask: Mask, q_len: int = N, kv_len: int = N, batch: int | None = None, heads: int | None = None
) -> BlockMask:
    return create_block_mask(mask, batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=SIZE)


def flex(mask: BlockMask | None = None, score: Scores | None = None, **options: Any) -> Callable[..., Any]:
    """A program whose block mask comes from outside, as a tensor of its inputs."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=True, **options)

    return run


def made_inside(mask: Mask, batch: int | None = None) -> Callable[..., Tensor]:
    """A program that makes its block mask itself."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = create_block_mask(mask, batch, None, q.shape[2], k.shape[2], device="cpu", BLOCK_SIZE=SIZE)
        return flex_attention(q, k, v, block_mask=made, enable_gqa=True)

    return run


def site_of(fn: Callable[..., Any], *inputs: Tensor, rewritten: int = 1, **options: Any) -> attn_pass.SiteReport:
    with torch.no_grad():
        report = same(fn, *inputs, rewritten=rewritten, **{"targets": ("sdpa",), **options})
    (site,) = report.sites
    assert site.form == "flex_attention"
    return site


def sites_of(
    programs: Mapping[str, tuple[Callable[..., Any], Sequence[Tensor]]], **options: Any
) -> dict[str, attn_pass.SiteReport]:
    """`site_of` for programs that are rewritten, all in one graph."""
    with torch.no_grad():
        report = same_each(programs, **{"targets": ("sdpa",), **options})
    assert {site.form for site in report.sites} == {"flex_attention"}
    return dict(zip(programs, report.sites, strict=True))


@pytest.fixture
def rows_lists_alone() -> Iterator[None]:
    """Block masks without the lists that a backward reads, which take a third of the time to trace."""
    make = BlockMask.from_kv_blocks.__func__  # type: ignore[attr-defined]
    names = make.__code__.co_varnames[: make.__code__.co_argcount]
    defaults = dict(zip(names[-len(make.__defaults__) :], make.__defaults__, strict=True))
    assert defaults["compute_q_blocks"] is True
    with mock.patch.object(make, "__defaults__", tuple({**defaults, "compute_q_blocks": False}.values())):
        yield


# ---------------------------------------------------------------- masks


def test_a_call_without_a_mask_is_a_plain_attention() -> None:
    site = site_of(flex(), *qkv(2, 4, N, N, kv_heads=2))
    assert (site.mask, site.target, site.kind) == ("none", "sdpa", "attention")
    assert site.shapes == {"query": (2, 4, N, 16), "key": (2, 2, N, 16), "value": (2, 2, N, 16)}
    assert site_of(flex(), *qkv(2, 4, 3, 7), dynamic=True).mask == "none"


def of_gym(name: str) -> Mask:
    wanted, ids = GYM[name], (torch.arange(N)[None] * torch.tensor([[1], [2]])) // 40

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert wanted.keep is not None
        keep = wanted.keep(i, j)
        return keep & (ids[b, i] == ids[b, j]) if wanted.ids else keep

    return mask


@pytest.mark.usefixtures("rows_lists_alone")
def test_masks_of_attention_gym() -> None:
    """Made outside their lists are part of what is kept; made in the program they are proved to say the same."""
    masks = {n: (of_gym(n), 2 if GYM[n].ids else None) for n in GYM if GYM[n].keep is not None and not GYM[n].scores}
    inputs = qkv(2, 2, N, N)
    for name, inside in sites_of({n: (made_inside(*given), inputs) for n, given in masks.items()}).items():
        mask = GYM[name].mask
        assert inside.mask == mask.removesuffix(", by distance") or not mask or "by distance" in inside.mask, name
        assert not [a for a in inside.assumptions if "block" in a], name
    outside = sites_of({n: (flex(blocks(mask, batch=batch)), inputs) for n, (mask, batch) in masks.items()})
    for name, site in outside.items():
        assert site.mask == "dense", name
        assert "the block lists name each block once" in site.assumptions, name


@pytest.mark.usefixtures("rows_lists_alone")
def test_padding_by_captured_lengths() -> None:
    lengths = torch.tensor([40, 77])

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j < lengths[b]) & (j <= i)

    inputs = qkv(2, 2, N, N)
    sites = sites_of({"inside": (made_inside(mask, 2), inputs), "outside": (flex(blocks(mask, batch=2)), inputs)})
    assert sites["inside"].mask == "causal and run-time range"


@pytest.mark.usefixtures("rows_lists_alone")
def test_rows_without_a_key_are_zero() -> None:
    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j < i - 40) & (i != 70)

    inputs = qkv(1, 2, N, N)
    programs = {"inside": (made_inside(mask), inputs), "outside": (flex(blocks(mask)), inputs)}
    for target in ("sdpa", "cpu_kernel"):
        sites_of(programs, targets=(target,))


def test_a_mask_that_depends_on_the_head() -> None:
    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + 10 * h

    site_of(flex(blocks(mask, heads=4)), *qkv(2, 4, N, N, kv_heads=2))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_and_lengths_that_are_not_multiples_of_a_block(dtype: torch.dtype) -> None:
    inputs = qkv(2, 4, 37, 53, kv_heads=1, value_dim=24, dtype=dtype)
    programs = {"outside": (flex(blocks(causal, 37, 53)), inputs), "inside": (made_inside(causal), inputs)}
    sites_of(programs, targets=("cpu_kernel",))


def test_lengths_that_are_not_known() -> None:
    for q_len in (3, 35):
        site = site_of(made_inside(causal), *qkv(2, 2, q_len, 70), dynamic=True)
        assert site.mask == "causal"
    site_of(flex(blocks(causal, 65, 97)), *qkv(2, 2, 65, 97), dynamic=True)


def test_the_result_lies_in_memory_as_the_query_does() -> None:
    q, k, v = qkv(2, 4, N, N)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flex_attention(q.transpose(1, 2), k, v)
        return out.transpose(1, 2).view(2, N, 64) * 2

    site_of(run, q.transpose(1, 2).contiguous(), k, v)


def test_keys_and_values_of_one_batch_entry_serve_all() -> None:
    q, (_, k, v) = randn(3, 2, N, 16), qkv(1, 2, N, N)
    site_of(flex(blocks(causal, batch=3)), q, k, v)


# ---------------------------------------------------------------- block lists


def listed(at: list[list[int]], mask: Mask, full: list[list[int]] | None = None) -> BlockMask:
    """A block mask by its lists: the blocks of each row of blocks."""

    def lists(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        count = torch.tensor([[[len(r) for r in rows]]], dtype=torch.int32)
        # What stands behind the last block of a row counts for nothing.
        return count, torch.tensor([[[r + [9] * (3 - len(r)) for r in rows]]], dtype=torch.int32)

    return BlockMask.from_kv_blocks(
        *lists(at), *(lists(full) if full else ()), BLOCK_SIZE=SIZE, mask_mod=mask, seq_lengths=(N, N)
    )


def compiled_meaning(partial: list[list[int]], full: list[list[int]], mask: Mask) -> Tensor:
    """What torch's compiled kernels keep: nothing of a block that is not listed, all of one that is listed as full."""
    i, j = torch.arange(N)[:, None], torch.arange(N)[None]
    zero = torch.zeros((), dtype=torch.long)
    keep = torch.zeros(N, N, dtype=torch.bool)
    for lists, inside in ((partial, mask(zero, zero, i, j)), (full, torch.ones(N, N, dtype=torch.bool))):
        for row, columns in enumerate(lists):
            for column in columns:
                block = (slice(row * SIZE, (row + 1) * SIZE), slice(column * SIZE, (column + 1) * SIZE))
                keep[block] = inside[block]
    return keep


PARTIAL, FULL = [[0], [1], [2, 0]], [[], [], [1]]


def test_lists_that_disagree_with_the_mask_have_the_compiled_meaning() -> None:
    """Eager FlexAttention looks at `mask_mod` alone; the compiled one is what a program with such lists is for."""
    made = listed(PARTIAL, causal, FULL)
    keep = compiled_meaning(PARTIAL, FULL, causal)
    q, k, v = qkv(2, 2, N, N)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    for target in ("sdpa", "cpu_kernel"):
        torch._dynamo.reset()
        backend = attn_pass.wrap("aot_eager", choose="fused", targets=(target,), on_error="raise")
        with torch.no_grad(), attn_pass.record() as report:
            result = torch.compile(flex(made), backend=backend)(q, k, v)
        assert report.rewritten
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_stock_inductor_takes_such_lists_the_same_way() -> None:
    """What the test before this one takes for granted, of torch itself."""
    made, keep = listed(PARTIAL, causal, FULL), compiled_meaning(PARTIAL, FULL, causal)
    q, k, v = qkv(1, 1, N, N)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    with torch.no_grad():
        result = torch.compile(flex(made))(q, k, v)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_lists_made_from_another_mask_prove_nothing() -> None:
    """A mask of one head for all of them, and one that is another function."""

    def by_head(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + h

    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = create_block_mask(causal, None, None, N, N, device="cpu", BLOCK_SIZE=SIZE)
        made.mask_mod = lambda b, h, i, j: j <= i + 1
        return flex_attention(q, k, v, block_mask=made)

    for fn in (made_inside(by_head), other):
        torch._dynamo.reset()
        backend = attn_pass.wrap("aot_eager", choose="fused", targets=("sdpa",), on_error="raise")
        with torch.no_grad(), attn_pass.record() as report:
            torch.compile(fn, backend=backend)(*qkv(1, 2, N, N))
        (site,) = report.sites
        assert site.mask == "dense", fn
        assert "the block lists name each block once" in site.assumptions


def parts(made: BlockMask) -> tuple[Any, ...]:
    return made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices


def swapped(made: BlockMask) -> tuple[Any, ...]:
    return made.full_kv_num_blocks, made.full_kv_indices, made.kv_num_blocks, made.kv_indices


def mixed(made: BlockMask) -> tuple[Any, ...]:
    other = create_block_mask(lambda b, h, i, j: j < 64, None, None, N, N, device="cpu", BLOCK_SIZE=SIZE)
    return made.kv_num_blocks, made.kv_indices, other.full_kv_num_blocks, other.full_kv_indices


def not_full(made: BlockMask) -> tuple[Any, ...]:
    return made.kv_num_blocks, made.kv_indices


def other_places(made: BlockMask) -> tuple[Any, ...]:
    return made.kv_num_blocks, made.q_indices, made.full_kv_num_blocks, made.full_kv_indices


def counted(whole: int) -> Callable[[BlockMask], tuple[Any, ...]]:
    """Lists as `create_block_mask` makes them; a block with so many keys and rows that are kept is no partial one."""

    def lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
        ones = chosen.int()
        places = torch.argsort(ones, dim=-1, descending=True, stable=True)
        return ones.sum(-1).to(torch.int32), places.to(torch.int32)

    def change(_: BlockMask) -> tuple[Any, ...]:
        i, j = torch.arange(N)[:, None], torch.arange(N)[None]
        count = N // SIZE
        kept = (j <= i)[None, None].view(1, 1, count, SIZE, count, SIZE).permute(0, 1, 2, 4, 3, 5).sum((-2, -1))
        return *lists((kept > 0) & (kept < whole)), *lists(kept == SIZE * SIZE)

    return change


LISTS: dict[str, tuple[Callable[[BlockMask], tuple[Any, ...]], int | tuple[int, int], bool]] = {
    "as they are": (parts, SIZE, True),
    "of other blocks": (parts, 64, False),
    "of blocks of other sides": (parts, (16, 64), False),
    **{f.__name__: (f, SIZE, False) for f in (swapped, mixed, not_full, other_places)},
    "counted": (counted(SIZE * SIZE), SIZE, True),
    "counted, half a block is a whole one": (counted(SIZE * SIZE // 2), SIZE, False),
}


def test_which_lists_of_a_program_are_a_proof() -> None:
    """Block masks put together of lists that `create_block_mask` made, or of others, of the same function."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        made = create_block_mask(causal, None, None, N, N, device="cpu", BLOCK_SIZE=SIZE)
        results = []
        for change, size, _ in LISTS.values():
            again = BlockMask.from_kv_blocks(
                *change(made), BLOCK_SIZE=size, mask_mod=causal, seq_lengths=(N, N), compute_q_blocks=False
            )
            results.append(flex_attention(q, k, v, block_mask=again))
        return results

    torch._dynamo.reset()
    report = attn_pass.explain(run, *qkv(1, 2, N, N), attn_pass_options=FUSED)
    for (name, (_, _, proved)), site in zip(LISTS.items(), report.sites, strict=True):
        assert ("the block lists name each block once" not in site.assumptions) == proved, name
        assert site.mask == "causal" if proved else "dense" in site.mask, name


def test_lists_that_the_program_writes_are_what_it_wrote() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        number = torch.ones(1, 1, 1, dtype=torch.int32)
        number.zero_()
        none = BlockMask.from_kv_blocks(
            number, torch.zeros(1, 1, 1, 1, dtype=torch.int32), BLOCK_SIZE=1 << 30, seq_lengths=(1, 1)
        )
        return flex_attention(q, k, v, block_mask=none)

    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager", choose="fused", targets=("sdpa",), on_error="raise")
    with torch.no_grad():
        assert not torch.compile(run, backend=backend)(*qkv(1, 2, N, N)).any()


def test_documents_that_change_after_the_lists_were_made() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return ids[i] == ids[j]

        made = create_block_mask(mask, None, None, N, N, device="cpu", BLOCK_SIZE=SIZE)
        ids[50:] = 7
        return flex_attention(q, k, v, block_mask=made)

    torch._dynamo.reset()
    ids = torch.arange(N) // 20
    (site,) = attn_pass.explain(run, *qkv(1, 2, N, N), ids, attn_pass_options=FUSED).sites
    assert "the block lists name each block once" in site.assumptions


def test_strict_numerics_assume_nothing_of_lists() -> None:
    site = site_of(flex(blocks(causal)), *qkv(1, 2, N, N), rewritten=0, numerics="strict")
    assert site.reason == "numerics='strict' does not assume that the block lists name each block once"
    site_of(made_inside(causal), *qkv(1, 2, N, N), numerics="strict")


# ---------------------------------------------------------------- score functions

SLOPES, TABLE = randn(4).abs(), randn(4, 2 * N)


def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + SLOPES[h] * (j - i)


def relative(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + TABLE[h, i - j + N]


def row_then_column(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + TABLE[h][j]


def soft_cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 20.0 * torch.tanh(score / 20.0)


def weak(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(j <= i, score, -4.5)


def double(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A captured number of another type, which has no dimension and counts as much as a score here."""
    return score * NUMBER


NUMBER = torch.tensor(0.3)


def test_what_score_functions_add_and_multiply() -> None:
    inputs, made = qkv(2, 4, N, N, kv_heads=2), blocks(causal)
    programs = {
        f"{score.__name__}, {'causal' if mask else 'no mask'}": (flex(mask, score), inputs)
        for score in (alibi, relative, row_then_column, double)
        for mask in (None, made)
    }
    sites_of(programs, reference=False)


def test_functions_of_the_scores_on_the_cpu_kernel() -> None:
    scores, made = {"soft cap": soft_cap, "weak": weak}, blocks(causal)
    whole, narrow = qkv(2, 4, 33, N, kv_heads=2), qkv(2, 4, N, N, dtype=torch.bfloat16)
    sites = sites_of({name: (flex(None, f), whole) for name, f in scores.items()}, targets=("cpu_kernel",))
    assert all(site.score_mod for site in sites.values())
    sites_of({name: (flex(made, f), narrow) for name, f in scores.items()}, targets=("cpu_kernel",))


def test_indices_in_another_order_are_another_function() -> None:
    square = randn(N, N)

    def straight(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + square[i, j]

    def turned(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + square[j, i]

    inputs = qkv(1, 2, N, N)
    sites_of({f.__name__: (flex(None, f), inputs) for f in (straight, turned)}, reference=False)


# ---------------------------------------------------------------- what else a call returns


def test_the_log_sum_exp_stays_beside_a_kernel() -> None:
    site = site_of(flex(blocks(causal), return_lse=True), *qkv(1, 2, N, N), reference=False)
    assert site.reason.endswith("the scores' log-sum-exp is used as well, and stay")
    site = site_of(flex(blocks(causal), return_lse=True), *qkv(1, 2, N, N), reference=False, targets=("cpu_kernel",))
    assert site.reason.endswith("the scores' log-sum-exp is used as well, and the kernel gives it")


# ---------------------------------------------------------------- calls that stay


@pytest.mark.parametrize(
    "options", [{"BACKEND": "TRITON"}, {"PRESCALE_QK": True}, {"ROWS_GUARANTEED_SAFE": True}, {"BLOCK_M": 64}], ids=str
)
def test_kernel_options_are_kept(options: dict[str, Any]) -> None:
    site = site_of(flex(kernel_options=options), *qkv(1, 2, 9, 9), rewritten=0)
    ((name, value),) = options.items()
    assert site.reason == f"the call stays: kernel_options asks for {name}={value!r}"


def test_autocast_keeps_the_call() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(q, k, v)

    site = site_of(run, *qkv(1, 2, 9, 9), rewritten=0, reference=False)
    assert "autocast" in site.reason


def test_a_function_of_several_elements_keeps_the_call() -> None:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + TABLE.sum() * 0.01

    site = site_of(flex(None, score), *qkv(1, 4, 9, 9), rewritten=0, reference=False)
    assert site.reason == "the call stays: sum_1 in one of its functions takes a captured tensor as a whole"


def test_a_gradient_is_the_kernel_s() -> None:
    """FlexAttention has no backward on CPUs, not even for what its score function captures; the CPU kernel has."""
    slopes = torch.rand(2, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * (i - j))

    report = same(run, *qkv(1, 2, 9, 9), slopes, grad=True, reference=False, targets=("cpu_kernel", "sdpa"))
    (site,) = report.sites
    assert (site.outcome, site.target, site.form) == ("rewritten", "cpu_kernel", "flex_attention")


@pytest.mark.parametrize(
    ("mask", "score", "reason"),
    [
        (None, soft_cap, "FlexAttention's own kernel computes such scores on CUDA devices: the call stays"),
        (lambda b, h, i, j: (j <= i) | (j < 5), None, "FlexAttention's own kernel takes such a mask on CUDA devices"),
    ],
)
def test_on_cuda_a_call_stays(mask: Mask | None, score: Scores | None, reason: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = None if mask is None else create_block_mask(mask, None, None, N, N, device="cpu", BLOCK_SIZE=SIZE)
        return flex_attention(q, k, v, score_mod=score, block_mask=made)

    site = site_of(run, *qkv(1, 2, N, N, dim=64, dtype=torch.bfloat16), rewritten=0, device="H100", targets=None)
    assert site.reason.startswith(reason)


# ---------------------------------------------------------------- exported programs, and Inductor


class Documents(torch.nn.Module):
    """Biases from a buffer, documents from an input, and a block mask that the program makes itself."""

    def __init__(self, made: BlockMask | None) -> None:
        super().__init__()
        self.register_buffer("slopes", SLOPES.clone())
        self.made = made

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (ids[b, i] == ids[b][j])

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + self.slopes[h] * (j - i)

        made = self.made or create_block_mask(mask, 2, None, N, N, device="cpu", BLOCK_SIZE=SIZE)
        return flex_attention(q, k, v, score_mod=score, block_mask=made, enable_gqa=True)


@pytest.mark.parametrize("inside", [True, False])
def test_exported(inside: bool) -> None:
    ids = torch.arange(N)[None] // torch.tensor([[20], [33]])
    inputs = (*qkv(2, 4, N, N, kv_heads=2), ids)
    with torch.no_grad():
        program = torch.export.export(Documents(None if inside else blocks(causal)), inputs)
        expected = program.module()(*inputs)
        report = attn_pass.rewrite(program, choose="fused", targets=("sdpa",), on_error="raise")
        (site,) = report.sites
        assert (site.outcome, site.form) == ("rewritten", "flex_attention")
        if inside:
            assert site.mask == "causal and document and additive"
        else:  # the lists are constants of the program: that they say what `mask_mod` says was computed
            assert site.mask == "causal and additive, by distance"
            assert site.fixed == tuple(f"lifted_tensor_{n}" for n in range(4))
        torch.testing.assert_close(program.module()(*inputs), expected, atol=1e-5, rtol=1e-5)
        (again,) = attn_pass.rewrite(program, choose="fused", targets=("sdpa",), on_error="raise").sites
        assert again.form == "sdpa"


def test_constant_lists_that_disagree_are_part_of_what_is_kept() -> None:
    inputs = (*qkv(2, 4, N, N), torch.zeros(2, N, dtype=torch.long))
    with torch.no_grad():
        program = torch.export.export(Documents(listed(PARTIAL, causal, FULL)), inputs)
        report = attn_pass.rewrite(program, choose="fused", targets=("sdpa",), on_error="raise")
        (site,) = report.sites
        assert site.fixed == ()
        keep = compiled_meaning(PARTIAL, FULL, causal)
        i, j = torch.arange(N)[:, None], torch.arange(N)[None]
        bias = (SLOPES[:, None, None] * (j - i)).masked_fill(~keep, float("-inf"))
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs[:3], attn_mask=bias[None])
        torch.testing.assert_close(program.module()(*inputs), expected, atol=1e-5, rtol=1e-5)


def through_inductor(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[Any, attn_pass.SiteReport]:
    with torch.no_grad(), attn_pass.record() as report:
        result = torch.compile(fn, backend=attn_pass.backend, options={"targets": ("cpu_kernel",), **options})(*inputs)
    (site,) = report.sites
    return result, site


@pytest.mark.parametrize("inside", [True, False])
def test_through_inductor(inside: bool) -> None:
    """For lists from elsewhere the kernel's mask is made first, so that such a call may be left by itself."""
    q, k, v = qkv(2, 4, N, N, kv_heads=2)
    fn = made_inside(causal) if inside else flex(blocks(causal))
    result, site = through_inductor(fn, q, k, v, choose="cheapest" if inside else "fused")
    assert site.target == "cpu_kernel"
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_lists_that_are_not_known_are_left_unless_asked_for() -> None:
    torch._dynamo.reset()
    site = attn_pass.explain(from_outside(window), *qkv(1, 4, 2048, 2048, dim=64)).sites[0]
    assert (site.outcome, site.form) == ("left", "flex_attention")
    assert site.reason.startswith("already the cheapest form")


# ---------------------------------------------------------------- predictions


def predicted(fn: Callable[..., Any], length: int = 2048) -> list[dict[str, float]]:
    """What the call and the kernel are predicted to take, layer by layer; nothing is computed or compiled."""
    torch._dynamo.reset()
    with torch.no_grad():
        report = attn_pass.explain(fn, *qkv(1, 4, length, length, dim=64))
    return [dict(site.predicted_us) for site in report.sites]


@functools.cache
def of_every_key() -> dict[str, float]:
    (full,) = predicted(lambda q, k, v: flex_attention(q, k, v))
    return full


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & (i - j < 256)


def from_outside(mask: Mask, layers: int = 1, length: int = 2048) -> Callable[..., Tensor]:
    made = create_block_mask(mask, None, None, length, length, device="cpu")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(layers):
            q = flex_attention(q, k, v, block_mask=made)
        return q

    return run


def test_a_mask_function_says_which_share_of_its_blocks_a_call_computes() -> None:
    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device="cpu")
        return flex_attention(q, k, v, block_mask=made)

    (passed,), (made,), (narrow,) = predicted(from_outside(causal)), predicted(inside), predicted(from_outside(window))
    full = of_every_key()
    assert passed["leave"] == made["leave"] and 0.5 < made["leave"] / full["leave"] < 0.6
    assert 0.15 < narrow["leave"] / full["leave"] < 0.25
    # The kernel skips what the mask hides as well, and pays for the mask.
    assert made["cpu_kernel"] < passed["cpu_kernel"] < full["cpu_kernel"]
    assert narrow["cpu_kernel"] < 0.7 * passed["cpu_kernel"]


def test_rows_of_packed_heads_have_other_positions_than_the_mask_function() -> None:
    made = create_block_mask(window, None, None, 1024, 1024, device="cpu")
    torch._dynamo.reset()
    with torch.no_grad():
        report = attn_pass.explain(
            lambda q, k, v: flex_attention(q, k, v, block_mask=made, enable_gqa=True),
            *qkv(1, 8, 1024, 1024, dim=64, kv_heads=2),
        )
    times = report.sites[0].predicted_us
    assert times["cpu_kernel (grouped_heads)"] > 2 * times["cpu_kernel"]


def test_layers_share_the_mask_that_their_lists_become() -> None:
    (alone,), many = predicted(from_outside(window, length=1024), 1024), predicted(from_outside(window, 6, 1024), 1024)
    assert len(many) == 6
    assert alone["leave"] < alone["cpu_kernel"] and many[0]["leave"] == alone["leave"]
    assert many[0]["cpu_kernel"] < 0.75 * many[0]["leave"]


def test_what_depends_on_data_hides_as_much_from_the_kernel_as_from_the_call() -> None:
    document = torch.arange(2048) // 512

    def of_documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return document[i] == document[j]

    (documents,), full = predicted(from_outside(of_documents)), of_every_key()
    assert documents["leave"] < 0.2 * full["leave"]
    assert documents["cpu_kernel"] < 0.6 * full["cpu_kernel"]


def test_a_bias_hides_no_block() -> None:
    """Slopes make a matrix of what is added, and a mask that only the score function has leaves every block listed."""

    def slopes(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (j - i) * 0.01 * (h + 1)

    def hidden(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j <= i, score, -float("inf"))

    for biased in predicted(lambda q, k, v: [flex_attention(q, k, v, score_mod=score) for score in (slopes, hidden)]):
        assert biased["leave"] == pytest.approx(of_every_key()["leave"])


def test_the_log_sum_exp_that_inductor_has_not_on_cpus() -> None:
    """Stock raises `NotImplementedError`; the kernel gives it with the result."""
    q, k, v = qkv(2, 4, N, N)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        made = create_block_mask(causal, None, None, N, N, device="cpu", BLOCK_SIZE=SIZE)
        return flex_attention(q, k, v, block_mask=made, return_lse=True)

    with torch.no_grad(), pytest.raises(Exception, match="return_lse"):
        torch.compile(flex(blocks(causal), return_lse=True))(q, k, v)
    (out, lse), site = through_inductor(run, q, k, v)
    assert site.reason.endswith("the scores' log-sum-exp is used as well, and the kernel gives it")
    scores = (q @ k.mT / 4).masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- several calls


def layers(mask: BlockMask) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        once = flex_attention(q, k, v, block_mask=mask)
        return flex_attention(once, k, v, block_mask=mask)

    return run


def graph_of(
    fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False, **options: Any
) -> tuple[list[str], list[str]]:
    """The calls of a program's graph before and after the pass."""
    texts = []

    def kept(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        texts.append([n.format_node() or "" for n in gm.graph.nodes])
        return gm.forward

    for backend in (kept, attn_pass.wrap(kept, **options)):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    before, after = texts
    return before, after


def test_layers_with_one_block_mask_have_one_mask() -> None:
    made = blocks(causal)
    with torch.no_grad():
        report = same(layers(made), *qkv(1, 2, N, N), rewritten=2, targets=("sdpa",))
    assert [s.target for s in report.sites] == ["sdpa", "sdpa"]
    _, after = graph_of(layers(made), *qkv(1, 2, N, N), choose="fused", targets=("sdpa",))
    assert sum("aten.index.Tensor" in text for text in after) == 1
    assert not [text for text in after if "flex_attention" in text or "_safe_softmax" in text]


def test_a_graph_in_which_calls_stay_is_the_graph_it_was() -> None:
    before, after = graph_of(layers(blocks(causal)), *qkv(1, 2, N, N), targets=())
    assert before == after


def test_a_scale_that_is_a_symbol_of_one_value_is_a_number() -> None:
    _, after = graph_of(flex(), *qkv(1, 2, N, N), dynamic=True, choose="fused", targets=("cpu_kernel",))
    (call,) = [text for text in after if "attn_pass.attention" in text]
    assert ", 0.25)" in call


def test_the_calls_kernel_is_not_one_whose_mask_a_target_may_keep() -> None:
    h100 = registry.by_name("H100")
    assert Setting(h100, "compile", kernel_as_written="flash").fused_as_written
    assert not Setting(h100, "compile", kernel_as_written=FLEX).fused_as_written


def test_a_call_is_verified_and_not_measured() -> None:
    """As it is it would be timed as products and a softmax."""
    site = site_of(made_inside(causal), *qkv(1, 2, N, N), verify="graph", tune=True)
    assert site.verified_error is not None and site.verified_error < 1e-5
    assert site.measured_us == {} and "predicted" in site.reason


def test_of_a_call_whose_log_sum_exp_is_used_the_reason_is_its_own() -> None:
    def jumps(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.floor(s)

    site = site_of(flex(None, jumps, return_lse=True), *qkv(1, 2, 9, 9), rewritten=0, reference=False)
    assert "log-sum-exp" not in site.reason


def test_a_call_in_a_checkpoint() -> None:
    for fn, mask in ((flex(), "none"), (flex(blocks(causal)), "dense")):

        def run(q: Tensor, k: Tensor, v: Tensor, fn: Callable[..., Tensor] = fn) -> Tensor:
            return torch.utils.checkpoint.checkpoint(fn, q, k, v, use_reentrant=False)  # type: ignore[no-any-return]

        assert site_of(run, *qkv(1, 2, N, N), reference=False).mask == mask


def test_a_mask_that_cannot_be_read_concerns_its_own_call() -> None:
    """A table that is turned in place: the call stays or is rewritten, and nothing of it is left behind."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.ones(N, N, dtype=torch.bool).triu().t_()
        made = create_block_mask(lambda b, h, i, j: keep[i, j], None, None, N, N, device="cpu", BLOCK_SIZE=SIZE)
        return flex_attention(q, k, v, block_mask=made)

    inputs = qkv(q_len=N, kv_len=N)
    with torch.no_grad(), attn_pass.record() as report:
        got = torch.compile(run, backend=attn_pass.wrap("eager", on_error="raise", **FUSED))(*inputs)
    (site,) = report.sites
    assert site.form == "flex_attention"
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    q, k, v = (x.double() for x in inputs)
    want = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)
