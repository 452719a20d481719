"""The kernel's source as one text: the common parts, and the kernel once for each instruction set.

Each instruction set is a namespace, compiled for that set whatever the compiler flags of the rest of the file, so that
one library or package holds several and chooses at run time (`dispatch.hpp`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from attn_pass.devices.cpu.kernel import slopes

_HERE = Path(__file__).parent
_PROCESSOR = Path("/proc/cpuinfo")
ELEMENTS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_OUTER = "attn_pass_cpu"
BACKWARD = "attend_backward"
"""The kernel of the gradients, which takes ``BackwardArgs``."""
_COMMON_FILES = (
    "dropout.hpp",
    "amx.hpp",
    "columns.hpp",
    "packing.hpp",
    "kept.hpp",
    "lookups.hpp",
    "tiles.hpp",
    "many.hpp",
    "segments.hpp",
)
LINEAR = "multiply"
"""A linear layer, which takes ``LinearArgs``; of a number of rows that is known, one of the two below."""
LINEAR_FEW, LINEAR_MANY = f"{LINEAR}_few", f"{LINEAR}_many"
MOST_FEW = 16  # rows: that of `linear_many.hpp`
_LINEAR = (LINEAR, LINEAR_FEW, LINEAR_MANY)
_FILES = (*_COMMON_FILES, "lanes.hpp", "few.hpp")
_FILES_OF = {
    BACKWARD: (*_COMMON_FILES, "backward_tile.hpp", "backward.hpp"),
    **dict.fromkeys(_LINEAR, ("columns.hpp", "packing.hpp", "linear_many.hpp", "linear.hpp")),
}
_NAMES_OF = {BACKWARD: f"{_OUTER}_back", **dict.fromkeys(_LINEAR, f"{_OUTER}_linear")}
_ARGUMENTS_OF = {BACKWARD: "BackwardArgs", **dict.fromkeys(_LINEAR, "LinearArgs")}


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set of `dispatch.hpp`: its name there, the file of its vectors, and the compiler flags.

    Where the compiler may use more than it has anywhere, the whole file needs that, and nothing ever chooses this set:
    ``surpassed`` is the preprocessor's condition for it.
    """

    name: str
    file: str
    features: str = ""  # as GCC's and Clang's attribute ``target`` takes them
    has_bf16_dots: bool = False
    has_tiles: bool = False
    surpassed: str = ""


def _all_defined(*features: str) -> str:
    return " && ".join(f"defined(__{name}__)" for name in features)


_AVX512 = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"
_TILES_OF_GCC, _KNOWS_TILES = ",amx-tile,amx-bf16", "defined(__clang__) || __GNUC__ >= 11"
_TILES = InstructionSet("amx", "isa_avx512.hpp", f"{_AVX512},avx512bf16{_TILES_OF_GCC}", True, True)
ALL = (
    _TILES,
    InstructionSet("avx512_bf16", "isa_avx512.hpp", f"{_AVX512},avx512bf16", has_bf16_dots=True),
    InstructionSet("avx512", "isa_avx512.hpp", _AVX512),
    InstructionSet(
        "avx2", "isa_avx2.hpp", "avx2,fma,f16c", surpassed=_all_defined("AVX512F", "AVX512BW", "AVX512VL", "AVX512DQ")
    ),
    InstructionSet("plain", "isa_plain.hpp", surpassed=_all_defined("AVX2", "FMA", "F16C")),
)


def in_tiles(dtype: torch.dtype, kernel: str = "attend_type", *, trains: bool = False) -> bool:
    """Whether a kernel multiplies in tiles where the processor has them.

    Tiles are of bfloat16. What a backward reads is left by the products that it makes again, which has none; few rows
    leave tiles empty.
    """
    return dtype == torch.bfloat16 and kernel not in (BACKWARD, *_LINEAR, "attend_few") and not trains


def everywhere(dtype: torch.dtype, tiles: bool) -> tuple[InstructionSet, ...]:
    """What a package holds: tiles where a kernel uses them, pairs for bfloat16 alone, and all other sets.

    The compiler leaves out those that are `surpassed`.
    """
    pairs = dtype == torch.bfloat16
    return tuple(s for s in ALL if (tiles or not s.has_tiles) and (pairs or not s.has_bf16_dots))


@cache
def of_this_machine(tiles: bool = True) -> tuple[InstructionSet, ...]:
    """The one that `dispatch.hpp` chooses here: what is compiled for this process alone needs no other."""
    from torch.cpu import _is_avx2_supported, _is_avx512_bf16_supported, _is_avx512_supported

    if tiles and has_tiles():
        return (_TILES,)
    if _is_avx512_supported():
        name = "avx512_bf16" if _is_avx512_bf16_supported() and processor_has("AuthenticAMD") else "avx512"
    else:
        name = "avx2" if _is_avx2_supported() else "plain"
    return tuple(s for s in ALL if s.name == name)


@cache
def has_tiles() -> bool:
    """Whether this process may multiply in tiles: the processor can, and Linux gives it their registers.

    It is asked once: what a decision counts on, what is compiled and what names it in Inductor's caches are then one.
    """
    from torch.cpu import _init_amx, _is_avx512_bf16_supported

    return processor_has("amx_bf16") and _is_avx512_bf16_supported() and bool(_init_amx())


def processor_has(word: str) -> bool:
    """Whether Linux lists this of the processor, its maker or a feature; False on other systems."""
    try:
        return word in _PROCESSOR.read_text().split()
    except OSError:
        return False


_X86 = "defined(__x86_64__)"
_BEGIN = """
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("{features}"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("{features}")
#endif
"""
_END = """
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
"""


