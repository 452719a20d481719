"""Rewrites the attention of PyTorch models, however it is written, into the best kernel, before Inductor compiles.

`torch.compile(model, backend=attn_pass.backend)` and `attn_pass.aot_compile(model, args)` rewrite and compile;
`attn_pass.explain(model, *inputs)` reports the decisions and their reasons without compiling;
`attn_pass.benchmark(model, *inputs)` measures the gain, and `attn_pass.check` any backend's correctness;
`attn_pass.inspect(folder)` writes everything about a compilation to a folder.
"""

import sys
from types import ModuleType
from typing import Any

from attn_pass.entries.annotate import leave
from attn_pass.entries.aot_compile import aot_compile
from attn_pass.entries.dynamo import backend, wrap
from attn_pass.entries.explain import explain
from attn_pass.entries.hook import enabled, install, uninstall
from attn_pass.entries.mistakes import refuse_no_backend
from attn_pass.entries.package import package_report
from attn_pass.entries.rewrite import rewrite
from attn_pass.errors import (
    AttnPassError,
    AttnPassWarning,
    CaptureError,
    EnvironmentFault,
    OptionError,
    PackageError,
    RewriteError,
    VersionError,
)
from attn_pass.measuring.benchmark import benchmark
from attn_pass.measuring.checking import check
from attn_pass.options import Options
from attn_pass.report.history import record, reports
from attn_pass.report.pages.inspect import inspect
from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport

__version__ = "0.1.0"

__all__ = [
    "AttnPassError",
    "AttnPassWarning",
    "CaptureError",
    "EnvironmentFault",
    "OptionError",
    "Options",
    "PackageError",
    "Report",
    "RewriteError",
    "SiteReport",
    "VersionError",
    "aot_compile",
    "backend",
    "benchmark",
    "check",
    "enabled",
    "explain",
    "inspect",
    "install",
    "leave",
    "package_report",
    "record",
    "reports",
    "rewrite",
    "uninstall",
    "wrap",
]


class _Package(ModuleType):
    """This package, which is no backend, and says so where it is called as one."""

    def __call__(self, *graph: Any, **settings: Any) -> None:
        """Called by torch.compile(model, backend=attn_pass).

        Raises:
            OptionError: always; it says which the backend is.
        """
        refuse_no_backend(self, "torch.compile")


sys.modules[__name__].__class__ = _Package
