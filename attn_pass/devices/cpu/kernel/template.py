"""`attn_pass::attention` under Inductor: a C++ template that carries the kernel's source in the generated code.

The compiled graph, Inductor's caches and an AOTInductor package therefore run without this package. Importing this file
registers the lowering.

Known numbers are arguments of the function and not part of its text: calls of all sizes are one function, which the
compiler sees once, and which Inductor finds on its disk when another model has such calls.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator, Sequence
from operator import getitem
from typing import Any

import sympy
import torch
import torch._inductor.lowering  # first: the modules of templates import each other
from torch._inductor import ir
from torch._inductor.codegen.cpp import get_export_declaration
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.codegen.cpp_utils import cexpr_index
from torch._inductor.lowering import empty_strided, register_lowering
from torch._inductor.utils import Placeholder
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from attn_pass.compat import guessed_sizes
from attn_pass.devices.cpu.kernel.gradients import FORWARD, NAMES
from attn_pass.devices.cpu.kernel.operator import BOUNDS, FULLY_MASKED, NUMBERS, OPERATOR, WITH_LSE
from attn_pass.devices.cpu.kernel.scores import MOST_CAPTURED, MOST_LOOKUPS
from attn_pass.devices.cpu.kernel.source import (
    ELEMENTS,
    InstructionSet,
    arguments_of,
    call_of,
    everywhere,
    in_tiles,
    kernel_source,
    namespace_of,
    of_this_machine,
)

_OPERANDS = ("q", "k", "v", "keep", "bias", "sink", *(f"captured[{n}]" for n in range(MOST_CAPTURED)))
_HAS_EVENTS = sys.platform in ("linux", "win32")  # elsewhere Inductor's header of templates declares none
_PLACES = 10  # bits: more numbers than a call has
_LARGEST = 1 << 50  # what is larger is no bound at all
_NAMES = str(Placeholder.KERNEL_NAME), str(Placeholder.DESCRIPTIVE_NAME)
"""The C++ function's name, the same for all kernels, and the name that a profiler is to show."""
_SOURCE = """
{{template.header().getvalue()}}
#ifndef {{namespace}}_h
#define {{namespace}}_h
{{kernel_source}}
#endif
extern "C" {{export_declaration}}
{{kernel.def_kernel(inputs=inputs, outputs=outputs, extra_sizevars=sizes)}}
{
  {{profiled}}
  using {{namespace}}::double_of;
  {{namespace}}::{{structure}} args{};
{{filled}}
{{call}}
}
"""


class TemplateCall(CppTemplate):
    """One call: the operands that are there, by the names they have in ``Args``; those of ``written`` are results."""

    name = "attn_pass_attention"

    def __init__(
        self,
        operands: dict[str, Any],
        layout: ir.Layout,
        floats: dict[str, float],
        score: str,
        numbers: dict[str, Any],
        written: Sequence[str] = (),
    ) -> None:
        # Operands may be views of one buffer, which is one argument.
        self.buffers = {x.get_name(): x for x in operands.values()}
        super().__init__(self.name, list(self.buffers.values()), layout, 1)
        self.operands, self.floats, self.score, self.numbers = operands, floats, score, numbers
        self.written = written

    def argument(self, operand: Any) -> str:
        """The argument that an operand's memory is."""
        return f"in{list(self.buffers).index(operand.get_name())}"

    def render(  # type: ignore[override]
        self, kernel: Any, template_buffer_node: Any = None, epilogue_nodes: Any = None, **_: Any
    ) -> str:
        """The kernel's source and the function that fills its arguments in."""
        assert not epilogue_nodes, "nothing is fused into it"
        out = self.output_node if template_buffer_node is None else template_buffer_node
        dtype, chosen = next(iter(self.operands.values())).get_dtype(), self.chosen_kernel()
        sets = _sets(dtype, in_tiles(dtype, chosen, trains="statistics" in self.written))
        return str(
            self._template_from_string(_SOURCE).render(
                template=self,
                kernel=kernel,
                inputs={self.argument(x): x for x in self.buffers.values()},
                outputs={"out": out} if is_wanted(out) else {},
                sizes=self._sizes(),
                kernel_source=kernel_source(sets, self.score, chosen),
                namespace=namespace_of(sets, self.score, chosen),
                structure=arguments_of(chosen),
                export_declaration=get_export_declaration(),
                profiled=kernel.maybe_codegen_profile().replace(*_NAMES) if _HAS_EVENTS else "",
                filled=self.filled(kernel, out),
                call=call_of(dtype, sets, chosen, self.score),
            )
        )

    def filled(self, kernel: Any, out: Any) -> Filled:
        """The lines that fill the arguments in."""
        return Filled(self, kernel, out)

    def _sizes(self) -> list[Any]:
        """Expressions whose symbols the buffers' own sizes may not have."""
        laid = [x.get_layout() for x in self.operands.values()]
        return [*map(sympy.sympify, self.numbers.values()), *(e for x in laid for e in (x.offset, *x.size, *x.stride))]

    def chosen_kernel(self) -> str:
        """Which of the two is needed, if the sizes determine it: the other is not compiled then."""
        q, k = (self.operands[name].get_size() for name in ("q", "k"))
        if "offsets" in self.operands:
            return "attend_type"
        if "statistics" in self.written:
            return "attend_many"
        rows = q[1] * q[2] / k[1] if not any(x.free_symbols for x in (q[1], q[2], k[1])) else None
        return "attend_type" if rows is None else "attend_few" if rows <= 16 else "attend_many"


