"""What choosing a device does to the process."""

import subprocess
import sys

import pytest
import torch

from onecrop.device import choose_device, choose_precision, multiplies_bfloat16, triton_works
from onecrop.errors import UserError

FAULTS = """
import ctypes, resource, sys
import torch
from onecrop.device import choose_device
if not hasattr(ctypes.CDLL(None), "mallopt"):
    sys.exit(77)
if sys.argv[1] == "kept":
    choose_device("cpu")
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.empty(2**24).fill_(1.0)  # 64 MB, freed at once: as an activation is in evaluation
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's allocator")
def test_on_a_cpu_freed_memory_is_used_again():
    found = {}
    for memory in ("given back", "kept"):
        done = subprocess.run([sys.executable, "-c", FAULTS, memory], capture_output=True, text=True)
        if done.returncode == 77:
            pytest.skip("not glibc")
        found[memory] = int(done.stdout)
    assert found["kept"] < 1000
    assert found["given back"] > 100 * max(1, found["kept"])  # else the test shows nothing here


@pytest.mark.parametrize(
    ("able", "short"),
    [
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_f": True, "amx_bf16": True}, True),
        ({"avx512_f": True, "avx512_bf16": False}, False),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_bfloat16_is_for_cpus_with_instructions_for_it(monkeypatch, able, short):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    cpu = torch.device("cpu")
    assert multiplies_bfloat16(cpu) is short
    assert choose_precision(cpu) == ("bfloat16" if short else "float32")


def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason(monkeypatch):
    """Too old for this build of torch, or full: seen by the first kernel, not by the first allocation."""

    def too_old(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device.\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", too_old)
    with pytest.raises(UserError, match=r"cuda cannot be used here \(CUDA error: no kernel .* device\): --device"):
        choose_device("auto")


@pytest.mark.parametrize("missing", ["triton", "compiler", "headers"])
def test_kernels_need_triton_a_compiler_and_headers(monkeypatch, tmp_path, missing):
    here = {"triton", "compiler", "headers"} - {missing}
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("onecrop.device.find_spec", lambda name: "triton" in here or None)
    monkeypatch.setattr("onecrop.device.which", lambda name: "/usr/bin/cc" if "compiler" in here else None)
    (tmp_path / "Python.h").touch()
    folder = tmp_path if "headers" in here else tmp_path / "none"
    monkeypatch.setattr("onecrop.device.sysconfig.get_paths", lambda scheme: {"include": str(folder)})
    triton_works.cache_clear()
    assert not triton_works()
    here.add(missing)
    monkeypatch.setattr("onecrop.device.sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    triton_works.cache_clear()
    assert triton_works()
    triton_works.cache_clear()
