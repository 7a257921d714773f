"""Verbs of the command line that use what runs left behind; those that train, and the table of all, are in cli.py."""

from collections.abc import Sequence
from pathlib import Path

from onecrop.data import SOURCES
from onecrop.embed import embed, search
from onecrop.evaluate import EVALUATIONS, evaluate
from onecrop.evaluate.finetune import Budget, finetune
from onecrop.export import FORMATS, export
from onecrop.files import printable
from onecrop.flags import Parser, listed
from onecrop.map import POINTS, report
from onecrop.recipe import check, flag
from onecrop.report.claims import write_claims
from onecrop.report.results import write_results
from onecrop.report.tables import conditions, result_table, share_table
from onecrop.reproduce.statements import CLAIMS


def evaluate_verb(arguments: Sequence[str]) -> None:
    """score a backbone on frozen features"""
    parser = Parser(prog="onecrop evaluate", description=evaluate_verb.__doc__, allow_abbrev=False)
    parser.add_argument("run", help="a run folder, or a backbone.safetensors file")
    parser.add_argument("--data", help="labelled data set or folder of classes (default: the run's)")
    parser.add_argument(
        "--with", dest="evaluations", default="knn,linear", help=f"of: {', '.join(EVALUATIONS)} [knn,linear]"
    )
    parser.add_argument("--baselines", action="store_true", help="also the untrained network and raw pixels")
    parser.add_argument("--data-dir", help="where named data sets lie [as in the run]")
    parser.add_argument("--image-size", type=int, help="pixels the network sees [as in pretraining]")
    parser.add_argument("--subset", type=int, help="labelled training images for the probes, drawn at random [all]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    parser.add_argument("--seed", type=int, default=0, help="of the probes [0]")
    parser.add_argument("--k", type=int, default=200, help="neighbours of the kNN vote [200]")
    values = vars(parser.parse(arguments))
    values["evaluations"] = tuple(listed(values["evaluations"]))
    rows = evaluate(values.pop("run"), values.pop("data"), values.pop("evaluations"), **values)
    print(f"{result_table(rows)}\n{conditions(rows)}")


def embed_verb(arguments: Sequence[str]) -> None:
    """write a backbone's features of a folder of images to a file"""
    parser = Parser(prog="onecrop embed", description=embed_verb.__doc__, allow_abbrev=False)
    parser.add_argument("run", help="a run folder, or a backbone.safetensors file")
    parser.add_argument("data", help="a folder or archive of images, or one of: " + ", ".join(SOURCES))
    parser.add_argument("--out", default="features.npz", help=".npz, .csv or .parquet file [features.npz]")
    parser.add_argument("--data-dir", default="data", help="where named data sets lie [data]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    values = vars(parser.parse(arguments))
    num_images, dim = embed(**values).features.shape
    print(f"{values['out']}: {num_images:,} images, {dim} features each")


def search_verb(arguments: Sequence[str]) -> None:
    """find the images of a folder that a backbone sees nearest to one"""
    parser = Parser(prog="onecrop search", description=search_verb.__doc__, allow_abbrev=False)
    parser.add_argument("run", help="a run folder, or a backbone.safetensors file")
    parser.add_argument("image", help="an image file")
    parser.add_argument("--data", help="a folder or archive of images, or a named data set [the run's]")
    parser.add_argument("--count", type=int, default=10, help="how many neighbours [10]")
    parser.add_argument("--out", default="search.png", help="the picture to draw [search.png]")
    parser.add_argument("--data-dir", default="data", help="where named data sets lie [data]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    values = vars(parser.parse(arguments))
    for cosine, file in search(**values):
        print(f"{cosine:.3f}  {printable(file)}")
    print(values["out"])


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
    shares = [check("shares", float, share) for share in listed(values.pop("shares"))]
    print(share_table(finetune(**values, shares=shares, budget=budget)))


def export_verb(arguments: Sequence[str]) -> None:
    """write a backbone for torchvision, timm or ONNX, and check it"""
    parser = Parser(prog="onecrop export", description=export_verb.__doc__, allow_abbrev=False)
    parser.add_argument("run", help="a run folder, or a backbone.safetensors file")
    parser.add_argument("--format", required=True, help="of: " + ", ".join(FORMATS))
    parser.add_argument("--out", help="the file to write [RUN/FORMAT with the usual ending]")
    export(**vars(parser.parse(arguments)))


def report_verb(arguments: Sequence[str]) -> None:
    """make one page about runs: curves, cost, scores, a map of pictures and their neighbours"""
    parser = Parser(prog="onecrop report", description=report_verb.__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, to be shown side by side")
    parser.add_argument("--out", help="the page [RUN/report.html; report.html where there are several runs]")
    parser.add_argument("--data", help="pictures of the map: a named data set, folder or archive [each run's own]")
    parser.add_argument("--data-dir", help="where named data sets lie [as in the run]")
    parser.add_argument("--points", type=int, default=POINTS, help=f"pictures on the map; 0 leaves it out [{POINTS}]")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of pictures and of their map [0]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    print(report(**vars(parser.parse(arguments))))


def results_verb(arguments: Sequence[str]) -> None:
    """make the page of results from a folder of result files"""
    parser = Parser(prog="onecrop results", description=results_verb.__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="of comparison.json and other result files")
    parser.add_argument("--out", type=Path, help="the Markdown page [FOLDER.md]")
    values = parser.parse(arguments)
    print(write_results(values.folder, values.out or values.folder.parent / f"{values.folder.resolve().name}.md"))


def claims_verb(arguments: Sequence[str]) -> None:
    """say which of the paper's claims hold, from a folder of tables that reproduce made"""
    parser = Parser(prog="onecrop claims", description=claims_verb.__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="of table6.json and others, also of those from several devices")
    parser.add_argument("--out", type=Path, help="the Markdown page [claims.md beside FOLDER]")
    values = parser.parse(arguments)
    print(write_claims(values.folder, CLAIMS, values.out or values.folder.parent / "claims.md"))
