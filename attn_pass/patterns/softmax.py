"""Attention written by hand: a softmax whose result reaches one side of a product."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from attn_pass.graph.names import operation_name
from attn_pass.patterns.after_product import (
    Ending,
    at_product,
    endings,
    exponentials,
    late_softmax,
)
from attn_pass.patterns.also_used import with_what_else_is_needed
from attn_pass.patterns.base import Site, UsedElsewhere, check_uses, check_window, failed, refused
from attn_pass.patterns.lifted_softmax import Candidate, lift
from attn_pass.patterns.separated_weights import with_others_of_sums
from attn_pass.patterns.shape_uses import remaining_shape_uses, with_shape_uses
from attn_pass.patterns.shared_scores import with_partners
from attn_pass.patterns.softmax_forms import Softmax, read_softmax
from attn_pass.reading.describe import describe
from attn_pass.reading.pointwise import POINTWISE
from attn_pass.reading.products import Product
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.views import VIEWS

FORM = "eager"


def find(reader: Reader) -> Iterator[Site]:
    """Every product with weights on one side, and every softmax of a product that reaches none."""
    sites = with_others_of_sums(reader, with_partners(reader, list(_find(reader))))
    yield from with_what_else_is_needed(reader, sites)


def _find(reader: Reader) -> Iterator[Site]:
    reached: set[Node] = set()
    for node in reader.graph.nodes:
        product = reader.product(node)
        if product is None:
            continue
        for weights in (product.left, product.right):
            for softmax in reader.softmaxes.get(weights, ()):
                if not _reads_product(reader, softmax):
                    continue
                reached.add(softmax)
                yield _read(reader, product, weights, softmax)
                break
            else:
                late = _read_late(reader, product, weights)
                if late is None:
                    continue
                yield late
            break
    used = {
        s
        for n in reader.products
        if reader.products[n] == {n}
        for i in n.all_input_nodes
        for s in reader.softmaxes.get(i, ())
    }
    for node, of_node in list(reader.softmaxes.items()):
        if of_node != {node} or node in reached:
            continue
        if _reads_product(reader, node):
            yield _near_miss(reader, node)
        elif node in used:
            hidden = _hidden_product(reader, node)
            if hidden is not None:
                yield refused(node, FORM, reader.regions.of(node), hidden)


def _reads_product(reader: Reader, softmax: Node) -> bool:
    read = read_softmax(reader, softmax)
    return read is not None and bool(reader.products.get(read.input))


def _hidden_product(reader: Reader, softmax: Node, steps: int = 16) -> Unreadable | None:
    """The operation between a softmax and the product it depends on, if the reading cannot pass it."""
    read = read_softmax(reader, softmax)
    waiting: list[tuple[Node, Node | None]] = [] if read is None else [(read.input, None)]
    seen: set[Node] = set()
    while waiting and len(seen) < steps:
        node, stranger = waiting.pop(0)
        seen.add(node)
        call = reader.call(node)
        if node in reader.products:
            if stranger is None:
                return None
            name = getattr(stranger.target, "__name__", str(stranger.target))
            return Unreadable(f"{name} stands between the scores and the softmax", stranger)
        known = call is not None and (call.op in POINTWISE or call.op in VIEWS)
        first = stranger or (None if known else node)
        waiting += [
            (i, first) for i in node.all_input_nodes if i not in seen and i.op in ("call_function", "call_method")
        ]
    return None


def _near_miss(reader: Reader, softmax: Node) -> Site:
    region = reader.regions.of(softmax)
    users = [u for u in softmax.users]
    after = next((u for u in users if u.op != "output"), None)
    reason = "the softmax of a product reaches no product"
    if after is None and users:
        reason = "the softmax of a product is returned by the model"
    elif after is not None:
        reason += f"; {operation_name(after)} comes next"
    return refused(softmax, FORM, region, Unreadable(reason, after or softmax))


def _read(reader: Reader, product: Product, weights: Node, softmax: Node) -> Site:
    read = read_softmax(reader, softmax)
    assert read is not None
    site = _read_to(reader, product, weights, softmax, read, at_product(reader, product.node))
    if site.unshared is not None:
        for ending in endings(reader, product.node):
            further = _read_to(reader, product, weights, softmax, read, ending)
            if further.described is not None and not further.refusal:
                return further
    return site


def _read_late(reader: Reader, product: Product, weights: Node) -> Site | None:
    """The site whose exponentials are divided by their sum after the product with the values; None if they are not."""
    exp = exponentials(reader, weights)
    for ending in endings(reader, product.node) if exp is not None else ():
        assert exp is not None
        read = late_softmax(reader, ending, product, weights, exp)
        if read is not None and reader.products.get(read.input):
            return _read_to(reader, product, weights, exp, read, ending, late=True)
    return None


def _read_to(
    reader: Reader, product: Product, weights: Node, softmax: Node, read: Softmax, ending: Ending, *, late: bool = False
) -> Site:
    """The site that ends there."""
    node, region = ending.node, reader.regions.of(product.node)
    site = Site(node, FORM, region, written_to=reader.written_by(node))
    best: Unreadable | None = None
    if region.functorch:
        return refused(node, FORM, region, Unreadable(f"it runs under {region.describe()}", product.node))
    for candidate in sorted(reader.products[read.input], key=lambda n: reader.order[n]):
        try:
            with reader.site() as used:
                lifted = Candidate(reader, product, weights, softmax, read, candidate, ending, late)
                parts, internal = lift(lifted)
                site.described = describe(parts, used)
            site.softmax_of = (read.input, read.dim)
            site.internal = with_shape_uses(reader, internal, site.described.nodes, node)
            site.shape_uses = remaining_shape_uses(reader, site.internal, node)
            check_uses(reader, site.internal, node, site.shape_uses)
            check_window(reader, site.described, node)
            return site
        except Unreadable as error:
            best = best or error
        except Exception as error:
            return failed(node, FORM, region, error)
    assert best is not None
    return Site(
        node,
        FORM,
        region,
        refusal=best.reason,
        refused_at=best.node,
        kind="attention" if site.described is not None else "near miss",
        unshared=site if isinstance(best, UsedElsewhere) else None,
    )
