"""The state that a root graph and all bodies in it share: options, report, measuring and compiling; and warnings."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from attn_pass.devices.device import Device
from attn_pass.devices.registry import device_for
from attn_pass.errors import AttnPassWarning, first_line
from attn_pass.graph.provenance import Emission
from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.options import Options, Runner
from attn_pass.patterns.random_ops import DropoutSites
from attn_pass.planner.choose import Measured
from attn_pass.planner.stock import AskStock
from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport
from attn_pass.tuning.tuner import TuningSite
from attn_pass.verify import CompileSite

MeasureSite = Callable[[TuningSite, Sequence[str]], Measured | str]


@dataclass(frozen=True)
class Run:
    """A call of `attn_pass.engine.rewrite_graph`, whose arguments these are."""

    options: Options
    report: Report
    program: str
    sizes: Sizes
    dropout_sites: DropoutSites  # of the root graph
    runner: Runner = "other"
    measure: MeasureSite | None = None
    compile_site: CompileSite | None = None
    emissions: list[Emission] = field(default_factory=list)
    without: Mapping[str, str] = field(default_factory=dict)
    ask_stock: AskStock | None = None
    explains: bool = False  # a report is all that is asked for: it may take time that compiling should not
    graph_id: str = ""  # Dynamo's of the compile, "0/0"; "" where the graph is none of Dynamo's
    checks: str = ""  # the backend whose code for each site is compared with what was read; nothing is rewritten

    _devices: dict[torch.device, Device] = field(default_factory=dict)

    @property
    def compiles(self) -> bool:
        """Whether Inductor gets the result, in a compile that attn_pass is part of."""
        return self.runner in ("inductor", "hook")

    def device(self, tensors: torch.device) -> Device:
        """What is known of the device that tensors there are on, or of the device or runtime that the options name."""
        if tensors not in self._devices:
            self._devices[tensors] = device_for(tensors, self.options.device, self.options.runtime)
        return self._devices[tensors]

    def device_of(self, node: Node) -> Device:
        """That of the tensor that a node gives; the CPU for anything else."""
        value = tensor_value(node)
        return self.device(torch.device("cpu") if value is None else value.device)

    @contextmanager
    def details(self, record: SiteReport) -> Iterator[None]:
        """Around what the report could do without: a failure there leaves no site."""
        try:
            yield
        except Exception as error:
            self.complain(record, "the report of a site is incomplete", error)

    def complain(self, record: SiteReport | None, message: str, error: Exception) -> None:
        """Warns of a failure, with the source line it concerns and where it came from; or raises it, where asked to."""
        if self.options.on_error == "raise":
            raise error
        where = record.where if record is not None else "this graph"
        last = traceback.extract_tb(error.__traceback__)[-1]
        warnings.warn(
            f"attn_pass: {where}: {message} ({type(error).__name__}: {first_line(error)}, at "
            f"{last.filename.rpartition('/')[2]}:{last.lineno})",
            AttnPassWarning,
            stacklevel=2,
        )
