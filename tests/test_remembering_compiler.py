"""What the tests' compiler remembers: by what is compiled, not by what torch says of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import remembering_compiler

INDUCTORS = ("-D", "TORCH_INDUCTOR_CPP_WRAPPER")
SAID = "\n// Compile cmd\n// g++ a.cpp\n// Link cmd\n// g++ a.o\n"


@pytest.mark.skipif(os.name != "posix" or shutil.which("g++") is None, reason="no compiler to remember for")
def test_a_source_is_the_same_with_what_torch_says_behind_it(tmp_path: Path) -> None:
    source, counted = tmp_path / "a.cpp", tmp_path / "compiler"
    counted.write_text(f'#!/bin/sh\necho called >> {tmp_path / "calls"}\nexec {shutil.which("g++")} "$@"\n')
    counted.chmod(0o755)
    code = "int answer() { return 1; }\n"
    for text, calls in ((code, 1), (code + SAID, 1), (code + SAID + SAID, 1), (code.replace("1", "2") + SAID, 2)):
        source.write_text(text)
        given = ("-c", str(source), "-o", str(tmp_path / "a.o"))
        assert remembering_compiler.main(str(tmp_path), str(counted), *given) == 0
        assert len((tmp_path / "calls").read_text().splitlines()) == calls


@pytest.mark.skipif(os.name != "posix", reason="the compiler is a shell script")
@pytest.mark.parametrize(
    ("text", "flags", "as_users", "level"),
    [
        ("namespace attn_pass_cpu_linear {}\n", INDUCTORS, False, "-O1"),
        ("namespace attn_pass_cpu_linear {}\n", INDUCTORS, True, "-O3"),
        ("namespace attn_pass_cpu {}\n", (), False, "-O3"),  # eager mode's
        ("int answer;\n", INDUCTORS, False, "-O3"),
    ],
)
def test_the_kernel_is_optimised_less_in_inductors_code(
    text: str, flags: tuple[str, ...], as_users: bool, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(remembering_compiler.AS_USERS, raising=False)
    if as_users:
        monkeypatch.setenv(remembering_compiler.AS_USERS, "1")
    source, compiler = tmp_path / "a.cpp", tmp_path / "compiler"
    source.write_text(text)
    compiler.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "given"}\n')
    compiler.chmod(0o755)
    assert remembering_compiler.main(str(tmp_path), str(compiler), str(source), *flags, "-O3", "-o", "a.o") == 0
    assert level in (tmp_path / "given").read_text().split()
