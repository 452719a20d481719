"""Whether a mask of which nothing is known at compile time is inspected when the program runs.

Reductions over a mask that is made outside of the layers and passed in say what of the keys counts. They stay on the
device, and run once for all attentions that have the same mask. Of a mask that keeps every key they are a loss; so they
have to be cheap beside what would be saved if half of the keys counted.
"""

from __future__ import annotations

from attn_pass.devices.roofline import Problem, traffic
from attn_pass.targets.base import Setting

_SHARE = 1 / 8  # of what is saved where half of the keys count: the most that looking may cost


def microseconds(kernels: int, problem: Problem, setting: Setting) -> float:
    """What looking takes in so many generated kernels, for one of the attentions that have the mask."""
    read = traffic(setting.device, problem.mask_elements * problem.mask_bytes)
    return (kernels * setting.device.kernel_us + read) / setting.sharing_mask


def pays(looking: float, all_kept: float, half_kept: float) -> bool:
    """Whether it may be looked: what may be saved is worth far more than that costs."""
    return looking <= _SHARE * (all_kept - half_kept)
