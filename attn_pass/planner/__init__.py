"""Which offer is taken."""
