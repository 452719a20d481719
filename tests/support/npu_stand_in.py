"""torch_npu's attention operators on the CPU: the documented function in float64, and an error for anything else.

The schemas are the vendor's (`npu_schemas`). The constraints are written down here once more, from the pages of
torch_npu's documentation, and not taken from `attn_pass.devices.npu.rules`, so that each checks the other. What the
kernels would do wrongly without a word (a mode without its mask, an inverted compressed mask, ...) raises here; what
they leave undefined shows: a row whose every key is masked gives the mean of the values unless ``inner_precise`` asks
for zeros.

This says that a call matches the documented contract; not that the kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from npu_schemas import SCHEMAS
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
MAX = 2147483647
FA1, FA3, FIA = "npu_fusion_attention", "npu_fusion_attention_v3", "npu_fused_infer_attention_score"
_LAYOUTS = {"BNSD": 4, "BSND": 4, "BSH": 3, "SBH": 3}
_NOT_MODELLED = (
    *("pse", "padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sink", "dropout_mask"),
    *("pse_shift", "actual_seq_lengths", "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2"),
    *("quant_offset2", "antiquant_scale", "antiquant_offset", "key_antiquant_scale", "key_antiquant_offset"),
    *("value_antiquant_scale", "value_antiquant_offset", "block_table", "query_padding_size", "kv_padding_size"),
    *("key_shared_prefix", "value_shared_prefix", "actual_shared_prefix_len", "query_rope", "key_rope"),
    *("key_rope_antiquant_scale", "actual_seq_lengths_kv"),
)


FAMILY = ""
"""The product family that the calls stand on: "A2", "A3" or "950"; empty for any."""
PAGES: dict[str, tuple[str, ...]] = {FIA: ("A2", "A3"), FA3: ("A2", "A3"), FA1: ("A2", "A3", "950")}
"""The families each operator is there for. The page of v3 names A2; torch_npu's dispatch sends A3's calls there too."""
SEEN: list[tuple[str, dict[str, Any]]] = []
"""Every call of a forward that ran: the operator, and its arguments by name."""


class ContractError(RuntimeError):
    """The documentation does not allow the call."""


def _ask(holds: bool, what: str) -> None:
    if not holds:
        raise ContractError(what)


# ---------------------------------------------------------------- layouts


def _heads_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """(B, N, S, D) of a tensor in a layout."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "BSH":
        return x.unflatten(2, (heads, -1)).transpose(1, 2)
    return x.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)  # SBH


def _in_layout(x: Tensor, layout: str) -> Tensor:
    """A (B, N, S, D) tensor in a layout, contiguous."""
    if layout == "BNSD":
        return x.contiguous()
    if layout == "BSND":
        return x.transpose(1, 2).contiguous()
    if layout == "BSH":
        return x.transpose(1, 2).flatten(2).contiguous()
    return x.permute(2, 0, 1, 3).flatten(2).contiguous()


