"""The playground in a real browser; skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

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
    assert eventually(lambda: MODEL in one(browser, "#model").text)


def run(browser: Any) -> None:
    one(browser, "#prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    done = [" · draft ngram · ", " · draft none · "]
    assert eventually(lambda: all(any(d in s.text for d in done) for s in all_of(browser, ".side .status")))


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = (Path(fly.serve.__file__).parent / "playground.html").read_text("utf-8")
    assert "http:" not in page and "https:" not in page and "src=" not in page and "@import" not in page


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
