"""A vision transformer of timm, its attention written out: explained, compiled, compared.

    python examples/timm_vit.py           # ViT-S/16, 4 images of 224 x 224: about a minute on two cores
    python examples/timm_vit.py --small   # a tiny one, without code generation: seconds

timm itself calls scaled_dot_product_attention. The example uses `set_fused_attn(False)`, which gives the code of the
many models that were written before that call existed, or copied from timm before it used the call.
"""

from __future__ import annotations

import torch
import typer
from side_by_side import compare
from without_torchvision import import_timm

import attn_pass


def main(small: bool = False) -> float:
    """Returns the error of the pass against eager."""
    timm = import_timm()
    timm.layers.set_fused_attn(False)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", num_classes=10, **(sizes if small else {})).eval()
    images = torch.randn(4, 3, *([32, 32] if small else [224, 224]))

    with torch.no_grad():
        print(attn_pass.explain(model, images))
        backend = attn_pass.wrap("aot_eager", choose="fused") if small else attn_pass.backend
        fast = torch.compile(model, backend=backend)
        ways = {"eager": lambda: model(images)}
        if not small:
            stock = torch.compile(model)
            ways["torch.compile"] = lambda: stock(images)
        ways["attn_pass"] = lambda: fast(images)
        return compare(ways, rounds=2 if small else 5)


if __name__ == "__main__":
    typer.run(main)
