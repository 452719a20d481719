"""FlexAttention, for scores with more than a scale and a mask: soft caps, clamps, masks that multiply, weak fills.

Becomes: the higher-order operator ``flex_attention``, with the score function, the block mask and the tensors that both
read as its arguments.

    (torch.tanh(q @ k.mT * scale / cap) * cap).masked_fill(row - key >= 128, -inf).softmax(-1) @ v
    ->
    flex_attention(q, k, v, score_mod, block_mask, 1.0, options)[0]

Exact because: the score function and the mask are the expressions that were read, for each batch entry, head, row and
key. A block is skipped only if all of it is masked, and goes without the mask only if none of it is.

Inductor compiles the kernel around the score function, which is the expression as it was read; a block mask skips the
blocks that are known to be masked. On CUDA devices it is also offered for masks that torch's kernels take only as a
matrix: windows, chunks, prefixes, documents, and biases computed from positions (ALiBi), without the matrix if they can
be computed score by score. If only a part of a cache is valid, the block mask lists only the blocks of valid keys,
which tensor arithmetic finds when the program runs. If the mask is a tensor of the program, such as padding, the block
mask lists the blocks in which it keeps a key, where finding them is cheap. On CUDA devices the target supports training
too, unless the score function reads a tensor that needs a gradient itself, and it splits the keys if there are few
query rows.

Offers on CUDA devices for all of these, and on the CPU only for scores with more than a scale and a mask, in
inference, in float32 and half precision, from torch 2.13 on, with ``backend`` and ``aot_compile``. Operands are
copied, and captured tensors are computed first, because the CPU template handles views and unfinished tensors wrongly
in torch 2.13. Compiling takes about 4 s per layer, which the model counts as 0.4 ms per call. Where Inductor does not
run it (``wrap``, ``rewrite``), the operator runs as products and a softmax: right, but not faster, so it is taken only
with ``choose="fused"``. Inside the hook sites on the CPU are left, and ``torch.export.save`` cannot write the
operator. It is not offered with dropout, or if the number of heads or a head dim is unknown. For CUDA the emitted
calls were run as products and a softmax, and the Triton templates were rendered and compiled, without a GPU; on an H200
windows, soft caps and padding were right, forward and backward. Their speed on a GPU is not known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from attn_pass.devices import roofline
from attn_pass.devices.registry import family_of
from attn_pass.devices.roofline import Problem
from attn_pass.graph.edit import Plan, Value, aten
from attn_pass.model.attention import Attention, Blocks
from attn_pass.model.expression import loads
from attn_pass.model.structure import Band
from attn_pass.model.text import score_mod_source
from attn_pass.model.valid_range import ValidRange
from attn_pass.targets import looking
from attn_pass.targets.base import EMPTY_ROWS, FLEX, NONEMPTY_ROWS, Offer, Refusal, Setting
from attn_pass.targets.flex.block_lists import Sides, ValidKeys, block_mask
from attn_pass.targets.flex.blocks import UNKNOWN_SHARE, conjunctions, share
from attn_pass.targets.flex.kept_blocks import KeptBlocks, kept_blocks
from attn_pass.targets.flex.lower import Mod, band_mod, kernel_options, own_memory
from attn_pass.targets.flex.rules import Case, no_decoding, power_of_two, refusal, rows_are_safe
from attn_pass.targets.flex.score import Function, function_of, names_of, template_name, visible
from attn_pass.targets.key_bounds import VALID_SHARE
from attn_pass.targets.key_ranges import end_of_keys, first_key
from attn_pass.targets.lower import Lowering
from attn_pass.targets.operands import dense_last
from attn_pass.targets.problem import bytes_of, mask_elements, problem_of

# Rows and keys of a block of the mask. The CPU template keeps a block of scores in memory for each thread; with 128 a
# multiple of the key block it would take its decoding kernel for a single query, which asks for pointers it is not
# given (seen in torch 2.13.0). CUDA's tiles divide torch's own 128.
_BLOCKS = {"cpp": (64, 256), "triton": (128, 128)}

# Tiles for the tuner on CUDA: query rows, keys, warps, stages. Larger ones take minutes to compile in float32.
_TILES = ((128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2), (64, 32, 4, 2))
_WIDE_TILES = ((64, 64, 4, 3), (64, 32, 4, 3), (128, 32, 4, 2))
_DECODING_TILES = ((32, 2, 3), (128, 4, 3))  # keys, warps, stages; rows are what there are
# What a score of the mask takes that says for every other form what block lists keep: a look-up in the table of blocks
# and `mask_mod`.
_TABLE_NANOSECONDS = 3.5
_TOLD = ("BLOCK_N", "num_warps", "num_stages")
# Bytes of shared memory a thread block may have, by compute capability; elsewhere the least of any.
_SHARED = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
_LEAST_SHARED = 99 << 10
_FAR = 1 << 30  # behind any cache
SKIPPED = "blocks that the mask hides are found at run time and skipped"


@dataclass(frozen=True)
class FlexPlan:
    """The functions, rows and keys of a block of the mask, and the template's options besides torch's defaults.

    ``band`` is the mask function where that is a band of known distances, or keeps everything.
    """

    function: Function
    blocks: tuple[int, int]
    band: Band | None = None
    options: tuple[tuple[str, object], ...] = ()  # names are those of `FlexKernelOptions`
    valid: ValidRange | None = None  # the keys whose blocks are listed
    block_map: KeptBlocks | None = None  # what says which blocks are listed, when the program runs
    in_triton: bool = True  # the template's language; else it is C++


class Flex:
    """`torch.ops.higher_order.flex_attention`: on the CPU in inference, on CUDA devices."""

    name = "flex"
    takes_any_score = True
    takes_valid_range = True
    backend = ""  # the kernel option of this name, where it is not torch's choice
    looks_for_blocks = True  # in a mask that is a tensor of the program's, on CUDA devices

    def consider(self, attention: Attention, variant: str, setting: Setting) -> Offer[FlexPlan] | Refusal:
        """Takes what no other target can: scores that are not affine in the product; on CUDA masks without a matrix."""
        if template_name(setting) != "triton" and not attention.not_affine:  # the most common case, checked first
            return Refusal(self.name, "the scores are a scale, a bias and a mask, which need no score function")
        if setting.kernel_as_written == FLEX:
            return Refusal(self.name, "the program calls FlexAttention itself")
        function = function_of(attention, setting)
        reason = refusal(Case(attention, setting, function)) or _refusal_of_range(attention, function, setting)
        if reason is not None:
            return Refusal(self.name, reason)
        assumptions: tuple[str, ...] = ()
        if setting.assume_nonempty_rows and template_name(setting) == "triton" and not attention.mask.never_empty:
            assumptions = (NONEMPTY_ROWS,)
        elif attention.empty_row_is_nan and not attention.mask.never_empty:
            assumptions = (EMPTY_ROWS,)
        source = score_mod_source(function.together(), names_of(attention))
        problem = _problem(attention, function, setting)
        block_map, predicted = self._looked_up(attention, function, problem, setting)
        return Offer(
            self.name,
            variant,
            attention,
            predicted,
            fused=True,
            plan=replace(self._plan(attention, function, setting), block_map=block_map),
            assumptions=assumptions,
            score_mod=source,
            moved=problem.moved_bytes,
            compiled_for_site=True,
            remark="" if block_map is None else SKIPPED,
        )

    def _looked_up(
        self, a: Attention, function: Function, problem: Problem, setting: Setting
    ) -> tuple[KeptBlocks | None, float]:
        """What says which blocks count, where looking for them may pay; and what the kernel takes.

        All blocks are taken to count: of a mask that is a tensor nothing is known before.
        """
        all_blocks_us = _cost(a, function, problem, setting)
        if not self.looks_for_blocks or template_name(setting) != "triton":
            return None, all_blocks_us
        block_map = kept_blocks(a, function, _BLOCKS["triton"], setting)
        if block_map is None:
            return None, all_blocks_us
        looking_us = looking.microseconds(block_map.kernels(backward=a.needs_grad), problem, setting)
        if not looking.pays(looking_us, all_blocks_us, _cost(a, function, problem, setting, 0.5)):
            return None, all_blocks_us
        return block_map, all_blocks_us + looking_us

    def alternatives(self, offer: Offer[FlexPlan], setting: Setting) -> Iterable[Offer[FlexPlan]]:
        """The same with other tiles than Inductor's own choice, for the tuner."""
        if template_name(setting) != "triton":
            return
        a = offer.attention
        decodes = no_decoding(a) is None
        prefix = "fwd_" if a.needs_grad else ""  # a backward has block sizes of its own
        tiles = _DECODING_TILES if decodes else _WIDE_TILES if a.compute_dtype.itemsize == 4 else _TILES
        problem = problem_of(a, setting.hint)
        for tile in tiles:
            *rows, keys, _, stages = tile
            if _shared_bytes(problem, rows[0] if rows else 16, keys, stages) > _shared(setting):
                continue
            names = _TOLD if decodes else ("BLOCK_M", *_TOLD)
            options = tuple((prefix + name, value) for name, value in zip(names, tile))
            text = " ".join(f"{name}={value}" for name, value in zip(names, tile))
            variant = f"{offer.variant} + {text}" if offer.variant else text
            yield replace(offer, variant=variant, plan=replace(offer.plan, options=(*offer.plan.options, *options)))

    def _plan(self, a: Attention, function: Function, setting: Setting) -> FlexPlan:
        in_triton = template_name(setting) == "triton"
        band = None
        if function.mask is None or not in_triton:
            band = Band() if function.mask is None else visible(a)
        options = self._options(a) if in_triton else ()
        return FlexPlan(function, _BLOCKS[template_name(setting)], band, options, a.valid, in_triton=in_triton)

    def _options(self, a: Attention) -> tuple[tuple[str, object], ...]:
        """The options of the CUDA templates."""
        if self.backend:
            return (("BACKEND", self.backend),)
        # By itself torch decodes wherever the rows are few, and may find no choice.
        backend = () if no_decoding(a) is None else (("BACKEND", "TRITON"),)
        return (*backend, *((("ROWS_GUARANTEED_SAFE", True),) if rows_are_safe(a) else ()))

    def emit(self, plan: Plan, nodes: Sequence[Node], offer: Offer[FlexPlan], setting: Setting) -> Value:
        """Plans the operator with its score function and block mask."""
        a, function = offer.attention, offer.plan.function
        lower = Lowering(plan, nodes, a)
        in_triton = offer.plan.in_triton
        dtype = a.compute_dtype
        heads_first = (lower.query(dtype), lower.key(dtype), lower.value(dtype))
        operands = [self.operand(plan, x, in_triton=in_triton) for x in heads_first]
        score = Mod(lower, function.score, in_triton=in_triton)
        device = a.sources[a.query.source].device
        masked: tuple[Value, ...] = ()
        if function.mask is None or offer.plan.band is not None:
            mask = band_mod(device, offer.plan.band or Band())
        else:
            mask_mod = Mod(lower, function.mask, scored=False, in_triton=in_triton)
            mask, masked = mask_mod.module(), tuple(mask_mod.captured)
        scored = score.module()
        self.check(scored, mask, setting)
        block_map = offer.plan.block_map
        with nullcontext() if block_map is None else plan.sharing():
            blocks = block_mask(
                plan,
                device,
                function.parts,
                Sides.of(plan, (a.q_len, a.kv_len), offer.plan.blocks),
                mask,
                masks=function.mask is not None,
                parts_are_exact=function.parts_are_exact,
                backward=a.needs_grad,
                valid=None if offer.plan.valid is None else _valid_keys(lower, offer.plan.valid),
                block_map=None if block_map is None else block_map.map(lower, offer.plan.blocks),
            )
        arguments = (
            *operands,
            plan.module("flex_score_mod", scored),
            blocks,
            1.0 if a.not_affine else a.scale,
            kernel_options(operands, dict(offer.plan.options), backward=a.needs_grad),
            tuple(score.captured),
            masked,
        )
        with torch.no_grad():  # with gradients the operator traces its backward at once, under a fake mode of its own
            results = plan.call(torch.ops.higher_order.flex_attention, *arguments)
        if a.needs_grad:
            results.fake[0].requires_grad_()
        return lower.result(plan.call(operator.getitem, results, 0))

    def operand(self, plan: Plan, value: Value, *, in_triton: bool) -> Value:
        """An operand (B, H, L, D) as the template takes it."""
        return (dense_last if in_triton else own_memory)(plan, value)

    def check(self, score: GraphModule, mask: GraphModule, setting: Setting) -> None:
        """Raises `RewriteError` where torch refuses the functions."""


