"""What becomes of programs for ExecuTorch: its operator's stand-in computes eager's results, both sides of every row.

ExecuTorch itself runs them in tests_on/runtimes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import executorch_stand_in
import pytest
import torch
import torch.nn.functional as F
from against_eager import qkv, randn
from exported_programs import PROGRAMS, Exported, biased, by_hand, causal, kept, padded
from torch import Tensor

import attn_pass
from attn_pass.devices import registry

TAKEN = {
    *("no mask", "rows and keys differ", "value heads of another size", "causal", "causal, more keys"),
    *("a negative scale", "grouped heads", "one key head", "one row, grouped heads", "torch's call"),
    *("torch's call with grouped heads", "torch's call of rank 3"),
}


@pytest.fixture
def operator() -> Iterator[None]:
    library = executorch_stand_in.registered()
    yield
    library._destroy()


def rewritten(case: Exported, **options: object) -> tuple[torch.export.ExportedProgram, attn_pass.SiteReport]:
    program = case.program()
    settings = {"runtime": "executorch", "choose": "fused", "on_error": "raise", **options}
    (site,) = attn_pass.rewrite(program, **settings).sites
    return program, site


def call_of(program: torch.export.ExportedProgram) -> torch.fx.Node:
    (call,) = program.graph_module.graph.find_nodes(op="call_function", target=torch.ops.llama.custom_sdpa.default)
    return call


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_it_becomes_is_the_attention(name: str, operator: None) -> None:
    case = PROGRAMS[name]
    program, site = rewritten(case)
    assert (site.target == "custom_sdpa") == (name in TAKEN), site.reason
    torch.testing.assert_close(program.module()(*case.inputs), case.function(*case.inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 7, 11])
def test_masks_of_one_sentence(rows: int, dtype: torch.dtype, operator: None) -> None:
    q, k, v = (x.to(dtype) for x in qkv(1, 4, rows, 7))
    bias = randn(rows, 7, seed=5).to(dtype)
    for function, rest in ((padded_in_dtype, kept(4)), (hidden, kept(0)), (biased, bias)):
        case = Exported(function, (q, k, v, rest))
        program, site = rewritten(case)
        assert site.target == "custom_sdpa", site.reason
        exact = function(*(x.double() if x.is_floating_point() else x for x in case.inputs))
        error = (program.module()(*case.inputs).double() - exact).abs().max()
        assert error <= 2 * (function(*case.inputs).double() - exact).abs().max() + torch.finfo(dtype).eps


def hidden(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(~keep[:, None, None], torch.finfo(q.dtype).min).softmax(-1) @ v


def padded_in_dtype(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    added = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, torch.finfo(q.dtype).min)
    return biased(q, k, v, added[:, None, None])


def test_a_triangle_is_a_position(operator: None) -> None:
    """And needs no matrix: the one that the program has is not read."""
    for name, first in (("causal", 0), ("causal, more keys", 0)):
        call = call_of(rewritten(PROGRAMS[name])[0])
        assert call.args[3:7] == (first, None, 0.0, True), name

    def from_the_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(k.size(-2) - q.size(-2))
        return (q @ k.mT * 0.25).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    case = Exported(from_the_last, qkv(2, 4, 3, 7))
    program, _ = rewritten(case)
    assert call_of(program).args[3:7] == (4, None, 0.0, True)
    torch.testing.assert_close(program.module()(*case.inputs), case.function(*case.inputs))


def test_a_triangle_with_more_rows_than_keys_is_a_matrix(operator: None) -> None:
    """The operator would end the process: it reads a key for every row."""
    case = Exported(causal, qkv(2, 4, 9, 4))
    program, _ = rewritten(case)
    assert call_of(program).args[6] is False and call_of(program).args[3] == -5
    torch.testing.assert_close(program.module()(*case.inputs), case.function(*case.inputs))


def test_operands_are_laid_positions_first_without_copies(operator: None) -> None:
    """As linear layers give them; the result alone is turned, for the program, which turns it back."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (x @ weight).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return by_hand(q, k, v).transpose(1, 2).flatten(2)

    case = Exported(block, (randn(2, 7, 64), 0.1 * randn(64, 192, seed=2)))
    program, _ = rewritten(case)
    targets = [str(n.target) for n in program.graph_module.graph.nodes if n.op == "call_function"]
    assert sum("transpose" in t for t in targets) == 2 and not any("clone" in t or "permute" in t for t in targets)
    torch.testing.assert_close(program.module()(*case.inputs), case.function(*case.inputs))


