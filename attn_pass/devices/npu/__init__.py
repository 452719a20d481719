"""Ascend NPUs: torch_npu's operators, their constraints, and a program's own calls of them."""
