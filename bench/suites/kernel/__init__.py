"""The CPU kernel of this package, as an operator: shares of what the machine can do, and peers beside it."""
