"""Sites in torch's profiler: Inductor's Python wrapper enters a range before a kernel of a site, and leaves it after.

The nodes of a site carry its name (`attn_pass.graph.provenance.mark`), which AOTAutograd and Inductor hand on, to the
backward too. Kernels that Inductor fuses of several operations belong to no site alone, and get no range: those of a
site that was left are its products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._inductor import ir
from torch._inductor.virtualized import V

from attn_pass.graph.provenance import site_of

SLOT = "_post_fusion_custom_pass"
_RANGE = "torch._C._profiler._RecordFunctionFast"


class Ranges:
    """Puts ranges around the calls of kernels that belong to a site, after whatever else is in the slot.

    A plain callable, with which Inductor caches nothing: the generated code holds names that are no part of the graph.
    It would cache what a `CustomSchedulerPass` made, one without a ``uuid`` too.
    """

    def __init__(self, before: Callable[..., Any] | None = None) -> None:
        self.before = before

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The nodes of Inductor's scheduler, with the code that is generated for those of sites in ranges."""
        if self.before is not None:
            nodes = self.before(nodes)
        for node in nodes:
            for part in node.get_nodes():
                if name := _name_of(part):
                    _bracket(part, name)
        return nodes


def ranges(slot: Any) -> Ranges:
    """The pass, for a slot that holds another one or none."""
    return slot if isinstance(slot, Ranges) else Ranges(slot)


def _name_of(node: Any) -> str:
    """The site that one kernel belongs to: of the operation that it is, or of all that went into it if they agree."""
    held = node.node
    if held is None or isinstance(held, ir.MultiOutput):
        return ""
    origin = getattr(held, "origin_node", None)
    if origin is not None and (name := site_of(origin)):
        return name
    names = {site_of(origin) for origin in getattr(held, "origins", ())} - {""}
    return names.pop() if len(names) == 1 else ""


def _bracket(node: Any, name: str) -> None:
    """Has Inductor write the range: around a library's call, or around the call of a template's kernel."""
    if isinstance(node.node, ir.TemplateBuffer):
        rendering = getattr(node.node, "make_kernel_render", None)
        if callable(rendering):
            node.node.make_kernel_render = functools.partial(_rendered, rendering, name)
    elif isinstance(node.node, ir.ExternKernel):
        node.codegen = functools.partial(_in_range, name, node.codegen)


def _rendered(rendering: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    kernel, render = rendering(*args, **kwargs)
    kernel.call_kernel = functools.partial(_in_range, name, kernel.call_kernel)
    return kernel, render


def _in_range(name: str, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if V.graph.cpp_wrapper:
        return write(*args, **kwargs)
    wrapper = V.graph.wrapper_code
    wrapper.writeline(f"attn_pass_range = {_RANGE}({name!r}); attn_pass_range.__enter__()")
    try:
        return write(*args, **kwargs)
    finally:
        wrapper.writeline("attn_pass_range.__exit__(None, None, None)")
