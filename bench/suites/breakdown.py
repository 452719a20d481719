"""Where the time of whole models goes: `python -m bench breakdown [--json FILE] [--only NAME|NAME]`.

The time in products (linear layers and convolutions), in attention and in everything else, and the rates of the first
two: in stock Inductor and in the pass, both also frozen, in ONNX Runtime and in OpenVINO. Times come from each system's
own profiler; torch's shows Inductor's kernels under ``cpp.enable_kernel_profile``. The variants run one after the
other, so compare their times with `python -m bench peers`.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from attn_pass.measuring.timing import private_caches, why
from bench.harness import variants as w
from bench.harness.command import Json, Only, Quick, Rounds, Threads, named, started
from bench.harness.document import Column, Row
from bench.harness.floors import rates
from bench.harness.measure import child, failed_row, quiet, warm_compiler
from bench.harness.programs import Program, Setting, Tensors, doubled, program_of
from bench.suites import peers

TITLE = "Where the time of whole models goes"
PRODUCTS, ATTENTION = "products", "attention"
Parts = Mapping[str, float]
"""Of one call, the mean of several: seconds in products, in attention, and in "all"."""

# Operators of torch, and the kernels of Inductor, which are named after the operators they compute.
_KERNEL = re.compile(r"cpp_fused_\w*(attention|softmax)")
_OPERATOR = (
    (ATTENTION, re.compile(r"^aten::(bmm|baddbmm)$|attention|_softmax$|^attn_pass::")),
    (PRODUCTS, re.compile(r"^aten::(mm|addmm|\w*conv\w*)$|^mkl::|^mkldnn::_(linear|convolution)")),
)


def part_of(event: str) -> str:
    """What an event of torch's profiler belongs to; "" for the rest."""
    if "cpp_fused" in event:
        return ATTENTION if _KERNEL.search(event) else ""
    return next((part for part, names in _OPERATOR if names.search(event)), "")


def in_torch(run: Callable[..., Any], inputs: Tensors, rounds: int) -> Parts:
    """By torch's profiler."""
    spent: dict[str, float] = defaultdict(float)
    for _ in range(rounds):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            began = time.perf_counter()
            run(*inputs)
            spent["all"] += time.perf_counter() - began
        for event in profiled.key_averages():
            spent[part_of(event.key)] += event.self_cpu_time_total / 1e6
    return {part: seconds / rounds for part, seconds in spent.items()}


def in_onnx_runtime(path: Path, inputs: Tensors, rounds: int) -> Parts:
    """By ONNX Runtime's profiler, which writes one file; the first call is left out."""
    session = peers.session_of(path, profiled=True)
    run = peers.called(session)
    for _ in range(rounds + 1):
        run(*inputs)
    events = json.loads(Path(session.end_profiling()).read_text())
    calls = [event for event in events if event.get("name") == "model_run"][1:]
    spent: dict[str, float] = defaultdict(float)
    spent["all"] = sum(event["dur"] for event in calls) / 1e6
    for event in events:
        if event["cat"] == "Node" and event["ts"] >= calls[0]["ts"] and event["name"].endswith("_kernel_time"):
            spent[part_of_node(event["args"])] += event["dur"] / 1e6
    return {part: seconds / rounds for part, seconds in spent.items()}


def part_of_node(node: Mapping[str, Any]) -> str:
    """What a node of ONNX Runtime belongs to: a product with weights has one input, since they are packed, or a matrix.

    The two factors of a product of attention have a batch and heads.
    """
    operator = node["op_name"]
    if "MatMul" in operator or "Gemm" in operator:
        shapes = [shape for of_input in node["input_type_shape"] for shape in of_input.values()][:2]
        return ATTENTION if len(shapes) == 2 and all(len(shape) > 2 for shape in shapes) else PRODUCTS
    return PRODUCTS if "Conv" in operator else ATTENTION if re.search("Softmax|Attention", operator) else ""


def in_openvino(path: Path, inputs: Tensors, rounds: int, precision: str) -> Parts:
    """By OpenVINO's profiler, whose times are means over all calls; the first call is left out."""
    import openvino

    model = peers.compiled_by_openvino(openvino.Core().read_model(path), precision, profiled=True)
    nodes = {node.get_friendly_name(): node.get_rt_info() for node in model.get_runtime_model().get_ops()}
    request, arrays = model.create_infer_request(), [x.numpy() for x in inputs]

    def parts() -> dict[str, float]:
        spent: dict[str, float] = defaultdict(float)
        for node in request.profiling_info:
            info = nodes.get(node.node_name, {})
            origins = str(info["originalLayersNames"].value) if "originalLayersNames" in info else ""
            spent[part_of_layer(node.node_type, origins)] += node.real_time.total_seconds()
        return spent

    request.infer(arrays)
    first, began = parts(), time.perf_counter()
    for _ in range(rounds):
        request.infer(arrays)
    whole = (time.perf_counter() - began) / rounds
    return {**{part: ((rounds + 1) * s - first[part]) / rounds for part, s in parts().items()}, "all": whole}


