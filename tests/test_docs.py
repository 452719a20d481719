"""The documentation is true: generated parts equal the code, and every block of code runs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn, same
from doc_blocks import LANGUAGES, ROOT, Block, _blocks, blocks, pages
from torch import Tensor
from typer.testing import CliRunner

import attn_pass
from attn_pass.cli.main import app
from attn_pass.entries import dynamo, inductor
from attn_pass.targets.registry import built_in

DOCS = ROOT / "docs"
# Why a block may stay unrun.
REASONS = (
    *("installs packages", "needs a GPU", "needs an NPU", "needs a TPU", "needs torch_xla", "needs several processes"),
    *("takes minutes", "runs the tests", "a part of a program", "a script of yours", "C++"),
)
TARGET = "docs/howto/target.md"
QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # the wrapper's C++, which has nothing to do with attention
COMPILED_FOR_REAL = ("docs/start.md",)  # elsewhere Inductor's part is left out: what is rewritten is the same


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("build")


BUILT = (
    *("../README.md", "architecture.md", "catalogue.md", "comparison.md", "cuda.md", "howto/device.md", "rewrites.md"),
    *("howto/runtimes.md", "mps.md", "rocm.md", "xpu.md", "usage.md", "reference.md"),
)


@pytest.mark.parametrize("page", BUILT)
def test_a_page_is_built_from_the_code(page: str, build: Any) -> None:
    assert set(build.PARTS) == set(BUILT)
    assert build.built(page) == (DOCS / page).read_text(), "run `make docs`"


def test_the_reference_has_every_public_name(build: Any) -> None:
    reference = importlib.import_module("reference")
    assert sorted(name for group in reference.GROUPS.values() for name in group) == sorted(attn_pass.__all__)


def test_every_target_says_what_it_makes_of_what_and_why_that_is_exact() -> None:
    for target in built_in():
        module = sys.modules[type(target).__module__]
        text, code = module.__doc__ or "", inspect.getsource(module).replace(module.__doc__ or "", "")
        assert all(re.search(rf"^{label}\s", text, re.MULTILINE) for label in ("Becomes:", "Exact because:", "Offers"))
        before, after = re.findall(r"^    (.+)\n    ->\n    (.+)$", text, re.MULTILINE)[0]
        assert before != after
        for name in re.findall(r"(?:aten|npu|attn_pass|attn_pass_xla)\.(\w+)", after):
            assert name in code, f"{target.name} does not emit {name}"


# ---- blocks ----


@pytest.mark.parametrize("page", pages())
def test_every_block_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if page == TARGET:
        request.getfixturevalue("installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    if page not in COMPILED_FOR_REAL:
        for module in (dynamo, inductor):
            monkeypatch.setattr(module, "compile_under", _without_code_generation)
    page_blocks, grad = blocks(page), torch.is_grad_enabled()
    torch._dynamo.reset()
    try:
        with torch._inductor.config.patch(QUICK):
            run_page(page_blocks, tmp_path)
    finally:
        torch.set_grad_enabled(grad)
        torch._dynamo.reset()
        for name in ("page", *(Path(block.file).stem for block in page_blocks if block.file)):
            sys.modules.pop(name, None)


def test_a_file_has_one_name_over_all_pages() -> None:
    """Dynamo keeps the modules it has met by name, for as long as the process lives."""
    files = [block.file for page in pages() for block in blocks(page) if block.file.endswith(".py")]
    assert len(files) == len(set(files))


def run_page(page_blocks: Sequence[Block], folder: Path) -> None:
    """Runs what can be run, in order and in one namespace; what cannot has a reason that is listed."""
    module = sys.modules["page"] = ModuleType("page")  # what a page defines is found by its name, as Dynamo's guards do
    for block in page_blocks:
        assert block.language in LANGUAGES, f"{block.where}: a block has one of the languages {LANGUAGES}"
        if block.language == "bash":
            _check_commands(block)
        if block.not_run:
            assert block.not_run.startswith(REASONS), f"{block.where}: {block.not_run!r} is no reason that is listed"
        elif block.needs and importlib.util.find_spec(block.needs) is None:
            assert f'"{block.needs}' in (ROOT / "pyproject.toml").read_text(), (
                f"{block.where}: no extra has {block.needs}"
            )
        elif block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
        elif block.language == "python":
            # With the page's own name and lines, so that a traceback and a report lead there.
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, str(ROOT / block.page), "exec"), vars(module))
        elif block.language == "bash":
            for command in block.commands():
                _run_command(command, block)


def _run_command(command: str, block: Block) -> None:
    program, *arguments = shlex.split(command)
    assert program == "attn-pass", f"{block.where}: {program} is not run by this test: say why with <!-- not run: -->"
    result = CliRunner().invoke(app, arguments)
    wanted = (0, 1) if "--fail-on" in arguments else (0,)
    assert result.exit_code in wanted, f"{block.where}: {command}\n{result.output}\n{result.exception!r}"


def _check_commands(block: Block) -> None:
    """What a command names exists: goals of make, scripts and folders of the repository."""
    goals = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in block.commands():
        words = command.split()
        if words[0] == "make":
            named = [word for word in words[1:] if "=" not in word]
            assert set(named) <= goals, f"{block.where}: make has no goal {named}"
        for word in words:
            if re.match(r"(examples|bench|tests\w*|docs)/[\w./]+$", word):
                assert (ROOT / word).exists(), f"{block.where}: there is no {word}"


def _without_code_generation(
    patches: Any, gm: torch.fx.GraphModule, inputs: Sequence[Any], report: Any
) -> Callable[..., Any]:
    from torch._dynamo.backends.registry import lookup_backend

    compiled: Callable[..., Any] = lookup_backend("aot_eager")(gm, list(inputs))
    return compiled


def test_blocks_that_are_not_run_have_a_reason() -> None:
    unrun = [block for page in pages() for block in blocks(page) if block.not_run]
    print(*(f"{block.where}: {block.not_run}" for block in unrun), sep="\n")
    ran = [b for page in pages() for b in blocks(page) if b.language in ("python", "bash") and not b.not_run]
    assert len(ran) > 2 * len([b for b in unrun if b.language == "python"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nassert 1 == 2, 'not so'\n```", "not so"),
        ("```\nx\n```", "languages"),
        ("```bash\nmake nothing-of-the-kind\n```", "no goal"),
        ("<!-- not run: needs a GPU -->\n```bash\npython examples/nothing.py\n```", "there is no"),
        ("<!-- not run: because -->\n```python\nx\n```", "no reason"),
        ("```bash\nls\n```", "not run by this test"),
        ("```bash\nattn-pass explain nothing.py:model\n```", "there is no file"),
    ],
)
def test_a_block_that_is_wrong_is_seen(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message):
        run_page(list(_blocks("page.md", text)), tmp_path)


# ---- the reasons that docs/howto/left.md quotes ----

_SPOKEN = 8  # letters that a piece of a sentence needs to be told from others
_HOLE = "\0"


def test_the_reasons_of_the_page_are_the_package_s_own_words() -> None:
    page = (DOCS / "howto" / "left.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]
    assert len(quotes) > 40
    templates = list(_templates())
    spoken = "\n".join(templates)
    with_holes = [t for t in templates if _HOLE in t and len(t.replace(_HOLE, "").strip()) >= 2 * _SPOKEN]
    patterns = [re.compile(".+".join(map(re.escape, t.strip(f"{_HOLE} :,().").split(_HOLE)))) for t in with_holes]
    for quote in quotes:
        pieces = [piece.strip(" :,().") for piece in quote.split("...")]
        said = [piece for piece in pieces if len(piece) >= _SPOKEN]
        assert said, quote
        for piece in said:
            is_spoken = piece in spoken or any(pattern.search(piece) for pattern in patterns)
            assert is_spoken, f"nothing in attn_pass says {piece!r}"


def _templates() -> Iterator[str]:
    """Every string in the package's code, with a hole where a value is put in."""
    for path in (ROOT / "attn_pass").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else _HOLE for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


