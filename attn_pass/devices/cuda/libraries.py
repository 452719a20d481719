"""Kernels of packages that a program calls directly, and the names that reports use for them."""

from __future__ import annotations

LIBRARY = "flash_attn"
LIBRARY_3 = "flash_attn_3"
"""FlashAttention-3's own package."""