def _refusal_of_range(a: Attention, function: Function, setting: Setting) -> str | None:
    """Why blocks cannot be listed by a range of valid keys; None where they can, or there is no range."""
    if a.valid is None:
        return None
    if template_name(setting) != "triton" or a.needs_grad:
        return "blocks of valid keys are listed in inference, for CUDA devices"
    if function.mask is None or function.parts_are_exact:
        return "the score function does the masking, so every block counts"
    if len(conjunctions(function.parts)) != 1:
        return "blocks of valid keys are not listed beside alternatives"
    return None


def _valid_keys(lower: Lowering, valid: ValidRange) -> ValidKeys:
    """What any row of the batch keeps, in int32."""
    call = lower.plan.call

    def of_all(value: Value | None, extreme: Callable[..., object]) -> Value | None:
        if value is None:
            return None
        near = call(aten.clamp.default, call(extreme, value, [0], True), -_FAR, _FAR)
        return call(aten.to.dtype, near, torch.int32)

    return ValidKeys(
        of_all(first_key(lower, valid.first), aten.amin.default),
        of_all(end_of_keys(lower, valid.last), aten.amax.default),
    )


def _shared(setting: Setting) -> int:
    return _SHARED.get(setting.device.capability, _LEAST_SHARED)


def _shared_bytes(problem: Problem, rows: int, keys: int, stages: int) -> int:
    """What a tile takes at least: queries once, keys and values for every stage (as Triton 3.7 was seen to do)."""
    dim, value_dim = power_of_two(problem.head_dim), power_of_two(problem.value_dim)
    return problem.dtype.itemsize * (rows * dim + stages * keys * (dim + value_dim))


