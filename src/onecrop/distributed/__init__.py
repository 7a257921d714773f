"""Several processes, one run: who holds what, how they add up, and what happens when one of them dies."""

from onecrop.distributed.group import ALONE, Group, world
from onecrop.distributed.join import joined, restarted
from onecrop.distributed.state import own_state, whole_state

__all__ = ["ALONE", "Group", "joined", "own_state", "restarted", "whole_state", "world"]