def part_of_layer(kind: str, origins: str) -> str:
    """What a layer of OpenVINO belongs to: attention that it fuses has a softmax among the nodes it was made of."""
    if kind in ("FullyConnected", "Convolution"):
        return PRODUCTS
    is_attention = kind == "MatMul" or re.search("softmax|attention", f"{kind} {origins}", re.IGNORECASE)
    return ATTENTION if is_attention else ""


class Flops(TorchDispatchMode):
    """Counts the FLOPs of a program by part while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operator = func._overloadpacket
        if operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.counted[ATTENTION] += sdpa_flop_count(*(x.shape for x in args[:3]))
        elif operator in flop_registry:
            # A linear layer of a slice is a batch of one product.
            is_product = operator is torch.ops.aten.bmm and args[0].size(0) == 1
            part = PRODUCTS if is_product else part_of(f"aten::{operator.__name__}")
            self.counted[part] += flop_registry[operator](*args, **(kwargs or {}), out_val=out)
        return out


def _parts(shop: w.Workshop, way: str, rounds: int) -> Parts:
    dtype, module, inputs = shop.program.dtype, shop.module, shop.inputs
    if way not in (peers.ORT, peers.OPENVINO):
        return in_torch(shop.build(way).run, inputs, rounds)
    if dtype == torch.bfloat16:  # NumPy has none
        module, inputs = copy.deepcopy(module).float(), doubled(inputs, torch.float32)
    path = peers.onnx_file(module, inputs, shop.folder)
    if way == peers.ORT:
        return in_onnx_runtime(path, inputs, rounds)
    return in_openvino(path, inputs, rounds, "bf16" if dtype == torch.bfloat16 else "f32")


def ways_of(program: Program) -> list[str]:
    """Those of Inductor, and the runtimes that are installed and compute in the program's dtype."""
    ways = [w.STOCK, w.PASS, w.STOCK_FROZEN, w.PASS_FROZEN]
    if find_spec("onnxruntime") is not None and program.dtype == torch.float32:
        ways.append(peers.ORT)
    return [*ways, peers.OPENVINO] if find_spec("openvino") is not None else ways


def measured(name: str, setting: Setting) -> Iterator[Row]:
    """The rows of one program, in its own process."""
    quiet(setting.threads)
    program = program_of(peers.__name__, name, setting)
    config = torch._inductor.config.patch({"cpp.enable_kernel_profile": True, "force_disable_caches": True})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, private_caches(Path(place)), config:
        warm_compiler()
        shop = w.Workshop(program, setting.device, Path(place))
        with Flops() as flops:
            shop.module(*shop.inputs)
        for way in ways_of(program):
            try:
                parts = _parts(shop, way, setting.rounds)
            except Exception as error:
                yield failed_row(name, way, why(error))
            else:
                yield {"program": name, "way": way, "stage": way, "status": "ok", **row_of(parts, flops.counted)}


def row_of(parts: Parts, flops: Mapping[str, float]) -> Row:
    """Seconds, and rates in GFLOP/s."""
    row: Row = {part: parts.get(part, 0.0) for part in ("all", PRODUCTS, ATTENTION)}
    row["rest"] = row["all"] - row[PRODUCTS] - row[ATTENTION]
    row["share_of_rest"] = row["rest"] / row["all"]
    for part in (PRODUCTS, ATTENTION):
        row[f"{part}_flops"] = flops.get(part, 0.0)
        row[f"{part}_rate"] = flops.get(part, 0.0) / row[part] / 1e9 if row[part] > 0 else None
    return row


COLUMNS = (
    Column("program", "program"),
    Column("variant", "way"),
    Column("ms", "all", ".1f", 1e3),
    Column("products ms", PRODUCTS, ".1f", 1e3),
    Column("products GFLOP/s", f"{PRODUCTS}_rate", ".0f"),
    Column("attention ms", ATTENTION, ".1f", 1e3),
    Column("attention GFLOP/s", f"{ATTENTION}_rate", ".0f"),
    Column("everything else ms", "rest", ".1f", 1e3),
    Column("share of everything else", "share_of_rest", ".0%"),
)
NOTES = (
    "Products: linear layers and convolutions, with what a system fuses into them. Attention: its two products and its "
    "softmax, with what a system fuses into them: in stock Inductor the kernels whose name has a softmax, which with "
    "one query row hold more than attention; in ONNX Runtime neither a mask nor a scale that are nodes of their own.",
    "FLOPs are those of the eager program, pairs that a mask hides included.",
)


def main(
    json_file: Json = None, quick: Quick = False, only: Only = "", threads: Threads = 2, rounds: Rounds = 5
) -> None:
    """Where whole models spend their time: products, attention and everything else, beside other systems."""
    setting = Setting(threads=threads, rounds=rounds, quick=quick)
    chosen = named(only, peers.programs(setting), attrgetter("name"))
    recorder = started(TITLE, json_file, threads=threads, rounds=f"{rounds}, one variant after the other; means")
    recorder.document.run["rates"] = asdict(rates(setting.device))
    table = recorder.table("Products, attention, everything else", COLUMNS, NOTES)
    for program in chosen:
        table.rows += child(program.name, measured, (program.name, setting), recorder.tell)
        recorder.keep()
    recorder.finish()
