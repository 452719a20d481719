"""The exception for a site that cannot be read: the reason in words, and the node at which it was found."""

from __future__ import annotations

from torch.fx import Node


class Unreadable(Exception):
    """What did not fit, in words, and the node it was found at."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
