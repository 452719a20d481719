"""Measures and checks a user's own model: `benchmark` and `check`, with the interleaved timing that the benches use."""
