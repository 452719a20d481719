"""Imports timm where torchvision is not installed: timm takes data sets and transforms from it, no models."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import MagicMock

_TAKEN = (
    *("torchvision", "torchvision.datasets", "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms"),
    *("torchvision.transforms.functional", "torchvision.models", "torchvision.models.feature_extraction"),
)


def import_timm() -> ModuleType:
    """timm; stand-ins take torchvision's place while it is imported, and only if torchvision is missing."""
    missing = "timm" not in sys.modules and find_spec("torchvision") is None
    stand_ins = {name: MagicMock() for name in _TAKEN} if missing else {}
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module("timm")
    finally:
        for name in stand_ins:
            del sys.modules[name]
