"""Regions of a graph that run without padding: rows that no result needs are taken out, and put back at its end."""
