"""All GPU measurements in one run of under eight minutes: ``python -m bench.gpu`` (docs/benchmarks.md)."""
