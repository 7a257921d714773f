"""The one exception that is meant for people: the command line prints its sentence and exits, without a traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Something the user can mend. The message names the thing and the remedy in one sentence."""


class RecipeError(UserError):
    """A run folder was begun with another recipe than the one that is asked for now."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is in no table: nearest valid name first, then all of them."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {name!r}: {hint}choose one of {', '.join(names)}")
