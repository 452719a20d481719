"""The ambient state each node runs under: autocast, grad mode, allowed SDPA backends, functorch levels and the like.

The same node means something else under another state: ``f32 @ f32`` is bfloat16 under autocast, and a product under
``no_grad`` has no gradient. Dynamo graphs switch state with nodes, exported graphs with higher-order
operators whose bodies run under it, and what holds around a compiled function is in no node at all.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import Graph, Node
from torch.fx.node import Target
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_pass.graph.subgraphs import operator_name
from attn_pass.graph.values import fake_value
from attn_pass.model.dtype_name import dtype_name

Autocast = tuple[str, torch.dtype | None, bool, bool | None]
"""What autocast does for one device type: (device_type, dtype, enabled, cache); (.., None, False, None) if off."""

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla", "privateuseone")
_SDPA_BACKENDS = frozenset(name for name in SDPBackend.__members__ if name != "ERROR")


@dataclass(frozen=True)
class Region:
    """A state that nodes run under. Equal regions are interchangeable for code that runs in them.

    None, and a device missing from ``autocast``, mean "as around the graph". Where that is known, as it is while a
    backend runs, start from ``Region.ambient()``; leaving a ``no_grad`` block is then seen to restore what held before.
    """

    autocast: tuple[Autocast, ...] = ()
    """At most one entry a device type, sorted."""
    grad_enabled: bool | None = None
    inference_mode: bool | None = None
    sdpa_backends: tuple[str, ...] | None = None
    """Names of the ``SDPBackend`` members ``sdpa_kernel`` allows, sorted; None allows all."""
    functorch: tuple[str, ...] = ()
    """Open levels, outermost first: the kind ("vmap", "grad", "jvp", "dual", ...) and the node that opened it."""
    saved_tensors_hooks: int = 0
    """How many default hooks, or prohibitions of hooks, are in force."""
    deterministic: bool | None = None
    other: tuple[tuple[str, str], ...] = ()
    """Any other state that a node changed, by name; distinguished, but not interpreted."""

    @classmethod
    def ambient(cls) -> Region:
        """The state this thread is in now: while a Dynamo backend runs, the one its graph will run in."""
        allowed = {name for name in _SDPA_BACKENDS if _sdpa_enabled(name)}
        return cls(
            autocast=tuple(sorted(_ambient_autocast(), key=_device)),
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            sdpa_backends=None if allowed == _SDPA_BACKENDS else tuple(sorted(allowed)),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            functorch=("dual around the graph",) if forward_ad._current_level >= 0 else (),
        )

    def autocast_dtype(self, device_type: str) -> torch.dtype | None:
        """The dtype autocast gives matrix products on a device type; None when it is off, or not known to be on."""
        return next((dtype for device, dtype, on, _ in self.autocast if device == device_type and on), None)

    def with_autocast(self, device: str, dtype: torch.dtype | None, enabled: bool, cache: bool | None = None) -> Region:
        """This state inside ``torch.autocast(device, dtype, enabled, cache)``."""
        entry: Autocast = (device, None, False, None)
        if enabled:
            outer = next((known for known in self.autocast if known[0] == device and known[2]), entry)
            cache = outer[3] if cache is None else cache
            cache = torch.is_autocast_cache_enabled() if cache is None else cache
            entry = (device, dtype or outer[1] or torch.get_autocast_dtype(device), True, cache)
        others = [known for known in self.autocast if known[0] != device]
        return replace(self, autocast=tuple(sorted([*others, entry], key=_device)))

    def describe(self) -> str:
        """The state in words, for a reason in a report: "autocast(cpu, bfloat16), gradients off"."""
        return ", ".join(self._words()) or "no special state"

    def apart_from(self, other: Region) -> str:
        """What differs from another state, in words: "gradients off, without allow_tf32=False"."""
        own, its = self._words(), other._words()
        differs = [word for word in own if word not in its] + [f"without {word}" for word in its if word not in own]
        return ", ".join(differs) or self.describe()

    def _words(self) -> list[str]:
        words = [f"autocast({device}, {dtype_name(dtype)})" for device, dtype, on, _ in self.autocast if on and dtype]
        if self.autocast and not words:
            words.append("autocast off")
        for value, name in (
            (self.grad_enabled, "gradients"),
            (self.inference_mode, "inference mode"),
            (self.deterministic, "deterministic algorithms"),
        ):
            if value is not None and (value or name == "gradients"):
                words.append(f"{name} {'on' if value else 'off'}")
        if self.sdpa_backends is not None:
            words.append(f"sdpa_kernel({', '.join(self.sdpa_backends)})")
        words += [f"inside {_level_name(level)}" for level in self.functorch]
        if self.saved_tensors_hooks:
            words.append("saved-tensor hooks changed")
        return words + [f"{name}{value}" for name, value in self.other]

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Puts torch into this state while emitted code is fake-propagated; nothing is done for functorch levels."""
        with ExitStack() as stack:
            for device, dtype, enabled, cache in self.autocast:
                now = torch.is_autocast_enabled(device)
                if enabled != now or (enabled and dtype != torch.get_autocast_dtype(device)):
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # a device that is not here: torch turns autocast off
                        context = torch.autocast(device, dtype, enabled, cache)
                    stack.enter_context(context)
            if self.inference_mode is not None and self.inference_mode != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(self.inference_mode))
            if self.grad_enabled is not None:
                stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            if self.sdpa_backends is not None:
                stack.enter_context(sdpa_kernel([SDPBackend.__members__[name] for name in self.sdpa_backends]))
            yield


