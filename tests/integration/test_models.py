"""Small real architectures with random weights: every site rewritten, equal to eager, in each mode a user has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import attn_pass

transformers = pytest.importorskip("transformers")
Built = tuple[nn.Module, dict[str, torch.Tensor], int]


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 90, (batch, length), generator=torch.Generator().manual_seed(1))


def gpt2(layers: int = 2) -> Built:
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=layers,
        n_head=4,
        vocab_size=100,
        n_positions=64,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.GPT2Model(config), {"input_ids": _tokens(2, 12)}, layers


def bert(layers: int = 2) -> Built:
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=32,
        vocab_size=100,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        attn_implementation="eager",
    )
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    return transformers.BertModel(config), {"input_ids": _tokens(2, 12), "attention_mask": mask}, layers


def llama(layers: int = 2) -> Built:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=100,
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.LlamaModel(config), {"input_ids": _tokens(2, 12)}, layers


def t5(layers: int = 1) -> Built:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        num_heads=4,
        num_layers=layers,
        d_ff=32,
        vocab_size=100,
        dropout_rate=0.0,
        use_cache=False,
        attn_implementation="eager",
    )
    return transformers.T5Model(config), {"input_ids": _tokens(2, 12), "decoder_input_ids": _tokens(2, 7)}, 3 * layers


def swin(layers: int = 1) -> Built:
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2 * layers],
        num_heads=[2],
        window_size=4,
        attn_implementation="eager",
        drop_path_rate=0.0,
    )
    return transformers.SwinModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}, 2 * layers


MODELS: dict[str, Callable[..., Built]] = {"gpt2": gpt2, "bert": bert, "llama": llama, "t5": t5, "swin": swin}


def build(name: str, **layers: int) -> Built:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return MODELS[name](**layers)


def first(output: Any) -> torch.Tensor:
    return output[0]


def wrapped(inner: str = "aot_eager_default_partitioner", **options: Any) -> Any:
    return attn_pass.wrap(inner, choose="fused", on_error="raise", **options)


@pytest.mark.parametrize("name", list(MODELS))
def test_inference(name: str) -> None:
    _infers(*build(name), wrapped(), dynamic=False)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])  # in Swin Dynamo specialises the window partition
def test_inference_with_dynamic_sizes(name: str) -> None:
    """One layer, and AOTAutograd for one model: tracing symbols takes four times as long."""
    _infers(*build(name, layers=1), wrapped() if name == "gpt2" else wrapped("eager"), dynamic=True)


def _infers(model: nn.Module, inputs: dict[str, torch.Tensor], sites: int, backend: Any, *, dynamic: bool) -> None:
    model.eval()
    with torch.no_grad(), attn_pass.record() as report:
        want = first(model(**inputs))
        got = first(torch.compile(model, backend=backend, dynamic=dynamic)(**inputs))
    assert [s.outcome for s in report.sites] == ["rewritten"] * sites, str(report)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", list(MODELS))
def test_training_without_dropout(name: str) -> None:
    model, inputs, sites = build(name)
    model.train()

    def gradients(run: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        first(run(**inputs)).sin().sum().backward()
        # torch.compile gives zeros where eager gives no gradient (BERT's unused pooler).
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}

    want = gradients(model)
    with attn_pass.record() as report:
        got = gradients(torch.compile(model, backend=wrapped()))
    assert len(report.sites) == sites
    assert all(s.outcome == "rewritten" or "needs a gradient" in s.reason for s in report.sites), str(report)
    for parameter, gradient in want.items():
        torch.testing.assert_close(got[parameter], gradient, atol=2e-4, rtol=2e-4, msg=parameter)


def test_training_on_padded_batches_is_rewritten_on_the_user_s_word() -> None:
    model, inputs, sites = build("bert")
    model.train()
    with attn_pass.record() as report:
        run = torch.compile(model, backend=wrapped(assume_nonempty_rows=True))
        first(run(**inputs)).sin().sum().backward()
    assert [s.outcome for s in report.sites] == ["rewritten"] * sites
    assert all("no row is fully masked" in s.assumptions for s in report.sites)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])
def test_exported_programs(name: str) -> None:
    """As exported, and decomposed."""
    model, inputs, sites = build(name)
    model.eval()
    with torch.no_grad():
        want = first(model(**inputs))
        exported = torch.export.export(model, (), inputs, strict=False)
        for program in (exported.run_decompositions(), exported):
            report = attn_pass.rewrite(program, choose="fused", on_error="raise")
            got = first(program.module()(**inputs))
            assert [s.outcome for s in report.sites] == ["rewritten"] * sites, str(report)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(dtype: torch.dtype) -> None:
    model, inputs, sites = build("llama", layers=1)
    model.eval()
    with torch.no_grad(), attn_pass.record() as report:
        exact = first(model.double()(**inputs))
        model.to(dtype)
        eager = first(model(**inputs))
        got = first(torch.compile(model, backend=wrapped())(**inputs))
    assert len(report.rewritten) == sites
    error = (eager.double() - exact).abs().max()
    assert (got.double() - exact).abs().max() <= 2 * error
