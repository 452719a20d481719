"""Which of torch's CUDA kernels takes a call: one rule per row, with its reason and its source."""
