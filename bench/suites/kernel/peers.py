"""The same attention in other systems: torch's SDPA and FlexAttention, OpenVINO, ONNX Runtime and zentorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_pass.measuring.timing import why
from bench.suites.kernel.cases import CAP, LENGTH, Case, Few
from bench.suites.peers import compiled_by_openvino, session_of
from bench.suites.spellings import below

Run = Callable[[], Tensor]
OURS, AGAIN = "attn_pass", "again"
SDPA, FLEX, OPENVINO, ONNX, ZENTORCH = "SDPA", "FlexAttention", "OpenVINO", "ONNX Runtime", "zentorch"
PEERS = (SDPA, FLEX, OPENVINO, ONNX, ZENTORCH)
SCORE = f"mul(tanh(mul(mul(x, number({{scale!r}}f)), number({1 / CAP!r}f))), number({CAP!r}f))"


def ours(case: Case | Few, inputs: tuple[Tensor, ...]) -> Run:
    """`attn_pass::attention` as the target calls it."""
    from attn_pass.devices.cpu.kernel.operator import OPERATOR

    scale = 1 / math.sqrt(case.dim)
    given: dict[str, Any] = dict(case.given) if isinstance(case, Case) else {}
    if isinstance(case, Case):
        kept, bias = case.kept(), case.bias()
        if case.as_tensor and kept is not None:
            given["keep"] = kept[None, None] if case.as_tensor == 4 else kept[:1][None, None]
        if bias is not None:
            given["bias"] = bias.to(inputs[0].dtype)
        if case.capped:
            given["score"] = SCORE.format(scale=scale)
    return lambda: OPERATOR(*inputs, scale, **given)


def sdpa(case: Case | Few, inputs: tuple[Tensor, ...]) -> Run | None:
    """The call a program would make: `is_causal` where that says it, else a mask that was made once."""
    query, key, _ = inputs
    grouped = query.size(1) != key.size(1)
    if isinstance(case, Few):
        return lambda: F.scaled_dot_product_attention(*inputs, enable_gqa=grouped)
    if case.capped:
        return None
    if case.sloped or case.keep not in (None, below):
        kept, bias = case.kept(), case.bias()
        mask = kept[None, None] if bias is None else bias.masked_fill(~kept, -math.inf)[None].to(query.dtype)
        return lambda: F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=grouped)
    return lambda: F.scaled_dot_product_attention(*inputs, is_causal=case.keep is below, enable_gqa=grouped)


def flex(case: Case | Few, inputs: tuple[Tensor, ...]) -> Run | None:
    """FlexAttention compiled, its block mask made once; in float32 and bfloat16, as compiling takes longest here."""
    if isinstance(case, Few) or not case.flex or inputs[0].dtype == torch.float16:
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    keep = case.keep
    assert callable(keep)
    block_mask = create_block_mask(lambda b, h, i, j: keep(i, j), None, None, LENGTH, LENGTH, device="cpu")
    score = (lambda score, b, h, i, j: CAP * torch.tanh(score / CAP)) if case.capped else None
    torch._dynamo.reset()
    run = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=score, block_mask=block_mask), dynamic=False)
    return lambda: run(*inputs)


def _is_plain(case: Case | Few, inputs: tuple[Tensor, ...]) -> TypeGuard[Case]:
    """Whether it is attention with as many heads of keys as of queries, full or causal."""
    plain = isinstance(case, Case) and not (case.capped or case.sloped) and case.keep in (None, below)
    return plain and len({x.size(1) for x in inputs}) == 1


def openvino(case: Case | Few, inputs: tuple[Tensor, ...]) -> Run | None:
    """One node of its own, in the precision of the operands."""
    dtype = inputs[0].dtype
    if find_spec("openvino") is None or not _is_plain(case, inputs):
        return None
    if dtype == torch.float16:
        return None  # its CPU plug-in computes that in float32
    import openvino as ov
    from openvino import opset13 as ops

    element = ov.Type.f32 if dtype == torch.float32 else ov.Type.bf16
    nodes = [ops.parameter(list(x.shape), element) for x in inputs]
    made = ov.Model([ops.scaled_dot_product_attention(*nodes, causal=case.keep is below)], nodes, "attention")
    request = compiled_by_openvino(made, "f32" if dtype == torch.float32 else "bf16").create_infer_request()
    out = torch.empty_like(inputs[0])
    for number, tensor in enumerate(inputs):
        request.set_input_tensor(number, _shared(ov, tensor, element))
    request.set_output_tensor(_shared(ov, out, element))

    def run() -> Tensor:
        request.infer()
        return out

    return run


def _shared(ov: Any, tensor: Tensor, element: Any) -> Any:
    """The tensor's own memory; NumPy has no bfloat16."""
    bits = tensor if tensor.dtype == torch.float32 else tensor.view(torch.int16)
    return ov.Tensor(bits.numpy(), list(tensor.shape), element)


