"""Attention on CPUs: `attn_pass::attention`, its C++ source (`*.hpp`), and its delivery.

`many.hpp` and `few.hpp` are the kernels for many and for few query rows, of `columns.hpp` (types and the micro-kernel),
`packing.hpp`, `kept.hpp` (which keys count for a row) and `tiles.hpp` (what becomes of scores); `backward.hpp` is the
kernel of the gradients, `amx.hpp` multiplies in AMX's tiles, and `isa_*.hpp` are the instruction sets.
"""
