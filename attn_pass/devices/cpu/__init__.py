"""CPUs: their rates, the rules of torch's fused kernel, and this package's own attention kernel."""
