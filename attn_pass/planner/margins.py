"""The margin by which an offer must be predicted to win: a rounding error for measured costs, more for guesses.

A GPU's costs come from data sheets and published figures until `attn_pass.devices.calibration` has measured this
machine's. A call that already reaches a fused kernel works: on guesses it is replaced only for a clear win.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn_pass.devices.device import Device
from attn_pass.devices.registry import family_of
from attn_pass.targets.base import Offer, Setting, Target
from attn_pass.targets.sdpa import Sdpa
from attn_pass.targets.torch_call import order

_ROUNDING = 1 / 0.99  # what the model may be off by in adding up the same parts
_FUSED = 1.25  # in place of a call that reaches a fused kernel
_FLEX = 2.0  # by FlexAttention, whose compile takes seconds, and whose tiles are not torch's choice for this GPU
# Stock's patterns make a call of products and a softmax. By another processor's rates these took up to 1.5 times the
# call where up to 4 times its speed was predicted, and were faster where that was 19 (docs/results/cpu-constants.md).
_FOLLOWED = 4.0
_TIE = 1.05  # predictions nearer to each other say nothing


@dataclass(frozen=True)
class Margin:
    """An offer is taken if it is predicted to be more than ``times`` as fast; ``because`` in words, for the report."""

    times: float
    because: str = ""

    @property
    def held(self) -> str:
        """The addition to the reason of an offer that is taken."""
        return f"; more than the {self.times:.3g}x that is required, {self.because}" if self.because else ""

    def missed(self, reason: str, gain: float) -> str:
        """The reason for an offer that wins, but not by enough; empty if it does not win."""
        if not self.because or gain <= _ROUNDING:
            return ""
        return f"{gain:.3g}x, less than the {self.times:.3g}x that is required, {self.because}: {reason}"


def caution(offer: Offer, setting: Setting) -> float:
    """How many times its predicted time an offer is taken to need: more than once where the rates are not its device's.

    Torch's own call is what stock's patterns make of a site as well.
    """
    return 1.0 if offer.target == Sdpa.name else _doubt(setting.device)


def _doubt(device: Device) -> float:
    return 1.0 if device.is_measured or device.is_calibrated else family_of(device).caution


def margin(offer: Offer, setting: Setting) -> Margin:
    """The margin that a predicted offer must exceed.

    On guesses a kernel that torch's own call tries may also take the place of products and a softmax where these are
    predicted to be as fast: torch's order has them last, and their predictions are at or below what was published.
    """
    device, before = setting.device, setting.kernel_as_written
    if (doubt := _doubt(device)) > 1:
        if offer.target != Sdpa.name:
            rates = f"since the rates are another processor's and not those of {device.name} (`attn-pass calibrate`)"
            return Margin(doubt * _ROUNDING, rates)
        if before is None and offer.attention.mask.is_none:
            return Margin(_ROUNDING / _FOLLOWED, "since stock's own patterns make this call")
    # The kernel that the program calls, with the copies around its call gone: nothing that would have to be guessed.
    less_around_it = before is not None and offer.target == family_of(device).same_call.get(before)
    if less_around_it or (device.knows(offer.target) and (before is None or device.knows(before))):
        return Margin(_ROUNDING)
    if before is None:
        return Margin(1 / _TIE if offer.target in order(device) else _ROUNDING)
    unmeasured = f"since what {device.name} takes for it was not measured and the call reaches {before} already"
    return Margin(_FLEX if offer.compiled_for_site else _FUSED, unmeasured)


def ties_by_order(
    ranked: list[tuple[Offer, Target]], loss: Callable[[tuple[Offer, Target]], float], device: Device
) -> list[tuple[Offer, Target]]:
    """The offers, best first, in torch's own order where several are predicted alike and not all were measured."""
    near = [o for o in ranked if loss(o) <= _TIE * loss(ranked[0])]
    if all(device.knows(offer.target) for offer, _ in near):
        return ranked
    kernels = order(device)

    def place(offered: tuple[Offer, Target]) -> int:
        name = offered[0].target
        return kernels.index(name) if name in kernels else len(kernels)

    return [*sorted(near, key=place), *ranked[len(near) :]]
