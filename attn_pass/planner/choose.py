"""The choice: every form is put to every target and the cheapest offer wins; leaving the site alone is one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from attn_pass.hardware import cost
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.expression import Apply, walk
from attn_pass.targets import all_targets
from attn_pass.targets.base import NAN_GUARD, Offer, Refusal, Setting, Target
from attn_pass.targets.problem import problem_of

LEAVE = "leave"
_TRANSCENDENTAL = ("tanh", "exp", "sigmoid", "log")
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
    calls = sum(isinstance(e, Apply) and e.op in _TRANSCENDENTAL for e in walk(attention.modified))
    scaled += cost.transcendental(setting.device, problem, calls)
    return cost.unfused(setting.device, problem) + scaled + copies


def choose(
    attention: Attention,
    forms: Iterable[tuple[tuple[str, ...], Attention]],
    written: AsWritten,
    setting: Setting,
    *,
    prefer: str,
    allowed: tuple[str, ...] | None,
) -> Choice:
    """Chooses among the offers that all allowed targets make for all forms of the attention.

    ``prefer`` is "cheapest", or "fused" to take the best fused offer whatever it costs. ``forms`` come with the
    names of the poor cases that were applied to get them.
    """
    if attention.nan_guard and setting.numerics == "strict":
        return Choice(None, None, f"numerics='strict': {NAN_GUARD}")
    targets: Sequence[Target] = [t for t in all_targets() if allowed is None or t.name in allowed]
    leaving = leave_cost(attention, setting, written)
    choice = Choice(None, None, "", predicted_us={LEAVE: leaving})
    offers: list[tuple[Offer, Target]] = []
    for names, form in forms:
        for target in targets:
            answer: Offer | Refusal
            if form.not_affine and not getattr(target, "takes_any_score", False):
                answer = Refusal(target.name, form.not_affine)
            else:
                answer = target.consider(form, " + ".join(names), setting)
            if isinstance(answer, Refusal):
                choice.refusals.setdefault(target.name, answer.reason)
                continue
            offers.append((answer, target))
            choice.predicted_us[_label(answer)] = answer.microseconds
    for offer, _ in offers:
        choice.refusals.pop(offer.target, None)
    if not offers:
        choice.reason = _why_none(choice.refusals, allowed)
        others = [r for r in choice.refusals.values() if r != attention.not_affine]
        if attention.not_affine and others:
            choice.reason = f"{attention.not_affine}; {others[0]}"
        return choice
    candidates = offers
    if prefer == "fused":
        candidates = [o for o in offers if o[0].fused] or offers
    best, target = min(candidates, key=lambda o: o[0].microseconds)
    forced = prefer == "fused" and best.fused
    predicted = f"{leaving:.0f} us predicted as it is, {best.microseconds:.0f} us as {_label(best)}"
    if not forced and best.microseconds >= leaving * _BETTER:
        choice.reason = f"already the cheapest form: {predicted}"
        return choice
    if attention.nan_guard:
        best = replace(best, assumptions=(*best.assumptions, NAN_GUARD))
    choice.offer, choice.target, choice.reason = best, target, predicted
    return choice


def _label(offer: Offer) -> str:
    return f"{offer.target} ({offer.variant})" if offer.variant else offer.target


def _why_none(refusals: dict[str, str], allowed: tuple[str, ...] | None) -> str:
    if not refusals:
        return "no target is allowed"
    first = refusals.get("sdpa") or next(iter(refusals.values()))
    return first