def _problem(a: Attention, function: Function, setting: Setting) -> Problem:
    problem = problem_of(a, setting.hint)
    if template_name(setting) == "triton":
        return replace(problem, mask_elements=bytes_of(a, function.loads(), setting.hint), mask_bytes=1)
    return problem if loads(function.score) else replace(problem, mask_elements=0)


def as_written(attention: Attention, problem: Problem, setting: Setting) -> float:
    """Predicted microseconds of a call that the program makes itself, whose blocks are torch's own of 128 by 128."""
    if setting.runner == "other":
        return 2 * roofline.unfused(setting.device, problem)
    blocks = setting.blocks or Blocks()
    visited = share(blocks.parts, problem.q_len, problem.kv_len, _BLOCKS["triton"])
    visited *= UNKNOWN_SHARE if blocks.hides_more else 1.0
    splits = no_decoding(attention) is None
    return family_of(setting.device).flex_cost(setting.device, problem, visited, splits_keys=splits, as_written=True)


def table_cost(attention: Attention, setting: Setting) -> float:
    """Microseconds for the mask that says what a call's block lists keep, which every form but the call itself reads.

    Sites with the same lists share it.
    """
    if setting.blocks is None or not setting.blocks.in_table:
        return 0.0
    elements = mask_elements(attention, setting.hint) / setting.sharing_mask
    return _TABLE_NANOSECONDS * elements / setting.device.cores / 1e3


def _cost(a: Attention, function: Function, problem: Problem, setting: Setting, share_kept: float = 1.0) -> float:
    """Predicted microseconds, if this share of the blocks that the parts leave is computed.

    Without Inductor the operator runs as products and a softmax over all scores.
    """
    if setting.runner == "other":
        return 2 * roofline.unfused(setting.device, problem)
    visited = share(function.parts, problem.q_len, problem.kv_len, _BLOCKS[template_name(setting)])
    visited *= share_kept * (1.0 if a.valid is None else VALID_SHARE)
    return family_of(setting.device).flex_cost(setting.device, problem, visited, splits_keys=no_decoding(a) is None)
