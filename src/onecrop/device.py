"""The device: which one, in which number format, how much of its memory."""

import ctypes
import gc
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, Literal

import torch
from torch import Tensor

from onecrop.draws import fold
from onecrop.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@cache
def triton_works() -> bool:
    """Whether kernels can be made for a GPU here. torch brings Triton along on Linux alone, and Triton builds a part of
    itself at its first use, by a C compiler with Python's headers. Without it a GPU works as a CPU does, op by op."""
    compilers = (os.environ.get("CC"), which("gcc"), which("clang"))
    include = sysconfig.get_paths("posix_prefix")["include"]  # Debian's own scheme names another place
    headers = Path(include) / "Python.h"
    return find_spec("triton") is not None and any(compilers) and headers.exists()


def choose_device(name: str) -> torch.device:
    """Of several processes on a machine, which torchrun numbers, each takes a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    number = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "cuda" and number:
        if number >= torch.cuda.device_count():
            raise UserError(f"there is no GPU for process {number} of this machine: lower --nproc-per-node")
        name = f"cuda:{number}"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    try:
        torch.ones(1, device=device).item()  # by a kernel: there are GPUs for which this build of torch has none
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UserError(f"device {name} cannot be used here ({reason}): --device cpu can") from None
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # where streams, graphs and our own kernels go unless told otherwise
    if device.type == "cpu":
        _reuse_memory()
    return device


def _reuse_memory() -> None:
    """Let glibc keep what is freed. It gives large pieces back at once and maps them anew for the next layer: of
    MobileNetV2's time at 224 px almost half went into these page faults (benchmarks/cpu.py). Other systems: nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**30) or mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that older ones take


def tune(device: torch.device) -> None:
    """Settings of the libraries that cost nothing in exactness and much in speed."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # shapes are static: the first step may look for the fastest kernels
        torch.set_float32_matmul_precision("high")  # float32 products on the matrix units; only augmentation has any


def capture(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record the work as one graph, without doing it -> graph, result.

    thread_local: another thread may use the device meanwhile, such as the one that reads batches ahead.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()
    return graph, result


class Captured:
    """Work on tensors alone, done many times. On a GPU its second call is captured as one graph and replayed from then
    on: many small operations take longer to launch than to run. Other shapes than the first are worked on as they are.

    What it returns is overwritten by the next call.
    """

    def __init__(self, work: Callable[..., Tensor]) -> None:
        self.work = work
        self.shapes: list[torch.Size] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *given: Tensor) -> Tensor:
        if not given[0].is_cuda:
            return self.work(*given)
        shapes = [x.shape for x in given]
        if not self.shapes:  # libraries choose their kernels
            self.shapes = shapes
            return self.work(*given)
        if shapes != self.shapes:
            return self.work(*given)
        if self.graph is None:
            self.given = [x.clone() for x in given]
            self.graph, self.result = capture(lambda: self.work(*self.given))
        for kept, new in zip(self.given, given, strict=True):
            kept.copy_(new)
        self.graph.replay()
        return self.result


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether it has instructions for that. Where it has none, bfloat16 is worked out in float32, and slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def choose_precision(device: torch.device) -> Literal["float32", "bfloat16"]:
    return "bfloat16" if multiplies_bfloat16(device) else "float32"


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def seed_step(seed: int, step: int) -> None:
    """For layers that draw from torch's own generator (dropout): their randomness too is a function of the step."""
    torch.manual_seed(fold(seed, "torch", step))


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken on the device; None where nothing says so."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # ours, and not in use
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not on Linux
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def full_memory(error: Exception) -> str | None:
    """Whose memory an error says is full, if it does: a CPU's allocator has no kind of error of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return "GPU"
    return "machine" if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error) else None


def reset_peak_memory(device: torch.device) -> None:
    """From here on a run of its own: a process may have trained another one before."""
    if device.type == "cuda":
        gc.collect()  # a compiled network refers to itself, and would stay until Python looks for such things
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Bytes the run has held on the GPU at most."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
