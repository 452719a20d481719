"""Regions of a graph that run without padding: rows nobody sees are taken out once, and put back where it ends."""
