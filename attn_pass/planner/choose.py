"""The choice: every form is offered to every target and the cheapest offer wins; leaving the site is also an offer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from attn_pass.devices import roofline
from attn_pass.devices.registry import family_of
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.expression import may_be_infinite
from attn_pass.options import LEAVE
from attn_pass.planner import margins
from attn_pass.planner.lengths import Length, worst_losses
from attn_pass.planner.stock import Stock
from attn_pass.poor_cases import valid_range
from attn_pass.report.units import duration
from attn_pass.targets.base import CLAMP, FLEX, NAN_GUARD, TERM, WEAK_FILL, Offer, Refusal, Setting, Target
from attn_pass.targets.flex import flex
from attn_pass.targets.problem import cost_of, problem_of
from attn_pass.targets.registry import all_targets

AS_ASKED = "left as requested"
_MEASURED = margins.Margin(1 / 0.97)  # more than noise where both were measured
_MOST_MEASURED = 4
_HOPELESS = 20.0  # predicted to take so many times the best: not measured

Measured = Mapping[str, float]
"""Microseconds by label, `LEAVE` included."""


class Timings(dict[str, float]):
    """Medians of samples in microseconds by label; ``spread`` is half of what lies between the 10th and the 90th
    percentile of the samples of each, as a share of the median."""

    def __init__(self, medians: Mapping[str, float], spread: Mapping[str, float]) -> None:
        super().__init__(medians)
        self.spread = dict(spread)


Measure = Callable[[Sequence[str]], Measured | str]
"""Times the forms with these labels, or says why it did not."""


def only(label: str) -> Callable[..., Measured]:
    """A measurement by which the form with this label is the one to take."""

    def measured(*_: object) -> Measured:
        return {LEAVE: 1.0, label: 0.0}

    return measured


@dataclass(frozen=True)
class Selection:
    """An offer to take, and why."""

    offer: Offer
    target: Target
    reason: str


@dataclass
class Choice:
    """The offers to take, best first, none to leave the site; with everything that was considered.

    One after the first is for where the first turns out not to hold for the sizes the program is for.
    """

    selections: tuple[Selection, ...] = ()
    reason: str = ""
    refusals: dict[str, str] = field(default_factory=dict)
    other_devices: tuple[str, ...] = ()  # targets among them that are for other devices
    why_none: str = ""  # the refusal to report if there is no offer
    predicted_us: dict[str, float] = field(default_factory=dict)
    measured_us: dict[str, float] = field(default_factory=dict)
    measured_spread: dict[str, float] = field(default_factory=dict)


def leave_cost(attention: Attention, setting: Setting, written: AsWritten) -> float:
    """The cost of stock Inductor's code in microseconds, less the work that every form needs beforehand."""
    if written.needed_as_well:
        saved = value_product_cost(attention, setting)
        if setting.kernel_as_written == FLEX:
            # The call gives the log-sum-exp as well; beside a kernel all but the second product is computed for it.
            problem = problem_of(attention, setting.hint)
            return _as_it_is(attention, setting, written) - roofline.unfused(setting.device, problem) + saved
        return saved
    return _as_it_is(attention, setting, written) - roofline.traffic(setting.device, 2 * written.joined_bytes)


def _as_it_is(attention: Attention, setting: Setting, written: AsWritten) -> float:
    device, family = setting.device, family_of(setting.device)
    problem = problem_of(attention, setting.hint)
    # With one query row Inductor computes the copies inside its multiply-and-sum.
    inside = problem.q_len == 1 and not written.fused
    copies = 0.0 if inside else roofline.traffic(device, 2 * written.copied_bytes)
    kernel = setting.kernel_as_written
    if kernel is not None:
        problem = replace(problem, causal=written.causal, mask_elements=written.mask_elements)
        if kernel == FLEX:
            return flex.as_written(attention, problem, setting) + copies
        around = family.mask_cost(device, problem, written)
        return cost_of(kernel, attention, problem, setting) + copies + around
    return family.unfused_cost(attention, family.as_computed_unfused(problem, setting), setting) + copies


