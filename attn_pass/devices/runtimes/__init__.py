"""Runtimes that a program is exported to, each a family without a device: what its attention operator takes, and costs.

`Options.runtime` names one; the rewritten program is torch's, and the runtime's own exporter translates it.
"""
