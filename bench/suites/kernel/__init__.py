"""The CPU kernel of this package, as an operator: its share of the machine's rates, compared with peers."""
