"""The house rules that a machine can check."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "onecrop"
FILES = sorted(SOURCE.rglob("*.py"))
# package or module -> what it must not import
FORBIDDEN = {
    "losses": ["data", "nets", "methods", "train", "evaluate", "report", "bank", "augment"],
    "data": ["nets", "methods", "train", "evaluate", "report", "losses", "recipe"],
    "nets": ["methods", "train", "evaluate", "report", "losses", "recipe"],
    "methods": ["train", "evaluate", "report", "recipe", "runs"],
    "evaluate": ["methods", "train", "recipe", "runs", "losses", "bank"],
    "detect": ["methods", "evaluate", "report", "losses", "bank", "demo", "compare"],
    "report": ["data", "nets", "methods", "train", "evaluate", "losses", "recipe", "runs", "bank", "augment"],
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package):
    for path in (SOURCE / package).rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            assert not (parts[0] == "onecrop" and len(parts) > 1 and parts[1] in FORBIDDEN[package]), f"{path}: {name}"


def test_reporting_needs_no_torch():
    """Nothing that report imports, nor what that imports in turn, uses torch."""
    waiting, seen = list((SOURCE / "report").rglob("*.py")), set()
    while waiting:
        path = waiting.pop()
        for name in imports(path):
            assert name.split(".")[0] not in ("torch", "torchvision", "safetensors"), f"{path}: {name}"
            module = SOURCE.parent.joinpath(*name.split(".")).with_suffix(".py")
            if module.exists() and module not in seen:
                seen.add(module)
                waiting.append(module)
    assert SOURCE / "files.py" in seen


def test_the_core_starts_without_the_extras():
    """torch, torchvision, numpy and safetensors alone: everything else is imported where it is used."""
    code = (
        "import sys\n"
        "extras = 'matplotlib sklearn scipy pandas timm tqdm rich plotly faster_coco_eval pycocotools'\n"
        "for name in extras.split(): sys.modules[name] = None\n"
        "from onecrop.cli import main; sys.exit(main(['list', 'methods']))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_files_are_short_and_named_for_what_they_hold():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 300, f"{path} is over 300 lines"
        assert path.stem not in ("utils", "helpers", "common", "manager", "misc"), path


def test_the_readme_shows_the_tree():
    readme = (SOURCE.parents[1] / "README.md").read_text()
    for entry in SOURCE.iterdir():
        if entry.name not in ("__pycache__", "__init__.py", "__main__.py"):
            assert entry.name in readme, f"{entry.name} is missing from the README's file tree"