def onnx_runtime(case: Case | Few, inputs: tuple[Tensor, ...]) -> Run | None:
    """`MultiHeadAttention`, which its fusions make, in float32: operands (B, L, H D), as it wants them."""
    installed = find_spec("onnx") is not None and find_spec("onnxruntime") is not None
    if not installed or not _is_plain(case, inputs) or inputs[0].dtype != torch.float32:
        return None
    import onnx
    from onnx import TensorProto, helper

    heads, dim = inputs[0].size(1), case.dim
    names = ("query", "key", "value")
    shape = [1, LENGTH, heads * dim]
    settings = {"num_heads": heads, "unidirectional": int(case.keep is below)}
    node = helper.make_node("MultiHeadAttention", names, ["out"], domain="com.microsoft", **settings)
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in of] for of in (names, ("out",))]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(helper.make_graph([node], "attention", *ends), opset_imports=opsets, ir_version=9)
    onnx.checker.check_model(made)
    session = session_of(made.SerializeToString())
    given = {name: x.transpose(1, 2).flatten(2).contiguous().numpy() for name, x in zip(names, inputs)}

    def run() -> Tensor:
        return torch.from_numpy(session.run(None, given)[0]).unflatten(2, (heads, dim)).transpose(1, 2)

    return run


def zentorch(case: Case | Few, inputs: tuple[Tensor, ...]) -> Run | None:
    """AMD's plug-in, a wheel for torch 2.13."""
    if find_spec("zentorch") is None or not _is_plain(case, inputs):
        return None
    import zentorch as plugin  # noqa: F401, it registers its operators

    return lambda: torch.ops.zentorch.zentorch_sdpa(*inputs, 0.0, case.keep is below)[0]


_BUILDERS: dict[str, Callable[[Case | Few, tuple[Tensor, ...]], Run | None]] = {
    SDPA: sdpa,
    FLEX: flex,
    OPENVINO: openvino,
    ONNX: onnx_runtime,
    ZENTORCH: zentorch,
}
_BY_THREADS = (OPENVINO, ONNX)  # built for a number of threads; the others ask when they run


class Peers:
    """The peers of one case, built when they are first asked for and where they must be built again."""

    def __init__(self, case: Case | Few, inputs: tuple[Tensor, ...]) -> None:
        self._case, self._inputs = case, inputs
        self._built: dict[str, Run] = {}
        self.failures: dict[str, str] = {}

    def runs(self) -> dict[str, Run]:
        """Ready to run with torch's number of threads; one that cannot is in ``failures``, with its error."""
        for name, build in _BUILDERS.items():
            if name in self.failures or (name in self._built and name not in _BY_THREADS):
                continue
            try:
                run = build(self._case, self._inputs)
                if run is not None:
                    run()
                    self._built[name] = run
            except Exception as error:  # a peer that fails is told, and the others are measured
                self.failures[name] = why(error, 200)
        return dict(self._built)
