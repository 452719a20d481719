"""`python -m bench padding`: batches, and packing by hand against the padded models."""

from __future__ import annotations

import pytest
import torch

from bench.harness.programs import Setting
from bench.suites import padding

SMALL = Setting(quick=True)


@pytest.mark.parametrize("name", padding.MODELS)
def test_packing_by_hand_is_the_model(name: str) -> None:
    with torch.no_grad():
        model, inputs = padding.built(name, "uniform", torch.float32, SMALL, "cpu")
        by_hand = padding.packed(name, "uniform", torch.float32, SMALL, "cpu")
        torch.testing.assert_close(by_hand(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


def test_lengths() -> None:
    assert padding.uniform(16, 512)[[0, -1]].tolist() == [16, 512]
    assert padding.long_tailed(16, 512)[[0, -1]].tolist() == [16, 512]
    shares = [padding.share_of_padding("BERT base, pooled", lengths) for lengths in padding.LENGTHS]
    assert [round(share, 2) for share in shares] == [0.48, 0.7, 0.0]


def test_a_batch_ends_every_sequence_and_pads_the_rest() -> None:
    ids, mask = padding.batch_of(torch.tensor([2, 5, 3]), 5, 100)
    assert sorted(mask.sum(1).tolist()) == [2, 3, 5]
    assert (ids[~mask.bool()] == padding.PAD).all()
    assert (ids[torch.arange(3), mask.sum(1) - 1] == 99).all()


def test_every_program_has_a_name_of_its_own() -> None:
    names = [p.name for p in padding.programs(Setting(layers=1))]
    assert len(set(names)) == len(names) == 2 * (len(padding.MODELS) + 2)
