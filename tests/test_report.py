"""The report of runs, read as a browser would: its numbers, its pictures, what it makes of odd runs and of hostile text."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minbert.errors import MinbertError
from minbert.evaluation.report import write_report
from tests.made_up_runs import TASKS, make_run

VOID = {"meta", "link", "br"}
HOSTILE = """<script>alert("x")</script> & 'quoted' </pre>"""


# --- the page, read back --------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Fails where the page is not well formed; keeps its elements and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        """The attributes of every such element; `kind` is one of its classes, the rest must be equal."""
        kind = wanted.pop("kind", None)
        return [
            attributes
            for name, attributes in self.elements
            if name == tag
            and (kind is None or kind in attributes.get("class", "").split())
            and all(attributes.get(key) == value for key, value in wanted.items())
        ]


def report(*runs: Path) -> Page:
    output = runs[0].parent / "report.html"
    write_report(runs, output)
    return Page(output.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Of a usual run."""
    return report(make_run(tmp_path_factory.mktemp("runs") / "usual"))


# --- one run --------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_loads_nothing(page: Page) -> None:
    addresses = [value for _, found in page.elements for key, value in found.items() if key in ("src", "href")]
    assert addresses and all(address.startswith(("#", "data:")) for address in addresses)
    assert not page.all("script") and not re.search(r"url\(|@import|https?:", page.source)
    anchors = {found["id"] for _, found in page.elements if "id" in found}
    assert {address[1:] for address in addresses if address.startswith("#")} <= anchors
    assert len(anchors) == sum("id" in found for _, found in page.elements)
    assert "prefers-color-scheme: dark" in page.source and page.all("meta", name="viewport")


def test_everything_has_a_name_for_those_who_listen(page: Page) -> None:
    assert [tag for tag, _ in page.elements if tag in ("h1", "h2", "h3")] == ["h1", "h2", *["h3"] * 6]
    assert page.elements[0] == ("html", {"lang": "en"})
    assert all(found["aria-label"] for found in page.all("svg", kind="chart") + page.all("div", kind="scroll"))
    assert all(found["tabindex"] == "0" for found in page.all("div", kind="scroll"))
    assert len(page.all("caption")) == len(page.all("table"))


def test_header(page: Page) -> None:
    for words in (
        *("made-up", "A run that never happened.", "overall 2023 0.701", "overall 2024 0.765"),
        *("encoder minilm", "seed 1", "device cpu (abacus)", "commit 0123456789ab and changes", "minutes 2.5"),
        *("sst, accuracy 0.600 0.560 to 0.650", "sts, pearson 0.800 0.760 to 0.850"),
    ):
        assert words in page.text
    assert not page.all("p", kind="warning")


def test_a_run_on_the_sample_says_so(tmp_path: Path) -> None:
    assert "say nothing about quality" in report(make_run(tmp_path / "run", data="embedded")).text


def test_scores(page: Page) -> None:
    assert "sst accuracy 0.600 0.560 to 0.650 0.800 0.200 roc-auc 0.111" in page.text
    assert "sts pearson 0.800 0.760 to 0.850 1.000 0.200 mse" in page.text
    assert "sst 1.37 no threshold accuracy 0.600 \u2192 0.600 0.111 \u2192 0.111" in page.text
    assert "quora 1.37 0.456" in page.text


def test_curves(page: Page) -> None:
    labels = [found["aria-label"] for found in page.all("svg", kind="chart")]
    assert sum(label.startswith("Training loss of") for label in labels) == 3
    assert "dev accuracy of sst at 3 evaluations; train accuracy of sst at 3 evaluations" in labels
    assert "Learning rate over 120 steps, at most 0.0001" in labels
    assert "<title>dev, step 120: 0.6</title>" in page.source
    assert "<title>loss, step 20: 1</title>" in page.source
    assert page.text.count("80 (chosen)") == 3


