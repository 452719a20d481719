"""Natural mistakes in a call are told with what to write instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attn_pass
from attn_pass.errors import AttnPassWarning, CaptureError, OptionError

pytestmark = pytest.mark.usefixtures("quiet_torch")

Tensor = torch.Tensor


def model(x: Tensor) -> Tensor:
    return torch.relu(x) + 1


class Product(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT


class Lenient(torch.nn.Module):
    """As models of transformers do, it takes any keyword."""

    def forward(self, x: Tensor, tune: bool = False, **unused: Any) -> Tensor:
        return torch.relu(x)


def test_a_backend_that_is_called_by_hand_says_how_it_is_used() -> None:
    with pytest.raises(OptionError, match=r"backend=attn_pass\.wrap\('inductor', choose="):
        attn_pass.backend(choose="fused")
    with pytest.raises(OptionError, match="is the backend itself"):
        attn_pass.backend("aot_eager")  # type: ignore[arg-type]


def test_wrap_without_a_backend_says_how_it_is_used() -> None:
    with pytest.raises(Exception, match=r"backend=attn_pass\.wrap\('aot_eager'\)"):
        torch.compile(model, backend=attn_pass.wrap)(torch.ones(3))


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        ((), {}, r"backend=attn_pass\.wrap\('aot_eager'\)"),
        ((), {"choose": "fused"}, "has to be called with the one to wrap"),
        ((Product(),), {}, "takes a backend, and got a model, Product"),
        ((attn_pass,), {}, "the backend is attn_pass.backend"),
        (("aot_eager",), {"options": {"choose": "fused"}}, "takes options as keywords"),
    ],
)
def test_wrap_with_something_else_says_how_it_is_used(
    given: tuple[Any, ...], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        attn_pass.wrap(*given, **options)


def test_the_package_is_no_backend() -> None:
    with pytest.raises(Exception, match=r"the backend is attn_pass\.backend"):
        torch.compile(model, backend=attn_pass)(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"attn_pass\.check got the module 'attn_pass'"):
        attn_pass.check(model, torch.ones(3), backend=attn_pass)  # type: ignore[arg-type]


ENTRIES = [attn_pass.explain, attn_pass.check, attn_pass.benchmark]


@pytest.mark.parametrize("entry", ENTRIES)
def test_inputs_that_are_not_unpacked_are_told(entry: Callable[..., Any]) -> None:
    inputs = (torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(CaptureError) as raised:
        entry(Product(), inputs)
    assert f"unpack it, attn_pass.{entry.__name__}(model, *inputs)" in str(raised.value)
    with pytest.raises(CaptureError) as raised:
        entry(Product(), inputs[:1], {"k": inputs[1]})
    assert f"unpack them, attn_pass.{entry.__name__}(model, *args, **kwargs)" in str(raised.value)
    with pytest.raises(CaptureError) as raised:
        entry(Product(), {"q": inputs[0], "k": inputs[1]})
    assert f"unpack it, attn_pass.{entry.__name__}(model, **inputs)" in str(raised.value)
    with pytest.raises(CaptureError) as raised:
        entry(Product(), inputs[0])  # which is another mistake
    assert "unpack" not in str(raised.value)


@pytest.mark.parametrize(
    ("entry", "given", "hint"),
    [
        (attn_pass.explain, {"choose": "fused"}, "attn_pass_options={\"choose\": 'fused'}"),
        (attn_pass.explain, {"options": {"choose": "fused"}}, "attn_pass_options={...}"),
        (attn_pass.explain, {"dynamic": True}, "attn_pass_dynamic=True"),
        (attn_pass.benchmark, {"options": {"choose": "fused"}}, "attn_pass_options={...}"),
        (attn_pass.check, {"choose": "fused"}, "backend=attn_pass.wrap('inductor', choose='fused')"),
    ],
)
def test_an_option_that_went_to_the_model_is_told(entry: Callable[..., Any], given: dict[str, Any], hint: str) -> None:
    with pytest.raises(CaptureError) as raised:
        entry(model, torch.ones(3), **given)
    assert hint in str(raised.value)


def test_an_option_that_a_model_swallows_is_a_warning() -> None:
    def warned(**given: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AttnPassWarning)
            attn_pass.explain(Lenient(), torch.ones(3), **given)
        return [str(w.message) for w in caught if issubclass(w.category, AttnPassWarning)]

    (words,) = warned(options={"choose": "fused"})
    assert "options went to the model" in words and "attn_pass_options={...}" in words
    assert warned(tune=True) == [] and warned(device="cpu", output_attentions=True) == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_misspelt_keyword_of_ours_is_an_error_before_anything_runs(entry: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match=r"unknown keyword of attn_pass\.\w+ 'attn_pass_trainin'"):
        entry(Lenient(), torch.ones(3), attn_pass_trainin=True)
    with pytest.raises(OptionError, match="did you mean 'attn_pass_options'"):
        attn_pass.explain(Lenient(), torch.ones(3), attn_pass_option={"choose": "fused"})


@pytest.mark.parametrize(
    ("args", "more", "told"),
    [
        ((torch.ones(2, 3), torch.ones(2, 3)), {}, r"as one tuple, aot_compile\(model, \(x, y\)\)"),
        (((torch.ones(2, 3),) * 2,), {"choose": "fused"}, r"options=\{'choose': \.\.\.\} instead of choose="),
        (((torch.ones(2, 3),) * 2,), {"attn_pass_options": {}}, r"options=\{\.\.\.\} instead of attn_pass_options="),
        (((torch.ones(2, 3),),), {"k": torch.ones(2, 3)}, r"inputs by name are given as kwargs=\{'k': \.\.\.\}"),
    ],
)
def test_aot_compile_says_how_it_takes_inputs_and_options(
    args: tuple[Any, ...], more: dict[str, Any], told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        attn_pass.aot_compile(Product(), *args, **more)


def test_a_tuple_in_the_tuple_of_aot_compile_is_told() -> None:
    inputs = (torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(CaptureError) as raised:
        attn_pass.aot_compile(Product(), (inputs,))
    assert "unpack it, attn_pass.aot_compile(model, inputs)" in str(raised.value)


class KeyValueCache:
    """As transformers' caches are, a type that torch.export does not know."""


