"""Attention on TPUs: JAX's Pallas kernels, for torch_xla and torch_tpu. Nothing of either, or of JAX, is imported."""
