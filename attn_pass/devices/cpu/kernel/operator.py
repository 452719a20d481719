"""`attn_pass::attention`: attention over the kept keys, on CPUs; a masked key has no influence on the result."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from attn_pass.devices.cpu.kernel.build import entry
from attn_pass.devices.cpu.kernel.scores import MOST_CAPTURED, MOST_LOOKUPS
from attn_pass.devices.cpu.kernel.slopes import captured_in
from attn_pass.devices.cpu.kernel.source import ELEMENTS

FULLY_MASKED = ("nan", "zero", "mean")  # as `common.hpp` numbers them
_UNBOUNDED = 1 << 60
NUMBERS = {
    "before": _UNBOUNDED,
    "after": _UNBOUNDED,
    "start": 0,
    "end": _UNBOUNDED,
    "prefix": 0,
    "chunk": 0,
    "chunk_rows": 0,
    "chunk_keys": 0,
}
"""The bounds that are numbers, and their defaults."""
BOUNDS = ("shift", "starts", "ends", "offsets")
"""Those that are tensors of a number for each row of the batch, or for each border between packed segments."""
_TYPES = {dtype: number for number, dtype in enumerate(ELEMENTS)}

OPERANDS = "Tensor query, Tensor key, Tensor value, float scale"
GIVEN = (
    "SymInt? before=None, SymInt? after=None, SymInt? start=None, SymInt? end=None, SymInt? prefix=None, "
    "SymInt? chunk=None, SymInt? chunk_rows=None, SymInt? chunk_keys=None, Tensor? shift=None, "
    "Tensor? starts=None, Tensor? ends=None, Tensor? keep=None, Tensor? bias=None, Tensor? distances=None, "
    "Tensor? sink=None, Tensor[]? captured=None, str score='', str fully_masked='nan'"
)
"""What the schemas of all the kernel's operators have in common."""
_LOOKED_UP = "Tensor[]? tables=None, Tensor[]? places=None, Tensor[]? factors=None"
"""What is looked up and added to scores, in inference."""
_ARGUMENTS = f"({OPERANDS}, *, {GIVEN}, Tensor? offsets=None, {_LOOKED_UP}, bool heads_first=False)"
LIBRARY = torch.library.Library("attn_pass", "FRAGMENT")
LIBRARY.define(f"attention{_ARGUMENTS} -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(f"attention_with_lse{_ARGUMENTS} -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))


class Operand(ctypes.Structure):
    """``Operand`` of `common.hpp`, and ``Output``."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4))


class _Lookup(ctypes.Structure):
    """``Lookup`` of `common.hpp`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64 * 5),
        ("place", Operand),
        ("factor", ctypes.c_void_p),
        ("type", ctypes.c_int32),
    )


class _PerBatch(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class Args(ctypes.Structure):
    """``Args`` of `common.hpp`, member by member."""

    _fields_ = (
        *((name, Operand) for name in ("q", "k", "v", "keep", "bias", "sink")),
        ("captured", Operand * MOST_CAPTURED),
        ("lookups", _Lookup * MOST_LOOKUPS),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64 * 4),
        ("lse", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("B", "H", "HK", "L", "S", "D", "DV", *NUMBERS, "segments", "rows", "first_head")
        ),
        *((name, _PerBatch) for name in BOUNDS),
        ("seed", ctypes.c_void_p),
        ("dropout", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("scale", "fill")),
        *((name, ctypes.c_int32) for name in ("bias_type", "fully_masked", "threads", "has_score", "replaces")),
    )


def operand(tensor: Tensor | None, shape: Sequence[int]) -> Operand:
    """A tensor seen in a shape it broadcasts to."""
    if tensor is None:
        return Operand(None, (ctypes.c_int64 * 4)())
    tensor = tensor.expand(shape)
    return Operand(tensor.data_ptr(), (ctypes.c_int64 * 4)(*_strides(tensor)))


def _strides(tensor: Tensor) -> Iterator[int]:
    """Of a tensor that was expanded: 0 where there is one element."""
    return (0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride()))


def _shape_of(tensor: Tensor | None, scores: Sequence[int], offsets: Tensor | None) -> Sequence[int]:
    """The shape that a tensor over the scores is seen in; beside packed rows its own, whose ones are broadcast."""
    return scores if tensor is None or offsets is None else tensor.shape


