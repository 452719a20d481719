"""The code as written of a model that is compiled already: this is what is explained, checked and measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_OWN = "_compiled_call_impl"


def uncompiled(model: Any) -> Any:
    """The module or function inside torch.compile, if the model is already compiled."""
    from torch._dynamo.eval_frame import OptimizedModule, innermost_fn

    if isinstance(model, OptimizedModule):
        return model._orig_mod
    if isinstance(model, torch.nn.Module) or getattr(model, "_torchdynamo_disable", False):
        return model
    return innermost_fn(model)


@contextmanager
def own_compile_off(model: Any) -> Iterator[None]:
    """Temporarily removes the results of `Module.compile()`, which a call would run in place of the code."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    own = [(module, vars(module).pop(_OWN)) for module in modules if _OWN in vars(module)]
    try:
        yield
    finally:
        for module, compiled in own:
            vars(module)[_OWN] = compiled
