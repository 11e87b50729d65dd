"""The page at / and the description at /docs, driven in a real browser against a real server process."""

from __future__ import annotations

import csv
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

import httpx
import numpy as np
import pytest
from bench.browser import browser, missing, prefer, requested, screen
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from minbert.delivery.importance import word_effects
from minbert.delivery.predictor import Predictor
from minbert.delivery.search import SearchIndex, SentenceEncoder
from minbert.model.saved import save_model
from tests.models import PAIRS, TEXTS, THREE, make
from tests.test_server import serving

pytestmark = pytest.mark.browser

HOSTILE = '<img src=x onerror="window.hacked=1"><b>nice</b>'
CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")
SCORES = {
    "dev": {
        "sst": {"rows": 12, "metric": "accuracy", "metrics": {"accuracy": {"value": 0.5, "low": 0.25, "high": 0.75}}},
        "sts": {"rows": 12, "metric": "pearson", "metrics": {"pearson": {"value": None, "low": None, "high": None}}},
    }
}


# --- the server and the browser -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer, built, manifest = make(tiny_encoder, THREE)
    folder = tmp_path_factory.mktemp("page") / "tiny" / "model"
    save_model(folder, built, tokenizer, replace(manifest, scores=SCORES))
    return folder


@pytest.fixture(scope="module")
def predictor(model: Path) -> Predictor:
    return Predictor.load(model)


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    index = tmp_path_factory.mktemp("index") / "index"
    SearchIndex.build(index, PAIRS, SentenceEncoder.load(model))
    with serving(model, "--index", str(index), "--max-body", "20000", "--max-texts", "40") as (process, url):
        threading.Thread(target=process.stderr.read, daemon=True).start()  # a log that nobody reads fills its pipe
        yield url


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def opened(downloads: Path) -> Iterator[Chrome]:
    if why := missing():
        pytest.skip(why)
    with browser(downloads) as driver:
        driver.get("about:blank")
        requested(driver)  # what the browser itself looked at first
        yield driver


@pytest.fixture
def page(opened: Chrome, url: str) -> Iterator[Page]:
    """The page, new, on a wide screen, in light colours and at rest; afterwards nothing of it is left."""
    screen(opened, 1100, 900)
    prefer(opened, prefers_color_scheme="light", prefers_reduced_motion="reduce")
    found = Page(opened, url)
    found.load()
    opened.get_log("browser")
    yield found
    opened.execute_script("localStorage.clear(); sessionStorage.clear()")
    prefer(opened)


