"""FlexAttention: its rules by device, its score and mask functions, its block lists, and both as graphs."""