def score_product_cost(attention: Attention, setting: Setting) -> float:
    """The product of queries and keys alone, in microseconds: what sites that share it would pay for once if left."""
    problem = problem_of(attention, setting.hint)
    return 2 * problem.scores * problem.head_dim / setting.device.matmul(problem.dtype) / 1e3


# Of the products of forward and backward 3 are saved and 7 computed by a kernel; without a backward, 1 and 2.
_SAVED_IN_TRAINING = (3 / 7) / (1 / 2)


def value_product_cost(attention: Attention, setting: Setting) -> float:
    """The product of weights and values alone, in microseconds: what is saved where the weights stay."""
    device, problem = setting.device, problem_of(attention, setting.hint)
    flops, read = 2.0 * problem.scores * problem.value_dim, problem.dtype.itemsize * problem.scores
    if attention.needs_grad:
        flops *= _SAVED_IN_TRAINING
    if problem.q_len == 1:  # a multiply-and-sum, or a product: the quicker
        rate = max(device.vector(problem.dtype), device.matmul(problem.dtype))
        return max(flops / rate / 1e3, roofline.traffic(device, read)) + device.kernel_us
    return flops / device.matmul(problem.dtype) / 1e3 + roofline.traffic(device, read) + device.op_us


def choose(
    attention: Attention,
    forms: _Forms,
    written: AsWritten,
    setting: Setting,
    *,
    prefer: str,
    allowed: tuple[str, ...] | None,
    measure: Measure | None = None,
    elsewhere: Sequence[Length] = (),
    without: Mapping[str, str] | None = None,
    stock: Stock | None = None,
) -> Choice:
    """Chooses among the offers that all allowed targets make for all forms of the attention.

    ``prefer`` is "cheapest"; "fused" to take the best fused offer whatever it costs; or "first" to take the first of
    the allowed targets that offers, `LEAVE` among them, whatever it costs. ``forms`` come with the names of the poor
    cases that were applied to get them. With ``measure`` the best by prediction are measured, and what is fastest then
    is taken. With ``elsewhere``, other lengths the program is for, what is predicted to lose least at any is taken. The
    targets in ``without`` are refused for the reason that is given with them. ``stock``, where it is known, is what
    gains are relative to; it is not chosen by.
    """
    if refusal := _guard_refusal(attention, setting):
        return Choice(reason=refusal)
    considered: Sequence[Target] = [t for t in all_targets() if _is_asked(t, allowed, setting)]
    without = without or {}
    targets = [t for t in considered if t.name not in without]
    leaving = leave_cost(attention, setting, written)
    refused = {t.name: without[t.name] for t in considered if t.name in without}
    choice = Choice(predicted_us={LEAVE: leaving}, refusals=refused)
    forms = list(forms)
    offers = _offers(forms, targets, setting, choice)
    _add_what_stays(choice.predicted_us, offers, attention, setting, written)
    if not offers:
        choice.reason = AS_ASKED if allowed == (LEAVE,) else _why_none(choice, attention)
        return choice
    candidates = _candidates(offers, prefer, allowed)
    if not candidates:
        choice.reason = AS_ASKED
        return choice
    remark = ""
    if measure is not None and prefer != "first":
        candidates, remark = _measure(measure, candidates, setting, choice)
    if choice.measured_us:
        timed = _Timed(choice.measured_us, choice.measured_us, is_measured=True, spread=choice.measured_spread)
    else:
        timed = _predicted_at(attention, forms, targets, setting, choice.predicted_us, elsewhere, remark)
        timed = replace(timed, stock=stock, is_stock=setting.kernel_as_written is not None)
    _take(choice, timed, candidates, attention, setting, prefer)
    return choice


def _assumed(attention: Attention) -> tuple[str, ...]:
    """What is assumed of the program's scores, whatever the form."""
    a = attention
    every = ((a.nan_guard, NAN_GUARD), (a.clamped, CLAMP), (a.fill_is_weak, WEAK_FILL), (a.is_term, TERM))
    return tuple(assumption for holds, assumption in every if holds)


