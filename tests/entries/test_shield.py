"""The shield: stock Inductor is wrong on look-alikes of attention, and right with the shield on."""

from __future__ import annotations

import copy
import functools
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_engine as toy
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

import attn_pass
from attn_pass.devices.cpu.kernel import source
from attn_pass.entries import shield as shield_file
from attn_pass.entries.saved_values import SavedValues
from attn_pass.entries.shield import Chain, Shield, Unshield, passes_of, shield_patches, slot_of
from attn_pass.options import Options

pytestmark = pytest.mark.usefixtures("quiet_torch")


def over_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A softmax over dim 0, not over the keys (pytorch/pytorch#196468)."""
    return torch.softmax(q @ k.transpose(-2, -1) / 16.0, dim=0) @ v


def permuted_key(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """K goes from (B, T, H, D) straight to (B, H, D, T), and T equals H (pytorch/pytorch#195320)."""
    q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
    return (torch.matmul(q, k) * 0.25).softmax(-1) @ v


LOOK_ALIKES = [
    (over_heads, (4, 4, 4, 8)),
    (permuted_key, (2, 8, 8, 16)),
]


def error(compiled: Callable[..., torch.Tensor], function: Callable[..., torch.Tensor], args: Any) -> float:
    with torch.no_grad():
        return (compiled(*args) - function(*args)).abs().max().item()


@pytest.mark.parametrize(("function", "shape"), LOOK_ALIKES, ids=lambda p: getattr(p, "__name__", ""))
def test_stock_is_wrong_and_shielded_is_right(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., torch.Tensor], shape: tuple[int, ...]
) -> None:
    toy.use(monkeypatch, toy.left())
    args = tuple(torch.randn(shape) for _ in range(3))
    if error(torch.compile(function), function, args) < 1e-2:
        pytest.skip("this torch no longer fuses the look-alike")
    torch._dynamo.reset()
    assert error(torch.compile(function, backend=attn_pass.backend), function, args) < 1e-5
    assert error(torch.compile(function, backend=attn_pass.backend, options={"shield": False}), function, args) > 1e-2


def test_gradients_are_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(monkeypatch, toy.left())
    args = [torch.randn(4, 4, 4, 8, requires_grad=True) for _ in range(3)]
    torch.compile(over_heads, backend=attn_pass.backend)(*args).sin().sum().backward()
    got = [arg.grad for arg in args]
    for arg in args:
        arg.grad = None
    over_heads(*args).sin().sum().backward()
    for arg, grad in zip(args, got, strict=True):
        torch.testing.assert_close(grad, arg.grad, rtol=1e-4, atol=1e-5)
    assert counters["inductor"]["fuse_attention"] == 0


def decomposed() -> torch.fx.Graph:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1) + torch.exp(x)

    from torch._inductor.decomposition import select_decomp_table

    return make_fx(function, select_decomp_table())(torch.randn(3, 4)).graph


def test_only_the_softmax_is_marked_and_the_marks_go_away() -> None:
    graph = decomposed()
    Shield(Options())(graph)
    marked = [node for node in graph.nodes if node.meta["mutation_region_id"] != 0]
    assert [node.target for node in marked] == [torch.ops.aten.exp.default]
    assert any(user.target is torch.ops.aten.sum.dim_IntList for user in marked[0].users)
    Unshield()(graph)
    assert {node.meta["mutation_region_id"] for node in graph.nodes} == {0}


def test_a_graph_without_softmax_is_not_touched() -> None:
    graph = make_fx(lambda x: x.exp() * 2)(torch.randn(3)).graph
    Shield(Options())(graph)
    Unshield()(graph)
    assert all("mutation_region_id" not in node.meta for node in graph.nodes)


def test_the_shield_never_raises() -> None:
    Shield(Options())(None)  # type: ignore[arg-type]
    Unshield()(None)  # type: ignore[arg-type]


def test_identity_is_stable_and_survives_copies() -> None:
    for make in (functools.partial(Shield, Options()), Unshield):
        shield = make()
        assert shield.uuid() == make().uuid() == pickle.loads(pickle.dumps(shield)).uuid()
        assert copy.deepcopy(shield).uuid() == shield.uuid()
    assert Shield(Options()).uuid() != Unshield().uuid()
    assert Shield(Options()).uuid() != Shield(Options(rules={"*": ()})).uuid()  # what is left to stock is another


def test_patches_keep_other_passes_and_add_the_shield_once() -> None:
    def theirs(graph: torch.fx.Graph) -> None: ...

    once = shield_patches({"joint_custom_pre_pass": theirs, "joint_custom_post_pass": [theirs]}, Options())
    twice = shield_patches(once, Options())
    for patches in (once, twice):
        before, after = passes_of(patches["joint_custom_pre_pass"]), passes_of(patches["joint_custom_post_pass"])
        assert before[0] is theirs and [type(p) for p in before[1:]] == [Shield]
        assert after[-1] is theirs and [type(p) for p in after[:-1]] == [Unshield]


def test_one_callable_for_a_torch_without_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_pass.entries.shield.pre_grad_slot_takes_list", lambda: False)
    ran: list[str] = []

    class Theirs(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            ran.append("theirs")

        def uuid(self) -> str:
            return "theirs"

    chain = slot_of([Theirs(), Shield(Options())])
    assert isinstance(chain, Chain) and len(passes_of(chain)) == 2
    chain(decomposed())
    assert ran == ["theirs"]
    assert chain.uuid() == ("theirs", Shield(Options()).uuid())
    assert slot_of([lambda graph: None, Shield(Options())]).uuid() is None
    assert slot_of([]) is None


def test_a_changed_cpu_kernel_is_another_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A graph says which operator it calls, and a cache that knows no more would bring an old kernel back."""
    before = Shield(Options()).uuid()
    changed = Path(shutil.copytree(source._HERE, tmp_path / "cpu"))
    (changed / "few.hpp").write_text((changed / "few.hpp").read_text() + "// more\n")
    monkeypatch.setattr(source, "_HERE", changed)
    for module, name in ((source, "identity"), (shield_file, "_identity")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)  # as it is without what was kept
    assert Shield(Options()).uuid() != before


def test_without_the_shield_inductors_caches_still_know_the_kernels() -> None:
    """A graph names the operator alone: other kernels than those it was lowered by would run from the cache."""
    patches = shield_patches({}, Options(shield=False))
    only, saved = (graph_pass for slot in patches.values() for graph_pass in passes_of(slot))
    assert isinstance(only, Unshield) and only.uuid() == Unshield().uuid()
    assert isinstance(saved, SavedValues) and saved.uuid() == SavedValues().uuid()