class Regions:
    """The region of every node of one graph, as it is now: build a new one after an edit.

    ``outer`` is the state around the graph: ``Region.ambient()`` in a backend, the region of a body's call for the body
    (``region_of_body``). If its grad mode is unknown and the graph switches grad mode an even number of times, the
    switches are taken to be ``with`` blocks, the last of which restores what held before the first.
    """

    def __init__(self, graph: Graph, outer: Region = Region()) -> None:
        state = _State(outer, None if outer.grad_enabled is not None else _restored_grad_mode(graph))
        region = outer
        self._regions: dict[Node, Region] = {}
        known: dict[Region, Region] = {}
        streams: dict[tuple[Region, Any], Region] = {}
        for node in graph.nodes:
            if node.op == "call_function":
                change = _change(node.target)
                if change is not None:
                    change(state, node)
                    region = state.region()
                    region = known.setdefault(region, region)
            elif node.op == "placeholder":  # made where it was first used, and annotated accordingly
                self._regions[node] = outer
                continue
            custom = node.meta.get("custom")
            if custom is not None and "stream" in custom:  # ``with stream:`` is an annotation in 2.13, not a node
                key = (region, custom["stream"])
                if key not in streams:
                    streams[key] = replace(region, other=(*region.other, ("stream ", str(custom["stream"]))))
                self._regions[node] = streams[key]
            else:
                self._regions[node] = region

    def add(self, node: Node, region: Region) -> None:
        """Notes the state of a node that is new in the graph."""
        self._regions[node] = region

    def of(self, node: Node) -> Region:
        """The state a node runs under; for a node that changes state, the state after it."""
        return self._regions[node]


def region_of_body(call: Node, outer: Region) -> Region:
    """The state the body of a higher-order node starts in, when the node itself runs under ``outer``."""
    name = operator_name(call)
    if name == "wrap_with_autocast":
        device, dtype, enabled, cache = call.args[:4]
        known_dtype = dtype if isinstance(dtype, torch.dtype) else None
        return outer.with_autocast(str(device), known_dtype, bool(enabled), cache if isinstance(cache, bool) else None)
    if name == "wrap_with_set_grad_enabled":
        return replace(outer, grad_enabled=bool(call.args[0]))
    if name == "autograd_function_apply":  # torch.autograd.Function runs its forward without recording
        return replace(outer, grad_enabled=False)
    return outer


# ---------------------------------------------------------------- the walk


class _State:
    """The state between two nodes, with what is needed to leave blocks again."""

    def __init__(self, outer: Region, ambient_grad: bool | None) -> None:
        self.outer = outer
        self.ambient_grad = ambient_grad
        self.autocasts: list[tuple[Node, Region]] = []
        self.inference: list[tuple[Node, bool | None, bool | None]] = []
        self.levels: list[str] = list(outer.functorch)
        self.others: dict[str, str] = dict(outer.other)
        self.now = outer

    def region(self) -> Region:
        return replace(self.now, functorch=tuple(self.levels), other=tuple(sorted(self.others.items())))


_Change = Callable[[_State, Node], None]