class Page:
    """What a person does with it."""

    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver, self.url = driver, url

    def load(self, path: str = "/", ready: str = "[role=tab][aria-selected=true]", **state: str) -> None:
        self.driver.get("about:blank")
        self.driver.get(self.url + path + (f"#{urlencode(state, quote_via=quote)}" if state else ""))
        self.wait(ready)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Of all that match at once, which a redrawing cannot tear apart."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        return self.driver.execute_script(script, selector)

    def until(self, what: Callable[[], Any], seconds: float = 10) -> Any:
        gone = (StaleElementReferenceException,)  # what was redrawn while it was looked at
        return WebDriverWait(self.driver, seconds, 0.05, gone).until(lambda _: what())

    def wait(self, selector: str) -> WebElement:
        return self.until(lambda: self.all(selector))[0]

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def type(self, selector: str, text: str) -> None:
        """As by hand; characters that a keyboard does not have are pasted."""
        field = self.one(selector)
        field.clear()
        if text.isascii() and "\n" not in text:
            field.send_keys(text)
        else:
            self.run("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))", field, text)

    def press(self, *keys: str) -> WebElement:
        """At whatever has the focus; what has it then."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)
        return self.driver.switch_to.active_element

    def bars(self) -> dict[str, str]:
        """Each class with its percentage."""
        return dict(
            self.run(
                "return [...document.querySelectorAll('#panel-text .row')].map((r) => [r.children[0].textContent, r.children[2].textContent])"
            )
        )

    @property
    def state(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(self.run("return location.hash.slice(1)")).items()}


def shown(probabilities: dict[str, float]) -> dict[str, str]:
    return {name: f"{value * 100:.1f}%" for name, value in probabilities.items()}


def near(found: dict[str, str], expected: dict[str, float]) -> bool:
    """Equal to a tenth of a percent: the last figure may be rounded either way."""
    return found.keys() == expected.keys() and all(
        abs(float(found[name][:-1]) - expected[name] * 100) < 0.11 for name in expected
    )


# --- one text -------------------------------------------------------------------------------------------------------


def test_bars_follow_what_is_typed(page: Page, predictor: Predictor) -> None:
    assert page.all("#text-results .empty")
    for text in ("nice", "nice bonus, the sun came out"):
        page.type("#text", text)
        expected = predictor.predict([text])["sst"][0]
        page.until(lambda expected=expected: near(page.bars(), expected["probabilities"]))
        assert page.texts("#panel-text .row.best .name") == [expected["label"]]
    cost = page.one("#text-cost").text
    assert "ms on the server" in cost
    assert "there and back, 1 encoding" in cost
    page.type("#text", " ")
    page.wait("#text-results .empty")


def test_words_are_shaded_and_told_as_numbers(page: Page, predictor: Predictor) -> None:
    text = "\U0001f642 a nice bonus, \U0001f31e the sun!"  # whose faces are two of JavaScript's characters each
    page.type("#text", text)
    page.wait("#panel-text .shaded")
    found = word_effects(predictor, text)["sst"]
    assert page.texts("#panel-text .shaded") == [text]
    assert page.texts("#panel-text .shaded .mark") == [word.text for word in found.words]
    strongest = found.strongest(1)[0]
    marks = dict(zip((word.text for word in found.words), page.all("#panel-text .shaded .mark"), strict=True))
    assert ("for" if strongest.effect > 0 else "against") in marks[strongest.text].get_attribute("class").split()
    page.one("#panel-text summary").click()
    rows = page.texts("#panel-text .words tbody tr")
    assert len(rows) == len(found.words)
    assert rows[0].startswith(strongest.text)
    effect = page.texts("#panel-text .words tbody .figure")[0].removesuffix(" points").replace("\u2212", "-")
    assert float(effect) == pytest.approx(strongest.effect * 100, abs=0.11)
    assert page.one("#panel-text .shaded").get_attribute("aria-hidden") == "true"
    page.until(lambda: strongest.text in page.one("#said").get_attribute("textContent"))


def test_a_class_can_be_asked_about(page: Page, predictor: Predictor) -> None:
    page.type("#text", "a nice bonus")
    page.wait("#panel-text .shaded")
    answered = predictor.predict(["a nice bonus"])["sst"][0]["label"]
    other = next(name for name in predictor.tasks["sst"].classes if name != answered)
    buttons = dict(zip(page.bars(), page.all("#panel-text .row"), strict=True))
    assert buttons[answered].get_attribute("aria-pressed") == "true"
    buttons[other].click()
    page.until(lambda: f"“{other}”" in page.one("#panel-text .legend").text)
    assert buttons[other].get_attribute("aria-pressed") == "true"


def test_an_answer_that_comes_late_is_dropped(page: Page, predictor: Predictor) -> None:
    """The first question's answer is held back until the second's was shown, and does not mind being aborted."""
    page.run(
        """const real = fetch; window.fetch = async (path, given) => {
             const {signal, ...rest} = given;
             const found = await real(path, rest);
             if (given.body?.includes("slow one")) await new Promise((done) => setTimeout(done, 900));
             return found;
           }"""
    )
    page.type("#text", "slow one")
    time.sleep(0.4)  # it is asked by now
    page.type("#text", "nice")
    expected = predictor.predict(["nice"])["sst"][0]["probabilities"]
    page.until(lambda: near(page.bars(), expected))
    time.sleep(1.2)
    assert near(page.bars(), expected)


def test_a_long_text_says_that_it_was_cut(page: Page) -> None:
    page.type("#text", "nice " * 90)
    page.until(lambda: page.one("#text-cut").is_displayed())
    assert "first 64 tokens" in page.one("#text-cut").text
    page.until(lambda: "more words were not measured" in "".join(page.texts("#panel-text .legend")))


# --- two texts ------------------------------------------------------------------------------------------------------


def test_two_texts_are_compared(page: Page, predictor: Predictor) -> None:
    page.one("#tab-pair").click()
    page.type("#first", TEXTS[0])
    page.until(lambda: page.texts("#pair-results .empty") == ["Now the other text."])
    page.type("#second", PAIRS[0])
    page.wait("#panel-pair [role=meter][aria-valuenow]")
    expected = predictor.predict([TEXTS[0]], [PAIRS[0]], tasks=["quora", "sts"])
    one, other = predictor.embed([TEXTS[0], PAIRS[0]])
    values = {
        "quora": list(expected["quora"][0]["probabilities"].values())[1] * 100,
        "sts": expected["sts"][0]["score"],
        "embeddings": one @ other / np.linalg.norm(one) / np.linalg.norm(other),
    }
    for name, value in values.items():
        assert float(page.one(f"[role=meter][aria-label={name}]").get_attribute("aria-valuenow")) == pytest.approx(
            value, abs=2e-3
        )
    page.until(lambda: page.texts("#pair-words .shaded") == [TEXTS[0], PAIRS[0]])
    assert "“" in page.one("#panel-pair .legend").text
    page.one("input[value=sts]").click()
    page.until(lambda: "higher score" in page.one("#panel-pair .legend").text)
    words = word_effects(predictor, TEXTS[0], PAIRS[0])["sts"].words
    assert page.texts("#pair-words .shaded .mark") == [word.text for word in words]


# --- many lines -----------------------------------------------------------------------------------------------------


def show_lines(page: Page, lines: list[str]) -> None:
    page.one("#tab-lines").click()
    page.type("#lines", "\n".join(lines))
    page.until(lambda: len(page.all("#panel-lines .sorted tbody tr")) == len(lines))


def cosines(predictor: Predictor, texts: list[str]) -> Any:
    vectors = predictor.embed(texts)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors @ vectors.T


def test_the_table_sorts(page: Page) -> None:
    show_lines(page, ["the sun", "a lake", "nice", "bonus"])
    column = "#panel-lines .sorted tbody td:nth-child(2)"
    head = page.all("#panel-lines .sorted thead th")
    assert page.texts(column) == ["the sun", "a lake", "nice", "bonus"]
    head[1].find_element(By.TAG_NAME, "button").click()
    assert page.texts(column) == ["a lake", "bonus", "nice", "the sun"]
    assert [one.get_attribute("aria-sort") for one in head] == [None, "ascending", None, None]
    head[1].find_element(By.TAG_NAME, "button").click()
    assert page.texts(column) == ["the sun", "nice", "bonus", "a lake"]
    assert head[1].get_attribute("aria-sort") == "descending"
    head[3].find_element(By.TAG_NAME, "button").click()
    nearest = [float(text.split()[0]) for text in page.texts("#panel-lines .sorted tbody td:nth-child(4)")]
    assert nearest == sorted(nearest, reverse=True)


def test_the_heat_map_is_seen_pointed_at_and_walked_through(page: Page, predictor: Predictor) -> None:
    show_lines(page, TEXTS)
    matrix = cosines(predictor, TEXTS)
    canvas = page.wait(".heat canvas")
    colours = page.run(
        """const canvas = document.querySelector(".heat canvas"), pen = canvas.getContext("2d");
           const data = pen.getImageData(0, 0, canvas.width, canvas.height).data, found = new Set();
           for (let i = 0; i < data.length; i += 4) found.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
           return found.size"""
    )
    assert colours > 10
    page.run("arguments[0].focus()", canvas)
    assert page.one(".readout b").text == f"{matrix[0, 1]:.2f}"
    page.press(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.one(".readout b").text == f"{matrix[1, 3]:.2f}"
    assert page.texts(".readout .text") == [f"2. {TEXTS[1]}", f"4. {TEXTS[3]}"]
    page.press(Keys.END, Keys.ARROW_RIGHT)
    assert page.one(".readout b").text == f"{matrix[1, 4]:.2f}"
    ActionChains(page.driver).move_to_element(canvas).perform()  # its middle is a cell
    page.until(lambda: len(page.texts(".readout .text")) == 2)
    page.run("arguments[0].focus()", canvas)
    page.press(Keys.HOME, Keys.ENTER)
    page.until(lambda: page.state.get("tab") == "pair")
    assert page.one("#second").get_property("value") == TEXTS[0]


def test_nearest_pairs_and_lines(page: Page, predictor: Predictor) -> None:
    show_lines(page, TEXTS)
    matrix = cosines(predictor, TEXTS)
    places = [(matrix[i, j], i, j) for i in range(5) for j in range(i + 1, 5)]
    value, one, other = max(places)
    assert page.texts(".pairs li:first-child b") == [f"{value:.2f}"]
    assert page.texts(".pairs li:first-child .text") == [f"{one + 1}. {TEXTS[one]}", f"{other + 1}. {TEXTS[other]}"]
    page.type("#find", PAIRS[1])
    page.until(lambda: len(page.all(".found h3")) == 2)
    assert page.texts(".found h3") == ["In your lines", "In the index"]
    assert page.texts(".matches b")[5] == "1.00", "the question is in the index"
    assert page.texts(".matches .text")[5] == f"2. {PAIRS[1]}"
    mine = cosines(predictor, [PAIRS[1], *TEXTS])[0, 1:]
    assert page.texts(".matches .text")[0] == f"{mine.argmax() + 1}. {TEXTS[mine.argmax()]}"
    page.one(".pairs li:first-child button").click()
    assert page.one("#first").get_property("value") == TEXTS[one]


def test_the_index_is_searched_without_lines(page: Page) -> None:
    page.one("#tab-lines").click()
    page.type("#find", PAIRS[4])
    page.until(lambda: page.texts(".matches .text")[:1] == [f"5. {PAIRS[4]}"])
    assert page.texts(".found h3") == ["In the index"]


def test_the_file_is_what_the_table_says_and_runs_nothing(page: Page, predictor: Predictor, downloads: Path) -> None:
    lines = ['nice, "bonus"', "=1+1", "-2 the sun", "@lake", "+nice", "the sun; a lake\u00e9"]
    show_lines(page, lines)
    page.one("#download").click()
    path = downloads / "minbert.csv"
    page.until(path.exists)
    page.until(lambda: path.read_bytes().endswith(b"\r\n"))
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    path.unlink()
    guarded = [lines[0], "'=1+1", "'-2 the sun", "'@lake", "'+nice", lines[5]]
    assert [row["text"] for row in rows] == guarded
    expected = predictor.predict(lines)["sst"]
    matrix = cosines(predictor, lines)
    np.fill_diagonal(matrix, -2)
    for number, (row, answer) in enumerate(zip(rows, expected, strict=True)):
        assert (row["line"], row["sst"]) == (str(number + 1), answer["label"])
        for name, value in answer["probabilities"].items():
            assert float(row[f"sst: {name}"]) == pytest.approx(value, abs=1e-4)
        assert float(row["cosine"]) == pytest.approx(matrix[number].max(), abs=1e-4)
        assert row["nearest text"] == guarded[int(row["nearest line"]) - 1]


def test_more_lines_than_the_server_takes(page: Page) -> None:
    page.one("#tab-lines").click()
    page.type("#lines", "\n".join(f"nice {number}" for number in range(50)))
    page.until(lambda: len(page.all("#panel-lines .sorted tbody tr")) == 40)
    assert "40 lines of 50" in page.one("#panel-lines .headed").text


# --- the card, the address, the colours -----------------------------------------------------------------------------


def test_the_card_shows_scores_with_intervals(page: Page) -> None:
    page.one("#tab-model").click()
    said = page.one("#panel-model").text
    assert "tiny" in said
    assert "a score from 0 to 5" in said
    assert page.texts("#panel-model [aria-label='Scores on dev'] tbody td") == [
        *("accuracy", "0.500", "0.250 to 0.750", "", "12"),
        *("pearson", "undefined", "none", "", "12"),
    ]
    assert "cut after 64 tokens" in said


def test_the_address_holds_what_was_typed(page: Page, predictor: Predictor) -> None:
    page.one("#tab-pair").click()
    page.type("#first", "nice & warm")
    page.type("#second", "50% = #half")
    page.until(lambda: page.state == {"tab": "pair", "a": "nice & warm", "b": "50% = #half"})
    address = page.driver.current_url
    page.driver.get("about:blank")
    page.driver.get(address)
    page.wait("#panel-pair [role=meter][aria-valuenow]")
    assert page.one("#second").get_property("value") == "50% = #half"
    page.load(tab="none", text="nice")
    page.until(lambda: near(page.bars(), predictor.predict(["nice"])["sst"][0]["probabilities"]))


def test_dark_by_the_system_and_by_the_switch_which_is_remembered(page: Page) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    prefer(page.driver, prefers_color_scheme="dark")
    dark = page.run(background)
    switch = page.one("#theme")
    assert dark != light
    page.until(lambda: switch.get_attribute("aria-checked") == "true")
    switch.click()
    assert (page.run(background), switch.get_attribute("aria-checked")) == (light, "false")
    page.load()
    assert page.run(background) == light
    prefer(page.driver, prefers_color_scheme="light")
    page.one("#theme").click()
    page.load("/docs", ".operation")
    assert page.run(background) == dark


def test_nothing_moves_for_those_who_want_it_still(page: Page) -> None:
    page.type("#text", "nice")
    page.wait(".bar")
    took = "return getComputedStyle(document.querySelector('.bar')).transitionDuration"
    assert page.run(took) == "0s"
    prefer(page.driver, prefers_reduced_motion="no-preference")
    assert page.run(took) != "0s"


def test_a_phone_needs_no_sideways_scrolling(page: Page) -> None:
    screen(page.driver, 360, 740, phone=True)
    long = "w" * 200
    page.load(tab="text", text=f"nice {long} bonus")
    for ready, state in (
        ("#panel-text .shaded", {"tab": "text", "text": f"nice {long} bonus"}),
        ("#panel-pair .shaded", {"tab": "pair", "a": f"nice {long}", "b": long}),
        ("#panel-lines .matches", {"tab": "lines", "lines": f"nice {long}\nthe sun\na lake", "find": long}),
        ("#panel-model table", {"tab": "model"}),
    ):
        page.load(ready=ready, **state)
        assert page.run("return document.documentElement.scrollWidth") == 360, state["tab"]
        assert page.run(
            "return [...document.querySelectorAll('[role=tab]')].every(t => t.getBoundingClientRect().right <= 360)"
        )
    page.load("/docs", ".operation")
    assert page.run("return document.documentElement.scrollWidth") == 360


# --- everyone may use it --------------------------------------------------------------------------------------------


def test_by_keyboard_alone(page: Page) -> None:
    assert page.press(Keys.TAB).text == "Skip to the texts"
    page.press(Keys.TAB, Keys.TAB)
    assert page.driver.switch_to.active_element.get_attribute("id") == "theme"
    assert page.press(Keys.SPACE).get_attribute("aria-checked") == "true"
    tab = page.press(Keys.TAB)
    assert (tab.get_attribute("id"), tab.get_attribute("aria-selected")) == ("tab-text", "true")
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.press(Keys.ARROW_LEFT).get_attribute("id") == "tab-model"
    assert page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).get_attribute("id") == "tab-pair"
    assert page.press(Keys.END).get_attribute("id") == "tab-model"
    assert page.press(Keys.HOME).get_attribute("id") == "tab-text"
    assert page.all("#panel-pair[hidden], #panel-lines[hidden], #panel-model[hidden]")
    page.press(Keys.TAB)
    page.press("nice")
    page.wait("#panel-text .shaded")
    seen = set()
    for _ in range(14):
        focused = page.press(Keys.TAB)
        seen.add(focused.tag_name)
        visible = "const s = getComputedStyle(document.activeElement); return s.outlineStyle !== 'none' || document.activeElement === document.body"
        assert page.run(visible), focused.get_attribute("outerHTML")
    assert {"button", "summary", "a"} <= seen, "examples, classes, numbers, and the link at the end"


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_texts_can_be_read(page: Page, colours: str) -> None:
    prefer(page.driver, prefers_color_scheme=colours, prefers_reduced_motion="reduce")
    lines = "\n".join(TEXTS)
    for ready, state in (
        (".sheet", {"tab": "text"}),
        ("#panel-text .shaded", {"tab": "text", "text": TEXTS[3]}),
        ("#panel-pair .shaded", {"tab": "pair", "a": TEXTS[0], "b": PAIRS[0]}),
        ("#panel-lines .matches", {"tab": "lines", "lines": lines, "find": "nice"}),
        ("#panel-model table", {"tab": "model"}),
    ):
        page.load(ready=ready, **state)
        page.run("for (const one of document.querySelectorAll('details')) one.open = true")
        check_contrast(page)
    page.load("/docs", ".operation")
    check_contrast(page)


def check_contrast(page: Page) -> None:
    found = page.run(CONTRAST)
    assert len(found) > 10
    poor = [(round(ratio, 2), text) for ratio, needed, text in found if ratio < needed]
    assert not poor


def test_names_roles_and_headings(page: Page) -> None:
    for ready, state in (
        ("#panel-text .shaded", {"tab": "text", "text": "nice"}),
        ("#panel-pair .shaded", {"tab": "pair", "a": "nice", "b": "bonus"}),
        ("#panel-lines .matches", {"tab": "lines", "lines": "nice\nbonus", "find": "nice"}),
        ("#panel-model table", {"tab": "model"}),
    ):
        page.load(ready=ready, **state)
        check_structure(page)
        assert [one.get_attribute("id") for one in page.all("[role=tabpanel]:not([hidden])")] == [
            f"panel-{state['tab']}"
        ]
    page.load("/docs", ".operation")
    check_structure(page)


def check_structure(page: Page) -> None:
    named = "input, textarea, select, button, a, canvas, [role=region], [role=meter], [role=tabpanel]"
    for element in page.all(named):
        if element.is_displayed():
            assert element.accessible_name.strip(), element.get_attribute("outerHTML")
    assert [len(page.all(name)) for name in ("h1", "main", "header", "footer")] == [1, 1, 1, 1]
    assert page.one("html").get_attribute("lang") == "en"
    levels = [int(one.tag_name[1]) for one in page.all("h1, h2, h3, h4") if one.is_displayed()]
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    ids = page.run("return [...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    for name in ("aria-controls", "aria-labelledby", "aria-describedby", "for"):
        assert {one.get_attribute(name) for one in page.all(f"[{name}]")} <= set(ids)


# --- what must not happen -------------------------------------------------------------------------------------------


def test_a_text_is_never_markup(page: Page) -> None:
    for ready, where, state in (
        ("#panel-text .shaded", "#panel-text .shaded", {"tab": "text", "text": HOSTILE}),
        ("#panel-pair .shaded", "#panel-pair .shaded", {"tab": "pair", "a": HOSTILE, "b": HOSTILE}),
        ("#panel-lines .matches", "#panel-lines td.text", {"tab": "lines", "lines": HOSTILE, "find": HOSTILE}),
    ):
        page.load(ready=ready, **state)
        assert page.texts(where)[0] == HOSTILE
        assert len(page.all("img")) == 1, "the page's own"
        assert not page.all("main b + img, .shaded b")
    page.load(tab=HOSTILE, find=HOSTILE)
    assert page.run("return window.hacked") is None
    with pytest.raises(Exception, match="TrustedHTML"):
        page.run("document.body.innerHTML = '<b>x</b>'")


def test_errors_are_told_kindly_and_the_page_recovers(page: Page, predictor: Predictor) -> None:
    page.run(
        """let busy = 1; const real = fetch; window.fetch = (...given) => busy-- > 0
             ? Promise.resolve(new Response('{"error": {"message": "full"}}', {status: 503, headers: {"retry-after": "1"}}))
             : real(...given)"""
    )
    page.type("#text", "n")
    assert page.wait("[role=alert]").text == "The server is busy. Trying again in 1 s."
    page.until(lambda: near(page.bars(), predictor.predict(["n"])["sst"][0]["probabilities"]))
    assert not page.all("[role=alert]")
    page.type("#text", "\u00e9" * 12_000)
    page.until(lambda: "more text than the server takes" in "".join(page.texts("[role=alert]")))
    page.type("#text", "nice")
    page.until(lambda: not page.all("[role=alert]"))
    page.run('window.fetch = () => Promise.resolve(new Response(\'{"error": {"message": "too odd"}}\', {status: 422}))')
    page.type("#text", "odd")
    assert page.wait("[role=alert]").text == "The server says: too odd"


@pytest.fixture(scope="module")
def other_model(tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No pairs, and names that are no markup either."""
    common = {"kind": "classification", "train": ["a.tsv"], "text": "text", "label": "topic"}
    tasks = {
        "topic": common | {"classes": ["<i>news</i>", "weather", "other"]},
        "urgency": {
            "kind": "regression",
            "train": ["a.tsv"],
            "text": "text",
            "label": "urgency",
            "low": 1.0,
            "high": 3.0,
        },
    }
    tokenizer, built, manifest = make(tiny_encoder, tasks)
    folder = tmp_path_factory.mktemp("page") / "other" / "model"
    save_model(folder, built, tokenizer, manifest)
    return folder


