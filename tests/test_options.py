"""Options: names, values, environment defaults, and the split of torch.compile's options dict."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch

import attn_pass
from attn_pass.errors import AttnPassError, OptionError
from attn_pass.options import OPTION_NAMES, Options, make_options, split_options, tuned_by_mode


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHOOSE", "ON_ERROR", "VERIFY"):
        monkeypatch.delenv(f"ATTN_PASS_{name}", raising=False)


def test_defaults() -> None:
    assert dataclasses.asdict(make_options()) == {
        "choose": "cheapest",
        "numerics": "default",
        "targets": None,
        "rules": (),
        "poor_cases": None,
        "tune": False,
        "verify": "off",
        "on_error": "warn",
        "assume_constant_buffers": False,
        "assume_nonempty_rows": False,
        "assume_padding_unused": False,
        "unpad": True,
        "join_projections": "constants",
        "linear_layers": "best",
        "shield": True,
        "device": None,
        "runtime": None,
        "timeline": False,
    }


def test_lists_become_tuples_and_options_hash() -> None:
    made = make_options(targets=["flash", "sdpa"], poor_cases=[], choose="fused", device="cuda:0")
    assert made.targets == ("flash", "sdpa") and made.poor_cases == ()
    assert hash(made) == hash(make_options(targets=("flash", "sdpa"), poor_cases=(), choose="fused", device="cuda:0"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.choose = "cheapest"  # type: ignore[misc]


def test_every_field_is_documented() -> None:
    for name in OPTION_NAMES:
        assert f"\n        {name}: " in (Options.__doc__ or ""), name


def test_an_unknown_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(OptionError, match="unknown attn_pass option 'chose'; did you mean 'choose'") as caught:
        make_options(chose="fused")
    assert all(repr(name) in str(caught.value) for name in OPTION_NAMES)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, AttnPassError)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("choose", "fussed", "'fussed' .str.; did you mean 'fused'.; accepted: 'cheapest', 'fused'"),
        ("choose", None, "None .NoneType.; accepted: 'cheapest', 'fused'"),
        ("numerics", 3, "3 .int.; accepted: 'default', 'strict'"),
        ("targets", "sdpa", r"did you mean \('sdpa',\)"),
        ("targets", {"sdpa"}, "accepted: a list or tuple of names, or None"),
        ("targets", ["sdpa", 3], "accepted: a list or tuple of names, or None"),
        ("poor_cases", [""], "accepted: a list or tuple of names, or None"),
        ("shield", 1, "1 .int.; accepted: True or False"),
        ("device", 0, "accepted: a device"),
        ("device", " ", "accepted: a device"),
        ("on_error", "Raise", "did you mean 'raise'"),
    ],
)
def test_the_error_for_a_wrong_value_names_the_accepted_ones(name: str, value: object, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        make_options(**{name: value})
    assert f"option {name!r}" in str(caught.value)
    with pytest.raises(OptionError):
        Options(**{name: value})  # type: ignore[arg-type]


def test_environment_gives_defaults_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_PASS_CHOOSE", "fused")
    monkeypatch.setenv("ATTN_PASS_ON_ERROR", "raise")
    monkeypatch.setenv("ATTN_PASS_VERIFY", "")
    assert (Options().choose, Options().on_error, Options().verify) == ("fused", "raise", "off")
    assert make_options(choose="cheapest").choose == "cheapest"
    assert split_options(None)[0].choose == "fused"


def test_a_misspelt_environment_value_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_PASS_CHOOSE", "fussed")
    with pytest.raises(OptionError, match="ATTN_PASS_CHOOSE='fussed'; did you mean 'fused'"):
        make_options()


@pytest.mark.parametrize(("name", "field"), [("CHOOSE", "choose"), ("ON_ERROR", "on_error"), ("VERIFY", "verify")])
def test_a_bad_environment_value_names_the_variable(monkeypatch: pytest.MonkeyPatch, name: str, field: str) -> None:
    monkeypatch.setenv(f"ATTN_PASS_{name}", "bogus")
    with pytest.raises(OptionError, match=f"ATTN_PASS_{name}='bogus'; accepted are"):
        make_options()
    assert field in OPTION_NAMES


def test_split_sends_each_key_to_its_owner() -> None:
    ours, inductor, mode = split_options(
        {"choose": "fused", "targets": ["sdpa"], "max-autotune": True, "triton.cudagraphs": False, "mode": "default"}
    )
    assert ours == make_options(choose="fused", targets=("sdpa",))
    assert inductor == {"max_autotune": True, "triton.cudagraphs": False}
    assert mode == "default"


def test_no_option_of_attn_pass_hides_one_of_inductor() -> None:
    from torch._inductor import list_options

    assert {*OPTION_NAMES, "mode"} & set(list_options()) <= {"numerics"}


@pytest.mark.parametrize(
    ("value", "ours", "inductor"),
    [
        ("default", "default", {"numerics": "default"}),
        ("strict", "strict", {"numerics": "strict"}),
        ("strict_pointwise", "default", {"numerics": "strict_pointwise"}),
    ],
)
def test_numerics_is_an_option_of_inductor_too(
    monkeypatch: pytest.MonkeyPatch, value: str, ours: str, inductor: dict[str, str]
) -> None:
    """As in torch 2.15, in every torch."""
    kinds = Literal["default", "strict_pointwise", "strict_reduction", "strict"]
    monkeypatch.setattr("attn_pass.options._inductor_keys", lambda: frozenset({"numerics"}))
    monkeypatch.setattr("attn_pass.options._inductor_type", {"numerics": kinds}.__getitem__)
    options, own, _ = split_options({"numerics": value})
    assert (options.numerics, own) == (ours, inductor)
    with pytest.raises(OptionError, match="'default', 'strict'"):
        split_options({"numerics": "strictest"})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("chose", "choose"),
        ("max_autotun", "max_autotune"),
        ("modes", "mode"),
        ("triton.cudagraph", "triton.cudagraphs"),
    ],
)
def test_split_names_the_nearest_of_either(key: str, nearest: str) -> None:
    with pytest.raises(OptionError, match=f"unknown option {key!r}; did you mean {nearest!r}") as caught:
        split_options({key: True})
    assert "'assume_nonempty_rows'" in str(caught.value) and "torch._inductor.config" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_autotune": "yes"}, "'max_autotune' takes a value of type bool, got 'yes'"),
        ({"mode": "max-autotun"}, "did you mean 'max-autotune'"),
        ({"on_error": "raise", "on-error": "warn"}, "'on_error' is given twice"),
        ({3: True}, "option names are strings, got 3"),
        (["choose"], "options must be a dict"),
        ({"choose": "slow"}, "accepted: 'cheapest', 'fused'"),
    ],
)
def test_split_rejects_with_a_sentence(options: object, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        split_options(options)  # type: ignore[arg-type]


def test_split_takes_inductor_values_torch_takes() -> None:
    values = {"joint_custom_pre_pass": (print,), "cpp.threads": 4, "worker_log_path": "/tmp/log"}
    assert split_options(values)[1] == values


def test_rules_are_pairs_or_a_dict() -> None:
    made = make_options(rules={"*cross_attn": ["sdpa", "leave"], "modeling.py:203": "flex"})
    assert made.rules == (("*cross_attn", ("sdpa", "leave")), ("modeling.py:203", ("flex",)))
    assert made == make_options(rules=made.rules) and hash(made)
    for wrong in (3, {"a": 3}, {"": "sdpa"}, ["a"], {3: "sdpa"}):
        with pytest.raises(OptionError, match="option 'rules'"):
            make_options(rules=wrong)


def test_first_needs_targets() -> None:
    with pytest.raises(OptionError, match="name some in targets"):
        make_options(choose="first")


@pytest.mark.parametrize(
    ("option", "before", "now"),
    [
        ("poor_cases", "grouped heads", "grouped_heads"),
        ("poor_cases", "keys nobody sees", "key_range"),
        ("poor_cases", "shared K/V over the batch", "shared_kv"),
        ("targets", "values", "single_key"),
    ],
)
def test_the_error_for_an_old_name_gives_the_new_one(option: str, before: str, now: str) -> None:
    with pytest.raises(OptionError, match=f"{before}.*it is called '{now}' now"):
        attn_pass.explain(torch.cos, torch.zeros(1), attn_pass_options={option: (before,)})


def test_a_mode_that_tunes_turns_tuning_on_unless_the_user_says_otherwise() -> None:
    """In both entries: `backend`, and `aot_compile`."""
    made = make_options()
    assert tuned_by_mode(made, "max-autotune", None).tune and tuned_by_mode(made, "max-autotune-no-cudagraphs", {}).tune
    assert not tuned_by_mode(made, "max-autotune", {"tune": False}).tune
    assert not tuned_by_mode(made, None, None).tune and not tuned_by_mode(made, "reduce-overhead", {}).tune
