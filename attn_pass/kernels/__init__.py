"""Kernels of our own, as operators that trace, export and compile into packages."""