def test_another_model_a_key_and_a_server_that_goes_away(opened: Chrome, other_model: Path) -> None:
    with serving(other_model, MINBERT_API_KEYS="open sesame") as (process, url):
        page = Page(opened, url)
        page.load(ready="#key", tab="text", text="nice bonus")
        assert page.one("[role=alert]").text.startswith("This server asks for an API key.")
        assert page.driver.switch_to.active_element.get_attribute("id") == "key"
        page.press("wrong", Keys.ENTER)
        page.until(lambda: "not known here" in "".join(page.texts("[role=alert]")))
        page.type("#key", "open sesame")
        page.press(Keys.ENTER)
        page.wait("#panel-text .shaded")
        assert page.run("return [sessionStorage.getItem('minbert-key'), localStorage.length]") == ["open sesame", 0]
        assert "sesame" not in page.run("return document.cookie + location.href")
        assert list(page.bars()) == ["<i>news</i>", "weather", "other"]
        meter = page.one("#panel-text [role=meter]")
        assert [meter.get_attribute(f"aria-value{name}") for name in ("min", "max")] == ["1", "3"]
        expected = Predictor.load(other_model).predict(["nice bonus"])
        assert float(meter.get_attribute("aria-valuenow")) == pytest.approx(expected["urgency"][0]["score"], abs=2e-3)
        assert near(page.bars(), expected["topic"][0]["probabilities"])
        page.one("#tab-pair").click()
        page.type("#first", "nice")
        page.type("#second", "bonus")
        page.wait("#panel-pair [role=meter][aria-valuenow]")
        assert [one.get_attribute("aria-label") for one in page.all("#panel-pair [role=meter]")] == ["embeddings"]
        process.kill()
        process.wait(30)
        page.type("#first", "nicer")
        page.until(lambda: "cannot be reached" in "".join(page.texts("[role=alert]")))
        assert page.all("[role=alert] button")
        page.run("sessionStorage.clear()")


