"""Attention on TPUs: JAX's Pallas kernels, for torch_xla and torch_tpu. Nothing of either, or of JAX, is imported."""

from attn_pass.targets.xla.target import PallasFlash, PallasSplash

__all__ = ["PallasFlash", "PallasSplash"]
