"""A kernel for CUDA devices in one file: its constraints, its cost, and its call.

Offers in float16, in inference, without a mask or with a causal one over equal lengths, on Hopper.
"""

import torch
from torch import Tensor

from attn_pass.devices.cuda.cost import Shape
from attn_pass.devices.cuda.torch_kernel import Kernel
from attn_pass.devices.device import Shares
from attn_pass.targets.kernel_rules import KNOWN, NEVER, SIZES, KernelRules, Rule, dtype_rule, equal_causal_lengths

RULES = KernelRules("TOY_ATTENTION", lambda dtype: 8, (
    dtype_rule(torch.float16), KNOWN, SIZES,
    Rule("mask", "the toy kernel takes no mask but a causal one", lambda c: c.mask in ("none", "causal"), "toy.cu"),
    Rule("lengths", "the toy kernel takes equal lengths where it is causal", equal_causal_lengths, "toy.cu"),
    Rule("heads", "the toy kernel does not take grouped heads", lambda c: c.attention.groups == 1, "toy.cu"),
    Rule("training", "the toy kernel has neither dropout nor a backward",
         lambda c: not (c.trains or c.attention.dropout), "toy.cu", checked=NEVER),
))  # fmt: skip


@torch.library.custom_op("toy_cuda::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    assert query.shape[:2] == key.shape[:2] == value.shape[:2] and query.size(-1) % 8 == 0
    scores = query.double() @ key.double().mT * scale
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    return (scores.softmax(-1) @ value.double()).to(query.dtype)


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.size(-1)))


class Toy(Kernel):
    name = "toy"
    rules = RULES
    shape = Shape(rows=64, widths=(64, 128))
    shares = {"hopper": Shares(1.2)}
    sweeps = ("prefill",)
    takes_groups = False

    def is_tried(self, device):
        return False  # torch's own call never picks it

    def called(self, lower, operands, mask, decided):
        kernel = torch.ops.toy_cuda.attention.default
        return lower.plan.call(kernel, *operands, abs(lower.attention.scale), decided.is_causal)

    def bare(self, q, k, v, causal):
        return attention(q, k, v, q.size(-1) ** -0.5, causal)


KERNEL = Toy()
