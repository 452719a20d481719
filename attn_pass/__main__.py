"""``python -m attn_pass``: the command line, where its script is not on the path."""

from __future__ import annotations

from attn_pass.cli.main import main

if __name__ == "__main__":
    main()