def _over_distances(distances: Tensor, batch: int, heads: int, kv_len: int, *, packed: bool) -> Operand:
    """The matrix that the kernel adds: every row begins one element before the row above it."""
    size, step = distances.size(-1), distances.stride(-1)
    seen = distances if packed else distances.expand(batch, heads, 1, size)
    of_batch, of_heads, *_ = _strides(seen)
    first = (size - 1) // 2 if packed else size - kv_len  # of row 0 and key 0; packed rows are as many as their keys
    start = distances.data_ptr() + first * step * distances.element_size()
    return Operand(start, (ctypes.c_int64 * 4)(of_batch, of_heads, -step, step))


def _lookups(
    scores: Sequence[int], tables: Sequence[Tensor], places: Sequence[Tensor], factors: Sequence[Tensor], packed: bool
) -> Any:
    rows = []
    for table, place, factor in zip(tables, places, factors, strict=True):
        table = table if packed else table.expand(*scores, table.size(-1))
        strides = (ctypes.c_int64 * 5)(*_strides(table))
        seen = operand(place, place.shape if packed else scores)
        rows.append(_Lookup(table.data_ptr(), strides, seen, factor.data_ptr(), _TYPES[table.dtype]))
    return (_Lookup * MOST_LOOKUPS)(*rows)


def _per_batch(tensor: Tensor | None, batch: int) -> _PerBatch:
    if tensor is None:
        return _PerBatch(None, 0)
    tensor = tensor.expand(batch)
    return _PerBatch(tensor.data_ptr(), tensor.stride(0))


def result_like(query: Tensor, value: Tensor, *, heads_first: bool = False) -> Tensor:
    """The result's memory: heads after positions, which the layer after an attention reads, or before them."""
    batch, heads, q_len, _ = query.shape
    if heads_first:
        return query.new_empty((batch, heads, q_len, value.size(-1)))
    if isinstance(q_len, int) and q_len == 1:  # the same memory, with the strides of a dense tensor
        return query.new_empty((batch, heads, 1, value.size(-1)))
    return query.new_empty((batch, q_len, heads, value.size(-1))).transpose(1, 2)


def lse_like(query: Tensor) -> Tensor:
    """The memory of the log-sum-exp."""
    return query.new_empty(query.shape[:3], dtype=torch.float32)


def arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    distances: Tensor | None = None,
    sink: Tensor | None = None,
    captured: Sequence[Tensor] | None = None,
    score: str = "",
    fully_masked: str = "nan",
    fill: float | None = None,
    fill_is_added: bool = False,
    seed: Tensor | None = None,
    dropout: float = 0.0,
    tables: Sequence[Tensor] | None = None,
    places: Sequence[Tensor] | None = None,
    factors: Sequence[Tensor] | None = None,
    **bounds: Any,
) -> Args:
    """What `attention` takes as the kernel takes it, without results."""
    batch, heads, q_len, dim = query.shape
    kv_len = key.size(2)
    scores = (batch, heads, q_len, kv_len)
    offsets = bounds.get("offsets")
    per_batch = batch if offsets is None else offsets.numel() - 1
    added = bias if distances is None else distances
    return Args(
        q=operand(query, query.shape),
        k=operand(key, key.shape),
        v=operand(value, value.shape),
        keep=operand(keep, _shape_of(keep, scores, offsets)),
        bias=operand(bias, _shape_of(bias, scores, offsets))
        if distances is None
        else _over_distances(distances, batch, heads, kv_len, packed=offsets is not None),
        sink=operand(sink, (*scores[:3], 1)),
        captured=(Operand * MOST_CAPTURED)(*(operand(x, _shape_of(x, scores, offsets)) for x in captured or ())),
        lookups=_lookups(scores, tables or (), places or (), factors or (), packed=offsets is not None),
        B=batch,
        H=heads,
        HK=key.size(1),
        L=q_len,
        S=kv_len,
        D=dim,
        DV=value.size(3),
        **{name: otherwise if bounds.get(name) is None else bounds[name] for name, otherwise in NUMBERS.items()},
        segments=per_batch,
        rows=q_len,
        **{name: _per_batch(bounds.get(name), per_batch + (name == "offsets")) for name in BOUNDS},
        seed=seed.data_ptr() if seed is not None and dropout else None,
        dropout=dropout,
        scale=scale,
        fill=0.0 if fill is None else fill,
        bias_type=0 if added is None else _TYPES[added.dtype],
        fully_masked=FULLY_MASKED.index(fully_masked),
        threads=torch.get_num_threads(),
        has_score=bool(score),
        replaces=0 if fill is None else 2 if fill_is_added else 1,  # as `common.hpp` numbers them
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    lse: Tensor | None = None,
    statistics: Tensor | None = None,
    rest: Tensor | None = None,
    **optional: Any,
) -> Tensor:
    """``softmax(scale * query @ key.mT + bias, over the keys that are kept) @ value``.

    A key counts for a row where all that is given says so. What a key that counts for no row holds, NaN too, changes
    nothing. Results are the same for any number of threads.

    Args:
        query: (B, H, L, D), float32, bfloat16 or float16, any strides.
        key: (B, Hkv, S, D); ``H % Hkv == 0``, head ``h`` uses KV head ``h // (H // Hkv)``.
        value: (B, Hkv, S, Dv).
        scale: of the product.
        lse: where the log-sum-exp of a row's scores is written to: (B, H, L), float32, contiguous. -inf where no key is
            kept; a sink is not among the scores.
        statistics: where what the backward needs of a row is written to: (B, H, L, 2), float32, contiguous.
        rest: where what rounding took from the result is written to: as the result, the backward's too.
        optional: what the schemas name besides, each of which may be left out:

    Optional:
        before: keys that lie at most so far before the row's own position are kept; all where it is None.
        after: the same behind it: 0 is causal.
        start: the first key that is kept; 0 where it is None.
        end: one past the last; S where it is None.
        prefix: keys before it are kept whatever ``after`` says.
        chunk: keys of which ``(key + chunk_keys) // chunk`` is ``(position + chunk_rows) // chunk`` are kept; all where
            it is None.
        chunk_rows: what is added to positions there; 0 where it is None.
        chunk_keys: what is added to keys there; 0 where it is None.
        shift: (B,) or (1,), int64: row ``i`` is at position ``i + shift[b]``; at ``i`` without it.
        starts: (B,) or (1,), int64: the first valid key of each row of the batch.
        ends: (B,) or (1,), int64: one past the last.
        offsets: (N + 1,), int64, rising from 0 to L: packed rows. B is 1 and S is L; segment ``n`` is the rows, of
            queries and keys, from ``offsets[n]`` to ``offsets[n + 1]``, and sees itself alone. Positions count from a
            segment's first row; ``bias``, ``captured`` and ``places``, of four dimensions, and ``tables``, of five, are
            read at (n, head, position of the query, position of the key), ``starts``, ``ends`` and ``shift`` at n;
            ``keep`` is (1, 1 or H, 1, L), or (1, 1 or H, L, M), read at (row, position of the key) and M the most rows
            that a segment has. With gradients ``bias``, ``distances`` and ``captured`` have none.
        keep: boolean, broadcastable to (B, H, L, S): where it is true.
        bias: what is added, in float32 or half precision, broadcastable to (B, H, L, S); -inf masks.
        distances: the same where it depends on ``key - row`` alone, instead of ``bias``: (B or 1, H or 1, 1,
            L + S - 1), of which element ``key - row + L - 1`` is added. Beside packed rows an odd number of elements,
            the middle one for a row's own key, as far as the longest segment reaches.
        tables: up to four tensors in float32 or half precision, broadcastable to (B, H, L, S, M): for each row and key
            one of the M numbers is added to the score. In inference alone. Numbers of a table mask nothing.
        places: for each table which number, from 0 to M - 1: int32, broadcastable to (B, H, L, S).
        factors: for each table what the number is multiplied with: float32, of one element.
        sink: one more score of every row, whose value is zero; float32, broadcastable to (B, H, L, 1).
        captured: up to eight tensors that ``score`` reads, float32, broadcastable to (B, H, L, S).
        score: what stands in the place of the scaled product, as `scores.written` writes it; ``bias`` is added to it.
        fully_masked: what a fully masked row becomes: "nan", "zero" or the "mean" of all values.
        fill: the score of keys that are not kept, which count with it; then there are no bounds.
        fill_is_added: the fill absorbs the score it is added to, and does not replace it: its gradient passes.
        seed: (1,), int64: with the place of a weight it says whether the weight is dropped (`dropout.hpp`).
        dropout: the probability of that; the other weights are divided by ``1 - dropout``, and are 0 where that is.
        heads_first: the result is contiguous. In inference alone.

    Returns:
        (B, H, L, Dv), heads after positions in memory, or before them with ``heads_first``.

    Raises:
        NoCompilerError: the kernel cannot be built on this machine.
    """
    out = result_like(query, value, heads_first=optional.pop("heads_first", False))
    if out.numel() == 0 and (lse is None or lse.numel() == 0):
        return out
    args = arguments(query, key, value, scale, **optional)
    args.out, args.out_stride = out.data_ptr(), (ctypes.c_int64 * 4)(*out.stride())
    args.lse = None if lse is None else lse.data_ptr()
    args.statistics = None if statistics is None else statistics.data_ptr()
    args.rest = None if rest is None else rest.data_ptr()
    entry(query.dtype, optional.get("score", ""), trains=statistics is not None)(ctypes.byref(args))
    return out