# ---- the target that docs/howto/target.md writes, installed like anybody's ----


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package of the page, built and installed by pip into a folder of its own, which is on the path."""
    from attn_pass.targets import registry

    source, place = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("place")
    for block in blocks(TARGET):
        if block.file:
            (source / block.file).parent.mkdir(parents=True, exist_ok=True)
            (source / block.file).write_text(block.text)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [*command, "--target", place, source], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(place))
        registry._registered.cache_clear()
        yield place
    registry._registered.cache_clear()


ROW_BLOCKS = {"targets": ("row_blocks",)}


def by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    if q.size(1) != k.size(1):
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = q @ k.mT * 0.3
    if causal:
        keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"q_len": 131, "kv_len": 257, "value_dim": 8},
        {"heads": 6, "kv_heads": 2, "q_len": 1},
        {"batch": 1, "dim": 1},
    ],
)
def test_the_target_of_the_page_computes_attention(installed: Path, sizes: dict[str, int], causal: bool) -> None:
    with torch.no_grad():
        report = same(lambda q, k, v: by_hand(q, k, v, causal), *qkv(**sizes), rewritten=1, **ROW_BLOCKS)
        dynamic = same(by_hand, *qkv(**sizes), rewritten=1, dynamic=True, **ROW_BLOCKS)
    assert {s.target for s in (*report.sites, *dynamic.sites)} == {"row_blocks"}


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT * 0.3, sink.expand(q.size(0), -1, q.size(2), 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize(
    ("name", "fn", "inputs", "grad"),
    [
        ("no mask but a causal one", lambda q, k, v, m: ((q @ k.mT) + m).softmax(-1) @ v, (*qkv(), randn(8, 8)), False),
        ("sinks", with_sink, (*qkv(), randn(1, 2, 1, 1)), False),
        ("no backward", by_hand, qkv(grad=True), True),
        ("takes float32, not bfloat16", by_hand, qkv(dtype=torch.bfloat16), False),
        ("nor dropout", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.5), qkv(), False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_target_of_the_page_refuses_what_it_does_not_do(
    installed: Path, name: str, fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: bool
) -> None:
    with torch.set_grad_enabled(grad):
        (site,) = attn_pass.explain(fn, *inputs, attn_pass_options={**ROW_BLOCKS, "choose": "fused"}).sites
    assert site.outcome == "left" and name in site.refusals["row_blocks"]


def test_the_tests_a_page_names_exist() -> None:
    """docs/cuda.md says which test guards what a first run on a GPU would have met."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "cuda.md").read_text())
    assert len(named) > 15
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"
