"""Where the time of whole models goes: `python -m bench breakdown [--json FILE] [--only NAME]`.

The time in products (linear layers and convolutions), in attention and in everything else, and the rates of the first
two: in stock Inductor and in the pass, both also frozen, in ONNX Runtime and in OpenVINO. The profiler of each system
measures; torch's shows Inductor's kernels under ``cpp.enable_kernel_profile``. The variants run one after the other, so
that their times are compared by `python -m bench peers` and not here.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from attn_pass.measuring.timing import private_caches, why
from bench.harness import variants as w
from bench.harness.command import Json, Only, Quick, Rounds, Threads, measured_tables
from bench.harness.document import Column, Row, Table
from bench.harness.floors import Rates, flops_by_operator
from bench.harness.measure import Tell, child, failed_row, quiet, warm_compiler
from bench.harness.programs import Program, Setting, Tensors, doubled, program_of
from bench.suites import peers

TITLE = "Where the time of whole models goes"
PRODUCTS, ATTENTION = "products", "attention"
Parts = Mapping[str, float]
"""Seconds of one call: in products, in attention, and "all"."""

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


def in_torch(run: Callable[..., Any], inputs: Tensors, rounds: int) -> list[Parts]:
    """The parts of several calls, by torch's profiler."""
    calls: list[Parts] = []
    for _ in range(rounds):
        spent: dict[str, float] = defaultdict(float)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            began = time.perf_counter()
            run(*inputs)
            spent["all"] = time.perf_counter() - began
        for event in profiled.key_averages():
            spent[part_of(event.key)] += event.self_cpu_time_total / 1e6
        calls.append(spent)
    return calls


def in_onnx_runtime(path: Path, inputs: Tensors, rounds: int) -> list[Parts]:
    """The mean of the calls after the first, by ONNX Runtime's profiler, which writes one file."""
    session = peers.session_of(path, profiled=True)
    run = peers.called(session)
    for _ in range(rounds + 1):
        run(*inputs)
    events = json.loads(Path(session.end_profiling()).read_text())
    whole = [event for event in events if event.get("name") == "model_run"][1:]
    began = whole[0]["ts"]
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        if event["cat"] == "Node" and event["ts"] >= began and event["name"].endswith("_kernel_time"):
            spent[part_of_node(event["args"])] += event["dur"] / 1e6
    spent["all"] = sum(event["dur"] for event in whole) / 1e6
    return [{part: seconds / len(whole) for part, seconds in spent.items()}]


def part_of_node(node: Mapping[str, Any]) -> str:
    """What a node of ONNX Runtime belongs to: a product has a matrix of weights, those of attention have none."""
    operator = node["op_name"]
    if "MatMul" in operator or operator == "Gemm":
        shapes = [shape for of_input in node["input_type_shape"] for shape in of_input.values()]
        return PRODUCTS if any(len(shape) == 2 for shape in shapes) else ATTENTION
    return PRODUCTS if "Conv" in operator else ATTENTION if re.search("Softmax|Attention", operator) else ""


def in_openvino(path: Path, inputs: Tensors, rounds: int, precision: str) -> list[Parts]:
    """The parts of several calls, by OpenVINO's profiler."""
    import openvino

    model = peers.compiled_by_openvino(openvino.Core().read_model(path), precision, profiled=True)
    nodes = {node.get_friendly_name(): node.get_rt_info() for node in model.get_runtime_model().get_ops()}
    request = model.create_infer_request()
    calls: list[Parts] = []
    arrays = [x.numpy() for x in inputs]
    request.infer(arrays)
    for _ in range(rounds):
        spent: dict[str, float] = defaultdict(float)
        began = time.perf_counter()
        request.infer(arrays)
        spent["all"] = time.perf_counter() - began
        for node in request.profiling_info:
            info = nodes.get(node.node_name, {})
            origins = str(info["originalLayersNames"].value) if "originalLayersNames" in info else ""
            spent[part_of_layer(node.node_type, origins)] += node.real_time.total_seconds()
        calls.append(spent)
    return calls


def part_of_layer(kind: str, origins: str) -> str:
    """What a layer of OpenVINO belongs to: attention that it fuses has a softmax among the nodes it was made of."""
    if kind in ("FullyConnected", "Convolution"):
        return PRODUCTS
    return (
        ATTENTION if kind in ("MatMul", "Softmax") or re.search("softmax|attention", f"{kind} {origins}", re.I) else ""
    )


def _parts(shop: w.Workshop, way: str, rounds: int) -> list[Parts]:
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
        counted = flops_by_operator(shop.module, shop.inputs)
        flops: dict[str, float] = defaultdict(float)
        for operator, count in counted.items():
            flops[part_of(f"aten::{operator}")] += count
        for way in ways_of(program):
            try:
                calls = _parts(shop, way, setting.rounds)
            except Exception as error:
                yield failed_row(name, way, why(error))
            else:
                yield {"program": name, "way": way, "stage": way, "status": "ok", **row_of(calls, flops)}


def row_of(calls: list[Parts], flops: Mapping[str, float]) -> Row:
    """The call of median length, in seconds, and its rates in GFLOP/s."""
    call = sorted(calls, key=lambda call: call["all"])[len(calls) // 2]
    row: Row = {part: call.get(part, 0.0) for part in ("all", PRODUCTS, ATTENTION)}
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
    "Products: linear layers and convolutions, with what a system fuses into them. Attention: its two products and "
    "what is between them, in stock Inductor the kernels with a softmax. FLOPs are those of the eager program, pairs "
    "that a mask hides included.",
)


def _tables(only: str, setting: Setting, rates: Rates, tell: Tell) -> Iterator[Table]:
    table = Table("Products, attention, everything else", COLUMNS, notes=list(NOTES))
    for program in peers.programs(setting):
        if only in program.name:
            table.rows += child(program.name, measured, (program.name, setting), tell)
            yield table


def main(
    json_file: Json = None, quick: Quick = False, only: Only = "", threads: Threads = 2, rounds: Rounds = 5
) -> None:
    """Where whole models spend their time: products, attention and everything else, beside other systems."""
    setting = Setting(threads=threads, rounds=rounds, quick=quick)
    measured_tables(TITLE, partial(_tables, only), setting, json_file, None)