def _guard_refusal(attention: Attention, setting: Setting) -> str:
    """Why what is assumed of the scores keeps a site as it is; empty where it does not, or nothing is assumed."""
    if setting.numerics == "strict" and (assumed := _assumed(attention)):
        return f"numerics='strict': {assumed[0]}"
    if attention.nan_guard and may_be_infinite(attention.modified):
        return "a guard against NaN, beside scores that may become infinite"
    return ""


@dataclass(frozen=True)
class _Timed:
    """What each form takes, by its label: measured, or predicted here and at other lengths."""

    times: Mapping[str, float]
    losses: Mapping[str, float]  # at the worst of all lengths, in times of the best form there; or the times
    is_measured: bool = False
    lengths: str = ""  # those compared, in words; empty for one
    remark: str = ""
    stock: Stock | None = None
    is_stock: bool = False  # the site as it is is what stock runs: a call that reaches a kernel
    spread: Mapping[str, float] = field(default_factory=dict)  # of what was measured

    def rank(self, offer: Offer) -> tuple[float, float]:
        """The least comes first."""
        name = _label(offer)
        return self.losses.get(name, math.inf), self.times.get(name, math.inf)

    def gain(self, offer: Offer) -> float:
        """How many times faster it is than the site as it is."""
        return self.losses[LEAVE] / max(self.rank(offer)[0], 1e-9)

    def held(self, margin: margins.Margin) -> str:
        """The margin in words, where it is one over what gains are relative to: not where stock's patterns match."""
        return "" if self.stock is not None and self.stock.by_pattern else margin.held

    def in_words(self, offer: Offer) -> str:
        """Both times; and the gain, where it is known to be one over stock."""
        name, leaving, (_, time) = _label(offer), self.times[LEAVE], self.rank(offer)
        how = "measured" if self.is_measured else "predicted"
        before = leaving if self.stock is None else self.stock.us
        was = f"{self._time_text(LEAVE)} as written" if self.stock is None else self.stock.in_words(leaving)
        is_gain = self.is_measured or self.is_stock or self.stock is not None
        faster = f" ({before / time:.3g}x)" if is_gain and 0 < time < math.inf else ""
        sentence = f"{how} {was}, {self._time_text(name)} with {name}{faster}{self.remark}"
        if self.lengths:
            worst = f"{self.losses[LEAVE]:.3g} and {self.losses[name]:.3g}"
            sentence += f"; {self.lengths}, at worst {worst} the time of the best form"
        return sentence

    def _time_text(self, name: str) -> str:
        """The time of a form, and how far its samples are apart: "12.7 ms +-2%"."""
        apart = f" +-{self.spread[name]:.0%}" if name in self.spread else ""
        return f"{duration(self.times.get(name, math.inf))}{apart}"


def _predicted_at(
    attention: Attention,
    forms: _Forms,
    targets: Sequence[Target],
    setting: Setting,
    times: Mapping[str, float],
    elsewhere: Sequence[Length],
    remark: str,
) -> _Timed:
    """The predictions here, and what each form is predicted to lose at the worst of other lengths."""
    if not elsewhere:
        return _Timed(times, times, remark=remark)
    tables = [times, *(_predicted(attention, forms, targets, length) for length in elsewhere)]
    return _Timed(times, worst_losses(tables), lengths=_range(attention, setting, elsewhere), remark=remark)


def _measure(measure: Measure, candidates: _Offers, setting: Setting, choice: Choice) -> tuple[_Offers, str]:
    """Measures the best by prediction; returns what was measured, or why nothing was, as a remark."""
    more = _alternatives(candidates, setting)
    answer = measure(_shortlist(candidates, more))
    if isinstance(answer, str):
        return candidates, f"; {answer}"
    choice.measured_us = dict(answer)
    choice.measured_spread = answer.spread if isinstance(answer, Timings) else {}
    everything = [*candidates, *(o for label in more for o in more[label])]
    measured = [o for o in everything if _label(o[0]) in answer]
    return measured or candidates, ""


