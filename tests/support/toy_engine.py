"""Stand-ins for `attn_pass.engine.rewrite_graph`, so that the entries are tested without reading any attention.

A site is a call of relu. `capped` rewrites it to relu6, which can be told from relu where a value is above 6;
`unlowerable` to relu by an operator that Inductor cannot lower; `bad_backward` to one whose gradient it cannot lower.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

import attn_pass
from attn_pass.options import Options
from attn_pass.report.places import source_line
from attn_pass.report.record import Report
from attn_pass.report.site import SiteReport

_RELUS = {torch.relu, torch.nn.functional.relu, torch.ops.aten.relu.default, "relu"}


@torch.library.custom_op("attn_pass_test::unlowerable", mutates_args=())
def _unlowerable(x: torch.Tensor) -> torch.Tensor:
    return x.clamp_min(0)


@_unlowerable.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("attn_pass_test::bad_backward", mutates_args=())
def _bad_backward(x: torch.Tensor) -> torch.Tensor:
    return x.clamp_min(0)


@_bad_backward.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return _unlowerable(grad * (x > 0)) - _unlowerable(-grad * (x > 0))


_bad_backward.register_autograd(_gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
_unlowerable.register_autograd(_gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

UNLOWERABLE = torch.ops.attn_pass_test.unlowerable.default
BAD_BACKWARD = torch.ops.attn_pass_test.bad_backward.default


@contextmanager
def refused_by_inductor() -> Iterator[None]:
    """Inside, Inductor raises when it meets the operator `unlowerable`."""
    from torch._inductor import lowering

    def refuse(x: Any) -> Any:
        raise NotImplementedError("no kernel for this toy")

    lowering.lowerings[UNLOWERABLE] = refuse
    try:
        yield
    finally:
        del lowering.lowerings[UNLOWERABLE]


class Toy:
    """An engine that replaces each relu by `target`; counts its calls and keeps what it was called with."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.programs: list[str] = []
        self.options: list[Options] = []

    def __call__(
        self,
        gm: GraphModule,
        *,
        options: Options,
        report: Report,
        program: str,
        runner: str = "other",
        measure: object = None,
        compile_site: object = None,
        emissions: object = None,
        without: object = None,
        ask_stock: object = None,
        explains: bool = False,
    ) -> bool:
        self.programs.append(program)
        self.options.append(options)
        changed = self._rewrite(gm, report)
        gm.recompile()
        return changed

    def _rewrite(self, gm: GraphModule, report: Report) -> bool:
        changed = False
        for body in gm.children():
            if isinstance(body, GraphModule):
                changed |= self._rewrite(body, report)
                body.recompile()
        for node in list(gm.graph.nodes):
            if node.op in ("call_function", "call_method") and node.target in _RELUS:
                report.append(_site(node, self.target))
                if self.target is not None:
                    self._replace(gm, node)
                    changed = True
        return changed

    def _replace(self, gm: GraphModule, node: Node) -> None:
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(self.target, (node.args[0],))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        name = node.name
        gm.graph.erase_node(node)
        new.name = name


def _site(node: Node, target: Any) -> SiteReport:
    outcome: Any = "left" if target is None else "rewritten"
    return SiteReport(
        outcome=outcome, reason="a toy", target=None if target is None else "toy", where=source_line(node.meta)
    )


def capped() -> Toy:
    """Rewrites to relu6: everything can lower it, and results above 6 show that the rewritten graph ran."""
    return Toy(torch.ops.aten.relu6.default)


def left() -> Toy:
    """Finds sites and leaves them."""
    return Toy(None)


def unlowerable() -> Toy:
    """Rewrites to an operator that Inductor refuses inside `refused_by_inductor`."""
    return Toy(UNLOWERABLE)


def bad_backward() -> Toy:
    """Rewrites to an operator whose backward Inductor refuses inside `refused_by_inductor`."""
    return Toy(BAD_BACKWARD)


def use(monkeypatch: pytest.MonkeyPatch, engine: Callable[..., bool]) -> Any:
    """Let the entries call this engine; returns it."""
    try:
        importlib.import_module("attn_pass.engine")
    except ImportError:
        module = types.ModuleType("attn_pass.engine")
        monkeypatch.setitem(sys.modules, "attn_pass.engine", module)
        monkeypatch.setattr(attn_pass, "engine", module, raising=False)
    monkeypatch.setattr("attn_pass.engine.rewrite_graph", engine, raising=False)
    return engine