def test_confusion_and_reliability(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")  # the same as the page's
    found = json.loads((run / "results.json").read_text())["dev"]["quora"]
    counts = np.array(found["confusion"])
    for name, row, accuracy in zip(found["classes"], counts, found["class_accuracy"], strict=True):
        cells = " ".join(f"{count} {count / row.sum():.0%}" for count in row)
        assert f"{name} {cells} {accuracy:.3f} {row.sum()}" in page.text
    assert len(page.all("td", kind="right")) == 5 + 2 and len(page.all("td", kind="wrong")) == 20 + 2
    assert page.text.count("Mean confidence") == 2
    assert any(found["aria-label"].startswith("Reliability of quora: ") for found in page.all("svg", kind="chart"))


def test_scatter(page: Page) -> None:
    assert len(page.all("circle", r="3")) == 3 * 60  # label and prediction of sts; word overlap of sts and quora
    assert "evenly through the file" not in page.text


def test_mistakes(page: Page, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run") / "predictions"
    rows = {task: [json.loads(line) for line in (folder / f"{task}.jsonl").open()] for task in TASKS}
    false = {1: "positives: answered \u201cduplicate\u201d", 0: "negatives: answered \u201cdifferent\u201d"}
    for answer, name in false.items():
        wrong = [row for row in rows["quora"] if row["prediction"] == answer != row["label"]]
        first = max(wrong, key=lambda row: row["probabilities"][answer])
        count = f"10 of {len(wrong)}" if len(wrong) > 10 else f"{len(wrong)}"
        said = f"{TASKS['quora']['classes'][answer]} {first['probabilities'][answer]:.1%}"
        meant = TASKS["quora"]["classes"][1 - answer]
        assert f"False {name} {count} {said} label {meant} {first['id']} {first['text']} {first['text2']}" in page.text
    first = max(rows["sts"], key=lambda row: row["prediction"] - row["label"])
    wrong = [row for row in rows["sts"] if row["prediction"] > row["label"]]
    assert (
        f"Overestimates 10 of {len(wrong)} predicted {first['prediction']:.2f} label {first['label']:.2f}" in page.text
    )
    assert page.text.count("the surest first. At most 10 each") == 1
    assert page.text.count("the farthest and surest first. At most 10 each") == 1
    assert "Answered too high" in page.text and "Underestimates" in page.text


def test_data_and_recipe(page: Page) -> None:
    assert "quora train 1,234 7 no label 3 (456 tokens) d.csv" in page.text
    assert "120 of 160 planned steps, over 4,321 rows. It stopped early." in page.text
    assert '[tasks.sts] kind = "pair-regression"' in page.text and "schedule = " in page.text


def test_rows_that_were_added_are_counted(tmp_path: Path) -> None:
    def borrowed(results: dict[str, Any]) -> None:
        results["data"]["train"]["sts"] = {**results["data"]["train"]["sts"], "added": {"borrowed from quora": 1200}}

    assert (
        "sts train 1,234 1,200 borrowed from quora 7 no label"
        in report(make_run(tmp_path / "run", change=borrowed)).text
    )


# --- odd runs -------------------------------------------------------------------------------------------------------


def test_a_run_that_is_not_finished(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "results.json").unlink()
    with pytest.raises(MinbertError, match=r"run: the run is not finished, there is no results\.json"):
        write_report([run], tmp_path / "report.html")
    with pytest.raises(MinbertError, match=r"no such file; expected the folder of a finished run"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(MinbertError, match="no run given"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_results_of_something_else(tmp_path: Path) -> None:
    def shorten(results: dict[str, Any]) -> None:
        del results["dev"], results["steps"]

    run = make_run(tmp_path / "run", change=shorten)
    with pytest.raises(MinbertError, match=r"results\.json: has no dev, steps; expected what minbert train writes"):
        write_report([run], tmp_path / "report.html")


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(MinbertError, match=r"recipe\.toml.*: cannot be written"):
        write_report([run], run / "recipe.toml" / "report.html")


def test_no_train_sample(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "run", train_sample=False))
    assert "train_sample is 0" in page.text and "sst accuracy 0.600 0.560 to 0.650 \u2013 \u2013" in page.text
    labels = [found["aria-label"] for found in page.all("svg", kind="chart")]
    assert "dev accuracy of sst at 3 evaluations" in labels


def test_one_evaluation(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "run", evaluations=1))
    assert page.source.count("<title>dev, step 40: ") == 3


def test_no_evaluation_and_no_log(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", evaluations=0, log_lines=0)
    assert report(run).text.count("metrics.jsonl holds no evaluation") == 3
    (run / "metrics.jsonl").unlink()
    (run / "recipe.toml").unlink()
    page = report(run)
    assert page.text.count("metrics.jsonl holds no loss") == 3 and '"schedule":' in page.text


def test_scores_that_are_not_defined(tmp_path: Path) -> None:
    page = report(make_run(tmp_path / "run", scores={"sts": math.nan}))
    assert "sts pearson \u2013 \u2013 \u2013 \u2013 mse 0.111" in page.text
    assert "sts, pearson \u2013" in page.text
    assert "no number is defined" in page.text
    assert not re.search(r"\bnan\b|None\b", page.text.split("The resolved recipe")[0])


def test_twenty_thousand_predictions(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rows=20_000, log_lines=3000)
    page = report(run)
    assert len(page.all("circle", r="2")) == 3 * 1500
    assert "1,500 of 20,000 rows are drawn, evenly through the file." in page.text
    assert "A point is the mean of 25 lines of the log." in page.text
    assert len(page.source) < 1_000_000
    assert page.source == report(run).source  # nothing is drawn by lot


def test_twenty_classes_one_of_them_never_seen(tmp_path: Path) -> None:
    tasks = {"topics": {"kind": "classification", "classes": tuple(f"topic number {place}" for place in range(20))}}

    def without_the_last(results: dict[str, Any]) -> None:
        results["dev"]["topics"]["confusion"][19] = [0] * 20
        results["dev"]["topics"]["class_accuracy"][19] = None

    page = report(make_run(tmp_path / "run", tasks=tasks, rows=400, change=without_the_last))
    assert len(page.all("td", kind="right")) == 20 and len(page.all("td", kind="wrong")) == 380
    assert page.all("table", kind="many") and re.search(r"topic number 19 (0 0% ){20}\u2013 0", page.text)


def test_no_mistakes(tmp_path: Path) -> None:
    def all_right(task: str, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["label"] = row["prediction"]

    page = report(make_run(tmp_path / "run", edit_rows=all_right))
    assert page.text.count("0 None.") == 6


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    classes = ("<b>a</b>", HOSTILE)
    tasks = {"<i>t": {"kind": "pair-classification", "text2": "b", "classes": classes}}

    def everywhere(results: dict[str, Any]) -> None:
        results |= {"name": HOSTILE, "about": HOSTILE, "encoder": HOSTILE}
        results["environment"] = dict.fromkeys(("device", "device_name", "commit"), HOSTILE)
        note = results["data"]["dev"]["<i>t"]
        note |= {"skipped": {HOSTILE: 1}, "files": {HOSTILE: "ab"}}

    def in_texts(task: str, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row |= {"id": HOSTILE, "text": HOSTILE, "text2": "\ud800 alone"}

    run = make_run(tmp_path / "run", tasks=tasks, change=everywhere, edit_rows=in_texts, about=HOSTILE)
    other = make_run(tmp_path / "other", tasks=tasks, change=lambda results: results.update(name=f"2 {HOSTILE}"))
    for page in (report(run), report(run, other)):
        assert not page.all("script") and not page.all("b", kind="") and not page.all("i")
        assert page.text.count("alert") > 10
        assert not re.search(r'="[^"]*<script', page.source)


def test_long_texts_are_cut(tmp_path: Path) -> None:
    long = "word " * 2000

    def lengthen(task: str, rows: list[dict[str, Any]]) -> None:
        rows[0] |= {"text": long, "label": 0.0, "prediction": 9.0}

    page = report(make_run(tmp_path / "run", tasks={"sts": TASKS["sts"]}, edit_rows=lengthen))
    assert page.all("summary", title=long) and "all 10,000 characters" in page.text
    assert page.text.count(" ".join(long.split())) == 1  # behind a click


def test_one_row(tmp_path: Path) -> None:
    report(make_run(tmp_path / "run", rows=1))


# --- several runs ---------------------------------------------------------------------------------------------------


def test_comparison(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", seed=2, scores={"sst": 0.4}, change=lambda r: r["overall"].update({"2023": 0.9}))
    three = make_run(tmp_path / "three", seed=3, tasks={"sst": TASKS["sst"]}, scores={"sst": math.nan})
    page = report(one, two, three)
    assert page.text.startswith("Comparison of 3 runs: minbert report")
    rows = page.text[: page.text.index("Bold is the highest")]
    assert "made-up, seed 1 minilm 1 0.701 0.765 0.600 accuracy, 0.560 to 0.650 0.700" in rows
    assert "made-up, seed 2 minilm 2 0.900 0.765 0.400 accuracy, 0.360 to 0.450 0.700" in rows
    assert rows.rstrip().endswith("\u2013 accuracy, \u2013 \u2013 not a task of this run \u2013 not a task of this run")
    best = re.findall(r'class="n best">([\d.]+)', page.source)
    assert best == ["0.765", "0.600", "0.700", "0.800", "0.900", "0.765", "0.700", "0.800", "0.765"]
    assert {"comparison", "run1", "run2", "run3"} <= {found.get("id") for _, found in page.elements}
    assert "<title>made-up, seed 2, step 120: 0.4</title>" in page.source
    labels = [found["aria-label"] for found in page.all("svg", kind="chart")]
    assert "Dev accuracy of quora over the steps: made-up, seed 1, made-up, seed 2" in labels
    assert (
        "What differs between the recipes Settings that differ setting made-up, seed 1 made-up, seed 2 made-up, seed 3 seed 1 2 3 tasks sst, quora, sts sst, quora, sts sst"
        in page.text
    )


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    page = report(one, two)
    assert page.text.count("The recipes are the same.") == 1
    assert [name for name in ("one", "two") if f">{name}</h2>" in page.source] == ["one", "two"]
    assert f">2: {one}</h2>" in report(one, one).source


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390], ids=["desktop", "phone"])
def test_in_chromium(tmp_path: Path, width: int, theme: str) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not on PATH: apt-get install chromium")
    runs = [make_run(tmp_path / "one", data="embedded"), make_run(tmp_path / "two", seed=2)]
    write_report(runs, tmp_path / "report.html")
    picture = tmp_path / "picture.png"
    command = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
        *(f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0"),
        f"--blink-settings=preferredColorScheme={int(theme == 'light')}",
        *(f"--screenshot={picture}", f"--window-size={width},900", (tmp_path / "report.html").as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    first_pixel, changes = read_png(picture)
    assert first_pixel == {"light": (0xF5, 0xF6, 0xF8), "dark": (0x11, 0x15, 0x1B)}[theme]
    assert changes > 20_000, "the page is blank"


def read_png(path: Path) -> tuple[tuple[int, ...], int]:
    """The first pixel, and how many bytes differ from what PNG foretells by their neighbours: in a blank picture, few."""
    content, chunks, place = path.read_bytes(), b"", 8
    while place < len(content):
        size, kind = struct.unpack_from(">I4s", content, place)
        chunks += content[place + 8 : place + 8 + size] if kind == b"IDAT" else b""
        place += size + 12
    data = zlib.decompress(chunks)
    return tuple(data[1:4]), len(data) - data.count(0)
