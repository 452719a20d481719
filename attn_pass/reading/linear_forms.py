"""An element as a sum of products with elements of one tensor: what rotations and norms are read from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attn_pass.model.expression import Apply, Const, Expr, Load, loads
from attn_pass.reading.unreadable import Unreadable


@dataclass(frozen=True)
class Product:
    """A number times factors."""

    number: float
    factors: tuple[Expr, ...] = ()

    def times(self, other: Product) -> Product:
        """Both together."""
        return Product(self.number * other.number, self.factors + other.factors)

    def expression(self) -> Expr:
        """The product as one expression."""
        result: Expr = Const(self.number)
        for factor in self.factors:
            result = Apply("mul", (result, factor))
        return result


LinearForm = Mapping[Load, Product]
_ONE = Product(1.0)


def product_of(expression: Expr) -> Product:
    """An expression as a number times factors."""
    if isinstance(expression, Const):
        return Product(float(expression.value))
    if isinstance(expression, Apply):
        if expression.op == "neg":
            return Product(-1.0).times(product_of(expression.args[0]))
        if expression.op == "mul":
            return product_of(expression.args[0]).times(product_of(expression.args[1]))
        if expression.op == "div":
            return product_of(expression.args[0]).times(_inverse(product_of(expression.args[1])))
    return Product(1.0, (expression,))


def _inverse(product: Product) -> Product:
    if product.number == 0:
        raise Unreadable("it is divided by 0")
    return Product(1 / product.number, tuple(Apply("reciprocal", (f,)) for f in product.factors))


def linear_form(expression: Expr, of: int) -> LinearForm:
    """The products with elements of source ``of`` that the expression is the sum of.

    Raises `Unreadable` if it is anything else, or if something is added to them.
    """
    form = _form(expression, of)
    if form is None:
        raise Unreadable("a part of it is not made of the same tensor")
    return {load: product for load, product in form.items() if product.number != 0}


def _form(expression: Expr, of: int) -> dict[Load, Product] | None:
    """The form, or None for what is made of other tensors alone."""
    if isinstance(expression, Load):
        return {expression: _ONE} if expression.source == of else None
    if not isinstance(expression, Apply):
        return None
    forms = [_form(a, of) for a in expression.args]
    if all(f is None for f in forms):
        return None
    if expression.op == "add":
        return _sum(expression, forms)
    if expression.op == "neg":
        return _scaled(forms[0] or {}, Product(-1.0))
    if expression.op == "mul" and None in forms:
        number = forms.index(None)
        return _scaled(forms[1 - number] or {}, product_of(expression.args[number]))
    if expression.op == "div" and forms[1] is None:
        return _scaled(forms[0] or {}, _inverse(product_of(expression.args[1])))
    raise Unreadable("it is no sum of products with tables")


def _sum(expression: Apply, forms: Iterable[dict[Load, Product] | None]) -> dict[Load, Product]:
    total: dict[Load, Product] = {}
    for argument, form in zip(expression.args, forms):
        if form is None:
            if product_of(argument).number == 0:
                continue
            raise Unreadable("something is added to it")
        for load, product in form.items():
            total[load] = _together(total[load], product) if load in total else product
    return total


def _together(a: Product, b: Product) -> Product:
    if a.number == 0 or b.number == 0:
        return b if a.number == 0 else a
    if a.factors == b.factors:
        return Product(a.number + b.number, a.factors)
    return Product(1.0, (Apply("add", (a.expression(), b.expression())),))


def _scaled(form: dict[Load, Product], by: Product) -> dict[Load, Product]:
    return {load: by.times(product) for load, product in form.items()}


def sources(expression: Expr) -> set[int]:
    """The numbers of all that the expression loads."""
    return {load.source for load in loads(expression)}
