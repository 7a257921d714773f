"""Methods: one file each, and one line in METHODS."""

from onecrop.methods.base import Method, Settings
from onecrop.methods.sid import Sid

METHODS: dict[str, type[Method]] = {
    "sid": Sid,
}

__all__ = ["METHODS", "Method", "Settings"]
