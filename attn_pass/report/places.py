"""The origin of a node: the user's source line, and the path of the module."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
# No code of the user's: torch's, and attn_pass's own, which calls what `explain` is given.
_NOT_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
# A program exported elsewhere carries the paths of that machine.
_TORCH_ELSEWHERE = re.compile(r"[/\\](site|dist)-packages[/\\]torch[/\\]|^<eval_with_key>")


def source_line(node_meta: Mapping[str, Any]) -> str:
    """Where the user wrote a node: "file.py:123 in forward", the innermost frame that is not torch's own.

    Without such a frame the module it ran in ("in MultiheadAttention (layers.0.self_attn)"), then the innermost
    frame of torch, then "unknown source line".

    Args:
        node_meta: ``node.meta``, with "stack_trace" and "nn_module_stack" as Dynamo and torch.export leave them.
    """
    frames = [match.groupdict() for match in _FRAME.finditer(str(node_meta.get("stack_trace") or ""))]
    users = [f for f in frames if not f["file"].startswith(_NOT_USERS) and not _TORCH_ELSEWHERE.search(f["file"])]
    if users:
        return _frame_text(users[-1])
    path, module_class = _innermost_module(node_meta)
    if module_class:
        return f"in {module_class} ({path})" if path else f"in {module_class}"
    return _frame_text(frames[-1]) if frames else "unknown source line"


def module_path(node_meta: Mapping[str, Any]) -> str:
    """Path of the innermost module a node ran in, "layers.0.self_attn"; "" for the root module or when unknown."""
    return _innermost_module(node_meta)[0]


def _frame_text(frame: Mapping[str, str]) -> str:
    base = re.split(r"[/\\]", frame["file"])[-1]
    return f"{base}:{frame['line']} in {_own_name(frame['function'])}"


def _own_name(function: str) -> str:
    """The function that a resumed part of it belongs to: "forward" for "torch_dynamo_resume_in_forward_at_12"."""
    resumed = function.removeprefix("torch_dynamo_resume_in_")
    return function if resumed == function else resumed.rpartition("_at_")[0]


def _innermost_module(node_meta: Mapping[str, Any]) -> tuple[str, str]:
    """(path, class name) of the last entry of "nn_module_stack"; empty strings when there is none.

    Dynamo writes ("L['self'].layers.0", class), torch.export ("layers.0", "package.module.Class").
    """
    stack = node_meta.get("nn_module_stack")
    if not isinstance(stack, Mapping) or not stack:
        return "", ""
    entry = list(stack.values())[-1]
    if not isinstance(entry, tuple | list) or len(entry) != 2:
        return "", ""
    path = re.sub(r"^L\[[^\]]*\]|^L__\w*self_*", "", str(entry[0]))
    path = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]|\[['\"]?([^'\"\]]+)['\"]?\]", lambda m: f".{m[1] or m[2]}", path)
    # Modules that look up attributes by hand (diffusers' ModelMixin.__getattr__) are read through their dictionary.
    path = re.sub(r"(^|\.)__dict__\._modules\.", r"\1", path)
    module_class = entry[1]
    name = module_class.__name__ if isinstance(module_class, type) else str(module_class).rsplit(".", 1)[-1]
    return path.strip("."), name
