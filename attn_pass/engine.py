"""One root graph: sites, descriptions, the choice, the edit, the record. Errors stay with the site they concern."""

from __future__ import annotations

import functools
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from attn_pass.compat import context_parallel_is_active, recomputes_everything
from attn_pass.devices.registry import device_for, families, family_of
from attn_pass.errors import AttnPassWarning, OptionError, RewriteError, first_line
from attn_pass.graph import allowed, vmapped
from attn_pass.graph.ancestry import Ancestry, ancestry
from attn_pass.graph.cut import Around, CannotExtract, Level
from attn_pass.graph.edit import LayoutError, Plan, SizeNodes, Value, fake_of, replace_arguments
from attn_pass.graph.effects import Effects
from attn_pass.graph.provenance import Emission, operator_name
from attn_pass.graph.regions import Region, Regions, region_of_body
from attn_pass.graph.stand_in import NoSize, ShapeUse, give_stand_ins
from attn_pass.graph.subgraphs import Body, bodies, placeholders
from attn_pass.graph.values import CONSTANTS, KNOWN_TENSORS, MAY_BE_ZERO, Sizes, tensor_value, value_key, wants_gradient
from attn_pass.model.attention import AsWritten, Attention
from attn_pass.model.formula import formula_of
from attn_pass.model.index import Index, product
from attn_pass.model.picture import picture_of
from attn_pass.options import LEAVE, Options, Runner
from attn_pass.patterns import also_used, by_slices, calls, composite, flex_calls, joined_scores, softmax, summed_pieces
from attn_pass.patterns.base import Site
from attn_pass.patterns.random_ops import DropoutSites
from attn_pass.patterns.softmax_forms import read_softmax
from attn_pass.planner import roofline
from attn_pass.planner.choose import AS_ASKED, Choice, Measured, Selection, choose, score_product_cost
from attn_pass.planner.lengths import lengths
from attn_pass.planner.overrides import before_leave, check_names, rule_for
from attn_pass.poor_cases import CASES, variants
from attn_pass.reading.describe import Described
from attn_pass.reading.reader import Reader
from attn_pass.report.build import place_of, record_of
from attn_pass.report.pages import collect
from attn_pass.report.pages.picture import Picture
from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport
from attn_pass.report.torch_logging import is_bisected_away, observed
from attn_pass.targets.base import Offer, Setting
from attn_pass.tuning.tuner import Tuner, TuningSite
from attn_pass.verify import CompileSite, Mismatch, Subject, Verified, verify

MeasurePlace = Callable[[TuningSite, Sequence[str]], Measured | str]


def rewrite_graph(
    gm: GraphModule,
    *,
    options: Options,
    report: Report,
    program: str,
    runner: Runner = "other",
    measure: MeasurePlace | None = None,
    compile_site: CompileSite | None = None,
    emissions: list[Emission] | None = None,
    without: Mapping[str, str] | None = None,
) -> bool:
    """Rewrites every site of a root graph and of its higher-order-op bodies in place; returns whether anything changed.

    ``program`` is "compile" (a Dynamo graph), "export" (an exported program's graph) or "aoti"; ``runner`` says what
    becomes of the result (`attn_pass.options.Runner`). ``measure`` times forms in place of the tuner's worker,
    ``compile_site`` compiles a rewritten site for ``verify="kernel"``. The targets in ``without`` are refused for the
    reason given with them. One `SiteReport` a site is appended to ``report``, and one `Emission` to ``emissions`` for
    each that a target replaced. With ``options.on_error == "warn"`` a failure leaves its site as it was.
    """
    check_names(options)
    started = time.perf_counter()
    outer = Region.ambient() if program == "compile" else Region()
    if measure is None and options.tune:
        measure = Tuner(options)
    root = _Graph(
        gm,
        Sizes(gm.meta.get(MAY_BE_ZERO, ())),
        outer,
        options,
        report,
        program,
        DropoutSites(gm.graph),
        count=1,
        runner=runner,
        measure=measure,
        compile_site=compile_site if options.verify == "kernel" else None,
        emissions=[] if emissions is None else emissions,
        without=without or {},
    )
    root.prepare()
    changed = root.rewrite()
    report.seconds += time.perf_counter() - started
    report.graphs += 1
    return changed


