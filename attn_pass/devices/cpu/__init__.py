"""CPUs: their rates, the rules of torch's fused kernel there, and an attention kernel of our own."""
