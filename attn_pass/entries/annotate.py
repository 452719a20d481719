"""Annotations with which a program controls the rewriting of its own attention."""

from __future__ import annotations

from contextlib import AbstractContextManager

from attn_pass.options import ANNOTATION, LEAVE


def leave() -> AbstractContextManager[None]:
    """Inside, in a model's own code, attention stays as it is written: ``with attn_pass.leave(): ...``.

    An annotation of torch's (`torch.fx.traceback.annotate`), which graphs of Dynamo and of export carry; it does
    nothing where nothing is traced. ``annotate({"attn_pass": ("flex", "sdpa")})`` says the other thing a rule of
    `attn_pass.Options` can say: the first of these targets that accepts. An annotation counts before any rule.
    """
    from torch.fx.traceback import annotate

    return annotate({ANNOTATION: LEAVE})
