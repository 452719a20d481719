"""Calls whose results' shapes the wheel's own fake kernels and the stand-in's must agree on."""

from __future__ import annotations

from typing import Any

Case = tuple[str, tuple[tuple[int, ...], ...], dict[str, Any]]
_FUSION = ("npu_fusion_attention", "npu_fusion_attention_v3")
_BY_LAYOUT = {
    "BNSD": ((2, 8, 6, 64), (2, 2, 9, 64), (2, 2, 9, 64)),
    "BSND": ((2, 6, 8, 64), (2, 9, 2, 64), (2, 9, 2, 64)),
    "BSH": ((2, 6, 512), (2, 9, 128), (2, 9, 128)),
    "SBH": ((6, 2, 512), (9, 2, 128), (9, 2, 128)),
}
SHAPES: dict[str, Case] = {
    f"{name} {layout}": (name, shapes, {"head_num": 8, "input_layout": layout})
    for name in _FUSION
    for layout, shapes in _BY_LAYOUT.items()
} | {
    f"inference {layout}": (
        "npu_fused_infer_attention_score",
        _BY_LAYOUT[layout.partition("_")[0]],
        {"num_heads": 8, "num_key_value_heads": 2, "input_layout": layout},
    )
    for layout in ("BNSD", "BSND", "BSH", "BNSD_BSND")
}