def test_the_description_needs_nothing_from_elsewhere(page: Page) -> None:
    page.load("/docs", ".operation")
    paths = httpx.get(f"{page.url}/openapi.json").json()["paths"]
    heads = page.texts(".operation > h2")
    assert heads == [f"{method.upper()}{path}" for path, methods in paths.items() for method in methods]
    card = page.one(f".operation:nth-child({[*paths].index('/v1/similarity') + 1})")
    assert "texts" in card.text
    card.find_element(By.CSS_SELECTOR, "button").click()
    output = card.find_element(By.CSS_SELECTOR, "pre")
    page.until(lambda: '"matrix"' in output.text)
    assert len(json.loads(output.text.partition("\n")[2])["matrix"][0]) == 2
    field = card.find_element(By.CSS_SELECTOR, "textarea")
    field.clear()
    field.send_keys('{"texts": 7}')
    card.find_element(By.CSS_SELECTOR, "button").click()
    page.until(lambda: "body.texts" in output.text)


def test_no_request_leaves_this_machine(page: Page) -> None:
    """Neither here nor in any test before: the log holds all that the browser asked for."""
    page.load(ready="#panel-text .shaded", tab="text", text="nice")
    page.load("/docs", ".operation")
    asked = requested(page.driver)
    assert f"{page.url}/v1/importance" in asked
    assert f"{page.url}/openapi.json" in asked
    inside = ("http://127.0.0.1:", "about:", "data:", "blob:http://127.0.0.1:")
    assert [address for address in asked if not address.startswith(inside)] == []
    complaints = [one["message"] for one in page.driver.get_log("browser") if one["level"] == "SEVERE"]
    assert complaints == [], "nothing that the policy forbids, and nothing missing"
