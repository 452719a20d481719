"""Torch's output for a rewritten graph: Inductor's code, and the bytecode that Dynamo runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch._guards import CompileContext

# torch's structured trace has the generated code also when Inductor's cache has the graph: as its own record, and of
# AOTInductor's C++ as one of these graph dumps.
_TRACE = "torch.__trace"
_CODE, _DUMP, _AOT = "inductor_output_code", "graph_dump", ("inductor_aot_wrapper_code", "inductor_aot_kernel_code")


@dataclass(frozen=True)
class Output:
    """One text: generated code, with the compile it belongs to ("0/0"; "" where it is none of Dynamo's)."""

    name: str
    text: str
    compile_id: str = ""


@dataclass
class Outputs:
    """What was seen.

    Attributes:
        code: Inductor's, in order.
        functions: the function Dynamo compiled, what it put in its place, and the compile.
        remarks: what could not be watched, and why.
    """

    code: list[Output] = field(default_factory=list)
    functions: list[tuple[CodeType, CodeType, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class _Watch(logging.Handler):
    def __init__(self, outputs: Outputs) -> None:
        super().__init__(logging.DEBUG)
        self.outputs = outputs

    def emit(self, record: logging.LogRecord) -> None:
        metadata, payload = getattr(record, "metadata", None), getattr(record, "payload", None)
        if not isinstance(metadata, dict) or not isinstance(payload, str) or not payload:
            return
        dumped = (metadata.get(_DUMP) or {}).get("name", "")
        if _CODE in metadata or dumped in _AOT:
            frame, again = metadata.get("frame_id"), metadata.get("frame_compile_id")
            compile_id = "" if frame is None else f"{frame}/{again}"
            name = f"{dumped.removeprefix('inductor_')}.cpp" if dumped else "output_code.py"
            if not any(known.text == payload for known in self.outputs.code):
                self.outputs.code.append(Output(name, payload, compile_id))

    def handleError(self, record: logging.LogRecord) -> None:
        """Never print during a user's compile."""


@contextmanager
def watching(*, code: bool = True, bytecode: bool = True) -> Iterator[Outputs]:
    """Outputs that fill with whatever this process compiles inside."""
    outputs = Outputs()
    logger, watch = logging.getLogger(_TRACE), _Watch(outputs)
    handle: Any = None
    if bytecode:
        try:
            from torch._dynamo.convert_frame import register_bytecode_hook

            handle = register_bytecode_hook(lambda old, new: _note_bytecode(outputs, old, new))
        except Exception as error:
            outputs.remarks.append(f"this torch does not show the bytecode it writes: {error}")
    if code:
        logger.addHandler(watch)
    try:
        yield outputs
    finally:
        logger.removeHandler(watch)
        if handle is not None:
            handle.remove()


def _note_bytecode(outputs: Outputs, old: CodeType, new: CodeType) -> None:
    outputs.functions.append((old, new, str(CompileContext.current_compile_id() or "")))


def decompiled(outputs: Outputs) -> tuple[list[Output], str]:
    """The functions as Python again, by depyf; and why there are none, "" where there are."""
    if not outputs.functions:
        return [], ""
    try:
        import depyf
    except ImportError:
        return [], "decompiling bytecode needs depyf: pip install depyf"
    texts = []
    for old, new, compile_id in outputs.functions:
        try:
            text = str(depyf.decompile(new))
        except Exception as error:
            text = f"# depyf could not decompile it: {type(error).__name__}: {error}\n"
        heading = f"# {old.co_filename}:{old.co_firstlineno}, as Dynamo runs it\n"
        texts.append(Output(f"{old.co_name}.py", heading + text, compile_id))
    return texts, ""
