"""Devices as plain numbers: the one here, and those of the catalogue that are not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import attn_pass
from attn_pass.compat import active_flash
from attn_pass.devices import registry
from attn_pass.devices.cpu.facts import cpu
from attn_pass.devices.cuda import facts as cuda_facts
from attn_pass.devices.device import Device
from attn_pass.devices.npu import facts as npu_facts
from attn_pass.devices.npu import generations
from attn_pass.devices.registry import device_for


def test_the_cpu_has_as_many_cores_as_torch_uses_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = cpu()
        assert one.cores == 1 and one.matmul(torch.float32) == one.matmul_gflops[torch.float32]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", registry.names())
def test_a_device_of_the_catalogue_is_decided_for_without_being_here(name: str) -> None:
    device = device_for(torch.device("cpu"), name.upper())
    assert not device.is_here and device.name == name  # as the field writes it
    assert device.matmul(torch.bfloat16) > device.matmul(torch.float32) > 0
    assert device.memory_gbytes > 100 and device.cores > 0


def test_rates_of_newer_gpus_are_higher() -> None:
    l4, a100, h200, b200 = (registry.by_name(n) for n in ("L4", "A100", "H200", "B200"))
    assert l4.memory_gbytes < a100.memory_gbytes < h200.memory_gbytes < b200.memory_gbytes
    assert [d.capability for d in (a100, l4, h200, b200)] == [(8, 0), (8, 9), (9, 0), (10, 0)]


class Properties(SimpleNamespace):
    """A GPU as torch describes one; nothing runs on it."""


Gpu = Callable[..., Device]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The device for a GPU that torch describes so, by properties that torch's own class has."""
    named = set(torch._C._CudaDeviceProperties.__dict__) if hasattr(torch._C, "_CudaDeviceProperties") else None

    def here(name: str, capability: tuple[int, int], cores: int, **more: int) -> Device:
        properties = dict(name=name, major=capability[0], minor=capability[1], multi_processor_count=cores, **more)
        assert named is None or set(properties) <= named
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: Properties(**properties))
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        return device_for(torch.device("cuda"))

    return here


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_names_are_whole_words(name: str, row: str | None) -> None:
    device = cuda_facts._named(name)
    assert (None if device is None else device.name) == row


def test_a_gpu_the_catalogue_lacks_is_like_one_of_its_kind(gpu: Gpu) -> None:
    """Its arithmetic at half the rate of a multiprocessor of that kind, and its memory as its properties say."""
    ada = registry.by_name("L4")
    l40s = gpu("NVIDIA L40S", (8, 9), 142, memory_clock_rate=9001000, memory_bus_width=384, L2_cache_size=96 << 20)
    assert (l40s.cores, l40s.cache_bytes, l40s.capability) == (142, 96 << 20, (8, 9))
    assert l40s.memory_gbytes == pytest.approx(0.9 * 864, rel=0.01)
    assert l40s.matmul(torch.bfloat16) == pytest.approx(ada.matmul(torch.bfloat16) * 142 / 58 / 2)
    a1000 = gpu("NVIDIA RTX A1000", (8, 6), 18, memory_clock_rate=6001000, memory_bus_width=128)
    assert a1000.memory_gbytes == pytest.approx(0.9 * 192, rel=0.01) and a1000.matmul(torch.bfloat16) < 30e3
    assert gpu("Some Hopper", (9, 0), 66).memory_gbytes == registry.by_name("H100").memory_gbytes / 2


def test_workstation_blackwells_are_like_ada_and_not_like_b200(gpu: Gpu) -> None:
    """cuDNN is slower than flash there: 0.88 of it on an RTX PRO 6000 (transformers PR #48163)."""
    pro = gpu("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188)
    assert pro.shares == registry.by_name("L4").shares and pro.capability == (12, 0)
    assert pro.shares["flash"].prefill > pro.shares["cudnn"].prefill
    assert gpu("NVIDIA GB300", (10, 3), 152).shares == registry.by_name("B200").shares


def test_a_part_of_a_gpu_has_its_share_of_the_memory(gpu: Gpu) -> None:
    whole = {"memory_clock_rate": 2619000, "memory_bus_width": 5120}
    h100 = gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, **whole)
    assert h100.memory_gbytes == pytest.approx(3000, rel=0.01)
    part = gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 16, **whole)
    assert part.memory_gbytes == pytest.approx(3000 * 16 / 132, rel=0.01)
    assert part.matmul(torch.bfloat16) == pytest.approx(h100.matmul(torch.bfloat16) * 16 / 132)


