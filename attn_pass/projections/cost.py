"""What several products with one input take, one by one and as one, by the sizes of their weights.

Arithmetic and the traffic of weights are the same, and large products gain nothing on the whole: from 768 features on,
one product was measured at 0.88 to 1.26 times the time of separate products in float32, and at 0.84 to 1.40 times in
bfloat16 (docs/projections.md). One product saves calls, so it is taken only where calls are a large share of the time.
Parameters that are laid into a buffer are looked for at each call. In training there are three calls for each product,
but every buffer adds time to each step, in which autograd gives each parameter its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_pass.devices.device import Device
from attn_pass.devices.roofline import traffic
from attn_pass.report.units import duration

SHARE = 0.1
"""Of the products' time, what joining them has to gain by prediction: what large products lose is of that size."""
_CALL_US = 3.0  # measured around a product in float32
_HALF_CALL_US = 12.0  # and in half precision, for which oneDNN looks up its code
_LOOK_US = 5.0  # of each buffer and call: whether the parameters lie where they lay
_GRADIENT_US = 40.0  # of each buffer and step of training


def predicted(
    device: Device,
    dtype: torch.dtype,
    rows: int,
    features: int,
    widths: Sequence[int],
    *,
    buffers: int = 0,
    trained: bool = False,
) -> dict[str, float]:
    """Microseconds of a group as it is written, "leave", and of one product, "join".

    ``buffers`` is in how many the parameters would lie, and ``trained`` whether they have gradients.
    """
    numbers = features * sum(widths)
    arithmetic = 2e-3 * rows * numbers / device.matmul(dtype)
    work = max(arithmetic, traffic(device, numbers * dtype.itemsize))
    call = _CALL_US if dtype.itemsize >= 4 else _HALF_CALL_US
    times = 3 if trained else 1
    leave = times * (work + len(widths) * call)
    join = times * (work + call) + buffers * (_GRADIENT_US if trained else _LOOK_US)
    return {"leave": round(leave, 2), "join": round(join, 2)}


def too_little(times: dict[str, float]) -> str:
    """Why joining would not pay; empty where it does."""
    gain = times["leave"] - times["join"]
    if gain < 0:
        return (
            f"one product would take {duration(-gain)} more by prediction, for the buffers that its parameters lie in"
        )
    if gain >= SHARE * times["leave"]:
        return ""
    apart = duration(times["leave"])
    return f"one product would gain {duration(gain)} of {apart} by prediction, too little to be sure of"
