"""`check`: any backend's compiled attention, site by site, against the float64 meaning of what was read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch.fx import GraphModule

from attn_pass.engine import rewrite_graph
from attn_pass.entries.backends import backend_named, raise_if_missing
from attn_pass.entries.breaks import breaks_noted
from attn_pass.entries.environment import raise_if_environment
from attn_pass.entries.known import known_buffers
from attn_pass.entries.mistakes import check_keywords, check_training, refuse_no_backend
from attn_pass.entries.snapshot import Snapshot
from attn_pass.entries.uncompiled import own_compile_off
from attn_pass.errors import OptionError
from attn_pass.measuring.subject import NOT_REPEATABLE, Subject, subject_of
from attn_pass.measuring.timing import compiled, relative_error, why
from attn_pass.options import make_options
from attn_pass.report.json_schema import finite
from attn_pass.report.progress import progress
from attn_pass.report.record import Report
from attn_pass.report.site import Kind, SiteReport
from attn_pass.report.text import plain_table, printable, shape_lines
from attn_pass.report.units import counted
from attn_pass.verify import FAILS
from attn_pass.verify.compare import rounding

Verdict = Literal["right", "WRONG", "FAILS", "not run"]
"""FAILS: the backend raises an error, when it compiles or runs what runs eagerly. Not run: no fault of the backend."""
Backend = str | Callable[..., Any]

_COLUMNS = (("verdict", None), ("form", 2), ("where", 7), ("shapes", 7), ("mask", 4), ("error", 3), ("why", 12))
_SCRIPT = re.compile(r"reproduce it with (.+)$", re.MULTILINE)
_TIMES_KNOWN = 3.0


@dataclass(frozen=True)
class CheckedSite:
    """One attention, as the backend compiled it alone.

    Attributes:
        verdict: "right", "WRONG", "FAILS" if the backend raises an error where eager does not, or "not run".
        why: what differs, the error, or why it was not run; "" for a right one.
        error: largest absolute difference from the program run eagerly; None if the site is not right.
        script: a file that reproduces what is wrong with torch and the backend alone; "" if there is none.
        kind, form, where, module, mask, shapes, dtype: as in `SiteReport`.
    """

    verdict: Verdict
    why: str
    error: float | None
    script: str
    form: str
    where: str
    module: str
    mask: str
    shapes: tuple[str, ...]
    dtype: str
    kind: Kind = "attention"


@dataclass(frozen=True)
class Check:
    """What `attn_pass.check` saw. ``str(check)`` is a table.

    ``bool(check)`` is False if anything is wrong or fails, or if no site was run.

    Attributes:
        backend: its name.
        sites: one for each attention that was read.
        whole: the verdict on the whole program: "right", "WRONG", "FAILS" or "not run".
        whole_error: their largest difference over the largest value of the reference; None where there is none.
        why: what is to be said of the whole program; "" for a right one.
        reference: what the whole program was compared with: "float64", or "eager".
        graph_breaks: where Dynamo stopped: attention there was not seen.
    """

    backend: str
    sites: tuple[CheckedSite, ...]
    whole: Verdict
    whole_error: float | None
    why: str
    reference: str
    graph_breaks: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[CheckedSite, ...]:
        """The sites that the backend computes wrongly."""
        return tuple(site for site in self.sites if site.verdict == "WRONG")

    @property
    def failed(self) -> tuple[CheckedSite, ...]:
        """The sites for which the backend raises an error."""
        return tuple(site for site in self.sites if site.verdict == "FAILS")

    @property
    def at_fault(self) -> bool:
        """Whether the backend computes a site or the whole program wrongly, or fails."""
        return bool(self.wrong or self.failed) or self.whole in ("WRONG", "FAILS")

    @property
    def nothing_ran(self) -> str:
        """Why this says nothing of the attention, as a sentence: no site was run; "" where one was.

        Without any attention the whole program's results count alone.
        """
        verdicts = [site.verdict for site in self.sites if site.kind == "attention"]
        if any(verdict != "not run" for verdict in verdicts) or (not verdicts and self.whole != "not run"):
            return ""
        if not verdicts:
            return "nothing was checked: no attention was found, and the whole program was not compared"
        sites = "the only attention site was" if len(verdicts) == 1 else f"all {len(verdicts)} attention sites were"
        return f"nothing was checked: {sites} not run; the whole program: {self.whole}"

    def __bool__(self) -> bool:
        return not (self.at_fault or self.nothing_ran)

    def summary(self) -> str:
        """One line: how many sites are right, are wrong, fail and were not run, and the whole program."""
        verdicts = [site.verdict for site in self.sites if site.kind == "attention"]
        counts = [f"{verdicts.count(v)} {v}" for v in get_args(Verdict) if v in verdicts]
        sites = f"{counted(len(verdicts), 'attention site')}: {', '.join(counts)}" if counts else "no attention found"
        if misses := len(self.sites) - len(verdicts):
            sites += f", {counted(misses, 'near miss', 'near misses')}"
        return f"attn_pass check of {self.backend}: {sites}; the whole program: {self.whole}"

    def table(self, width: int | None = None) -> str:
        """The table as plain text; ``width`` is in characters."""
        lines = [self.summary()]
        if self.sites:
            lines += plain_table(_COLUMNS, [_cells(site) for site in self.sites], width)
        if self.whole_error is not None:
            lines.append(f"the whole program: relative error {self.whole_error:.2g} against {self.reference}")
        lines += [self.why] if self.why else []
        return printable("\n".join([*lines, *(f"graph break: {text}" for text in self.graph_breaks)]))

    def __str__(self) -> str:
        return self.table()

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON but for numbers that it cannot hold (nan, inf)."""
        return {**asdict(self), "right": bool(self), "nothing_ran": self.nothing_ran}

    def to_json(self, indent: int | None = 2) -> str:
        """The dict of `to_dict` as JSON; a number JSON cannot hold (nan, inf) is null."""
        return json.dumps(finite(self.to_dict()), indent=indent, ensure_ascii=False, allow_nan=False)