def _enter_autocast(state: _State, node: Node) -> None:
    device, dtype, enabled, cache = (*node.args, *[None] * 4)[:4]
    state.autocasts.append((node, state.now))
    known_dtype = dtype if isinstance(dtype, torch.dtype) else None
    state.now = state.now.with_autocast(str(device), known_dtype, enabled is not False, _flag(cache))


def _exit_autocast(state: _State, node: Node) -> None:
    while state.autocasts:
        entered, before = state.autocasts.pop()
        if entered in node.args or not state.autocasts:
            state.now = replace(state.now, autocast=before.autocast)
            return


def _set_grad_enabled(state: _State, node: Node) -> None:
    mode = _flag(node.args[0] if node.args else None)
    state.now = replace(state.now, grad_enabled=None if mode == state.ambient_grad else mode)


def _enter_inference_mode(state: _State, node: Node) -> None:
    mode = _flag(node.args[0] if node.args else True)
    state.inference.append((node, state.now.inference_mode, state.now.grad_enabled))
    state.now = replace(state.now, inference_mode=mode, grad_enabled=None if mode is None else not mode)


def _exit_inference_mode(state: _State, node: Node) -> None:
    if state.inference:
        _, inference, grad = state.inference.pop()
        state.now = replace(state.now, inference_mode=inference, grad_enabled=grad)


def _set_sdpa_backends(state: _State, node: Node) -> None:
    chosen = node.args[0] if node.args else ()
    names = [_backend_name(backend) for backend in (chosen if isinstance(chosen, (list, tuple)) else [chosen])]
    allowed = None if set(names) >= _SDPA_BACKENDS else tuple(sorted(names))
    state.now = replace(state.now, sdpa_backends=allowed)
    if len(node.args) > 1 and node.args[1] is True:
        # The order is restored on leaving by naming all backends, in the order that held before.
        if allowed is None and names == _sdpa_order():
            state.others.pop("sdpa order ", None)
        else:
            state.others["sdpa order "] = ", ".join(names)


def _backend_name(backend: Any) -> str:
    """A backend is a constant, or a node that calls ``_backend_from_string("MATH")``."""
    if isinstance(backend, Node):
        return str(backend.args[0]) if backend.args and isinstance(backend.args[0], str) else backend.name
    return str(getattr(backend, "name", backend))


def _set_deterministic(state: _State, node: Node) -> None:
    state.now = replace(state.now, deterministic=_flag(node.args[0] if node.args else None))


def _change_hooks(by: int) -> _Change:
    def change(state: _State, node: Node) -> None:
        state.now = replace(state.now, saved_tensors_hooks=max(0, state.now.saved_tensors_hooks + by))

    return change


def _set_forward_grad(state: _State, node: Node) -> None:
    if node.args and node.args[0] is True:  # the default
        state.others.pop("forward AD ", None)
    else:
        state.others["forward AD "] = str(node.args)


def _open_level(kind: str) -> _Change:
    def change(state: _State, node: Node) -> None:
        state.levels.append(f"{kind} {node.name}")

    return change


def _close_level(kind: str) -> _Change:
    def change(state: _State, node: Node) -> None:
        for index in reversed(range(len(state.levels))):
            if state.levels[index].startswith(f"{kind} "):
                del state.levels[index]
                return

    return change


def _enter_other(kind: str) -> _Change:
    def change(state: _State, node: Node) -> None:
        state.others[f"{kind} {node.name}"] = str((*node.args, *node.kwargs.items()))

    return change


def _exit_other(kind: str) -> _Change:
    def change(state: _State, node: Node) -> None:
        opened = [name for name in state.others if name.startswith(f"{kind} ")]
        named = [name for name in opened if any(name == f"{kind} {n.name}" for n in node.all_input_nodes)]
        for name in (named or opened)[-1:]:
            del state.others[name]

    return change


def _set_other(name: str) -> _Change:
    def change(state: _State, node: Node) -> None:
        if not any(isinstance(fake_value(n), torch.Tensor) for n in node.all_input_nodes):
            state.others[name] = str((*node.args, *node.kwargs.items()))

    return change


