"""What the documentation of torch_npu's attention operators allows in a program's own call: one rule per row.

Other calls raise on the device, or do there what no page says; nothing is concluded from them. A size that is known at
run time only is held against none of the limits (``limits.py``), but for the head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attn_pass.devices.npu.generations import INFERENCE, TRAINING_V1
from attn_pass.devices.npu.limits import (
    GROUP,
    HEADS,
    HIDDEN,
    KEYS_OF_ONE_ROW,
    LIMITS,
    ODD_BATCHES,
    Limits,
)
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.index import Index
from attn_pass.targets import constraints
from attn_pass.targets.constraints import Constraint

_BANDED = 4  # the mode that takes its bounds from the arguments
_MASK_OF_ONE_ROW = ("bk",)


@dataclass(frozen=True)
class CallFacts:
    """A call: sizes by letters (batch, heads, positions, head dim), and the other arguments that have limits."""

    inference: bool
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    is_contiguous: bool
    query: Mapping[str, Index]
    key: Mapping[str, Index]
    value: Mapping[str, Index]
    positions_first: bool  # an operand or the result has them before heads
    transposed: bool  # the result has another layout than the operands
    inner_precise: object
    mode: int
    before: int
    after: int

    @property
    def limits(self) -> Limits:
        """What its operator takes."""
        return LIMITS[INFERENCE if self.inference else TRAINING_V1]

    @property
    def decodes(self) -> bool:
        """Whether it is the inference operator with one query row, which is another kernel."""
        return self.inference and self.query["s"] == 1

    @property
    def masks(self) -> tuple[str, ...]:
        """The shapes of a full-size mask."""
        return _MASK_OF_ONE_ROW if self.decodes else self.limits.masks


ContractRule = Constraint[CallFacts]


def _at_most(size: Index, most: int) -> bool:
    return not isinstance(size, int) or size <= most


def _sizes(c: CallFacts) -> tuple[Index, ...]:
    return *c.query.values(), *c.key.values(), *c.value.values()


def _dims(c: CallFacts) -> tuple[Index, Index]:
    return c.query["d"], c.value["d"]


def _has_head_dims(c: CallFacts) -> bool:
    dim, value_dim = _dims(c)
    if not isinstance(dim, int) or not isinstance(value_dim, int) or not value_dim <= dim <= c.limits.head_dim:
        return False
    return not c.inference or (value_dim == dim and dim % 8 == 0)


def _has_batches(c: CallFacts) -> bool:
    dim = c.query["d"]
    odd = c.inference and c.query["s"] != 1 and isinstance(dim, int) and dim % 16 != 0
    return _at_most(c.query["b"], ODD_BATCHES if odd else c.limits.batch)


def _fits_hidden(c: CallFacts) -> bool:
    hidden = c.query["h"] * c.query["d"]
    return not c.inference or not c.positions_first or (isinstance(hidden, int) and hidden < HIDDEN)


RULES: tuple[ContractRule, ...] = (
    ContractRule(
        "dtype",
        lambda c: (
            f"operands of {', '.join(sorted({dtype_name(d) for d in c.dtypes}))}: the operator takes "
            + ", ".join(dtype_name(d) for d in c.limits.dtypes)
        ),
        lambda c: len(set(c.dtypes)) == 1 and c.dtypes[0] in c.limits.dtypes,
    ),
    ContractRule(
        "contiguous",
        "an operand is not contiguous: the inference operator takes contiguous tensors, so call .contiguous()",
        lambda c: c.is_contiguous or not c.inference,
    ),
    ContractRule("sizes", "a size is 0, which is not documented", lambda c: 0 not in _sizes(c)),
    ContractRule(
        "head dim",
        lambda c: "head dims of {} and {}, which the operator is not documented for".format(*_dims(c)),
        _has_head_dims,
    ),
    ContractRule("heads", lambda c: f"{c.query['h']} heads are over {HEADS}", lambda c: _at_most(c.query["h"], HEADS)),
    ContractRule(
        "heads of a group",
        lambda c: f"{c.query['h']} heads over {c.key['h']}: more than {GROUP} share a KV head",
        lambda c: not c.inference or _at_most(c.query["h"], GROUP * c.key["h"] if isinstance(c.key["h"], int) else 0),
    ),
    ContractRule("batch", lambda c: f"a batch of {c.query['b']} is over what is documented", _has_batches),
    ContractRule(
        "length",
        lambda c: f"a length is over {c.limits.length}",
        lambda c: all(_at_most(n, c.limits.length) for n in (c.query["s"], c.key["s"])),
    ),
    ContractRule(
        "keys of one row",
        lambda c: f"{c.key['s']} keys of one query row are over {KEYS_OF_ONE_ROW}",
        lambda c: not c.decodes or _at_most(c.key["s"], KEYS_OF_ONE_ROW),
    ),
    ContractRule(
        "hidden size",
        lambda c: f"heads times head dim is not under {HIDDEN}, with positions before heads",
        _fits_hidden,
    ),
    ContractRule(
        "result layout",
        "a result in another layout than the operands is for more than one query row",
        lambda c: not (c.transposed and c.decodes),
    ),
    ContractRule(
        "inner_precise",
        lambda c: f"inner_precise {c.inner_precise} is not documented" + (" for one query row" if c.decodes else ""),
        lambda c: c.inner_precise in ((0, 1) if c.decodes else c.limits.inner_precise),
    ),
    ContractRule(
        "band",
        "an empty band: pre_tockens + next_tockens is below 0",
        lambda c: c.mode != _BANDED or c.decodes or c.before + c.after >= 0,
    ),
)


def refusal(call: CallFacts) -> str | None:
    """The first reason why a call, its mask aside, is none that the documentation allows; None if it is one."""
    return constraints.refusal(RULES, call)


def mask_letters(call: CallFacts, shape: tuple[Index, ...]) -> str | None:
    """The documented shape of a full-size mask that this one has, by letters; None for any other."""
    sizes: Mapping[str, Index] = {
        "b": call.query["b"],
        "h": call.query["h"],
        "i": call.query["s"],
        "k": call.key["s"],
        "1": 1,
    }
    return next((m for m in call.masks if tuple(sizes[letter] for letter in m) == tuple(shape)), None)


def mask_words(call: CallFacts) -> str:
    """Those shapes, for a reason."""
    words = {"b": "B", "h": "N", "i": "Sq", "k": "Sk", "1": "1"}
    return " or ".join(f"({', '.join(words[letter] for letter in m)})" for m in call.masks)
