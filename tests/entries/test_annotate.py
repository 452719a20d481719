"""Annotations in a program: `leave`, and annotations that name targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import qkv, same
from by_hand import plain
from torch import Tensor
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils.checkpoint import checkpoint

import attn_pass


def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def annotated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Free by hand, left by hand, left as a call, and by hand with targets that are named."""
    first = plain(q, k, v)
    with attn_pass.leave():
        second, third = plain(q + 1, k, v), call(q, k, v[..., :8])
    with annotate({"attn_pass": ("flash", "sdpa")}):
        fourth = plain(q + 2, k, v)
    return first, second, third, fourth


class Annotated(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return annotated(q, k, v)


FUSED = {"choose": "fused", "targets": ("sdpa", "flex")}
EXPECTED = ["sdpa", "left", "left", "sdpa"]


def became(report: attn_pass.Report) -> list[str]:
    return [site.target or site.outcome for site in report.sites]


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_annotated_is_left_or_becomes_what_is_named(grad: bool) -> None:
    report = same(annotated, *qkv(grad=grad), grad=grad)
    assert became(report) == EXPECTED
    assert [("annotation" in site.reason) for site in report.sites] == [False, True, True, True]


def test_an_annotation_counts_before_a_rule_and_before_cost() -> None:
    report = same(annotated, *qkv(), rules={"*": "decomposed"}, choose="cheapest")
    assert [site.outcome for site in report.sites][1:3] == ["left", "left"]
    assert report.sites[3].target == "sdpa" and "the rule for '*'" in report.sites[0].reason


def test_nothing_around_it_is_left() -> None:
    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attn_pass.leave():
            q = q * 2
        out = plain(q, k, v)
        with attn_pass.leave():
            return out + 1

    assert became(same(around, *qkv())) == ["sdpa"]


def test_a_softmax_alone_is_enough() -> None:
    def softmax_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        with attn_pass.leave():
            weights = scores.softmax(-1)
        return weights @ v

    assert became(same(softmax_alone, *qkv())) == ["left"]


def test_in_a_checkpoint() -> None:
    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attn_pass.leave():
            return plain(q, k, v)

    def outer(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(inside, q, k, v, use_reentrant=False) + checkpoint(plain, q, k, v, use_reentrant=False)

    assert became(same(outer, *qkv(grad=True), grad=True)) == ["left", "sdpa"]


def test_annotations_of_others_are_not_rules() -> None:
    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with annotate({"stage": 1, "leave": "attn_pass"}):
            return plain(q, k, v)

    assert became(same(theirs, *qkv())) == ["sdpa"]


def test_an_unknown_target_is_an_error_of_the_user() -> None:
    def misspelt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with annotate({"attn_pass": "sdp"}):
            return plain(q, k, v)

    torch._dynamo.reset()
    with pytest.raises(Exception, match="unknown target in an annotation 'sdp'; did you mean 'sdpa'"):
        torch.compile(misspelt, backend=attn_pass.wrap("eager"))(*qkv())


def test_exported_programs_keep_annotations() -> None:
    inputs = qkv()
    programs = [torch.export.export(Annotated(), inputs, strict=True)]
    with preserve_node_meta():
        programs.append(torch.export.export(Annotated(), inputs))
    programs.append(programs[-1].run_decompositions())
    for program in programs:
        assert became(attn_pass.explain(program, attn_pass_options=FUSED)) == EXPECTED


@pytest.mark.slow
def test_packages_keep_annotations(tmp_path: Path) -> None:
    inputs = qkv()
    path = attn_pass.aot_compile(Annotated(), inputs, package_path=tmp_path / "model.pt2", options=FUSED)
    assert became(attn_pass.package_report(path)) == EXPECTED
    result = torch._inductor.aoti_load_package(path)(*inputs)
    for ours, eager in zip(result, annotated(*inputs)):
        torch.testing.assert_close(ours, eager)


ODD: tuple[Any, ...] = (3, True, 2.5, {}, {"sdpa": 1}, b"sdpa", ("sdpa", 3), "", "sdp", "LEAVE")


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_the_error_for_an_annotation_without_a_target_is_a_sentence(value: Any) -> None:
    def odd(q: Tensor) -> Tensor:
        with annotate({"attn_pass": value}):
            return plain(q, q, q)

    with pytest.raises(attn_pass.errors.OptionError, match=r"annotation.*accepted"):
        attn_pass.explain(odd, torch.randn(1, 2, 9, 8))


@pytest.mark.parametrize("custom", [None, "x", [("attn_pass", "leave")]])
def test_metadata_that_is_not_an_annotation_is_ignored(custom: Any) -> None:
    gm = torch.fx.symbolic_trace(lambda q: (q @ q.mT).softmax(-1) @ q)
    for node in gm.graph.nodes:
        node.meta["custom"] = custom
    report = attn_pass.rewrite(gm, (torch.randn(1, 2, 9, 8),), choose="fused", on_error="raise")
    assert became(report) == ["sdpa"]


class Opaque(torch.nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.attention, self.value = torch.nn.MultiheadAttention(16, 2, batch_first=True), value

    def forward(self, x: Tensor) -> Tensor:
        with annotate({"attn_pass": self.value} if self.value else {}):
            return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("value", "rules", "outcome"),
    [
        (None, {}, "sdpa"),
        ("leave", {}, "left"),
        (("flex", "leave", "sdpa"), {}, "left"),
        (("flex", "sdpa", "leave"), {}, "sdpa"),
        ("flex", {}, "left"),
        (None, {"*": "leave"}, "left"),
        ("sdpa", {"*": "leave"}, "sdpa"),
    ],
)
def test_an_annotation_applies_to_an_opaque_call(value: Any, rules: dict[str, str], outcome: str) -> None:
    with torch.no_grad():
        options = {"rules": rules, "targets": ("sdpa", "flex")}
        report = attn_pass.explain(Opaque(value).eval(), torch.randn(2, 5, 16), attn_pass_options=options)
    assert became(report) == [outcome]
    assert outcome == "sdpa" or "the program's annotation" in report.sites[0].reason or "the rule for" in str(report)