def _take(
    choice: Choice, timed: _Timed, candidates: _Offers, attention: Attention, setting: Setting, prefer: str
) -> None:
    """Notes the candidates to take, best first, or why none is."""
    ranked = sorted(candidates, key=lambda o: timed.rank(o[0]))
    if not timed.is_measured:

        def loss(offered: tuple[Offer, Target]) -> float:
            return timed.rank(offered[0])[0] * margins.caution(offered[0], setting)

        ranked = margins.ties_by_order(sorted(ranked, key=loss), loss, setting.device)
    cheapest = min((offer for offer, _ in candidates), key=timed.rank)
    missed = ""
    for offer, target in ranked:
        reason, gain = timed.in_words(offer), timed.gain(offer)
        margin = _MEASURED if timed.is_measured else margins.margin(offer, setting)
        if prefer == "first" or (prefer == "fused" and offer.fused) or gain > margin.times:
            offer = replace(offer, assumptions=(*offer.assumptions, *_assumed(attention)))
            if not timed.is_measured:
                reason += timed.held(margin) + margins.passed_over(cheapest, offer, setting)
            reason += f"; {offer.remark}" if offer.remark else ""
            choice.selections = (*choice.selections, Selection(offer, target, reason))
            continue
        missed = missed or margin.missed(reason, gain)
        best = "fastest" if timed.is_measured else "cheapest"
        choice.reason = missed or choice.reason or f"already the {best} form: {reason}"


def _is_asked(target: Target, allowed: tuple[str, ...] | None, setting: Setting) -> bool:
    if allowed is not None:
        return target.name in allowed
    must_be_named = getattr(target, "must_be_named", None)
    return must_be_named is None or not must_be_named(setting)


def _predicted(attention: Attention, forms: _Forms, targets: Sequence[Target], at: Length) -> Mapping[str, float]:
    """What each form is predicted to take at another length."""
    there = Choice(predicted_us={LEAVE: leave_cost(attention, at.setting, at.written)})
    offers = _offers(forms, targets, at.setting, there)
    _add_what_stays(there.predicted_us, offers, attention, at.setting, at.written)
    return there.predicted_us


def _add_what_stays(
    times: dict[str, float], offers: _Offers, attention: Attention, setting: Setting, written: AsWritten
) -> None:
    """Where a kernel gives the log-sum-exp that is needed as well, all others pay for the scores that stay for it."""
    if not (setting.wants_logarithm and any(offer.gives_logarithm for offer, _ in offers)):
        return
    whole = leave_cost(attention, setting, replace(written, needed_as_well=False))
    stays = max(0.0, whole - times[LEAVE])
    times[LEAVE] += stays
    for offer, _ in offers:
        if not offer.gives_logarithm:
            times[_label(offer)] += stays


def _range(attention: Attention, setting: Setting, elsewhere: Sequence[Length]) -> str:
    queries = [setting.hint(attention.q_len), *(at.queries for at in elsewhere)]
    return f"from {min(queries)} to {max(queries)} queries"


_Offers = Sequence[tuple[Offer, Target]]
_Forms = Iterable[tuple[tuple[str, ...], Attention]]


def _offers(forms: _Forms, targets: Sequence[Target], setting: Setting, choice: Choice) -> _Offers:
    """What every target offers for every form; refusals and predictions are noted in the choice."""
    offers: list[tuple[Offer, Target]] = []
    other_devices: dict[str, str] = {}  # refusals that say nothing of the site come last
    packages: list[str] = []
    of_ranges: dict[str, dict[str, str]] = {}  # of forms with a run-time range: by target the form's label, and why not
    for names, form in forms:
        for target in targets:
            answer = _answer(target, form, " + ".join(names), setting)
            if isinstance(answer, Refusal):
                if form.valid is not None and not answer.other_device:
                    of_ranges.setdefault(target.name, {label(target.name, " + ".join(names)): answer.reason})
                    continue
                (other_devices if answer.other_device else choice.refusals).setdefault(target.name, answer.reason)
                packages += [answer.reason] if answer.package else []
                continue
            offers.append((answer, target))
            choice.predicted_us[_label(answer)] = answer.microseconds
    native = choice.refusals
    general = [native[name] for name in family_of(setting.device).most_general if name in native]
    choice.why_none = next(iter((*packages, *general, *native.values(), *other_devices.values())), "")
    choice.refusals = choice.refusals | {
        name: why for name, why in other_devices.items() if name not in choice.refusals
    }
    for offer, _ in offers:
        choice.refusals.pop(offer.target, None)
    choice.other_devices = tuple(name for name in other_devices if name in choice.refusals)
    choice.refusals = choice.refusals | _of_ranges(of_ranges, offers, choice.refusals)
    return offers


