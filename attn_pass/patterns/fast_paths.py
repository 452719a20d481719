"""What torch's fused inference kernels of an encoder layer and of its attention compute, in plain operators.

``native_multi_head_attention_cpu``, ``native_multi_head_attention_cuda`` and ``transformer_encoder_layer_forward`` in
aten/src/ATen/native/transformers: not in tensors of several lengths, which no graph holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attn_pass.graph.expand import CannotExpand

aten = torch.ops.aten
_OF_ROWS, _OF_KEYS, _OF_BOTH = 0, 1, 2  # mask types: (L, S), (B, S), (B, H, L, S)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
    *,
    calls_sdpa: Callable[[torch.device], bool],
) -> tuple[Tensor, Tensor]:
    """``torch._native_multi_head_attention`` of (B, L, E) tensors: its result, and the weights where they are needed.

    A fully masked row is NaN. Some devices' kernel calls ``scaled_dot_product_attention`` (``calls_sdpa``) where it
    takes no mask and a fused kernel would run, and else writes the attention out, which without a mask is the same.
    """
    batch, length, _ = query.shape
    dim = embed_dim // num_head
    is_self = query is key and key is value
    if is_self:
        packed = aten.chunk.default(aten.linear.default(query, qkv_weight, qkv_bias), 3, -1)
    else:
        weights, biases = (aten.chunk.default(x, 3) for x in (qkv_weight, qkv_bias))
        packed = [aten.linear.default(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
    q, k, v = (aten.transpose.int(aten.view.default(x, [batch, length, num_head, dim]), 1, 2) for x in packed)
    if calls_sdpa(query.device) and is_self and mask is None and not need_weights and dim % 8 == 0:
        context, weights = aten.scaled_dot_product_attention.default(q, k, v), query
    else:
        context, weights = _attended(q, k, v, mask, mask_type)
    context = aten.reshape.default(aten.transpose.int(context, 1, 2), [batch, length, embed_dim])
    if average_attn_weights:
        weights = aten.div.Tensor(aten.sum.dim_IntList(weights, [1]), num_head)
    return aten.linear.default(context, proj_weight, proj_bias), weights


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mask_type: int | None) -> tuple[Tensor, Tensor]:
    scores = aten.matmul.default(aten.mul.Tensor(q, q.shape[-1] ** -0.5), aten.transpose.int(k, -2, -1))
    if mask is not None:
        scores = aten.masked_fill.Scalar(scores, _as_boolean(mask, mask_type), float("-inf"))
    weights = aten.softmax.int(scores, -1)
    return aten.matmul.default(weights, v), weights


def _as_boolean(mask: Tensor, mask_type: int | None) -> Tensor:
    """True where a score is masked, to be broadcast to (B, H, L, S). The kernels take any number but 0 for True."""
    if mask_type not in (_OF_ROWS, _OF_KEYS, _OF_BOTH):
        raise CannotExpand(f"a mask of type {mask_type}")
    if mask.dtype != torch.bool:
        mask = aten.ne.Scalar(mask, 0)
    return aten.unsqueeze.default(aten.unsqueeze.default(mask, 1), 1) if mask_type == _OF_KEYS else mask


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
    *,
    calls_sdpa: Callable[[torch.device], bool],
) -> Tensor:
    """``torch._transformer_encoder_layer_fwd`` of a (B, L, E) tensor."""

    def normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return aten.layer_norm.default(x, [embed_dim], weight, bias, eps)  # type: ignore[no-any-return]

    x = normalised(src, norm_weight_1, norm_bias_1) if norm_first else src
    weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    attended = attention(x, x, x, embed_dim, num_heads, *weights, mask, False, False, mask_type, calls_sdpa=calls_sdpa)[
        0
    ]
    x = aten.add.Tensor(attended, src)
    if not norm_first:
        x = normalised(x, norm_weight_1, norm_bias_1)
    rows = aten.reshape.default(normalised(x, norm_weight_2, norm_bias_2) if norm_first else x, [-1, embed_dim])
    # The operator itself: which approximation of GELU it takes depends on the device.
    inner = aten._addmm_activation.default(ffn_bias_1, rows, aten.t.default(ffn_weight_1), use_gelu=use_gelu)
    inner = aten.addmm.default(ffn_bias_2, inner, aten.t.default(ffn_weight_2))
    x = aten.add.Tensor(aten.view.default(inner, list(x.shape)), x)
    return x if norm_first else normalised(x, norm_weight_2, norm_bias_2)