class Filled:
    """The statements that fill ``args`` in; rendered after the signature, which says what sizes are called."""

    def __init__(self, template: TemplateCall, kernel: Any, out: Any) -> None:
        self.template, self.kernel, self.out = template, kernel, out
        self._places = itertools.count()

    def __str__(self) -> str:
        return "\n".join(f"  {line}" for line in (*self.inputs("args"), *self.results()))

    def inputs(self, args: str) -> list[str]:
        """What `operator.arguments` fills in."""
        operands, numbers = self.template.operands, self.template.numbers
        q, k, v = (operands[name].get_size() for name in ("q", "k", "v"))
        scores = (q[0], q[1], q[2], k[2])
        packed = "offsets" in operands
        borders = operands["offsets"].get_size()[0] if packed else q[0]
        per_batch = borders - 1 if packed else q[0]
        lines: list[str] = []
        for name in _OPERANDS:
            if name in operands:
                has_own_shape = name in "qkv" or (packed and name != "sink")
                shape = operands[name].get_size() if has_own_shape else (*scores[:3], 1) if name == "sink" else scores
                strides = self.strides(strides_in(operands[name], shape))
                lines.append(f"{args}.{name} = {{{self.pointer(name)}, {strides}}};")
        lines += self._over_distances(args, k[2], packed=packed)
        lines += self._lookups(args, scores, packed=packed)
        for name in BOUNDS:
            if name in operands:
                (stride,) = strides_in(operands[name], (borders if name == "offsets" else per_batch,))
                lines.append(f"{args}.{name} = {{{self.pointer(name)}, {self.number(stride)}}};")
        sizes = {"B": q[0], "H": q[1], "HK": k[1], "L": q[2], "S": k[2], "D": q[3], "DV": v[3]}
        sizes |= {"segments": per_batch, "rows": q[2]}
        lines += [f"{args}.{name} = {self.number(size)};" for name, size in sizes.items()]
        # What a call does not have is text, since every argument costs every call time.
        lacking = {name for name, size in numbers.items() if size == NUMBERS.get(name, 0)}
        lines += [f"{args}.{name} = {n if name in lacking else self.number(n)};" for name, n in numbers.items()]
        lines += [f"{args}.{name} = {self._floating(value)};" for name, value in self.template.floats.items()]
        if "seed" in operands:
            lines.append(f"{args}.seed = {self.pointer('seed')};")
        return lines

    def _over_distances(self, args: str, kv_len: Any, *, packed: bool) -> Iterator[str]:
        if "distances" not in self.template.operands:
            return
        node = self.template.operands["distances"]
        size = node.get_size()
        of_batch, of_heads, _, step = strides_in(node, size)
        strides = self.strides((of_batch, of_heads, -step, step))
        first = FloorDiv(size[3] - 1, 2) if packed else size[3] - kv_len
        yield f"{args}.bias = {{{self.pointer('distances', first * step)}, {strides}}};"

    def _lookups(self, args: str, scores: Sequence[Any], *, packed: bool) -> Iterator[str]:
        operands = self.template.operands
        for n in range(MOST_LOOKUPS):
            if f"tables[{n}]" not in operands:
                return
            table, place = operands[f"tables[{n}]"], operands[f"places[{n}]"]
            numbers = table.get_size()[4]
            of_table = strides_in(table, table.get_size() if packed else (*scores, numbers))
            of_place = strides_in(place, place.get_size() if packed else scores)
            data, where, factor = (self.pointer(f"{name}[{n}]") for name in ("tables", "places", "factors"))
            strides, others = map(self.strides, (of_table, of_place))
            factor, kind = f"reinterpret_cast<const float*>({factor})", list(ELEMENTS).index(table.get_dtype())
            yield f"{args}.lookups[{n}] = {{{data}, {strides}, {{{where}, {others}}}, {factor}, {kind}}};"

    def results(self) -> list[str]:
        """Where the kernel writes to."""
        lines = [f"args.out = {'out' if is_wanted(self.out) else 'nullptr'};"]
        for name in self.template.written:
            argument = self.template.argument(self.template.operands[name])
            data = f"const_cast<void*>(static_cast<const void*>({argument}))"
            lines.append(f"args.{name} = static_cast<decltype(args.{name})>({data});")
        for n, stride in enumerate(self.out.get_layout().stride):
            lines.append(f"args.out_stride[{n}] = {self.number(stride)};")
        return lines

    def number(self, expression: Any) -> str:
        """A size as C++: an argument if it is known."""
        size = sympy.sympify(expression)
        if isinstance(size, sympy.Integer) and abs(int(size)) < _LARGEST:
            return self._argument(int(size))
        return str(cexpr_index(self.kernel.rename_indexing(size)))

    def strides(self, values: Sequence[Any]) -> str:
        """Strides as C++."""
        return f"{{{', '.join(map(self.number, values))}}}"

    def _argument(self, number: int) -> str:
        """A number as an argument, as Inductor has it for offsets of random numbers.

        Equal numbers would be one argument, and square shapes a function of their own: these differ by their places.
        """
        place = next(self._places)
        assert place < 1 << _PLACES
        name = self.kernel.args.seed_offset(f"number_{place}_placed", (number << _PLACES) + place)
        return f"({name} >> {_PLACES})"

    def _floating(self, value: float) -> str:
        """A number in double precision as C++: its bits are two arguments."""
        bits = ctypes.c_int64.from_buffer(ctypes.c_double(value)).value
        return f"double_of({self._argument(bits >> 32)}, {self._argument(bits & 0xFFFFFFFF)})"

    def pointer(self, name: str, element: Any = 0) -> str:
        """Where an operand begins, or an element of it is."""
        node = self.template.operands[name]
        size = node.get_dtype().itemsize
        start = f"reinterpret_cast<const char*>({self.template.argument(node)})"
        at = f"{start} + {size} * ({self.number(node.get_layout().offset + element)})"
        return f"reinterpret_cast<const int64_t*>({at})" if name in (*BOUNDS, "seed") else at


