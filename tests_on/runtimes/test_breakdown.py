"""`python -m bench breakdown`: the profiles of ONNX Runtime and of OpenVINO have products, attention and a rest.

`make test-runtimes` runs it, in an environment with both.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")

from bench.harness.programs import Setting
from bench.suites import breakdown, peers


@pytest.mark.parametrize("name", ["BERT, 2 layers, 2 x 128, padded", "GPT-2, 2 layers, 1 x 128, bfloat16"])
def test_a_model_is_broken_down(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [peers.OPENVINO] if "bfloat16" in name else [peers.ORT, peers.OPENVINO]
    monkeypatch.setattr(breakdown, "ways_of", lambda program: ways)
    threads = torch.get_num_threads()
    with torch.no_grad():
        rows = list(breakdown.measured(name, Setting(rounds=3, quick=True)))
    torch.set_num_threads(threads)
    assert [row["way"] for row in rows] == ways
    for row in rows:
        assert row["status"] == "ok", row
        assert row["products"] > 0 and row["attention"] > 0 and row["products"] + row["attention"] < row["all"]
