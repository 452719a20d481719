"""`verify="graph"` and `"kernel"`: wrong rewrites are found before they are taken, and right ones are taken."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn
from torch._dynamo.exc import BackendCompilerFailed

import attn_pass
from attn_pass import verify
from attn_pass.errors import AttnPassWarning
from attn_pass.graph.cut import Input
from attn_pass.reading import masked_scores
from attn_pass.targets import masks
from attn_pass.targets.sdpa import Sdpa
from attn_pass.verify import inputs

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_PASS_VERIFY_DIR", str(tmp_path))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return (q @ k.mT * 0.3).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(mask[:, None, None] == 0, -1e9).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + bias).softmax(-1) @ v


def buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor, buckets: Tensor) -> Tensor:
    return (q @ k.mT + table[buckets].permute(2, 0, 1)).softmax(-1) @ v


def site_of(
    fn: Callable[..., Any], *inputs: Tensor, dynamic: bool | None = None, **options: Any
) -> attn_pass.SiteReport:
    torch._dynamo.reset()
    options = {"choose": "fused", "verify": "graph", "on_error": "raise", **options}
    backend = attn_pass.wrap("aot_eager" if dynamic else "eager", **options)  # which hands floats on as they are
    with attn_pass.record() as report:
        torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    assert len(report.sites) == 1
    return report.sites[0]


def scaled_wrongly(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], Any]) -> None:
    """Puts a fault into the target: what it emits goes through ``change(plan, value)``."""
    emit = Sdpa.emit

    def wrong(self: Any, plan: Any, *args: Any) -> Any:
        return change(plan, emit(self, plan, *args))

    monkeypatch.setattr(Sdpa, "emit", wrong)


PROGRAMS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "plain": (plain, lambda: qkv(2, 3, 9, 11, 8, grad=True)),
    "causal": (causal, lambda: qkv(2, 3, 9, 9, 8)),
    "integers for a mask": (padded, lambda: (*qkv(2, 3, 9, 11, 8), (randn(2, 11) > 0).long())),
    "an added bias": (biased, lambda: (*qkv(2, 3, 9, 11, 8), randn(3, 9, 11))),
    "rows of a table": (
        buckets,
        lambda: (*qkv(2, 3, 9, 9, 8), randn(5, 3), torch.randint(0, 5, (9, 9))),
    ),
    "half precision": (plain, lambda: qkv(2, 3, 9, 11, 8, dtype=torch.bfloat16)),
    "expanded keys": (plain, lambda: (randn(2, 3, 9, 8), randn(1, 1, 7, 8).expand(2, 3, 7, 8), randn(2, 3, 7, 8))),
    "an offset": (plain, lambda: tuple(randn(2, 3, 9, 24).split(8, -1))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_right_is_taken_and_verified(name: str) -> None:
    fn, inputs = PROGRAMS[name]
    site = site_of(fn, *inputs())
    assert site.outcome == "rewritten" and site.not_verified == ""
    assert site.verified_error is not None and site.verified_error < (0.02 if name == "half precision" else 1e-5)
    assert "verified: error" in str(attn_pass.Report([site]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fault_of_a_target_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, inputs = PROGRAMS[name]
    scaled_wrongly(monkeypatch, lambda plan, value: plan.call(torch.ops.aten.mul.Tensor, value, 1.05))
    with pytest.raises(BackendCompilerFailed, match=r"as sdpa, the result is .* away"):
        site_of(fn, *inputs())


FULLY_MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "-1e9 times what is masked": lambda s, m: s + (1.0 - m) * -1e9,
    "float32's lowest number": lambda s, m: s + (1.0 - m) * torch.finfo(torch.float32).min,
    "an added matrix": lambda s, m: s + m,
    "float64": lambda s, m: s.double() + (1.0 - m.double()) * -1e30,
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FULLY_MASKED)
def test_a_fault_in_fully_masked_rows_alone_is_found(name: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """-inf where the program has a number: only fully masked rows show it, in the program's own precision."""

    def fn(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return FULLY_MASKED[name](q @ k.mT * 0.3, m).softmax(-1).to(v.dtype) @ v

    given = (*qkv(2, 3, 9, 11, 8, dtype=torch.float16, grad=grad), torch.ones(2, 1, 1, 11))
    assert site_of(fn, *given).verified_error is not None
    right = masks._in_kernel_dtype

    def wrong(lower: Any, mask: Any, **kwargs: Any) -> Any:
        mask = right(lower, mask, **kwargs)
        low = lower.plan.call(torch.ops.aten.le.Scalar, mask, -65520.0)
        return lower.plan.call(torch.ops.aten.masked_fill.Scalar, mask, low, float("-inf"))

    monkeypatch.setattr(masks, "_in_kernel_dtype", wrong)
    with pytest.raises(BackendCompilerFailed, match=r"as sdpa, the result is .* away"):
        site_of(fn, *given)


@pytest.mark.parametrize("infinite", [True, False])
def test_a_call_with_a_fully_masked_row_is_verified_in_training(infinite: bool) -> None:
    """Such a row of a call is 0, and so are its gradients: in what the site is held to as well."""

    def fn(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
        mask = mask if infinite else ~hidden
        return F.scaled_dot_product_attention(q, k, v, mask[:, None, None].expand(-1, 3, -1, -1))

    site = site_of(fn, *qkv(2, 3, 9, 11, 8, grad=True), torch.arange(2)[:, None].expand(2, 11) == 1)
    assert (site.outcome, site.not_verified) == ("rewritten", "")
    assert site.verified_error is not None and site.verified_error < 1e-5


def test_a_site_that_is_wrong_is_left_loudly_and_the_model_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_wrongly(monkeypatch, lambda plan, value: plan.call(torch.ops.aten.mul.Tensor, value, 1.05))
    inputs = qkv(2, 3, 9, 11, 8)
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager", choose="fused", verify="graph")
    with attn_pass.record() as report, pytest.warns(AttnPassWarning, match=r"test_verification.py:\d+.*sdpa.*mismatch"):
        result = torch.compile(plain, backend=backend)(*inputs)
    torch.testing.assert_close(result, plain(*inputs))
    (site,) = report.sites
    assert site.outcome == "left" and site.reason.startswith("verification failed: as sdpa")
    assert site.verified_error is None and site.refusals["sdpa"] == site.reason


def test_the_file_shows_the_difference_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scaled_wrongly(monkeypatch, lambda plan, value: plan.call(torch.ops.aten.mul.Tensor, value, 1.5))
    with pytest.raises(BackendCompilerFailed, match="verification failed") as raised:
        site_of(plain, *qkv(2, 3, 9, 11, 8, grad=True))
    (named,) = re.findall(r"reproduce it with (\S+\.py)", str(raised.value))
    assert Path(named).parent == tmp_path
    assert not re.search("^(import|from) attn_pass", Path(named).read_text(), re.MULTILINE)
    reported = subprocess.run([sys.executable, named], capture_output=True, text=True, check=True, cwd="/").stdout
    (apart, size) = re.match(r"result: largest difference (\S+), largest value (\S+)", reported).groups()  # type: ignore[union-attr]
    assert float(apart) == pytest.approx(0.5 * float(size), rel=1e-3)
    assert "gradient 3: largest difference" in reported


class _Twisted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 1.5 * g


def _twisted(x: Tensor) -> Tensor:
    return _Twisted.apply(x)  # type: ignore[no-any-return]


def test_a_fault_of_the_backward_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_wrongly(monkeypatch, lambda plan, value: plan.call(_twisted, value))
    with pytest.raises(BackendCompilerFailed, match="the gradient of input"):
        site_of(plain, *qkv(2, 3, 9, 11, 8, grad=True))


def test_without_gradients_there_is_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_wrongly(monkeypatch, lambda plan, value: plan.call(_twisted, value))
    assert site_of(plain, *qkv(2, 3, 9, 11, 8)).verified_error is not None


def test_a_fault_of_the_reading_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read wrongly is rewritten consistently: only the program itself can tell."""
    normalise = masked_scores.normalise

    def wrong(*args: Any, **kwargs: Any) -> Any:
        from dataclasses import replace

        scores = normalise(*args, **kwargs)
        return replace(scores, scale=scores.scale * 1.1)

    monkeypatch.setattr(masked_scores, "normalise", wrong)
    with pytest.raises(BackendCompilerFailed, match="verification failed"):
        site_of(plain, *qkv(2, 3, 9, 11, 8))


def test_a_fault_for_other_sizes_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was emitted holds for the traced length and no other."""

    def traced_alone(plan: Any, value: Any) -> Any:
        rows = plan.size(plan.sizes.shape(verify.fake_value(plan.result))[-2])
        factor = plan.call(lambda n: n / 9, rows)
        return plan.call(torch.mul, value, factor)

    scaled_wrongly(monkeypatch, traced_alone)
    inputs = qkv(2, 3, 9, 11, 8)
    with pytest.raises(BackendCompilerFailed, match="the result is"):
        site_of(plain, *inputs, dynamic=True)


@pytest.mark.parametrize("fn", [plain, causal])
def test_a_long_site_is_verified_at_a_shorter_length(fn: Callable[..., Tensor]) -> None:
    site = site_of(fn, *qkv(1, 2, 4096, 4096, 8))
    assert site.outcome == "rewritten" and site.verified_error is not None and site.verified_error < 1e-5


def test_a_fault_of_a_long_site_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_wrongly(monkeypatch, lambda plan, value: plan.call(torch.ops.aten.mul.Tensor, value, 1.05))
    with pytest.raises(BackendCompilerFailed, match="as sdpa, the result"):
        site_of(plain, *qkv(1, 2, 4096, 4096, 8))


def test_a_long_dynamic_site_is_verified_at_shorter_lengths() -> None:
    site = site_of(causal, *qkv(1, 2, 4096, 4096, 8), dynamic=True)
    assert site.outcome == "rewritten" and site.verified_error is not None


def test_many_scores_in_short_rows_are_reported_as_not_verified() -> None:
    site = site_of(plain, *qkv(4096, 4, 30, 30, 4))
    assert site.outcome == "rewritten" and site.verified_error is None
    assert site.not_verified == "its scores are many and its lengths short"
    assert "not verified: its scores are many" in str(attn_pass.Report([site]))


def test_writes_inside_the_site_are_run_too() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT
        scores *= 0.3
        scores.masked_fill_(mask, float("-inf"))
        return scores.softmax(-1) @ v

    site = site_of(fn, *qkv(2, 3, 9, 11, 8), torch.rand(9, 11) < 0.3)
    assert site.verified_error is not None and site.verified_error < 1e-5


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda q: torch.randn(9, 11).tril(),
    "rand_like": lambda q: torch.rand_like(q[0, 0] @ q[0, 0].mT[:, :1].expand(8, 11)),
    "in place": lambda q: torch.empty(9, 11).uniform_(),
    "a coin": lambda q: torch.where(torch.bernoulli(torch.full((9, 11), 0.7)) > 0, 0.0, -1e9),
    "dropout": lambda q: F.dropout(torch.ones(9, 11), 0.5, True),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_mask_that_is_drawn_is_drawn_once(name: str) -> None:
    """Each way of running the site would draw a mask of its own, and all would differ."""
    site = site_of(lambda q, k, v: (q @ k.mT * 0.3 + DRAWN[name](q)).softmax(-1) @ v, *qkv(2, 3, 9, 11, 8))
    assert site.outcome == "rewritten"
    assert site.verified_error is not None or "draws random numbers" in site.not_verified


def test_dropout_that_drops_nothing_is_no_draw() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((F.dropout(q @ k.mT, 0.0, True) * 0.3).softmax(-1), 0.4, False) @ v

    assert site_of(fn, *qkv(2, 3, 9, 11, 8)).verified_error is not None


def test_what_was_written_to_an_operand_before_is_in_its_value() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = q * 1.0
        own[:, :, :2] = 3.0
        return plain(own, k, v)

    site = site_of(fn, *qkv(2, 3, 9, 11, 8))
    assert site.verified_error is not None and site.verified_error < 1e-5


def test_masks_from_around_a_checkpointed_body() -> None:
    def body(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return (q @ k.mT * 0.3).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
        return torch.utils.checkpoint.checkpoint(body, q, k, v, keep, use_reentrant=False)  # type: ignore[return-value]

    site = site_of(fn, *qkv(2, 3, 9, 9, 8, grad=True))
    assert site.mask == "causal" and site.verified_error is not None and site.verified_error < 1e-5


def test_an_exported_program_is_verified() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal(q, k, v)

    length = torch.export.Dim("length", min=2, max=64)
    inputs = qkv(2, 3, 9, 9, 8)
    shapes = {name: {2: length} for name in "qkv"}
    program = torch.export.export(Attend(), inputs, dynamic_shapes=shapes)
    with attn_pass.record() as report:
        attn_pass.rewrite(program, choose="fused", verify="graph", on_error="raise")
    assert report.sites[0].verified_error is not None


def test_explain_verifies_when_asked() -> None:
    options = {"verify": "graph", "choose": "fused"}
    report = attn_pass.explain(plain, *qkv(2, 3, 9, 11, 8), attn_pass_options=options)
    assert report.sites[0].verified_error is not None


def test_nothing_random_is_used_up_and_nothing_global_changes() -> None:
    before = torch.get_rng_state()
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    site_of(plain, *qkv(2, 3, 9, 11, 8))
    assert torch.equal(before, torch.get_rng_state())
    assert (threads, grad) == (torch.get_num_threads(), torch.is_grad_enabled())


def test_a_failure_of_the_verification_leaves_the_site_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("defect")

    monkeypatch.setattr(verify, "reference", broken)
    with pytest.warns(AttnPassWarning, match="defect"):
        site = site_of(plain, *qkv(2, 3, 9, 11, 8), on_error="warn")
    assert site.outcome == "left" and "defect" in site.reason


def test_the_compiled_site_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's fault that no graph shows: the code Inductor makes is run, not the graph."""
    from attn_pass.entries import transaction

    inputs = qkv(1, 2, 16, 16, 16, grad=True)
    torch._dynamo.reset()
    with attn_pass.record() as report:
        torch.compile(plain, backend=attn_pass.backend, options={"verify": "kernel", "choose": "fused"})(*inputs)
    assert report.sites[0].verified_error is not None
    torch._dynamo.reset()
    compiled = transaction.compiled_site
    monkeypatch.setattr(transaction, "compiled_site", lambda *a: lambda *x: tuple(y * 2 for y in compiled(*a)(*x)))
    with attn_pass.record() as report, pytest.warns(AttnPassWarning, match="verification failed"):
        torch.compile(plain, backend=attn_pass.backend, options={"verify": "kernel", "choose": "fused"})(*inputs)
    assert report.sites[0].outcome == "left"


def test_another_device_is_told() -> None:
    options = {"verify": "graph", "choose": "fused", "device": "H200"}
    inputs = qkv(2, 3, 128, 128, 64, dtype=torch.float16)
    (site,) = attn_pass.explain(plain, *inputs, attn_pass_options=options).sites
    assert site.outcome == "rewritten" and site.not_verified == "there is no H200 here to run it on"


def test_a_mask_that_is_an_earlier_attention() -> None:
    """The mask's node is new in the graph by then: it was rewritten."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = plain(q, k, v) @ v.mT
        return biased(q, k, v, mask)

    torch._dynamo.reset()
    with attn_pass.record() as report:
        backend = attn_pass.wrap("aot_eager", choose="fused", verify="graph", on_error="raise")
        torch.compile(fn, backend=backend)(*qkv(2, 3, 9, 9, 8))
    assert [s.outcome for s in report.sites] == ["rewritten"] * 2
    assert all(s.verified_error is not None for s in report.sites)


def test_a_gradient_that_cancels() -> None:
    """With one key every weight is 1, and what reaches query and key is rounding alone."""
    assert site_of(plain, *qkv(2, 3, 4, 1, 8, grad=True), choose="first", targets=("sdpa",)).verified_error is not None


def test_a_view_of_a_long_cache_takes_no_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    in_memory = verify.random_tensor

    def counted(given: Any, *args: Any, **kwargs: Any) -> Tensor:
        made.append(given.memory)
        return in_memory(given, *args, **kwargs)

    monkeypatch.setattr(verify, "random_tensor", counted)
    cache = torch.empty(2, 4, 1 << 16, 16)[:, :, 5:25]
    site = site_of(plain, randn(2, 4, 1, 16), cache, cache)
    assert site.verified_error is not None and max(made) < 10_000


def test_a_part_of_a_long_cache_is_told() -> None:
    def step(q: Tensor, cache: Tensor) -> Tensor:
        return plain(q, cache[:, :, :20], cache[:, :, 1:21])

    site = site_of(step, randn(1, 4, 1, 16), torch.empty(1, 4, 1 << 20, 16))
    assert site.outcome == "rewritten" and "too many to generate" in site.not_verified


@pytest.mark.parametrize(
    ("shape", "stride", "closer"),
    [
        ((2, 4, 20, 16), (1 << 24, 1 << 22, 16, 1), (384 * 4, 384, 16, 1)),
        ((2, 20, 4, 16), (1 << 25, 16, 1 << 22, 1), (384 * 4 + 64, 16, 384, 1)),
        ((2, 4, 20, 16), (0, 1 << 22, 16, 1), (0, 384, 16, 1)),
        ((3, 4), (1 << 23, (1 << 20) + 1), (320, 65)),
        ((2, 3, 4), (1 << 22, 1, 2), (1 << 22, 1, 2)),
    ],
)
def test_gaps_between_elements_are_made_smaller(
    shape: tuple[int, ...], stride: tuple[int, ...], closer: tuple[int, ...]
) -> None:
    """What was dense still is, what overlaps stays, and the alignment of each stride is what it was."""
    made = inputs.closer(Input(shape, stride, "float32", "cpu"))
    assert all((a - b) % 64 == 0 for a, b in zip(made.stride, stride)) and made.stride == closer


def test_sizes_that_do_not_fit_are_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    def grouped(q: Tensor, k: Tensor) -> Tensor:
        n = q.shape[1] // k.shape[1]
        k = k[:, :, None].expand(-1, -1, n, -1, -1).reshape(k.shape[0], -1, k.shape[2], k.shape[3])
        return plain(q, k, k)

    assert site_of(grouped, randn(2, 8, 20, 8), randn(2, 2, 20, 8), dynamic=True).verified_error is not None
    assert "Traceback" not in capfd.readouterr().err


def logarithms(q: Tensor, weights: Tensor) -> Tensor:
    return (q @ q.mT + weights.log()).softmax(-1) @ q


def test_a_logarithm_gets_what_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with a NaN shows nothing, and with negative numbers every row had one."""
    given = randn(2, 3, 17, 8), randn(2, 1, 1, 17).abs() + 0.1
    assert (site_of(logarithms, *given).verified_error or 0) > 0
    scaled_wrongly(monkeypatch, lambda plan, value: plan.call(torch.ops.aten.mul.Tensor, value, 1.05))
    with pytest.raises(BackendCompilerFailed, match=r"as sdpa, the result is .* away"):
        site_of(logarithms, *given)


def test_nothing_to_compare_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(q: Tensor, x: Tensor) -> Tensor:
        return (q @ q.mT + (x.abs() * -1 - 1).log()).softmax(-1) @ q

    site = site_of(odd, randn(2, 3, 17, 8), randn(2, 1, 1, 17))
    assert site.verified_error is None and "finite" in site.not_verified


def test_drawn_numbers_are_told() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.mT).softmax(-1), 0.0) @ v

    assert site_of(fn, *qkv(2, 3, 9, 11, 8)).verified_error is not None
