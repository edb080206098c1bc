"""The playground in a real browser; skipped where there is none."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

import fly.serve
from fly import LLM, SamplingParams
from fly.drafts import NGramDraft
from fly.policies import FLy
from tests.serving import MODEL, Running, eventually, running

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs Chromium and chromedriver")
RULE = "fly(theta=0.1, window=2, hold=2)"


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,1100"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


def all_of(browser: Any, what: str) -> list[Any]:
    return browser.find_elements(By.CSS_SELECTOR, what)


def one(browser: Any, what: str) -> Any:
    (found,) = all_of(browser, what)
    return found


def fill(field: Any, text: str) -> None:
    field.clear()
    field.send_keys(text)


def open_page(browser: Any, here: Running) -> None:
    browser.get(here.url)
    assert eventually(lambda: any(MODEL in found.text for found in all_of(browser, "#model")))


def run(browser: Any) -> None:
    one(browser, "#prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    done = [" · draft ngram · ", " · draft none · "]
    assert eventually(lambda: all(any(d in s.text for d in done) for s in all_of(browser, ".side .status")))


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = (Path(fly.serve.__file__).parent / "playground.html").read_text("utf-8")
    assert "http:" not in page and "https:" not in page and "src=" not in page and "@import" not in page


# A page whose elements are whatever the script asks for, and a server that refuses: prints what the page shows.
STAND_IN = """
const [key, status, body] = JSON.parse(process.argv[1]);
const any = () => new Proxy(function () {}, {
  get: (of, name) => name === Symbol.toPrimitive ? () => "" : name === Symbol.iterator ? [][Symbol.iterator] :
    (of[name] ??= any()),
  apply: () => any(),
});
const elements = { key: { value: key, addEventListener() {} }, model: {} };
const find = (id) => elements[id] ??= any();
const document = new Proxy({}, { get: (_, name) => name === "getElementById" ? find : any() });
const [localStorage, matchMedia, addEventListener] = [any(), any(), () => {}];
const fetch = async () => new Response(body, { status, statusText: "Bad Gateway" });
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize(
    ("key", "status", "shown"),
    [
        ("", 401, "The server wants an API key: put it into the field “API key”."),
        ("wrong", 401, "The server does not know this API key."),
        ("schlüssel two", 401, "The server does not know this API key."),
        ("", 403, "a reason"),
        ("", 502, "The answer was 502 Bad Gateway."),
    ],
)
def test_a_user_of_the_page_needs_no_headers(key: str, status: int, shown: str) -> None:
    page = (Path(fly.serve.__file__).parent / "playground.html").read_text("utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0].replace('"use strict";', "")
    body = "<html>" if status == 502 else json.dumps({"error": {"message": "a reason"}})
    then = "setTimeout(() => console.log(elements.model.textContent), 50);"
    command = ["node", "-e", STAND_IN + script + then, json.dumps([key, status, body])]
    said = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert said.stdout == f"{shown}\n", said.stderr


@needs_browser
def test_the_key_goes_into_its_field(browser: Any) -> None:
    with running(api_keys=("a-key",)) as server:
        browser.get(server.url)
        assert eventually(lambda: "put it into the field" in one(browser, "#model").text)
        for text, shown in (("another", "does not know this API key"), ("a-key", MODEL)):
            fill(one(browser, "#key"), text + Keys.TAB)
            assert eventually(lambda shown=shown: shown in one(browser, "#model").text)


@needs_browser
def test_two_settings_side_by_side(browser: Any, here: Running) -> None:
    open_page(browser, here)
    question = "Take the list 4 9 5 7. Reverse the list, then sort from low to high."
    fill(one(browser, "#prompt"), question)
    policies = all_of(browser, ".policy")
    fill(policies[1], RULE)
    run(browser)
    llm = LLM(MODEL, draft=NGramDraft(), dtype="float32", k=6)
    params = SamplingParams(temperature=0.0, max_tokens=200)
    wanted = llm.generate(
        [llm.chat_prompt(question)] * 2, params, policy=[llm.policy, FLy(theta=0.1, window=2, hold=2)]
    )
    for side, output in zip(all_of(browser, ".side"), wanted):
        tokens = side.find_elements(By.CSS_SELECTOR, ".token")
        reasons = [token.why.name.lower() for token in output.provenance]
        assert [token.get_attribute("class") for token in tokens] == [f"token {reason}" for reason in reasons]
        told = browser.execute_script("return arguments[0].map((token) => token.info.text).join('')", tokens)
        assert told == output.text
        assert side.find_element(By.CSS_SELECTOR, ".tau").text == f"{output.stats.tau:.2f}"
        assert side.find_element(By.CSS_SELECTOR, ".count").text == str(len(output.token_ids))
        assert side.find_element(By.CSS_SELECTOR, ".relaxed-count").text == str(output.stats.relaxed)
        assert len(side.find_elements(By.CSS_SELECTOR, ".edge")) == output.stats.rounds
        assert f"{output.policy} · {output.guarantee.value}" in side.find_element(By.CSS_SELECTOR, ".status").text
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@needs_browser
def test_what_the_sides_do_not_share_is_marked(browser: Any, here: Running) -> None:
    open_page(browser, here)
    policies = all_of(browser, ".policy")
    fill(policies[1], RULE)
    run(browser)
    compared = one(browser, "#compared")
    assert eventually(lambda: bool(compared.text))
    ids, marked = (
        [[browser.execute_script(script, token) for token in side.find_elements(By.CSS_SELECTOR, ".token")]
         for side in all_of(browser, ".side")]
        for script in ("return arguments[0].info.id", "return 'differs' in arguments[0].dataset")
    )  # fmt: skip
    shared = [[i for i, differs in zip(*side) if not differs] for side in zip(ids, marked)]
    assert shared[0] == shared[1] and len(shared[0]) == longest_common(*ids)
    parted = next(place for place, (a, b) in enumerate(zip(*ids), start=1) if a != b)
    assert f"part at token {parted};" in compared.text
    fill(policies[1], "exact")
    run(browser)
    assert eventually(lambda: "the same, token by token" in compared.text)
    assert not all_of(browser, ".text [data-differs]")


def longest_common(left: list[int], right: list[int]) -> int:
    """Of subsequences."""
    row = [0] * (len(right) + 1)
    for a in left:
        above, row = row, [0]
        for place, b in enumerate(right):
            row.append(above[place] + 1 if a == b else max(row[-1], above[place + 1]))
    return row[-1]


@needs_browser
def test_each_side_picks_its_draft_and_its_k(browser: Any, here: Running) -> None:
    open_page(browser, here)
    assert [option.text for option in Select(one(browser, "#models")).options] == [MODEL]
    drafts = [Select(each) for each in all_of(browser, ".draft")]
    assert [option.text for option in drafts[0].options] == ["ngram", "none"]
    drafts[1].select_by_visible_text("none")
    ks = all_of(browser, ".k")
    assert ks[0].is_enabled() and not ks[1].is_enabled()
    fill(ks[0], "2")
    run(browser)
    left, right = (status.text for status in all_of(browser, ".side .status"))
    assert "K 2 · draft ngram" in left and "K 0 · draft none" in right
    first, speed = (float(one(browser, f".side:first-child .{name}").text) for name in ("first", "speed"))
    assert first >= 0 and speed > 0


@needs_browser
def test_a_narrow_page_has_room_for_all(browser: Any, here: Running) -> None:
    size = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_page(browser, here)
        run(browser)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@needs_browser
def test_tokens_tell_about_themselves_to_pointer_and_keyboard(browser: Any, here: Running) -> None:
    open_page(browser, here)
    run(browser)
    tokens = all_of(one(browser, ".side:first-child"), ".token")
    webdriver.ActionChains(browser).move_to_element(tokens[3]).perform()
    detail = one(browser, "#detail")
    assert detail.is_displayed() and "Entropy" in detail.text and "Target's choice" in detail.text
    webdriver.ActionChains(browser).move_to_element(one(browser, "h1")).perform()
    assert not detail.is_displayed()
    one(browser, ".side:first-child .text").send_keys(Keys.ARROW_RIGHT)
    for key, at in (
        (Keys.ARROW_RIGHT, 1),
        (Keys.END, len(tokens) - 1),
        (Keys.ARROW_LEFT, len(tokens) - 2),
        (Keys.HOME, 0),
    ):
        browser.switch_to.active_element.send_keys(key)
        assert browser.switch_to.active_element == tokens[at] and detail.is_displayed()
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert browser.switch_to.active_element.location["y"] > tokens[0].location["y"]
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert browser.switch_to.active_element == one(browser, ".side:first-child .text") and not detail.is_displayed()


@needs_browser
def test_errors_and_both_themes(browser: Any, here: Running) -> None:
    open_page(browser, here)
    fill(all_of(browser, ".policy")[0], "flyy")
    one(browser, "#run").click()
    status = one(browser, ".side:first-child .status")
    assert eventually(lambda: "'flyy' is unknown" in status.text and one(browser, "#run").is_enabled())
    before = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    one(browser, "#theme").click()
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != before
    assert all(contrast(browser, reason) >= 4.5 for reason in ("match", "relaxed", "correction", "bonus"))
    one(browser, "#theme").click()
    assert all(contrast(browser, reason) >= 4.5 for reason in ("match", "relaxed", "correction", "bonus"))


def contrast(browser: Any, reason: str) -> float:
    """Of a token's text to its colour, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    token = one(browser, f".legend .token.{reason}")
    colours = browser.execute_script(
        "const s = getComputedStyle(arguments[0]); return [s.color, s.backgroundColor]", token
    )
    dark, light = sorted(luminance(colour) for colour in colours)
    return (light + 0.05) / (dark + 0.05)
