"""Static caches as libraries write them: each is read, equals eager at every position, and no invalid key is read.

Modules that hold what matters of gpt-fast, litgpt, torchtune, ExecuTorch and x-transformers: their caches, the masks
they make and how these are indexed. The caches are full of NaN: what is read of them before it was written shows. Where
a mask is an input of the graph (a buffer, under `torch.compile`) nothing is proved of it, and the kernel looks at the
mask itself: keys that no row keeps are not computed with. Exported programs know what their constants hold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attn_pass
from attn_pass.entries.export import known_values
from attn_pass.entries.transaction import decide
from attn_pass.options import make_options

BATCH, HEADS, KV_HEADS, DIM, CACHE = 2, 4, 2, 8, 40
WIDTH = HEADS * DIM
OPTIONS: dict[str, Any] = {"choose": "fused", "targets": ("cpu_kernel",), "on_error": "raise"}


def triangle() -> Tensor:
    return torch.tril(torch.ones(CACHE, CACHE, dtype=torch.bool))


class Attention(nn.Module):
    """Projections to grouped heads, and a cache of (B, Hkv, S, D) that `update` writes at positions."""

    tokens = CACHE  # of a whole run

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.full((BATCH, KV_HEADS, CACHE, DIM), torch.nan), persistent=False)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
        return tuple(t.view(*x.shape[:2], -1, DIM).transpose(1, 2) for t in (q, k, v))  # type: ignore[return-value]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class GptFast(Attention):
    """The triangle is an attribute, and rows of it are taken by a list with new dimensions in front."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal_mask", triangle(), persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        mask = self.causal_mask[None, None, position]
        q, k, v = self.heads(x)
        self.keys[:, :, position] = k
        self.values[:, :, position] = v
        return self.attend(q, self.keys, self.values, mask)


