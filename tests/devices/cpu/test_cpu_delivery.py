"""`attn_pass::attention` through Inductor: in compiled graphs, and in packages that run without attn_pass."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import remembering_compiler
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.testing import assert_close

import attn_pass
from attn_pass.compat import TORCH_VERSION
from attn_pass.devices.cpu.kernel import template  # noqa: F401, importing it registers the lowering
from attn_pass.devices.cpu.kernel.operator import WITH_LSE

pytestmark = pytest.mark.slow
OPTIONS = {"choose": "fused", "targets": ("cpu_kernel",), "on_error": "raise"}


@pytest.fixture(autouse=True)
def _optimised_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(remembering_compiler.AS_USERS, "1")


class Block(nn.Module):
    """One layer: operands are views of one product, the last keys are padding, the result is merged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(64, 3 * 64)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        """(B, L, 64) and (B, L), true where a key is kept."""
        query, key, value = self.project(x).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT * 32**-0.5
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~(causal & kept[:, None, None]), float("-inf")).softmax(-1)
        return torch.relu((weights @ value).transpose(1, 2).flatten(2)) + 1


def inputs(length: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(length)
    kept = torch.ones(2, length, dtype=torch.bool)
    kept[0, length - 5 :] = False
    return torch.randn(2, length, 64), kept


def is_right(got: Callable[..., Tensor], model: Block, length: int) -> bool:
    x, kept = inputs(length)
    expected = model.double()(x.double(), kept)
    model.float()
    return bool((got(x, kept).double() - expected).abs().max() < 1e-5)


def test_compiled_once_for_all_lengths() -> None:
    model = Block().eval()
    with torch.no_grad(), attn_pass.record() as report:
        compiled = torch.compile(model, backend=attn_pass.backend, dynamic=True, options=OPTIONS)
        assert all(is_right(compiled, model, length) for length in (40, 9, 200))
    assert [s.target for s in report.sites] == ["cpu_kernel"]


def test_a_result_is_written_where_it_is_returned() -> None:
    """The kernel writes the contiguous result of a product by hand: the program is the kernel's call, and no copy."""

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    q, k, v = (torch.randn(2, 4, length, 16) for length in (33, 70, 70))
    with torch.no_grad():
        compiled = torch.compile(by_hand, backend=attn_pass.backend, options=OPTIONS)
        result, (code,) = run_and_get_code(compiled, q, k, v)
    torch.testing.assert_close(result, by_hand(q, k, v), atol=1e-5, rtol=1e-5)
    assert result.is_contiguous()
    assert "cpp_fused_attention" in code
    assert "clone" not in code


def step(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, first: int) -> tuple[Tensor, ...]:
    scores = q @ k[:, :, first:].mT * q.size(-1) ** -0.5
    result = scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v
    return torch.autograd.grad(result.sum(), (q, k, v)) if q.requires_grad else (result,)


@pytest.mark.parametrize("trains", [False, True])
def test_calls_of_all_sizes_are_one_function(trains: bool) -> None:
    """What the compiler sees has no size, stride, offset or scale; in squares no two numbers are one argument."""
    texts: set[tuple[str, ...]] = set()
    for sizes in ((2, 3, 33, 70, 16, 8), (1, 32, 32, 32, 32, 0), (1, 1, 40, 17, 8, 1)):
        batch, heads, queries, keys, dim, first = sizes
        torch._dynamo.reset()
        lengths = (queries, first + keys, keys)
        given = [torch.randn(batch, heads, n, dim, requires_grad=trains) for n in lengths]
        keep = torch.rand(batch, 1, queries, keys) < 0.8
        keep[..., 0] = True
        compiled = torch.compile(step, backend=attn_pass.backend, dynamic=False, options=OPTIONS)
        with torch.set_grad_enabled(trains):
            got, codes = run_and_get_code(compiled, *given, keep, first)
            exact = step(*(x.detach().double().requires_grad_(trains) for x in given), keep, first)
        for one, expected in zip(got, exact, strict=True):
            assert_close(one.double(), expected, atol=1e-5, rtol=1e-5)
        kernels = re.findall(r"cpp_pybinding\(.*?\n\'\'\'\)", "\n".join(codes), re.DOTALL)
        texts.add(tuple(text for text in kernels if "attn_pass_cpu" in text))
    (kernels_of_one,) = texts
    assert len(kernels_of_one) == (2 if trains else 1)


CAP = 20.0


@torch._inductor.config.patch("cpp.enable_kernel_profile", True)
def test_a_profile_shows_the_kernel_forward_and_backward() -> None:
    compiled = torch.compile(Block(), backend=attn_pass.backend, dynamic=False, options=OPTIONS)

    def step() -> None:
        compiled(*inputs(40)).sum().backward()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    forward, backward = (event.name for event in profile.events() or () if "attention" in event.name)
    assert "attention_forward" in forward and "attention_backward" in backward  # beside what is fused with it


class BesideConvolutions(nn.Module):
    """Attention of the positions of an image, whose operands and whose result are those of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.merge = nn.Conv2d(64, 3 * 64, 1), nn.Conv2d(64, 64, 1)

    def forward(self, image: Tensor) -> Tensor:
        """(B, 64, 7, 7)."""
        operands = self.project(image).view(2, 2, 96, 49).chunk(3, dim=2)
        query, key, value = (x.mT.contiguous() for x in operands)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.merge(attended.mT.reshape(image.shape))  # type: ignore[no-any-return]


def test_gradients_beside_convolutions() -> None:
    """For them Inductor saves what has four dimensions with the second one last: the kernel's statistics, too."""
    model, image = BesideConvolutions(), torch.randn(2, 64, 7, 7)

    def gradients(run: Callable[..., Tensor], image: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(image).square().sum(), list(model.parameters()))

    with attn_pass.record() as report:
        got = gradients(torch.compile(model, backend=attn_pass.backend, options=OPTIONS), image)
    assert [s.target for s in report.sites] == ["cpu_kernel"]
    for one, expected in zip(got, gradients(model.double(), image.double()), strict=True):
        assert_close(one.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_number_of_python_may_change_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def capped(x: Tensor) -> Tensor:
        query, key, value = x.view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        return (torch.tanh(query @ key.mT / CAP) * CAP).softmax(-1) @ value

    x = torch.randn(2, 40, 192)
    with torch.no_grad(), attn_pass.record() as report:
        compiled = torch.compile(capped, backend=attn_pass.backend, dynamic=True, options=OPTIONS)
        for cap in (20.0, 3.0, 0.5):
            monkeypatch.setattr(sys.modules[__name__], "CAP", cap)
            assert_close(compiled(x), capped(x), rtol=1e-5, atol=1e-5)
    assert {s.target for s in report.sites} == {"cpu_kernel"}


def both(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel's two results, and something behind each that Inductor would fuse."""
    out, lse = WITH_LSE(query, key, value, 0.2, after=3)
    return torch.relu(out) + 1, lse.exp() * 2


def few_rows() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 3, n, 40, dtype=torch.bfloat16) for n in (4, 33, 33))


def test_the_log_sum_exp_beside_the_result_and_each_alone() -> None:
    programs = (both, lambda *given: both(*given)[0], lambda *given: both(*given)[1])
    # The kernel's source is no part of the key by which Inductor keeps a graph.
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        for fn in programs:
            assert_close(torch.compile(fn)(*few_rows()), fn(*few_rows()))


@torch._inductor.config.patch("cpp.enable_kernel_profile", True)
def test_the_log_sum_exp_in_a_package_whose_kernels_a_profile_shows(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return both(query, key, value)

    with torch.no_grad():
        program = torch.export.export(Model(), few_rows())
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
        run = torch._inductor.aoti_load_package(package)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            got = run(*few_rows())
    assert_close(got, both(*few_rows()))
    assert any("cpp_fused_attention" in event.name for event in profile.events() or ())


def functions_with(register: str, library: Path) -> set[str]:
    """The functions of a library whose machine code names such registers."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True
    )
    functions, name = set(), ""
    for line in listing.stdout.splitlines():
        if line.endswith(">:"):
            name = line
        elif register in line:
            functions.add(name)
    return functions


@pytest.mark.usefixtures("for_any_processor")
@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="Inductor compiles for the processor that it is on")
def test_a_package_runs_without_this_package_on_lesser_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor is asked for AVX2 (docs/howto/aotinductor.md): all code beyond it is the kernel's, which asks first.

    That is the least that the package holds, and what runs if less is asked for.
    """
    monkeypatch.delenv(remembering_compiler.AS_USERS)  # it shows which set runs, not how fast
    model = Block().eval()
    length = torch.export.Dim("length", min=6, max=1000)
    with torch._inductor.config.patch({"cpp.march": "x86-64-v3", "cpp.simdlen": 256}):
        package = attn_pass.aot_compile(
            model, inputs(40), dynamic_shapes=({1: length},) * 2, package_path=tmp_path / "m.pt2", options=OPTIONS
        )
    with zipfile.ZipFile(package) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith(".so"))
        beyond = functions_with("%zmm", Path(archive.extract(library, tmp_path)))
    assert beyond and all("attn_pass_cpu" in name and ("avx512" in name or "amx" in name) for name in beyond)
    report = attn_pass.package_report(package)
    assert report is not None and [s.target for s in report.sites] == ["cpu_kernel"]
    x, kept = inputs(77)
    torch.save((x, kept, model(x, kept)), tmp_path / "case.pt")
    script = (
        "import os, sys, torch, torch._inductor\n"
        "for os.environ['ATTN_PASS_CPU_ISA'] in ('', 'avx2', 'plain'):\n"
        "    if child := os.fork():\n"
        "        assert os.waitpid(child, 0)[1] == 0, os.environ['ATTN_PASS_CPU_ISA']\n"
        "        continue\n"
        "    model = torch._inductor.aoti_load_package(sys.argv[1])\n"
        "    x, kept, expected = torch.load(sys.argv[2])\n"
        "    assert not hasattr(torch.ops.attn_pass, 'attention') and 'attn_pass' not in sys.modules\n"
        "    assert (model(x, kept) - expected).abs().max() < 1e-5\n"
        "    os._exit(0)\n"
    )
    command = [sys.executable, "-c", script, str(package), str(tmp_path / "case.pt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
