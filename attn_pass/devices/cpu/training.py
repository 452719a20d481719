"""What the CPU kernel asks of an attention with gradients, beside what it asks of any."""

from __future__ import annotations

from attn_pass.model.attention import Attention
from attn_pass.model.expression import loads
from attn_pass.targets.base import Setting
from attn_pass.targets.empty_rows import replaced_and_added


def adds_to_empty_rows(a: Attention, setting: Setting) -> bool:
    """Whether an added mask may mask a row fully: the gradient of such a row passes through it."""
    return a.needs_grad and not (a.mask.never_empty or setting.assume_nonempty_rows)


def refusal(a: Attention, setting: Setting) -> str | None:
    """Why the kernel's backward is not the program's; None where it is, or where no gradient is needed."""
    if setting.may_need_grad or (a.needs_grad and setting.program != "compile"):
        return "the CPU kernel has gradients under torch.compile only"
    if not a.needs_grad:
        return None
    if adds_to_empty_rows(a, setting) and not a.mask.only_hides and (reason := replaced_and_added(a)) is not None:
        return reason
    condition = a.mask.condition
    if condition is not None and any(a.sources[load.source].needs_grad for load in loads(condition)):
        return "the mask's condition needs a gradient"
    return None
