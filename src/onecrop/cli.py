"""The command line: one verb a function, no logic of its own. Verbs that use what runs left behind: verbs.py."""

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onecrop import __version__
from onecrop.compare import compare, sweep
from onecrop.data import SOURCES
from onecrop.device import full_memory
from onecrop.distributed import joined, world
from onecrop.errors import StoppedError, UserError, unknown
from onecrop.evaluate import EVALUATIONS
from onecrop.flags import Parser, add_field, add_fields, add_settings, at_home, count, listed
from onecrop.methods import METHODS
from onecrop.nets import BACKBONES, build_timm
from onecrop.recipe import Recipe, describe_hint, hints, named_values, spelled
from onecrop.recipes import RECIPES, named
from onecrop.reproduce.catalogue import TABLES as PAPER
from onecrop.runs import Run
from onecrop.train import pretrain
from onecrop.verbs import (
    claims_verb,
    embed_verb,
    evaluate_verb,
    export_verb,
    fine_tune_verb,
    report_verb,
    results_verb,
    search_verb,
)

TABLES: dict[str, Any] = {
    "methods": METHODS,
    "backbones": {**BACKBONES, "timm/NAME": build_timm},
    "data": SOURCES,
    "recipes": RECIPES,
    "evaluations": EVALUATIONS,
    "tables": PAPER,
}
PROBES = f"of: {', '.join(EVALUATIONS)} [knn,linear-fast]"
NAMED_VALUES = {  # flags of `reproduce` that may be given several times
    "use": "what stands for a data set or backbone of the paper: imagenet=FOLDER, resnet18=tiny",
    "change": "a field of every pretraining's recipe that has it: lr=0.1",
    "detect": "a field of every detection's recipe: crops=64",
}


def pretrain_verb(arguments: Sequence[str]) -> None:
    """learn a backbone from unlabelled images"""
    first = Parser(add_help=False, allow_abbrev=False)
    for option in ("--method", "--recipe", "--out"):
        first.add_argument(option)
    first.add_argument("--resume", action="store_true")
    known, _ = first.parse_known_args(arguments)
    base = named(known.recipe) if known.recipe else Recipe()
    earlier = Run(known.out or base.out)
    begun = _begun(earlier) if known.resume else None
    base = begun or base  # flags then only repeat what the run was begun with
    if known.method:
        base = base.override({"method": known.method})
    parser = Parser(prog="onecrop pretrain", description=pretrain_verb.__doc__, allow_abbrev=False)
    parser.add_argument("data", nargs="?", help="a folder of images, or one of: " + ", ".join(SOURCES))
    parser.add_argument("--recipe", metavar="NAME", help="start from a named recipe: " + ", ".join(RECIPES))
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    add_fields(parser, base)
    values = vars(parser.parse(arguments))
    changes = {name: value for name, value in values.items() if name not in ("recipe", "resume") and value is not None}
    if "data" not in changes and not known.recipe and begun is None:
        if known.resume:
            raise UserError(f"nothing to resume in {earlier.folder}: it is not a run folder")
        raise UserError(f"say what to learn from: onecrop pretrain DATA, a folder or one of {', '.join(SOURCES)}")
    pretrain(base.override(changes), resume=values["resume"])


def _begun(run: Run) -> Recipe | None:
    """The recipe of a run that is to go on, from the first process: other machines may not see the folder."""
    group = world()
    here = run.recipe().to_json() if group.first and run.recipe_file.exists() else None
    begun = group.said_by(0, here)
    return None if begun is None else Recipe.from_json(begun)


def scan_verb(arguments: Sequence[str]) -> None:
    """look through a folder of images: what is broken, what is double, what training will take"""
    from onecrop.survey import survey

    parser = Parser(prog="onecrop scan", description=scan_verb.__doc__, allow_abbrev=False)
    parser.add_argument("data", help="a folder or archive of images")
    parser.add_argument("--out", default="scan", help="folder for the list of files and the contact sheet [scan]")
    parser.add_argument("--json", metavar="FILE|-", help="everything as JSON, to a file or to standard output")
    group = parser.add_argument_group("what to forecast")
    for name in ("method", "backbone", "image_size", "batch_size", "epochs", "minutes", "drop_duplicates", "device"):
        add_field(group, name, hints(Recipe)[name])
    values = vars(parser.parse(arguments))
    out, json_to = Path(values.pop("out")), values.pop("json")
    survey(Recipe().override(values), out, json_to)


