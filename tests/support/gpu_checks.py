"""What torch asks of a call before a fused kernel of Intel's, AMD's or Apple's GPUs gets it, written down once more.

From torch's sources (`use_overrideable_xpu` in mkldnn/xpu/Attention.cpp, `can_use_flash_attention` and
`can_use_mem_efficient_attention` in transformers/cuda/sdp_utils.cpp as they are built for ROCm, and
`_scaled_dot_product_attention_math_mps` in mps/operations/Attention.mm) and not from `attn_pass.devices`, so that each
checks the other. They look at tensors as torch does: their strides, dtypes and whether they need gradients.

This says that a kernel gets a call, not that it computes it.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import attn_pass

HALF = (torch.float16, torch.bfloat16)
CALL = torch.ops.aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Handed:
    """The arguments of one call of torch's, as they are when it is made."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """Whether a backward may follow."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.operands)


class _Recorder(torch.fx.Interpreter):
    """Runs a graph, and keeps the arguments of its calls of torch's attention."""

    def __init__(self, graph: torch.fx.GraphModule, calls: list[Handed]) -> None:
        super().__init__(graph)
        self.calls = calls

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (CALL, F.scaled_dot_product_attention):
            self.calls.append(Handed(*args, **kwargs))
        return super().call_function(target, args, kwargs)


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Without the warning that the program runs elsewhere than it was decided for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", attn_pass.AttnPassWarning)
        yield


@dataclass
class HandedOver:
    """The calls of a program as it is rewritten for a device, the report of its site, and what it computes here."""

    calls: list[Handed]
    site: attn_pass.SiteReport
    result: Tensor | None = None


