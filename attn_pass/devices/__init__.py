"""Devices: what they can do in plain numbers, and one room for each family with everything that is asked of it."""
