"""A family of devices in one file: a data sheet, one kernel, its constraints, its cost, and a stand-in for it."""

import torch

from attn_pass.devices.base import Family
from attn_pass.devices.catalog import Sheet, device_of
from attn_pass.targets.base import Offer, Refusal
from attn_pass.targets.constraints import ANY_BACKEND, AUTOCAST, NOT_EMPTY, PYTHON, Attended, Constraint, refusal, takes
from attn_pass.targets.lower import Lowering
from attn_pass.targets.problem import cost_of, problem_of

TOY_1 = Sheet("privateuseone", "Toy 1", 4, 20e3, 5e3, exp_gops=500, memory_gbytes=200, cache_bytes=8 << 20)
CONSTRAINTS = (
    Constraint("device", "only Toy 1 has such a kernel", lambda c: ToyAttention.name in c.setting.device.kernels),
    *(ANY_BACKEND, AUTOCAST, NOT_EMPTY, PYTHON, takes("toy::attention", torch.float32, torch.float16)),
    Constraint("mask", "it has no mask but a causal one", lambda c: c.attention.is_causal or c.attention.mask.is_none),
    Constraint("extras", "it has no dropout and no sink", lambda c: not c.attention.dropout and not c.attention.sink),
    Constraint("gradient", "it has no backward", lambda c: not (c.attention.needs_grad or c.setting.may_need_grad)),
)


@torch.library.custom_op("toy::attention", mutates_args=())
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    assert query.shape[:2] == key.shape[:2] == value.shape[:2], "every head has keys of its own, (B, H, L or S, D)"
    scores = query.double() @ key.double().mT * scale
    scores = scores.masked_fill(causal & ~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    return (scores.softmax(-1) @ value.double()).to(query.dtype)


attention.register_fake(lambda query, key, value, scale, causal: query.new_empty((*query.shape[:-1], value.size(-1))))


class ToyAttention:
    name = "toy_attention"

    def consider(self, attention, variant, setting):
        if (reason := refusal(CONSTRAINTS, Attended(attention, setting))) is not None:
            return Refusal(self.name, reason, other_device=self.name not in setting.device.kernels)
        cost = cost_of(self.name, attention, problem_of(attention, setting.hint), setting)
        return Offer(self.name, variant, attention, cost, fused=True)

    def emit(self, plan, nodes, offer, setting):
        a, lower = offer.attention, Lowering(plan, nodes, offer.attention)
        key = lower.operand(a.key, (a.batch, a.heads, (a.keys,), (a.dim,)), a.compute_dtype, expand=True)
        value = lower.operand(a.value, (a.batch, a.heads, (a.keys,), a.value_dim), a.compute_dtype, expand=True)
        query = lower.query(a.compute_dtype)
        return lower.result(plan.call(torch.ops.toy.attention.default, query, key, value, a.scale, a.is_causal))


class Toy(Family):
    name, types, names = "toy", ("privateuseone",), ("Toy 1",)

    def by_name(self, name):
        return device_of(TOY_1, (ToyAttention.name,)) if name.lower() == "toy 1" else None

    def targets(self):
        return (ToyAttention(),)

    def kernel_cost(self, kernel, attention, problem, setting):
        return 5.0 + problem.flops / (0.8 * setting.device.matmul(problem.dtype)) / 1e3