def compare_verb(arguments: Sequence[str]) -> None:
    """train and score several methods, backbones and seeds; one table"""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--methods", default=",".join(METHODS), help=f"of: {', '.join(METHODS)} [all]")
    known, _ = first.parse_known_args(arguments)
    parser = Parser(prog="onecrop compare", description=compare_verb.__doc__, allow_abbrev=False, parents=[first])
    parser.add_argument("data", help="labelled data set or folder of classes")
    parser.add_argument("--backbones", default="resnet18", help=f"of: {', '.join(TABLES['backbones'])} [resnet18]")
    parser.add_argument("--seeds", type=count, default=1, help="runs of each [1]")
    parser.add_argument("--with", dest="evaluations", default="knn,linear-fast", help=PROBES)
    parser.add_argument("--out", default="runs/compare", help="folder of the runs and the table [runs/compare]")
    group = parser.add_argument_group("fields of every recipe (default: as in each method's own)")
    for name, hint in hints(Recipe).items():
        if name not in ("data", "out", "method", "backbone", "settings"):
            add_field(group, name, hint)
    add_settings(parser, listed(known.methods))
    values = vars(parser.parse(arguments))
    names = {key: listed(values.pop(key)) for key in ("methods", "backbones", "evaluations")}
    seeds, out = values.pop("seeds"), Path(values.pop("out"))
    base = Recipe().override({name: value for name, value in values.items() if name in hints(Recipe)})
    values.pop("seed", None)  # the first of the seeds
    print("\n" + compare(base, **names, seeds=seeds, out=out, overrides=values).read_text("utf-8"))
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
    base = replace(base, out="runs/sweep")
    parser = Parser(prog="onecrop sweep", description=sweep_verb.__doc__, allow_abbrev=False)
    parser.add_argument("data", help="labelled data set or folder of classes")
    parser.add_argument("--recipe", metavar="NAME", help="start from a named recipe: " + ", ".join(RECIPES))
    parser.add_argument("--try", dest="tries", action="append", metavar="CHANGES", help='a run: "lr=0.1 dim=256"')
    parser.add_argument("--seeds", type=count, default=1, help="runs of each [1]")
    parser.add_argument("--with", dest="evaluations", default="knn,linear-fast", help=PROBES)
    add_fields(parser, base)
    values = vars(parser.parse(arguments))
    values.pop("recipe")
    tries, seeds = values.pop("tries") or [""], values.pop("seeds")
    evaluations, out = listed(values.pop("evaluations")), Path(values.pop("out", base.out))
    print("\n" + sweep(base.override(values), tries, seeds, out, evaluations).read_text("utf-8"))


def detect_verb(arguments: Sequence[str]) -> None:
    """fine-tune a detector from a backbone and score it"""
    from onecrop.detect import DetectRecipe, detect
    from onecrop.detect.run import DetectRun

    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--out", default=DetectRecipe.out)
    first.add_argument("--resume", action="store_true")
    known, _ = first.parse_known_args(arguments)
    base = DetectRun(known.out).recipe() if known.resume else DetectRecipe()
    parser = Parser(prog="onecrop detect", description=detect_verb.__doc__, allow_abbrev=False)
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, or score it again")
    for name, hint in hints(DetectRecipe).items():
        default = getattr(base, name)
        if name == "weights":
            parser.add_argument(name, metavar="RUN", nargs="?", help=describe_hint(hint)[1])
        else:
            add_field(parser, name, hint, f" [{'auto' if default is None else spelled(default)}]")
    values = vars(parser.parse(arguments))
    resume = values.pop("resume")
    if values["weights"] is None and not resume:
        raise UserError("say what to start from: onecrop detect RUN, a run folder, a .pth of torchvision's, or scratch")
    detect(base.override({name: value for name, value in values.items() if value is not None}), resume=resume)