def handed_over(
    program: Callable[..., Tensor], inputs: list[Tensor], devices: Iterable[str], **options: Any
) -> dict[str, HandedOver]:
    """What becomes of the program by device. Dynamo traces it once for all of them."""
    found: dict[str, HandedOver] = {}

    def rewritten(graph: torch.fx.GraphModule, examples: Sequence[Any], device: str) -> Callable[..., Any]:
        calls: list[Handed] = []

        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            return _Recorder(graph, calls).run

        given = {"device": device, "choose": "fused", "on_error": "raise", **options}
        with attn_pass.record() as report:
            run = attn_pass.wrap(backend, **given)(copy.deepcopy(graph), examples)
        (site,) = report.sites
        found[device] = HandedOver(calls, site)
        return run

    def each(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        runs = {device: rewritten(graph, examples, device) for device in devices}

        def run(*args: Any) -> Any:
            for device, of_device in runs.items():
                results = of_device(*args)
                found[device].result = results[0]
            return results

        return run

    torch._dynamo.reset()
    with torch.set_grad_enabled(any(x.requires_grad for x in inputs)), _unwarned():
        torch.compile(program, backend=each)(*inputs)
    return found


# ---------------------------------------------------------------- the checks that several kernels share


def _valid(c: Handed) -> Iterator[str]:
    """``validate_sdpa_input`` in transformers/attention.cpp, whose failures are errors."""
    if len({x.dtype for x in c.operands}) > 1:
        yield "dtypes differ"
    if c.attn_mask is not None and c.attn_mask.dtype not in (torch.bool, torch.float32, c.query.dtype):
        yield f"a mask of {c.attn_mask.dtype}"
    if c.attn_mask is not None and c.is_causal:
        yield "a mask beside is_causal"


def _shapes(c: Handed, *, grouped: bool) -> Iterator[str]:
    """``check_tensor_shapes``, ``check_batch_size_and_num_heads_dense``, ``check_nonzero_sequence_lengths_dense``."""
    if any(x.dim() != 4 for x in c.operands):
        yield "rank"
        return
    batches, heads = zip(*((x.size(0), x.size(1)) for x in c.operands))
    if len(set(batches)) > 1:
        yield "batch sizes differ"
    in_groups = heads[1] == heads[2] and heads[1] > 0 and heads[0] % heads[1] == 0
    if not (in_groups if grouped and c.enable_gqa else len(set(heads)) == 1):
        yield f"heads {heads}"
    if 0 in (c.query.size(2), c.key.size(2)):
        yield "a length of 0"


def _strides(c: Handed, *, ignore_one: bool = False) -> Iterator[str]:
    """``check_last_dim_stride_equals_1_dense``, of masks too, as on all devices but the CPU."""
    dense = all(x.stride(-1) == 1 for x in c.operands)
    if not (dense or (ignore_one and c.query.size(-1) == 1)):
        yield f"strides {[x.stride() for x in c.operands]}"
    if c.attn_mask is not None and c.attn_mask.stride(-1) != 1:
        yield f"a mask with strides {c.attn_mask.stride()}"


def _mask(c: Handed) -> Iterator[str]:
    """``check_attn_mask_shape``."""
    mask = c.attn_mask
    if mask is None:
        return
    batch, heads, rows, _ = c.query.shape
    wanted = (batch, heads, rows, c.key.size(2))
    fits = mask.dim() in (2, 4) and all(n in (1, m) for n, m in zip(mask.shape, wanted[-mask.dim() :]))
    if mask.requires_grad or not fits:
        yield f"a mask of {tuple(mask.shape)}"


# ---------------------------------------------------------------- what each kernel is asked about


def onednn(c: Handed) -> Iterator[str]:
    """Intel's, in inference."""
    yield from (*_valid(c), *_shapes(c, grouped=True), *_mask(c), *_strides(c))
    if c.dropout_p:
        yield "dropout"
    if c.query.size(-1) != c.key.size(-1) or max(c.query.size(-1), c.value.size(-1)) > 576:
        yield "head dims"
    if c.trains:
        yield "gradient"
    if c.query.dtype not in (torch.float32, *HALF):
        yield "dtype"
    yield from _one_mask_for_a_group(c)


def _one_mask_for_a_group(c: Handed) -> Iterator[str]:
    """``SDPALogicalParams`` in mkldnn/xpu/detail/Attention.cpp: of (B, H, L, S) it makes (B, H, 1, L, S).

    The scores are (B, Hkv, H / Hkv, L, S). And what is kept of a first call for others is not told by the mask's dtype.
    """
    mask, grouped = c.attn_mask, c.query.size(1) != c.key.size(1)
    if mask is not None and grouped and mask.dim() == 4 and mask.size(1) != 1:
        yield "a mask of every head beside grouped heads"
    if mask is not None and mask.dtype not in (torch.bool, c.query.dtype):
        yield f"a mask of {mask.dtype} beside {c.query.dtype}"


def aotriton_flash(c: Handed) -> Iterator[str]:
    """AMD's first, on an MI300X."""
    yield from (*_valid(c), *_shapes(c, grouped=True), *_strides(c, ignore_one=True))
    if c.attn_mask is not None:
        yield "mask"
    if len({x.size(-1) for x in c.operands}) > 1 or c.query.size(-1) > 512:
        yield "head dims"
    if c.is_causal and c.query.size(-2) != c.key.size(-2):
        yield "the mask is causal, and there are not as many keys as queries"
    if c.query.dtype not in HALF:
        yield "dtype"


def aotriton_efficient(c: Handed) -> Iterator[str]:
    """AMD's second, on an MI300X with AOTriton 0.12."""
    yield from (*_valid(c), *_shapes(c, grouped=False), *_strides(c))
    multiple = 8 if c.query.dtype in HALF else 4
    dims = [x.size(-1) for x in c.operands]
    if dims[0] != dims[1] or any(d % multiple or not 0 < d <= 512 for d in dims):
        yield "head dims"
    if c.query.dtype not in (torch.float32, *HALF):
        yield "dtype"


def _metal(c: Handed) -> Iterator[str]:
    """What leads to a Metal kernel at all: ``scaled_dot_product_attention`` in transformers/attention.cpp."""
    yield from (*_valid(c), *_shapes(c, grouped=True))
    if c.trains or c.dropout_p:
        yield "gradient or dropout"
    if c.query.dtype not in (torch.float32, *HALF):
        yield "dtype"
    if c.query.size(-1) != c.value.size(-1):
        yield "head dims differ"


def metal_vector(c: Handed) -> Iterator[str]:
    """Apple's for few rows, which reads strides, as of torch 2.13."""
    yield from _metal(c)
    if c.query.size(-1) not in (64, 96, 128, 256):
        yield "head dim"
    if c.query.size(2) > 8 or c.query.size(2) > c.key.size(2):
        yield "rows"


def metal_prefill(c: Handed) -> Iterator[str]:
    """Apple's for many rows, since torch 2.13."""
    yield from _metal(c)
    if c.query.size(-1) not in (32, 64, 72, 80, 96, 128, 256):
        yield "head dim"
    if c.query.size(2) <= 8:
        yield "rows"


CHECKS: dict[str, dict[str, Callable[[Handed], Iterator[str]]]] = {
    "Arc B580": {"onednn": onednn},
    "MI300X": {"aotriton flash": aotriton_flash, "aotriton efficient": aotriton_efficient},
    "M4": {"metal vector": metal_vector, "metal prefill": metal_prefill},
}
"""By device its kernels, in the order in which torch asks."""


def taken_by(device: str, call: Handed) -> str | None:
    """The kernel that gets a call; None where none does."""
    return next((kernel for kernel, check in CHECKS[device].items() if not list(check(call))), None)


def why_not(device: str, call: Handed) -> str:
    """What each kernel of a device has against a call."""
    return "; ".join(f"{kernel}: {', '.join(check(call))}" for kernel, check in CHECKS[device].items())
