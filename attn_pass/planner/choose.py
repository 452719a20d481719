"""The choice: every variant is put to every target, and the cheapest offer wins; leaving the site alone is one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from attn_pass.hardware import cost
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.poor_cases import variants
from attn_pass.targets import all_targets
from attn_pass.targets.base import Offer, Refusal, Setting, Target
from attn_pass.targets.problem import problem_of

LEAVE = "leave"
_BETTER = 0.99  # an offer must be cheaper than leaving by more than a rounding of the model


@dataclass
class Choice:
    """The offer taken, or None to leave the site, with everything that was considered."""

    offer: Offer | None
    target: Target | None
    reason: str
    refusals: dict[str, str] = field(default_factory=dict)
    predicted_us: dict[str, float] = field(default_factory=dict)


def leave_cost(attention: Attention, setting: Setting, written: AsWritten) -> float:
    """What stock Inductor makes of the site, in microseconds."""
    problem = problem_of(attention, setting.hint)
    copies = cost.traffic(setting.device, 2 * written.copied_bytes)
    if written.fused:
        problem = replace(problem, causal=written.causal, mask_elements=written.mask_elements)
        return cost.fused(setting.device, problem) + copies
    scaled = 0.0 if setting.eager_form else cost.traffic(setting.device, 2 * problem.operand_bytes)
    return cost.unfused(setting.device, problem) + scaled + copies


def choose(
    attention: Attention, written: AsWritten, setting: Setting, *, prefer: str, allowed_targets: tuple[str, ...] | None,
    allowed_cases: tuple[str, ...] | None,
) -> Choice:  # fmt: skip
    """Chooses among all offers. ``prefer`` is "cheapest", or "fused" to take the best fused one whatever it costs."""
    targets: Sequence[Target] = [
        t for t in all_targets() if allowed_targets is None or t.name in allowed_targets
    ]  # fmt: skip
    leaving = leave_cost(attention, setting, written)
    choice = Choice(None, None, "", predicted_us={LEAVE: leaving})
    offers: list[tuple[Offer, Target]] = []
    for names, form in variants(attention, allowed_cases):
        for target in targets:
            answer = target.consider(form, " + ".join(names), setting)
            if isinstance(answer, Refusal):
                choice.refusals.setdefault(target.name, answer.reason)
                continue
            offers.append((answer, target))
            choice.predicted_us[_label(answer)] = answer.microseconds
    for offer, _ in offers:
        choice.refusals.pop(offer.target, None)
    if not offers:
        choice.reason = _why_none(choice.refusals, allowed_targets)
        return choice
    candidates = offers
    if prefer == "fused":
        candidates = [o for o in offers if o[0].fused] or offers
    best, target = min(candidates, key=lambda o: o[0].microseconds)
    forced = prefer == "fused" and best.fused
    if not forced and best.microseconds >= leaving * _BETTER:
        choice.reason = (
            f"already the cheapest form: {leaving:.0f} us predicted as it is, {best.microseconds:.0f} us as {_label(best)}"
        )  # fmt: skip
        return choice
    choice.offer, choice.target = best, target
    choice.reason = f"{leaving:.0f} us predicted as it is, {best.microseconds:.0f} us as {_label(best)}"
    return choice


def _label(offer: Offer) -> str:
    return f"{offer.target} ({offer.variant})" if offer.variant else offer.target


def _why_none(refusals: dict[str, str], allowed: tuple[str, ...] | None) -> str:
    if not refusals:
        return f"no target of {', '.join(allowed or ())} is known"
    first = refusals.get("sdpa") or next(iter(refusals.values()))
    return first
