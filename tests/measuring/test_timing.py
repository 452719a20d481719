"""Samples in turns: what runs before what."""

from functools import partial

from attn_pass.measuring.timing import interleaved


def test_nothing_always_follows_the_same():
    ran: list[str] = []
    names = ["eager", "stock", "stock again", "pass"]
    samples = interleaved({name: partial(_sample, ran, name) for name in names}, 12)
    assert all(len(taken) == 12 for taken in samples.values())
    rounds = [ran[start : start + 4] for start in range(0, len(ran), 4)]
    assert all(sorted(order) == sorted(names) for order in rounds)
    for name in names:
        assert len({order[order.index(name) - 1] for order in rounds if order[0] != name}) == 3
    again: list[str] = []
    interleaved({name: partial(_sample, again, name) for name in names}, 12)
    assert again == ran  # a run can be repeated


def test_what_raises_is_left_out_from_then_on():
    ran: list[str] = []
    failed: dict[str, str] = {}
    samples = interleaved({"good": partial(_sample, ran, "good"), "bad": _raising}, 3, failed)
    assert samples["bad"] == [] and len(samples["good"]) == 3
    assert failed == {"bad": "ValueError: no"}


def _sample(ran: list[str], name: str) -> float:
    ran.append(name)
    return 1.0


def _raising() -> float:
    raise ValueError("no")
