"""Finders of attention: each yields sites, read or refused with a reason."""
