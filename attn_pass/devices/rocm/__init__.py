"""AMD's GPUs, which torch calls cuda as well: AOTriton's kernels behind torch's own call."""
