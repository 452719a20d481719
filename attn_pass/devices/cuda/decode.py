"""Few query rows over many keys: the split-KV kernel of ``attn_pass.devices.cuda.decode_operator``, on CUDA devices.

Torch's kernels treat a query of two to about sixty rows like a long one: one thread block per head reads all keys in
sequence, so that most of the device is idle. This kernel splits the keys into as many parts as keep the device busy,
and all heads of a KV head share one pass over its keys and values.

Becomes: one call of ``attn_pass::decode``, with the causal flag, the window and the range of valid keys as arguments
and any other mask as a tensor; with a sink ``attn_pass::decode_with_lse``, and a factor for each row of its result.

    F.scaled_dot_product_attention(q, k, v, key <= position[b], scale=scale)
    ->
    attn_pass.decode(q, k, v, None, scale, lengths=position + 1)

Exact because: each part has the largest score, the sum of exponentials and the weighted sum of its keys, and softmax
over all keys is these joined, after each is scaled to the largest score of all. Keys outside of the range are masked.

Offers in inference, from compute capability 8.0, in float16 and bfloat16, for 1 to 64 query rows (all heads of a group
together: up to 1024), head dims of 16 to 256 that are multiples of 16, and keys and values whose rows begin at
multiples of 16 elements; with no mask, a causal mask or window aligned to the last key, or any mask as a tensor. The
number of keys may be symbolic. If only a part of a cache is valid, the kernel reads only that part: it loads one or two
bounds for each row of the batch, so that one graph, and one CUDA graph, serves every position. If the mask is a tensor
of the program, the range of kept keys is computed from it, where that is cheap (`mask_range`). A sink is applied
afterwards, with the logarithm of the sum of exponentials that the kernel returns with its result.

On a GPU that is present the kernel first computes seven tiny cases, once for each GPU, driver and version, and is
refused if one of them is wrong. Before its last change it was right in 72 cases on an H200; the tests run it under
Triton's interpreter, and compile it as Inductor passes it to Triton. On other devices the operator computes plain
products.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.fx import Node

from attn_pass.devices.cuda import cost as cost_cuda
from attn_pass.devices.cuda import mask_range
from attn_pass.devices.cuda.decode_range import DecodeRange, range_of
from attn_pass.devices.cuda.flash import Flash
from attn_pass.devices.cuda.kernel import CudaKernel
from attn_pass.devices.cuda.mask_range import MaskRange
from attn_pass.devices.device import Device, Shares
from attn_pass.devices.roofline import Problem
from attn_pass.graph.edit import Plan, Value
from attn_pass.model.attention import Attention
from attn_pass.model.expression import Load
from attn_pass.model.index import Axis, Index, axis_index, divide, substitute
from attn_pass.targets import looking
from attn_pass.targets.bands import band_of
from attn_pass.targets.base import EMPTY_ROWS, Offer, Refusal, Setting
from attn_pass.targets.constraints import (
    ANY_BACKEND,
    AUTOCAST,
    NOT_EMPTY,
    STRICT_ROWS,
    Attended,
    Constraint,
    HasAttention,
    refusal,
    trained_export,
    unless,
)
from attn_pass.targets.kernel_rules import HALF, known_or
from attn_pass.targets.key_bounds import VALID_SHARE
from attn_pass.targets.lower import Lowering
from attn_pass.targets.masks import MaskKind, mask_kind, mask_tensor, may_hold_infinity
from attn_pass.targets.operands import dense_last
from attn_pass.targets.problem import problem_of
from attn_pass.targets.sinks import joined_with_sink

_MOST_QUERIES = 64
_MOST_ROWS = 1024
_VECTOR = 16  # elements: for a stride that is not a multiple of them Triton loads 2 bytes at a time


@dataclass(frozen=True)
class DecodePlan:
    """The kernel's mask: a causal band, of ``window`` keys unless that is -1, or a tensor; and which keys are valid."""

    causal: bool = False
    window: int = -1
    mask: MaskKind = "none"
    valid: DecodeRange | MaskRange | None = None