def _tensors_of(optional: Mapping[str, Any]) -> Iterator[Tensor]:
    for one_or_more in optional.values():
        entries = one_or_more if isinstance(one_or_more, (list, tuple)) else (one_or_more,)
        yield from (x for x in entries if isinstance(x, Tensor))


def _may_have_tangent(x: Tensor) -> bool:
    try:
        return forward_ad.unpack_dual(x).tangent is not None
    except RuntimeError:  # under a trace (torch.func.linearize), which does not say
        return True


def _refuse_tangents(tensors: Iterable[Tensor]) -> None:
    if forward_ad._current_level < 0:
        return
    if eager_transforms.JVP_NESTING or any(map(_may_have_tangent, tensors)):
        raise NotImplementedError(
            "forward-mode derivative for attn_pass::attention is not implemented (torch.func.jvp, jacfwd, hessian): "
            "use reverse mode, or leave the attention as it is written"
        )


def check(query: Tensor, key: Tensor, value: Tensor, optional: Mapping[str, Any]) -> None:
    """Whether the operator takes a call.

    Raises:
        TypeError: a dtype is none that it takes.
        ValueError: arguments do not go together.
        NotImplementedError: an operand has a tangent, which would be dropped, or may have had one inside of
            `torch.func.jvp`, which takes tangents off before an operator sees them.
    """
    _refuse_tangents((query, key, value, *_tensors_of(optional)))
    floats = ", ".join(map(str, ELEMENTS))
    torch._check_type(query.dtype in ELEMENTS, lambda: f"attention takes {floats}; got {query.dtype}")
    torch._check_type(key.dtype == query.dtype == value.dtype, lambda: "query, key and value are of one dtype")
    accepted: dict[str, tuple[torch.dtype, ...]] = {
        "keep": (torch.bool,),
        "bias": tuple(ELEMENTS),
        "distances": tuple(ELEMENTS),
        "sink": (torch.float32,),
        "captured": (torch.float32,),
        "tables": tuple(ELEMENTS),
        "places": (torch.int32,),
        "factors": (torch.float32,),
        "seed": (torch.int64,),
        **dict.fromkeys(BOUNDS, (torch.int64,)),
    }
    for name, dtypes in accepted.items():
        for x in _tensors_of({name: optional.get(name)}):
            if x.dtype not in dtypes:
                raise TypeError(f"{name} takes {', '.join(map(str, dtypes))}; got {x.dtype}")
    _check_sizes(query, key, value)
    _check_distances(query.shape[2], key.shape[2], optional)
    _check_lookups(*(optional.get(name) or () for name in ("tables", "places", "factors")))
    if any(int(n) >= len(optional.get("captured") or ()) for n in captured_in(optional.get("score") or "")):
        raise ValueError("the score function reads a captured tensor that is not given")
    bounded = [name for name in (*NUMBERS, *BOUNDS) if optional.get(name) is not None]
    if optional.get("fill") is not None and bounded:
        raise ValueError(f"with a fill every key counts: there is no {', '.join(bounded)} beside it")
    dropout = optional.get("dropout") or 0.0
    if not 0 <= dropout <= 1 or (dropout and optional.get("seed") is None):
        raise ValueError(f"dropout is a probability, drawn from a seed; got {dropout} with {optional.get('seed')}")
    if dropout and optional.get("fully_masked") == "mean":
        raise ValueError("with dropout a fully masked row is 'nan' or 'zero'; for the mean of what is left give a fill")


def _check_distances(q_len: Any, kv_len: Any, optional: Mapping[str, Any]) -> None:
    distances = optional.get("distances")
    if distances is None:
        return
    if optional.get("bias") is not None:
        raise ValueError("what is added is a matrix or one vector of distances, and not both")
    if distances.dim() != 4 or distances.shape[2] != 1:
        raise ValueError(f"distances are (B, H, 1, L + S - 1); got {tuple(distances.shape)}")
    if not all(isinstance(n, int) for n in (q_len, kv_len, distances.shape[3])):
        return
    fits = distances.shape[3] % 2 if optional.get("offsets") is not None else distances.shape[3] == q_len + kv_len - 1
    if not fits:
        raise ValueError(f"distances of {q_len} rows and {kv_len} keys are not {distances.shape[3]}")


