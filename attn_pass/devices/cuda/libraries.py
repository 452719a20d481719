"""Kernels of packages that a program calls itself, by the name reports have for them."""

from __future__ import annotations

LIBRARY = "flash_attn"
LIBRARY_3 = "flash_attn_3"
"""FlashAttention-3's own package."""
