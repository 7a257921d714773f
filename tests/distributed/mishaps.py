"""onecrop under torchrun, with a mishap for one of the processes, said by the environment.

KILL_RANK=1 AT_STEP=3     that process is killed, as by the system, before that step of its first start
STOP_RANK=1 AT_STEP=3     it hears Ctrl-C there
TERM_RANK=1 AT_STEP=3     it hears SIGTERM there, twice: from a scheduler, and from torchrun, which heard it too
BROKEN_RANK=1 AT_STEP=3   all have weights that are no numbers from there on, and it is the first to look at the loss
BLIND_RANK=1              it stands in another folder, and finds neither data nor run there
"""

import os
import signal
import sys

import torch

from onecrop.cli import main
from onecrop.progress import Progress
from onecrop.step import TrainStep

RANK, FIRST_START = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
honest = TrainStep.__call__


def unlucky(self, step, lr, progress):
    if FIRST_START and step == int(os.environ.get("AT_STEP", "-1")):
        if os.environ.get("KILL_RANK") == RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("STOP_RANK") == RANK:
            os.kill(os.getpid(), signal.SIGINT)
        if os.environ.get("TERM_RANK") == RANK:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        if "BROKEN_RANK" in os.environ:
            torch.nn.init.constant_(self.method.head[0].weight, float("nan"))
    honest(self, step, lr, progress)


TrainStep.__call__ = unlucky
if "BROKEN_RANK" in os.environ:
    Progress.due = lambda self: os.environ["BROKEN_RANK"] == RANK
if os.environ.get("BLIND_RANK") == RANK:
    os.chdir("/")
sys.exit(main())
