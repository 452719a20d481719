"""Programs that failed once, and the cause; a failure prints its own line for this table."""

from __future__ import annotations

import torch
from fuzz_masks import Mask
from fuzz_program import Program, Step
from fuzz_strategy import Case

_HEADS = Step(row="scale: exp of heads")
_TWICE = Step(row="scale: mul", x=2.0)
_MAXIMUM = Step(row="bias: minus the maximum")

_LOWEST = torch.finfo(torch.float32).min

# The first twenty-six were faults of the pass; with the others the property asked too much (docs/results/fuzz.md).
FOUND: tuple[tuple[str, Case], ...] = (
    (
        "products of pieces of the weights are one product, and nobody saw what writes to their sum, in training",
        Case(
            Program(
                lead=(2, 2),
                q_len=1,
                kv_len=4,
                score=(Step(row="scale: root"),),
                times=Step(row="in pieces"),
                result=(Step(row="written in part"),),
            ),
            grad=True,
            targets=("cpu_kernel",),
        ),
    ),
    (
        "scores that are clamped to a number that masks, of a single key that is -inf: what was assumed was not said",
        Case(
            Program(
                lead=(),
                kv_len=1,
                dtype=torch.bfloat16,
                key=(Step(row="last is no number"),),
                score=(Step(row="mask: max", mask=Mask()),),
                times=Step(row="twice"),
            ),
            targets=("cpu_kernel",),
        ),
    ),
    (
        "merged heads are a copy of the program's result and were a view of the kernel's, when they are written",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                score=(Step(row="scale: root"),),
                result=(Step(row="heads merged"), Step(row="written")),
            ),
            grad=True,
            targets=("cpu_kernel",),
        ),
    ),
    (
        "in a row that is NaN, a score that was replaced before it is divided gets a gradient of 0, not NaN",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                value_dim=2,
                dtype=torch.bfloat16,
                key=(Step(row="last is no number"),),
                score=(Step(row="mask: input == 0", fill=-1e9), Step(row="scale: root")),
            ),
            grad=True,
            targets=("cpu_kernel",),
        ),
    ),
    (
        "a row of float64 scores is shifted, and the sink beside it was not",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                score=(Step(row="mask: float64 where", fill=_LOWEST, mask=Mask()), Step(row="bias: keys", x=0.25)),
                softmax=Step(row="off by one"),
            )
        ),
    ),
    (
        "float64's 1e38 absorbs a score as -1e38 does, and was shifted away",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                value_dim=2,
                score=(Step(row="mask: float64 where", fill=_LOWEST, mask=Mask()),),
                softmax=Step(row="softmin"),
            )
        ),
    ),
    (
        "float16's lowest number times 0.3 masks no more, and the scores it absorbed came back",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                value_dim=2,
                dtype=torch.float16,
                score=(
                    Step(row="mask: add where", fill=-65504.0, mask=Mask("causal, moved")),
                    Step(row="scale: mul", x=0.3),
                ),
            ),
            dialect="export",
        ),
    ),
    (
        "float16's lowest number times a tensor that may be negative, in front of the keys that are kept",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                dtype=torch.float16,
                score=(
                    Step(row="mask: add where", fill=-65504.0, mask=Mask()),
                    Step(row="other: times a matrix", ones=(False, False, False, True, False)),
                    Step(row="scale: mul", x=0.3),
                ),
                seed=1,
            )
        ),
    ),
    (
        "float16's lowest number times -0.5, the same",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                dtype=torch.float16,
                score=(Step(row="mask: add where", fill=-65504.0, mask=Mask()), Step(row="scale: mul", x=-0.5)),
            )
        ),
    ),
    (
        "float16's lowest number added inside a function of the scores: a soft cap, a mask, a factor",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                dtype=torch.float16,
                score=(
                    Step(row="other: soft cap"),
                    Step(row="mask: add where", fill=-65504.0, mask=Mask("causal, moved")),
                    Step(row="scale: mul", x=0.3),
                ),
            )
        ),
    ),
    (
        "float16's lowest number added inside a function of the scores: times a mask",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                dtype=torch.float16,
                score=(
                    Step(row="mask: add where", fill=-65504.0, mask=Mask("causal, moved")),
                    Step(row="other: times the mask", mask=Mask("anticausal")),
                ),
            )
        ),
    ),
    (
        "the logarithm of the sum is lost beside float16's own fills as well",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                dtype=torch.float16,
                score=(Step(row="mask: masked_fill", fill=-65504.0, mask=Mask("causal, moved")),),
                softmax=Step(row="minus logsumexp"),
            )
        ),
    ),
    (
        "a mask in float16, and then a number in float32 that float16 has no room for",
        Case(
            Program(
                lead=(2, 2),
                kv_len=1,
                dtype=torch.float16,
                product=Step(row="joined over keys", mask=Mask()),
                score=(Step(row="bias: far down, in float32", x=-20000.0),),
            )
        ),
    ),
    (
        "weights in pieces, twice: the second layer was read with a query that stood in the graph no more",
        Case(
            Program(
                lead=(2, 2), kv_len=4, score=(Step(row="scale: mul", x=0.3),), times=Step(row="in pieces"), layers=2
            )
        ),
    ),
    (
        "in a fully masked row the higher of two numbers filled in counts alone, -inf between them or not",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                score=(
                    Step(row="mask: masked_fill", fill=_LOWEST, mask=Mask("causal")),
                    Step(row="mask: masked_fill", mask=Mask("input")),
                    Step(row="mask: masked_fill", fill=-1e9, mask=Mask("anticausal")),
                ),
            )
        ),
    ),
    (
        "a matrix of float32's lowest number, -inf, then -1e9: in a fully masked row the last counts alone",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                score=(
                    Step(row="mask: add where", fill=_LOWEST, mask=Mask()),
                    Step(row="mask: masked_fill", mask=Mask(name="input")),
                    Step(row="mask: masked_fill", fill=-1e9, mask=Mask(name="anticausal")),
                ),
            )
        ),
    ),
    (
        "minus a mask's -inf is inf, whose rows are NaN that a guard sets to zero",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                score=(Step(row="mask: masked_fill", mask=Mask()), Step(row="scale: neg")),
                softmax=Step(row="nan_to_num"),
                result=(Step(row="written"),),
            ),
            dialect="export",
        ),
    ),
    (
        "the same, with a bias between the mask and the sign",
        Case(
            Program(
                lead=(2,),
                kv_len=4,
                query=(Step(row="flipped"),),
                score=(
                    Step(row="mask: masked_fill", mask=Mask()),
                    Step(row="bias: distance", x=0.5),
                    Step(row="scale: mul", x=-0.5),
                ),
                softmax=Step(row="nan_to_num"),
            )
        ),
    ),
    (
        "-1e30 filled in and -1e30 in a tensor of bfloat16 are one number, in fully masked rows",
        Case(
            Program(
                lead=(),
                kv_len=4,
                dtype=torch.bfloat16,
                product=Step(row="query not transposed"),
                score=(
                    Step(row="scale: mul", x=0.3),
                    Step(row="mask: masked_fill", fill=-1e30, mask=Mask(name="input")),
                    Step(row="mask: where tensor", fill=-1e30, mask=Mask(name="anticausal")),
                ),
            )
        ),
    ),
    (
        "a key without a value that is masked, in a fully masked row",
        Case(
            Program(
                lead=(),
                kv_len=4,
                score=(Step(row="mask: masked_fill", fill=_LOWEST, mask=Mask(name="causal, moved")),),
                times=Step(row="shifted"),
            )
        ),
    ),
    (
        "scores rounded to bfloat16: a cast between floating types is no meaning",
        Case(
            Program(
                lead=(1, 1),
                kv_len=4,
                value_dim=3,
                dtype=torch.float64,
                layouts=("reversed", "fused", "one more"),
                product=Step(row="method"),
                score=(Step(row="scale: in place", x=-0.5), Step(row="other: to half")),
                times=Step(row="transposed"),
                seed=1,
            )
        ),
    ),
    (
        "-1e9 beside a bias leaves something of scores above 32, in a fully masked row",
        Case(
            Program(
                lead=(4, 4, 4),
                kv_len=4,
                key=(Step(row="div", x=0.125),),
                product=Step(row="baddbmm of a bias", ones=(False, False, False, False, True)),
                score=(Step(row="other: mask == 1", fill=-1e9),),
            )
        ),
    ),
    (
        "a fill replaces the -inf of a mask inside another function of the scores, and is not added to it",
        Case(
            Program(
                lead=(),
                kv_len=4,
                score=(
                    Step(row="mask: masked_fill", mask=Mask("input")),
                    Step(row="other: weak fill", x=0.0, mask=Mask()),
                    Step(row="mask: masked_fill", fill=_LOWEST, mask=Mask("chunk")),
                    Step(row="mask: masked_fill", mask=Mask()),
                ),
            ),
            dialect="export",
        ),
    ),
    (
        "a mask times -0.5 is 1e38, beside which a fused backward loses how many keys there are",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                score=(
                    _MAXIMUM,
                    Step(row="mask: add where", fill=_LOWEST, mask=Mask()),
                    Step(row="scale: mul", x=-0.5),
                ),
            ),
            grad=True,
        ),
    ),
    (
        "a fill times -2 is infinite, whose rows are NaN that a guard sets to zero",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                product=Step(row="query not transposed"),
                score=(
                    Step(row="mask: masked_fill", fill=_LOWEST, mask=Mask()),
                    Step(row="bias: bias plus alpha scores", x=-2.0),
                ),
                softmax=Step(row="nan_to_num"),
            )
        ),
    ),
    (
        "two of float16's lowest numbers that are added are -inf, and one alone counts",
        Case(
            Program(
                lead=(),
                kv_len=4,
                dtype=torch.float16,
                key=(Step(row="flipped"),),
                score=(
                    Step(row="scale: mul", x=0.3),
                    Step(row="mask: one minus", mask=Mask()),
                    Step(row="mask: one minus", mask=Mask("causal, moved")),
                ),
            ),
            dialect="export",
        ),
    ),
    (
        "detach() of scores that were written in place stops their gradient",
        Case(
            Program(
                lead=(4,),
                kv_len=4,
                score=(Step(row="mask: masked_fill_", mask=Mask()), Step(row="other: detached")),
            ),
            grad=True,
        ),
    ),
    (
        "eager's largest error of two numbers in float16 was luck",
        Case(
            Program(
                lead=(3, 2),
                q_len=7,
                kv_len=4,
                dim=8,
                value_dim=3,
                dtype=torch.float16,
                product=Step(row="transposed"),
                score=(_HEADS, _TWICE, _MAXIMUM),
                softmax=Step(row="upcast"),
                times=Step(row="method"),
                seed=3,
            ),
            grad=True,
        ),
    ),
    (
        "a result of a bfloat16 call, made float32: the unit is the call's",
        Case(
            Program(
                lead=(1,),
                q_len=2,
                kv_len=17,
                dim=8,
                value_dim=2,
                dtype=torch.bfloat16,
                layouts=("moved", "selected", "one more"),
                call=True,
                result=(Step(row="float"),),
                seed=2,
            ),
            strides=("expanded", "", "permuted"),
        ),
    ),
    (
        "the gradient of a mask that was multiplied by -1e9 is noise in eager too",
        Case(
            Program(
                lead=(2, 2),
                q_len=17,
                dim=2,
                kv_len=4,
                value_dim=2,
                query=(Step(row="rope"),),
                score=(
                    Step(row="mask: one minus input", fill=-1e9, ones=(True, True, True, True, False)),
                    Step(row="scale: imul", x=0.3),
                ),
                seed=3,
            ),
            grad=True,
        ),
    ),
    (
        "normalised over one number, a key is a sign, and its gradient what rounding left",
        Case(
            Program(
                lead=(2,),
                q_len=5,
                kv_len=2,
                dim=1,
                dtype=torch.bfloat16,
                layouts=("as is", "split", "as is"),
                key=(Step(row="normalised"),),
                score=(Step(row="scale: root"),),
            ),
            grad=True,
        ),
    ),
    (
        "100 added to whole rows cancels in the gradient of what divides them, to the rounding of 100",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                layouts=("as is", "as is", "dims first"),
                score=(Step(row="bias: term", x=100.0), Step(row="scale: by a number")),
                after=(Step(row="written"),),
                seed=3,
            ),
            grad=True,
        ),
    ),
    (
        "an infinite score over a sum without a maximum is NaN in all of its row, and the gradient of the values too",
        Case(
            Program(
                lead=(2, 2),
                dim=2,
                value_dim=2,
                key=(Step(row="last is no number"),),
                score=(Step(row="other: no binary mask"),),
                softmax=Step(row="base 2"),
            ),
            grad=True,
        ),
    ),
    (
        "dropout draws other numbers in another dialect",
        Case(Program(q_len=4, kv_len=4, after=(Step(row="dropout"),), times=Step(row="in a chain")), "decomposed"),
    ),
    *(
        (
            "two fills in float64 scores: the lowest decides in fully masked rows, and float32 has one",
            Case(
                Program(
                    lead=(2, 2),
                    kv_len=4,
                    query=(Step(row="flipped"),),
                    score=(
                        Step(row="mask: triu of the scores' shape", fill=-1e30),
                        Step(row="mask: float64 where", fill=-3.4028234663852886e38, mask=Mask(name="causal, moved")),
                    ),
                ),
                targets=targets,
            ),
        )
        for targets in (None, ("flex",), ("cpu_kernel",))
    ),
    (
        "what is added before and after a maximum is taken off has no sum in float16",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                dtype=torch.float16,
                query=(Step(row="flipped"),),
                score=(
                    Step(row="bias: far down", x=-64.0),
                    Step(row="bias: minus the maximum"),
                    Step(row="bias: far down", x=-64.0),
                ),
            )
        ),
    ),
    *(
        (
            f"-1e9 filled in and a mask added after it, with scores beyond 32 ({targets})",
            Case(
                Program(
                    lead=(2, 2),
                    kv_len=4,
                    query=(Step(row="flipped"),),
                    key=(Step(row="div", x=0.125),),
                    score=(
                        Step(row="mask: masked_fill", fill=-1e9, mask=Mask(name="causal, moved")),
                        Step(row="mask: input of fills"),
                    ),
                ),
                targets=targets,
            ),
        )
        for targets in (None, ("flex",), ("cpu_kernel",))
    ),
    (
        "what is added to part of float64 scores, times a number that float32 rounds",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                value_dim=2,
                dtype=torch.float64,
                score=(Step(row="mask: part added to", x=0.5), Step(row="scale: mul", x=0.3)),
            )
        ),
    ),
    (
        "two numbers far below the scores are rounded as one sum",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                dim=2,
                score=(Step(row="bias: far down", x=-512.0), Step(row="bias: far down", x=512.0)),
            )
        ),
    ),
    (
        "causal by -inf, then turned, in training: the gradient of a replaced score is 0 in a row that is NaN",
        Case(
            Program(
                lead=(2, 2),
                kv_len=4,
                score=(Step(row="mask: masked_fill", mask=Mask()), Step(row="scale: mul", x=-0.5)),
            ),
            grad=True,
            targets=("cpu_kernel",),
        ),
    ),
    (
        "weights that are returned, in training: eager rounds the sum of their gradients, and here each is rounded",
        Case(
            Program(
                lead=(2, 2),
                q_len=1,
                dim=3,
                dtype=torch.float16,
                one_kv=(False, True, False, False),
                layouts=("as is", "stacked", "as is"),
                score=(Step(row="mask: triu of the scores' shape"),),
                softmax=Step(row="times the inverse sum"),
                returns="softmax",
            ),
            grad=True,
            targets=("cpu_kernel",),
        ),
    ),
    (
        "dropout of one kept key: the kernel is given that key alone",
        Case(
            Program(
                lead=(2, 2), q_len=1, score=(Step(row="mask: triu of the scores' shape"),), after=(Step(row="dropout"),)
            ),
            grad=True,
            targets=("cpu_kernel",),
        ),
    ),
    (
        "a length of 0 as a number that is added, in training: scores that are not replaced have gradients",
        Case(
            Program(
                lead=(2, 2), kv_len=4, score=(Step(row="mask: add where", fill=_LOWEST, mask=Mask("nothing valid")),)
            ),
            grad=True,
            targets=("cpu_kernel",),
        ),
    ),
    (
        "an infinite score less its logarithm of the sum is no number at that key alone",
        Case(
            Program(
                lead=(2, 2),
                dim=2,
                value_dim=2,
                dtype=torch.bfloat16,
                key=(Step(row="last is no number"),),
                score=(Step(row="scale: mul", x=0.3),),
                softmax=Step(row="minus logsumexp"),
            ),
            grad=True,
            targets=("cpu_kernel",),
        ),
    ),
)
