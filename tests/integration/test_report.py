"""The page about runs: what it says, what it survives, and, in a real browser, what it does on hover and click."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from onecrop import Recipe, evaluate, pretrain
from onecrop.cli import main
from onecrop.map import BLOCK, find_repeats, main_axes, make_map, nearest, place, report
from onecrop.methods.sid import SidSettings
from onecrop.report.reading import read_run
from tests.pictures import write_pictures

pytestmark = pytest.mark.xdist_group("report")  # runs and browser are made once
ODD = 'a<b & "c"'


def recipe(out, **changes):
    settings = SidSettings(dim=16, hidden=32, cutmix=0.0)
    base = Recipe(data="shapes", out=str(out), subset=64, image_size=16, backbone="tiny", batch_size=32, epochs=2)
    return base.override({"settings": settings, "probe_every": 1, **changes})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on the same data, one of them in a folder with a name that HTML would misread."""
    folder = tmp_path_factory.mktemp("runs")
    return [pretrain(recipe(folder / ODD)), pretrain(recipe(folder / "b", seed=1, epochs=3))]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    return report(runs, tmp_path_factory.mktemp("page") / "report.html", points=60)


def data_of(page):
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S).group(1)
    return json.loads(text)


def test_the_page_is_one_file_that_fetches_nothing(page):
    text = page.read_text()
    assert page.stat().st_size < 15e6
    assert "default-src 'none'" in text
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.S)  # plotly's own script names addresses in its texts
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", own)
    titles = ("Comparison", "Curves", "Map", "Nearest neighbours", "Near-duplicates", "Recipe", "Provenance")
    assert tuple(re.findall("<h2>(.*?)</h2>", own)) == titles  # no scores: no evaluation was run
    for panel in ("cross entropy", "sqrt kl", "instance accuracy", "knn, %", "knn, % over the cost", "images a second"):
        assert f"<h3>{panel}</h3>" in text


def test_names_are_text_and_never_markup(page):
    text = page.read_text()
    assert ODD not in text
    assert "a&lt;b &amp; &quot;c&quot;" in text
    assert data_of(page)["maps"][0]["name"] == ODD


def test_both_runs_show_the_same_pictures_and_carry_them_once(page, runs):
    data = data_of(page)
    assert len(data["sets"]) == 1
    assert [one["set"] for one in data["maps"]] == [0, 0]
    assert page.read_text().count("{background-image:url(data:image/webp;base64,") == 1
    first = read_run(runs[0]).map
    assert len(first) == 60
    assert first.neighbours.shape == (60, 12)
    assert not (first.neighbours == np.arange(60)[:, None]).any()
    assert (np.diff(first.cosines, axis=1) <= 0).all()


def test_a_map_is_a_function_of_seed_and_backbone_and_is_made_once(runs, tmp_path):
    made = read_run(runs[0]).map
    marks = {file: file.stat().st_mtime_ns for file in (runs[0] / "map").iterdir()}
    make_map(runs[0], points=60)
    assert marks == {file: file.stat().st_mtime_ns for file in (runs[0] / "map").iterdir()}

    again = shutil.copytree(runs[0], tmp_path / "again")
    shutil.rmtree(again / "map")
    make_map(again, points=60)
    assert np.array_equal(read_run(again).map.places, made.places)
    assert read_run(again).map.sheet == made.sheet
    make_map(again, points=60, seed=1)  # asked for otherwise: made anew
    assert read_run(again).map.facts["fingerprint"] != made.facts["fingerprint"]
    (again / "map" / "map.json").unlink()  # as if killed before the end
    assert read_run(again).map is None


