"""`Mask`: everything between the scores and the softmax as one value: its expressions, and what is proven about them.

What is proved (`structure`, `fills`, `never_empty`) and what says the same once more (`by_distance`,
`bias_by_distance`, `computed`, `apart`) holds for the bias and the condition beside it alone, over the same axes. So
the parts come and go together: a form without a mask has `Mask.none()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from attn_pass.model.distance import ByDistance
from attn_pass.model.expression import Expr, expression_axes
from attn_pass.model.index import Axis
from attn_pass.model.structure import EVERYTHING, Structure

_NEG_INF = float("-inf")
ABSORBING = -1e17  # a number that is added and leaves nothing of a score, up to a billion, in float32


@dataclass(frozen=True)
class Keep:
    """Scores are kept where ``condition`` holds and are ``fill`` elsewhere.

    ``is_added``: the fill absorbs what it is added to, the score and a bias, which pass their gradients on.
    """

    condition: Expr
    fill: float
    is_added: bool = False


@dataclass(frozen=True)
class Computed:
    """Bias and keep-condition once more, down to indices and to what the program's tensors of them were made of."""

    bias: Expr | None
    condition: Expr | None


@dataclass(frozen=True)
class Apart:
    """A bias that is the sum of one and of a mask, each for itself."""

    bias: Expr
    keep: Keep


@dataclass(frozen=True)
class Mask:
    """``score + bias where keep, else fill``, and what is known of it.

    ``is_none`` is a mask that changes no score; `none` is one that is proved to mask no row fully.
    """

    bias: Expr | None = None
    keep: Keep | None = None
    fills: tuple[float, ...] | None = None  # proved: the bias is 0 where a key is kept, and one of these elsewhere
    structure: Structure = EVERYTHING  # what bias and keep-condition together keep
    never_empty: bool = False  # proved: every row keeps at least one key, whose score is a number
    by_distance: ByDistance | None = None  # the same, where it depends on ``key - row`` alone
    bias_by_distance: ByDistance | None = None  # the bias without a mask that is added to it, in the same way; it may
    # need a gradient
    computed: Computed | None = None  # the same, where it can be computed element by element, without a tensor of it
    apart: Apart | None = None  # bias and mask, where the bias is a sum of them; either may need a gradient
    bias_is_learned: bool = False  # the bias masks nothing: what is learned, products and slopes hold no number that
    # does, which is assumed

    @staticmethod
    def none() -> Mask:
        """No mask: every key is kept as it is."""
        return Mask(never_empty=True)

    @property
    def is_none(self) -> bool:
        """Whether nothing but a scale stands between the product and the softmax."""
        return self.bias is None and self.keep is None

    @property
    def condition(self) -> Expr | None:
        """The keep-condition; None where no score is replaced."""
        return None if self.keep is None else self.keep.condition

    @property
    def deep_bias(self) -> Expr | None:
        """The bias, computed from indices where it can be: not read from the tensor that holds it."""
        deeper = None if self.computed is None else self.computed.bias
        return self.bias if deeper is None else deeper

    @property
    def deep_condition(self) -> Expr | None:
        """The keep-condition, computed from indices where it can be: not read from the tensor that holds it."""
        deeper = None if self.computed is None else self.computed.condition
        return self.condition if deeper is None else deeper

    @property
    def replaces_with_number(self) -> bool:
        """Whether masked scores become a number, of which a fully masked row has a softmax."""
        return self.keep is not None and self.keep.fill != _NEG_INF

    @property
    def only_hides(self) -> bool:
        """Whether it adds nothing, and gives masked scores no number."""
        return self.bias is None and self.keep is not None and self.keep.fill == _NEG_INF

    def parts(self) -> list[Expr]:
        """What there is of bias and keep-condition."""
        return [e for e in (self.bias, self.condition) if e is not None]

    def axes(self) -> set[Axis]:
        """The axes that bias and keep-condition depend on."""
        return {axis for part in self.parts() for axis in expression_axes(part)}

    def rewritten(self, by: Callable[[Expr], Expr]) -> Mask:
        """The same with every expression it holds rewritten; what is proved of it goes on holding."""

        def both(of: Expr | None) -> Expr | None:
            return None if of is None else by(of)

        def placed(distance: ByDistance | None) -> ByDistance | None:
            if distance is None:
                return None
            return replace(distance, bias=both(distance.bias), condition=both(distance.condition))

        def held(keep: Keep) -> Keep:
            return replace(keep, condition=by(keep.condition))

        keep, computed, apart = self.keep, self.computed, self.apart
        return replace(
            self,
            bias=both(self.bias),
            keep=None if keep is None else held(keep),
            by_distance=placed(self.by_distance),
            bias_by_distance=placed(self.bias_by_distance),
            computed=None if computed is None else Computed(both(computed.bias), both(computed.condition)),
            apart=None if apart is None else Apart(by(apart.bias), held(apart.keep)),
        )

    def restated(self) -> Iterator[Expr]:
        """The expressions that say the mask once more: over distances, element by element, and each part for itself."""
        for again in (self.by_distance, self.bias_by_distance, self.computed):
            if again is not None:
                yield from (e for e in (again.bias, again.condition) if e is not None)
        if self.apart is not None:
            yield from (self.apart.bias, self.apart.keep.condition)

    def __str__(self) -> str:
        of_distance = self.by_distance is not None and not self.structure.is_exact
        return f"{self.structure}, by distance" if of_distance else str(self.structure)
