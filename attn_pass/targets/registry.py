"""All targets: those of the families, those for any device, and those of installed packages."""

from __future__ import annotations

from functools import lru_cache

from attn_pass.devices.registry import families, installed_in
from attn_pass.targets.base import Target
from attn_pass.targets.decomposed import Decomposed
from attn_pass.targets.flex.flex import Flex
from attn_pass.targets.local import Local
from attn_pass.targets.recompute import Recompute
from attn_pass.targets.sdpa import Sdpa
from attn_pass.targets.single_key import SingleKey

GROUP = "attn_pass.targets"
"""The entry-point group third parties register targets in."""


@lru_cache(maxsize=1)
def _registered() -> tuple[Target, ...]:
    return tuple(installed_in(GROUP))


def built_in() -> tuple[Target, ...]:
    """The targets of the families, then those for several; of equally cheap offers the first is taken."""
    own = (target for family in families() for target in family.targets())
    return (*own, Sdpa(), SingleKey(), Local(), Recompute(), Decomposed(), Flex())


def all_targets() -> tuple[Target, ...]:
    """Every target: the built-in ones, then those of installed packages."""
    return (*built_in(), *_registered())
