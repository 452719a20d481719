"""`attn_pass.check`: a right backend is right, a wrong one is found at its site, with a script that shows it."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends import registry
from typer.testing import CliRunner

import attn_pass
from attn_pass.cli.main import app
from attn_pass.errors import OptionError
from attn_pass.measuring.timing import relative_error

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTN_PASS_VERIFY_DIR", str(tmp_path))
    torch._dynamo.reset()
    return tmp_path


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    later = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(1)
    return (q @ k.mT * 0.25).masked_fill(later, float("-inf")).softmax(-1) @ v


def without_mask(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that forgets masks."""
    for node in list(gm.graph.nodes):
        if node.target == "masked_fill":
            node.replace_all_uses_with(node.args[0])
    gm.recompile()
    return gm.forward


def heads(length: int = 24, **more: Any) -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, 2, length, 16, **more) for _ in range(3))


@pytest.mark.parametrize("grad", [False, True])
def test_a_right_backend_is_right(grad: bool) -> None:
    result = attn_pass.check(causal, *heads(requires_grad=grad), backend="aot_eager")
    (site,) = result.sites
    assert result and (site.verdict, site.mask, site.why, site.script) == ("right", "causal", "", "")
    assert site.error is not None and site.error < 1e-5
    assert (result.whole, result.reference) == ("right", "float64")
    assert "1 attention site: 1 right; the whole program: right" in str(result)


@pytest.mark.parametrize("length", [24, 1500])  # the longer one is run shorter
def test_a_wrong_backend_is_found_at_its_site(length: int) -> None:
    result = attn_pass.check(causal, *heads(length), backend=without_mask)
    (site,) = result.wrong
    assert not result and result.whole == "WRONG"
    assert site.error is None and "is allowed" in site.why and site.where.startswith("test_checking.py:")
    assert Path(site.script).is_file()
    assert json.loads(result.to_json())["sites"][0]["verdict"] == "WRONG"


def test_the_script_shows_the_difference_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.register_backend(without_mask, name="without_mask")
    (site,) = attn_pass.check(causal, *heads(), backend="without_mask").wrong
    runpy.run_path(site.script, run_name="__main__")
    printed = capsys.readouterr().out
    apart = float(printed.split("largest difference ")[1].split(",")[0])
    assert apart > 0.01 and "without_mask compiles it" in Path(site.script).read_text()


