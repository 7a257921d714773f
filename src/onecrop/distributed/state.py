"""One checkpoint for any number of processes: what a single process would write, put together and taken apart."""

from collections.abc import Collection

import torch
from torch import Tensor

from onecrop.distributed.group import Group


def _in_parts(name: str, value: Tensor, shards: Collection[str]) -> bool:
    """method.NAME or optimizer.NAME/momentum_buffer, with NAME one of the tables that lie in parts."""
    return value.ndim > 0 and name.partition(".")[2].partition("/")[0] in shards


def whole_state(state: dict[str, Tensor], shards: Collection[str], count: int, group: Group) -> dict[str, Tensor]:
    """The state of all processes on the first one, tables with all their `count` rows; the others' is not for use."""
    if group.size == 1:
        return state
    whole = {}
    for name, value in state.items():
        table = group.collect(value, count) if _in_parts(name, value, shards) else value
        if table is not None:
            whole[name] = table
    return whole


def own_state(state: dict[str, Tensor], shards: Collection[str], group: Group) -> dict[str, Tensor]:
    """The way back: from what the first process has read to what each of them holds."""
    if group.size == 1:
        return state
    here = [(k, list(v.shape), str(v.dtype), _in_parts(k, v, shards)) for k, v in state.items()]
    own = {}
    for name, shape, dtype, in_parts in group.said_by(0, here):
        send = group.hand_out if in_parts else group.copy_of_first
        own[name] = send(state.get(name), shape, getattr(torch, dtype.removeprefix("torch.")))
    return own
