"""What a report says of `nn.MultiheadAttention`: its masks, however they are given, and the shapes of its attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attn_pass

X, MEMORY = torch.randn(2, 16, 64), torch.randn(2, 24, 64)
PADDED = torch.arange(24) >= torch.tensor([[24], [10]])
LATER = torch.ones(16, 16, dtype=torch.bool).triu(1)
MADE = nn.Transformer.generate_square_subsequent_mask(16)

# Given to the module beside query, key and value: the mask of the report, and how many keys there are.
FORMS: dict[str, tuple[dict[str, Any], str, int]] = {
    "no mask": ({}, "none", 16),
    "the weights returned": ({"need_weights": True}, "none", 16),
    "padding": ({"key_padding_mask": PADDED}, "padding", 24),
    "padding of its own keys": ({"key_padding_mask": PADDED[:, :16]}, "padding", 16),
    "is_causal": ({"attn_mask": LATER, "is_causal": True}, "causal", 16),
    "a mask that was given": ({"attn_mask": LATER}, "dense", 16),
    "torch's causal mask": ({"attn_mask": MADE}, "additive", 16),
    "a bias for each head": ({"attn_mask": torch.randn(8, 16, 24)}, "additive", 24),
    "both": ({"attn_mask": LATER, "key_padding_mask": PADDED[:, :16]}, "dense and padding", 16),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_masks_and_shapes(name: str, training: bool) -> None:
    given, mask, keys = FORMS[name]
    module = nn.MultiheadAttention(64, 4, batch_first=True).train(training)
    over = X if keys == 16 else MEMORY
    with torch.set_grad_enabled(training):
        settings = {"need_weights": False, **given}
        report = attn_pass.explain(module, X, over, over, attn_pass_options={"choose": "fused"}, **settings)
    (site,) = report.sites
    assert (site.form, site.mask, site.outcome) == ("nn.MultiheadAttention", mask, "rewritten"), site.reason
    assert site.shapes == {"query": (2, 4, 16, 16), "key": (2, 4, keys, 16), "value": (2, 4, keys, 16)}
    assert site.where == "in MultiheadAttention" and site.dtype == "float32"
    row = " ".join(str(report).split())
    assert "nn.MultiheadAttention" in row and (mask in row or mask == "none")


class Causal(nn.Module):
    """Makes its own mask, as decoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4)  # (L, B, E)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.size(0), x.size(0), dtype=torch.bool).triu(1)
        result: Tensor = self.attention(x, x, x, attn_mask=later, need_weights=False)[0]
        return result


def test_a_mask_made_in_the_model_is_named_and_the_module_too() -> None:
    with torch.no_grad():
        (site,) = attn_pass.explain(Causal().eval(), X.transpose(0, 1), attn_pass_options={"choose": "fused"}).sites
    assert (site.mask, site.module, site.shapes["query"]) == ("causal", "attention", (2, 4, 16, 16))
    assert site.formula["keep"] == "j <= i"


def test_a_site_that_is_left_has_its_mask_and_shapes() -> None:
    module = nn.MultiheadAttention(64, 4, batch_first=True, dropout=0.1).train()
    settings = {"key_padding_mask": PADDED, "need_weights": False}
    options = {"targets": ("sdpa",)}
    (site,) = attn_pass.explain(module, X, MEMORY, MEMORY, attn_pass_options=options, **settings).sites
    assert site.outcome == "left" and "dropout" in str(site.refusals) + site.reason
    assert (site.mask, site.shapes["key"]) == ("padding", (2, 4, 24, 16))
    (site,) = attn_pass.explain(nn.TransformerEncoderLayer(64, 4, batch_first=True).eval(), X).sites
    assert site.shapes["query"] == (2, 4, 16, 16)
