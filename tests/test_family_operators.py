"""Common code names no operator of a family of devices: the family supplies it (`attn_pass.devices.base.Family`)."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import attn_pass
from attn_pass.devices.registry import families

PACKAGE = Path(attn_pass.__file__).parent
FAMILIES = {path.parent for path in PACKAGE.glob("devices/*/__init__.py")}

ATTENTION = re.compile(r"npu_\w+|flash_attn_\w+|_scaled_dot_product_\w+|_(flash|efficient|cudnn)_attention_\w+")
"""Operators of the vendors, of flash-attn, and of torch for one kind of device."""

ALLOWED = {
    "compat.py": {"_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"},
}
"""What is asked of torch's own tables, whatever the device: whether ring attention took the place of its call."""


def words(text: str) -> Iterator[str]:
    """The names in a text, in strings too, but for comments and docstrings."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME or (token.type == tokenize.STRING and before not in LINE_STARTS):
            yield from re.findall(r"\w+", token.string)
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type


LINE_STARTS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def supplied() -> set[str]:
    """The operators and functions that families name to the common code."""
    names: set[str] = set()
    for family in families():
        operators = (family.kernel_with_logarithm, *family.decomposed_calls, *family.settled_kernels)
        names |= {operator.overloadpacket.__name__ for operator in operators if operator is not None}
        names |= {*family.fused_operators, *family.reading_functions}
    return names


def of_families(text: str, known: set[str]) -> set[str]:
    return {word for word in words(text) if word in known or ATTENTION.fullmatch(word)}


def test_what_is_found() -> None:
    text = (
        '"""aten.npu_doc"""\n# npu_comment\nx = aten.npu_f.default\ny = "npu::npu_g", kernel\ndef f():\n    "npu_h"\n'
    )
    assert of_families(text, {"kernel"}) == {"npu_f", "npu_g", "kernel"}
    assert {"_scaled_dot_product_flash_attention_for_cpu", "memory_efficient_attention"} <= supplied()


def test_common_code_names_no_operator_of_a_family() -> None:
    known, found = supplied(), {}
    for path in PACKAGE.rglob("*.py"):
        if not FAMILIES & set(path.parents):
            name = path.relative_to(PACKAGE).as_posix()
            if names := of_families(path.read_text(), known) - ALLOWED.get(name, set()):
                found[name] = names
    assert not found