def _check_segments(query: Tensor, optional: Mapping[str, Any]) -> None:
    """What is added reaches over the longest of the packed segments, and over all heads."""
    offsets = optional.get("offsets")
    if offsets is None:
        return
    segments, longest = offsets.numel() - 1, int(offsets.diff().max()) if offsets.numel() > 1 else 0
    for name in ("bias", "distances"):
        added = optional.get(name)
        if added is None:
            continue
        of_pairs = [n for n in added.shape[2:] if n != 1]
        reach = (added.shape[3] + 1) // 2 if name == "distances" else min(of_pairs, default=longest)
        outer = added.shape[0] in (1, segments) and added.shape[1] in (1, query.shape[1])
        if not outer or reach < longest:
            needed = f"{segments} segments of up to {longest} rows and {query.shape[1]} heads"
            raise ValueError(f"{needed} are not what {name} is for: {tuple(added.shape)}")


def _check_lookups(tables: Sequence[Tensor], places: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    if not len(tables) == len(places) == len(factors) <= MOST_LOOKUPS:
        counts = f"{len(tables)} tables, {len(places)} places, {len(factors)} factors"
        raise ValueError(f"a table has places and a factor, and there are {MOST_LOOKUPS} at most; got {counts}")
    if any(x.dim() != 5 for x in tables) or any(x.dim() != 4 for x in places):
        raise ValueError("a table has the dimensions (batch, heads, rows, keys, numbers), its places the first four")
    if any(x.dim() > 1 for x in factors):
        raise ValueError("a factor is one number")


def _check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Sizes that are known by now: the kernel goes through memory by them."""

    def differ(one: Any, other: Any) -> bool:
        return isinstance(one, int) and isinstance(other, int) and one != other

    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError("query, key and value have the dimensions (batch, heads, length, head dim)")
    heads, kv_heads = query.shape[1], key.shape[1]
    together = ((query, key, 0), (query, key, 3), (key, value, 0), (key, value, 1), (key, value, 2))
    if any(differ(one.shape[dim], other.shape[dim]) for one, other, dim in together):
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query (B, H, L, D), key (B, HK, S, D) and value (B, HK, S, DV) do not go together: {shapes}")
    if isinstance(heads, int) and isinstance(kv_heads, int) and (heads % kv_heads if kv_heads else heads):
        raise ValueError(f"{heads} heads of the query are no multiple of {kv_heads} of the keys")


def check_eagerly(query: Tensor, key: Tensor, value: Tensor, optional: Mapping[str, Any]) -> None:
    """The same of a call in eager mode, where tensors have values: places, and lengths of packed segments."""
    check(query, key, value, optional)
    _check_places(optional)
    _check_segments(query, optional)


def _check_places(optional: Mapping[str, Any]) -> None:
    """In a compiled graph the places are proved to be those of a table."""
    for table, place in zip(optional.get("tables") or (), optional.get("places") or ()):
        if place.numel() and not 0 <= int(place.min()) <= int(place.max()) < table.size(-1):
            raise IndexError(f"a place is none of the table's {table.size(-1)} numbers")


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, **optional: Any) -> Tensor:
    check_eagerly(query, key, value, optional)
    return attention(query, key, value, scale, **optional)


def _with_lse_on_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, **optional: Any) -> tuple[Tensor, Tensor]:
    check_eagerly(query, key, value, optional)
    lse = lse_like(query)
    return attention(query, key, value, scale, lse=lse, **optional), lse


def _fake(query: Tensor, key: Tensor, value: Tensor, scale: float, **optional: Any) -> Tensor:
    check(query, key, value, optional)
    return result_like(query, value, heads_first=optional.get("heads_first", False))


def _with_lse_fake(query: Tensor, key: Tensor, value: Tensor, scale: float, **optional: Any) -> tuple[Tensor, Tensor]:
    return _fake(query, key, value, scale, **optional), lse_like(query)


LIBRARY.impl("attention", _on_cpu, "CPU")
LIBRARY.impl("attention", _fake, "Meta")
LIBRARY.impl("attention_with_lse", _with_lse_on_cpu, "CPU")
LIBRARY.impl("attention_with_lse", _with_lse_fake, "Meta")
OPERATOR = torch.ops.attn_pass.attention.default
WITH_LSE = torch.ops.attn_pass.attention_with_lse.default
"""The same with a second result: the log-sum-exp of every row's scores, (B, H, L) in float32."""
