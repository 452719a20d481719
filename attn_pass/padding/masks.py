"""Which keys the attentions of a graph keep: the padding mask that several of them share, and who else looks at it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, Literal

from torch.fx import Graph, Node

from attn_pass.graph.values import Sizes, tensor_value
from attn_pass.padding.added import (
    added_mask,
    ancestors,
    behind_views,
    has_gradients,
    is_called_whole,
    is_trained,
    range_of_numbers,
)
from attn_pass.padding.cross import Origins
from attn_pass.padding.layouts import Rows
from attn_pass.targets.given_masks import BELOW_ALL

ADDED_IN_TRAINING = (
    "terms added to its scores may mask keys, and in training it is not known which"
    " (assume_nonempty_rows=True, if no row is fully masked)"
)
OTHER_ROWS = "its queries and keys come from different rows"
NO_PADDING = "its mask is the same for all sequences"  # a triangle in a buffer: nothing to tell of
PER_BATCH = ("starts", "ends")
Places = Literal["any", "between", "before"]
"""Which rows a sequence has beside those that are needed, so that these stay where the mask counts them from.

None; those between the first and the last, so that distances stay; those before the last, so that positions stay.
"""
_PLACES: tuple[Places, ...] = ("any", "between", "before")
_BY_POSITION = ("prefix", "chunk", "chunk_rows", "chunk_keys")
_COUNTED = ("before", "after", "start", "end", *_BY_POSITION, "shift")
_KNOWN = (
    *_COUNTED,
    "offsets",
    "keep",
    *PER_BATCH,
    "bias",
    "distances",
    "sink",
    "captured",
    "tables",
    "places",
    "factors",
    "score",
    "fully_masked",
    "heads_first",
    "seed",
    "dropout",
)


@dataclass(frozen=True)
class PaddingMask:
    """The keys that are kept of each sequence: where ``keep``, from ``starts`` on and before ``ends``.

    ``keep`` is (B, 1, 1, S), or (B, 1, S, S) where it differs from row to row, as a product of the mask with itself
    does (DeBERTa): then a key is kept that some row keeps. In training it may be ``added``, numbers in its place of
    which some absorb a score, or truth values that say where.
    """

    keep: Node | None = None
    starts: Node | None = None
    ends: Node | None = None
    added: Node | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The tensors that say it."""
        return tuple(n for n in (self.keep, self.starts, self.ends, self.added) if n is not None)

    @property
    def is_of_pairs(self) -> bool:
        """Whether rows of a sequence keep different keys."""
        return _is_of_pairs(self.keep) or _is_of_pairs(self.added)


def _is_of_pairs(keep: Node | None) -> bool:
    value = tensor_value(keep)
    return value is not None and not (isinstance(value.shape[2], int) and value.shape[2] == 1)


@dataclass
class Group:
    """The attentions over the rows of the same sequences that keep the same keys."""

    mask: PaddingMask
    rows: Rows
    sites: list[Node] = field(default_factory=list)


def groups(graph: Graph, operators: Collection[Any], sizes: Sizes) -> tuple[list[Group], dict[Node, str]]:
    """The attentions that can run on packed rows, by mask; and why the others with a mask cannot."""
    by_key: dict[Any, Group] = {}
    refused: dict[Node, str] = {}
    origins: Origins | None = None  # of the whole graph, which most masks do not ask for
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in operators:
            continue
        mask = mask_of(node)
        if not mask.nodes:
            if _adds_mask(node, sizes):
                refused[node] = ADDED_IN_TRAINING
            continue
        origins = origins or Origins(graph, operators)
        reason = OTHER_ROWS if origins.reads_others(node) else _refusal(node, mask, sizes)
        if reason:
            refused[node] = reason
            continue
        query = tensor_value(node.args[0])
        assert query is not None
        shape = sizes.shape(query)
        rows = Rows(shape[0], shape[2])
        by_key.setdefault((mask, rows), Group(mask, rows)).sites.append(node)
    return list(by_key.values()), refused


def _adds_mask(node: Node, sizes: Sizes) -> bool:
    """Whether a call with gradients adds something that differs from sequence to sequence and has no gradient."""
    bias, query = node.kwargs.get("bias"), tensor_value(node.args[0])
    added = tensor_value(bias)
    if not isinstance(bias, Node) or query is None or added is None or tensor_value(node) is not None:
        return False
    return sizes.shape(added)[:1] == sizes.shape(query)[:1] and not is_trained(bias)


def mask_of(node: Node) -> PaddingMask:
    """The mask of a call of the kernel."""
    by_name, added = {name: _node(node.kwargs.get(name)) for name in ("keep", *PER_BATCH)}, added_mask(node)
    if added is by_name["keep"]:
        by_name["keep"] = None
    return PaddingMask(**by_name, added=added)


def hides_padding(site: Node) -> bool:
    """Whether a call reads no key that its mask does not keep: one that gives masked scores a number may."""
    known = _KNOWN if added_mask(site) is None else (*_KNOWN, "fill", "fill_is_added")
    return all(value is None for name, value in site.kwargs.items() if name not in known)