def check(
    model: Any,
    *args: Any,
    backend: Backend = "inductor",
    attn_pass_training: bool | None = None,
    attn_pass_progress: bool = True,
    **kwargs: Any,
) -> Check:
    """Checks what any Dynamo backend makes of a model's attention: each site alone, and the whole program.

    Every attention that attn_pass can read is cut out, compiled by the backend alone, and run on random inputs of the
    site's shapes, strides and dtypes, with fully masked rows among them; the results are compared with the description
    that was read, in float64. Nothing is rewritten: the backend gets the code as it is written. Where they differ, a
    script is written that shows it, with a shorter length if the site is large.

    Args:
        model: a module or function.
        args: the model's inputs.
        backend: the name of a backend ("inductor", "aot_eager", "attn_pass", ...), or a callable (graph, inputs) ->
            callable.
        attn_pass_training: run backward, too; by default as `attn_pass.benchmark`.
        attn_pass_progress: show progress on stderr if it takes longer.
        kwargs: all other keywords are the model's keyword inputs.

    Raises:
        CaptureError: the model fails on these inputs.
        EnvironmentFault: nothing compiles here: there is no compiler, or its folder cannot be written.
        OptionError: ``backend`` is not a backend, or its package is not installed; or a keyword ``attn_pass_...`` is
            unknown.
    """
    check_keywords(check, kwargs)
    check_training(attn_pass_training)
    function, name = _backend(backend)
    subject = subject_of(model, args, kwargs, attn_pass_training, "check")
    reader = _Reader(function, name)
    with (
        own_compile_off(subject.model),
        torch.set_grad_enabled(subject.trains),
        progress(silent=not attn_pass_progress) as tell,
    ):
        tell("reading the model, and compiling each site")
        # Earlier calls had other shapes: no reason to be dynamic here.
        with breaks_noted() as breaks, torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            subject.step(compiled(subject.model, dynamic=None, backend=reader))()
        if reader.failure is not None:
            raise_if_missing(reader.failure, name)
            raise_if_environment(reader.failure)
        tell("compiling the whole program")
        verdict, error, reason, reference = _checked_program(subject, function, name)
    sites = tuple(_checked(site) for site in reader.report.sites)
    return Check(name, sites, verdict, error, reason, reference, tuple(breaks))


