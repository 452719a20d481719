"""Packages of transformers' models load in a process that has torch alone, or say what they need."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_pass
from attn_pass.entries import aot_compile as entry
from attn_pass.errors import AttnPassWarning

transformers = pytest.importorskip("transformers")

BARE = """
    import sys
    import torch

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("transformers", "attn_pass"):
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Missing())
    run = torch._inductor.aoti_load_package("model.pt2")
    ids, mask, wanted = torch.load("data.pt")
    torch.testing.assert_close(run(input_ids=ids, attention_mask=mask), wanted, rtol=1e-4, atol=1e-5)
    assert not {"transformers", "attn_pass"} & set(sys.modules)
"""


class Encoder(torch.nn.Module):
    """The model of docs/howto/huggingface.md."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def bert() -> tuple[Any, dict[str, torch.Tensor]]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, vocab_size=50)
    ids = torch.randint(0, 50, (2, 16))
    mask = (torch.arange(16) < torch.tensor([[16], [9]])).long()
    return transformers.BertModel(config).eval(), {"input_ids": ids, "attention_mask": mask}


@pytest.mark.slow
def test_a_package_that_returns_tensors_loads_where_there_is_nothing_but_torch(tmp_path: Path) -> None:
    model, inputs = bert()
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", AttnPassWarning)
        attn_pass.aot_compile(Encoder(model), (), inputs, package_path=tmp_path / "model.pt2", inductor_configs=quick)
    with torch.no_grad():
        torch.save((*inputs.values(), Encoder(model)(**inputs)), tmp_path / "data.pt")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BARE)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_package_that_returns_a_type_of_a_library_says_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "_package", lambda *_: "model.pt2")  # the types are those of the exported program
    model, inputs = bert()
    with pytest.warns(AttnPassWarning, match=r"import transformers.modeling_outputs`.*wrap the model") as caught:
        attn_pass.aot_compile(model, (), inputs)
    (warning,) = [w for w in caught if issubclass(w.category, AttnPassWarning)]
    assert "BaseModelOutputWithPooling" in str(warning.message) and warning.filename == __file__
