"""Threads, processes, copies: two threads compile at once, workers are forked, options and reports are pickled."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from against_eager import qkv
from torch._inductor import config

import attn_pass
from attn_pass.compat import TORCH_VERSION
from attn_pass.options import Options

Tensor = torch.Tensor


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


per_thread = pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="torch keeps its configuration for all threads at once")


@per_thread
def test_two_threads_compile_at_once() -> None:
    torch._dynamo.reset()
    gate, results, failed = threading.Barrier(2), {}, []

    def work(length: int) -> None:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT * 0.3).softmax(-1) @ v

        try:
            inputs = qkv(2, 3, length, length, 8)
            gate.wait()
            with attn_pass.record() as report:
                result = torch.compile(attend, backend=attn_pass.wrap("aot_eager", choose="fused"), dynamic=False)(
                    *inputs
                )
            torch.testing.assert_close(result, attend(*inputs))
            results[length] = [s.shapes["query"][2] for s in report.sites]
        except BaseException as error:  # an assertion in a thread would be lost
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (9, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert results == {9: [9], 12: [12]}


class _Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Tensor:
        return torch.full((3, 9, 8), float(number))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_data_loader_forks_after_a_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend=attn_pass.wrap("aot_eager", choose="fused"))
    compiled(*qkv(2, 3, 9, 9, 8))
    loader = torch.utils.data.DataLoader(_Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    with attn_pass.record() as report:
        for batch in loader:
            three = batch, batch.clone(), batch.clone()
            torch.testing.assert_close(compiled(*three), plain(*three))
    assert not report.sites  # compiled already


def test_options_and_reports_travel() -> None:
    options = Options(choose="fused", rules=(("*attn", ("sdpa",)),), targets=("sdpa",))
    assert pickle.loads(pickle.dumps(options)) == options == copy.deepcopy(options)
    assert hash(pickle.loads(pickle.dumps(options))) == hash(options)
    torch._dynamo.reset()
    with attn_pass.record() as report:
        torch.compile(plain, backend=attn_pass.wrap("aot_eager", choose="fused"))(*qkv(2, 3, 9, 9, 8))
    for other in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert other.to_json() == report.to_json() and str(other) == str(report)
    wrapped = attn_pass.wrap("aot_eager", choose="fused")
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped


# ---------------------------------------------------------------- nothing global changes


def _state() -> dict[str, Any]:
    return {
        "inductor": config.save_config_portable(),
        "dynamo": torch._dynamo.config.save_config_portable(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "random": torch.get_rng_state().tolist(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _raises(*_: Any) -> Any:
    raise RuntimeError("put in on purpose")


@pytest.mark.parametrize("how", ["returns", "raises", "fails to compile", "is nested", "is interrupted"])
def test_enabled_leaves_nothing_behind(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass import engine

    torch._dynamo.reset()
    inputs = qkv(2, 3, 9, 9, 8)
    before = _state()
    if how == "fails to compile":
        monkeypatch.setattr(engine, "rewrite_graph", _raises)
    error = KeyboardInterrupt if how == "is interrupted" else RuntimeError
    try:
        with attn_pass.enabled(choose="fused"):
            if how == "is nested":
                with attn_pass.enabled(choose="cheapest"):
                    pass
            elif how in ("raises", "is interrupted"):
                raise error("from inside")
            else:
                with pytest.warns() if how == "fails to compile" else attn_pass.record():
                    torch.compile(plain)(*inputs)
    except error as raised:
        assert "from inside" in str(raised)
    assert _state() == before


@per_thread
def test_the_configuration_is_this_threads_own() -> None:
    """Inductor's configuration is per thread (torch 2.13): what compiles in another thread is not rewritten."""
    torch._dynamo.reset()
    seen: list[int] = []

    def other() -> None:
        with attn_pass.record() as report:
            torch.compile(plain)(*qkv(1, 1, 5, 5, 4))
        seen.append(len(report.sites))

    with attn_pass.enabled(choose="fused"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [0]
