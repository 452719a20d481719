"""Rewrites one root graph: bodies, sites, the choice for each, the edit, the record. Errors stay with their site.

Then what surrounds the sites, each once for the whole graph: padding, projections, linear layers, operands.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch._guards import CompileContext
from torch.fx import GraphModule, Node

from attn_pass.devices.base import Finder
from attn_pass.devices.registry import decomposed_calls, families, settled_kernels
from attn_pass.errors import OptionError, RewriteError, first_line
from attn_pass.graph import allowed
from attn_pass.graph.cut import CannotExtract
from attn_pass.graph.provenance import Emission, mark
from attn_pass.graph.regions import Region, region_of_body
from attn_pass.graph.subgraphs import Body, bodies
from attn_pass.graph.values import MAY_BE_ZERO, Sizes
from attn_pass.model.formula import formula_of
from attn_pass.model.views import NoView
from attn_pass.options import Options, Runner
from attn_pass.padding.regions import PACKED_ROWS, Graph, of_other_targets, take_padding_out
from attn_pass.patterns import calls, composite, joined_scores, one_length, softmax
from attn_pass.patterns.base import Site
from attn_pass.patterns.opaque import Opaque
from attn_pass.patterns.random_ops import DropoutSites
from attn_pass.planner.choose import Selection
from attn_pass.planner.overrides import check_names
from attn_pass.planner.stock import AskStock
from attn_pass.projections.library import LINEAR_LAYERS, give_to_libraries
from attn_pass.projections.read import mark_projections, unmark
from attn_pass.projections.rewrite import JOINED, join_projections
from attn_pass.projections.rewrite import Graph as Projected
from attn_pass.reading.describe import Described
from attn_pass.reading.prologue import prologues
from attn_pass.report.build import place_of, record_of
from attn_pass.report.pages import collect
from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport
from attn_pass.report.torch_logging import is_bisected_away
from attn_pass.rewriting.check import compare_compiled
from attn_pass.rewriting.composites import give_arguments
from attn_pass.rewriting.context import GraphContext, Surroundings
from attn_pass.rewriting.decision import Partners, decision_for, stays
from attn_pass.rewriting.emission import HoldsForSome, emit
from attn_pass.rewriting.left_to_stock import let_stock
from attn_pass.rewriting.record import cases_of, picture_of_site, record_choice, record_taken
from attn_pass.rewriting.run import MeasureSite, Run
from attn_pass.rewriting.setting import made_of
from attn_pass.tuning.tuner import Tuner
from attn_pass.verify import CompileSite, Mismatch

__all__ = ["MeasureSite", "rewrite_graph"]


def rewrite_graph(
    gm: GraphModule,
    *,
    options: Options,
    report: Report,
    program: str,
    runner: Runner = "other",
    measure: MeasureSite | None = None,
    compile_site: CompileSite | None = None,
    emissions: list[Emission] | None = None,
    without: Mapping[str, str] | None = None,
    ask_stock: AskStock | None = None,
    explains: bool = False,
    checks: str = "",
) -> bool:
    """Rewrites every site of a root graph and of its higher-order-op bodies in place; returns whether anything changed.

    ``program`` is "compile" (a Dynamo graph), "export" (an exported program's graph) or "aoti"; ``runner`` says what
    becomes of the result (`attn_pass.options.Runner`). ``measure`` times forms in place of the tuner's worker,
    ``compile_site`` compiles a rewritten site for ``verify="kernel"``. The targets in ``without`` are refused for the
    reason given with them. ``ask_stock`` tells what stock makes of a site: of every one where a report is all that is
    wanted (``explains``), and of those that are left by choice. One `SiteReport` a site is appended to ``report``, and
    one `Emission` to ``emissions`` for each that a target replaced. With ``options.on_error == "warn"`` a failure
    leaves its site as it was. With ``checks``, the name of the backend that ``compile_site`` is, nothing is rewritten:
    its code for each site is compared with what was read.
    """
    check_names(options)
    started = time.perf_counter()
    if measure is None and options.tune:
        measure = Tuner(options)
    run = Run(
        options,
        report,
        program,
        Sizes(gm.meta.get(MAY_BE_ZERO, ())),
        DropoutSites(gm.graph),
        runner=runner,
        measure=measure,
        compile_site=compile_site if options.verify == "kernel" or checks else None,
        emissions=[] if emissions is None else emissions,
        without=without or {},
        ask_stock=ask_stock,
        explains=explains,
        checks=checks,
        graph_id=str(CompileContext.current_compile_id() or "") if program == "compile" else "",
    )
    if program == "compile":
        one_length.settle(gm.graph, decomposed_calls())
    region, known = Region.ambient() if program == "compile" else Region(), len(report.sites)
    changed = _Rewriting(GraphContext(run, gm, Surroundings(region))).rewrite()
    if changed and options.unpad and PACKED_ROWS not in run.without and program in ("compile", "aoti"):
        _take_padding_out(run, gm, region, report.sites[known:])
    if options.join_projections != "off" and not checks:
        changed |= _join_projections(run, gm, region)
    if changed and runner == "inductor" and options.linear_layers == "best" and LINEAR_LAYERS not in run.without:
        _give_to_libraries(run, gm, region)
    if changed and runner != "other":
        _settle_operands(run, gm)
    report.seconds += time.perf_counter() - started
    report.graphs += 1
    return changed


def _take_padding_out(run: Run, gm: GraphModule, region: Region, sites: Sequence[SiteReport]) -> None:
    """Runs what surrounds the attentions without padding, where that is proved, and records what came of it."""
    operators = {operator for family in families() for operator in family.attention_of_packed_rows()}
    draws = run.program != "compile" or not torch._inductor.config.fallback_random
    is_given = run.runner == "inductor" and LINEAR_LAYERS not in run.without
    options = run.options if is_given else replace(run.options, linear_layers="off")  # what they take is counted on
    graph = Graph(gm, operators, run.sizes, region, options, run.device_of, draws)
    regions = take_padding_out(graph, functools.partial(run.complain, None))
    names = {family.packs_rows for family in families()}
    run.report.regions += [*regions, *of_other_targets(sites, names - {""})]
    if any(r.outcome == "packed" for r in regions):
        _check(gm)


def _join_projections(run: Run, gm: GraphModule, region: Region) -> bool:
    """Makes one product of linear layers of one input, and records what came of all projections; whether it changed."""
    without = run.without.get(JOINED, "")
    may_lay_out = run.program == "compile" and run.runner == "inductor" and run.options.join_projections == "parameters"
    any_strides = [operator for family in families() for operator in family.attention_of_packed_rows()]
    graph = Projected(gm, run.program, run.sizes, region, run.options, run.device_of, without, may_lay_out, any_strides)
    records = join_projections(graph, functools.partial(run.complain, None))
    unmark(gm)
    run.report.projections += records
    if not any(r.outcome == "joined" for r in records):
        return False
    _check(gm)
    return True


def _give_to_libraries(run: Run, gm: GraphModule, region: Region) -> None:
    """Has linear layers multiplied by the library that is fastest, and records which."""
    try:
        records = give_to_libraries(gm, run.program, run.sizes, region, run.device)
    except Exception as error:
        run.complain(None, "linear layers stay torch's calls", error)
        return
    run.report.linear_layers += records
    if records:
        _check(gm)


def _settle_operands(run: Run, gm: GraphModule) -> None:
    """What families still change for Inductor: each change alone leaves every value as it is."""
    for family in families():
        try:
            settled = family.settle_operands(gm.graph, run.sizes)
        except Exception as error:
            run.complain(None, f"operands of the {family.name} kernels stay as they are", error)
            settled = True  # perhaps some of them
        if settled:
            _check(gm)


def _check(gm: GraphModule) -> None:
    """Checks a graph that was changed, and makes its code anew."""
    gm.graph.lint()
    gm.recompile()


class _Rewriting:
    """One graph being rewritten: bodies first, while it is still as it was read; then its sites, in graph order."""

    def __init__(self, context: GraphContext) -> None:
        self.context, self.run = context, context.run
        self.partners = Partners(context)

    def rewrite(self) -> bool:
        """Whether anything in the graph or in a body of it has changed."""
        try:
            changed = [self._rewrite_body(body) for body in bodies(self.context.gm)]
            return self._rewrite_sites() or any(changed)
        finally:
            self.context.take_back()  # what is in use by now stays

    def _rewrite_body(self, body: Body) -> bool:
        if not body.rewritable:
            return False
        regions = {region_of_body(c.node, self.context.regions.of(c.node)) for c in body.calls}
        if len(regions) != 1:
            return False
        around = self.context.of_body(body, regions.pop())
        return _Rewriting(GraphContext(self.run, body.module, around)).rewrite()

    def _rewrite_sites(self) -> bool:
        context, gm = self.context, self.context.gm
        unordered = composite.with_opaque(self._sites(), context.opaque)
        sites = sorted(unordered, key=lambda s: context.effects.position[s.node])
        self._note_dropout(sites)
        if self.run.options.join_projections != "off" and not self.run.checks:
            self._mark_projections(sites)
        context.note_masks(site.described for site in sites if site.described is not None)
        touched = False
        with context.observed():
            try:
                for site in sites:
                    touched |= self._decide(site)
            finally:
                joined_scores.erase_unused(gm.graph, context.joined)
            touched |= allowed.settle(context.pieces)
        if touched:
            _check(gm)
        return touched

    def _sites(self) -> Iterator[Site]:
        idle = {node for piece in self.context.pieces for node in piece.idle}
        added = {node for joined in self.context.joined for node in joined.nodes}
        for module, finder in _finders():
            try:
                for site in finder(self.context.reader):
                    # Each piece of a product that was added is in the program, and read by itself.
                    if site.node not in idle and not (site.node in added and site.refusal):
                        yield site
            except Exception as error:
                self.run.complain(None, f"{module.rpartition('.')[2]} could not read the graph", error)

    def _mark_projections(self, sites: list[Site]) -> None:
        """Marks the linear layers that make queries, keys and values, while sites still are as they were written."""
        try:
            mark_projections(sites, self.context.effects, self.context.around.bound)
        except Exception as error:
            self.run.complain(None, "projections could not be read", error)

    def _note_dropout(self, sites: list[Site]) -> None:
        """Notes the calls that draw dropout already, for those that are going to."""
        for site in sites:
            if site.described is None or not site.described.attention.dropout or site.form == softmax.FORM:
                continue
            if (parts := made_of(self.context, site.described)) is not None:
                self.run.dropout_sites.add(site.node, parts)

    # ------------------------------------------------------------ one site

    def _decide(self, site: Site) -> bool:
        """Decides on a site and records it; returns whether the graph has changed."""
        record = record_of(site, self.context.around.count)
        self.run.report.append(record)
        record.id = f"{self.run.graph_id}#{len(self.run.report.sites)}"
        changed = self._decided(site, record)
        if self.run.options.timeline and not changed:
            mark((site.node, *site.internal), record.in_timeline("left"))
        return changed

    def _decided(self, site: Site, record: SiteReport) -> bool:
        """As `_decide`, for a record that is in the report."""
        if site.described is not None:
            with self.run.details(record):
                record.formula = formula_of(site.described.attention)
            if self.run.explains:
                with self.run.details(record):
                    record.prologue = {n: str(p) for n, p in prologues(self.context.reader, site.described).items()}
        if site.composite is None and (site.described is None or site.refusal):
            record.reason = site.refusal + place_of(site.refused_at, site.node)
            if site.error is not None:
                self.run.complain(record, "a site could not be read and is left as it was", site.error)
            return False
        try:
            if not self.run.checks and (alone := self.partners.why_left(site)):
                record.reason = alone
                return False
            return self._rewrite_site(site, record)
        except OptionError:
            raise
        except Exception as error:
            record.mark_left(f"internal error: {type(error).__name__}: {first_line(error)}")
            self.run.complain(record, "a site is left as it was", error)
            return False

    def _rewrite_site(self, site: Site, record: SiteReport) -> bool:
        """Rewrites a site in the way it is to be: in its place, as part of a call in pieces, or by other arguments."""
        context, opaque = self.context, site.opaque
        on_trial = frozenset(() if opaque is None else opaque.nodes)
        picture = functools.partial(picture_of_site, context, site)
        with (
            joined_scores.as_read(context.joined, site),
            collect.site(context.gm.graph, record, picture, on_trial, _operands(site)),
        ):
            if site.composite is not None and self.run.checks:
                record.reason = record.not_verified = "it is one call of a library, which is not compiled alone"
                return False
            if site.composite is not None:
                changed = give_arguments(context, site, site.composite, record)
                if changed and context.run.options.timeline:
                    mark((site.composite.node,), record.in_timeline(record.target or ""))
                return changed
            assert site.described is not None
            if opaque is None:
                return self._replace(site, site.described, record)
            return self._replace_opaque(site, site.described, opaque, record)

    def _replace_opaque(self, site: Site, described: Described, opaque: Opaque, record: SiteReport) -> bool:
        """Keeps a call in pieces where the attention in it is rewritten; else it stays the call it was."""
        assert opaque.expansion is not None
        changed = False
        try:
            changed = self._replace(site, described, record)
        finally:
            if not changed:
                opaque.take_back()
        if changed:
            self.context.keep(opaque.expansion)
        return changed

    def _replace(self, site: Site, described: Described, record: SiteReport) -> bool:
        """Chooses for a site, and takes the first of what was chosen that can be emitted."""
        if self.run.checks:
            return self._check(site, described, record)
        if reason := stays(self.context, site, described.attention):
            record.reason = reason
            return False
        decision = decision_for(self.context, site, described, record)
        record_choice(self.run, site, described, decision, record)
        selections = decision.choice.selections
        if not selections:
            with self.run.details(record):
                let_stock(self.context, site, described, decision, record)
        if selections and self.run.runner == "hook" and is_bisected_away(lambda: f"attn_pass: {record.where}"):
            record.reason = "torch's compiler bisector disabled this rewrite"
            return False
        for selection in selections:
            smaller = functools.partial(self._verify_smaller, site, selection)
            try:
                verified = emit(self.context, site, described, record, selection, decision.setting, smaller)
            except Mismatch as error:
                record.refusals[selection.target.name] = record.reason = str(error)
                self.run.complain(record, "a site is left as it was", error)
                return False
            except (RewriteError, NoView) as error:  # another offer may take the mask as the program has it
                record.refusals[selection.target.name] = first_line(error)
                if selection is selections[-1]:
                    if not isinstance(error, HoldsForSome | NoView):
                        raise
                    record.reason = first_line(error)
                continue
            record_taken(self.run, site, described, decision, selection, verified, record)
            if decision.made_of is not None and described.attention.dropout:
                self.run.dropout_sites.add(self.context.now(site.node), decision.made_of, site.node)
            return True
        return False

    def _check(self, site: Site, described: Described, record: SiteReport) -> bool:
        """Compares a backend's code for a site with its meaning; the site stays as it is."""
        try:
            compare_compiled(self.context, site, described, record, functools.partial(self._check_smaller, site))
        except Mismatch as error:
            record.refusals[self.run.checks] = record.reason = str(error)
        return False

    def _check_smaller(self, site: Site, gm: GraphModule) -> float:
        """Compares the code for a smaller form of a site."""
        run = replace(self.run, report=Report(), sizes=Sizes(), dropout_sites=DropoutSites(gm.graph))
        around = Surroundings(site.region, is_body=self.context.around.is_body)
        _Rewriting(GraphContext(run, gm, around)).rewrite()
        sites = run.report.sites
        if len(sites) == 1 and sites[0].refusals:
            raise Mismatch(sites[0].reason)
        if len(sites) != 1 or sites[0].verified_error is None:
            raise CannotExtract("with a shorter length it is not one site that can be run")
        return sites[0].verified_error

    def _verify_smaller(self, site: Site, selection: Selection, gm: GraphModule) -> float:
        """Rewrites a smaller form of a site the same way, and verifies that."""
        options = replace(
            self.run.options,
            choose="first",
            targets=(selection.offer.target,),
            poor_cases=cases_of(selection.offer),
            rules=(),
            tune=False,
            on_error="raise",
        )
        run = Run(
            options,
            Report(),
            self.run.program,
            Sizes(),
            DropoutSites(gm.graph),
            runner=self.run.runner,
            compile_site=self.run.compile_site,
        )
        around = Surroundings(site.region, is_body=self.context.around.is_body)
        _Rewriting(GraphContext(run, gm, around)).rewrite()
        sites = run.report.sites
        error = sites[0].verified_error if len(sites) == 1 else None
        if error is None:
            raise CannotExtract("with a shorter length it is rewritten to something else")
        return error


def _finders() -> Iterator[tuple[str, Finder]]:
    """What finds sites, each with the name of its module."""
    yield calls.__name__, functools.partial(calls.find, kernels=decomposed_calls(), settled_kernels=settled_kernels())
    yield from ((finder.__module__, finder) for family in families() for finder in family.finders())
    yield softmax.__name__, softmax.find


def _operands(site: Site) -> tuple[Node, ...]:
    """The nodes that hold query, key and value; none of a call that was not read."""
    if site.described is None:
        return ()
    a = site.described.attention
    return tuple(site.described.nodes[n] for n in (a.query.source, a.key.source, a.value.source))