def test_the_script_of_a_backend_without_a_name_asks_for_it() -> None:
    def of_no_name(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return without_mask(gm, inputs)

    (site,) = attn_pass.check(causal, *heads(), backend=of_no_name).wrong
    with pytest.raises(SystemExit, match="set `backend` in this file"):
        runpy.run_path(site.script, run_name="__main__")
    text = Path(site.script).read_text()
    assert "backend = None" in text and "'of_no_name'" in text


def test_a_program_that_is_wrong_elsewhere_is_told() -> None:
    def scaled(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        names = [str(node.target) for node in gm.graph.nodes]
        if "relu" in " ".join(names):
            return lambda *given: tuple(x * 1.01 for x in gm.forward(*given))
        return gm.forward

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.relu(causal(q, k, v))

    result = attn_pass.check(program, *heads(), backend=scaled)
    assert [site.verdict for site in result.sites] == ["right"] and result.whole == "WRONG" and not result


@pytest.mark.parametrize("when", ["it compiles", "it runs"])
def test_a_backend_that_fails_is_not_called_wrong_and_is_no_success(when: str) -> None:
    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            raise NotImplementedError("no such kernel")

        return run if when == "it runs" else run()  # type: ignore[no-any-return]

    result = attn_pass.check(causal, *heads(), backend=backend)
    (site,) = result.failed
    assert (site.verdict, site.error, result.whole) == ("FAILS", None, "FAILS") and not result.wrong
    assert "no such kernel" in site.why and "no such kernel" in result.why
    assert not result and result.at_fault and not result.nothing_ran
    assert "1 attention site: 1 FAILS; the whole program: FAILS" in result.summary()


def test_a_backend_that_fails_for_the_rest_of_the_program_is_no_success() -> None:
    def without_relu(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if "relu" in str(gm.graph):
            raise NotImplementedError("no such kernel")
        return gm.forward

    result = attn_pass.check(lambda q, k, v: torch.relu(causal(q, k, v)), *heads(), backend=without_relu)
    assert [site.verdict for site in result.sites] == ["right"] and result.whole == "FAILS" and not result


def test_near_misses_are_not_run_and_say_why() -> None:
    def other_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(0) @ v

    result = attn_pass.check(other_axis, *heads(), backend="eager")
    (site,) = result.sites
    assert site.verdict == "not run" and site.why
    assert "no attention found, 1 near miss; the whole program" in result.summary()


@pytest.mark.parametrize("backend", ["no such thing", 3])
def test_what_is_no_backend_is_an_error(backend: Any) -> None:
    with pytest.raises(OptionError, match="backend"):
        attn_pass.check(causal, *heads(), backend=backend)


def test_a_backend_whose_package_is_missing_is_not_called_wrong() -> None:
    def absent(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise ImportError("Please install this-or-that")

    def relu(x: Tensor) -> Tensor:
        return torch.relu(x)

    for function, inputs in ((causal, heads()), (relu, heads()[:1])):
        with pytest.raises(OptionError, match="backend 'absent' does not run here: Please install this-or-that"):
            attn_pass.check(function, *inputs, backend=absent)


def failing(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    raise NotImplementedError("no such kernel")


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "check_example.py").write_text(
        "import torch\n\ndef model():\n    x = torch.randn(1, 2, 16, 8)\n"
        "    return (lambda q, k, v: (q @ k.mT).softmax(-1) @ v), (x, x, x)\n"
    )
    target = f"{tmp_path / 'check_example.py'}:model"
    shown = CliRunner().invoke(app, ["check", target, "--backend", "eager"])
    assert shown.exit_code == 0 and "1 right" in shown.stdout, shown.output
    stored = CliRunner().invoke(app, ["check", target, "--backend", "eager", "--json"])
    assert json.loads(stored.stdout)["right"] is True
    registry.register_backend(failing, name="fails_always")
    failed = CliRunner().invoke(app, ["check", target, "--backend", "fails_always"])
    assert failed.exit_code == 1 and "1 FAILS" in failed.stdout
    missing = CliRunner().invoke(app, ["check", target, "--backend", "nowhere"])
    assert missing.exit_code == 2 and "unknown backend of torch.compile 'nowhere'" in missing.stderr


def test_a_check_in_which_nothing_ran_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "check_nothing.py").write_text(
        "import torch\n\nx = torch.randn(1, 2, 16, 8)\n\ndef dropped():\n"
        "    return (lambda q, k, v: torch.dropout((q @ k.mT).softmax(-1), 0.5, True) @ v), (x, x, x)\n\n"
        "def two():\n    one, args = dropped()\n"
        "    return (lambda q, k, v: (one(q, k, v), (q @ k.mT).softmax(-1) @ v)), args\n\n"
        "def elsewhere():\n    return (lambda x: torch.dropout(x, 0.5, True)), (x,)\n\n"
        "def without():\n    return torch.relu, (x,)\n"
    )

    def checked(name: str, *more: str) -> tuple[int, str, str]:
        target = f"{tmp_path / 'check_nothing.py'}:{name}"
        shown = CliRunner().invoke(app, ["check", target, "--backend", "eager", *more])
        return shown.exit_code, shown.stderr, shown.stdout

    code, said, table = checked("dropped")
    assert code == 3 and "1 attention site: 1 not run" in table and "it draws random numbers" in table
    assert said == "attn-pass: nothing was checked: the only attention site was not run; the whole program: not run\n"
    code, _, document = checked("dropped", "--json")
    assert code == 3 and json.loads(document)["right"] is False and json.loads(document)["nothing_ran"]
    assert checked("two")[0] == 0  # one of them was run
    code, said, _ = checked("elsewhere")
    assert code == 3 and "no attention was found, and the whole program was not compared" in said
    assert checked("without")[0] == 0


def test_rows_that_are_no_number_eagerly_are_not_compared() -> None:
    """A fully masked row is NaN in eager; what a backend makes of it is no error, and what it makes of others is."""
    mask = torch.zeros(4, 4).masked_fill(torch.tensor([[True], [False], [False], [False]]), float("-inf"))
    q = torch.randn(1, 1, 4, 8)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT + mask).softmax(-1) @ v

    def doubled(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: [x.nan_to_num(7.0) * 2 for x in gm(*args)]

    def filled(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: [x.nan_to_num(7.0) for x in gm(*args)]

    with torch.no_grad():
        assert attn_pass.check(masked, q, q, q, backend=filled).whole == "right"
        assert attn_pass.check(masked, q, q, q, backend=doubled).whole == "WRONG"


def test_where_eager_overflows_nothing_is_compared() -> None:
    def overflowing(q: Tensor) -> Tensor:
        weights = (q.exp() * 1e38 * 1e38) @ q.mT  # infinite in float32, 1e76 in float64
        return weights / weights.amax(-1, keepdim=True)

    with torch.no_grad():
        result = attn_pass.check(overflowing, torch.rand(1, 4, 4) + 1, backend="eager")
    assert (result.whole, bool(result)) == ("not run", False) and "nothing can be compared" in result.why


def test_what_is_0_or_infinite_has_an_error_too() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative_error(zero, zero) == 0.0 and relative_error(one, zero) == 1.0
    infinite = torch.tensor([float("inf"), 2.0])
    assert relative_error(infinite, infinite) == 0.0
    assert math.isnan(relative_error(torch.tensor([float("nan"), 2.0]), infinite))
    assert relative_error(torch.tensor([5.0, 2.0]), torch.tensor([float("nan"), 2.0])) == 0.0


def test_an_eager_result_that_overflows_is_compared_with_nothing() -> None:
    """Float64's is finite there: whatever a backend computes, its error is no larger than eager's."""

    def overflows(q: Tensor) -> Tensor:
        return q.exp() * 1e38 * 1e38

    def zeros(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: [torch.zeros_like(x) for x in gm(*args)]

    assert attn_pass.check(overflows, torch.rand(4, 4), backend=zeros).whole == "not run"


def test_a_wrong_result_that_is_no_number_is_json_all_the_same() -> None:
    def nan(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return lambda *args: [x * math.nan for x in gm(*args)]

    result = attn_pass.check(torch.relu, torch.rand(4), backend=nan)
    assert result.whole == "WRONG"
    assert json.loads(result.to_json(), parse_constant=pytest.fail)["whole_error"] is None


def test_a_folder_with_a_space_is_named_in_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_PASS_VERIFY_DIR", str(folder / "my folder"))
    (site,) = attn_pass.check(causal, *heads(), backend=without_mask).wrong
    assert Path(site.script).is_file()
