"""Libraries in the place of CANN's, so that torch_npu's wheel loads on a machine without an NPU.

torch_npu is linked against libraries that come with the device's software and with nothing else. Here every symbol
that its own libraries lack is a C function that does nothing and says so (error 107000), but for a few: a device count
and a name from the environment (``CANN_STUB_SOC``), start-up, and what is looked up by name later. So the wheel's
schemas, fake kernels, gradients and its dispatch run; not one kernel does.

The symbols are read from the wheel that is installed, every time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_MAIN = "libascendcl.so"
_SYSTEM = "libstdc++.so.6 libc.so.6 libm.so.6 libgcc_s.so.1 libpthread.so.0 libdl.so.2 librt.so.1 ld-linux-x86-64.so.2"
_NULL = ("aclCreateTensorDesc", "aclCreateDataBuffer", "aclopCreateAttr")
_SUCCESS = (
    *("aclInit", "aclFinalize", "aclrtResetDevice"),
    *("aclrtSynchronizeStream", "aclrtSetDevice", "aclrtSetCurrentContext"),
    # Looked up by name when they are wanted, so that no list of undefined symbols has them.
    *("aclrtSetDeviceSatMode", "aclrtSynchronizeStreamWithTimeout", "aclrtGetSysParamOpt", "aclrtSetSysParamOpt"),
    *("aclrtSetOpExecuteTimeOut", "aclrtDestroyStreamForce", "aclrtSetStreamOverflowSwitch"),
    *("aclrtGetPrimaryCtxState", "aclrtCtxSetSysParamOpt", "aclrtCtxGetSysParamOpt"),
)
_SPECIAL = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *n) { *n = 1; return 0; }",
    "aclrtGetDevice": "int aclrtGetDevice(int *d) { *d = 0; return 0; }",
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return getenv("CANN_STUB_SOC"); }',
    "aclrtGetCurrentContext": "int aclrtGetCurrentContext(void **c) { static int one; *c = &one; return 0; }",
    "aclrtCreateStream": "int aclrtCreateStream(void **s) { static int one; *s = &one; return 0; }",
    "aclrtCreateStreamWithConfig": (
        "int aclrtCreateStreamWithConfig(void **s, int p, int f) { static int one; *s = &one; return 0; }"
    ),
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "no NPU: a stub of CANN"; }',
}
_COMPILER = """
#include <string.h>
int aclSetCompileopt(int o, const char *v) { return 0; }
int aclGetCompileopt(int o, char *v, unsigned long n) { strncpy(v, "1", n); return 0; }
unsigned long aclGetCompileoptSize(int o) { return 8; }
int aclGenGraphAndDumpForOp(void) { return 0; }
void *aclCreateGraphDumpOpt(void) { return 0; }
int aclDestroyGraphDumpOpt(void *o) { return 0; }
"""
_OTHERS = (
    *("libhccl.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so", "libfmk_parser.so"),
    *("libascend_protobuf.so", "libatb.so"),
)


def _symbols(kind: str, files: Iterable[Path]) -> set[str]:
    """Names of a kind that `nm` lists: "undefined" or "defined"; weak ones are not needed."""
    found: set[str] = set()
    for file in files:
        run = subprocess.run(["nm", "-D", f"--{kind}-only", str(file)], capture_output=True, text=True)
        for line in run.stdout.splitlines():
            words = line.split()
            if len(words) >= 2 and not (kind == "undefined" and words[-2] in ("w", "v")):
                found.add(words[-1].partition("@")[0])
    return found


def missing(packages: Path) -> set[str]:
    """What torch_npu's libraries need that neither they, torch, the system nor Python have."""
    own = [*packages.glob("torch_npu/lib/*.so"), *packages.glob("torch_npu/_C*.so")]
    system = [Path(folder) / name for folder in _folders() for name in _SYSTEM.split()]
    have = [*packages.glob("torch/lib/*.so*"), *own, *(f for f in system if f.exists()), Path(sys.executable).resolve()]
    have += [f for f in [Path(sysconfig.get_config_var("LIBDIR") or "") / n for n in _python_names()] if f.exists()]
    return _symbols("undefined", own) - _symbols("defined", have)


def _python_names() -> list[str]:
    return [str(sysconfig.get_config_var(name) or "") for name in ("LDLIBRARY", "INSTSONAME")]


def _folders() -> list[str]:
    told = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    return sorted({str(Path(path).parent) for path in re.findall(r"=> (\S+)", told)} | {"/lib64", "/usr/lib64"})


def _build(folder: Path, name: str, source: str) -> None:
    file = folder / f"{name}.c"
    file.write_text(source)
    flags = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", str(folder / name), str(file)]
    subprocess.run([os.environ.get("CC", "gcc"), *flags], check=True)


def build(packages: Path, folder: Path) -> int:
    """Builds the libraries into a folder; returns how many symbols torch_npu lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    names = missing(packages)
    fine = {n: f"int {n}(void) {{ return 0; }}" for n in _SUCCESS}
    known = {**_SPECIAL, **fine}
    known |= {n: f"void *{n}(void) {{ return 0; }}" for n in _NULL}
    rest = {n: f"int {n}(void) {{ return 107000; }}" for n in names if n not in known and n not in _COMPILER}
    _build(folder, _MAIN, "char *getenv(const char *);\n" + "\n".join({**known, **rest}.values()))
    _build(folder, "libacl_op_compiler.so", _COMPILER + "\n".join(fine.values()))
    for name in _OTHERS:
        _build(folder, name, "")
    return len(names)


def environment(folder: Path, soc: str) -> dict[str, str]:
    """The variables a process needs to load torch_npu over the libraries, as on one device with this name."""
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # plain `import torch` would import torch_npu
        "LD_LIBRARY_PATH": ":".join(p for p in paths if p),
        "CANN_STUB_SOC": soc,
    }


if __name__ == "__main__":
    print(build(Path(sysconfig.get_paths()["purelib"]), Path(sys.argv[1])), "symbols")