@pytest.fixture
def hopper(gpu: Gpu) -> None:
    """An H200 is here."""
    gpu("NVIDIA H200", (9, 0), 132)


@pytest.mark.usefixtures("hopper")
def test_a_gpu_that_is_here_has_the_kernels_this_torch_has() -> None:
    device = device_for(torch.device("cuda"))
    assert device.is_here and (device.capability, device.cudnn) == ((9, 0), 91900)
    assert device.kernels == ("cudnn", "flash", "efficient", "decode")
    assert device.shares == registry.by_name("H200").shares


@pytest.mark.usefixtures("hopper")
def test_kernels_that_are_switched_off_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert device_for(torch.device("cuda", 1)).kernels == ("efficient", "decode")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    amd = device_for(torch.device("cuda"))  # torch calls AMD's GPUs cuda as well
    assert amd.family == "rocm" and not {"cudnn", "flash", "efficient", "decode"} & set(amd.kernels)


def test_newer_flash_attention_is_known_where_it_is_active() -> None:
    h200 = registry.by_name("H200")
    newer = cuda_facts.with_flash(h200, "FA3")
    assert newer.flash == "FA3" and newer.shares["flash"].prefill > h200.shares["flash"].prefill
    assert cuda_facts.with_flash(h200, active_flash()) == h200


def test_the_option_takes_a_name_or_what_torch_knows() -> None:
    q = torch.randn(2, 4, 128, 64, dtype=torch.bfloat16)

    def attention(q: torch.Tensor) -> torch.Tensor:
        return (q @ q.mT).softmax(-1) @ q

    with torch.no_grad():
        site = attn_pass.explain(attention, q, attn_pass_options={"device": "A100"}).sites[0]
        assert site.outcome == "rewritten"
        with pytest.raises(attn_pass.OptionError, match=r"device 'H300'; did you mean 'H200'.*'MI300X'.*'M4 Pro'"):
            attn_pass.explain(attention, q, attn_pass_options={"device": "H300"})


@pytest.mark.parametrize(
    "name, family",
    [
        ("Ascend 910B", "A2"),
        ("Ascend910B", "A2"),  # as people call it
        ("Ascend910B3", "A2"),  # as the runtime does
        ("ascend910b3", "A2"),
        ("Ascend 910C", "A3"),
        ("Ascend910_9391", "A3"),
        ("Ascend 950", "950"),
        ("Ascend950DT_9571", "950"),
        ("Ascend310P3", "310P"),
        ("Ascend910A", "910"),
        ("Ascend310B1", "310B"),
    ],
)
def test_ascend_devices_by_name_and_family(name: str, family: str) -> None:
    device = device_for(torch.device("cpu"), name)
    assert (device.type, device.generation, device.is_here) == ("npu", family, False)
    assert device.kernels == generations.generation(family).operators
    assert bool(device.kernels) != bool(generations.generation(family).refusal)


def test_the_runtime_s_name_of_the_first_generation_is_not_the_catalogue_s() -> None:
    """ "Ascend910B" is the A2 to people, and to the runtime a variant of the first generation."""
    generation = generations.generation_of("Ascend910B")
    assert generation is not None and generation.name == "910"
    assert generations.generation_of("Ascend999") is None


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("Apple M4", "M4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Intel(R) Arc(TM) B580", "Arc B580"),
        ("Intel Data Center GPU Max 1550", "Max 1550"),
        ("nvidia h100", "H100"),
        ("AWS Graviton4", "Graviton4"),
        ("Google TPU v5e", "TPU v5e"),
        ("Huawei Ascend 910B", "Ascend 910B"),
    ],
)
def test_a_device_may_be_named_with_its_maker(name: str, row: str) -> None:
    assert registry.by_name(name) == registry.by_name(row)
    assert registry.named(name.split()[0]) is None


def test_names_that_are_no_device() -> None:
    with pytest.raises(attn_pass.errors.OptionError, match="unknown device 'Ascend999'; did you mean"):
        attn_pass.explain(lambda x: x + 1, torch.ones(2), attn_pass_options={"device": "Ascend999"})


def test_an_npu_is_known_by_what_its_runtime_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, family, kernels in (("Ascend910B2", "A2", 2), ("Ascend910A", "910", 0), ("Ascend999", "", 0)):
        monkeypatch.setattr(torch, "npu", SimpleNamespace(get_device_name=lambda at, said=said: said), raising=False)
        device = npu_facts.here()
        assert (device.name, device.generation, len(device.kernels)) == (said, family, kernels)
    monkeypatch.delattr(torch, "npu")
    assert npu_facts.here().generation == ""
