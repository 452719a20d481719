"""What the tests' compiler remembers: by what is compiled, not by what torch says of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import remembering_compiler

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