def _of_ranges(
    of_ranges: Mapping[str, Mapping[str, str]], offers: _Offers, refusals: Mapping[str, str]
) -> dict[str, str]:
    """Why targets refuse a range that is known at run time, by label, where that says more than they say themselves.

    A target that takes no range at all, and refuses the attention without one as well, has said why.
    """
    takes_one = {offer.target for offer, _ in offers if offer.attention.valid is not None}
    reasons_by_label: dict[str, str] = {}
    for name, reasons in of_ranges.items():
        for of_form, reason in reasons.items() if name not in takes_one else ():
            repeats = name in refusals and reason in (refusals[name], valid_range.REFUSAL)
            reasons_by_label |= {} if repeats else {of_form: reason}
    return reasons_by_label


def _answer(target: Target, form: Attention, variant: str, setting: Setting) -> Offer | Refusal:
    """What a target says to a form, but for what it has to say first that it takes."""
    if form.not_affine and not getattr(target, "takes_any_score", False):
        return Refusal(target.name, form.not_affine)
    if form.valid is not None and not getattr(target, "takes_valid_range", False):
        return Refusal(target.name, valid_range.REFUSAL)
    answer = target.consider(form, variant, setting)
    if isinstance(answer, Refusal) or not (table := flex.table_cost(form, setting)):
        return answer
    return replace(answer, microseconds=answer.microseconds + table)


def _candidates(offers: _Offers, prefer: str, allowed: tuple[str, ...] | None) -> _Offers:
    """The offers to choose from; none if the user requested that the site be left."""
    if prefer == "fused":
        return [o for o in offers if o[0].fused] or offers
    if prefer == "first":
        offering = {offer.target for offer, _ in offers} | {LEAVE}
        first = next((name for name in allowed or () if name in offering), LEAVE)
        return [o for o in offers if o[0].target == first]
    return offers


def _alternatives(offers: _Offers, setting: Setting) -> dict[str, _Offers]:
    """Offers like one of these with other block sizes, by the label of that one."""
    alternatives: dict[str, _Offers] = {}
    for offer, target in offers:
        more = getattr(target, "alternatives", None)
        others = [] if more is None else [(other, target) for other in more(offer, setting)]
        if others:
            alternatives[_label(offer)] = others
    return alternatives


def _shortlist(offers: _Offers, alternatives: Mapping[str, _Offers]) -> list[str]:
    """The labels of the offers worth measuring, the best by prediction first.

    Where the best offer of a target has alternatives they come before what the targets offer besides their best, so
    that another of these is not measured in the place of a better block size.
    """
    ordered = sorted((o for o, _ in offers), key=lambda o: o.microseconds)
    limit = ordered[0].microseconds * _HOPELESS
    close = [o for o in ordered if o.microseconds <= limit]
    best = list({o.target: o for o in reversed(close)}.values())
    more = [other for o in best for other, _ in alternatives.get(_label(o), ())]
    first = sorted(best, key=lambda o: o.microseconds) if more else []
    return list(dict.fromkeys(_label(o) for o in (*first, *more, *close)))[:_MOST_MEASURED]


def _label(offer: Offer) -> str:
    return label(offer.target, offer.variant)


def label(target: str, variant: str) -> str:
    """What a form is called in predictions and measurements."""
    return f"{target} ({variant})" if variant else target


def _why_none(choice: Choice, attention: Attention) -> str:
    others = [r for r in choice.refusals.values() if r != attention.not_affine]
    if attention.not_affine and others:
        return f"{attention.not_affine}; {others[0]}"
    return choice.why_none or "no target is allowed"
