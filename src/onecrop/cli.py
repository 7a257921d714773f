"""The command line: one verb a function, no logic of its own."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from onecrop.compare import compare, sweep
from onecrop.data import SOURCES
from onecrop.errors import UserError, unknown
from onecrop.evaluate import EVALUATIONS, evaluate
from onecrop.evaluate.finetune import Budget, finetune
from onecrop.export import FORMATS, export
from onecrop.methods import METHODS
from onecrop.nets import BACKBONES, build_timm
from onecrop.recipe import Recipe, check, describe_hint, flag, hints
from onecrop.recipes import RECIPES, named
from onecrop.report.results import write_results
from onecrop.report.tables import result_table, share_table
from onecrop.runs import Run
from onecrop.train import pretrain

TABLES: dict[str, Any] = {
    "methods": METHODS,
    "backbones": {**BACKBONES, "timm/NAME": build_timm},
    "data": SOURCES,
    "recipes": RECIPES,
    "evaluations": EVALUATIONS,
}


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


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def pretrain_verb(arguments: Sequence[str]) -> None:
    """learn a backbone from unlabelled images"""
    first = Parser(add_help=False, allow_abbrev=False)
    for option in ("--method", "--recipe", "--out"):
        first.add_argument(option)
    first.add_argument("--resume", action="store_true")
    known, _ = first.parse_known_args(arguments)
    base = named(known.recipe) if known.recipe else Recipe()
    earlier = Run(known.out or base.out)
    if known.resume and earlier.recipe_file.exists():
        base = earlier.recipe()  # flags then only repeat what the run was begun with
    if known.method:
        base = base.override({"method": known.method})

    parser = Parser(prog="onecrop pretrain", description=pretrain_verb.__doc__, allow_abbrev=False)
    parser.add_argument("data", nargs="?", help="a folder of images, or one of: " + ", ".join(SOURCES))
    parser.add_argument("--recipe", metavar="NAME", help="start from a named recipe: " + ", ".join(RECIPES))
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    _add_fields(parser, base)
    values = vars(parser.parse(arguments))
    changes = {name: value for name, value in values.items() if name not in ("recipe", "resume") and value is not None}
    if "data" not in changes and not known.recipe and not (known.resume and earlier.recipe_file.exists()):
        if known.resume:
            raise UserError(f"nothing to resume in {earlier.folder}: it is not a run folder")
        raise UserError(f"say what to learn from: onecrop pretrain DATA, a folder or one of {', '.join(SOURCES)}")
    pretrain(base.override(changes), resume=values["resume"])


def _add_fields(parser: Parser, base: Recipe) -> None:
    """A flag for every field of the recipe and of its method's settings, with the default it has in `base`."""
    for title, owner, part in (
        ("recipe", Recipe, base),
        (f"settings of {base.method}", type(base.settings), base.settings),
    ):
        group = parser.add_argument_group(title)
        for name, hint in hints(owner).items():
            if name not in ("data", "settings"):
                wanted, text = describe_hint(hint)
                default = getattr(part, name)
                shown = f"{text} [{'auto' if default is None else default}]".replace("%", "%%").strip()
                group.add_argument(flag(name), metavar=wanted, help=shown, default=argparse.SUPPRESS)


def evaluate_verb(arguments: Sequence[str]) -> None:
    """score a backbone on frozen features"""
    parser = Parser(prog="onecrop evaluate", description=evaluate_verb.__doc__, allow_abbrev=False)
    parser.add_argument("run", help="a run folder, or a backbone.safetensors file")
    parser.add_argument("--data", help="labelled data set or folder of classes (default: the run's)")
    parser.add_argument("--with", dest="evaluations", default="knn,linear", help="of: " + ", ".join(EVALUATIONS))
    parser.add_argument("--baselines", action="store_true", help="also the untrained network and raw pixels")
    parser.add_argument("--data-dir", help="where named data sets lie [as in the run]")
    parser.add_argument("--skip-broken", action="store_true", default=None, help="leave unreadable images out")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    parser.add_argument("--seed", type=int, default=0, help="of the probes [0]")
    parser.add_argument("--k", type=int, default=200, help="neighbours of the kNN vote [200]")
    values = vars(parser.parse(arguments))
    values["evaluations"] = tuple(values["evaluations"].split(","))
    print(result_table(evaluate(values.pop("run"), values.pop("data"), values.pop("evaluations"), **values)))


