"""Flags of the command line: made from the recipe's fields, with one sentence for what is wrong."""

import argparse
import os
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from onecrop.choices import CHOICES
from onecrop.errors import UserError, unknown
from onecrop.methods import METHODS
from onecrop.recipe import Recipe, describe_hint, flag, hints, spelled

OPEN = {*CHOICES, "image_size"}  # fields that are chosen where nobody says them


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """As parse_args, but an unknown flag is answered with the nearest known one."""
        values, rest = self.parse_known_args(arguments)
        if rest:
            known = [option for action in self._actions for option in action.option_strings]
            near = get_close_matches(rest[0].split("=")[0], known, n=1)
            raise UserError(
                f"unknown argument {rest[0]}" + (f": did you mean {near[0]}?" if near else f" (see {self.prog} --help)")
            )
        return values


def at_home(argument: str) -> str:
    """~/photos as shells read it, which leave it as it is in quotes and in --out=~/runs: nobody wants a folder `~`."""
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return option + equals + (os.path.expanduser(value) if value.startswith("~") else value)


def listed(text: str) -> list[str]:
    """Names between commas."""
    return [name.strip() for name in text.split(",")]


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def add_fields(parser: Parser, base: Recipe) -> None:
    """A flag for every field of the recipe and of its method's settings, with the default it has in `base`."""
    for title, owner, part in (
        ("recipe", Recipe, base),
        (f"settings of {base.method}", type(base.settings), base.settings),
    ):
        group = parser.add_argument_group(title)
        for name, hint in hints(owner).items():
            if name not in ("data", "settings"):
                default = getattr(part, name)
                unsaid = "auto" if name in OPEN else "none"
                add_field(group, name, hint, f" [{unsaid if default is None else spelled(default)}]")


def add_settings(parser: Parser, methods: Sequence[str]) -> None:
    """A flag for every setting that one of these methods has."""
    group = parser.add_argument_group("settings of methods: each holds for those that have it")
    settings: dict[str, Any] = {}
    for method in methods:
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        settings |= hints(METHODS[method].Settings)
    for name, hint in settings.items():
        add_field(group, name, hint)


def add_field(group: argparse._ActionsContainer, name: str, hint: Any, default: str = "") -> None:
    """default: how the help says it. A flag that is not given leaves no value."""
    wanted, text = describe_hint(hint)
    shown = (text + default).replace("%", "%%").strip()
    group.add_argument(flag(name), metavar=wanted, help=shown, default=argparse.SUPPRESS)
