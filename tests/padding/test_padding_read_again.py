"""Encoders that a reader of the code thought up, whose padding was taken out wrongly: each keeps eager's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attn_pass
from attn_pass.devices.cpu.kernel import build
from attn_pass.entries.transaction import decide
from attn_pass.options import make_options

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
B, L, H, E = 4, 24, 2, 16
IDS = torch.arange(B * L).view(B, L) % 50
MASK = (torch.arange(L) < torch.tensor([24, 5, 11, 1])[:, None]).long()


class Encoder(nn.Module):
    """Embeddings and attention layers; what is made of them is a subclass's."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm = nn.Embedding(50, E), nn.LayerNorm(E)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(E, E) for _ in range(4)) for _ in range(layers))

    def attend(self, layer: int, rows: Tensor, keys: Tensor, keep: Tensor) -> Tensor:
        parts: Any = self.layers[layer]
        q, k, v = (one(x).view(B, L, H, E // H).transpose(1, 2) for one, x in zip(parts, (rows, keys, keys)))
        y = F.scaled_dot_product_attention(q, k, v, keep.bool()[:, None, None, :])
        return parts[3](y.transpose(1, 2).reshape(B, L, E))  # type: ignore[no-any-return]


class TwoMasks(Encoder):
    """The second layer reads the embeddings, which are rows of the first one, under a mask of its own."""

    def forward(self, ids: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        x = self.words(ids)
        y = x + self.attend(0, self.norm(x), self.norm(x), mask)
        return (y + self.attend(1, self.norm(y), x, other))[:, 0]


class Frozen(Encoder):
    """Features without gradients, of which the mask is made, too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = torch.tanh(self.norm(x))
            keep = features[..., 0] > -0.3
        y = features + self.attend(0, features, features, keep)
        return (y * keep[..., None]).sum(1)


class Gated(Encoder):
    """A mask that is computed by a product under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            keep = (self.layers[0][0](x)[..., 0] > 0) | (torch.arange(L) == 0)  # type: ignore[index]
            y = x + self.attend(0, x, x, keep)
            return (y * keep[..., None]).sum(1)


class Drawn(Encoder):
    """A result that reads rows drawn at random."""

    def __init__(self, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x, there = self.rows(ids, mask), self.draw()
        return (x * there[..., None]).sum(1), there

    def rows(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        return x + self.attend(0, x, x, mask)


class DrawnTwice(Encoder):
    """A mask of its own in each layer, drawn alike."""

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        masks = [mask.bool() & (torch.full((B, L), 0.5).bernoulli() > 0) | (torch.arange(L) == 0) for _ in range(2)]
        return self.given(ids, masks), *masks

    def given(self, ids: Tensor, masks: list[Tensor]) -> Tensor:
        x = self.words(ids)
        for layer, keep in enumerate(masks):
            x = x + self.attend(layer, x, x, keep)
        return x[:, 0]


class Permuted(Encoder):
    """Rows whose other dimensions lie in another order, and are seen as one afterwards."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + self.attend(0, x, x, mask)
        return x.view(B, L, H, E // H).transpose(2, 3)[:, 0].transpose(1, 2).view(B, E)


class ByName(Encoder):
    """One position of each sequence, where the sequences are counted by arguments with names."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + self.attend(0, x, x, mask)
        return x[torch.arange(start=0, end=B), mask.sum(1) - 1]


def compiled(model: nn.Module, backend: str = "eager") -> Any:
    torch._dynamo.reset()
    wrapped = attn_pass.wrap(backend, choose="fused", targets=("cpu_kernel",), on_error="raise")
    return torch.compile(model, backend=wrapped, fullgraph=True)


def step(model: nn.Module, run: Any, *inputs: Tensor) -> dict[str, Tensor | None]:
    """The result of a training step and all gradients."""
    model.zero_grad()
    given = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    result = run(*given)
    result.float().square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"result": result.detach(), **{f"input {n}": x.grad for n, x in enumerate(given)}, **grads}


def test_keys_of_a_cross_attention_within_the_region_are_those_of_its_own_mask() -> None:
    other = (torch.arange(L) < torch.tensor([24, 20, 20, 20])[:, None]).long()
    model, inputs = TwoMasks(2), (IDS, MASK, other)
    with attn_pass.record() as report:
        got = step(model, compiled(model), *inputs)
    wide = copy.deepcopy(model).double()
    want = step(wide, wide, *inputs)
    assert "packed" in [region.outcome for region in report.regions]
    for name, value in got.items():
        assert (value is None) == (want[name] is None), name
        assert value is None or torch.allclose(value.double(), want[name], atol=1e-4), name  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_mask_made_without_gradients_stays_without_them(backend: str) -> None:
    torch.manual_seed(0)
    model, x = Frozen(), torch.randn(B, L, E)
    got, want = step(model, compiled(model, backend), x), step(model, model, x)
    assert {name for name, grad in got.items() if grad is None} == {name for name, grad in want.items() if grad is None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_made_under_autocast_is_made_under_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(B, L, E, dtype=dtype)
    with torch.no_grad():
        got, want = compiled(model)(x), model(x)
    assert (got.float() - want.float()).abs().max() < 0.02 * want.float().abs().max()


@pytest.mark.parametrize(
    "draw",
    [lambda: F.dropout(torch.ones(B, L), 0.5, True) > 0, lambda: torch.full((B, L), 0.5).bernoulli() > 0],
    ids=["dropout", "bernoulli"],
)
def test_rows_that_a_drawn_mask_reads_are_drawn_once(draw: Callable[[], Tensor]) -> None:
    model = Drawn(draw).eval()
    with torch.no_grad():
        got, there = compiled(model)(IDS, MASK)
        want = (model.rows(IDS, MASK) * there[..., None]).sum(1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_two_masks_that_are_drawn_alike_are_two() -> None:
    model = DrawnTwice(2).eval()
    with torch.no_grad():
        got, *masks = compiled(model)(IDS, MASK)
        assert not torch.equal(*masks)
        torch.testing.assert_close(got, model.given(IDS, masks), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [Permuted, ByName])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_results_are_eagers(model: type[Encoder], backend: str) -> None:
    encoder = model().eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(encoder, backend)(IDS, MASK), encoder(IDS, MASK), rtol=1e-4, atol=1e-5)


class Weighed(Encoder):
    """A masked mean by weights that are the mask in another type, written afterwards."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + self.attend(0, x, x, mask)
        weights = mask[..., None].float()
        self.write(weights)
        return (x * weights).sum(1) / weights.sum(1)


class Chosen(Encoder):
    """The same of a condition."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + self.attend(0, x, x, mask)
        there = mask[..., None].bool()
        there[:, -2:] = True
        return torch.where(there, x, 0.0).sum(1)


class Capped(Encoder):
    """Rows of padding of another attention, which are in the result, have scores by what the first one gave."""

    def __init__(self) -> None:
        super().__init__(2)
        self.gate = nn.Linear(E, H)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x, keep = self.words(ids), mask.bool()[:, None, None, :]
        cap = (1 + self.gate(self.attend(0, x, x, mask)).sigmoid()).transpose(1, 2)[..., None]
        q, k, v = (one(x).view(B, L, H, E // H).transpose(1, 2) for one in self.layers[1][:3])  # type: ignore[index]
        scores = cap * torch.tanh(q @ k.transpose(2, 3) / cap)
        return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v


class Apart(Encoder):
    """A copy of an attention's result, taken before that is written, and seen with its heads again."""

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids)
        q, k, v = (one(x).view(B, L, H, E // H).transpose(1, 2) for one in self.layers[0][:3])  # type: ignore[index]
        y = F.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None, :])
        flat = y.reshape(B * H, L, E // H)
        y.mul_(2)
        return flat.view(B, H, L, E // H), y


WRITTEN: dict[str, Encoder] = {
    "the last token counts": Weighed(lambda w: w[:, -1].fill_(1.0)),
    "all count a little": Weighed(lambda w: w.add_(0.1)),
    "a condition": Chosen(),
    "a cap of each row": Capped(),
    "a copy of a result": Apart(),
}


@pytest.mark.parametrize("name", list(WRITTEN))
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_is_written_or_captured_is_seen(name: str, backend: str) -> None:
    model = WRITTEN[name].eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, backend)(IDS, MASK), model(IDS, MASK), rtol=1e-4, atol=1e-5)


class Biased(Encoder):
    """T5's bias and a mask, added, after which one key is kept for everybody."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * L, H)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x, at = self.words(ids), torch.arange(L)
        numbers = torch.where(mask.bool()[:, None, None, :], 0.0, torch.finfo(torch.float32).min)
        added = self.table(at[:, None] - at[None] + L).permute(2, 0, 1)[None] + numbers
        added[..., 0] = 0.0
        parts: Any = self.layers[0]
        q, k, v = (one(x).view(B, L, H, E // H).transpose(1, 2) for one in parts[:3])
        y = (q @ k.transpose(2, 3) + added).softmax(-1) @ v
        x = x + parts[3](y.transpose(1, 2).reshape(B, L, E))
        return (x * mask[..., None]).sum(1)


def test_a_sum_that_is_written_after_its_mask_was_added() -> None:
    model, left_padding = Biased(), MASK.flip(1)
    got, want = step(model, compiled(model), IDS, left_padding), step(model, model, IDS, left_padding)
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-3, atol=1e-4, msg=name)


class Copied(Encoder):
    """The result is copied to a tensor, of which a view is read."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        room = torch.zeros(B, L + 1, E)
        room[:, 1:].copy_(self.attend(0, x, x, mask))
        return room[:, 1]


def test_what_is_copied_to_a_tensor_stays_in_an_exported_program() -> None:
    """The operator's own name for the tensor that it copies is ``input``; the one that it writes to is read."""
    model = Copied().eval()
    with torch.no_grad():
        program = torch.export.export(model, (IDS, MASK))
        options = make_options(choose="fused", targets=("cpu_kernel",), on_error="raise")
        decision = decide(program.graph_module, options, "aoti", "inductor", lambda: {})
        assert decision.changed
        program.graph_module.recompile()
        torch.testing.assert_close(program.module()(IDS, MASK), model(IDS, MASK))


def test_a_traced_graph_without_symbols() -> None:
    weights = [torch.randn(E, E) / 4 for _ in range(4)]

    def program(x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w).view(B, L, H, E // H).transpose(1, 2) for w in weights[:3])
        y = F.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None, :])
        return (x + F.linear(y.transpose(1, 2).reshape(B, L, E), weights[3]))[:, 0]

    graph, inputs = torch.fx.symbolic_trace(program), (torch.randn(B, L, E), MASK)
    with torch.no_grad():
        attn_pass.rewrite(graph, inputs, choose="fused", targets=("cpu_kernel",), on_error="raise")
        torch.testing.assert_close(graph(*inputs), program(*inputs), rtol=1e-4, atol=1e-5)