class Caching(torch.nn.Module):
    def forward(self, x: Tensor, use_cache: bool = True) -> Any:
        return (torch.relu(x), KeyValueCache()) if use_cache else torch.relu(x)


def test_a_cache_in_the_result_is_told() -> None:
    with pytest.raises(CaptureError, match="use_cache=False, as a keyword input"):
        attn_pass.aot_compile(Caching(), (torch.ones(3),))


def rewritten(options: dict[str, Any]) -> None:
    attn_pass.rewrite(torch.export.export(Product(), (torch.ones(2, 3), torch.ones(2, 3))), **options)


def packaged(options: dict[str, Any]) -> None:
    attn_pass.aot_compile(Product(), (torch.ones(2, 3), torch.ones(2, 3)), options=options)


def enabled(options: dict[str, Any]) -> None:
    with attn_pass.enabled(**options):
        pass


TAKERS: tuple[Callable[[dict[str, Any]], object], ...] = (
    lambda options: attn_pass.explain(model, torch.ones(3), attn_pass_options=options),
    lambda options: attn_pass.benchmark(model, torch.ones(3), attn_pass_options=options),
    lambda options: attn_pass.wrap("aot_eager", **options),
    lambda options: attn_pass.wrap("inductor", **options),
    lambda options: attn_pass.install(**options),
    enabled,
    rewritten,
    packaged,
)
"""Each entry that takes options."""


