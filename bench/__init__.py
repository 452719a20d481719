"""Measurements of attn_pass on real input; each module is a command (`python -m bench.demo`, `python -m bench.s4`)."""
