"""Apple's GPUs, which torch calls mps: the Metal kernels behind torch's own call."""