def _backend(backend: Backend) -> tuple[Callable[..., Any], str]:
    refuse_no_backend(backend, "attn_pass.check")
    if not isinstance(backend, str):
        if not callable(backend):
            raise OptionError(
                f"check takes a backend by name or as a callable, got {backend!r} ({type(backend).__name__})"
            )
        return backend, str(getattr(backend, "__name__", type(backend).__name__))
    return backend_named(backend), backend


class _Reader:
    """A Dynamo backend that checks the sites of each graph, and runs the graph as it is."""

    def __init__(self, backend: Callable[..., Any], name: str) -> None:
        self.backend, self.name, self.report = backend, name, Report()
        self.failure: Exception | None = None

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        options = make_options(choose="cheapest", on_error="warn", verify="off")
        copied = Snapshot(gm).module()
        copied.meta |= known_buffers(gm, example_inputs, options)
        rewrite_graph(
            copied,
            options=options,
            report=self.report,
            program="compile",
            compile_site=self._compile,
            checks=self.name,
        )
        return gm.forward

    def _compile(self, module: GraphModule, inputs: Sequence[torch.Tensor], target: str) -> Callable[..., Any]:
        """A site alone, by torch.compile, as a user's program would be."""
        function = compiled(module.forward, backend=self.backend)

        def run(*args: Any) -> Any:
            try:
                return function(*args)
            except Exception as error:
                self.failure = error
                raise

        return run


def _checked(site: SiteReport) -> CheckedSite:
    verdict: Verdict = "right"
    reason = ""
    if site.refusals:
        verdict, reason = "FAILS" if FAILS in site.reason else "WRONG", site.reason
    elif site.verified_error is None:
        verdict, reason = "not run", site.not_verified or site.reason
    script = _SCRIPT.search(reason)
    return CheckedSite(
        verdict,
        reason,
        site.verified_error,
        script[1] if script else "",
        site.form,
        site.where,
        site.module,
        site.mask,
        tuple(shape_lines(site)),
        site.dtype,
        site.kind,
    )


def _checked_program(
    subject: Subject, backend: Callable[..., Any], name: str
) -> tuple[Verdict, float | None, str, str]:
    """The whole program by the backend: verdict, relative error, what is to be said, what it was compared with."""
    eager = subject.results(subject.model)
    again = subject.results(subject.model, seed=1)
    if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(eager, again)):
        return "not run", None, f"the whole program {NOT_REPEATABLE}", "eager"
    wide = subject.in_float64_results()
    reference, against = (eager, "eager") if wide is None else (wide, "float64")
    try:
        results = subject.results(compiled(subject.model, dynamic=None, backend=backend))
    except Exception as failure:
        raise_if_missing(failure, name)
        raise_if_environment(failure)
        return "FAILS", None, f"the whole program does not compile or run: {why(failure)}", against
    return (*judged(results, eager, reference, against), against)


def judged(
    results: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], against: str
) -> tuple[Verdict, float | None, str]:
    """Verdict, relative error, and what is to be said of a whole program's results.

    Args:
        results: what a backend computed.
        eager: what the program computes eagerly, whose own error is allowed for.
        reference: what both are compared with.
        against: what that is: "float64", or "eager".
    """
    error, known = relative_error(results, reference), relative_error(eager, reference)
    if not math.isfinite(known):
        return "not run", None, "eager's own result is not finite where float64's is, so nothing can be compared"
    roundings = 1.0 if against == "float64" else _TIMES_KNOWN  # eager's own are in what it is compared with
    allowed = max(_TIMES_KNOWN * known, *(roundings * rounding(t.dtype) for t in eager), 0.0)
    if error <= allowed:
        return "right", error, ""
    return (
        "WRONG",
        error,
        f"the whole program: error {error:.2g}, where eager has {known:.2g} and {allowed:.2g} is allowed",
    )


def _cells(site: CheckedSite) -> tuple[str, ...]:
    location = "\n".join(filter(None, (site.where, site.module)))
    error = "" if site.error is None else f"{site.error:.2g}"
    return (site.verdict, site.form, location, "\n".join((*site.shapes, site.dtype)), site.mask, error, site.why)