@pytest.mark.parametrize("take", TAKERS)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"chose": "fused"}, "'chose'; did you mean 'choose'.; accepted are .*'numerics'"),
        ({"Numerics": "strict"}, "'Numerics'; did you mean 'numerics'"),
        ({"choose": "FUSED"}, "did you mean 'fused'.; accepted: 'cheapest', 'fused', 'first'"),
        ({"numerics": "strickt"}, "did you mean 'strict'.; accepted: 'default', 'strict'"),
        ({"targets": ("sdpaa",)}, "unknown target 'sdpaa'; did you mean 'sdpa'.; accepted are .*'flex'"),
        ({"rules": {"*": "leav"}}, "unknown target in a rule 'leav'; did you mean 'leave'"),
        ({"poor_cases": ("key_rang",)}, "did you mean 'key_range'.; accepted are .*'grouped_heads'"),
        ({"runtime": "ONNX"}, "unknown runtime 'ONNX'; did you mean 'onnx'.; accepted are .*'tensorrt'"),
        ({"device": "H20"}, "unknown device 'H20'; did you mean 'H200'.; accepted are 'cpu'.*'MI300X'.*'cuda:1'"),
        ({"device": "cdua:0"}, "unknown device 'cdua:0'; did you mean 'cuda'"),
        ({"device": "onnx"}, "'onnx' is a runtime, not a device: give it as runtime='onnx'"),
    ],
)
def test_a_name_that_is_unknown_is_told_at_once_with_the_nearest(
    take: Callable[[dict[str, Any]], object], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        take(options)


def test_nothing_is_near_to_what_is_far_from_all() -> None:
    with pytest.raises(OptionError, match="unknown device 'M5'; accepted are"):
        attn_pass.explain(model, torch.ones(3), attn_pass_options={"device": "M5"})


def test_options_in_one_keyword_are_told_how_they_are_given() -> None:
    with pytest.raises(OptionError, match="give the options themselves, by name"):
        rewritten({"options": {"choose": "fused"}})


@pytest.mark.parametrize("options", ["fused", ["choose"], attn_pass.Options()])
@pytest.mark.parametrize("entry", [attn_pass.explain, attn_pass.benchmark])
def test_options_that_are_no_dict_are_a_sentence(entry: Callable[..., Any], options: Any) -> None:
    with pytest.raises(OptionError, match="options must be a dict of option names to values"):
        entry(model, torch.ones(3), attn_pass_options=options)


def test_wrap_names_the_nearest_backend() -> None:
    with pytest.raises(OptionError, match=r"'aot_eagr'; did you mean 'aot_eager'.; accepted are .*'inductor'"):
        attn_pass.wrap("aot_eagr")


def test_options_of_ours_that_would_go_to_another_backend_are_told() -> None:
    def compiled(**options: Any) -> Tensor:
        torch._dynamo.reset()
        result: Tensor = torch.compile(model, backend=attn_pass.wrap(taking), options=options)(torch.ones(3))
        return result

    def taking(graph: torch.fx.GraphModule, inputs: Any, options: Any = None) -> Callable[..., Any]:
        return graph.forward

    with pytest.raises(Exception, match=r"which has no choose: give options .* attn_pass\.wrap\('taking', choose="):
        compiled(choose="fused")
    assert torch.equal(compiled(device="CPU", precision="f16"), model(torch.ones(3)))


@pytest.mark.parametrize(
    ("entry", "given", "told"),
    [
        (attn_pass.benchmark, {"attn_pass_training": "no"}, "attn_pass_training got 'no' .str.; accepted: True, False"),
        (attn_pass.check, {"attn_pass_training": 1}, "attn_pass_training got 1 .int.; accepted: True, False or None"),
        (attn_pass.benchmark, {"attn_pass_seconds": "20"}, "attn_pass_seconds got '20' .str.; accepted: a number"),
        (attn_pass.benchmark, {"attn_pass_seconds": 0}, "attn_pass_seconds got 0 .int.; accepted: a number"),
    ],
)
def test_a_keyword_of_ours_with_another_value_is_told_at_once(
    entry: Callable[..., Any], given: dict[str, Any], told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        entry(model, torch.ones(3), **given)