def test_a_folder_without_labels_and_its_copies(tmp_path):
    folder = tmp_path / "photos <i>"
    write_pictures(folder, 12)
    first = min(folder.iterdir())
    shutil.copy(first, folder / f"zz{first.suffix}")
    run = pretrain(recipe(tmp_path / "run", data=str(folder), subset=None, probe_every=0, batch_size=8))
    page = report([run], points=50)
    assert page == run / "report.html"
    data = data_of(page)
    assert data["sets"][0]["labels"] is None
    assert sorted(data["sets"][0]["files"])[-1] == f"zz{first.suffix}"
    found = read_run(run).map
    assert len(found) == 13
    assert [{found.files[row].rpartition("/")[2] for row in pair} for pair in found.repeats] == [
        {first.name, f"zz{first.suffix}"}
    ]
    assert found.repeat_cosines[0] > 0.999
    assert "1 of the 13 pictures" in page.read_text()
    assert "<i>" not in page.read_text().replace('<i data-set="', "")


def test_a_run_that_is_not_finished_shows_its_curves_and_says_what_is_missing(runs, tmp_path, capsys):
    stopped = shutil.copytree(runs[1], tmp_path / "stopped")
    shutil.rmtree(stopped / "map", ignore_errors=True)
    (stopped / "backbone.safetensors").unlink()
    (stopped / "metrics.jsonl").write_text((stopped / "metrics.jsonl").read_text().splitlines()[0] + '\n{"epo')
    assert main(["report", str(stopped)]) == 0
    assert "no map of" in capsys.readouterr().err
    text = (stopped / "report.html").read_text()
    assert "not finished (1 of 3 epochs)" in text
    assert "<h3>cross entropy</h3>" in text
    assert 'id="map0"' not in text


def test_the_overview_shows_the_runs_own_scores(runs, tmp_path):
    run = shutil.copytree(runs[1], tmp_path / "scored")
    along = read_run(run).probes[-1]["accuracy"]
    assert f'<td class="number">{along:.1f}</td>' in report([run], points=0).read_text()  # until it is evaluated
    rows = [
        evaluate(run, data, ("knn",), **how)[0]
        for data, how in ((None, {"subset": 9}), ("digits", {}), (None, {"k": 5}))
    ]
    text = report([run], points=0).read_text()
    overview = text[text.index('id="overview"') : text.index('id="curves"')]
    assert f'<td class="number">{rows[2]["accuracy"]:.1f}</td></tr>' in overview
    assert "stored at 8 px; the central square, enlarged to 16 px" in text


def test_a_run_whose_pictures_are_gone_keeps_its_page(tmp_path, capsys):
    write_pictures(tmp_path / "photos", 8)
    run = pretrain(recipe(tmp_path / "run", data=str(tmp_path / "photos"), subset=None, probe_every=0, batch_size=8))
    shutil.rmtree(tmp_path / "photos")
    assert main(["report", str(run)]) == 0
    assert "no map of" in capsys.readouterr().err
    assert "no map of pictures" in (run / "report.html").read_text()


def test_any_seed_makes_a_map():
    unit = np.eye(6, dtype=np.float32)
    assert place(unit, -1).shape == (6, 2)
    assert np.array_equal(place(unit, 3), place(unit, 2**32 + 3))


def test_a_run_whose_map_cannot_be_written_keeps_its_page(tmp_path, capsys):
    run = pretrain(recipe(tmp_path / "run"))
    (run / "map").touch()  # a file in the folder's place
    assert main(["report", str(run), "--points", "20"]) == 0
    assert "no map of" in capsys.readouterr().err
    assert (run / "report.html").exists()


