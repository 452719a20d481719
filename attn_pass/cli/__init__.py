"""The command line, `attn-pass`."""