class Decode(CudaKernel):
    """`torch.ops.attn_pass.decode`."""

    name = "decode"
    takes_valid_range = True
    sweeps = ("decoding",)
    # With many rows it is taken to multiply at FlashAttention's rate. On an H200 `attend` was measured, and not what
    # has changed around it since, so that the kernel does not count as measured there.
    shares = {
        generation: Shares(of_flash.prefill, one_row=0.80, few_rows=0.80)
        for generation, of_flash in Flash.shares.items()
    } | {"H200": Shares(0.36, one_row=0.92, few_rows=0.90)}

    def microseconds(self, device: Device, problem: Problem, *, growing: bool = False) -> float:
        """Two kernels: the parts of the keys, and what joins them."""
        return cost_cuda.split_keys(device, device.shares[self.name], problem)

    def bare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """The operator."""
        from attn_pass.devices.cuda.decode_operator import decode

        out: Tensor = decode(q, k, v, None, q.size(-1) ** -0.5, causal)
        return out

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[DecodePlan] | Refusal:
        """Takes few query rows in half precision, without gradients."""
        reason = refusal(CONSTRAINTS, Attended(attention, setting)) or _failed_check(attention, setting)
        if reason is not None:
            return Refusal(self.name, reason, other_device=self.name not in setting.device.kernels)
        decided = _plan(attention, setting)
        if isinstance(decided, Refusal):
            return decided
        problem = _problem(attention, decided, setting)
        decided, predicted = self._looked_up(attention, decided, problem, setting)
        joining = 0.0 if attention.sink is None else setting.device.kernel_us
        empty = may_hold_infinity(attention) and attention.empty_row_is_nan and not attention.mask.never_empty
        return Offer(
            self.name,
            variant,
            attention,
            predicted + joining,
            fused=True,
            plan=decided,
            assumptions=(EMPTY_ROWS,) if not attention.mask.is_none and empty else (),
            moved=problem.moved_bytes,
        )

    def _looked_up(
        self, a: Attention, decided: DecodePlan, problem: Problem, setting: Setting
    ) -> tuple[DecodePlan, float]:
        """The plan with a range that is found in the mask, where that may pay; and what it takes.

        Keys that were written in place before are taken for a cache that is half full, and any others to count all.
        """
        all_keys_us = self.microseconds(setting.device, problem)
        mask_ranges = None if decided.valid is not None else mask_range.range_of(a, decided.mask, setting)
        if mask_ranges is None:
            return decided, all_keys_us
        half = self.microseconds(setting.device, _half_full(problem))
        looking_us = mask_range.microseconds(problem, setting)
        if not looking.pays(looking_us, all_keys_us, half):
            return decided, all_keys_us
        return replace(decided, valid=mask_ranges), looking_us + (half if setting.over_cache else all_keys_us)

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[DecodePlan], setting: Setting) -> Value:
        """Plans the operator's call."""
        from attn_pass.devices.cuda import decode_operator

        del decode_operator  # importing it registers the operators
        a, decided = offer.attention, offer.plan
        lower = Lowering(plan, nodes, a)
        dtype = a.compute_dtype
        query = lower.query(dtype)
        key = lower.key(dtype)
        value = lower.value(dtype)
        query, key, value = (dense_last(plan, x) for x in (query, key, value))
        mask = mask_tensor(lower, decided.mask, setting)
        arguments = [query, key, value, mask, a.scale, decided.causal, decided.window]
        if decided.valid is not None:
            arguments += [*decided.valid.lengths_and_starts(lower), decided.valid.mean]
        if a.sink is None:
            return lower.result(plan.call(torch.ops.attn_pass.decode.default, *arguments))
        both = plan.call(torch.ops.attn_pass.decode_with_lse.default, *arguments)
        out, lse = (plan.call(operator.getitem, both, n) for n in (0, 1))
        return lower.result(joined_with_sink(lower, a.sink, out, lse))


def _problem(a: Attention, decided: DecodePlan, setting: Setting) -> Problem:
    """The numbers of what the kernel reads."""
    problem = problem_of(a, setting.hint)
    if decided.mask == "none":
        problem = replace(problem, mask_elements=0)
    if decided.valid is not None:
        problem = _half_full(problem)
    if decided.window >= 0:
        problem = replace(problem, kv_len=min(problem.kv_len, decided.window + problem.q_len))
    return problem


def _half_full(problem: Problem) -> Problem:
    valid = max(1, int(VALID_SHARE * problem.kv_len))
    return replace(problem, kv_len=valid, mask_elements=int(VALID_SHARE * problem.mask_elements))


def _has_few_rows(a: Attention) -> bool:
    return isinstance(a.q_len, int) and isinstance(a.groups, int) and a.q_len * a.groups <= _MOST_ROWS


