"""FlexAttention: its rules by device, its score and mask functions, its lists of blocks, and both as graphs."""
