"""Models of the census timed, `python -m bench census speed` and `steps`: what is compared, how large, the tables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from against_eager import qkv
from torch import Tensor, nn

from bench.suites.census import speed, steps, tables
from bench.suites.census.dataset import Census, Subject

GOOD = {"ok": True, "rel_l2": 1e-7, "max_abs": 1e-6}
FACTS = {"bench": "speed", "stage": speed.CALLED, "family": "timm", "control": False, "status": "ok"}
COUNTS = {"rewritten": 0, "calls_rewritten": 2, "left": [], "numerics": GOOD}


class Attention(nn.Module):
    def forward(self, q: Tensor, *, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 4).softmax(-1) @ v


def compared(expected: list[Tensor], got: list[Tensor]) -> dict[str, Any]:
    (one,), (other,) = expected, got
    difference = float((one.float() - other.float()).norm() / one.float().norm())
    return {"ok": difference < 1e-4, "rel_l2": difference, "max_abs": 0.0}


def subject() -> Subject:
    def tensors(output: Tensor) -> list[Tensor]:
        return [output]

    q, k, v = qkv()
    census = Census(Path(), SimpleNamespace(tensors=tensors, compare=compared), None)
    return Subject(census, Attention(), (q,), {"k": k, "v": v}, [], deterministic=True)


@pytest.mark.slow
def test_a_model_is_timed_with_stock_twice_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ROUNDS", 2)
    row = speed._timed(speed._in_bfloat16(subject()))
    assert row["status"] == "ok" and row["rewritten"] + len(row["left"]) == 1 and row["numerics"]["ok"]
    both = (row["stock_ms"] + row["A/A_ms"]) / 2
    assert row["speedup"] == pytest.approx(both / row["attn_pass_ms"], rel=0.5)
    assert row["verdict"] in ("faster", "same", "slower")


def test_what_stock_does_not_compile_says_nothing_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not here")

    monkeypatch.setattr(torch, "compile", failing)
    row = speed._timed(subject())
    assert (row["status"], row["error"]) == ("stock does not compile", "RuntimeError: not here")


class Projected(Attention):
    """With a parameter that makes queries, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unused = (nn.Parameter(torch.eye(16)) for _ in range(2))
        self.drop = nn.Dropout(0.5)

    def forward(self, q: Tensor, *, k: Tensor, v: Tensor) -> Tensor:
        return self.drop(super().forward(q @ self.weight, k=k, v=v))


def test_a_training_step_gives_the_loss_and_the_gradients_of_what_it_depends_on() -> None:
    made = subject()
    made.model = Projected()
    assert made.model.weight.size(0) == made.args[0].size(-1)
    trained = steps.Trained.of(made)
    assert made.model.training and not trained.deterministic
    made.model.drop.p = 0.0
    trained = steps.Trained.of(made)
    assert trained.deterministic
    with torch.no_grad():  # as benches time
        loss, gradient = trained.call(made.model)()
    expected = made.model(*made.args, **made.kwargs).square().mean()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, made.model.weight)[0])
    assert float(trained.run(made.model)[1].abs().max()) == pytest.approx(1)  # of what is compared, for all sizes


def test_a_difference_as_large_as_stock_s_is_no_wrong_number() -> None:
    ours, of_stock = ({"ok": False, "rel_l2": error} for error in (2e-3, 1e-3))
    assert speed._no_worse(ours, of_stock)["ok"] and not speed._no_worse({**ours, "rel_l2": 4e-3}, of_stock)["ok"]


def test_recipes_are_enlarged() -> None:
    """A head dim is four times as large, and what is made of its parts; layers, experts and images are as they were."""

    def of_tokens(s: int = 32, b: int = 2) -> tuple[int, int]:
        return s, b

    zoo = SimpleNamespace(
        **{"W": 64, "H": 4, "HD": 16, "V": 128, "S": 32, "B": 2, "_ids": of_tokens, "_padmask": of_tokens},
        WIDTH={"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "ffn_dim": 128},
        COMMON={"num_hidden_layers": 2, "vocab_size": 128, "sliding_window": 16, "num_experts": 4},
        FIX={"a": {"rope_parameters": {"mrope_section": [2, 3, 3]}, "vision.image_size": 64, "text.head_dim": 16}},
    )
    speed.enlarge(zoo)
    assert zoo._ids() == (256, 2)
    assert list(zoo.WIDTH.values()) == [512, 8, 2, 64, 1024]
    assert list(zoo.COMMON.values()) == [2, 1024, 64, 4]
    enlarged = {"rope_parameters": {"mrope_section": [8, 12, 12]}, "vision.image_size": 64, "text.head_dim": 64}
    assert zoo.FIX["a"] == enlarged


def row(name: str, speedup: float, verdict: str) -> dict[str, Any]:
    times = {"stock_ms": 10.0, "A/A_ms": 10.1, "attn_pass_ms": 10.0 / speedup}
    judged = {"speedup": speedup, "speedup_p10": speedup, "noise": 0.03, "verdict": verdict}
    return {**FACTS, **COUNTS, **times, **judged, "name": name}


def test_a_line_a_family_and_the_slowest_first() -> None:
    rows = [row("a", 2.0, "faster"), row("b", 0.98, "same"), row("c", 0.5, "slower")]
    rows.append({**FACTS, "name": "d", "stage": speed.WRITTEN, "status": "unbuildable", "error": "no"})
    text = tables.markdown(rows)
    assert "Float32, calls:" in text and "Unbuildable (1)" in text
    assert "| timm | 3 | 6 | 6 | 1 | 1 | 1 | 0.99 | 0.50 | 2.00 | 0 |" in text
    assert text.index("| c | 10.00 | 10.10 | 20.00 | 0.500 |") < text.index("| b |") < text.index("| a |")
