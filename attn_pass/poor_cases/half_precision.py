"""Half precision on a CPU on which torch's fused kernel is slow in it.

Poor: query, key and value are bfloat16 or float16, and torch's fused kernel runs at less than four fifths of the rate
that the processor has for products: in bfloat16 without tile instructions (AMX), where torch multiplies unpacked
matrices, and in float16 without instructions for its products.

Costs: up to two thirds of the machine's throughput, although the operands have half the bytes of float32.

Becomes: the same attention, by a kernel that widens keys and values to float32 while it packs them, or that multiplies
pairs of bfloat16 where the processor does. There is no variant of the description: the targets with such a kernel name
this case in their offers, and the report shows it.

Exact because: every bfloat16 and float16 number is a float32 number. Weights are rounded to pairs only where torch's
kernel rounds them as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from attn_pass.model.attention import Attention

NAME = "half_precision"


def variants(attention: Attention) -> Iterator[Attention]:
    """None: another kernel computes the same description."""
    yield from ()
