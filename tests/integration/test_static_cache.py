"""A decode step of transformers over a static cache: the valid keys are read, whatever the position."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import attn_pass

transformers = pytest.importorskip("transformers")

CACHE, PROMPT = 64, 9


def llama(form: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        attn_implementation=form,
    )
    return transformers.LlamaForCausalLM(config).eval()  # type: ignore[no-any-return]


def tokens(step: Callable[..., torch.Tensor], model: torch.nn.Module, count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after a prompt, and the last scores."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=CACHE)
    made, ids = [], torch.arange(PROMPT)[None] % 50
    logits = model(ids, past_key_values=cache, use_cache=True).logits[:, -1]
    for _ in range(count):
        made.append(int(logits.argmax()))
        logits = step(torch.tensor([[made[-1]]]), cache)
    return made, logits


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_a_decode_step_reads_what_is_valid(form: str) -> None:
    model = llama(form)
    graphs: list[torch.fx.GraphModule] = []

    def seen(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(gm)
        return gm

    def step(ids: torch.Tensor, cache: object) -> torch.Tensor:
        return model(ids, past_key_values=cache, use_cache=True).logits[:, -1]  # type: ignore[no-any-return]

    torch._dynamo.reset()
    backend = attn_pass.wrap(seen, choose="fused", targets=("cpu_kernel",), on_error="raise")
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with torch.no_grad():
        wanted, scores = tokens(step, model, 6)
        got, same_scores = tokens(compiled, model, 6)
    torch.testing.assert_close(same_scores, scores, atol=1e-5, rtol=1e-5)
    assert got == wanted and len(graphs) == 1, "one graph for every position"
    calls = [n for n in graphs[0].graph.nodes if "attn_pass.attention" in str(n.target)]
    assert len(calls) == 2 and all("ends" in n.kwargs and "bias" not in n.kwargs for n in calls)
