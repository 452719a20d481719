"""Which of torch's CUDA kernels takes a call: one row a rule, with its reason and where it is from."""