def _takes_head_dim(size: Index) -> bool:
    return isinstance(size, int) and size % _VECTOR == 0 and 16 <= size <= 256


def _read_singly(a: Attention) -> str | None:
    for name, load, dims in (("keys", a.key, (a.dim,)), ("values", a.value, a.value_dim)):
        if not _begins_in_vectors(a, load, dims):
            return f"the {name} have strides that are not multiples of {_VECTOR}, and would be loaded one by one"
    return None


CONSTRAINTS: tuple[Constraint[HasAttention], ...] = (
    Constraint(
        "device",
        lambda c: f"the split-KV kernel does not run on {c.setting.device.type} devices",
        lambda c: Decode.name in c.setting.device.kernels,
    ),
    Constraint(
        "compute capability",
        "the split-KV kernel needs compute capability 8.0",
        lambda c: c.setting.device.capability >= (8, 0),
    ),
    Constraint("package", "the split-KV kernel needs the package triton", lambda c: find_spec("triton") is not None),
    Constraint("gradient", "the split-KV kernel has no backward", lambda c: not c.attention.needs_grad),
    Constraint("gradient in an export", trained_export("the split-KV kernel"), lambda c: not c.setting.may_need_grad),
    Constraint("dropout", "the split-KV kernel has no dropout", lambda c: not c.attention.dropout),
    Constraint("dtype", "the split-KV kernel takes half precision only", lambda c: c.attention.compute_dtype in HALF),
    AUTOCAST,
    ANY_BACKEND,
    Constraint(
        "numerics",
        STRICT_ROWS,
        lambda c: c.setting.numerics != "strict" or c.attention.mask.is_none or c.attention.mask.never_empty,
    ),
    Constraint("query rows", "the number of query rows is large, or not known", lambda c: _has_few_rows(c.attention)),
    Constraint(
        "query rows",
        lambda c: f"{c.attention.q_len} query rows are too many for a split-KV kernel",
        lambda c: known_or(c.attention.q_len, 0) <= _MOST_QUERIES,
    ),
    Constraint(
        "head dim",
        f"the head dim is not a multiple of {_VECTOR} from 16 to 256, or is not known",
        lambda c: all(map(_takes_head_dim, (c.attention.head_dim, c.attention.value_head_dim))),
    ),
    NOT_EMPTY,
    unless("strides", lambda c: _read_singly(c.attention)),
)


def _begins_in_vectors(a: Attention, load: Load, dims: Sequence[Axis]) -> bool:
    """Whether each row of keys or values begins at a multiple of the number of elements that Triton's stride hint
    needs.

    A tensor that is cast, or whose last dimension is not dense, is copied first, and lies densely then.
    """
    source = a.sources[load.source]
    flat = source.place(load.index)
    if flat is None or source.dtype != a.compute_dtype:
        return True
    begins = substitute(flat, dict.fromkeys(dims, 0))
    along: Index = 0
    for axis in dims:
        along = along * axis.size + axis_index(axis)
    return flat - begins != along or divide(begins, _VECTOR)[1] == 0


def _failed_check(a: Attention, setting: Setting) -> str | None:
    """Why the kernel is not trusted on the GPU that is here; None where it is, and where none is here."""
    if not setting.device.is_here:
        return None
    from attn_pass.devices.cuda import self_check

    why = self_check.failure(a.sources[a.query.source].device)
    return None if why is None else f"the split-KV kernel failed its check on this device: {why}"


def _plan(a: Attention, setting: Setting) -> DecodePlan | Refusal:
    """A band that ends ``kv_len - q_len`` keys after the row's own is an argument; any other mask is a tensor.

    So is what a range of valid keys does not say.
    """
    if a.valid is not None:
        valid = range_of(a, setting, KERNEL.name)
        if isinstance(valid, Refusal):
            return valid
        kind = "none" if valid.is_complete else mask_kind(a, setting)
        return DecodePlan(valid.causal, valid.window, "additive" if kind == "causal" else kind, valid)
    band = band_of(a)
    if band is not None and band.upper == a.kv_len - a.q_len:
        if band.lower is None:
            return DecodePlan(causal=True)
        if isinstance(band.lower, int) and isinstance(band.upper, int) and band.lower <= band.upper:
            return DecodePlan(causal=True, window=band.upper - band.lower)  # with other bounds all keys are masked
    kind = mask_kind(a, setting)
    return DecodePlan(mask="additive" if kind == "causal" else kind)


KERNEL = Decode()
