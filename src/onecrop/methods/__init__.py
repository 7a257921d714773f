"""Methods: one file each, and one line in METHODS."""

from onecrop.methods.base import Method, Settings
from onecrop.methods.byol import Byol
from onecrop.methods.jigclu import Jigclu
from onecrop.methods.moco import Moco
from onecrop.methods.npid import Npid
from onecrop.methods.pid import Pid
from onecrop.methods.sid import Sid
from onecrop.methods.simclr import Simclr
from onecrop.methods.simsiam import Simsiam

METHODS: dict[str, type[Method]] = {
    "sid": Sid,
    "npid": Npid,
    "pid": Pid,
    "simclr": Simclr,
    "moco": Moco,
    "simsiam": Simsiam,
    "byol": Byol,
    "jigclu": Jigclu,
}

__all__ = ["METHODS", "Method", "Settings"]
