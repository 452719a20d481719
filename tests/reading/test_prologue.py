"""Rotary embeddings and norms of queries and keys: what is read of each spelling, and that it computes the operand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from prologue_reference import checked, read_function
from torch import Tensor, nn

B, H, L, D = 2, 3, 5, 8
Rotate = Callable[[Tensor], Tensor]


def inputs(length: int = L, heads: int = H, dim: int = D) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(length + 10 * heads)
    q, k, v = torch.randn(3, B, heads, length, dim, generator=made, dtype=torch.float64)
    return q, k, v


def angles(length: int, dim: int = D) -> Tensor:
    """The angles of a table, (length, dim / 2)."""
    frequencies = 10.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequencies


def read(rotate: Rotate, *given: Tensor) -> dict[str, str]:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(rotate(q), rotate(k), v)

    return read_function(program, *(given or inputs()))


def both(text: str) -> dict[str, str]:
    return {"query": text, "key": text}


# ---- spellings of rotations ----


def rotate_half(x: Tensor) -> Tensor:
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-high, low), dim=-1)


def halves(x: Tensor) -> Tensor:
    table = torch.cat((angles(x.shape[-2], x.shape[-1]), angles(x.shape[-2], x.shape[-1])), dim=-1)[None]
    return x * table.cos().unsqueeze(1) + rotate_half(x) * table.sin().unsqueeze(1)


def halves_of(x: Tensor, at: Tensor) -> Tensor:
    angle = angles(9, x.shape[-1])[at].repeat(1, 2)
    return x * angle.cos() + rotate_half(x) * angle.sin()


def halves_by_chunks(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    cos, sin = angles(x.shape[-2], x.shape[-1]).cos(), angles(x.shape[-2], x.shape[-1]).sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def halves_by_rolling(x: Tensor) -> Tensor:
    angle = angles(x.shape[-2], x.shape[-1])
    signed = torch.cat((-angle.sin(), angle.sin()), -1)
    return x * torch.cat((angle, angle), -1).cos() + x.roll(x.shape[-1] // 2, -1) * signed


def halves_by_stacking(x: Tensor) -> Tensor:
    low, high = x.unflatten(-1, (2, -1)).unbind(-2)
    cos, sin = angles(x.shape[-2], x.shape[-1]).cos(), angles(x.shape[-2], x.shape[-1]).sin()
    return torch.stack((low * cos - high * sin, low * sin + high * cos), dim=-2).flatten(-2)


def interleaved(x: Tensor) -> Tensor:
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    angle = angles(x.shape[-2], x.shape[-1]).repeat_interleave(2, -1)
    return x * angle.cos() + turned * angle.sin()


def interleaved_by_pairs(x: Tensor) -> Tensor:
    pairs = x.view(*x.shape[:-1], -1, 2)
    cos, sin = angles(x.shape[-2], x.shape[-1]).cos(), angles(x.shape[-2], x.shape[-1]).sin()
    real, imaginary = pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 0] * sin + pairs[..., 1] * cos
    return torch.stack([real, imaginary], dim=-1).reshape(x.shape)


def interleaved_by_flipping(x: Tensor) -> Tensor:
    angle = angles(x.shape[-2], x.shape[-1])
    signed = torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2)
    return x * angle.repeat_interleave(2, -1).cos() + x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * signed


def complex_numbers(x: Tensor) -> Tensor:
    angle = angles(x.shape[-2], x.shape[-1])
    table = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[None, None]).flatten(3)


def complex_other_way_round(x: Tensor) -> Tensor:
    """The other direction of rotation, by the conjugate table, made of its parts."""
    angle = angles(x.shape[-2], x.shape[-1])
    table = torch.complex(angle.cos(), angle.sin()).conj()
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * table
    return torch.stack((pairs.real, pairs.imag), -1).flatten(-2)


HALVES = f"rotary over all {D} elements, in halves"
INTERLEAVED = f"rotary over all {D} elements, interleaved"
SPELLINGS: dict[str, tuple[Rotate, str]] = {
    "halves": (halves, HALVES),
    "halves by chunks": (halves_by_chunks, HALVES),
    "halves by rolling": (halves_by_rolling, HALVES),
    "halves by stacking": (halves_by_stacking, HALVES),
    "interleaved": (interleaved, INTERLEAVED),
    "interleaved by pairs": (interleaved_by_pairs, INTERLEAVED),
    "interleaved by flipping": (interleaved_by_flipping, INTERLEAVED),
    "complex": (complex_numbers, INTERLEAVED),
    "complex, the other way round": (complex_other_way_round, INTERLEAVED),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_read(name: str) -> None:
    rotate, expected = SPELLINGS[name]
    assert read(rotate) == both(expected)


@pytest.mark.parametrize("name", ["halves", "interleaved by pairs", "complex"])
def test_sizes_may_be_symbols(name: str) -> None:
    rotate, expected = SPELLINGS[name]

    def program(x: Tensor) -> Tensor:
        q, k, v = x
        return F.scaled_dot_product_attention(rotate(q), rotate(k), v)

    x = torch.stack(inputs(7))
    torch._dynamo.mark_dynamic(x, 3)
    assert read_function(program, x) == both(expected)


def test_a_part_is_rotated() -> None:
    def rotate(x: Tensor) -> Tensor:
        return torch.cat((interleaved(x[..., 2:6]), x[..., 6:]), -1)

    def half(x: Tensor) -> Tensor:
        return torch.cat((halves(x[..., :4]), x[..., 4:]), -1)

    assert read(half) == both("rotary over elements 0 to 3 of 8, in halves")
    found = read(rotate)
    assert found == both("rotary over elements 0 to 3 of 6, interleaved"), found


def test_a_part_is_rotated_in_place() -> None:
    def rotate(x: Tensor) -> Tensor:
        out = x.clone()
        out[..., 2:6] = halves(x[..., 2:6])
        return out

    assert read(rotate) == both("rotary over elements 2 to 5 of 8, in halves")


def test_rows_and_columns_of_an_image() -> None:
    def rotate(x: Tensor) -> Tensor:
        by_row, by_column = x.chunk(2, -1)
        at = torch.arange(6)
        return torch.cat((halves_of(by_row, at // 3), halves_of(by_column, at % 3)), -1)

    assert read(rotate, *inputs(6)) == both("rotary over all 8 elements, in halves, 2 times")


def test_a_scaled_table_is_a_table() -> None:
    def rotate(x: Tensor) -> Tensor:
        angle = torch.cat((angles(L), angles(L)), -1)
        return x * (angle.cos() * 1.2) + rotate_half(x) * (angle.sin() * 1.2)

    assert read(rotate) == both(HALVES)


def test_tables_may_be_given_for_each_sequence() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, at: Tensor) -> Tensor:
        cos, sin = cos[at].unsqueeze(1), sin[at].unsqueeze(1)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        return (q @ k.mT).softmax(-1) @ v

    angle = torch.cat((angles(9), angles(9)), -1)
    at = torch.stack((torch.arange(L), torch.arange(L) + 3))
    assert read_function(program, *inputs(), angle.cos(), angle.sin(), at) == both(
        f"{HALVES}, with tables for each sequence"
    )


@pytest.mark.parametrize("heads", [1, 2])
def test_shared_keys_and_one_token(heads: int) -> None:
    """One KV head looks like its table, and the table of one token like a weight."""

    def program(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    for length in (L, 1):
        angle = torch.cat((angles(length), angles(length)), -1) + 1
        q, _, _ = inputs(length, 4)
        _, k, v = inputs(length, heads)
        assert read_function(program, q, k, v, angle.cos(), angle.sin()) == both(HALVES)


def test_latent_attention_rotates_a_key_of_its_own() -> None:
    """DeepSeek: keys are those of heads beside one that all share; pairs are put in halves before they are rotated."""

    def to_halves(x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], 2, 2).transpose(-1, -2).reshape(x.shape)

    def program(q: Tensor, k: Tensor, shared: Tensor, v: Tensor) -> Tensor:
        q = torch.cat((q[..., :8], halves(to_halves(q[..., 8:]))), -1)
        k = torch.cat((k, halves(to_halves(shared)).expand(-1, H, -1, -1)), -1)
        return (q @ k.mT).softmax(-1) @ v

    q, (k, v, _) = inputs(dim=12)[0], inputs(dim=8)
    shared = inputs(heads=1, dim=4)[0]
    assert read_function(program, q, k, shared, v) == both("rotary over elements 8 to 11 of 12, interleaved")


# ---- norms ----


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


WEIGHT = torch.linspace(0.5, 1.5, D, dtype=torch.float64)
OVER = "over the head dim"
NORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "rms written out": (lambda x, w: halves(w * rms(x)), f"RMS norm {OVER} (eps 1e-06), with a weight, then {HALVES}"),
    "gemma's": (lambda x, w: halves(rms(x) * (1.0 + w)), f"RMS norm {OVER} (eps 1e-06), with a weight, then {HALVES}"),
    "rms": (
        lambda x, w: halves(F.rms_norm(x, (D,), w, 1e-5)),
        f"RMS norm {OVER} (eps 1e-05), with a weight, then {HALVES}",
    ),
    "after the rotation": (
        lambda x, w: F.rms_norm(halves(x), (D,), eps=1e-5),
        f"{HALVES}, then RMS norm {OVER} (eps 1e-05)",
    ),
    "written out after the rotation": (
        lambda x, w: w * rms(interleaved(x)),
        f"{INTERLEAVED}, then RMS norm {OVER} (eps 1e-06), with a weight",
    ),
    "layer norm": (
        lambda x, w: complex_numbers(F.layer_norm(x, (D,), w, w - 1, 1e-5)),
        f"layer norm {OVER} (eps 1e-05), with a weight, then {INTERLEAVED}",
    ),
    "no rotation": (lambda x, w: F.layer_norm(x, (D,), eps=1e-5), f"layer norm {OVER} (eps 1e-05)"),
    "length": (lambda x, w: halves(F.normalize(x, dim=-1)), f"L2 norm {OVER} (eps 1e-12), then {HALVES}"),
    "length written out": (lambda x, w: x / x.norm(dim=-1, keepdim=True) * w, f"L2 norm {OVER}, with a weight"),
    "length by a root": (
        lambda x, w: halves(x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)),
        f"L2 norm {OVER} (eps 1e-06), then {HALVES}",
    ),
    "a quotient": (
        lambda x, w: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
        f"RMS norm {OVER} (eps 1e-06)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_read(name: str) -> None:
    made, expected = NORMS[name]

    def program(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return (made(q, w) @ made(k, w).mT).softmax(-1) @ v

    assert read_function(program, *inputs(), WEIGHT) == both(expected)


@pytest.mark.parametrize("is_call", [False, True])
def test_a_norm_of_all_heads(is_call: bool) -> None:
    def split(x: Tensor, w: Tensor) -> Tensor:
        normed = F.rms_norm(x, (H * D,), w, 1e-6) if is_call else w * rms(x)
        return halves(normed.view(B, L, H, D).transpose(1, 2))

    def program(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(split(q, w), split(k, w), v)

    q, k = torch.randn(2, B, L, H * D, dtype=torch.float64)
    weight = torch.linspace(0.5, 1.5, H * D, dtype=torch.float64)
    expected = f"RMS norm over all heads together (eps 1e-06), with a weight, then {HALVES}"
    assert read_function(program, q, k, inputs()[2], weight) == both(expected)


# ---- where the operands come from ----


def test_parts_of_one_projection() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).view(B, L, H, 3 * D).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(halves(q), halves(k), v)

    x, w = torch.randn(B, L, 16, dtype=torch.float64), torch.randn(16, 3 * H * D, dtype=torch.float64)
    assert read_function(program, x, w) == both(HALVES)


@pytest.mark.parametrize("how", ["joined", "copied", "written"])
def test_new_keys_are_rotated_before_they_enter_a_cache(how: str) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        k = halves(k)
        if how == "joined":
            keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        elif how == "copied":
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
        else:
            keys[:, :, 2 : 2 + L] = k
            values[:, :, 2 : 2 + L] = v
        return F.scaled_dot_product_attention(halves(q), keys, values)

    cache = torch.randn(2, B, H, 12, D, dtype=torch.float64)
    read = read_function(program, *inputs(), *cache, torch.arange(L) + 2)
    assert read == {"query": HALVES, "key": f"{HALVES}, of new keys before they enter the cache"}


def test_an_exported_program_decomposed_or_not() -> None:
    class Attends(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, w: Tensor) -> Tensor:
            q, k = (F.rms_norm(x, (D,), w, 1e-6) for x in (q, k))
            q, k = (x * cos + rotate_half(x) * sin for x in (q, k))
            return (q @ k.mT).softmax(-1) @ v

    angle = torch.cat((angles(L), angles(L)), -1)
    given = (*inputs(), angle.cos(), angle.sin(), WEIGHT)
    program = torch.export.export(Attends(), given)
    expected = both(f"RMS norm {OVER} (eps 1e-06), with a weight, then {HALVES}")
    for each in (program, program.run_decompositions()):
        (read,) = checked(each.graph_module, given)
        assert {name: str(text) for name, text in read.items()} == expected


# ---- near misses ----


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def swapped(x: Tensor) -> Tensor:
    return x.roll(D // 2, -1)


def of_heads() -> Tensor:
    return torch.arange(H)[:, None, None]


def twice() -> Tensor:
    return angles(L).repeat(1, 2)


def pairs(a: str, b: str, c: str, d: str) -> Rotate:
    """``a * low - b * high`` and ``c * high + d * low``: by name, what each element is multiplied by."""

    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        angle, at = angles(L), torch.arange(L, dtype=x.dtype)[:, None]
        of = {
            "cos": angle.cos(),
            "sin": angle.sin(),
            "other": (2 * angle).cos(),
            "later": angle.flip(0).sin(),
            "at": at,
            "next": at + 1,
        }
        return torch.cat((low * of[a] - high * of[b], high * of[c] + low * of[d]), -1)

    return rotate


def mixed(pairing: Rotate, table: Callable[[], Tensor]) -> Rotate:
    return lambda x: x * table().cos() + pairing(x) * table().sin()


def neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def spread() -> Tensor:
    """Angles for neighbours."""
    return torch.stack((angles(L), angles(L)), -1).flatten(-2)


def of_others(x: Tensor) -> Tensor:
    """Normalised by the length of a row without its first element."""
    rest = x.clone()
    rest[..., 0] = 0
    return x * torch.rsqrt(rest.pow(2).mean(-1, keepdim=True) + 1e-6)


def of_other_squares(x: Tensor) -> Tensor:
    squares = x * x
    squares[..., 0] = 0
    return x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)


def before_it_is_written(x: Tensor) -> Tensor:
    x = x.clone()
    factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.mul_(torch.arange(1.0, D + 1, dtype=x.dtype))
    return x * factor


def one_weight(x: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, D, dtype=x.dtype)
    return x * twice().cos() * weight + rotate_half(x) * twice().sin()


NO_ANGLE = "what multiplies a pair is no cosine and sine of one angle"
OTHER_ANGLE = "the elements of a pair are not rotated by one angle"
NOT: dict[str, tuple[Rotate, str]] = {
    "cosine for sine in one row": (pairs("cos", "sin", "sin", "cos"), OTHER_ANGLE),
    "cosines alone": (pairs("cos", "cos", "cos", "cos"), NO_ANGLE),
    "another angle for one element": (pairs("cos", "sin", "other", "sin"), OTHER_ANGLE),
    "the cosine of another angle": (pairs("other", "sin", "other", "sin"), NO_ANGLE),
    "the sine of another position": (pairs("cos", "later", "cos", "later"), NO_ANGLE),
    "positions": (pairs("at", "next", "at", "next"), NO_ANGLE),
    "one ramp": (pairs("at", "at", "at", "at"), NO_ANGLE),
    "halves, and angles for neighbours": (mixed(rotate_half, spread), OTHER_ANGLE),
    "neighbours, and angles for halves": (mixed(neighbours, twice), OTHER_ANGLE),
    "a weight of one product": (one_weight, "different weights"),
    "the norm of a part that is written": (of_others, "depends on the data"),
    "the norm of squares that are written": (of_other_squares, "depends on the data"),
    "the norm before the row is written": (before_it_is_written, "depends on the data"),
    "a table of heads": (
        lambda x: turned(x, (of_heads() * twice()).cos(), (of_heads() * twice()).sin()),
        "the table depends on the head",
    ),
    "signs": (lambda x: x * twice().cos() + swapped(x) * twice().sin(), "signs of a pair"),
    "no pairs": (lambda x: x * twice().cos() + x.roll(1, -1) * twice().sin(), "in pairs"),
    "a number": (
        lambda x: x * twice().cos() + rotate_half(x) * (2 * twice().sin()),
        "another number",
    ),
    "of the data": (lambda x: turned(x, x.cos(), x.sin()), "no sum of products"),
    "of the data's mean": (
        lambda x: turned(x, x.mean(1, keepdim=True).cos(), x.mean(1, keepdim=True).sin()),
        "depends on the data",
    ),
    "a sum": (lambda x: halves(x) + twice(), "something is added"),
    "a table alone": (lambda x: x * twice().cos(), "not rotated"),
    "norm of columns": (lambda x: x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + 1e-6), "another dimension"),
    "norm of heads": (lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6), "another dimension"),
    "a half's norm": (
        lambda x: x * torch.rsqrt(x[..., : D // 2].pow(2).mean(-1, keepdim=True) + 1e-6),
        "depends on the data",
    ),
    "no squares": (lambda x: x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6), "depends on the data"),
    "the norm of another row": (
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).flip(2),
        "another row",
    ),
}  # fmt: skip


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def by_sections(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Qwen's for images: sections of the head dim have tables of their own kind of position."""
    cos, sin = (
        torch.cat([each[n % 3] for n, each in enumerate(table.split([1, 1, 2] * 2, -1))], -1).unsqueeze(1)
        for table in (cos, sin)
    )
    return turned(x, cos, sin)


