"""How benches measure: programs, the variants of each, fresh processes, timing, floors, documents, baselines, plots."""