def fine_tune_verb(arguments: Sequence[str]) -> None:
    """score a backbone with few labels, against training from scratch"""
    parser = Parser(prog="onecrop fine-tune", description=fine_tune_verb.__doc__, allow_abbrev=False)
    parser.add_argument("run", help="a run folder, or a backbone.safetensors file")
    parser.add_argument("data", help="a CSV file of labels (file,label), a folder of classes or a labelled data set")
    parser.add_argument("--shares", default="0.01,0.1,1", help="of the labels, class by class [0.01,0.1,1]")
    for name, default in Budget._field_defaults.items():
        parser.add_argument(
            flag(name), type=type(default), default=default, help=f"of the training of all weights [{default}]"
        )
    parser.add_argument("--data-dir", default="data", help="where named data sets lie [data]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    parser.add_argument("--seed", type=int, default=0, help="of subsets, order and crops [0]")
    values = vars(parser.parse(arguments))
    budget = Budget(**{name: values.pop(name) for name in Budget._fields})
    shares = [check("shares", float, share) for share in values.pop("shares").split(",")]
    print(share_table(finetune(**values, shares=shares, budget=budget)))


def export_verb(arguments: Sequence[str]) -> None:
    """write a backbone for torchvision, timm or ONNX, and check it"""
    parser = Parser(prog="onecrop export", description=export_verb.__doc__, allow_abbrev=False)
    parser.add_argument("run", help="a run folder, or a backbone.safetensors file")
    parser.add_argument("--format", required=True, help="of: " + ", ".join(FORMATS))
    parser.add_argument("--out", help="the file to write [RUN/FORMAT with the usual ending]")
    export(**vars(parser.parse(arguments)))


def compare_verb(arguments: Sequence[str]) -> None:
    """train and score several methods, backbones and seeds; one table"""
    parser = Parser(prog="onecrop compare", description=compare_verb.__doc__, allow_abbrev=False)
    parser.add_argument("data", help="labelled data set or folder of classes")
    parser.add_argument("--methods", default=",".join(METHODS), help="of: " + ", ".join(METHODS))
    parser.add_argument("--backbones", default="resnet18", help="of: " + ", ".join(TABLES["backbones"]))
    parser.add_argument("--seeds", type=_count, default=1, help="runs of each [1]")
    parser.add_argument("--with", dest="evaluations", default="knn,linear-fast", help="of: " + ", ".join(EVALUATIONS))
    parser.add_argument("--out", default="runs/compare", help="folder of the runs and the table [runs/compare]")
    group = parser.add_argument_group("fields of every recipe (default: as in each method's own)")
    for name, hint in hints(Recipe).items():
        if name not in ("data", "out", "method", "backbone", "settings"):
            wanted, text = describe_hint(hint)
            group.add_argument(flag(name), metavar=wanted, help=text.replace("%", "%%"), default=argparse.SUPPRESS)
    values = vars(parser.parse(arguments))
    names = {key: values.pop(key).split(",") for key in ("methods", "backbones", "evaluations")}
    seeds, out = values.pop("seeds"), Path(values.pop("out"))
    base = Recipe().override(values)
    values.pop("seed", None)  # the first of the seeds
    print("\n" + compare(base, **names, seeds=seeds, out=out, overrides=values).read_text())
    print(f"{out}/comparison.md, .csv, .tex, .png")


def sweep_verb(arguments: Sequence[str]) -> None:
    """train and score one recipe with several changes; one table"""
    first = Parser(add_help=False, allow_abbrev=False)
    for option in ("--method", "--recipe"):
        first.add_argument(option)
    known, _ = first.parse_known_args(arguments)
    base = named(known.recipe) if known.recipe else Recipe()
    if known.method:
        base = base.override({"method": known.method})
    parser = Parser(prog="onecrop sweep", description=sweep_verb.__doc__, allow_abbrev=False)
    parser.add_argument("data", help="labelled data set or folder of classes")
    parser.add_argument("--recipe", metavar="NAME", help="start from a named recipe: " + ", ".join(RECIPES))
    parser.add_argument("--try", dest="tries", action="append", metavar="CHANGES", help='a run: "lr=0.1 dim=256"')
    parser.add_argument("--seeds", type=_count, default=1, help="runs of each [1]")
    parser.add_argument("--with", dest="evaluations", default="knn,linear-fast", help="of: " + ", ".join(EVALUATIONS))
    _add_fields(parser, base)
    values = vars(parser.parse(arguments))
    values.pop("recipe")
    tries, seeds = values.pop("tries") or [""], values.pop("seeds")
    evaluations, out = values.pop("evaluations").split(","), Path(values.pop("out", "runs/sweep"))
    print("\n" + sweep(base.override(values), tries, seeds, out, evaluations).read_text())


def results_verb(arguments: Sequence[str]) -> None:
    """make the page of results from a folder of result files"""
    parser = Parser(prog="onecrop results", description=results_verb.__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="of comparison.json and other result files")
    parser.add_argument("--out", type=Path, help="the Markdown page [FOLDER.md]")
    values = parser.parse(arguments)
    print(write_results(values.folder, values.out or values.folder.with_suffix(".md")))


def demo_verb(arguments: Sequence[str]) -> None:
    """pretrain on procedural pictures and show what was learned"""
    from onecrop.demo import run_demo

    parser = Parser(prog="onecrop demo", description=demo_verb.__doc__, allow_abbrev=False)
    parser.add_argument("--out", default="demo", help="folder for the run and the pictures [demo]")
    run_demo(Path(parser.parse(arguments).out))


def list_verb(arguments: Sequence[str]) -> None:
    """name the methods, backbones, data sets, recipes or evaluations"""
    parser = Parser(prog="onecrop list", description=list_verb.__doc__, allow_abbrev=False)
    parser.add_argument("what", help="of: " + ", ".join(TABLES))
    what = parser.parse(arguments).what
    if what not in TABLES:
        raise unknown("table", what, TABLES)
    for name, entry in TABLES[what].items():
        doc = (getattr(entry, "__doc__", None) or "").strip().partition("\n")[0]
        print(f"{name:<16} {doc}".rstrip())


VERBS = {
    "pretrain": pretrain_verb,
    "evaluate": evaluate_verb,
    "fine-tune": fine_tune_verb,
    "export": export_verb,
    "compare": compare_verb,
    "sweep": sweep_verb,
    "results": results_verb,
    "demo": demo_verb,
    "list": list_verb,
}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):  # file names may be any bytes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print("onecrop: self-supervised pretraining of image backbones. One crop, one network, one pass.\n")
            for name, verb in VERBS.items():
                print(f"  onecrop {name:<10} {verb.__doc__}")
            print("\nonecrop VERB --help says more.")
        elif arguments[0] not in VERBS:
            raise unknown("verb", arguments[0], VERBS)
        else:
            VERBS[arguments[0]](arguments[1:])
    except UserError as error:
        print(f"onecrop: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("onecrop: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0