_OF_A_SHARD = "context parallelism is active: its mask is one of a shard's positions, not of the sequence's"
_WITHIN_A_SHARD = (
    "context parallelism is active: it is attention within a shard, and a call in its place would be ring attention"
)


class _HoldsForSome(RewriteError):
    """What was planned rests on a fact about symbolic sizes or strides: a reason to leave the site, and no fault."""


@dataclass(frozen=True)
class _Decision:
    """What is chosen for a site, and under which circumstances."""

    choice: Choice
    setting: Setting
    made_of: Ancestry | None
    written: AsWritten
    rule: tuple[str, tuple[str, ...]] | None


@dataclass
class _Graph:
    """One graph, with what is known about it and the graphs around it."""

    gm: GraphModule
    sizes: Sizes
    outer: Region
    options: Options
    report: Report
    program: str
    draws: DropoutSites
    count: int
    is_body: bool = False
    is_checkpoint: bool = False
    runner: Runner = "other"
    measure: MeasurePlace | None = None
    compile_site: CompileSite | None = None
    emissions: list[Emission] = field(default_factory=list)
    without: Mapping[str, str] = field(default_factory=dict)
    levels: tuple[Level, ...] = ()  # the graphs around this body
    bound: Mapping[Node, Node] = field(default_factory=dict)  # what is passed to its placeholders, and to theirs
    together: dict[frozenset[str], bool] = field(default_factory=dict)  # whether sites that share nodes are rewritten

    def prepare(self) -> None:
        """Reads the graph; before, calls that are one node, torch's own and the user's, are taken apart, on trial."""
        self.opaque: list[composite.Opaque] = []
        self.pieces: list[allowed.Settles] = []
        try:
            with self._observed():
                self.pieces += allowed.put_in_pieces(self.gm, self.sizes, self.outer, self.is_body)
                self.pieces += by_slices.put_together(self.gm, self.sizes, self.outer, self.is_body)
                self.pieces += vmapped.without_vmap(self.gm, self.sizes, self.outer, self.is_body)
                self.opaque = composite.take_apart(self.gm, self.sizes, self.outer, self.is_body)
                self.opaque += flex_calls.take_apart(self.gm, self.sizes, self.outer, self.is_body)
        except Exception as error:
            self._complain(None, "calls of torch's modules could not be taken apart", error)
        try:
            self._read()
        except BaseException:
            self._take_back()
            raise

    def _read(self) -> None:
        """Effects, regions, reach."""
        graph = self.gm.graph
        self.effects = Effects(graph)
        self.regions = Regions(graph, self.outer)
        knows = self.program == "compile"
        self.reader = Reader(graph, self.sizes, self.effects, self.regions, knows_gradients=knows)
        known = self.gm.meta.get(CONSTANTS, {})
        self.reader.constants = {n: known[n.name] for n in graph.nodes if n.name in known}
        tensors = self.gm.meta.get(KNOWN_TENSORS, {})
        self.reader.known = {n: tensors[n.name] for n in graph.nodes if n.name in tensors}
        expansions = [o.expansion for o in self.opaque if o.expansion is not None]
        self.reader.needed = frozenset(new for e in expansions for _, new in e.results)
        self.joined = joined_scores.join_scores(graph, self.reader)
        self.reader.find_reach(lambda node: read_softmax(self.reader, node) is not None)
        self.summed = summed_pieces.join_sums(graph, self.reader)
        self.pieces += self.summed
        self.replaced: dict[Node, Node] = {}
        self.context_parallel = context_parallel_is_active()
        self.size_nodes: SizeNodes | None = None

    def _observed(self) -> AbstractContextManager[None]:
        """Around changes of the graph. In Inductor's hook a root graph is observed already."""
        return observed(self.gm) if self.is_body or self.runner != "hook" else nullcontext()

    def _take_back(self) -> None:
        for opaque in self.opaque:
            opaque.take_back()
        allowed.settle(self.pieces)

    def rewrite(self) -> bool:
        """Bodies first, while this graph is still as it was read; then the sites, in graph order."""
        try:
            return self._rewrite()
        finally:
            self._take_back()  # what is in use by now stays

    def _rewrite(self) -> bool:
        changed = False
        for body in bodies(self.gm):
            changed |= self._rewrite_body(body)
        found = composite.with_opaque(self._sites(), self.opaque)
        sites = sorted(found, key=lambda s: self.effects.position[s.node])
        for site in sites:
            if site.described is None or not site.described.attention.dropout or site.form == softmax.FORM:
                continue
            if (made_of := self._made_of(site.described)) is not None:
                self.draws.add(site.node, made_of)
        touched = False
        with self._observed():
            try:
                for site in sites:
                    touched |= self._decide(site)
            finally:
                joined_scores.erase_unused(self.gm.graph, self.joined)
            touched |= allowed.settle(self.pieces)
        if touched:
            self.gm.graph.lint()
            self.gm.recompile()
        return changed or touched

    def _rewrite_body(self, body: Body) -> bool:
        if not body.rewritable:
            return False
        regions = {region_of_body(c.node, self.regions.of(c.node)) for c in body.calls}
        if len(regions) != 1:
            return False
        region = regions.pop()
        inner = _Graph(
            body.module,
            self.sizes,
            region,
            self.options,
            self.report,
            self.program,
            self.draws,
            self.count * len(body.calls),
            is_body=True,
            # Called where gradients are off, a checkpoint marks nothing for recomputing.
            is_checkpoint=self.is_checkpoint or (body.kind == "checkpoint" and region.grad_enabled is not False),
            runner=self.runner,
            measure=self.measure,
            compile_site=self.compile_site,
            emissions=self.emissions,
            without=self.without,
        )
        inner.prepare()
        inner.reader.known_used = self.reader.known_used
        if len(body.calls) == 1:
            (call,) = body.calls
            time_of_call = self.effects.position[call.node]
            inner.levels = (Level(self.gm.graph, self.effects, time_of_call, self.regions), *self.levels)
            inner.bound = dict(self.bound)
            for placeholder, argument in zip(placeholders(body.module), call.operands):
                if isinstance(argument, Node):
                    inner.reader.bindings[placeholder] = (self.reader, argument, time_of_call)
                    inner.bound[placeholder] = argument
        return inner.rewrite()

    def _sites(self) -> Iterator[Site]:
        idle = {node for piece in self.pieces for node in piece.idle}
        of_families = (finder for family in families() for finder in family.finders())
        for finder in (calls.find, *of_families, softmax.find):
            try:
                yield from (site for site in finder(self.reader) if site.node not in idle)
            except Exception as error:
                self._complain(None, f"{finder.__module__.rpartition('.')[2]} could not read the graph", error)

    # ------------------------------------------------------------ one site

    def _decide(self, site: Site) -> bool:
        record = record_of(site, self.count)
        self.report.append(record)
        if site.described is not None:
            with self._details(record):
                record.formula = formula_of(site.described.attention)
        if site.composite is None and (site.described is None or site.refusal):
            record.reason = site.refusal + place_of(site.refused_at, site.node)
            if site.error is not None:
                self._complain(record, "a site could not be read and is left as it was", site.error)
            return False
        on_trial = frozenset(() if site.opaque is None else site.opaque.nodes)
        try:
            if site.partners and (alone := self._alone(site)):
                record.reason = alone
                return False
            with (
                joined_scores.as_read(self.joined, site),
                collect.site(self.gm.graph, record, functools.partial(self._picture, site), on_trial),
            ):
                if site.composite is not None:
                    return self._apply_composite(site, record)
                return self._replace(site, record) if site.opaque is None else self._replace_opaque(site, record)
        except OptionError:
            raise
        except Exception as error:
            record.mark_left(f"internal error: {type(error).__name__}: {first_line(error)}")
            self._complain(record, "a site is left as it was", error)
            return False

    def _alone(self, site: Site) -> str:
        """Why a site that shares inner nodes with others is left: some of them are. Empty where all are rewritten.

        What they share would be computed once if they were left, and in each of their kernels if not.
        """
        key = frozenset(p.node.name for p in site.partners)
        if key not in self.together:
            leaving = taking = 0.0
            for partner in site.partners:
                assert partner.described is not None
                attention = partner.described.attention
                decision = self._decision(partner, partner.described, record_of(partner, self.count))
                if self._not_here(attention) or not decision.choice.takes:
                    self.together[key] = False
                    break
                again = 0.0 if partner is site.partners[0] else score_product_cost(attention, decision.setting)
                leaving += decision.choice.predicted_us.get(LEAVE, 0.0) - again
                taking += decision.choice.takes[0].offer.microseconds
            else:
                self.together[key] = taking < leaving or self.options.choose != "cheapest"
        return "" if self.together[key] else f"{site.alone}, in an attention that is left or costs less as it is"

    def _replace(self, site: Site, record: SiteReport) -> bool:
        described = site.described
        assert described is not None
        attention = described.attention
        if reason := self._not_here(attention) or self._call_stays(site, attention):
            record.reason = reason
            return False
        decision = self._decision(site, described, record)
        choice, setting, made_of, written, rule = (
            decision.choice,
            decision.setting,
            decision.made_of,
            decision.written,
            decision.rule,
        )
        record.refusals = choice.refusals
        record.measured_us = {k: round(v, 1) for k, v in choice.measured_us.items()}
        record.predicted_us = {k: round(v, 1) for k, v in choice.predicted_us.items()}
        with self._details(record):
            record.rates = roofline.rates(setting.device, attention)
            if (as_it_is := choice.predicted_us.get(LEAVE)) is not None:
                record.roofline[LEAVE] = roofline.as_left(attention, written, setting, as_it_is)
        by_rule = "" if rule is None else f" ({rule[0]})"
        record.reason = choice.reason + by_rule
        if site.needed_as_well:
            record.reason = (
                f"{site.needed_as_well}; without them: {record.reason}{place_of(site.refused_at, site.node)}"
            )
        if choice.takes and self.runner == "hook" and is_bisected_away(lambda: f"attn_pass: {record.where}"):
            record.reason = "torch's compiler bisector left it out"
            return False
        for take in choice.takes:
            try:
                verified = self._emit(site, record, take, setting)
            except Mismatch as error:
                record.refusals[take.target.name] = record.reason = str(error)
                self._complain(record, "a site is left as it was", error)
                return False
            except RewriteError as error:
                record.refusals[take.target.name] = first_line(error)
                if take is choice.takes[-1]:
                    if not isinstance(error, _HoldsForSome):
                        raise
                    record.reason = first_line(error)
                continue
            offer = take.offer
            record.reason = take.reason + by_rule
            if site.needed_as_well:
                given = site.logarithms is not None and offer.gives_logarithm
                record.reason += f"; {site.needed_as_well}, and {'the kernel gives it' if given else 'stay'}"
            record.outcome = "decomposed" if offer.target == "decomposed" else "rewritten"
            record.target, record.score_mod = offer.target, offer.score_mod
            record.poor_cases = _cases_of(offer)
            assumed, fixed = ((), ()) if site.opaque is None else (site.opaque.assumes, site.opaque.fixed)
            record.assumptions = tuple(dict.fromkeys((*offer.assumptions, *assumed, *described.assumptions)))
            record.fixed = tuple(dict.fromkeys((*fixed, *described.fixed)))
            with self._details(record):
                record.roofline[offer.target] = roofline.as_taken(offer, setting)
            if verified is not None:
                record.verified_error, record.not_verified = verified.error, verified.reason
            if made_of is not None and attention.dropout:
                self.draws.add(self.replaced[site.node], made_of, site.node)
            return True
        return False

    def _not_here(self, attention: Attention) -> str:
        """Why nothing is rewritten in a program like this one; empty where something may be."""
        if self.is_checkpoint and not attention.needs_grad:
            # AOTAutograd refuses the call there, stock's own as well: it counts the kernel as drawing random numbers.
            return (
                "no input of its checkpoint needs a gradient, and torch refuses fused calls there while gradients are "
                "on: call the model under torch.no_grad()"
            )
        if self.context_parallel:
            return _OF_A_SHARD if not attention.mask.is_none or attention.not_affine else _WITHIN_A_SHARD
        return ""

    def _call_stays(self, site: Site, attention: Attention) -> str:
        """Why a call of FlexAttention that was read stays the call it is; empty for anything else."""
        if site.opaque is None or site.opaque.form != flex_calls.FORM:
            return ""
        if flex_calls.ONCE_LISTED in site.opaque.assumes and self.options.numerics == "strict":
            return f"numerics='strict' does not assume that {flex_calls.ONCE_LISTED}"
        at = attention.sources[attention.query.source].device
        return family_of(device_for(at, self.options.device)).keeps_flex(attention)

    def _decision(self, site: Site, described: Described, record: SiteReport) -> _Decision:
        """What is chosen for a site, and what for: nothing is changed yet."""
        attention = described.attention
        made_of = self._made_of(described)
        setting = self._setting(site, attention, made_of)

        def copied(hint: Callable[[Index], int]) -> int:
            return sum(_bytes(n, self.sizes, hint) for n in described.copies)

        made = {n for one in self.joined for n in one.operands} | {one.values for one in self.summed}
        joined = sum(_bytes(n, self.sizes, self.sizes.hint) for n in described.nodes if n in made)
        stays = bool(site.needed_as_well)
        written = replace(site.written, copied_bytes=copied(self.sizes.hint), joined_bytes=joined, needed_as_well=stays)
        rule, measure = rule_for((site.node, *site.internal), record, self.options), None
        # What is measured as it is are the parts that were read, which a call that has a kernel of its own is not.
        is_parts = site.opaque is None or site.opaque.written is None
        if self.measure is not None and rule is None and not stays and is_parts:
            measure = functools.partial(self.measure, self._place(site, setting))
        choice = choose(
            attention,
            variants(attention, self.options.poor_cases),
            written,
            setting,
            prefer=self.options.choose if rule is None else "first",
            allowed=self.options.targets if rule is None else rule[1],
            measure=measure,
            elsewhere=lengths(attention, setting, written, copied),
            without=self.without,
        )
        return _Decision(choice, setting, made_of, written, rule)

    def _replace_opaque(self, site: Site, record: SiteReport) -> bool:
        """Keeps a call in pieces where the attention in it is rewritten; else it stays the call it was."""
        opaque, changed = site.opaque, False
        assert opaque is not None and opaque.expansion is not None
        try:
            changed = self._replace(site, record)
        finally:
            if not changed:
                opaque.take_back()
        if changed:
            self.replaced.update(opaque.expansion.keep(self.replaced))
        return changed

    def _emit(self, site: Site, record: SiteReport, take: Selection, setting: Setting) -> Verified | None:
        assert site.described is not None
        if self.size_nodes is None:
            passing = {n for o in self.opaque for n in o.nodes} | {n for p in self.pieces for n in p.idle}
            self.size_nodes = SizeNodes(self.gm, self.sizes, passing)
        nodes = tuple(self.replaced.get(n, n) for n in site.described.nodes)
        stands_for = None if site.opaque is None else site.opaque.stands_for(site.node)
        plan = Plan(self.gm, site.node, site.region, self.size_nodes, self.effects, self.is_body, stands_for)
        with plan.running():
            before = plan.guards()
            try:
                value = take.target.emit(plan, nodes, take.offer, setting)
                if site.written_to is not None and self._is_seen(site.written_to, site.node):
                    buffer = self.replaced.get(site.written_to, site.written_to)
                    value = plan.call(torch.ops.aten.copy_.default, buffer, value)
                logarithms = also_used.given_by_kernel(plan, site, take.offer.gives_logarithm)
            except LayoutError as error:
                raise _HoldsForSome(str(error)) from None
            except GuardOnDataDependentSymNode as error:
                raise _HoldsForSome(
                    f"{take.target.name} asks for a size that is known at run time only ({error.cond})"
                ) from None
        if self.program != "compile" and (broken := plan.broken_guard(before)) is not None:
            raise _HoldsForSome(f"{take.target.name} would hold for some sizes only: {broken}")  # nobody checks them
        old, new = tensor_value(site.node), fake_of(value)
        if old is None or self.sizes.shape(old) != self.sizes.shape(new) or old.dtype != new.dtype:
            raise RewriteError(
                f"{take.target.name} gives {new.dtype} {tuple(new.shape)} where {site.node.name} was "
                f"{None if old is None else (old.dtype, tuple(old.shape))}"
            )
        verified = None
        if self.options.verify != "off":
            device = setting.device
            if device.is_here and old.device.type == device.type:
                verified = self._verified(site, record, take, nodes, value)
            else:
                verified = Verified(None, f"there is no {device.name} here to run it on")
        stack_trace = str(site.node.meta.get("stack_trace") or "")
        internal, shape_uses = site.internal, site.shape_uses
        if logarithms:
            assert site.logarithms is not None
            internal, shape_uses = site.logarithms.internal, site.logarithms.shape_uses
        self._give_stand_ins(site.node, internal, shape_uses)
        gone = {site.node, *internal}
        for old_node, made in logarithms:
            node = plan.put_beside(made, old_node, gone)
            self.replaced[old_node] = node
            self.effects.put_in_place_of(node, old_node)
            self.regions.add(node, site.region)
        node = plan.apply(value, [n for n in internal if not n._erased])
        operators = frozenset(operator_name(n.target) for n in plan.inserted if n.op == "call_function")
        self.emissions.append(Emission(take.target.name, operators, stack_trace))
        self.replaced[site.node] = node
        self.effects.put_in_place_of(node, site.node)
        self.regions.add(node, site.region)
        return verified

    def _is_seen(self, buffer: Node, writer: Node) -> bool:
        """Whether anybody sees the tensor a result is written to but by the operation that writes it."""
        is_own = buffer.op not in ("placeholder", "get_attr") and self.effects.aliases(buffer)[0] is buffer
        return not is_own or set(buffer.users) != {writer}

    def _give_stand_ins(self, result: Node, internal: Sequence[Node], shape_uses: Sequence[ShapeUse]) -> None:
        """Gives what takes a shape from the site's inner nodes, and stays, other tensors of that shape."""
        try:
            gone = {result, *internal}
            for made, user in give_stand_ins(self.gm.graph, shape_uses, gone, self.sizes):
                self.effects.position[made] = self.effects.position[user]
                self.regions.add(made, self.regions.of(user))
        except NoSize as error:
            raise _HoldsForSome(str(error)) from None

    def _verified(
        self, site: Site, record: SiteReport, take: Selection, nodes: tuple[Node, ...], value: Value
    ) -> Verified:
        """What running the site as it was and as it is to be showed. Raises `Mismatch`."""
        assert site.described is not None
        time_of_result = self.effects.position[site.node]
        subject = Subject(
            site.node,
            replace(site.described, nodes=nodes),
            Around((Level(self.gm.graph, self.effects, time_of_result, self.regions), *self.levels), self.bound),
            self.sizes,
            site.region,
            {**self.reader.constants, **self._known_tensors()},
            wants_gradient if site.described.attention.needs_grad else lambda _: False,
            value,
            take.target.name,
            record.where,
            value_key(site.node),
            functools.partial(self._verify_smaller, site, take),
            self.compile_site,
        )
        return verify(subject)

    def _known_tensors(self) -> dict[Node, torch.Tensor]:
        return {node: tensor for node, (_, tensor) in self.reader.known.items()}

    def _verify_smaller(self, site: Site, take: Selection, gm: GraphModule) -> float:
        """Rewrites a smaller form of a site the same way, and verifies that."""
        options = replace(
            self.options,
            choose="first",
            targets=(take.offer.target,),
            poor_cases=_cases_of(take.offer),
            rules=(),
            tune=False,
            on_error="raise",
        )
        report = Report()
        smaller = _Graph(
            gm,
            Sizes(),
            site.region,
            options,
            report,
            self.program,
            DropoutSites(gm.graph),
            count=1,
            is_body=self.is_body,
            runner=self.runner,
            compile_site=self.compile_site,
        )
        smaller.prepare()
        smaller.rewrite()
        found = report.sites[0].verified_error if len(report.sites) == 1 else None
        if found is None:
            raise CannotExtract("with a shorter length it is rewritten to something else")
        return found

    def _place(self, site: Site, setting: Setting) -> TuningSite:
        assert site.described is not None
        return TuningSite(
            site.node,
            site.described.nodes,
            self.sizes,
            self.effects,
            self._known_tensors(),
            lambda node: self.program == "compile" and wants_gradient(node),
            setting,
        )

    def _made_of(self, described: Described) -> Ancestry | None:
        """What a site's operands and its mask are made of, where a target asks: on NPUs, for dropout and gradients."""
        a = described.attention
        device = device_for(a.sources[a.query.source].device, self.options.device)
        if not family_of(device).merges_equal_calls or not (a.dropout or self.program == "export"):
            return None
        nodes = (self.replaced.get(n, n) for n in described.nodes)
        effects = {self.gm.graph: self.effects, **{level.graph: level.effects for level in self.levels}}
        return ancestry(nodes, self.draws.root, self.bound, effects)

    def _may_need_grad(self, site: Site, made_of: Ancestry | None) -> bool:
        """Whether gradients may be wanted of a program whose values do not tell: where something it is made of does."""
        if made_of is None or self.program != "export" or site.region.grad_enabled is False:
            return False
        inputs = self.draws.root.find_nodes(op="placeholder")
        anything = any(map(wants_gradient, inputs))
        return made_of.needs_grad or (anything and not made_of.is_whole)

    def _setting(self, site: Site, attention: Attention, made_of: Ancestry | None) -> Setting:
        source = attention.sources[attention.query.source]
        device = device_for(source.device, self.options.device)
        deterministic = torch.are_deterministic_algorithms_enabled()
        deterministic = deterministic and not torch.is_deterministic_algorithms_warn_only_enabled()
        fused = None
        if site.region.sdpa_backends is None or site.written.from_library:
            stock = family_of(device).stock_kernel
            written = site.written
            fused = (
                written.library
                if written.from_library
                else stock(attention, written, device, deterministic=deterministic)
            )
        return Setting(
            device=device,
            program=self.program,
            numerics=self.options.numerics,
            assume_nonempty_rows=self.options.assume_nonempty_rows,
            autocast=site.region.autocast_dtype(source.device.type),
            allowed_backends=site.region.sdpa_backends,
            runner=self.runner,
            eager_form=not site.is_call,
            kernel_as_written=fused,
            deterministic=deterministic,
            may_need_grad=self._may_need_grad(site, made_of),
            is_recomputed=self.is_checkpoint or recomputes_everything(),
            wants_logarithm=site.logarithms is not None,
            may_be_merged_by_cse=made_of is not None
            and bool(attention.dropout)
            and self.draws.has_like(site.node, made_of),
            same_random_numbers=self.program == "compile" and bool(torch._inductor.config.fallback_random),
            hint=self.sizes.hint,
            can_be_zero=self.sizes.can_be_zero,
        )

    def _apply_composite(self, site: Site, record: SiteReport) -> bool:
        composite = site.composite
        assert composite is not None
        record.kind, record.reason = "attention", composite.refusal or ""
        device = device_for(torch.device(record.device or "cpu"), self.options.device)
        rule = rule_for((site.node, *site.internal), record, self.options)
        allowed = self.options.targets if rule is None else before_leave(rule[1])
        if allowed is not None and composite.target not in allowed:
            asked = AS_ASKED if rule and LEAVE in rule[1] else f"the target {composite.target} is not allowed"
            record.reason = record.reason or (asked if rule is None else f"{asked} ({rule[0]})")
        elif not (device.kernels and family_of(device).takes_composites):
            record.reason = record.reason or f"no rule for {device.type} devices yet"
        if composite.target in self.without:
            record.refusals[composite.target] = self.without[composite.target]
            record.reason = record.reason or self.without[composite.target]
        if record.reason:
            return False
        replace_arguments(composite.node, *composite.arguments)
        record.outcome, record.target, record.reason = "rewritten", composite.target, composite.why
        return True

    # ------------------------------------------------------------ telling

    @contextmanager
    def _details(self, record: SiteReport) -> Iterator[None]:
        """Around what the report could do without: a failure there leaves no site."""
        try:
            yield
        except Exception as error:
            self._complain(record, "the report of a site lacks something", error)

    def _picture(self, site: Site) -> Picture | None:
        if site.described is None:
            return None  # an opaque call
        known = {**self.reader.constants, **self._known_tensors()}
        values = [known.get(node) for node in site.described.nodes]
        return picture_of(site.described.attention, values, self.sizes.hint)

    def _complain(self, record: SiteReport | None, what: str, error: Exception) -> None:
        if self.options.on_error == "raise":
            raise error
        where = record.where if record is not None else "this graph"
        last = traceback.extract_tb(error.__traceback__)[-1]
        warnings.warn(
            f"attn_pass: {where}: {what} ({type(error).__name__}: {first_line(error)}, at "
            f"{last.filename.rpartition('/')[2]}:{last.lineno})",
            AttnPassWarning,
            stacklevel=2,
        )


def _cases_of(offer: Offer) -> tuple[str, ...]:
    """The poor cases whose variant an offer is for."""
    return tuple(n for n in offer.variant.split(" + ") if n in CASES)


def _bytes(node: Node, sizes: Sizes, hint: Callable[[Index], int]) -> int:
    value = tensor_value(node)
    if value is None:
        return 0
    return hint(product(sizes.shape(value))) * value.element_size()
