"""Parameters in one buffer: the program reads them as one tensor, and everybody else as the parameters they were."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from projected import B, E, L, Projected, compiled
from torch import Tensor, nn

import attn_pass
from attn_pass.compat import TORCH_VERSION
from attn_pass.errors import RewriteError
from attn_pass.projections.layout import Joined, lie_together, refusal
from attn_pass.report.projection import ProjectionReport


class Two(nn.Module):
    """Two layers, and a head."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Projected((bias, bias, bias)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def records(report: attn_pass.Report) -> list[ProjectionReport]:
    return [r for r in report.projections if r.outcome == "joined"]


def together(model: Two) -> bool:
    """Whether the layers' parameters lie in one buffer each."""
    return all(
        lie_together([getattr(layer, name).get_parameter(what) for name in "qkv"])
        for layer in model.layers
        for what in ("weight", "bias")
    )


@pytest.fixture
def model() -> Two:
    return Two().eval()


def test_parameters_stay_what_they_were(model: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    before, objects = copy.deepcopy(model.state_dict()), list(model.parameters())
    run, x = compiled(model, monkeypatch), torch.randn(B, L, E)
    with torch.no_grad(), attn_pass.record() as report:
        torch.testing.assert_close(run(x), model(x))
    (record,) = records(report)
    assert record.groups == 2 and together(model)
    assert all(a is b for a, b in zip(objects, model.parameters()))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def _step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value + 0.25 for name, value in model.state_dict().items()})


def _assign(model: nn.Module) -> None:
    model.load_state_dict({name: value + 0.25 for name, value in model.state_dict().items()}, assign=True)


def _in_place(model: Any) -> None:
    model.layers[0].k.weight.data.copy_(torch.randn(E, E) / E**0.5)
    with torch.no_grad():
        model.layers[1].v.bias.add_(1.0)


def _one_other(model: Any) -> None:
    model.layers[0].k.weight.data = torch.randn(E, E) / E**0.5


def _others(model: Any) -> None:
    for layer in model.layers:
        _others_of(layer)


def _others_of(layer: Projected) -> None:
    for one in (layer.q, layer.k, layer.v):
        one.weight.data, one.bias.data = torch.randn(E, E) / E**0.5, torch.randn(E)


def _one_shared(model: Any) -> None:
    model.layers[0].k.weight.data = model.layers[1].k.weight.data


