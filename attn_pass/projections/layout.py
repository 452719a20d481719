"""Parameters as slices of one buffer: laid out once, and read as one tensor for as long as they lie there.

A parameter stays the object that it was, with its values; only its memory is another. So state dicts, optimizers and
updates in place go on as before, and the joined tensor, which is that memory, follows. What would notice is asked
first: whoever else holds the memory, or watches the parameter. Whether parameters still lie in one buffer is asked at
every call, by their addresses: where someone gave one of them other memory, they are laid out again, or copied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import torch

from attn_pass.errors import RewriteError

_HELD = (
    "the memory of a weight or a bias is shared, mapped from a file, or held by something else (FSDP, another process, "
    "numpy)"
)
_LOCK = threading.RLock()
_ALIGNMENT = 64  # bytes: where a tensor of its own begins, and vectors of any instruction set do


def refusal(parameters: Sequence[torch.Tensor]) -> str:
    """Why parameters cannot be laid into one buffer; empty where they can, or lie in one already."""
    if lie_together(parameters):
        return ""
    for each in parameters:
        if reason := _refusal(each):
            return reason
        if _is_held_elsewhere(each, parameters):
            return _HELD
    return ""


def _refusal(parameter: torch.Tensor) -> str:
    if type(parameter) is not torch.nn.Parameter:
        return "a weight or a bias is not a plain parameter"
    if parameter.is_inference():
        return "a weight or a bias was made in inference mode, and cannot be given other memory"
    if not parameter.is_contiguous() or parameter.nbytes % _ALIGNMENT:
        return "a weight or a bias is not contiguous, or its size is not a multiple of 64 bytes"
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return "a weight or a bias has hooks"
    return ""


def _is_held_elsewhere(parameter: torch.Tensor, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether its memory is held by more than these parameters: a tensor, a process, a file, another library.

    Several may lie in one buffer that has room for all, as they do after one was given other memory, but not overlap.
    """
    storage = parameter.untyped_storage()
    inside = [each for each in parameters if each.untyped_storage().data_ptr() == storage.data_ptr()]
    own = torch.empty(1)  # whose memory nobody else holds, asked in the same way
    is_held = _holders(storage) > _holders(own.untyped_storage()) - 1 + len(inside)
    is_alone = len(inside) == 1 and storage.nbytes() == parameter.nbytes
    is_part = not is_alone and storage.nbytes() != sum(each.nbytes for each in parameters)
    is_plain = storage.resizable() and not storage.is_shared() and not storage.is_pinned()
    in_order = sorted(inside, key=torch.Tensor.data_ptr)
    overlaps = any(one.data_ptr() + one.nbytes > other.data_ptr() for one, other in pairwise(in_order))
    return is_held or is_part or not is_plain or overlaps


def _holders(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def lie_together(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether each parameter begins where the one before it ends, in the same memory."""
    address = parameters[0].data_ptr()
    for each in parameters:
        if each.data_ptr() != address or not each.is_contiguous():
            return False
        address += each.nbytes
    first, last = parameters[0].untyped_storage(), parameters[-1].untyped_storage()
    return first.data_ptr() == last.data_ptr()


class Joined:
    """Parameters above each other as one tensor, for the calls of compiled programs.

    A program may be called with the parameters of several layers in turn, as one that is compiled for all of them is.
    Nothing is kept between calls: neither memory nor where it was, which may be another's by then.
    """

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        self.shapes = tuple(shapes)  # of each parameter
        self.rows = tuple(shape[0] for shape in shapes)

    def __call__(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor with the rows of all, (sum(rows), ...), and a gradient where one is wanted.

        Raises:
            RewriteError: a parameter has other sizes than the program was compiled for.
        """
        if torch.is_grad_enabled() and any(each.requires_grad for each in parameters):
            joined: torch.Tensor = _WithGradient.apply(self, *parameters)  # type: ignore[no-untyped-call]
            return joined
        return self.plain(parameters)

    def plain(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same without a gradient; the memory of the parameters itself, wherever that is possible."""
        if (shapes := tuple([each.shape for each in parameters])) != self.shapes:
            have, had = (", ".join(str(tuple(shape)) for shape in each) for each in (shapes, self.shapes))
            raise RewriteError(
                f"joined parameters have the sizes {have}, and the program was compiled for {had}: call"
                " torch._dynamo.reset() after such a change, which torch 2.13 and newer find by themselves"
            )
        return self._over(parameters[0]) if lie_together(parameters) else self._laid_out(parameters)

    def _laid_out(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        no_autocast = torch.autocast(parameters[0].device.type, enabled=False)
        with _LOCK, torch.inference_mode(False), torch.no_grad(), no_autocast:
            if not lie_together(parameters):  # another thread may have been here
                memory = torch.cat([each.detach() for each in parameters], 0)
                if refusal(parameters):
                    return memory
                for each, rows in zip(parameters, memory.split(self.rows)):
                    each.data = rows
            return self._over(parameters[0])

    def _over(self, first: torch.Tensor) -> torch.Tensor:
        """The memory from the first parameter on, as a tensor of its own and not as a view of that one."""
        joined = torch.empty(0, dtype=first.dtype, device=first.device)
        shape = (sum(self.rows), *first.shape[1:])
        return joined.set_(first.untyped_storage(), first.storage_offset(), shape, first.stride())


class _WithGradient(torch.autograd.Function):
    """The joined tensor, whose gradient is that of every parameter in its own rows."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, joined: Joined, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.rows = joined.rows  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)  # where no gradient comes, each parameter's stays None
        ctx.save_for_backward(*parameters)  # autograd sees then if one is written before the backward
        return joined.plain(parameters).detach()

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        assert ctx.saved_tensors  # type: ignore[attr-defined]
        rows: tuple[int, ...] = ctx.rows  # type: ignore[attr-defined]
        return (None, *([None] * len(rows) if gradient is None else gradient.split(rows)))