def test_a_detection_run_has_a_page(runs, tmp_path):
    folder = tmp_path / "detected"
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps({"weights": "scratch", "set": "voc07", "lr": 0.02}))
    rows = [{"step": step, "lr": 0.02, "loss": 2 / step} for step in (20, 40)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    row = {"evaluation": "detection boxes", "metric": "voc07", "AP": 33.81, "AP50": 60.24, "AP75": 33.1, "set": "voc07"}
    row |= {"schedule": "24k", "scale": 0.01, "size_scale": 0.3, "step": 240, "of": "pretrained"}
    (folder / "results.jsonl").write_text(f"{json.dumps(row | {'AP50': 11})}\n{json.dumps(row)}\n")  # scored again
    (folder / "detections.json").write_text("[]")
    text = report([folder, runs[0]], tmp_path / "r.html", points=0).read_text()
    assert "<h3>loss</h3>" in text
    assert '<td class="number">60.2</td>' in text
    assert text.count("voc07, voc07 AP; from pretrained weights; schedule 24k × 0.01, size × 0.3") == 1
    rates = re.findall(r'<h3>learning rate</h3>.*?"title":{"text":"(\w+)"}', text)
    assert rates == ["epoch", "step"]  # never two counts on one axis
    assert re.findall(r'<h3>loss</h3>.*?"title":{"text":"(\w+)"}', text) == ["step"]
    assert "provenance.json is missing" in text


def test_bad_input_is_one_sentence(runs, tmp_path, capsys, monkeypatch):
    for arguments, sentence in (
        ([str(tmp_path)], "is not a run folder"),
        ([str(runs[0]), str(runs[0])], "named twice"),
        ([str(runs[0]), "--points", "3"], "too few for a map"),
        ([str(runs[0]), "--data", "digit"], "did you mean 'digits'?"),
    ):
        assert main(["report", *arguments]) == 1
        assert sentence in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert main(["report", str(runs[0]), "--points", "0", "--out", str(tmp_path / "r.html")]) == 1
    assert "pip install 'onecrop[report]'" in capsys.readouterr().err


def test_neighbours_axes_and_repeats():
    unit = np.array([[1, 0], [0.8, 0.6], [0, 1], [-1, 0]], np.float32)
    rows, cosines = nearest(unit, 2)
    assert rows.tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    np.testing.assert_allclose(cosines, np.take_along_axis(unit @ unit.T, rows, axis=1), atol=1e-6)
    unit = np.random.default_rng(0).normal(size=(2 * BLOCK + 3, 4)).astype(np.float32)  # over borders of blocks
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    whole = unit @ unit.T - 3 * np.eye(len(unit), dtype=np.float32)
    assert (nearest(unit, 5)[0] == np.argsort(-whole, axis=1)[:, :5]).mean() > 0.999  # equal but for rounding
    assert np.allclose(np.abs(main_axes(unit)).sum(), np.abs(main_axes(unit[::-1])).sum())
    from onecrop.data.shapes import shapes

    images = shapes(20, 32, seed=0)
    pairs = find_repeats(images.take(np.array([0, 1, 2, 1, 3, 0])))
    assert pairs.tolist() == [[3, 1], [5, 0]]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("no Chromium with its driver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
        *("--disable-component-update", "--disable-sync", "--window-size=1280,900"),
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    opened.set_script_timeout(90)  # machines under load
    yield opened
    opened.quit()


def open_page(browser, page, width=1280, dark=False, touch=False):
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": touch}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})
    browser.get(page.as_uri())
    browser.execute_async_script(
        "const done = arguments[0]; document.getElementById('map').scrollIntoView();"
        "const wait = () => [...document.querySelectorAll('[id^=map].graph')].every((g) => g.dataset.drawn)"
        " ? done() : setTimeout(wait, 50); wait();"
    )


def place_of(browser, graph, picture):
    """Where a picture's dot lies on the screen."""
    return browser.execute_script(
        "const graph = document.getElementById(arguments[0]), map = page.maps[Number(arguments[0].slice(3))];"
        "const box = graph.getBoundingClientRect(), layout = graph._fullLayout, n = arguments[1];"
        "return [box.left + layout.xaxis._offset + layout.xaxis.d2p(map.places[2 * n]),"
        " box.top + layout.yaxis._offset + layout.yaxis.d2p(map.places[2 * n + 1])];",
        graph,
        picture,
    )


def lone_picture(page):
    """A dot with no other near it, so that the pointer cannot mean another."""
    places = np.array(data_of(page)["maps"][0]["places"]).reshape(-1, 2)
    apart = np.linalg.norm(places[:, None] - places, axis=2) + 1e9 * np.eye(len(places))
    return int(apart.min(1).argmax())


def move(browser, x, y, click=False):
    for kind in ("mouseMoved", *("mousePressed", "mouseReleased") * click):
        event = {"type": kind, "x": x, "y": y, "button": "left" if kind != "mouseMoved" else "none", "clickCount": 1}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def wait_for(browser, condition):
    browser.execute_async_script(
        f"const done = arguments[0]; const wait = () => ({condition}) ? done() : setTimeout(wait, 30); wait();"
    )


def test_hover_shows_the_picture_and_a_click_its_neighbours(browser, page):
    open_page(browser, page)
    picture, data = lone_picture(page), data_of(page)
    hovered = f"!tip.hidden && tip.textContent.endsWith('picture {picture}')"
    for _ in range(100):  # a hand moves more than once; on a machine under load some moves are not noticed
        x, y = place_of(browser, "map0", picture)
        move(browser, x - 40, y - 40)
        move(browser, x, y)
        browser.execute_async_script("setTimeout(arguments[0], 100)")
        if browser.execute_script(f"return {hovered}"):
            break
    assert browser.execute_script(f"return {hovered}")
    shown = "return getComputedStyle(tip.querySelector('i')).backgroundImage.slice(0, 22)"
    assert browser.execute_script(shown) == 'url("data:image/webp;b'

    move(browser, x, y, click=True)
    wait_for(browser, "!near.hidden")
    assert browser.execute_script("return near.dataset.of") == str(picture)
    cosines = [
        float(one)
        for one in browser.execute_script("return [...near.querySelectorAll('.cosine')].map((c) => c.textContent)")
    ]
    expected = [one["cosines"][picture * 12 : picture * 12 + 12] for one in data["maps"]]
    assert cosines == [value / 1000 for row in expected for value in row]  # both runs, one below the other
    rings = "page.maps.map((_, i) => document.getElementById('map' + i).data.at(-1).x.length).join()"
    wait_for(browser, f"{rings} === '13,13'")

    following = data["maps"][0]["neighbours"][picture * 12]
    browser.execute_script("near.querySelectorAll('.row .thumb')[0].click()")  # a neighbour becomes the query
    assert browser.execute_script("return near.dataset.of") == str(following)
    browser.execute_script("near.querySelector('.shut').click()")  # at once: rings under way must not come after it
    assert browser.execute_script("return near.hidden")
    browser.execute_async_script("setTimeout(arguments[0], 200)")
    assert browser.execute_script(f"return {rings}") == "0,0"
    assert browser.get_log("browser") == []


def test_phone_and_dark_mode(browser, page):
    open_page(browser, page, width=390, dark=True, touch=True)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    light_on_dark = "return [getComputedStyle(document.body).color, map0.layout.font.color]"
    colour, drawn = browser.execute_script(light_on_dark)
    assert colour == "rgb(231, 233, 236)"
    assert drawn == "#e7e9ec"
    assert browser.execute_script("return map0.layout.dragmode") is False  # a finger scrolls the page
    scheme = {"name": "prefers-color-scheme", "value": "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    wait_for(browser, "map0.layout.font.color === '#1c2024'")  # figures follow while the page is open
    assert browser.get_log("browser") == []


def test_every_curve_is_drawn_in_the_browser(browser, page):
    open_page(browser, page)
    count = browser.execute_script("return document.querySelectorAll('.graph').length")
    for number in range(count - 2):
        browser.execute_script(f"document.getElementById('curve{number}').scrollIntoView()")
        wait_for(browser, f"document.querySelector('#curve{number} .scatterlayer path.js-line')")
    assert (
        browser.execute_script("return document.querySelectorAll('#curve0 path.js-line').length") == 2
    )  # a line a run
    assert Path(page).name in browser.current_url
    assert browser.get_log("browser") == []