@pytest.mark.parametrize("change", [_step, _load, _assign, _in_place, _one_other, _others, _one_shared])
def test_what_becomes_of_parameters_is_seen(
    change: Callable[[Any], None], model: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written after that, too: nothing that was copied is used twice."""
    run, x = compiled(model, monkeypatch), torch.randn(B, L, E)
    with torch.no_grad():
        run(x)
        for _ in range(2):
            change(model)
            for _ in range(2):
                torch.testing.assert_close(run(x), model(x))
        with torch.no_grad():
            model.layers[0].k.weight.mul_(2.0)
            model.layers[0].k.weight.data.add_(1.0)
        torch.testing.assert_close(run(x), model(x))


def test_memory_is_laid_out_again(model: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    run, x = compiled(model, monkeypatch), torch.randn(B, L, E)
    with torch.no_grad():
        run(x)
        _one_other(model)
        assert not together(model)
        torch.testing.assert_close(run(x), model(x))
        assert together(model)


def test_copies_are_models_of_their_own(model: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    run, x = compiled(model, monkeypatch), torch.randn(B, L, E)
    with torch.no_grad():
        wanted = run(x)
        other = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        fresh = Two().eval()
        fresh.load_state_dict(model.state_dict())
        _in_place(model)
        for each in (other, loaded, fresh):
            torch.testing.assert_close(each(x), wanted)
        torch.testing.assert_close(run(x), model(x))


def test_two_programs_share_one_buffer(model: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = compiled(model, monkeypatch), torch.randn(3, L + 2, E)
    with torch.no_grad():
        run(torch.randn(B, L, E))
        where = model.layers[0].q.weight.data_ptr()
        torch.testing.assert_close(run(other), model(other))
        _one_other(model)
        torch.testing.assert_close(run(other), model(other))
        x = torch.randn(B, L, E)
        torch.testing.assert_close(run(x), model(x))
    assert together(model) and where


def test_one_program_for_several_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in one buffer is not looked at again in turn, and memory that nobody has any more is let go."""
    from attn_pass.projections import layout

    layers, x = [Projected().eval() for _ in range(3)], torch.randn(B, L, E)
    joined: list[Joined] = []
    join = layout.Joined._laid_out

    def laid_out(self: Joined, parameters: Any) -> Tensor:
        joined.append(self)
        return join(self, parameters)

    monkeypatch.setattr(layout.Joined, "_laid_out", laid_out)
    run = [compiled(layers[0], monkeypatch)]
    own = {"choose": "fused", "join_projections": "parameters", "on_error": "raise"}
    run += [torch.compile(layer, backend=attn_pass.backend, options=own, fullgraph=True) for layer in layers[1:]]
    with torch.no_grad():
        for _ in range(3):
            for layer, each in zip(layers, run):
                torch.testing.assert_close(each(x), layer(x))
        assert len(joined) == 2 * len(layers)  # weights and biases
        for _ in range(3):
            _others_of(layers[0])
            torch.testing.assert_close(run[0](x), layers[0](x))


def test_memory_that_others_have_now() -> None:
    """Parameters lie where those of another layer lay before, which were moved as a whole."""
    joined = Joined([torch.Size((1024, 1024))] * 2)
    with torch.no_grad():
        for _ in range(5):
            first = [nn.Parameter(torch.randn(1024, 1024)) for _ in range(2)]
            joined(first)
            nn.ParameterList(first).share_memory()
            second = [nn.Parameter(rows) for rows in torch.randn(2048, 1024).split(1024)]
            for parameters in (second, first):
                assert torch.equal(joined(parameters), torch.cat(list(parameters)))


def test_parameters_can_be_swapped() -> None:
    """`torch.utils.swap_tensors` refuses what someone has a weak reference to."""
    parameters = [nn.Parameter(torch.randn(E, E)) for _ in range(2)]
    joined = Joined([each.shape for each in parameters])
    with torch.no_grad():
        joined(parameters)
        torch.utils.swap_tensors(parameters[0], nn.Parameter(torch.randn(E, E)))
        assert torch.equal(joined(parameters), torch.cat(parameters)) and lie_together(parameters)


def test_memory_of_a_compiled_model_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.projections import layout

    joined: list[weakref.ref[Tensor]] = []
    join = layout.Joined.plain

    def plain(self: Joined, parameters: Any) -> Tensor:
        memory = join(self, parameters)
        joined.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(layout.Joined, "plain", plain)
    model = Two().eval()
    run = compiled(model, monkeypatch)
    with torch.no_grad():
        run(torch.randn(B, L, E))
        assert together(model)
    del model, run
    gc.collect()
    assert joined and all(memory() is None for memory in joined)


def test_a_parameter_that_is_transposed_where_it_lies() -> None:
    parameters = [nn.Parameter(torch.randn(16, 16)) for _ in range(2)]
    joined = Joined([each.shape for each in parameters])
    with torch.no_grad():
        joined(parameters)
        parameters[0].data = parameters[0].data.t()
        torch.testing.assert_close(joined(parameters), torch.cat(parameters))


def test_autocast_around_the_program_is_not_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under which torch.cat refuses the other type of half precision."""

    class Inside(Projected):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    model, x = Inside().half().eval(), torch.randn(B, L, E, dtype=torch.half)
    run = compiled(model, monkeypatch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(x), model(x), rtol=1e-2, atol=1e-2)
    assert lie_together([layer.weight for layer in (model.q, model.k, model.v)])


class Narrow(Projected):
    """Heads of the first features of each, however many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(E // 2, E)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(*(t[..., : E // 2] for t in (q, k, v)))


def test_parameters_that_have_other_sizes_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they have in a model that is pruned: the sum is the same, and each layer has its own rows."""
    model, x = Narrow().eval(), torch.randn(B, L, E)
    run = compiled(model, monkeypatch)
    with torch.no_grad(), attn_pass.record() as report:
        torch.testing.assert_close(run(x), model(x))
        sizes = [E + E // 2, E // 2, E]
        for layer, size in zip((model.q, model.k, model.v), sizes):
            layer.weight.data, layer.bias.data = torch.randn(size, E), torch.randn(size)
        wanted = model(x)
        if TORCH_VERSION < (2, 13):  # Dynamo does not see it
            with pytest.raises(RewriteError, match="compiled for"):
                run(x)
            return
        torch.testing.assert_close(run(x), wanted)
    assert [r.widths for r in records(report)] == [(E, E, E), tuple(sizes)]
    assert [len(layer.weight) for layer in (model.q, model.k, model.v)] == sizes


def test_sizes_that_were_not_compiled_for_are_an_error() -> None:
    run = Joined([torch.Size((4, 2)), torch.Size((6, 2))])
    assert run([torch.ones(4, 2), torch.zeros(6, 2)]).sum() == 8
    with pytest.raises(RewriteError, match=r"sizes \(6, 2\), \(4, 2\), and the program was compiled for \(4, 2\)"):
        run([torch.ones(6, 2), torch.zeros(4, 2)])


def test_a_parameter_that_is_cut_where_it_lies_is_an_error() -> None:
    first, second = nn.Parameter(torch.ones(E, E)), nn.Parameter(torch.zeros(E, E))
    run = Joined([first.shape, second.shape])
    with torch.no_grad():
        run([first, second])
        assert lie_together([first, second])
        first.data = first.data[:3]
        with pytest.raises(RewriteError, match="compiled for"):
            run([first, second])


def test_twenty_steps_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are those of a model that is trained in eager mode."""
    torch.manual_seed(0)
    model = Two().train()
    eager = copy.deepcopy(model)
    run = compiled(model, monkeypatch)
    with attn_pass.record() as report:
        for trained, forward in ((model, run), (eager, eager)):
            torch.manual_seed(1)
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
            for _ in range(20):
                x = torch.randn(B, L, E)
                loss = (forward(x) - x.flip(1)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert len(records(report)) == 1 and together(model)
    for (name, got), wanted in zip(model.named_parameters(), eager.parameters()):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4, msg=name)


def test_gradients_accumulate(model: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, x = copy.deepcopy(model), torch.randn(B, L, E)
    run = compiled(model, monkeypatch)
    for _ in range(2):
        run(x).sum().backward()
        eager(x).sum().backward()
    for (name, got), wanted in zip(model.named_parameters(), eager.parameters()):
        assert got.grad is not None and wanted.grad is not None
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-4, atol=1e-4, msg=name)
    model.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_parameter_that_is_written_before_the_backward(model: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's own check stays: eager refuses this as well."""
    run, x = compiled(model, monkeypatch), torch.randn(B, L, E)
    for name in "qkv":
        loss = run(x).sum()
        with torch.no_grad():
            getattr(model.layers[1], name).weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_inference_mode_and_gradients_in_turn(model: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    run, x = compiled(model, monkeypatch), torch.randn(B, L, E)
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(run(x), model(x))
        run(x).sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))


def _hooked(parameters: list[nn.Parameter]) -> None:
    parameters[0].register_hook(lambda gradient: None)


def _hooked_after(parameters: list[nn.Parameter]) -> None:
    parameters[1].register_post_accumulate_grad_hook(lambda parameter: None)


HELD: list[Tensor] = []


def _held(parameters: list[nn.Parameter]) -> None:
    HELD.append(parameters[2].detach())


def _shared(parameters: list[nn.Parameter]) -> None:
    parameters[0].data.share_memory_()


def _of_numpy(parameters: list[nn.Parameter]) -> None:
    parameters[0].data = torch.from_numpy(parameters[0].detach().numpy().copy())


def _part(parameters: list[nn.Parameter]) -> None:
    parameters[1].data = torch.randn(2 * E, E)[:E]


def _turned(parameters: list[nn.Parameter]) -> None:
    parameters[1].data = torch.randn(E, E).t()


MEMORY = (
    "the memory of a weight or a bias is shared, mapped from a file, or held by something else (FSDP, another process, "
    "numpy)"
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hooked, "a weight or a bias has hooks"),
        (_hooked_after, "a weight or a bias has hooks"),
        (_held, MEMORY),
        (_shared, MEMORY),
        (_of_numpy, MEMORY),
        (_part, MEMORY),
        (_turned, "a weight or a bias is not contiguous, or its size is not a multiple of 64 bytes"),
    ],
)
def test_what_keeps_memory_where_it_is(change: Callable[[Any], None], reason: str) -> None:
    parameters = [nn.Parameter(torch.randn(E, E)) for _ in range(3)]
    assert refusal(parameters) == ""
    change(parameters)
    where = [p.data_ptr() for p in parameters]
    assert refusal(parameters) == reason
    joined = Joined([each.shape for each in parameters]).plain(parameters)
    assert torch.equal(joined, torch.cat(parameters)) and where == [p.data_ptr() for p in parameters]
    HELD.clear()


