"""What choosing a device does to the process."""

import subprocess
import sys

import pytest
import torch

from onecrop.device import choose_precision, multiplies_bfloat16

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
