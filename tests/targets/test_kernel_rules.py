"""The rules of torch's fused kernels, one row each: a call on both sides of every limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_calls import FP32, FP64, H200, KERNELS, call, gpu
from rule_sides import SIDES

from attn_pass.devices.cpu.facts import cpu
from attn_pass.devices.mps import family as mps
from attn_pass.devices.registry import families
from attn_pass.devices.rocm import gates
from attn_pass.model.attention import AsWritten
from attn_pass.targets.torch_call import order, picked_as_written, picked_by_torch, refusal
from bench.gpu import rules


@pytest.fixture(autouse=True)
def no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    for gate in (gates.EXPERIMENTAL_GATE, gates.CK_GATE, mps.GATE):
        monkeypatch.delenv(gate, raising=False)


def test_every_rule_has_both_sides() -> None:
    assert set(SIDES) == {(kernel, rule.name) for kernel, of in KERNELS.items() for rule in of.rules}
    assert all(SIDES.values())


@pytest.mark.parametrize(
    ("kernel", "rule", "inside", "outside"),
    [(*key, *pair) for key, pairs in SIDES.items() for pair in pairs],
    ids=[f"{k}, {r}, {n}" for (k, r), pairs in SIDES.items() for n in range(len(pairs))],
)
def test_both_sides(kernel: str, rule: str, inside: dict[str, Any], outside: dict[str, Any]) -> None:
    assert refusal(kernel, call(**inside)) is None
    refused = call(**outside)
    assert rule in [r.name for r in KERNELS[kernel].rules if not r.holds(refused)]
    assert refusal(kernel, refused)


NAMED = re.compile(r"([\w, ]+) in ([\w./]+\.(?:h|cpp|mm|py|yaml))\b")
REPORTED = re.compile(r"[\w/-]+#\d+")


def sources() -> Iterator[str]:
    for family in families():
        yield from (rule.source for of in family.kernel_rules.values() for rule in of.rules)
        yield from (rule.source for rule in family.rules()) if family.is_runtime else ()


@pytest.mark.parametrize("source", sorted(set(sources())))
def test_a_source_names_a_place_in_a_file_or_a_report(source: str) -> None:
    assert NAMED.match(source) or REPORTED.match(source) or source.startswith("of this project: ")


def installed(file: str) -> Path | None:
    """A file of sources, where an installed package has it: headers and Python."""
    packages = Path(torch.__file__).parents[1]
    places = (
        packages / file,
        packages / "torch/include/ATen/native" / file,
        packages / "torchgen/packaged/ATen/native" / file,
    )
    package = find_spec(file.partition("/")[0]) if "/" in file else None
    if package is not None and package.submodule_search_locations:
        places += tuple(Path(place).parent / file for place in package.submodule_search_locations)
    return next((place for place in places if place.is_file()), None)


def test_what_sources_name_is_there() -> None:
    """In the installed torch's headers and Python files; what is built into its libraries cannot be read."""
    read = set()
    for names, file in (found for source in sources() for found in NAMED.findall(source)):
        if (path := installed(file)) is not None:
            text = path.read_text()
            for name in names.split(","):
                assert re.search(rf"\b{name.strip()}\b", text), f"{file} has no {name}"
            read.add(file)
    assert {"transformers/sdp_utils_cpp.h", "native_functions.yaml", "torch/nn/attention/_fa3.py"} <= read
    assert any(file.startswith("torch/onnx/") for file in read)


def test_what_is_known_wrong_has_its_report() -> None:
    every = [rule for of in KERNELS.values() for rule in of.rules]
    reported = {rule.name: rule.known_wrong for rule in every if rule.known_wrong}
    assert reported == {
        "decoding on Blackwell": "pytorch#193893",
        "one query on Blackwell": "pytorch#193893",
        "older versions": "pytorch#169849",
        "half a tile in training": "pytorch#196678",
        "grid": "pytorch#146704",
        "backward indices": "PriorLabs/TabPFN#1184",
        "one query in training": "NVIDIA/cudnn-frontend#1072",
    }
    for rule in every:
        number = rule.known_wrong.rpartition("#")[2]
        assert not number or (isinstance(rule.reason, str) and number in rule.reason)


def test_torch_tries_cudnn_first_on_hopper_alone() -> None:
    assert order(H200) == ("cudnn", "flash", "efficient")
    assert order(gpu(10, 0)) == ("cudnn", "flash", "efficient")
    assert order(gpu(9, 0, 91500)) == ("flash", "efficient")  # behind the unfused form
    assert order(gpu(8, 0)) == order(gpu(12, 0)) == ("flash", "efficient")
    assert order(cpu()) == ("cpu flash",)


