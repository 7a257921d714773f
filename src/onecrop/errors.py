"""The one exception that is meant for people: the command line prints its sentence and exits, without a traceback."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any

MOST_SHOWN = 50  # names in one sentence


class UserError(ValueError):
    """Something the user can mend. The message names the thing and the remedy in one sentence."""


class RecipeError(UserError):
    """A run folder was begun with another recipe than the one that is asked for now."""


class StoppedError(UserError):
    """Someone asked for a stop: what is under way is saved, and nothing else is begun.

    Every process of a run raises it after the same step: the first one says it.
    """


@contextmanager
def not_fatal() -> Iterator[None]:
    """An error is said and the work goes on: a figure is worth more than the file it cannot be written to."""
    try:
        yield
    except UserError as error:
        print(f"onecrop: {error}", file=sys.stderr)


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is in no table: nearest valid name first, then all, or of very many the near ones."""
    names = sorted(known)
    small = {known.lower(): known for known in names}
    near = [small[match] for match in get_close_matches(name.lower(), small, n=5, cutoff=0.5)]
    hint = f"did you mean {near[0]!r}? " if near else ""
    shown = ", ".join(names if len(names) <= MOST_SHOWN else near) or f"{len(names):,} names, none of them near it"
    return UserError(f"unknown {kind} {name!r}: {hint}choose one of {shown}")


def from_extra(module: str, extra: str, need: str) -> Any:
    """A module that comes with an extra of this package. need: what needs it, for those who have not installed it."""
    try:
        return import_module(module)
    except ImportError:
        raise UserError(f"{need}: pip install 'onecrop[{extra}]'") from None
