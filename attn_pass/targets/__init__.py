"""The forms an attention can be given: one file a kernel, each with its conditions, reasons and emission."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

from attn_pass.targets.base import Target
from attn_pass.targets.cpu_kernel import CpuKernel
from attn_pass.targets.cudnn import Cudnn
from attn_pass.targets.decode import Decode
from attn_pass.targets.decomposed import Decomposed
from attn_pass.targets.efficient import Efficient
from attn_pass.targets.flash import Flash
from attn_pass.targets.flash_attn import FlashAttn
from attn_pass.targets.flash_attn_3 import FlashAttn3
from attn_pass.targets.flex import Flex
from attn_pass.targets.flex_flash import FlexFlash
from attn_pass.targets.local import Local
from attn_pass.targets.npu import FusionAttention, InferAttention
from attn_pass.targets.recompute import Recompute
from attn_pass.targets.sdpa import Sdpa
from attn_pass.targets.values import Values
from attn_pass.targets.xla import PallasFlash, PallasSplash

GROUP = "attn_pass.targets"  # the entry-point group third parties register targets in


@lru_cache(maxsize=1)
def _registered() -> tuple[Target, ...]:
    return tuple(entry.load()() for entry in entry_points(group=GROUP))


def built_in() -> tuple[Target, ...]:
    """The targets of this package; of equally cheap offers the first is taken."""
    cuda = (Cudnn(), Flash(), Efficient(), Decode(), FlashAttn(), FlashAttn3())
    npu = (InferAttention(), FusionAttention())
    tpu = (PallasFlash(), PallasSplash())
    return (*cuda, *npu, *tpu, Sdpa(), Values(), Local(), Recompute(), Decomposed(), Flex(), FlexFlash(), CpuKernel())


def all_targets() -> tuple[Target, ...]:
    """Every target: the built-in ones, then those of installed packages."""
    return (*built_in(), *_registered())
