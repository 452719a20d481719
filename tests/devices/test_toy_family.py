"""A family of devices that a package registers: it decides, emits and explains as the built-in ones do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from against_eager import qkv, same
from torch import Tensor

import attn_pass
from attn_pass.devices import registry
from attn_pass.errors import OptionError
from attn_pass.targets.registry import all_targets

HERE = Path(__file__).parent
TOY = {"device": "Toy 1"}


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The file as a package that pip installed: on the path, with the entry point in its metadata."""
    site = tmp_path_factory.mktemp("site")
    (site / "toy_family.py").write_text((HERE / "toy_family.py").read_text())
    metadata = site / "toy_family-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{registry.GROUP}]\ntoy = toy_family:Toy\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        registry.families.cache_clear()
        yield
    registry.families.cache_clear()


def test_it_can_be_read_at_once() -> None:
    lines = (HERE / "toy_family.py").read_text().splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 120


def by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    if q.size(1) != k.size(1):
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = q @ k.mT * 0.3
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return scores.softmax(-1) @ v


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    near = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).triu(-3)
    return (q @ k.mT).masked_fill(~near, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [{}, {"q_len": 31, "kv_len": 67}, {"heads": 6, "kv_heads": 2}, {"batch": 1, "dim": 1}]
)
def test_what_it_emits_is_the_attention(sizes: dict[str, int], causal: bool) -> None:
    with torch.no_grad():
        report = same(lambda q, k, v: by_hand(q, k, v, causal), *qkv(**sizes), rewritten=1, **TOY)
    assert [site.target for site in report.sites] == ["toy_attention"]


def test_it_decides_by_its_own_cost() -> None:
    with torch.no_grad():
        (site,) = attn_pass.explain(by_hand, *qkv(q_len=512, kv_len=512), attn_pass_options=TOY).sites
    assert site.target == "toy_attention" and site.predicted_us["toy_attention"] < site.predicted_us["leave"]
    assert site.rates["device"] == "Toy 1"


@pytest.mark.parametrize(
    ("program", "dtype", "grad", "reason"),
    [
        (windowed, torch.float32, False, "no mask but a causal one"),
        (by_hand, torch.bfloat16, False, "toy::attention takes float32, float16, not bfloat16"),
        (by_hand, torch.float32, True, "no backward"),
    ],
)
def test_it_says_why_not(program: object, dtype: torch.dtype, grad: bool, reason: str) -> None:
    inputs = qkv(dtype=dtype, grad=grad)
    with torch.set_grad_enabled(grad):
        (site,) = attn_pass.explain(program, *inputs, attn_pass_options={**TOY, "choose": "fused"}).sites
    assert site.outcome == "left" and reason in site.refusals["toy_attention"]


def test_no_package_holds_an_operator_in_python() -> None:
    class Step(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return by_hand(q, k, v)

    (site,) = attn_pass.explain(Step(), *qkv(), attn_pass_options={**TOY, "choose": "fused"}, attn_pass_aot=True).sites
    assert "runs without Python" in site.refusals["toy_attention"]


def test_other_devices_know_nothing_of_it() -> None:
    with torch.no_grad():
        (site,) = attn_pass.explain(by_hand, *qkv()).sites
    assert site.target != "toy_attention" and "toy_attention" in {t.name for t in all_targets()}


def test_a_device_that_nobody_knows_is_told_what_there_is() -> None:
    with pytest.raises(OptionError, match="Toy 1"):
        attn_pass.explain(by_hand, *qkv(), attn_pass_options={"device": "Toy 2"})
