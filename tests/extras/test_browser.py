"""The pages that the package writes, in a real browser: nothing fails, nothing leaves, nothing is cut off."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testtime import cli, resnet26
from testtime.evaluation import make_plan, run_plan

sync_api = pytest.importorskip("playwright.sync_api")

WIDE = """[...document.querySelectorAll("main > *, main section > *")]
    .filter(part => part.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(part => part.outerHTML.slice(0, 80))"""
VALUES = "table => [...table.tBodies[0].rows].map(row => Number(row.cells[2].dataset.value))"
DIGITS = "digits-resnet8-gn-joint"
HOSTILE = "<img src=x onerror=document.title='owned'>\"'</script><b>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The pages by name, made when they are first asked for."""
    folder = tmp_path_factory.mktemp("pages")

    def report() -> Path:
        net = resnet26(depth=8, channels=1, size=16)
        net.describe(classes=tuple("0123456789"), augment={"name": "crop-flip", "padding": 1, "flip": False})
        net.save(folder / "net.safetensors")
        data = ["digits", "digits-c/fog/3", "digits-c/fog/5", "digits-c/contrast/5"]
        plan = make_plan(checkpoint=folder / "net.safetensors", data=data, limit=30, copies=["2"], steps=["1"])
        run_plan(plan, folder / "run")
        assert cli.run(["report", str(folder / "run"), "--out", str(folder / "report")]) == 0
        return folder / "report" / "index.html"

    def hostile() -> Path:
        net = resnet26(depth=8, channels=1, size=16)
        net.describe(classes=tuple(f"{digit}{HOSTILE}" for digit in range(10)))
        net.save(folder / "hostile.safetensors")
        plan = make_plan(checkpoint=folder / "hostile.safetensors", data=["digits"], limit=10, methods="fixed")
        run_plan(plan, folder / "hostile-run")
        assert cli.run(["report", str(folder / "hostile-run"), "--out", str(folder / "hostile-report")]) == 0
        return folder / "hostile-report" / "index.html"

    def diagnosis() -> Path:
        out = folder / "diagnosis"
        arguments = ["-c", DIGITS, "--data", "digits-c/contrast/5", "--limit", "40"]
        assert cli.run(["diagnose", *arguments, "--out", str(out)]) == 0
        return out / "index.html"

    def demo() -> Path:
        assert cli.run(["demo", "--quick", "--out", str(folder / "demo")]) == 0
        return folder / "demo" / "index.html"

    def comparison() -> Path:
        options = ["--data", "digits-c/fog/5", "--data", "digits-c/contrast/5", "--limit", "32", "--batch", "16"]
        options += ["--methods", "fixed,online,tent,eata,sar,cotta", "--protocol", "continual"]
        assert cli.run(["eval", "-c", DIGITS, *options, "--out", str(folder / "compared")]) == 0
        assert cli.run(["report", str(folder / "compared"), "--out", str(folder / "comparison")]) == 0
        return folder / "comparison" / "index.html"

    makers = {"report": report, "hostile": hostile, "diagnosis": diagnosis, "demo": demo, "comparison": comparison}
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = makers[name]()
        return made[name]

    return find


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["report", "diagnosis", "demo", "hostile", "comparison"])
def test_a_page_is_whole(name: str, width: int, scheme: Any, browser: Any, pages: Callable[[str], Path]) -> None:
    path = pages(name)
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    title = page.title()
    page.wait_for_timeout(100)
    assert said == []
    assert "owned" not in title
    assert page.title() == title
    assert all(url.startswith(("file://", "data:")) for url in asked), asked
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    wide = page.evaluate(WIDE)
    assert wide == []
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    colours = page.evaluate("(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))")
    assert colours[0] != colours[1]
    page.close()


def test_a_column_is_sorted_by_a_click(browser: Any, pages: Callable[[str], Path]) -> None:
    page = browser.new_page()
    page.goto(pages("report").as_uri())
    table = page.locator("table.sortable").first
    head = table.locator("thead th").nth(2)
    before = table.evaluate(VALUES)
    head.locator("*").first.click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert table.evaluate(VALUES) == sorted(before)
    head.locator("*").first.click()
    assert table.evaluate(VALUES) == sorted(before, reverse=True)
    page.close()


@pytest.mark.parametrize("name", ["report", "diagnosis", "demo", "comparison"])
def test_every_chart_shows_its_values(name: str, browser: Any, pages: Callable[[str], Path]) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(pages(name).as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    tip, charts = page.locator(".tip"), page.locator("figure > svg")
    assert charts.count() > 0
    for index in range(charts.count()):
        chart = charts.nth(index)
        hit = chart.locator(".hit").last
        hit.scroll_into_view_if_needed()
        page.wait_for_timeout(200)  # scrolling hides what is shown
        hit.hover()
        shown = tip.text_content()
        sync_api.expect(tip).to_be_visible()
        assert re.search(r"\d", shown)
        box = tip.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 1280
    page.mouse.move(2, 2)
    sync_api.expect(tip).to_be_hidden()
    charts.first.focus()
    page.wait_for_timeout(200)
    seen: list[str] = []
    for _ in range(2):
        page.keyboard.press("ArrowRight")
        sync_api.expect(tip).to_be_visible()
        seen.append(tip.text_content())
    assert len({*seen}) == min(2, charts.first.locator(".hit").count())
    page.keyboard.press("Escape")
    sync_api.expect(tip).to_be_hidden()
    page.close()


def test_a_value_is_shown_by_touch(browser: Any, pages: Callable[[str], Path]) -> None:
    context = browser.new_context(viewport={"width": 400, "height": 900}, has_touch=True)
    page = context.new_page()
    page.goto(pages("report").as_uri())
    page.locator("svg .hit").first.tap()
    sync_api.expect(page.locator(".tip")).to_contain_text("%")
    context.close()


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_what_is_wider_than_the_screen_says_so(name: str, browser: Any, pages: Callable[[str], Path]) -> None:
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.goto(pages(name).as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    page.wait_for_timeout(100)
    told = """[...document.querySelectorAll(".scroll, .wide")].map(part =>
        [part.scrollWidth > part.clientWidth + 1, getComputedStyle(part, "::before").content.includes("scroll")])"""
    found = page.evaluate(told)
    assert any(wide for wide, _ in found)
    assert all(wide == hinted for wide, hinted in found)
    page.close()
