"""Sites with dropout: which of them a compiler that merges equal calls may merge.

AOTAutograd merges calls of one operator with equal arguments unless it knows that they draw random numbers, and it
knows that of torch's own alone (``rand_ops`` in torch/_functorch/compile_utils.py). Two sites that would draw
two masks then share one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Graph, Node

from attn_pass.graph.ancestry import Ancestry


@dataclass
class DropoutSites:
    """The sites with dropout of a root graph and its bodies, as far as they are one operator's calls."""

    root: Graph
    seen: list[tuple[Node, Ancestry]] = field(default_factory=list)

    def add(self, result: Node, made_of: Ancestry, was: Node | None = None) -> None:
        """A site whose result is drawn by such a call; ``was``: its result before it was rewritten."""
        self.seen = [entry for entry in self.seen if entry[0] is not was]
        self.seen.append((result, made_of))

    def has_like(self, result: Node, made_of: Ancestry) -> bool:
        """Whether one of them may have the same operands as a site, which neither depends on it nor the reverse."""
        return any(
            other is not result and other not in made_of.nodes and result not in its.nodes and made_of.may_equal(its)
            for other, its in self.seen
        )
