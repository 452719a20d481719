"""Programs that the generator found and that came out wrong once; a failure prints its own line for this table."""

from __future__ import annotations

from fuzz_strategy import Case

FOUND: tuple[tuple[str, Case], ...] = ()
