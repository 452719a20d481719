"""The tables of `docs/cuda.md`: which kernel each device gets for common attentions, and what each kernel asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from named import linked
from torch import Tensor

import attn_pass
from attn_pass.devices.registry import families
from attn_pass.report.site import SiteReport
from attn_pass.targets.kernel_rules import ALWAYS, NEVER, Rule

DEVICES = ("H200", "A100", "L4", "B200")
NEG_INF = float("-inf")


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.size(1) // k.size(1)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return (q @ k.mT * q.size(-1) ** -0.5).softmax(-1) @ v


def masked(left: int | None, right: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Keys from ``i + S - L - left`` to ``i + S - L + right``."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.size(-2), device=q.device)[:, None] + k.size(-2) - q.size(-2)
        j = torch.arange(k.size(-2), device=q.device)
        keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device)
        keep = keep if left is None else keep & (j >= i - left)
        keep = keep if right is None else keep & (j <= i + right)
        return (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~keep, NEG_INF).softmax(-1) @ v

    return program


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.empty(1, q.size(1), q.size(2), k.size(2), dtype=q.dtype, device=q.device).normal_()
    return (q @ k.mT + bias).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.empty(q.size(0), 1, 1, k.size(2), device=q.device).normal_() > 0
    return (q @ k.mT).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(2), device=q.device)[:, None], torch.arange(k.size(2), device=q.device)
    scores = 50.0 * torch.tanh(q @ k.mT * q.size(-1) ** -0.5 / 50.0)
    return scores.masked_fill(j > i, NEG_INF).softmax(-1) @ v


def prefixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.size(2), device=q.device)[:, None], torch.arange(k.size(2), device=q.device)
    return (q @ k.mT * q.size(-1) ** -0.5).masked_fill((j > i) & (j >= 64), NEG_INF).softmax(-1) @ v


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The rows stand at a position that is known when the program runs."""
    position = torch.randint(k.size(2), (), device=q.device)
    i, j = torch.arange(q.size(2), device=q.device)[:, None], torch.arange(k.size(2), device=q.device)
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=j <= i + position)


@dataclass(frozen=True)
class Case:
    """One row: sizes are B, H, Hkv, L, S, D."""

    name: str
    program: Callable[[Tensor, Tensor, Tensor], Tensor]
    sizes: tuple[int, int, int, int, int, int]
    best: str = ""  # what is known to be best on Hopper, by whom
    dtype: torch.dtype = torch.bfloat16
    training: bool = False
    growing: bool = False


