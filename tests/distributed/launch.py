"""Starting several processes, as torchrun does, or with torchrun itself."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**more):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def together(size, module, *arguments):
    """`python -m module` in `size` processes that know of each other; all of them have to succeed."""
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=environment(**place, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(said)


def torchrun(size, command, options=(), **kwargs):
    """onecrop under torchrun -> the process, begun; `command` may name a script in place of `-m onecrop`."""
    run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", f"--master-port={free_port()}"]
    return subprocess.Popen(
        [*run, *options, *command],
        env=environment(**kwargs.pop("env", {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **kwargs,
    )