@dataclass
class _Call:
    """One call's operands (B, N, S, D) and what says which scores are kept."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    mode: int
    before: int
    after: int
    inner_precise: int
    scale: float
    decodes: bool = False  # the inference operator at one query row: no mode means anything

    def masked(self) -> Tensor | None:
        """(.., Sq, Sk), True where masked out."""
        rows, keys = self.q.size(2), self.k.size(2)
        if self.mask is None:
            return None
        if self.decodes:
            return self.mask.bool().reshape(-1, 1, 1, keys)
        at = torch.arange(rows)[:, None]
        key = torch.arange(keys)[None]
        last = keys - rows
        if self.mode == 0:
            outside = (key < at - self.before) | (key > at + self.after)
            return self.mask.bool() | outside
        if self.mode == 1:
            return self.mask.bool()
        if self.mode == 2:
            return key > at
        if self.mode == 3:
            return key > at + last
        return (key < at + last - self.before) | (key > at + last + self.after)

    def weights(self) -> Tensor:
        """The softmax (B, N, Sq, Sk) in float64."""
        groups = self.q.size(1) // self.k.size(1)
        scores = self.q.double() @ self.k.double().repeat_interleave(groups, 1).mT * self.scale
        masked = self.masked()
        if masked is None:
            return scores.softmax(-1)
        masked = masked.expand(scores.shape)
        weights = scores.masked_fill(masked, float("-inf")).softmax(-1)
        empty = masked.all(-1, keepdim=True)
        zeros = self.inner_precise in (2, 3) or (self.mode == 3 and self.q.size(2) > self.k.size(2))
        return torch.where(empty, 0.0 if zeros else 1.0 / self.k.size(2), weights)

    def result(self, kept: Tensor | None = None) -> Tensor:
        groups = self.q.size(1) // self.k.size(1)
        weights = self.weights() if kept is None else self.weights() * kept
        return (weights @ self.v.double().repeat_interleave(groups, 1)).to(self.q.dtype)


@lru_cache(maxsize=1)
def _triangle() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def _on_family(name: str) -> None:
    _ask(not FAMILY or FAMILY in PAGES[name], f"{name} is not there on {FAMILY}")


def _compressed(mask: Tensor, *more: tuple[int, ...]) -> None:
    """The mask of modes 2 to 4 is one triangle, whatever the lengths."""
    shapes = ((2048, 2048), *more)
    _ask(tuple(mask.shape) in shapes, f"a mode with a compressed mask asks for 2048 x 2048, got {tuple(mask.shape)}")
    _ask(
        torch.equal(mask.bool().reshape(2048, 2048), _triangle()), "the compressed mask is not True above the diagonal"
    )


def _operands(
    name: str, q: Tensor, k: Tensor, v: Tensor, layout: str, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    _ask(layout in _LAYOUTS, f"layout {layout!r}")
    _ask(all(t.dim() == _LAYOUTS[layout] for t in (q, k, v)), f"rank {q.dim()} for {layout}")
    _ask(q.dtype == k.dtype == v.dtype, "dtypes differ")
    if layout in ("BSH", "SBH"):
        _ask(q.size(2) % heads == 0, "H is no multiple of the heads")
        kv_heads = kv_heads or k.size(2) // (q.size(2) // heads)
        _ask(kv_heads > 0 and k.size(2) % kv_heads == 0, "H of keys is no multiple of their heads")
    q, k, v = (_heads_first(x, layout, n) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    _ask(q.size(1) == heads, f"{heads} heads given, {q.size(1)} there")
    _ask(not kv_heads or k.size(1) == kv_heads, f"{kv_heads} KV heads given, {k.size(1)} there")
    _ask(q.size(0) == k.size(0) == v.size(0), "batches differ")
    _ask(k.shape == v.shape, f"keys {tuple(k.shape)} and values {tuple(v.shape)} differ")
    _ask(q.size(3) == k.size(3), "head dims differ")
    _ask(q.size(1) <= 256 and q.size(1) % k.size(1) == 0, f"{q.size(1)} heads over {k.size(1)}")
    _ask(0 < q.size(3) <= 512, f"head dim {q.size(3)}")
    _ask(0 not in (*q.shape, *k.shape), "a size is 0")
    return q, k, v


def _check_mask(mask: Tensor | None, kinds: tuple[torch.dtype, ...]) -> None:
    if mask is not None:
        _ask(mask.dtype in kinds, f"a mask of {mask.dtype}: float masks are not taken")
        _ask(mask.is_contiguous(), f"a mask with strides {mask.stride()}")


def _refuse(given: dict[str, Any]) -> None:
    for name in _NOT_MODELLED:
        _ask(given.get(name) is None, f"{name} is not modelled")


# ---------------------------------------------------------------- the training operators


def _fusion_call(given: dict[str, Any]) -> _Call:
    _refuse(given)
    q, k, v = (given[n] for n in ("query", "key", "value"))
    _ask(q.dtype in (torch.float32, *HALF), f"{q.dtype}")
    _ask(all(t.is_contiguous() for t in (q, k, v)), "what becomes of strides is not documented")
    q, k, v = _operands(FA3, q, k, v, given["input_layout"], given["head_num"], 0)
    _ask(q.dtype != torch.float32 or q.size(3) % 4 == 0, f"head dim {q.size(3)} in float32")
    _ask(q.size(0) <= 2 << 20 and max(q.size(2), k.size(2)) <= 1 << 20, f"{tuple(q.shape)} over {tuple(k.shape)}")
    _ask(0 < given["keep_prob"] <= 1, f"keep_prob {given['keep_prob']}")
    mode, mask = given["sparse_mode"], given["atten_mask"]
    _ask(mode in range(5), f"sparse_mode {mode} is not modelled")
    _ask(given["inner_precise"] in (0, 2), f"inner_precise {given['inner_precise']} is reserved")
    _check_mask(mask, (torch.bool, torch.uint8))
    if mask is None:
        bounds = (given["pre_tockens"], given["next_tockens"])
        _ask(mode == 0 and bounds == (MAX, MAX), "without a mask the operator attends to everything, silently")
    elif mode in (0, 1):
        (batch, heads, rows, _), keys = q.shape, k.size(2)
        shapes = ((batch, heads, rows, keys), (batch, 1, rows, keys), (1, 1, rows, keys), (rows, keys))
        _ask(tuple(mask.shape) in shapes, f"a mask of {tuple(mask.shape)}")
    else:
        _compressed(mask)
    if mode == 4:
        _ask(given["pre_tockens"] + given["next_tockens"] >= 0, "an empty band")
    return _Call(
        *(q, k, v, mask, mode, given["pre_tockens"], given["next_tockens"]),
        inner_precise=given["inner_precise"],
        scale=given["scale"],
    )


def _kept(call: _Call, keep: float, seed: int) -> Tensor | None:
    if keep == 1:
        return None
    shape = (*call.q.shape[:3], call.k.size(2))
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < keep).double() / keep


def _forward(name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    given = bound(name, args, kwargs)
    SEEN.append((name, given))
    _on_family(name)
    call = _fusion_call(given)
    seed = 0 if given["keep_prob"] == 1 else int(torch.randint(1 << 40, ()))
    out = call.result(_kept(call, given["keep_prob"], seed))
    batch, heads, rows, _ = call.q.shape
    state = torch.zeros(batch, heads, rows, 8)
    result = (_in_layout(out, given["input_layout"]), state, state.clone(), call.q.new_empty(0))
    if name == FA1:
        return (*result, seed, 0, 0)
    return (*result, torch.tensor([seed]), torch.zeros(1, dtype=torch.int64))


def _backward(name: str, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    given = bound(name, args, kwargs)
    given["scale"] = given["scale_value"]
    call = _fusion_call(given)
    layout, heads = given["input_layout"], given["head_num"]
    grad = _heads_first(given["dy"], layout, heads).double()
    groups = call.q.size(1) // call.k.size(1)
    k, v = (x.double().repeat_interleave(groups, 1) for x in (call.k, call.v))
    weights = call.weights()
    drawn = _kept(call, given["keep_prob"], int(given["seed"]))
    of_weights, used = grad @ v.mT, weights
    if drawn is not None:
        of_weights, used = of_weights * drawn, weights * drawn
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * call.scale
    gradients = (
        of_scores @ k,
        (of_scores.mT @ call.q.double()).unflatten(1, (-1, groups)).sum(2),
        (used.mT @ grad).unflatten(1, (-1, groups)).sum(2),
    )
    made = (_in_layout(f.to(call.q.dtype), layout) for f in gradients)
    return (*made, call.q.new_empty(0), torch.empty(0))


def _fake_forward(name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """As the vendor's: it checks nothing."""
    given = bound(name, args, kwargs)
    q, layout, heads = given["query"], given["input_layout"], given["head_num"]
    places = {"BNSD": (0, 2), "BSND": (0, 1), "BSH": (0, 1), "SBH": (1, 0)}
    first, second = places.get(layout.partition("_")[0], (0, 0))
    state = q.new_empty((q.size(first), heads, q.size(second), 8), dtype=torch.float32)
    result = (q.new_empty(q.shape), state, torch.empty_like(state), q.new_empty(0))
    if name == FA1:
        return (*result, 0, 0, 0)
    number = q.new_empty(1, dtype=torch.int64)
    return (*result, number, torch.empty_like(number))


