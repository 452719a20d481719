"""The predicted rows for NPUs: counts that can be checked by hand, and each marked as a prediction."""

from __future__ import annotations

import pytest

from bench.suites.seeds import npu_model


def test_every_row_says_that_it_is_predicted() -> None:
    tables = (npu_model.traffic, npu_model.speed_up, npu_model.tiles, npu_model.causal_masks)
    rows = [row for table in tables for row in table()]
    assert len(rows) > 15 and {row["source"] for row in rows} == {"predicted"}


def test_bytes_by_hand() -> None:
    (row,) = npu_model.traffic((1024,), heads=2, dim=64)
    operands = 4 * 2 * 1024 * 64 * 2
    assert row["fused MiB"] == operands / 2**20
    assert row["unfused MiB"] == (operands + 4 * 2 * 1024 * 1024 * 2) / 2**20


def test_the_speed_up_grows_with_the_length_and_is_the_ratio_of_its_parts() -> None:
    rows = list(npu_model.speed_up())
    assert all(r["speedup"] == pytest.approx(float(r["unfused us"]) / float(r["fused us"])) for r in rows)
    assert float(rows[-1]["speedup"]) > float(rows[0]["speedup"]) > 1


def test_tiles_of_512_do_not_fit_the_buffer() -> None:
    by_case = {r["case"].split(",")[0]: r for r in npu_model.tiles()}
    assert [r["buffer bytes"] for r in by_case.values()] == [40960, 81920, 163840, 327680]
    assert [r["fits"] for r in by_case.values()] == ["yes", "yes", "yes", "no"]
    assert by_case["tile 128"]["steps a head"] == 32 * 32
    assert npu_model.buffer_bytes(409, 64) <= npu_model.BUFFER_BYTES < npu_model.buffer_bytes(410, 64)


def test_a_shared_mask_does_not_grow() -> None:
    short, long = list(npu_model.causal_masks((2048, 8192), layers=4, heads=32))
    assert short["one for the graph MiB"] == long["one for the graph MiB"] == 4
    assert long["one a layer MiB"] == 16 and long["boolean, one a layer MiB"] == 4 * 64
    assert long["boolean, every head MiB"] == 32 * 4 * 64
