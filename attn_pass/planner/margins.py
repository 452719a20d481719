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
# Between kernels whose rates were measured: on an H200 the model is off by 7 % on average, and by up to a fifth in nine
# of ten predictions (docs/results/gpu-nvidia-h200.md).
_FITTED = 1.15
_FLEX = 2.0  # by FlexAttention, whose compile takes seconds, and whose tiles are not torch's choice for this GPU
# Stock's patterns make a call of products and a softmax. By another processor's rates these took up to 1.5 times the
# call where up to 4 times its speed was predicted, and were faster where that was 19 (docs/results/cpu-constants.md).
_FOLLOWED = 4.0
_TIE = 1.05  # predictions nearer to each other say nothing
_UNCALIBRATED = ": this processor is not calibrated; run `attn-pass calibrate`"


@dataclass(frozen=True)
class Margin:
    """An offer is taken if it is predicted to be more than ``times`` as fast as the site as it is.

    ``because`` says why, after "1.25x is required" in a report; empty where only the model's rounding is allowed for.
    """

    times: float
    because: str = ""

    @property
    def held(self) -> str:
        """The addition to the reason of an offer that is taken."""
        return f" ({self.times:.3g}x is required{self.because})" if self.because else ""

    def missed(self, reason: str, gain: float) -> str:
        """The reason for an offer that wins, but not by enough; empty if it does not win."""
        if not self.because or gain <= _ROUNDING:
            return ""
        return f"{reason}; at least {self.times:.3g}x is required{self.because}"


def caution(offer: Offer, setting: Setting) -> float:
    """How many times its predicted time an offer is taken to need: more than once where the rates are not its device's.

    Torch's own call is what stock's patterns make of a site as well.
    """
    return 1.0 if offer.target == Sdpa.name else _doubt(setting.device)


def passed_over(cheapest: Offer, chosen: Offer, setting: Setting) -> str:
    """Why the offer with the lowest prediction is not taken, as an addition to a reason; empty if it is."""
    doubt = caution(cheapest, setting)
    if doubt <= caution(chosen, setting) or not cheapest.microseconds < chosen.microseconds:
        return ""
    faster = chosen.microseconds / cheapest.microseconds
    return f"; {cheapest.target} is predicted {faster:.3g}x as fast, and {doubt:.3g}x is required{_UNCALIBRATED}"


def _doubt(device: Device) -> float:
    return 1.0 if device.is_measured or device.is_calibrated else family_of(device).caution


def followed(device: Device) -> float:
    """How many times the predicted time of products and a softmax the call that stock makes of them may take."""
    return _FOLLOWED if _doubt(device) > 1 else 1.0


def margin(offer: Offer, setting: Setting) -> Margin:
    """The margin that a predicted offer must exceed.

    On guesses a kernel that torch's own call tries may also take the place of products and a softmax where these are
    predicted to be as fast: torch's order has them last, and their predictions are at or below what was published.
    """
    device, before = setting.device, setting.kernel_as_written
    if (doubt := _doubt(device)) > 1:
        if offer.target != Sdpa.name:
            return Margin(doubt * _ROUNDING, _UNCALIBRATED)
        if before is None and offer.attention.mask.is_none:
            return Margin(_ROUNDING / _FOLLOWED)
    # The kernel that the program calls, with the copies around its call gone: nothing that would have to be guessed.
    less_around_it = before is not None and offer.target == family_of(device).same_call.get(before)
    known = device.knows(offer.target) and (before is None or device.knows(before))
    if less_around_it or (known and (device.is_measured or before == offer.target)):
        return Margin(_ROUNDING)
    if known and before is not None:
        return Margin(_FITTED, f" to replace a call that already runs {before}; predictions may be off by as much")
    if before is None:
        # Products and a softmax were timed on no GPU, and hold all scores in memory.
        less = _FUSED if known else _TIE
        return Margin(1 / less if offer.target in order(device) else _ROUNDING)
    works = f" to replace a call that already runs {before} on an uncalibrated device"
    return Margin(_FLEX if offer.compiled_for_site else _FUSED, works)


def ties_by_order(
    ranked: list[tuple[Offer, Target]], loss: Callable[[tuple[Offer, Target]], float], device: Device
) -> list[tuple[Offer, Target]]:
    """The offers, best first, in torch's own order where several are predicted alike and not all were measured."""
    near = [o for o in ranked if loss(o) <= _TIE * loss(ranked[0])]
    if all(device.knows(offer.target) for offer, _ in near):
        return ranked
    kernels = order(device)

    def rank(offered: tuple[Offer, Target]) -> int:
        name = offered[0].target
        return kernels.index(name) if name in kernels else len(kernels)

    return [*sorted(near, key=rank), *ranked[len(near) :]]