def reproduce_verb(arguments: Sequence[str]) -> None:
    """make a table or figure of the paper, at full size or shrunk, beside its numbers"""
    from onecrop.reproduce import Options, reproduce

    parser = Parser(prog="onecrop reproduce", description=reproduce_verb.__doc__, allow_abbrev=False)
    parser.add_argument("table", help="list, or of: " + ", ".join(PAPER))
    parser.add_argument("--plan", action="store_true", help="say what would be run and how long it takes here")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies epochs and the steps of detection [1]")
    parser.add_argument(
        "--images", type=count, help="training images that pretraining and probes may see at most [all]"
    )
    parser.add_argument(
        "--with", dest="probe", default="linear", help=f"the probe, of: {', '.join(EVALUATIONS)} [linear]"
    )
    for option, text in NAMED_VALUES.items():
        parser.add_argument(f"--{option}", action="append", default=[], metavar="NAME=VALUE", help=text)
    parser.add_argument("--methods", default="", help="rows to run, of: " + ", ".join(METHODS))
    parser.add_argument("--backbones", default="", help="rows to run [all]")
    parser.add_argument("--data-dir", default="data", help="where data sets lie [data]")
    parser.add_argument("--out", default="runs/reproduce", help="folder of runs and tables [runs/reproduce]")
    parser.add_argument("--skip-missing", action="store_true", help="make the cells whose data is there")
    parser.add_argument("--recipe", default="paper", metavar="NAME", help="of the paper's method [paper]")
    parser.add_argument("--seed", type=int, default=0, help="of every run [0]")
    parser.add_argument("--seeds", type=count, default=1, help="runs of each row, with seeds from --seed on [1]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    values = vars(parser.parse(arguments))
    if values["table"] == "list":
        list_verb(["tables"])
        return
    values |= {name: named_values(values[name], f"--{name}") for name in NAMED_VALUES}
    for name in ("change", "detect"):  # fields of recipes, written as flags are
        values[name] = {field.replace("-", "_"): value for field, value in values[name].items()}
    values |= {name: tuple(filter(None, listed(values[name]))) for name in ("methods", "backbones")}
    table, flags = values.pop("table"), {"plan_only": values.pop("plan"), "skip_missing": values.pop("skip_missing")}
    path = reproduce(table, Options(**values), **flags)
    if path is not None:
        print("\n" + path.read_text("utf-8"))


def demo_verb(arguments: Sequence[str]) -> None:
    """pretrain on procedural pictures and show what was learned"""
    from onecrop.demo import run_demo

    parser = Parser(prog="onecrop demo", description=demo_verb.__doc__, allow_abbrev=False)
    parser.add_argument("--out", default="demo", help="folder for the run and the pictures [demo]")
    run_demo(Path(parser.parse(arguments).out))


def list_verb(arguments: Sequence[str]) -> None:
    """name the methods, backbones, data sets, recipes, evaluations, or tables of the paper"""
    parser = Parser(prog="onecrop list", description=list_verb.__doc__, allow_abbrev=False)
    parser.add_argument("what", help="of: " + ", ".join(TABLES))
    what = parser.parse(arguments).what
    if what not in TABLES:
        raise unknown("table", what, TABLES)
    width = max(map(len, TABLES[what]))
    for name, entry in TABLES[what].items():
        first = (getattr(entry, "__doc__", None) or "").strip().partition("\n\n")[0]
        print(f"{name:<{width}}  {' '.join(first.split())}".rstrip())


VERBS = {
    "scan": scan_verb,
    "pretrain": pretrain_verb,
    "evaluate": evaluate_verb,
    "embed": embed_verb,
    "search": search_verb,
    "fine-tune": fine_tune_verb,
    "export": export_verb,
    "compare": compare_verb,
    "sweep": sweep_verb,
    "detect": detect_verb,
    "report": report_verb,
    "results": results_verb,
    "reproduce": reproduce_verb,
    "claims": claims_verb,
    "demo": demo_verb,
    "list": list_verb,
}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = [at_home(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may be any bytes
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            verbs = [f"  onecrop {name:<10} {verb.__doc__}" for name, verb in VERBS.items()]
            first = "onecrop: self-supervised pretraining of image backbones. One crop, one network, one pass.\n"
            print(first, *verbs, "\nonecrop VERB --help says more.", sep="\n")
        elif arguments[0] == "--version":
            print(f"onecrop {__version__}")
        elif arguments[0] not in VERBS:
            raise unknown("verb", arguments[0], VERBS)
        else:
            with joined(arguments[0]):  # under torchrun: with the other processes
                VERBS[arguments[0]](arguments[1:])
        sys.stdout.flush()  # here, where it can still be said that it fails
    except UserError as error:
        print(f"onecrop: {error}", file=sys.stderr)
        return 130 if isinstance(error, StoppedError) else 1
    except (RuntimeError, MemoryError) as error:
        if (whose := full_memory(error)) is None:
            raise
        remedy = "lower --batch-size or --image-size, or end what else uses it"
        print(f"onecrop: the {whose}'s memory is full: {remedy}; a run goes on with --resume", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("onecrop: stopped", file=sys.stderr)
        return 130
    except OSError as error:  # of the system, not of the program: a disk that is full, a folder that is closed to us
        if not isinstance(error, BrokenPipeError):  # the reader of our output went away: nobody to tell
            print(f"onecrop: {error.strerror or error}" + f": {error.filename}" * bool(error.filename), file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # do not try again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0