def in_one_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    sin, cos = (each.repeat_interleave(2, -1) for each in torch.cat((sin, cos), -1).chunk(2, -1))
    return x * cos + neighbours(x) * sin


def flipped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin.flip(-1)), -1)


@pytest.mark.parametrize(
    ("rotate", "shape", "expected"),
    [
        (by_halves, (L, D // 2), HALVES),
        (by_sections, (3, B, L, D), f"{HALVES}, with tables for each sequence"),
        (in_one_table, (L, D // 2), INTERLEAVED),
        (flipped, (L, D // 2), f"not read: {OTHER_ANGLE}"),
        (lambda x, cos, _: turned(x, cos, cos), (L, D), f"not read: {NO_ANGLE}"),
    ],
)
def test_tables_that_are_given(rotate: Callable[..., Tensor], shape: tuple[int, ...], expected: str) -> None:
    """They are taken to be cosines and sines, where each element of a pair reads them at its place."""

    def program(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)

    angle = torch.randn(shape, dtype=torch.float64)
    assert read_function(program, *inputs(), angle.cos(), angle.sin()) == both(expected)


@pytest.mark.parametrize("rotate", [pairs("sin", "cos", "sin", "cos"), lambda x: halves(x * WEIGHT) * 1.5])
def test_a_rotation_all_the_same(rotate: Rotate) -> None:
    """By what is left to a right angle, and of weighted elements."""
    assert read(rotate) == both(HALVES)


@pytest.mark.parametrize("name", NOT)
def test_a_near_miss_is_not_read(name: str) -> None:
    made, why = NOT[name]
    for text in read(made).values():
        assert text.startswith("not read: ") and why in text, text
    assert read(made).keys() == {"query", "key"}


def test_what_is_before_a_norm_is_not_passed_over_in_silence() -> None:
    def rotate(x: Tensor) -> Tensor:
        return F.rms_norm(x * twice().cos() + swapped(x) * twice().sin(), (D,), eps=1e-5)

    why = "before it not read: the signs of a pair are not those of a rotation"
    assert read(rotate) == both(f"RMS norm {OVER} (eps 1e-05); {why}")


def test_a_table_that_a_layer_computes() -> None:
    def program(x: Tensor, w: Tensor, gate: Tensor, v: Tensor) -> Tensor:
        q, k = (x @ w).view(B, L, 2, H, D).permute(2, 0, 3, 1, 4)
        angle = (x @ gate)[:, None]
        return F.scaled_dot_product_attention(turned(q, angle.cos(), angle.sin()), halves(k), v)

    x, w, gate = (torch.randn(*s, dtype=torch.float64) for s in ((B, L, 16), (16, 2 * H * D), (16, D)))
    read = read_function(program, x, w, gate, inputs()[2])
    assert read == {
        "query": "not read: its elements are multiplied by something that is computed from data",
        "key": HALVES,
    }


def test_what_is_too_long_is_not_read() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(200):
            q = q * 1.01
        return F.scaled_dot_product_attention(q, halves(k), v)

    assert read_function(program, *inputs()) == {
        "query": "not read: what it is made of is too long to be read",
        "key": HALVES,
    }


def test_rotated_values_and_plain_operands_are_not_told_of() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 0.5, k.contiguous(), halves(v))

    assert read_function(program, *inputs()) == {}
    assert read(lambda x: x + torch.ones(D, dtype=x.dtype)) == {}
