"""Devices: their rates in plain numbers, and one package for each device family with all that is specific to it."""
