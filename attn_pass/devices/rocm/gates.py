"""What opens and closes the fused kernels of torch's call on AMD's GPUs: architectures, and environment variables.

``check_flash_attention_hardware_support`` and ``check_mem_efficient_hardware_support`` in aten's cuda/sdp_utils.cpp.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

EXPERIMENTAL_GATE = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"
CK_GATE = "TORCH_ROCM_FA_PREFER_CK"
SUPPORTED = ("gfx90a", "gfx942", "gfx950")
"""MI200, MI300, MI350."""
EXPERIMENTAL = ("gfx110", "gfx115", "gfx120")
"""Radeon RX 7000, Ryzen AI, Radeon RX 9000: by their first letters, as each has several numbers."""


def is_supported(architecture: str) -> bool:
    """Whether AOTriton has kernels that torch uses without being asked to."""
    return architecture in SUPPORTED


def is_experimental(architecture: str) -> bool:
    """Whether AOTriton has kernels that torch uses only with `EXPERIMENTAL_GATE`."""
    return architecture.startswith(EXPERIMENTAL)


def is_open(architecture: str, library: str) -> bool:
    """Whether torch's call may use a fused kernel of the library there, by the environment of this process.

    With "CK" torch does not look at the architecture.
    """
    return (
        library == "CK" or is_supported(architecture) or (is_experimental(architecture) and _is_set(EXPERIMENTAL_GATE))
    )


def why_closed(architecture: str, library: str) -> str:
    """Why torch's call has no fused kernel there, and what opens it if anything does; "" where it has."""
    if is_open(architecture, library):
        return ""
    if is_experimental(architecture):
        return f"AOTriton is experimental on {architecture}: torch's call uses it with {EXPERIMENTAL_GATE}=1 only"
    return f"AOTriton, and so torch's call, has no fused kernel for {architecture or 'this GPU'}"


def library() -> str:
    """The library behind FlashAttention's operator: "AOTriton", or "CK" where the user prefers it."""
    preferred = getattr(torch.backends.cuda, "preferred_rocm_fa_library", None)
    try:
        chosen = "" if preferred is None or torch.version.hip is None else str(preferred()).rpartition(".")[-1]
    except RuntimeError:
        chosen = ""
    # The variable is the preference's initial value: one that was chosen since overrules it.
    prefers_ck = _is_set(CK_GATE) if chosen in ("", "Default") else chosen == "Ck"
    return "CK" if prefers_ck else "AOTriton"


def identity() -> Iterator[str]:
    """The gates as they are: a choice depends on them."""
    yield from (f"{gate}={os.environ.get(gate, '')}" for gate in (EXPERIMENTAL_GATE, CK_GATE))


def _is_set(gate: str) -> bool:
    """As torch's ``check_env`` reads it: anything but 1 is no."""
    return os.environ.get(gate) == "1"
