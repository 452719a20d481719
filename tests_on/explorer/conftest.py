"""Needs Model Explorer, which brings a server and a web page: `make test-explorer`, in an environment of its own."""

from __future__ import annotations

import pytest

pytest.importorskip("model_explorer", reason="Model Explorer is not installed: make test-explorer")