def _fake_backward(name: str, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    given = bound(name, args, kwargs)
    shapes = (given[n] for n in ("query", "key", "value"))
    return (*(t.new_empty(t.shape) for t in shapes), given["query"].new_empty(0), given["query"].new_empty(0))


def _autograd(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    saved = ("query", "key", "value", "atten_mask")
    passed = ("head_num", "input_layout", "keep_prob", "pre_tockens", "next_tockens", "inner_precise", "sparse_mode")

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        given = bound(name, inputs, {})
        v1 = name == FA1
        ctx.save_for_backward(*(given[n] for n in saved), *output[: 4 if v1 else 6])
        ctx.numbers = {"seed": output[4], "offset": output[5]} if v1 else {}
        ctx.given = {n: given[n] for n in passed} | {"scale_value": given["scale"]}
        ctx.count = len(inputs)

    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        q, k, v, mask, out, top, total, reserved, *state = ctx.saved_tensors
        given = dict(ctx.given)
        numbers = ctx.numbers or {"seed": state[0], "offset": state[1]}
        operator = getattr(torch.ops.npu, name.replace("_attention", "_attention_grad")).default
        result = operator(
            *(q, k, v, dy.contiguous(), given.pop("head_num"), given.pop("input_layout")),
            **given,
            **numbers,
            atten_mask=mask,
            softmax_max=top,
            softmax_sum=total,
            softmax_in=reserved,
            attention_in=out,
        )
        return (*result[:3], *[None] * (ctx.count - 3))

    return setup, backward


# ---------------------------------------------------------------- the inference operator


def _infer(name: str, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    given = bound(name, args, kwargs)
    SEEN.append((name, given))
    _on_family(name)
    _refuse(given)
    q, k, v = (given[n] for n in ("query", "key", "value"))
    layout, _, out_layout = given["input_layout"].partition("_")
    heads, mode, mask = given["num_heads"], given["sparse_mode"], given["atten_mask"]
    _ask(q.dtype in HALF, f"{q.dtype}: the inference operator takes half precision")
    _ask(all(t.is_contiguous() for t in (q, k, v)), "operands are not contiguous")
    _ask(layout != "SBH", "layout SBH")
    _ask(given["input_layout"] in ("BNSD", "BSND", "BSH", "BNSD_BSND"), f"layout {given['input_layout']!r}")
    _ask(not given["softmax_lse_flag"] and not given["block_size"], "not modelled")
    q, k, v = _operands(name, q, k, v, layout, heads, given["num_key_value_heads"] or heads)
    (batch, _, rows, dim), keys = q.shape, k.size(2)
    _ask(heads // k.size(1) <= 64, f"{heads // k.size(1)} heads a KV head")
    _ask(dim % 16 == 0, f"head dim {dim}: torch_npu asks for a multiple of 16")
    _ask(batch <= 65536, f"batch {batch}")
    _ask(given["input_layout"] == "BNSD" or heads * dim < 65535, f"{heads} heads of {dim}")
    _ask(max(rows, keys) <= 20971520, f"{rows} rows, {keys} keys")
    _ask(mode in range(5), f"sparse_mode {mode}")
    _check_mask(mask, (torch.bool, torch.int8, torch.uint8))
    decodes = rows == 1
    _ask(given["inner_precise"] in ((0, 1) if decodes else (0, 1, 2, 3)), f"inner_precise {given['inner_precise']}")
    if decodes:
        _ask(not out_layout, f"{given['input_layout']} for one query row")
        _ask(keys <= 262144, f"{keys} keys")
        _ask(mask is None or tuple(mask.shape) == (batch, keys), "a mask of one query row is (B, S)")
        _ask(mode == 0, "a mode means nothing at one query row")
        _ask(mask is None or not bool(mask.bool().all(-1).any()), "a fully masked row, and no way to ask for zeros")
    elif mode >= 2:
        _ask(mask is not None, f"attenMask should not be null when sparse_mode is {mode}")
        _compressed(mask, (1, 2048, 2048), (1, 1, 2048, 2048))
        _ask(mode != 4 or given["pre_tokens"] + given["next_tokens"] >= 0, "an empty band")
    elif mask is not None:
        shapes = ((1, rows, keys), (batch, 1, rows, keys), (1, 1, rows, keys), (rows, keys))
        _ask(tuple(mask.shape) in shapes, f"a mask of {tuple(mask.shape)}")
    else:
        _ask(mode == 0, "mode 1 without a mask")
        _ask((given["pre_tokens"], given["next_tokens"]) == (MAX, MAX), "bounds without a mask")
    call = _Call(
        *(q, k, v, mask, mode, given["pre_tokens"], given["next_tokens"]),
        inner_precise=given["inner_precise"],
        scale=given["scale"],
        decodes=decodes,
    )
    return _in_layout(call.result(), out_layout or layout), torch.empty(0)


def _fake_infer(name: str, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    given = bound(name, args, kwargs)
    q = given["query"]
    shape = list(q.shape)
    if given["input_layout"] == "BNSD_BSND":
        shape[1], shape[2] = shape[2], shape[1]
    return q.new_empty(shape), q.new_empty(0, dtype=torch.float32)


def _no_gradient(name: str, *args: Any, **kwargs: Any) -> Any:
    given = bound(name, args, kwargs)
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    _ask(not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)), f"{name} has no gradient")
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.npu, name).default(*args, **kwargs)


# ---------------------------------------------------------------- PFA, which user code calls


def _prompt(name: str, *args: Any, **kwargs: Any) -> Tensor:
    given = bound(name, args, kwargs)
    moved = {
        "scale": given["scale_value"],
        "pre_tokens": given["pre_tokens"],
        "next_tokens": MAX if given["atten_mask"] is None and given["next_tokens"] == 0 else given["next_tokens"],
        **{n: given[n] for n in ("num_heads", "num_key_value_heads", "input_layout", "sparse_mode", "atten_mask")},
    }
    return _infer(FIA, given["query"], given["key"], given["value"], **moved)[0]


def _fake_prompt(name: str, *args: Any, **kwargs: Any) -> Tensor:
    q = bound(name, args, kwargs)["query"]
    return q.new_empty(q.shape)


# ---------------------------------------------------------------- registration


def bound(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, defaults included."""
    schema = getattr(torch.ops.npu, name).default._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    return given | dict(zip((a.name for a in schema), args)) | kwargs


_IMPLEMENTED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    FA1: (_forward, _fake_forward),
    FA3: (_forward, _fake_forward),
    "npu_fusion_attention_grad": (_backward, _fake_backward),
    "npu_fusion_attention_grad_v3": (_backward, _fake_backward),
    FIA: (_infer, _fake_infer),
    "npu_prompt_flash_attention": (_prompt, _fake_prompt),
}
_library: list[torch.library.Library] = []


def install(define: bool = True) -> None:
    """Registers the operators, once a process; with torch_npu's own schemas loaded, ``define=False``: kernels alone."""
    if _library:
        return
    lib = torch.library.Library("npu", "FRAGMENT")
    _library.append(lib)
    for name, (run, fake) in _IMPLEMENTED.items():
        if define:
            tags = [torch.Tag.pt2_compliant_tag]
            tags += [torch.Tag.nondeterministic_seeded] if name == FA1 else []
            lib.define(name + SCHEMAS[name], tags=tags)
            torch.library.register_fake(f"npu::{name}", _named(fake, name), lib=lib)
        lib.impl(name, _named(run, name), "CPU")
        if name == FIA and define:
            lib.impl(name, _named(_no_gradient, name), "AutogradCPU")
    for name in (FA1, FA3) if define else ():
        setup, backward = _autograd(name)
        torch.library.register_autograd(f"npu::{name}", backward, setup_context=setup, lib=lib)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(name, *args, **kwargs)

    return run
