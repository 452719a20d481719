"""What is measured: a module or a folder a suite, each a command of `python -m bench`."""
