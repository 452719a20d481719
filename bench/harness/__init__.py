"""The harness of all benchmarks: programs, variants, fresh processes, timing, bounds, documents, baselines, plots."""
