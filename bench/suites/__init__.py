"""The suites: one module or folder per suite, each a command of `python -m bench`."""
