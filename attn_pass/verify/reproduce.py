"""A script that reproduces a mismatch: both programs as text, their inputs in a file beside it, and the differences."""

from __future__ import annotations

import os
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.fx import GraphModule

from attn_pass.graph.cut import Cut
from attn_pass.tuning.disk_cache import key_of

VARIABLE = "ATTN_PASS_VERIFY_DIR"

_HEAD = '''"""{title}

The attention at {where}, as it was written and {changed}, on the inputs beside this file. Needs torch alone, and what
the programs name: python {name}.py
"""

import math
import operator
from math import inf, nan
from pathlib import Path

import torch
from torch import device

_operator, NoneType = operator, type(None)

'''

_COMPILED = """
def Rewritten():
    return torch.compile(Original(), backend={backend!r})
"""

_NO_NAME = """
backend = None  # the callable that attn_pass.check was given goes here; torch knows none of the name {backend!r}
if backend is None:
    raise SystemExit("set `backend` in this file to the callable that attn_pass.check was given")


def Rewritten():
    return torch.compile(Original(), backend=backend)
"""

_TAIL = '''

def run(program, inputs, strides, dtype=None):
    """The result and the inputs' gradients."""
    made = []
    for flat, (shape, stride, offset, grad) in zip(inputs, strides):
        flat = flat.to(dtype) if dtype is not None and flat.is_floating_point() else flat
        made.append(flat.clone().requires_grad_(grad))
    {autocast}:
        out = program(*[f.clone().as_strided(*s[:3]) for f, s in zip(made, strides)])
    result = out[0] if isinstance(out, tuple) else out
    leaves = [f for f in made if f.requires_grad]
    if not leaves or not result.requires_grad:
        return [result.detach()]
    torch.manual_seed(0)
    gradients = torch.autograd.grad(result, leaves, torch.randn_like(result), allow_unused=True)
    return [result.detach(), *gradients]


if __name__ == "__main__":
    inputs = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)
    strides = {layouts}
    old, new = (run(program(), inputs, strides) for program in (Original, Rewritten))
    for name, a, b in zip(["result", *(f"gradient {{n}}" for n in range(1, len(old)))], old, new):
        if a is None or b is None:
            print(f"{{name}}: in one of them only")
            continue
        where = torch.isfinite(a)
        apart = (a.double() - b.double())[where].abs()
        print(f"{{name}}: largest difference {{float(apart.max()) if apart.numel() else 0.0:.6g}}, largest value "
              f"{{float(a[where].abs().max()) if apart.numel() else 0.0:.6g}}")
'''


def folder() -> Path:
    """Where reproductions go: ``$ATTN_PASS_VERIFY_DIR``, else ``attn_pass_verify`` among the temporary files."""
    chosen = os.environ.get(VARIABLE, "").strip()
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / "attn_pass_verify"


def write(
    part: Cut, memory: Sequence[torch.Tensor], *, why: str, where: str, target: str, autocast: tuple[str, str] | None
) -> Path:
    """Writes the file and its inputs; returns its path."""
    programs = _as_class("Original", part.original) + "\n\n"
    if part.rewritten is not None:
        programs += _as_class("Rewritten", part.rewritten)
    else:
        is_known = target in torch._dynamo.list_backends(exclude_tags=())
        programs += (_COMPILED if is_known else _NO_NAME).format(backend=target)
    name = f"mismatch_{key_of([programs, why])[:12]}"
    layouts = [(i.shape, i.stride, i.offset, i.requires_grad) for i in part.inputs]
    context = "with torch.enable_grad()"
    if autocast is not None:
        context += f", torch.autocast({autocast[0]!r}, dtype=torch.{autocast[1]})"
    texts = {k: w.replace("\\", "/").replace('"', "'") for k, w in (("title", f"Mismatch: {why}."), ("where", where))}
    rewritten = f"as attn_pass would have rewritten it ({target})"
    text = _HEAD.format(**texts, name=name, changed=rewritten if part.rewritten else f"as {target} compiles it")
    text += programs + "\n" + _TAIL.format(layouts=layouts, autocast=context)
    folder().mkdir(parents=True, exist_ok=True)
    path = folder() / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    torch.save([m.detach() for m in memory], path.with_suffix(".pt"))
    return path


def _as_class(name: str, module: GraphModule) -> str:
    """A GraphModule as the text of a class, with the graphs and tensors it holds."""
    held, parameters = [], []
    for attribute in dict.fromkeys(n.target for n in module.graph.nodes if n.op == "get_attr"):
        value = getattr(module, attribute)
        if isinstance(value, GraphModule):
            held.append(_as_class(attribute, value))
            parameters.append(f"self.{attribute} = self.__class__.{attribute}()")
        elif isinstance(value, torch.Tensor):
            facts = f"dtype={value.dtype}, device={str(value.device)!r}"
            parameters.append(f"self.{attribute} = torch.tensor({value.tolist()!r}, {facts})")
    code = module.graph.python_code("self").src.strip("\n")
    lines = [f"class {name}(torch.nn.Module):"]
    lines += [textwrap.indent(text, "    ") for text in held]
    if parameters:
        lines.append("    def __init__(self):\n        super().__init__()")
        lines += [f"        {line}" for line in parameters]
    lines.append(textwrap.indent(code, "    "))
    return "\n".join(lines)
