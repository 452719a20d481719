"""Attention on CPUs: `attn_pass::attention`, its C++ source (`*.hpp`), and its delivery.

`many.hpp` and `few.hpp` are the kernels for many and for few query rows, `tiles.hpp` that with AMX, `backward.hpp` the
gradients, and `isa_*.hpp` the instruction sets.
"""