def is_wanted(out: Any) -> bool:
    """Whether the result is read: Inductor allocates it only then, and the log-sum-exp may be the only result used."""
    return out.get_name() not in V.graph.removed_buffers


def strides_in(node: Any, shape: Any) -> list[Any]:
    """Strides of a tensor that is seen in a larger shape: 0 where it is broadcast."""
    size, stride = list(node.get_size()), list(node.get_layout().stride)
    lead = len(shape) - len(size)
    one = [V.graph.sizevars.statically_known_equals(s, 1) for s in size]
    return [0] * lead + [0 if o else s for o, s in zip(one, stride)]


def _sets(dtype: torch.dtype, tiles: bool) -> tuple[InstructionSet, ...]:
    """A package runs anywhere; what is compiled for this process runs here."""
    return everywhere(dtype, tiles) if V.graph.aot_mode else of_this_machine(tiles)


def laid_out(x: Any) -> Any:
    """An operand as it lies in memory; views of a buffer stay views."""
    x = ir.ExternKernel.realize_input(x)
    while isinstance(x, (ir.TensorBox, ir.StorageBox)):
        x = x.data
    x.freeze_layout()
    return x


class _Buffer(ir.CppTemplateBuffer):
    """The template's result, and what it writes beside it: Inductor's templates for CPUs know one result."""

    def __init__(self, caller: Any, written: Sequence[Any]) -> None:
        super().__init__(
            layout=caller.layout,
            inputs=caller.input_nodes,
            make_kernel_render=caller.make_kernel_render,
            template=caller.template,
            choice=caller,
        )
        where = ir.NoneLayout(device=caller.layout.device)
        self._written = [ir.MutationOutput(where, x, self) for x in written]

    def get_outputs(self) -> list[ir.Buffer]:
        return [self, *self._written]


def emitted(template: TemplateCall) -> Any:
    """The template's buffer, into which nothing is fused, since it has no epilogue."""
    with guessed_sizes(V.graph.sizevars):
        caller = template.generate()  # type: ignore[no-untyped-call]
    written = [template.operands[name] for name in template.written]
    out: Any = ir.TensorBox.create(_Buffer(caller, written)) if written else caller.output_node()
    V.graph.no_fuse_buffer_names.add(out.data.data.get_name())
    return out