@pytest.mark.parametrize(
    ("picked", "given"),
    [
        ("cudnn", {}),
        ("cudnn", {"q_len": 1}),
        ("flash", {"dim": 20}),  # padded by torch for flash alone
        ("cudnn", {"value_dim": 32}),
        (None, {"value_dim": 20}),
        ("efficient", {"dtype": FP32}),
        (None, {"dtype": FP32, "dim": 10}),
        (None, {"dtype": FP32, "groups": 2}),
        (None, {"dtype": FP64}),
        ("cudnn", {"mask": "additive", "never_empty": False}),
        ("efficient", {"mask": "additive", "mask_needs_grad": True}),
        ("flash", {"device": gpu(8, 0)}),
        ("efficient", {"device": gpu(8, 0), "mask": "additive"}),
        (None, {"device": gpu(8, 0), "mask": "additive", "groups": 2}),
        ("flash", {"dropout": 0.1}),
        ("flash", {"kv_len": 1}),
        ("efficient", {"dim": 264}),
    ],
)
def test_what_torch_picks(picked: str | None, given: dict[str, Any]) -> None:
    assert picked_by_torch(call(**given)) == picked


@pytest.mark.parametrize(
    ("given", "before", "since"),
    [
        ({"dtype": FP32, "groups": 2}, ((2, 13), None), ((2, 14), "efficient")),
        ({"device": gpu(8, 0), "mask": "additive", "groups": 2}, ((2, 13), None), ((2, 15), "efficient")),
        ({"dim": 160}, ((2, 13), "cudnn"), ((2, 14), "flash")),
        ({"dim": 256, "device": gpu(10, 0, 92600)}, ((2, 13), "flash"), ((2, 14), "cudnn")),
        ({"dropout": 0.1}, ((2, 11), "cudnn"), ((2, 13), "flash")),
        ({"batch": 65536}, ((2, 11), "cudnn"), ((2, 13), "flash")),
        ({"dim": 160, "grad": True, "device": gpu(9, 0, 92600)}, ((2, 13), "cudnn"), ((2, 14), "flash")),
        ({"q_len": 1, "device": gpu(10, 0)}, ((2, 14), "cudnn"), ((2, 15), "flash")),
        ({"kv_len": 704, "grad": True}, ((2, 14), "cudnn"), ((2, 15), "flash")),
    ],
)
def test_what_torch_picks_by_its_version(
    given: dict[str, Any], before: tuple[tuple[int, int], str | None], since: tuple[tuple[int, int], str | None]
) -> None:
    for version, picked in (before, since):
        assert picked_by_torch(call(**given, torch_version=version)) == picked


def test_cudnn_is_behind_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert order(replace(H200, is_here=True)) == ("flash", "efficient")
    assert order(H200)[0] == "cudnn"  # of another machine nobody knows


def test_a_restriction_leaves_what_it_names() -> None:
    assert picked_by_torch(call(), ("EFFICIENT_ATTENTION",)) == "efficient"
    assert picked_by_torch(call(), ("MATH",)) is None


@pytest.mark.parametrize(
    ("written", "kernel"),
    [
        (AsWritten(True, plain=True), "flash"),
        (AsWritten(True, plain=True, causal=True), "flash"),
        (AsWritten(True, plain=True, mask="boolean"), "efficient"),
        (AsWritten(True, plain=False), None),
    ],
)
def test_what_a_program_s_own_call_ends_in(written: AsWritten, kernel: str | None) -> None:
    assert picked_as_written(call().attention, written, gpu(8, 0), deterministic=False) == kernel


def test_a_mask_of_rank_3_leaves_the_efficient_kernel_to_torch_s_call() -> None:
    """Seen on an H200 with torch 2.11; cuDNN takes masks of rank 2 and 4 alone."""
    q = torch.empty(2, 8, 256, 64, dtype=torch.float16, device="meta")
    for sizes, kernel in (((8, 256, 256), "efficient"), ((2, 8, 256, 256), "cudnn"), ((256, 256), "cudnn")):
        mask = torch.empty(sizes, dtype=q.dtype, device="meta")
        attention, written = rules.read(lambda *args: F.scaled_dot_product_attention(*args), q, q, q, mask)
        assert picked_as_written(attention, written, gpu(9, 0), deterministic=False) == kernel
        assert written.plain == (len(sizes) != 3) and written.plain_but_for_mask == (len(sizes) == 3)
    q, mask = q.transpose(-1, -2), mask.new_empty(8, 64, 64)
    attention, written = rules.read(lambda *args: F.scaled_dot_product_attention(*args), q, q, q, mask)
    assert picked_as_written(attention, written, gpu(9, 0), deterministic=False) is None  # strided head dims