def test_a_subclass_keeps_its_memory() -> None:
    class Own(nn.Parameter):
        pass

    assert (
        refusal([nn.Parameter(torch.randn(E, E)), Own(torch.randn(E, E))])
        == "a weight or a bias is not a plain parameter"
    )


def test_some_layers_have_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Projected((True, False, True)).eval(), torch.randn(B, L, E)
    run = compiled(model, monkeypatch)
    with torch.no_grad(), attn_pass.record() as report:
        torch.testing.assert_close(run(x), model(x))
    assert [r.reason for r in report.projections] == [
        "some of its layers have no bias, and biases would be joined at every call"
    ]


@pytest.mark.slow
def test_inductor_compiles_it(model: Two) -> None:
    torch._dynamo.reset()
    own = {"choose": "fused", "join_projections": "parameters", "on_error": "raise"}
    run = torch.compile(model, backend=attn_pass.backend, options=own)
    x = torch.randn(B, L, E)
    with torch.no_grad(), attn_pass.record() as report:
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x))
            _step(model)
    assert len(records(report)) == 1 and together(model)


def test_a_compiler_that_fails_gets_layers_apart(model: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends.debugging import aot_eager

    from attn_pass.entries import dynamo

    def failing(patches: Any, gm: Any, inputs: Any, report: Any) -> Any:
        if report is not None and records(report):
            raise RuntimeError("no such product")
        return aot_eager(gm, inputs)

    run, x = compiled(model, monkeypatch, on_error="warn"), torch.randn(B, L, E)
    monkeypatch.setattr(dynamo, "compile_under", failing)
    with (
        torch.no_grad(),
        attn_pass.record() as report,
        pytest.warns(attn_pass.AttnPassWarning, match="joined projections"),
    ):
        torch.testing.assert_close(run(x), model(x))
    assert report.rewritten and not records(report) and not together(model)
    assert all("the compiler could not lower a graph with them (" in r.reason for r in report.projections)
