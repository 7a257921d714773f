"""One page about one or several runs: a single HTML file that needs no network, made from the files of the runs."""

import base64
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from onecrop.errors import UserError
from onecrop.files import printable, write_atomically
from onecrop.report import sections
from onecrop.report.figures import colour, curves, plotly, scatter
from onecrop.report.reading import PictureMap, RunFolder, name_runs, read_run
from onecrop.report.sections import escape

# Nothing may be fetched, whatever stands in the page; plotly makes functions from text for some kinds of figures.
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(folders: Sequence[Path], out: Path) -> Path:
    if not folders:
        raise UserError("name at least one run folder")
    runs = [read_run(folder) for folder in folders]
    names = name_runs(runs)
    write_atomically(out, _html(runs, names).encode("utf-8", "backslashreplace"))
    return out


def _html(runs: Sequence[RunFolder], names: Sequence[str]) -> str:
    plotly()  # said before anything else where it is missing
    from plotly.offline import get_plotlyjs

    mapped = [(number, run.map) for number, run in enumerate(runs) if run.map is not None]
    sets = list({found.facts["fingerprint"]: found for _, found in mapped}.values())
    title = ", ".join(names)
    parts = _parts(runs, names, mapped, sets)
    links = "".join(f'<a href="#{key}">{escape(name)}</a>' for key, name, _, _ in parts)
    body = "".join(f'<section id="{key}"><h2>{name}</h2>{intro}{text}</section>' for key, name, intro, text in parts)
    # The page's own data must not end its script element; plotly's script holds no such end.
    data = json.dumps(_data(mapped, sets, names), separators=(",", ":")).replace("<", "\\u003c")
    made = datetime.now(UTC).isoformat(timespec="minutes")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)} · onecrop</title>
<link rel="icon" href="data:,">
<style>{_asset("page.css")}{_sheets(sets)}</style>
</head>
<body>
<main>
<header><small>onecrop report · {escape(made)}</small><h1>{escape(title)}</h1><nav>{links}</nav></header>
{sections.notes(runs, names)}
{body}
<div id="near" class="card" hidden></div>
</main>
<div id="tip" hidden></div>
<script type="application/json" id="data">{data}</script>
<script>{get_plotlyjs()}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _parts(
    runs: Sequence[RunFolder],
    names: Sequence[str],
    mapped: Sequence[tuple[int, PictureMap]],
    sets: Sequence[PictureMap],
) -> list[tuple[str, str, str, str]]:
    """(id, title, introduction, content) of the sections that have something to show."""
    drawn = "".join(sections.graph(f"curve{n}", panel) for n, panel in enumerate(curves(runs, names)))
    legend = "".join(f"<span>{sections.run_name(n, name)}</span>" for n, name in enumerate(names))
    height = 620 if len(mapped) == 1 else 460
    maps = "".join(
        sections.graph(f"map{place}", scatter(found, sections.run_name(n, names[n]), height), sections.map_meta(found))
        for place, (n, found) in enumerate(mapped)
    )
    several = len(runs) > 1
    parts = [
        ("overview", "Comparison" if several else "Overview", "", sections.overview(runs, names)),
        (
            "curves",
            "Curves",
            f'<div class="legend">{legend}</div>',
            f'<div class="grid">{drawn}</div>' if drawn else "",
        ),
        ("scores", "Scores", "", sections.probes(runs, names)),
        ("map", "Map", _MAP_INTRO, f'<div class="maps">{maps}</div>' if maps else ""),
        ("neighbours", "Nearest neighbours", _GALLERY_INTRO, sections.gallery(sets) if sets else ""),
        ("duplicates", "Near-duplicates", _REPEATS_INTRO, sections.repeats(sets) if sets else ""),
        ("recipe", "Recipe", "", sections.recipes(runs, names)),
        (
            "provenance",
            "Provenance",
            "",
            f"<details><summary>show</summary>{sections.provenances(runs, names)}</details>",
        ),
    ]
    return [part for part in parts if part[3]]


_MAP_INTRO = (
    "<p class=faint>A dot is a picture; what lies close together looks alike to the backbone. Hover to see a picture, "
    "click for its nearest neighbours.</p>"
)
_GALLERY_INTRO = (
    "<p class=faint>Below each neighbour the cosine of its features with the query's; a red frame means another class. "
    "Click a picture to go on from it.</p>"
)
_REPEATS_INTRO = "<p class=faint>To instance discrimination copies are different classes, to be pushed apart.</p>"


def _data(mapped: Sequence[tuple[int, PictureMap]], sets: Sequence[PictureMap], names: Sequence[str]) -> dict[str, Any]:
    """What hover and click need."""
    number = {found.facts["fingerprint"]: place for place, found in enumerate(sets)}
    return {
        "sets": [_set(found) for found in sets],
        "maps": [
            {
                "name": printable(names[run]),
                "colour": colour(run),
                "set": number[found.facts["fingerprint"]],
                "k": found.neighbours.shape[1],
                "neighbours": found.neighbours.ravel().tolist(),
                "cosines": np.rint(found.cosines * 1000).astype(int).ravel().tolist(),
                "places": np.round(found.places.astype(float), 3).ravel().tolist(),
            }
            for run, found in mapped
        ],
    }


def _set(found: PictureMap) -> dict[str, Any]:
    columns = int(found.facts["columns"])
    square = bool((found.aspect == 1).all())
    return {
        "columns": columns,
        "rows": -(-len(found) // columns),
        "aspect": None if square else np.round(found.aspect.astype(float), 3).tolist(),
        "classes": [printable(str(name)) for name in found.facts["classes"]],
        "labels": found.labels.tolist() if found.facts["classes"] else None,
        "files": [printable(name) for name in _shortened(found.files)],
    }


def _shortened(names: Sequence[str]) -> list[str]:
    """Without the folders that all of them share."""
    parts = [Path(name).parts for name in names]
    if not parts:
        return []
    shared = 0
    while all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return ["/".join(part[shared:]) for part in parts]


def _sheets(sets: Sequence[PictureMap]) -> str:
    """One class a set of pictures: its sheet of thumbnails is in the page once, however many runs show it."""
    return "".join(
        f".sheet{number}{{background-image:url(data:image/webp;base64,{base64.b64encode(found.sheet).decode()})}}"
        for number, found in enumerate(sets)
    )


def _asset(name: str) -> str:
    return files("onecrop.report").joinpath(name).read_text("utf-8")
