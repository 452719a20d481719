"""Annotations with which a program controls the rewriting of its own attention."""

from __future__ import annotations

from contextlib import AbstractContextManager

from attn_pass.options import ANNOTATION, LEAVE


def leave() -> AbstractContextManager[None]:
    """Attention inside ``with attn_pass.leave(): ...``, in a model's own code, is left unchanged.

    This sets an annotation of torch's (`torch.fx.traceback.annotate`), which graphs of Dynamo and of torch.export
    carry; it has no effect in eager mode. ``annotate({"attn_pass": ("flex", "sdpa")})`` selects the first of these
    targets that accepts, like a rule of `attn_pass.Options`. An annotation takes precedence over every rule.
    """
    from torch.fx.traceback import annotate

    return annotate({ANNOTATION: LEAVE})
