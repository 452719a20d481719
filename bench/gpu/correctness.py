"""Part 1: every CUDA target, forward and backward, and the decode kernel, compared with float64 on random inputs.

An error may be twice that of the same program in eager in its own dtype, and half a unit in the last place of the
largest value besides; in float32 1e-5 of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import attn_pass
from attn_pass.measuring.timing import farthest
from attn_pass.targets.registry import all_targets
from bench.gpu import decode_cases, toolchain
from bench.gpu.environment import Environment, decision_row, passed
from bench.gpu.parts import Case, Column, Part, Row
from bench.gpu.shapes import Shape, by_hand, call
from bench.harness.programs import Function, doubled
from bench.suites import spellings

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NEG_INF = float("-inf")
TARGETS = ("cudnn", "flash", "efficient", "flash_attn", "flex", "decode")
BY_INDUCTOR = ("flex",)  # has a kernel under Inductor alone
_UNITS = {FP32: 1e-5, BF16: 2.0**-9, FP16: 2.0**-12}


def _distance(q: Tensor, k: Tensor) -> Tensor:
    """``key - row``, aligned to the last key."""
    rows = torch.arange(q.size(-2), device=q.device)[:, None]
    return torch.arange(k.size(-2), device=q.device) - rows - (k.size(-2) - q.size(-2))


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """By hand, keys and values repeated for the query heads they serve."""
    if q.size(1) != k.size(1):
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = q @ k.mT * 0.3
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = scores.masked_fill(~keep, NEG_INF)
    return scores.softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, _distance(q, k) <= 0)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = _distance(q, k)
    return attend(q, k, v, (distance <= 0) & (distance >= -5))


def guarded(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """A call: a fully masked row is zero."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attend(q, k, v, bias=bias)


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5.0 * torch.tanh(q @ k.mT * 0.3 / 5.0)).softmax(-1) @ v


