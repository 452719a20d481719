"""Measurements of attn_pass on real input: `python -m bench NAME`, on a GPU `python -m bench.gpu`."""
