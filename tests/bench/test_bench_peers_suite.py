"""`python -m bench peers-suite` on a small file in the format of PyTorch's test: what it collects and detects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench.__main__ import app
from bench.suites import peers_suite
from bench.suites.peer_forms import Form, NotRun, SuiteError, collect, load

SUITE = """
import functools, unittest
import torch

def run_and_get_code(function, *args):
    raise AssertionError("the peers' own check must not run")

class Template(unittest.TestCase):
    use_static_shapes = True

    def _check_common(self, function, args1=None, contains=True, has_dropout=False, check_train=True):
        raise AssertionError("the peers' own check must not run")

    def _test_plain(self, dtype=torch.float):
        def attention(q, k, v):
            return (q @ k.transpose(-2, -1)).softmax(-1) @ v

        self._check_common(attention, args1=[torch.randn(3, 2, 8, 16, dtype=dtype) for _ in range(3)])

    def _test_dropped(self):
        def attention(q, k, v, training):
            return torch.nn.functional.dropout((q @ k.transpose(-2, -1)).softmax(-1), 0.4, training) @ v

        self._check_common(attention, has_dropout=True)
        self._check_common(attention, [torch.randn(1, 2, 8, 16)] * 3, has_dropout=True, check_train=False)

    def _test_other_axis(self):
        @torch.compile(fullgraph=True)
        def attention(q, k, v):
            weights = (q @ k.transpose(-2, -1)).softmax(-2)
            return weights @ v, weights

        result, (code,) = run_and_get_code(attention, *(torch.randn(2, 2, 8, 16) for _ in range(3)))
        self.assertNotIn("fused", code)

    def _test_elsewhere(self):
        def attention(q, k, v):
            return (q @ k.transpose(-2, -1)).softmax(-1) @ v

        self._check_common(attention, [torch.randn(2, 2, 8, 16, device="cuda") for _ in range(3)], check_train=False)

    def _test_skipped(self):
        self.skipTest("not today")

class Cpu(Template):
    device = "cpu"
    test_plain_cpu = Template._test_plain
    test_plain_half_cpu = functools.partialmethod(Template._test_plain, dtype=torch.bfloat16)
    test_dropped_cpu = Template._test_dropped
    test_other_axis_cpu = Template._test_other_axis
    test_skipped_cpu = Template._test_skipped

class CpuDynamic(Cpu):
    use_static_shapes = False
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.py"
    path.write_text(SUITE)
    return path


def forms_of(suite: Path) -> tuple[list[Form], list[NotRun]]:
    return collect(load(suite), "cpu")


def form(suite: Path, name: str, static: bool = True) -> Form:
    return next(f for f in forms_of(suite)[0] if f.test == name and f.static is static)


def test_every_call_is_a_form_with_its_facts(suite: Path) -> None:
    forms, others = forms_of(suite)
    facts = {(f.test, f.number, f.static, f.named) for f in forms}
    calls = [("plain", 1), ("plain_half", 1), ("dropped", 1), ("dropped", 2), ("other_axis", 1)]
    assert facts == {(*c, static, True) for c in calls for static in (True, False)} | {
        ("elsewhere", 1, static, False) for static in (True, False)
    }
    assert [(o.test, o.static) for o in others] == [("skipped", True), ("skipped", False)]
    dropped = [f for f in forms if f.test == "dropped" and f.static]
    assert [(f.takes_training, f.draws, f.trains) for f in dropped] == [(True, True, True), (True, True, False)]
    assert form(suite, "plain_half").inputs[0].dtype == torch.bfloat16
    assert form(suite, "elsewhere").inputs[0].device.type == "cpu"
    assert torch.compile.__module__ == "torch"  # the stand-in is gone


@pytest.mark.parametrize(("static", "training"), [(True, False), (False, True)])
def test_a_right_form_is_fused(suite: Path, static: bool, training: bool) -> None:
    row = peers_suite.check(form(suite, "plain", static), training)
    assert (row["verdict"], row["became"]) == (peers_suite.FUSED, "sdpa")
    assert 0 < row["error"] < 1e-5


def test_a_refusal_is_known_or_counts(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = peers_suite.check(form(suite, "other_axis"), False)
    assert (row["verdict"], row["became"]) == (peers_suite.NOT_FUSED, "left")
    known = peers_suite.Refusal("other_axis", "the softmax runs over another dimension", "it does")
    monkeypatch.setattr(peers_suite, "REFUSALS", (known,))
    assert peers_suite.check(form(suite, "other_axis"), False)["verdict"] == peers_suite.REFUSED


def test_numbers_that_are_drawn_are_compared_from_one_seed(suite: Path) -> None:
    row = peers_suite.check(form(suite, "dropped"), True)
    assert row["verdict"] == peers_suite.NOT_FUSED and row["error"] < 1e-6


def off_by(amount: float, which: str) -> Callable[..., Any]:
    """In place of `attn_pass.wrap`: a backend that is a little wrong."""

    def wrap(*_: Any, **__: Any) -> Any:
        def backend(gm: Any, inputs: Any) -> Any:
            def wrong(*args: Any) -> Any:
                (out,) = gm(*args)
                return [out + amount if which == "result" else out + amount * (out - out.detach())]

            return wrong

        return backend

    return wrap


@pytest.mark.parametrize("which", ["result", "gradient"])
def test_a_wrong_number_is_wrong(suite: Path, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    monkeypatch.setattr("attn_pass.wrap", off_by(1e-3, which))
    row = peers_suite.check(form(suite, "plain"), True)
    assert row["verdict"] == peers_suite.WRONG and which in row["reason"]
    monkeypatch.setattr("attn_pass.wrap", off_by(0.0, which))
    assert peers_suite.check(form(suite, "plain"), True)["verdict"] == peers_suite.NOT_FUSED  # there is no site


def test_the_command_ends_with_one_where_something_is_wrong(suite: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    fine = run(app, ["peers-suite", str(suite), "--only", "plain", "--json", str(tmp_path / "out.json")])
    assert fine.exit_code == 0, fine.output
    assert "plain_half 1" in (tmp_path / "out.md").read_text()
    assert run(app, ["peers-suite", str(suite), "--only", "other_axis"]).exit_code == 1
    assert run(app, ["peers-suite", str(tmp_path / "none.py")]).exit_code == 2


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    path.write_text("class Other: ...\n")
    with pytest.raises(SuiteError, match="_check_common"):
        collect(load(path), "cpu")