@dataclass(frozen=True)
class Kind:
    """A program, with the sizes of its operands on a GPU: (B, H, Hkv, L, S, D, Dv)."""

    program: Callable[..., Tensor]
    sizes: tuple[int, int, int, int, int, int, int]
    dtype: torch.dtype = BF16
    more: str = ""  # a fourth input: "padding", "empty" (fully masked rows), "bias", "learned"
    layout: str = ""

    def inputs(self, env: Environment, grad: bool) -> tuple[Tensor, ...]:
        """Query, key, value and the fourth input."""
        b, h, g, rows, keys, d, e = self.sizes
        if env.dry:
            rows, keys = min(rows, 1 + rows % 13), min(keys, 1 + keys % 17)
            rows = keys = min(rows, keys) if rows == self.sizes[3] == self.sizes[4] else max(rows, keys)
        kv_batch = 1 if self.layout == "shared" else b
        shapes: tuple[tuple[int, ...], ...] = ((b, h, rows, d), (kv_batch, g, keys, d), (kv_batch, g, keys, e))
        if self.layout == "heads last":
            shapes = tuple((s[0], s[2], s[1], s[3]) for s in shapes)
        q, k, v = (env.normal(*s, dtype=self.dtype) for s in shapes)
        if self.layout == "expanded":
            k, v = (x[:1].expand(b, -1, -1, -1) for x in (k, v))
        operands = [x.requires_grad_(grad) for x in (q, k, v)]
        if self.more in ("padding", "empty"):
            most = torch.tensor([keys, max(1, keys // 3)] * b, device=env.device)[:b, None, None, None]
            keep = torch.arange(keys, device=env.device) < most
            if self.more == "empty":
                keep = keep & (torch.arange(rows, device=env.device)[:, None] != 1)
            return (*operands, keep)
        if self.more:
            return (*operands, env.normal(1, h, rows, keys, dtype=self.dtype, grad=grad and self.more == "learned"))
        return tuple(operands)


KINDS: dict[str, Kind] = {
    "plain": Kind(attend, (2, 4, 4, 257, 257, 64, 64)),
    "causal": Kind(causal, (2, 4, 4, 300, 300, 128, 128)),
    "grouped heads, causal": Kind(causal, (2, 8, 2, 197, 197, 128, 128), FP16),
    "padding": Kind(attend, (2, 4, 4, 130, 259, 64, 64), more="padding"),
    "bias": Kind(biased, (2, 4, 4, 100, 203, 64, 64), FP16, more="bias"),
    "a learned bias": Kind(biased, (2, 4, 4, 64, 72, 64, 64), more="learned"),
    "float32": Kind(attend, (2, 4, 4, 129, 257, 64, 64), FP32),
    "float32, bias": Kind(biased, (2, 4, 4, 129, 257, 64, 64), FP32, more="bias"),
    "cross": Kind(attend, (2, 4, 4, 333, 77, 40, 40), FP16),
    "causal, aligned to the last key": Kind(causal, (2, 4, 4, 100, 333, 64, 64)),
    "window": Kind(window, (2, 4, 4, 200, 300, 64, 64), FP16),
    "fully masked rows": Kind(guarded, (2, 4, 4, 66, 130, 64, 64), more="empty"),
    "grouped heads": Kind(attend, (2, 8, 2, 100, 203, 96, 96)),
    "one query": Kind(attend, (2, 8, 2, 1, 1025, 128, 128)),
    "five queries": Kind(attend, (2, 8, 2, 5, 1025, 128, 128), FP16),
    "one key": Kind(attend, (2, 4, 4, 65, 1, 64, 64)),
    "head dim 80": Kind(attend, (2, 4, 4, 129, 65, 80, 80), FP16),
    "head dim 256": Kind(causal, (1, 4, 4, 129, 129, 256, 256)),
    "head dim 20": Kind(attend, (2, 4, 4, 65, 65, 20, 20)),
    "narrow values": Kind(attend, (2, 4, 4, 129, 129, 64, 40), FP16),
    "wide keys": Kind(causal, (1, 4, 4, 129, 129, 192, 128)),
    "negative scale": Kind(lambda q, k, v: attend(-q, k, v), (2, 4, 4, 129, 129, 64, 64)),
    "heads last in memory": Kind(heads_last, (2, 4, 4, 129, 129, 64, 64), layout="heads last"),
    "expanded keys": Kind(attend, (3, 4, 4, 65, 129, 64, 64), layout="expanded"),
    "shared keys": Kind(spellings.call, (65, 4, 4, 1, 300, 32, 32), layout="shared"),
    "soft cap": Kind(soft_cap, (2, 4, 4, 129, 129, 64, 64)),
}
FORWARD = ("plain", "grouped heads, causal", "bias", "float32", "window", "five queries")  # made for inference as well
QUICK = ("grouped heads, causal", "bias", "five queries")


def compared(results: list[Tensor], eager: list[Tensor], right: list[Tensor]) -> Row:
    """The worst of several tensors, by what is allowed."""
    worst: Row = {"error_abs": 0.0, "eager_abs": 0.0, "of_limit": 0.0}
    for ours, theirs, exact in zip(results, eager, right):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise AssertionError(f"{ours.dtype} {tuple(ours.shape)} in place of {theirs.dtype} {tuple(theirs.shape)}")
        defined = torch.isfinite(theirs)
        size = max(1.0, float(theirs.detach()[defined].abs().max())) if defined.any() else 1.0
        ours_off, theirs_off = farthest(ours, exact, defined), farthest(theirs, exact, defined)
        of_limit = ours_off / (2 * theirs_off + _UNITS[ours.dtype] * size)
        if not of_limit <= worst["of_limit"]:
            worst = {"error_abs": ours_off, "eager_abs": theirs_off, "of_limit": of_limit}
    return worst


def with_gradients(out: Tensor, inputs: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    """The result, and where it has any the gradients of the inputs that want one."""
    leaves = [x for x in inputs if x.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))] if leaves else [out]


def check(env: Environment, kind: Kind, target: str, train: bool, inductor: bool = False) -> Row:
    """One program given to one target, with its gradients where ``train``."""
    torch.manual_seed(0)
    inputs = kind.inputs(env, train)
    program = kind.program
    run = passed(env, program, eager=not inductor, targets=(target,), choose="fused", on_error="raise")
    with torch.set_grad_enabled(train), attn_pass.record() as report:
        eager = program(*inputs)
        grad = torch.randn(eager.shape, device=env.device, dtype=eager.dtype)
        results = with_gradients(run(*inputs), inputs, grad)
        row = _outcome(report, target)
        if not row["ran"]:
            return row
        wide = doubled(inputs)
        right = with_gradients(program(*wide), wide, grad)
        return row | compared(results, with_gradients(eager, inputs, grad), right)


def _outcome(report: attn_pass.Report, target: str) -> Row:
    took = decision_row(report)
    ran = bool(report.rewritten)
    refused = "" if ran else (report.sites[-1].refusals.get(target) or took["reason"] if report.sites else "no site")
    return {"ran": ran, "took": took["took"], "refused": refused}


def _verdict(row: Row) -> Row:
    if not row.get("ran", True):
        return {**row, "verdict": f"refused: {row['refused']}"}
    return {**row, "verdict": "right" if row["of_limit"] <= 1 else "WRONG"}


def dropout(env: Environment, target: str) -> Row:
    """What can be decision_row of random weights: their mean, and that the backward draws those of the forward."""
    shape = (2, 4, 24, 24, 64) if env.dry else (2, 4, 256, 256, 64)
    q, k, v = (env.normal(*shape[:2], shape[3], shape[4], grad=True) for _ in range(3))
    ones = torch.ones_like(v).requires_grad_()

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    run = passed(env, program, eager=True, targets=(target,), choose="fused", on_error="raise")
    with attn_pass.record() as report:
        out = run(q, k, ones)
    row = _outcome(report, target)
    if not row["ran"]:
        return _verdict(row)
    grad = env.normal(*out.shape)
    (of_values,) = torch.autograd.grad(out, [ones], grad)
    forward, backward = (float((a.detach().double() * b).sum()) for a, b in ((out, grad), (ones, of_values)))
    size = float((out.detach().double() * grad).abs().sum())
    off_mean, off_adjoint = abs(float(out.detach().double().mean()) - 1), abs(forward - backward) / size
    right = off_mean < (0.1 if env.dry else 0.01) and off_adjoint < 0.01
    return {**row, "error_abs": off_mean, "of_limit": off_adjoint / 0.01, "verdict": "right" if right else "WRONG"}


# ---------------------------------------------------------------- the decode kernel


def decode_case(env: Environment, case: decode_cases.Case) -> Row:
    """The operator called directly: on a GPU the kernel, in a dry run the kernel under Triton's interpreter."""
    if env.dry:
        return _interpreted(case)
    from attn_pass.devices.cuda.decode_operator import decode, reference

    q, k, v, mask = decode_cases.inputs_of(case, env.device)
    right, _ = decode_cases.exact_with_lse(q, k, v, mask, case)
    of_batch = decode_cases.lengths_of(case, env.device), decode_cases.starts_of(case, env.device)
    given = (q, k, v, mask, case.scale, case.causal, case.window, *of_batch, case.mean)
    result, plain = decode(*given), reference(*given)
    return _judged(decode_cases.error(result, right), decode_cases.error(plain, right), case.dtype)


def _judged(ours: float, plain: float, dtype: torch.dtype) -> Row:
    of_limit = ours / (2 * plain + _UNITS[dtype])
    row = {"took": "decode", "error_abs": ours, "eager_abs": plain, "of_limit": of_limit}
    return _verdict(row)


def _interpreted(case: decode_cases.Case) -> Row:
    import json
    import subprocess
    import sys

    line = [sys.executable, "-m", "bench.gpu.interpreted", case.name]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the interpreter ended"])[-1])
    document = json.loads(done.stdout.splitlines()[-1])[case.name]
    return _judged(document["kernel"], document["plain"], case.dtype)


_STEP = Shape(2, 8, 2, 4, 1000, 64)


def decode_compiled(env: Environment, dynamic: bool) -> Row:
    """The operator as the pass emits it, by Inductor, also for other numbers of keys."""
    shape = _STEP.tiny() if env.dry else _STEP
    program = by_hand(shape)
    run = passed(env, program, dynamic=dynamic, targets=("decode",), choose="fused", on_error="raise")
    worst: Row = {}
    with torch.no_grad(), attn_pass.record() as report:
        for keys in (shape.kv_len, 7, 333) if dynamic else (shape.kv_len,):
            q, k, v = shape.inputs(env)
            k, v = (x[:, :, :1].expand(-1, -1, keys, -1) + env.normal(*x.shape[:2], keys, shape.dim) for x in (k, v))
            if dynamic:
                torch._dynamo.mark_dynamic(k, 2)
                torch._dynamo.mark_dynamic(v, 2)
            row = compared([run(q, k, v)], [program(q, k, v)], [program(*doubled((q, k, v)))])
            worst = row if not worst or not row["of_limit"] <= worst["of_limit"] else worst
    return _verdict({**_outcome(report, "decode"), **worst})


def decode_packaged(env: Environment) -> Row:
    """The operator in an AOTInductor package, with any number of keys."""
    if not env.dry:
        toolchain.require()
    shape = _STEP.tiny() if env.dry else _STEP
    program = call(shape)
    assert program is not None

    keys = torch.export.Dim("keys", min=4, max=8192)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder, attn_pass.record() as report:
        path = attn_pass.aot_compile(
            Function(program).eval(),
            shape.inputs(env),
            dynamic_shapes=((None, {2: keys}, {2: keys}),),
            package_path=str(Path(folder) / "step.pt2"),
            options={**env.options, "targets": ("decode",), "choose": "fused", "on_error": "raise"},
        )
        run = torch._inductor.aoti_load_package(path)
        q, k, v = shape.inputs(env)
        k, v = k[:, :, : shape.kv_len // 2].contiguous(), v[:, :, : shape.kv_len // 2].contiguous()
        row = compared([run(q, k, v)], [program(q, k, v)], [program(*doubled((q, k, v)))])
    return _verdict({**_outcome(report, "decode"), **row})


# ---------------------------------------------------------------- the part


def check_case(env: Environment, kind: str, target: str, train: bool, inductor: bool = False) -> Case:
    """The case of a kind that is forced on a target, with its gradients where ``train``."""
    way = f"{'backward' if train else 'forward'}{', Inductor' if inductor else ''}"
    return Case(f"{target}: {kind}, {way}", lambda: _verdict(check(env, KINDS[kind], target, train, inductor)))


def cases(env: Environment) -> Iterator[Case]:
    """Most important first: each target's plain forms, the decode kernel, then what is rare."""
    names = [t for t in TARGETS if t in {x.name for x in all_targets()}]
    direct = [c for c in decode_cases.CASES if not env.quick or c.name == "window"]
    kinds = {n: k for n, k in KINDS.items() if not env.quick or n in QUICK}
    fused = [n for n in names if n not in BY_INDUCTOR]

    of = partial(check_case, env)

    for target in fused:
        for train in (False, True):
            if not (target == "decode" and train):
                yield of("plain" if target != "decode" else "five queries", target, train, True)
    for case in direct:
        yield Case(f"decode: {case.name}, direct", partial(decode_case, env, case))
    for kind in kinds:
        for target in fused:
            if target != "decode":
                yield of(kind, target, True)
            # The backward's case compares the forward's result as well, from a graph made for training.
            few = kinds[kind].sizes[3] <= 64
            if few if target == "decode" else kind in FORWARD and not env.quick:
                yield of(kind, target, False)
    for target in fused:
        if target != "decode":
            yield Case(f"{target}: dropout", partial(dropout, env, target))
    yield Case("decode: compiled", partial(decode_compiled, env, False))
    yield Case("decode: compiled for any number of keys", partial(decode_compiled, env, True))
    for target in (n for n in names if n in BY_INDUCTOR):
        for kind in ("soft cap", "causal", "window", "padding")[: 1 if env.quick else None]:
            for train in (False, True):
                yield of(kind, target, train, True)
    if not env.quick:
        yield Case("decode: packaged for any number of keys", partial(decode_packaged, env))


PART = Part(
    "correctness",
    "Correctness against float64",
    0.24,
    (
        Column("case", "name"),
        Column("verdict", "verdict"),
        Column("took", "took"),
        Column("error", "error_abs", ".1e"),
        Column("eager's", "eager_abs", ".1e"),
        Column("of what is allowed", "of_limit", ".2f"),
    ),
    cases,
    timed=False,
)
