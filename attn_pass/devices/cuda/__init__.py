"""NVIDIA's GPUs: torch's kernels and their rules, flash-attn's packages, the split-KV kernel, and their costs."""