_CHANGES: dict[str, _Change] = {
    "_enter_autocast": _enter_autocast,
    "_exit_autocast": _exit_autocast,
    "_set_grad_enabled": _set_grad_enabled,
    "_enter_inference_mode": _enter_inference_mode,
    "_exit_inference_mode": _exit_inference_mode,
    "_sdpa_kernel": _set_sdpa_backends,
    "_set_deterministic_algorithms": _set_deterministic,
    "_set_fwd_grad_enabled": _set_forward_grad,
    "_saved_tensors_hooks_disable": _change_hooks(1),
    "_saved_tensors_hooks_enable": _change_hooks(-1),
    "_push_saved_tensors_default_hooks": _change_hooks(1),
    "_pop_saved_tensors_default_hooks": _change_hooks(-1),
    "_enter_dual_level": _open_level("dual"),
    "_exit_dual_level": _close_level("dual"),
    # The interpreter stack is popped to run something outside the innermost level, and pushed back after.
    "pop_dynamic_layer_stack": _enter_other("dynamic_layer_stack"),
    "push_dynamic_layer_stack": _exit_other("dynamic_layer_stack"),
}
"""Functions by name: the same one lives in torch._C._functorch and in torch._functorch.predispatch."""

# Whether a leaf may require grad while a functorch level wraps it: changes no value, and never left as it was found.
_HARMLESS = frozenset({"set_inplace_requires_grad_allowed", "_set_tensor_requires_grad"})
_COMPUTING_MODULES = ("torch.functional", "torch.nn.functional", "torch._tensor", "torch._C._nn", "torch.nn.init")


@lru_cache(maxsize=4096)
def _change(target: Target) -> _Change | None:
    """What a function does to the state; None for one that only computes.

    A function of torch that is not in the table and is named like a switch (``set_float32_matmul_precision``,
    ``_enter_x``/``_exit_x``, ``x_increment_nesting``, ``enable_flash_sdp``) opens a region of its own.
    """
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator, str)):
        return None
    name = str(getattr(target, "__name__", ""))
    module = str(getattr(target, "__module__", None) or "")
    if name in _HARMLESS or not f"{module}.".startswith("torch.") or module in _COMPUTING_MODULES:
        return None
    if name in _CHANGES:
        return _CHANGES[name]
    for pattern, make in _NAMED_LIKE_SWITCHES:
        match = re.match(pattern, name)
        if match is not None:
            return make(match[1])
    return None


_NAMED_LIKE_SWITCHES: tuple[tuple[str, Callable[[str], _Change]], ...] = (
    (r"_?(\w+?)_increment_nesting$", _open_level),
    (r"_?(\w+?)_decrement_nesting$", _close_level),
    (r"_?(?:enter|push)_(\w+)$", _enter_other),
    (r"_?(?:exit|pop)_(\w+)$", _exit_other),
    (r"((?:_?(?:set|use|enable|disable)_|_?(?:maybe_)?exchange_device)\w*)$", _set_other),
    (r"(\w+_(?:enable|disable))$", _set_other),
)


def _restored_grad_mode(graph: Graph) -> bool | None:
    """The grad mode around a graph whose switches are all halves of blocks; None if they do not determine it."""
    switches = graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    last = switches[-1].args[0] if switches and switches[-1].args else None
    return last if isinstance(last, bool) and len(switches) % 2 == 0 else None


def _ambient_autocast() -> Iterable[Autocast]:
    cache = torch.is_autocast_cache_enabled()
    for device in _AUTOCAST_DEVICES:
        try:
            enabled = torch.is_autocast_enabled(device)
        except RuntimeError:  # a device type this torch does not know
            continue
        yield (device, torch.get_autocast_dtype(device), True, cache) if enabled else (device, None, False, None)


def _sdpa_enabled(name: str) -> bool:
    getter = {"CUDNN_ATTENTION": "cudnn", "FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "mem_efficient"}
    is_enabled = getattr(torch._C, f"_get_{getter.get(name, name.lower())}_sdp_enabled", None)
    return is_enabled is None or bool(is_enabled())


def _sdpa_order() -> list[str]:
    members: dict[str, Any] = dict(SDPBackend.__members__)
    names = {int(backend): name for name, backend in members.items()}
    return [names.get(int(value), "") for value in torch._C._get_sdp_priority_order()]


def _level_name(level: str) -> str:
    kind = level.partition(" ")[0]
    return "forward-mode AD" if kind == "dual" else f"torch.func.{kind}"


def _device(entry: Autocast) -> str:
    return entry[0]


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


__all__ = ["Autocast", "Region", "Regions", "region_of_body"]
