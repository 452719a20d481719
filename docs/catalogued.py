"""The tables of `docs/catalogue.md`: forms, spellings, masks, poor cases and targets, as the code has them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import attn_pass
from attn_pass import patterns, poor_cases
from attn_pass.devices.cuda import flash_attn_calls
from attn_pass.devices.npu import npu_calls
from attn_pass.devices.registry import decomposed_calls, families
from attn_pass.model import structure
from attn_pass.patterns import calls, composite, flex_calls, softmax
from attn_pass.reading import vocabulary
from attn_pass.targets.registry import built_in


def first_line(module: Any) -> str:
    """The first line of what a file says of itself, as Markdown in a cell."""
    text = ast.get_docstring(ast.parse(inspect.getsource(module))) or ""
    return _cell(text.split("\n\n")[0].split(". ")[0].rstrip("."))


def _cell(text: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", " ".join(text.split())).replace("|", "\\|")


def _quoted(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


# ---- forms ----


def _operators(targets: Any) -> list[str]:
    return [str(t) if hasattr(t, "_overloadname") else f"F.{t.__name__}" for t in targets]


# What a finder looks for, by its file.
FORMS: tuple[tuple[str, ModuleType, list[str]], ...] = (
    (softmax.FORM, softmax, ["a softmax between two products", "exp and sum"]),
    (calls.FORM, calls, [*_operators(calls.CALLS), *_operators(decomposed_calls())]),
    (composite.FORM, composite, ["F.multi_head_attention_forward", "_native_multi_head_attention"]),
    (composite.ENCODER_LAYER, composite, ["_transformer_encoder_layer_fwd"]),
    (flex_calls.FORM, flex_calls, ["torch.ops.higher_order.flex_attention"]),
    (flash_attn_calls.FORM, flash_attn_calls, [flash_attn_calls._FORWARD]),
    (npu_calls.FORM, npu_calls, [f"npu::{name}" for name in (*npu_calls._FUSION, npu_calls._INFERENCE)]),
)


def _finders() -> Iterator[ModuleType]:
    """Every file that finds sites: of the room, and of families of devices."""
    for info in pkgutil.iter_modules(patterns.__path__):
        module = importlib.import_module(f"{patterns.__name__}.{info.name}")
        if hasattr(module, "FORM"):
            yield module
    yield from (sys.modules[finder.__module__] for family in families() for finder in family.finders())


def forms() -> Iterator[str]:
    """Rows of the table of forms."""
    assert {module for _, module, _ in FORMS} == set(_finders()), "a finder of attn_pass/patterns has no row here"
    yield "| form | what it is | nodes in the graph |"
    yield "|---|---|---|"
    for name, module, anchors in FORMS:
        yield f"| `{name}` | {first_line(module)} | {_quoted(anchors)} |"


def _method(name: str) -> str:
    """A method, by the name it has in place where tensors have it in place alone: `.fill_`."""
    is_in_place = hasattr(Tensor, f"{name[1:]}_") and not hasattr(Tensor, name[1:])
    return f"{name}_" if is_in_place else name


def spellings() -> Iterator[str]:
    """Rows of the table of spellings: one for each operation."""
    yield "| operation | functions | methods | aten |"
    yield "|---|---|---|---|"
    spellings: dict[str, list[str]] = {}
    for operation, _, spelled in vocabulary.TABLE:
        spellings.setdefault(operation, []).extend(spelled.split())
    for operation, names in spellings.items():
        names = list(dict.fromkeys(names))
        aten = [n.removeprefix("aten.").removesuffix(".default") for n in names if n.startswith(("aten.", "prims."))]
        methods = [_method(n) for n in names if n.startswith(".")]
        functions = [n for n in names if not n.startswith((".", "aten.", "prims."))]
        yield f"| {operation} | {_quoted(functions)} | {_quoted(methods)} | {_quoted(aten)} |"


# ---- masks ----

LENGTH = 32


@dataclass(frozen=True)
class Mask:
    """A mask as a program may write it: ``keep`` or ``bias`` over the row ``i`` and the key ``j``, as Python."""

    keep: str = ""
    bias: str = ""


MASKS = (
    Mask("j >= 0"),
    Mask("j <= i"),
    Mask("~torch.ones(L, L, dtype=torch.bool).triu(1)"),
    Mask("j <= i + 3"),
    Mask("(j <= i) & (j > i - 4)"),
    Mask("(j - i).abs() <= 4"),
    Mask("j // 8 == i // 8"),
    Mask("j < 5"),
    Mask("(j <= i) | (j < 5)"),
    Mask("padding[:, None, None, :]"),
    Mask("(j <= i) & padding[:, None, None, :]"),
    Mask("torch.ones(L, L).tril() * marks[:, None, None, :] != 0"),
    Mask("ids[:, None, :, None] == ids[:, None, None, :]"),
    Mask("j <= position"),
    Mask("((j <= position) & (j > position - 8)) | (j == 0)"),
    Mask("allowed"),
    Mask(bias="torch.full((L, L), float('-inf')).triu(1)"),
    Mask(bias="slopes[:, None, None] * (j - i)"),
    Mask(bias="matrix"),
)


def _described(case: Mask) -> attn_pass.SiteReport:
    """The report of the attention by hand that has this mask."""
    known = {
        "padding": torch.arange(LENGTH) < torch.tensor([[LENGTH], [20]]),
        "marks": (torch.arange(LENGTH) < torch.tensor([[LENGTH], [20]])).long(),
        "ids": torch.arange(LENGTH).div(10, rounding_mode="floor").expand(2, -1).contiguous(),
        "position": torch.tensor(20),
        "allowed": torch.eye(LENGTH, dtype=torch.bool),
        "matrix": torch.zeros(LENGTH, LENGTH),
        "slopes": torch.tensor([0.5, 0.25]),
    }
    names = {name: tensor for name, tensor in known.items() if name in case.keep + case.bias}
    masked = f"scores.masked_fill(~({case.keep}), float('-inf'))" if case.keep else f"scores + ({case.bias})"
    lines = (
        f"def program({', '.join(('q', 'k', 'v', *names))}):",
        "    L = q.size(-2)",
        "    i, j = torch.arange(L)[:, None], torch.arange(L)",
        "    scores = q @ k.mT * 0.125",
        f"    return ({masked}).softmax(-1) @ v",
    )
    made: dict[str, Any] = {"torch": torch}
    exec("\n".join(lines), made)
    inputs: list[Tensor] = [torch.zeros(2, 2, LENGTH, 64) for _ in range(3)]
    with torch.no_grad():
        options = {"choose": "fused"}
        (site,) = attn_pass.explain(made["program"], *inputs, *names.values(), attn_pass_options=options).sites
    return site


def masks() -> Iterator[str]:
    """Rows of the table of masks: how each is written, the report's name for it, and the target."""
    yield "| as written | mask in the report | target on the CPU |"
    yield "|---|---|---|"
    for case in MASKS:
        site = _described(case)
        written = f"keep `{case.keep}`" if case.keep else f"add `{case.bias}`"
        form = f" ({', '.join(site.poor_cases)})" if site.poor_cases else ""
        yield f"| {_cell(written)} | `{site.mask}` | {site.target or 'left'}{form} |"


def words() -> Iterator[str]:
    """What a mask is made of: the parts, each with what it says of itself."""
    for part in (structure.Band, structure.Keys, structure.Chunk, structure.Either, structure.Opaque):
        yield f"- *{part.__name__}*: {_cell(inspect.getdoc(part) or '')}"


# ---- poor cases and targets ----


def _anchor(name: str) -> str:
    return re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")


def cases() -> Iterator[str]:
    """Rows of the table of poor cases."""
    yield "| poor case | what it is |"
    yield "|---|---|"
    for name, case in poor_cases.CASES.items():
        yield f"| [`{name}`](rewrites.md#{_anchor(name)}) | {first_line(inspect.getmodule(case))} |"


def kernels() -> Iterator[str]:
    """Rows of the table of targets."""
    yield "| target | what it is |"
    yield "|---|---|"
    for target in built_in():
        said = first_line(inspect.getmodule(type(target)))
        yield f"| [`{target.name}`](rewrites.md#{_anchor(target.name)}) | {said} |"