@register_lowering(OPERATOR, type_promotion_kind=None)
def lower(q: Any, k: Any, v: Any, scale: float, **optional: Any) -> Any:
    """The template's buffer."""
    return emitted(_template(q, k, v, scale, optional, {}))


@register_lowering(WITH_LSE, type_promotion_kind=None)
def lower_with_lse(q: Any, k: Any, v: Any, scale: float, **optional: Any) -> tuple[Any, Any]:
    """The template's buffer, and one that it writes to."""
    lse = empty_strided(q.get_size()[:3], None, dtype=torch.float32, device=q.get_device())
    return emitted(_template(q, k, v, scale, optional, {"lse": lse})), lse


@register_lowering(FORWARD, type_promotion_kind=None)
def lower_forward(*values: Any, **more: Any) -> tuple[Any, ...]:
    """The template's buffer, and those that it writes to."""
    by_name = dict(zip(NAMES, values, strict=False)) | more
    q, k, v, scale = (by_name.pop(name) for name in NAMES[:4])
    rows = q.get_size()[:3]
    lse = empty_strided(rows, None, dtype=torch.float32, device=q.get_device())
    statistics = empty_strided([*rows, 2], None, dtype=torch.float32, device=q.get_device())
    written = {"statistics": statistics}
    if any(node.target is getitem and node.args[1] == 1 for node in V.graph.current_node.users):  # a logarithm a row
        written["lse"] = lse
    if q.get_dtype() == torch.float32:
        rest = empty_strided([0], None, dtype=q.get_dtype(), device=q.get_device())
    else:
        like = result_layout(q, v.get_size()[3])
        rest = written["rest"] = empty_strided(like.size, like.stride, dtype=like.dtype, device=like.device)
    return emitted(_template(q, k, v, scale, by_name, written)), lse, statistics, rest


def operands_of(q: Any, k: Any, v: Any, optional: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a call, by the names they have in ``Args``, as they lie in memory."""
    there = {
        "q": q,
        "k": k,
        "v": v,
        **{n: optional.get(n) for n in (*_OPERANDS[3:6], "distances", *BOUNDS) if optional.get(n) is not None},
    }
    if optional.get("seed") is not None and optional["dropout"]:
        there["seed"] = optional["seed"]
    for names in ("captured", "tables", "places", "factors"):
        there |= {f"{names}[{n}]": x for n, x in enumerate(optional.get(names) or ())}
    return {name: laid_out(x) for name, x in there.items()}


def numbers_of(operands: dict[str, Any], optional: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a call, by the names they have in ``Args``."""
    added = operands.get("bias", operands.get("distances"))
    return {
        **{name: otherwise if optional.get(name) is None else optional[name] for name, otherwise in NUMBERS.items()},
        "bias_type": list(ELEMENTS).index(added.get_dtype()) if added is not None else 0,
        "fully_masked": FULLY_MASKED.index(optional.get("fully_masked", "nan")),
        "threads": 0,
        "has_score": int(bool(optional.get("score"))),
        "replaces": 0 if optional.get("fill") is None else 2 if optional.get("fill_is_added") else 1,
    }


def floats_of(scale: float, optional: dict[str, Any]) -> dict[str, float]:
    """The numbers of a call that are no integers, by the names they have in ``Args``."""
    floats = {"scale": scale, "fill": optional.get("fill"), "dropout": optional.get("dropout")}
    return {name: float(value) for name, value in floats.items() if value is not None}


def result_layout(x: Any, dim: Any, *, heads_first: bool = False) -> ir.FixedLayout:
    """The layout of a result (B, H, L, dim) for an operand: heads after positions in memory, or before them."""
    batch, heads, length, _ = x.get_size()
    head, row = (length * dim, dim) if heads_first else (dim, heads * dim)
    size, stride = [batch, heads, length, dim], [length * heads * dim, head, row, 1]
    return ir.FixedLayout(x.get_device(), x.get_dtype(), size, stride)


def _template(q: Any, k: Any, v: Any, scale: float, optional: dict[str, Any], written: dict[str, Any]) -> TemplateCall:
    operands = operands_of(q, k, v, optional)
    numbers = numbers_of(operands, optional)
    q, v = operands["q"], operands["v"]
    operands |= {name: laid_out(x) for name, x in written.items()}
    return TemplateCall(
        operands,
        result_layout(q, v.get_size()[3], heads_first=optional.get("heads_first", False)),
        floats_of(scale, optional),
        optional.get("score", ""),
        numbers,
        tuple(written),
    )