def namespace_of(sets: Sequence[InstructionSet], score: str, kernel: str = "attend_type") -> str:
    """The namespace everything lies in, since a package is one file: one for each score function and kernel.

    And for each choice of instruction sets: those with tiles or pairs are left out of kernels that do not use them.
    """
    outer = _NAMES_OF.get(kernel, _OUTER)
    outer += "_tiles" if any(s.has_tiles for s in sets) else "_pairs" if any(s.has_bf16_dots for s in sets) else ""
    return f"{outer}_{hashlib.sha256(score.encode()).hexdigest()[:12]}" if score else outer


def arguments_of(kernel: str) -> str:
    """The structure of `common.hpp` that a kernel takes."""
    return _ARGUMENTS_OF.get(kernel, "Args")


def kernel_source(sets: Sequence[InstructionSet] = ALL, score: str = "", kernel: str = "attend_type") -> str:
    """Everything but an entry, in C++17; ``NAMESPACE::SET::attend_type<...>(args)`` are the kernels.

    ``score`` is a score function as `scores.written` writes it, or empty for the scaled product. With the ``kernel``
    `BACKWARD` or one of linear layers it is the source of that one instead.
    """
    files = _FILES_OF.get(kernel, _FILES)
    body = "\n".join(_if(condition, _namespace(s, files)) for s, condition in _compiled(sets))
    if score:
        names = {"ATTN_SCORE": score, **(slopes.macros(score) if kernel == BACKWARD else {})}
        defined = "".join(f"#define {name} {text}\n" for name, text in names.items())
        undefined = "".join(f"#undef {name.split('(')[0]}\n" for name in names)
        body = f"{defined}{body}\n{undefined}"
    joined = "\n".join((_text("common.hpp"), body, _text("dispatch.hpp")))
    return joined.replace(_OUTER, namespace_of(sets, score, kernel))


def call_of(
    dtype: torch.dtype, sets: Sequence[InstructionSet] = ALL, kernel: str = "attend_type", score: str = ""
) -> str:
    """Statements that run the kernel on ``args``; the last of ``sets`` where the processor has none of the others."""
    compiled = _compiled(sets)
    cases = []
    for n, (s, condition) in enumerate(compiled):
        label = _label(s, [later for _, later in compiled[n + 1 :]])
        element = f"attn_pass_cpu::{s.name}::{ELEMENTS[dtype]}"
        cases.append(_if(condition, f"{label} attn_pass_cpu::{s.name}::{kernel}<{element}>(args); break;"))
    tiles, pairs = (str(any(has)).lower() for has in ([s.has_tiles for s in sets], [s.has_bf16_dots for s in sets]))
    lines = [f"  static const attn_pass_cpu::Set set = attn_pass_cpu::best_set({tiles}, {pairs});", "  switch (set) {"]
    lines += [*cases, "  }"]
    return "\n".join(lines).replace(_OUTER, namespace_of(sets, score, kernel))


def _compiled(sets: Sequence[InstructionSet]) -> list[tuple[InstructionSet, str]]:
    """Each set and the preprocessor's condition for it, "" if there is none; the first has none but its processor's."""
    conditions = []
    for n, s in enumerate(sets):
        of_processor = [_X86] if s.features else []
        conditions.append(" && ".join([*of_processor, *([f"!({s.surpassed})"] if s.surpassed and n else [])]))
    return list(zip(sets, conditions, strict=True))


def _label(which: InstructionSet, later: Sequence[str]) -> str:
    """A set's in the switch, given the conditions of those behind it: the last one that is compiled is the default."""
    case = f"case attn_pass_cpu::{which.name.upper()}:"
    if not later:
        return "default:"
    return case if "" in later else _if(" || ".join(f"({one})" for one in later), case, "default:") + "\n"


def _if(condition: str, text: str, otherwise: str = "") -> str:
    if not condition:
        return text
    return f"#if {condition}\n{text}\n" + (f"#else\n{otherwise}\n" if otherwise else "") + "#endif"


def _begin(which: InstructionSet) -> str:
    """What the namespace of a set is compiled with."""
    defined = f"#define ATTN_BF16_DOTS {int(which.has_bf16_dots)}\n#define ATTN_TILES {int(which.has_tiles)}\n"
    return defined + (_BEGIN.format(features=which.features) if which.features else "")


def _namespace(which: InstructionSet, files: Sequence[str]) -> str:
    body = "\n".join(_text(name) for name in (which.file, *files))
    begin = _begin(which)
    if which.has_tiles:
        # Pairs are left out as well: on the processors that have tiles they are slower than floats.
        features = which.features.replace(_TILES_OF_GCC, "")
        without = _begin(replace(which, features=features, has_bf16_dots=False, has_tiles=False))
        begin = f"#if {_KNOWS_TILES}\n{begin}\n#else\n{without}\n#endif\n"
    return "".join(
        (
            begin,
            f"namespace attn_pass_cpu {{\nnamespace {which.name} {{\nnamespace {{\n{body}\n}}\n}}\n}}\n",
            _END if which.features else "",
            "#undef ATTN_BF16_DOTS\n#undef ATTN_TILES\n#undef captured\n",
        )
    )


@cache
def identity() -> str:
    """A hash of the kernel and of what writes it into generated code, where Inductor's caches do not see it."""
    places = (_HERE, _HERE.parent / "linear")
    files = sorted(p for place in places for kind in ("*.hpp", "*.py") for p in place.glob(kind))
    return hashlib.sha256(b"\0".join(p.name.encode() + p.read_bytes() for p in files)).hexdigest()


@cache
def _text(name: str) -> str:
    return (_HERE / name).read_text()
