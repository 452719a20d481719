"""`Opaque`: a call that hides attention in one node, with its parts in front of it while it is expanded on trial."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from attn_pass.graph.expand import Expansion
from attn_pass.graph.regions import Region
from attn_pass.model.attention import AsWritten

WEIGHTS_ARE_USED = "the attention weights are requested"


@dataclass(frozen=True, eq=False)
class Opaque:
    """One such call: its expansion, or why there is none."""

    call: Node
    form: str
    region: Region
    expansion: Expansion | None
    refusal: str = ""
    error: Exception | None = None
    also: str = WEIGHTS_ARE_USED  # what it means that its second result is used
    written: AsWritten | None = None  # what the call runs if nothing is done; None where that is what is in it
    assumes: tuple[str, ...] = ()  # what its expansion rests on
    fixed: tuple[str, ...] = ()  # tensors whose values it rests on, by name

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those of the expansion."""
        return () if self.expansion is None else self.expansion.nodes

    def take_back(self) -> None:
        """Leaves the graph as it was before."""
        if self.expansion is not None:
            self.expansion.take_back()

    @property
    def result(self) -> Node:
        """The node that takes the attention's result; the call itself if no node does, or if it has only one."""
        results = () if self.expansion is None else self.expansion.results
        return next((old for old, _ in results if old is self.call or old.args[1] == 0), self.call)

    def stands_for(self, node: Node) -> Node | None:
        """The node of the program whose value a node of the expansion has; None where it is one on the way."""
        results = () if self.expansion is None else self.expansion.results
        return next((old for old, new in results if new is node), None)

    @property
    def is_used_otherwise(self) -> bool:
        """Whether its second result is used: the attention weights, or their log-sum-exp."""
        results = () if self.expansion is None else self.expansion.results
        return any(old is not self.call and old.args[1] == 1 for old, _ in results)
