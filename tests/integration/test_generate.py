"""transformers' generate() with attn_pass as its compiler: eager's tokens, and no compile once it is warm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attn_pass
from attn_pass.targets import looking

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 12}
TWO = {"num_hidden_layers": 2}
HYBRID = {**WINDOW, **TWO, "layer_types": ["sliding_attention", "full_attention"]}
PROMPT, CACHE, TOKENS = torch.arange(9)[None], 64, 10  # the window is full after three tokens


def model_of(name: str, form: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    kind = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = kind._from_config(config, attn_implementation=form).eval()
    for name, weights in model.named_parameters():  # as drawn, all scores are nearly equal
        if any(part in name for part in ("q_proj", "k_proj", "embed")):
            weights.data.mul_(5)
    return model


def counted(graphs: list[torch.fx.GraphModule]) -> attn_pass.entries.dynamo.Wrapped:
    def seen(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm)
        return gm

    return attn_pass.wrap(seen, choose="fused", targets=("cpu_kernel",), on_error="raise")


def compiles_of(run: Callable[[], torch.Tensor], graphs: list[torch.fx.GraphModule], wanted: torch.Tensor) -> list[int]:
    """Of two runs, each of which must have eager's tokens."""
    collected = []
    for _ in range(2):
        before = len(graphs)
        assert torch.equal(run(), wanted)
        collected.append(len(graphs) - before)
    return collected


STATIC = {"cache_implementation": "static", "max_cache_len": CACHE}


# A window's cache has three graphs: not yet full, becoming full with this token, full.
@pytest.mark.parametrize(
    ("name", "form", "more", "graphs_wanted"),
    [
        ("Llama", "sdpa", {}, 1),
        ("Llama", "eager", {}, 1),
        ("Mistral", "sdpa", WINDOW, 3),
        ("Gemma2", "eager", WINDOW, 3),
        ("Gemma3Text", "sdpa", HYBRID, 3),
    ],
)
def test_a_static_cache_by_a_compile_config(name: str, form: str, more: dict[str, Any], graphs_wanted: int) -> None:
    torch._dynamo.reset()
    model, graphs = model_of(name, form, **more), []  # type: ignore[var-annotated]
    given = {"max_new_tokens": TOKENS, "do_sample": False, **STATIC}
    wanted = model.generate(PROMPT, **given)
    config = transformers.CompileConfig(backend=counted(graphs), mode=None, fullgraph=True)
    config._compile_all_devices = True  # CPUs as well
    compiles = compiles_of(lambda: model.generate(PROMPT, compile_config=config, **given), graphs, wanted)
    assert compiles == [graphs_wanted, 0]
    calls = [n for gm in graphs for n in gm.graph.nodes if "attn_pass.attention" in str(n.target)]
    assert len(calls) == model.config.num_hidden_layers * graphs_wanted


@pytest.mark.parametrize(
    ("name", "form", "more", "cache", "graphs_wanted"),
    [
        ("Llama", "eager", {}, STATIC, 2),
        ("Llama", "eager", {}, {}, 3),
        ("Llama", "sdpa", {}, {}, 3),
        ("Mistral", "eager", WINDOW, STATIC, 3),
        ("Gemma3Text", "sdpa", HYBRID, STATIC, 3),
        ("Mistral", "eager", WINDOW, {}, 4),
        ("Mistral", "sdpa", WINDOW, {}, 5),
    ],
)
def test_a_compiled_forward(
    name: str, form: str, more: dict[str, Any], cache: dict[str, Any], graphs_wanted: int
) -> None:
    """One graph is the prompt's; a dynamic cache has one for the first token and one for any length."""
    torch._dynamo.reset()
    model, graphs = model_of(name, form, **more), []  # type: ignore[var-annotated]
    given = {"max_new_tokens": TOKENS, "do_sample": False, **cache}
    wanted = model.generate(PROMPT, **given)
    model.forward = torch.compile(model.forward, backend=counted(graphs))
    assert compiles_of(lambda: model.generate(PROMPT, **given), graphs, wanted) == [graphs_wanted, 0]
    calls = [n for gm in graphs for n in gm.graph.nodes if "attn_pass.attention" in str(n.target)]
    assert len(calls) == model.config.num_hidden_layers * graphs_wanted


@pytest.mark.parametrize(("name", "more", "masks"), [("Llama", TWO, 1), ("Gemma3Text", HYBRID, 2)])
def test_on_a_gpu_the_range_is_looked_up_once_for_all_layers_of_a_kind(
    monkeypatch: pytest.MonkeyPatch, name: str, more: dict[str, Any], masks: int
) -> None:
    """By what the operator is on a CPU, as if looking cost nothing: the model is small."""
    monkeypatch.setattr(looking, "pays", lambda *_: True)
    torch._dynamo.reset()
    model, graphs = model_of(name, "sdpa", **more).bfloat16(), []  # type: ignore[var-annotated]

    def seen(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm)
        return gm

    given = {"max_new_tokens": TOKENS, "do_sample": False, **STATIC}
    wanted = model.generate(PROMPT, **given)
    backend = attn_pass.wrap(seen, choose="fused", targets=("decode",), device="H200", on_error="raise")
    config = transformers.CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    assert torch.equal(model.generate(PROMPT, compile_config=config, **given), wanted)
    for gm in graphs:
        calls = [n for n in gm.graph.nodes if "attn_pass.decode" in str(n.target)]
        lengths, starts = zip(*(n.args[7:9] for n in calls))
        assert len(calls) == 2 and None not in (*lengths, *starts) and len(set(lengths)) == masks