class LitGpt(Attention):
    """A triangle of four dimensions by `index_select`, and `index_copy_` into the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask_cache", triangle()[None, None], persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        mask = torch.index_select(self.mask_cache, 2, position)
        q, k, v = self.heads(x)
        k, v = self.keys.index_copy_(2, position, k), self.values.index_copy_(2, position, v)
        return self.attend(q, k, v, mask)


class TorchTune(Attention):
    """Positions of each row of the batch take rows of the triangle; the cache counts its own position up, in place.

    Which may be the position that was given, for all that a graph says: of what is written nothing is read later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal_mask", triangle(), persistent=False)
        self.register_buffer("cache_pos", torch.arange(CACHE), persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        mask = self.causal_mask[position[None].expand(BATCH, -1), None, :].transpose(1, 2)
        q, k, v = self.heads(x)
        self.keys[:, :, self.cache_pos[: x.shape[1]]] = k
        self.values[:, :, self.cache_pos[: x.shape[1]]] = v
        self.cache_pos.add_(x.shape[1])
        return self.attend(q, self.keys, self.values, mask)


class ByArange(Attention):
    """As transformers' functions do it: the key is compared with the position, nothing is stored."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        mask = self.mask(position)
        q, k, v = self.heads(x)
        k, v = self.keys.index_copy_(2, position, k), self.values.index_copy_(2, position, v)
        return self.attend(q, k, v, mask[None, None])

    def mask(self, position: Tensor) -> Tensor:
        return torch.arange(CACHE)[None, :] <= position[:, None]


class XTransformers(Attention):
    """The scores by einsum, a padding mask of the keys, float32's lowest number, rows with nothing set to zero."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = self.keys.index_copy_(2, position, k), self.values.index_copy_(2, position, v)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        mask = (torch.arange(CACHE) <= position[-1])[None, None, None]
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * DIM**-0.5
        sim = sim.masked_fill(~mask, -torch.finfo(sim.dtype).max)
        attn = F.softmax(sim, dim=-1, dtype=torch.float32).type(sim.dtype)
        return torch.einsum("bhij,bhjd->bhid", attn, v).transpose(1, 2).flatten(2)


class Ring(Attention):
    """A window of the size of the cache, which is written at ``position % size``."""

    tokens = CACHE + 7

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (cache.index_copy_(2, position % CACHE, new) for cache, new in ((self.keys, k), (self.values, v)))
        return self.attend(q, k, v, self.mask(position))

    def mask(self, position: Tensor) -> Tensor:
        held = position[:, None] - (position[:, None] - torch.arange(CACHE)) % CACHE  # the position in each slot
        return held >= 0


class WindowOfRing(Ring):
    """The window is smaller than the buffer."""

    def mask(self, position: Tensor) -> Tensor:
        age = (position[:, None] - torch.arange(CACHE)) % CACHE
        return (age <= position[:, None]) & (age < 16)


class ExecuTorch(Attention):
    """The triangle's rows have two dimensions, for all rows of the batch and all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", triangle(), persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        mask = self.mask[position]
        self.keys[:, :, position], self.values[:, :, position] = k, v
        return self.attend(q, self.keys, self.values, mask)


class SinkBesideWindow(ByArange):
    """A neighbour: the first key is kept beside a window, so that nothing before the window may be left out."""

    def mask(self, position: Tensor) -> Tensor:
        keys, at = torch.arange(CACHE), position[:, None]
        return ((keys <= at) & (keys > at - 8)) | (keys == 0)


class LaterKey(ByArange):
    """A neighbour: the last key of the cache is kept by every row."""

    def mask(self, position: Tensor) -> Tensor:
        return (torch.arange(CACHE) <= position[:, None]) | (torch.arange(CACHE) == CACHE - 1)


class PrefixBeside(ByArange):
    """A neighbour: every row keeps a prefix of 20 keys, also before its position is that far."""

    def mask(self, position: Tensor) -> Tensor:
        return (torch.arange(CACHE) <= position[:, None]) | (torch.arange(CACHE) < 20)


class UnmaskedLater(ByArange):
    """A neighbour: the mask is made, and a key of it set afterwards."""

    def mask(self, position: Tensor) -> Tensor:
        mask = torch.arange(CACHE) <= position[:, None]
        mask[:, 30] = True
        return mask


class Turned(GptFast):
    """A neighbour: the triangle keeps one key more, the last of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.causal_mask[:, -1] = True


class Prefix(GptFast):
    """A neighbour: a prefix that every row keeps, whatever its position."""

    def __init__(self) -> None:
        super().__init__()
        self.causal_mask[:, :20] = True


@dataclass(frozen=True)
class Spelling:
    """What the kernel is told by `torch.compile`'s graph, where buffers are inputs, and by an exported one."""

    module: type[Attention]
    compiled: set[str]
    exported: set[str]
    clean: bool = False  # keys that were not written may be kept: the cache begins with zeros


SPELLINGS = {
    "gpt-fast": Spelling(GptFast, {"keep"}, {"ends"}),
    "litgpt": Spelling(LitGpt, {"keep"}, {"ends"}),
    "ExecuTorch": Spelling(ExecuTorch, {"keep"}, {"ends"}),
    "torchtune": Spelling(TorchTune, {"keep"}, {"keep"}),
    "transformers' functions": Spelling(ByArange, {"ends"}, {"ends"}),
    "x-transformers": Spelling(XTransformers, {"ends"}, {"ends"}),
    "a ring": Spelling(Ring, {"ends"}, {"ends"}),
    "a window of a ring": Spelling(WindowOfRing, {"starts", "ends", "keep"}, {"starts", "ends", "keep"}),
    "a later key": Spelling(Turned, {"keep"}, {"keep"}, clean=True),
    "a sink beside a window": Spelling(SinkBesideWindow, {"ends", "keep"}, {"ends", "keep"}),
    "a later key, by arange": Spelling(LaterKey, {"keep"}, {"keep"}, clean=True),
    "a prefix, by arange": Spelling(PrefixBeside, {"ends", "keep"}, {"ends", "keep"}, clean=True),
    "unmasked afterwards": Spelling(UnmaskedLater, {"ends", "keep"}, {"ends", "keep"}, clean=True),
    "a prefix": Spelling(Prefix, {"keep"}, {"keep"}, clean=True),
}


def steps(module: Attention) -> list[Tensor]:
    """A prompt of one token at each position, to the end of the cache, and of a ring beyond it."""
    return [torch.randn(BATCH, 1, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(module.tokens)]


def reported(gm: torch.fx.GraphModule) -> set[str]:
    """What the one call of the kernel is given by name."""
    (call,) = [n for n in gm.graph.nodes if "attn_pass.attention" in str(n.target)]
    return set(call.kwargs) - {"fully_masked"}


def wide(spelling: Spelling) -> Attention:
    """The module in float64, with a clean cache."""
    module = copy.deepcopy(spelling.module()).double()
    for cache in (module.keys, module.values):
        cache.zero_()
    return module


def compare(spelling: Spelling, run: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Every position from the first to the last, beside float64."""
    reference = wide(spelling)
    with torch.no_grad():
        for position, x in enumerate(steps(reference)):
            at = torch.tensor([position])
            torch.testing.assert_close(run(x, at).double(), reference(x.double(), at), atol=1e-5, rtol=1e-5)


def made(spelling: Spelling) -> Attention:
    module = spelling.module()
    if spelling.clean:
        for cache in (module.keys, module.values):
            cache.zero_()
    return module.eval()


@pytest.mark.parametrize("name", SPELLINGS)
def test_compiled(name: str) -> None:
    spelling, graphs = SPELLINGS[name], list[torch.fx.GraphModule]()

    def seen(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    compare(spelling, torch.compile(made(spelling), backend=attn_pass.wrap(seen, **OPTIONS), fullgraph=True))
    assert len(graphs) == 1 and reported(graphs[0]) == spelling.compiled


@pytest.mark.parametrize("name", SPELLINGS)
def test_exported(name: str) -> None:
    spelling = SPELLINGS[name]
    module = made(spelling)
    with torch.no_grad():
        program = torch.export.export(module, (steps(module)[0], torch.tensor([0])))
    options = make_options(**OPTIONS)
    decision = decide(program.graph_module, options, "aoti", "inductor", lambda: known_values(program, options))
    assert decision.changed
    program.graph_module.recompile()
    state = {**program.state_dict, **program.constants}

    def run(x: Tensor, at: Tensor) -> Tensor:
        given = [state.get(s.target) for s in program.graph_signature.input_specs]
        inputs = iter((x, at))
        return program.graph_module(*(next(inputs) if t is None else t for t in given))[-1]

    assert reported(program.graph_module) == spelling.exported
    compare(spelling, run)


def test_sliding_layers_beside_full_ones() -> None:
    """transformers counts the tokens of a sliding layer in Python as well: their masks follow from sizes."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 50, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    window = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}
    config = transformers.Qwen2Config(**sizes, **heads, **window)
    assert config.layer_types == ["full_attention", "sliding_attention"]
    model, graphs = transformers.Qwen2ForCausalLM(config).eval(), list[torch.fx.GraphModule]()

    def seen(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm)
        return gm

    def step(ids: Tensor, cache: object) -> Tensor:
        return model(ids, past_key_values=cache, use_cache=True).logits[:, -1]  # type: ignore[no-any-return]

    def tokens(run: Callable[[Tensor, object], Tensor]) -> tuple[list[int], Tensor]:
        cache, made = transformers.StaticCache(config=config, max_cache_len=64), list[int]()
        logits = model(torch.arange(9)[None], past_key_values=cache, use_cache=True).logits[:, -1]
        for _ in range(9):  # past the window
            made.append(int(logits.argmax()))
            logits = run(torch.tensor([[made[-1]]]), cache)
        return made, logits

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=attn_pass.wrap(seen, **OPTIONS), fullgraph=True)
    with torch.no_grad():
        (wanted, scores), (got, same_scores) = tokens(step), tokens(compiled)
    torch.testing.assert_close(same_scores, scores, atol=1e-5, rtol=1e-5)
    assert got == wanted
    for gm in graphs:
        full, sliding = [set(n.kwargs) for n in gm.graph.nodes if "attn_pass.attention" in str(n.target)]
        assert "ends" in full and not {"keep", "bias"} & (full | sliding)
