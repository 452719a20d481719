"""Intel GPUs, which torch calls xpu: the kernel of oneDNN behind torch's own call."""
