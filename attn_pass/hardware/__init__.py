"""What devices can do, in plain numbers."""
