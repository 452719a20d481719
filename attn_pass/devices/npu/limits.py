"""The limits of Ascend's attention operators, for calls that a program has and for calls that this pass makes.

They are those of the pages of ``npu_fusion_attention`` and ``npu_fused_infer_attention_score``. Where torch_npu's C++
dispatch (op-plugin at 517f2e7) is narrower than the pages, the pass keeps to the narrower number (`WIDEST`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_pass.devices.npu.generations import INFERENCE, TRAINING, TRAINING_V1

HALF = (torch.float16, torch.bfloat16)
_BYTES = (torch.bool, torch.uint8)

HEADS = 256
GROUP = 64  # query heads a KV head, in inference
HIDDEN = 65535  # heads times head dim with positions before heads, in inference
KEYS_OF_ONE_ROW = 262144  # in inference
ODD_BATCHES = 128  # in inference, for several rows, if the head dim is not a multiple of 32 bytes
WIDEST = 512  # of a head, by the dispatch; the page of the training operator says 768


@dataclass(frozen=True)
class Limits:
    """Of one operator. ``masks`` are the shapes of full-size ones by letters: batch, heads, rows, keys; "1" is 1."""

    dtypes: tuple[torch.dtype, ...]
    head_dim: int
    batch: int
    length: int
    mask_dtypes: tuple[torch.dtype, ...]
    masks: tuple[str, ...]
    compressed: tuple[str, ...]  # shapes of the mask of modes 2 to 4: "s" is 2048
    inner_precise: tuple[int, ...]


_TRAINING = Limits(
    *((torch.float32, *HALF), 768, 2 << 20, 1 << 20, _BYTES, ("bhik", "b1ik", "11ik", "ik"), ("ss",)),
    inner_precise=(0, 2),
)
LIMITS = {
    INFERENCE: Limits(
        *(HALF, 512, 65536, 20971520, (*_BYTES, torch.int8), ("1ik", "b1ik", "11ik", "ik"), ("ss", "1ss", "11ss")),
        inner_precise=(0, 1, 2, 3),
    ),
    TRAINING: _TRAINING,
    TRAINING_V1: _TRAINING,
}
"""By the operator's name."""
