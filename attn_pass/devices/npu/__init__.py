"""Ascend NPUs: torch_npu's operators, what they ask for, the calls a program makes of them itself."""
