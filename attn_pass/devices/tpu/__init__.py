"""Attention on TPUs: JAX's Pallas kernels, for torch_xla and torch_tpu. No code here imports either of them, or JAX."""