_PAPER = "[FlashAttention-3](https://arxiv.org/abs/2407.08608), H100"
_BLOG = 'FlexAttention with `BACKEND="FLASH"`: 1.2 to 3.2 times its Triton kernels (PyTorch\'s blog)'
_DECODING = (
    "[TileOPs #2136](https://github.com/tile-ai/TileOPs/pull/2136), H200: ahead of FA3 and FlashInfer in 17 of 17"
)
CASES = (
    Case("prefill", plain, (4, 32, 32, 2048, 2048, 128), f"FA3 625, cuDNN 617, FA2 362 TFLOP/s ({_PAPER})"),
    Case(
        "prefill, causal",
        masked(None, 0),
        (4, 32, 32, 2048, 2048, 128),
        f"FA3 521, cuDNN 484, FA2 298 TFLOP/s ({_PAPER}); cuDNN 0.82 of flash on A100, 0.88 on an RTX PRO 6000 "
        "([transformers #48163](https://github.com/huggingface/transformers/pull/48163))",
    ),
    Case(
        "training, causal",
        masked(None, 0),
        (4, 32, 32, 2048, 2048, 64),
        f"backward, D 128, not causal: FA3 501, cuDNN 465, FA2 291 TFLOP/s ({_PAPER})",
        training=True,
    ),
    Case("float32", plain, (4, 32, 32, 2048, 2048, 64), dtype=torch.float32),
    Case(
        "head dim 256",
        plain,
        (2, 16, 16, 2048, 2048, 256),
        f"causal: FA3 537, cuDNN 450, FA2 278 TFLOP/s ({_PAPER})",
    ),
    Case(
        "ViT",
        plain,
        (64, 12, 12, 197, 197, 64),
        "576 rows, D 64, H100: FA2 41 us, cuDNN 48 us ([sglang #30090](https://github.com/sgl-project/sglang/pull/30090))",
    ),
    Case("diffusion, cross", plain, (2, 8, 8, 4096, 77, 40)),
    Case("sliding window of 4096", masked(4096, 0), (1, 32, 32, 32768, 32768, 128), _BLOG),
    Case("chunked prefill", masked(None, 0), (1, 32, 32, 512, 8192, 128)),
    Case("bias over heads", biased, (8, 12, 12, 512, 512, 64)),
    Case("padding, finite fill", padded, (8, 12, 12, 512, 512, 64)),
    Case("soft cap, causal", capped, (4, 32, 32, 4096, 4096, 128), _BLOG),
    Case(
        "prefix of 64, training",
        prefixed,
        (8, 16, 16, 704, 704, 64),
        "not cuDNN: NaN gradients ([pytorch #196678](https://github.com/pytorch/pytorch/issues/196678))",
        training=True,
    ),
    Case("decode, 1 row", plain, (8, 32, 8, 1, 32768, 128), _DECODING),
    Case(
        "decode, 1 row, growing",
        plain,
        (8, 32, 8, 1, 32768, 128),
        "not cuDNN: a plan for each length ([FunASR #3705](https://github.com/modelscope/FunASR/pull/3705))",
        growing=True,
    ),
    Case(
        "decode, 8 rows",
        plain,
        (1, 32, 8, 8, 131072, 128),
        "cuDNN reads at 7 % of the memory's rate (H200, cudnn-frontend's benchmark)",
    ),
    Case("static cache, 1 row", cached, (8, 32, 8, 1, 4096, 128)),
    Case("static cache, chunk of a prompt", cached, (1, 32, 8, 512, 16384, 128)),
    Case("call, grouped heads repeated", repeated, (4, 32, 8, 8192, 8192, 128)),
    Case("shared keys (seed S4)", plain, (1000, 4, 4, 1, 2048, 32), dtype=torch.float16),
)


def decided(case: Case, device: str) -> SiteReport:
    """What the site of a case becomes on a device, told from tensors without memory."""
    batch, heads, kv_heads, q_len, kv_len, dim = case.sizes
    shared = 1 if case.name.startswith("shared") else batch
    with torch.device("meta"):
        q = torch.empty(batch, heads, q_len, dim, dtype=case.dtype, requires_grad=case.training)
        k, v = (
            torch.empty(shared, kv_heads, kv_len, dim, dtype=case.dtype, requires_grad=case.training) for _ in range(2)
        )
    for tensor in (k, v):
        if case.growing:
            torch._dynamo.mark_dynamic(tensor, 2)
    with torch.set_grad_enabled(case.training):
        (site,) = attn_pass.explain(case.program, q, k, v, attn_pass_options={"device": device}).sites
    return site


def decisions() -> Iterator[str]:
    """Rows of the table of decisions."""
    yield f"| attention | B, H, Hkv, L, S, D | dtype | {' | '.join(DEVICES)} | known to be best on Hopper |"
    yield "|---|---|---|" + "---|" * len(DEVICES) + "---|"
    for case in CASES:
        cells = [decided(case, device).target or "left" for device in DEVICES]
        sizes = ", ".join(map(str, case.sizes))
        yield f"| {case.name} | {sizes} | {str(case.dtype)[6:]} | {' | '.join(cells)} | {case.best or 'not known'} |"


def rules() -> Iterator[str]:
    """Rows of the table of rules."""
    yield "| kernel | rule | checked by torch's call | source | known wrong results |"
    yield "|---|---|---|---|---|"
    kernels = [row for family in families() if not family.is_runtime for row in family.kernel_rules.items()]
    for kernel, of in kernels:
        for rule in of.rules:
            cells = (f"`{kernel}`", rule.name, _checked(rule), linked(rule.source), linked(rule.known_wrong))
            yield f"| {' | '.join(cells)} |"


def _checked(rule: Rule) -> str:
    first, until = rule.checked
    if rule.checked in (ALWAYS, NEVER):
        return "yes" if rule.checked == ALWAYS else "no"
    return f"from {first[0]}.{first[1]}" if until == ALWAYS[1] else f"before {until[0]}.{until[1]}"
