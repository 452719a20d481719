"""Measuring what this machine's kernels reach, without Inductor: the sweeps behind ``attn-pass calibrate``."""