def averages(sites: Iterable[Node]) -> bool:
    """Whether a row may average all values although its sequence has keys that are kept, which it does not keep."""
    return any(_has_a_mean(site) and _differs_by_row(site) for site in sites)


def _has_a_mean(site: Node) -> bool:
    """Whether a fully masked row is the mean of all values: by the kernel, or by a sum that absorbed its scores."""
    return site.kwargs.get("fully_masked") == "mean" or mask_of(site).added is not None


def _differs_by_row(site: Node) -> bool:
    return counts_positions(site) or mask_of(site).is_of_pairs


def counts_positions(site: Node) -> bool:
    """Whether a call keeps some keys by their positions, beside what its mask keeps."""
    return any(site.kwargs.get(name) is not None for name in _COUNTED)


def places(sites: Iterable[Node]) -> Places:
    """The most that one of the attentions needs."""
    needed = (_places(site.kwargs) for site in sites if not is_called_whole(site))
    return max(needed, key=_PLACES.index, default="any")


def _places(kwargs: Mapping[str, Any]) -> Places:
    by_position = any(kwargs.get(name) is not None for name in (*_BY_POSITION, "bias", "places"))
    if by_position or _is_of_pairs(_node(kwargs.get("keep"))):
        return "before"
    by_distance = kwargs.get("before") is not None or kwargs.get("distances") is not None
    return "between" if by_distance or kwargs.get("after") not in (None, 0) else "any"


def _node(value: Any) -> Node | None:
    return value if isinstance(value, Node) else None


def _refusal(node: Node, mask: PaddingMask, sizes: Sizes) -> str:
    query, key = (tensor_value(n) for n in node.args[:2])
    if query is None or key is None:
        return "its operands have no fake values"
    rows, keys = sizes.shape(query), sizes.shape(key)
    if rows[2] != keys[2]:
        return OTHER_ROWS
    mask_tensor = mask.keep if mask.added is None else mask.added
    if (value := tensor_value(mask_tensor)) is not None and (reason := _refusal_of_keep(sizes.shape(value), keys[2])):
        return reason
    if reason := _refusal_of_numbers(node, mask):
        return reason
    masks = [value for n in mask.nodes if (value := tensor_value(n)) is not None]
    if rows[0] != 1 and rows[1] == 1 and all(sizes.shape(value)[0] == 1 for value in masks):
        return "the batch dimension of its call holds heads, as for a single sentence"
    return _refusal_of_arguments(node, sizes)


def _refusal_of_keep(shape: tuple[Any, ...], keys: Any) -> str:
    if len(shape) != 4 or shape[1] != 1 or shape[3] != keys or shape[2] not in (1, keys):
        return "its mask differs from head to head, or is one of some queries"
    return NO_PADDING if shape[2] != 1 and shape[0] == 1 else ""


def _refusal_of_numbers(node: Node, mask: PaddingMask) -> str:
    """Why a mask that is added, and compared when the program runs, rules out no key: its numbers are too weak."""
    bias, keep = node.kwargs.get("bias"), mask.keep
    if not isinstance(bias, Node) or keep is None or behind_views(bias) not in ancestors((keep,)):
        return ""
    numbers = range_of_numbers(bias)
    if numbers is None or not (most := numbers[1] - numbers[0]) < BELOW_ALL:
        return ""
    return (
        f"the mask that is added to its scores lowers them by {most:g} at the most, which leaves masked keys a weight,"
        " however small; torch.finfo(dtype).min leaves them none"
    )


def _refusal_of_arguments(node: Node, sizes: Sizes) -> str:
    """Why a call cannot run on packed rows.

    Causal it may be, since packing keeps the order. A window asks for all rows between two that are needed; a bias by
    positions, a prefix and chunks for all before one: the kernel counts positions from the first row of a segment.
    """
    kwargs: Mapping[str, Any] = node.kwargs
    if kwargs.get("fill_is_added") and mask_of(node).added is None:
        return "what is added to its scores differs from sequence to sequence"
    if not hides_padding(node):
        return "its masked keys still get weight"
    if any(kwargs.get(name) is not None for name in ("shift", "start", "end", "offsets")):
        return "its mask does not count positions from the start of a sequence"
    distances = ("before", "after", *_BY_POSITION)
    in_itself = kwargs.get("chunk_rows") == kwargs.get("chunk_keys")
    if not in_itself or any(kwargs.get(name) is not None and not _reaches_itself(kwargs[name]) for name in distances):
        return "its window does not contain the row itself, or is known only at run time"
    if any(_varies(n, (0, 2, 3), sizes) for n in kwargs.get("captured") or ()):
        return "its scores depend on positions"
    if has_gradients(node) and any(user.target is not getitem or user.args[1] != 0 for user in node.users):
        return "its log-sum-exp is used as well"
    return "its sink differs from row to row" if _varies(kwargs.get("sink"), (0, 2), sizes) else ""


def _reaches_itself(distance: Any) -> bool:
    return type(distance) is int and distance >= 0


def _varies(value: Any, dims: Iterable[int], sizes: Sizes) -> bool:
    tensor = tensor_value(value)
    if tensor is None:
        return False
    shape = (*(1,) * (4 - tensor.dim()), *sizes.shape(tensor))
    return any(shape[d] != 1 for d in dims)