def test_sizes_that_are_not_known(operator: None) -> None:
    case = Exported(causal, qkv(2, 4, 7, 7))
    length, batch = torch.export.Dim("length", min=2), torch.export.Dim("batch")
    sizes = {0: batch, 2: length}
    program = case.program(dynamic_shapes={"inputs": (sizes, sizes, sizes)})
    (site,) = attn_pass.rewrite(program, runtime="executorch", choose="fused", on_error="raise").sites
    assert site.target == "custom_sdpa"
    for b, n in ((2, 7), (3, 13), (1, 2)):
        inputs = qkv(b, 4, n, n)
        torch.testing.assert_close(program.module()(*inputs), causal(*inputs))


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT * 0.25).softmax(-1), 0.5, training=True) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (2.0 * torch.tanh(q @ k.mT / 2.0)).softmax(-1) @ v


def with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT * 0.25, torch.ones(2, 4, 7, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


def where_kept(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (q @ k.mT * 0.25).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def called_with_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, keep)


PLAIN, CAUSAL = PROGRAMS["no mask"], PROGRAMS["causal"]
ONE_SENTENCE = Exported(padded, (*qkv(1, 4, 7, 7), kept(4)))
# By rule: a program that it takes, one that it refuses, the options of both, and why.
SIDES: dict[str, tuple[Exported, Exported, dict[str, object], str]] = {
    "dropout": (PLAIN, Exported(dropped, PLAIN.inputs), {}, "dropout 0.5: custom_sdpa ignores it"),
    "sink": (PLAIN, Exported(with_sink, PLAIN.inputs), {}, "custom_sdpa has no sink"),
    "mask": (ONE_SENTENCE, Exported(padded, (*PLAIN.inputs, kept(7, 4))), {}, "from batch row to batch row"),
    "fully masked rows": (
        Exported(where_kept, (*qkv(1, 4, 7, 7), randn(7, 7) > 0)),
        Exported(called_with_mask, (*qkv(1, 4, 7, 7), randn(7, 7) > 0)),
        {},
        "custom_sdpa gives NaN there",
    ),
    "numerics": (PLAIN, CAUSAL, {"numerics": "strict"}, "does not assume"),
    "dtype": (
        Exported(by_hand, tuple(x.half() for x in PLAIN.inputs)),
        Exported(by_hand, tuple(x.double() for x in PLAIN.inputs)),
        {},
        "takes float32, float16, bfloat16, not float64",
    ),
    "scores": (PLAIN, Exported(capped, PLAIN.inputs), {}, "tanh (a soft cap)"),
    "sizes": (Exported(by_hand, qkv(q_len=3, kv_len=1)), Exported(by_hand, qkv(q_len=3, kv_len=0)), {}, "a size is 0"),
}


@pytest.mark.parametrize("rule", SIDES)
def test_both_sides_of_a_rule(rule: str, operator: None) -> None:
    taken, refused, options, reason = SIDES[rule]
    _, site = rewritten(taken, targets=("custom_sdpa",), **options)
    assert site.target == "custom_sdpa", site.refusals
    _, site = rewritten(refused, **options)
    assert site.outcome == "left" and reason in site.refusals["custom_sdpa"], site.refusals


def test_every_rule_has_both_sides() -> None:
    """Gradients are asked of what is compiled (`test_gradients_are_not_for_it`): an exported program may need none."""
    assert [rule.name for rule in registry.of_type("executorch").rules()] == ["gradient", *SIDES]


def test_fully_masked_rows(operator: None) -> None:
    """A program that gives NaN there gets it; an option vouches that there are none."""
    keep = torch.ones(7, 7, dtype=torch.bool)
    keep[2] = False
    case = Exported(where_kept, (*qkv(1, 4, 7, 7), keep))
    program, site = rewritten(case)
    assert site.target == "custom_sdpa"
    torch.testing.assert_close(program.module()(*case.inputs), case.function(*case.inputs), equal_nan=True)
    case = replace(case, function=called_with_mask)
    assert rewritten(case, assume_nonempty_rows=True)[1].target == "custom_sdpa"


def test_gradients_are_not_for_it(operator: None) -> None:
    given = {"runtime": "executorch"}
    (site,) = attn_pass.explain(by_hand, *qkv(grad=True), attn_pass_options=given).sites
    assert "runs without gradients" in site.refusals["custom_sdpa"]


def test_without_the_library() -> None:
    _, site = rewritten(PROGRAMS["causal"])
    assert site.outcome == "left" and "executorch" in site.refusals["custom_sdpa"]
