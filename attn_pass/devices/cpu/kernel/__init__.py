"""Attention on CPUs: `attn_pass::attention`, its C++ kernel for several instruction sets, and its delivery."""
