"""The choice among the offers."""
