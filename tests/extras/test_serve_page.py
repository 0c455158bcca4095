"""The live page of the service in a real browser: rows, buttons, tokens, restarts, small and dark screens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import serving
from testtime.serve import demo

sync_api = pytest.importorskip("playwright.sync_api")

HOSTILE = "<img src=x onerror=document.title='owned'>\"'</script><b>"
WIDE = """[...document.querySelectorAll("main *, header *")]
    .filter(part => part.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .filter(part => !part.closest("thead, svg"))
    .map(part => part.outerHTML.slice(0, 80))"""


def open_page(browser: Any, url: Any, **given: Any) -> tuple[Any, list[str]]:
    """A page, and what it says on the console."""
    page = browser.new_page(**given)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(str(url))
    return page, said


def expect(locator: Any) -> Any:
    return sync_api.expect(locator)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_shows_streams_and_fits(width: int, scheme: str, browser: Any, tmp_path: Path) -> None:
    name = "camera-" + 57 * "7"  # the longest
    with serving.open_client(tmp_path, thumbnails=True, version_every=2) as (client, _):
        for seed in range(5):
            serving.send(client, name, serving.image(seed))
        page, said = open_page(browser, client.base_url, viewport={"width": width, "height": 900}, color_scheme=scheme)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        expect(page.locator("#said")).to_have_text("live")
        expect(page.locator("#rows tr")).to_have_count(1)
        expect(page.locator("#pictures img")).to_have_count(5)
        serving.send(client, "other", serving.image(9))
        expect(page.locator("#rows tr")).to_have_count(2)
        serving.send(client, name, serving.image(6))
        expect(page.locator("#rows tr", has_text=name).locator("td").nth(1)).to_have_text("6")
        expect(page.locator("#pictures img")).to_have_count(6)
        expect(page.locator("#loss-chart polyline")).to_have_count(4 if page.locator(".dashed").count() else 3)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert page.evaluate(WIDE) == []
        assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
        colours = page.evaluate(
            "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
        )
        brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours]
        assert (brightness[0] > brightness[1]) == (scheme == "dark")
        assert all(url.startswith((str(client.base_url), "data:")) for url in asked)
        assert said == []
        page.close()


def test_buttons_change_the_stream(browser: Any, tmp_path: Path) -> None:
    with serving.open_client(tmp_path, version_every=2) as (client, service):
        for seed in range(5):
            serving.send(client, "one", serving.image(seed))
        serving.send(client, "two", serving.image(0))
        page, said = open_page(browser, client.base_url)
        expect(page.locator("#stream")).to_have_text("one")
        page.get_by_role("button", name="Freeze", exact=True).click()
        expect(page.locator("#freeze")).to_have_text("Unfreeze")
        expect(page.locator("#rows tr", has_text="one")).to_contain_text("frozen")
        records = service.engine.residents.records
        assert records["one"].frozen
        assert not records["two"].frozen
        page.locator("#freeze").focus()  # and by keyboard
        page.keyboard.press("Enter")
        expect(page.locator("#freeze")).to_have_text("Freeze")
        assert not records["one"].frozen
        page.get_by_role("button", name="Reset").click()
        expect(page.locator("#done")).to_contain_text("Reset")
        assert (records["one"].version, records["one"].sample) == (6, 0)
        page.get_by_role("button", name="Roll back to version 5").click()  # stored by the reset
        expect(page.locator("#done")).to_contain_text("version 5")
        assert (records["one"].version, records["one"].sample) == (7, 5)
        expect(page.locator("#log li")).to_have_count(4)
        with page.expect_download() as download:
            page.get_by_role("button", name="Export").click()
        assert download.value.suggested_filename == "one.safetensors"
        assert Path(download.value.path()).read_bytes() == client.get("/v1/streams/one/export").content
        page.get_by_role("link", name="two").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#stream")).to_have_text("two")
        client.delete("/v1/streams/two")
        expect(page.locator("#rows tr")).to_have_count(1)
        expect(page.locator("#stream")).to_have_text("one")
        assert said == []
        page.close()


def test_hostile_names_of_classes_stay_text(browser: Any, tmp_path: Path) -> None:
    with serving.open_client(tmp_path, thumbnails=True) as (client, service):
        service.engine._names = tuple(f"{number}{HOSTILE}" for number in range(10))
        service.about["network"] = HOSTILE
        serving.send(client, "one", serving.image(0))
        page, said = open_page(browser, client.base_url)
        expect(page.locator("#pictures figcaption")).to_contain_text("onerror=")
        expect(page.locator("#name")).to_have_text(HOSTILE)
        page.wait_for_timeout(200)
        assert page.title() != "owned"
        assert page.locator("img[src=x]").count() == 0
        assert said == []
        page.close()


def test_a_token_is_asked_for_once(browser: Any, tmp_path: Path) -> None:
    with serving.open_client(tmp_path, token=serving.TOKEN) as (client, _):
        serving.send(client, "one", serving.image(0))
        page, said = open_page(browser, client.base_url)
        expect(page.locator("#ask")).to_be_visible()
        assert page.locator("#rows tr").count() == 0
        page.get_by_role("textbox").fill("a-wrong-token-of-some-length")
        page.get_by_role("button", name="Open").click()
        expect(page.locator("#refused")).not_to_be_empty()
        page.locator("#token").fill(serving.TOKEN)
        page.keyboard.press("Enter")
        expect(page.locator("#rows tr")).to_have_count(1)
        serving.send(client, "one", serving.image(1))
        expect(page.locator("#rows td").nth(1)).to_have_text("2")
        page.reload()
        expect(page.locator("#rows tr")).to_have_count(1)
        assert not page.locator("#ask").is_visible()
        assert serving.TOKEN not in page.url
        assert all("401" in line for line in said)
        other = browser.new_page()
        other.goto(str(client.base_url))
        expect(other.locator("#ask")).to_be_visible()
        page.close()
        other.close()


def test_the_page_reconnects_after_a_restart(browser: Any, tmp_path: Path) -> None:
    with serving.open_client(tmp_path) as (client, _):
        serving.send(client, "one", serving.image(0))
        port = client.base_url.port
        page, _ = open_page(browser, client.base_url)
        expect(page.locator("#said")).to_have_text("live")
    expect(page.locator("#said")).to_have_text("reconnecting")
    expect(page.locator("#freeze")).to_be_disabled()
    with serving.open_client(tmp_path, port=port) as (client, _):
        expect(page.locator("#said")).to_have_text("live", timeout=15000)
        serving.send(client, "one", serving.image(1))
        expect(page.locator("#rows td").nth(1)).to_have_text("2")
        expect(page.locator("#freeze")).to_be_enabled()
        page.close()


def test_the_demo_compares_its_streams(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [(serving.image(seed), seed % 2) for seed in range(20)]
    monkeypatch.setattr(demo, "iterate_digits", lambda: iter(images))
    with serving.open_client(tmp_path, thumbnails=True) as (client, service):
        running = demo.Demo(service, str(client.base_url), pace=20)
        page, said = open_page(browser, client.base_url, viewport={"width": 400, "height": 900})
        for name in (demo.FROZEN, demo.ADAPTING):  # the detail follows the adapting stream as soon as there is one
            serving.send(client, name, images[0][0])
            expect(page.locator("#stream")).to_have_text(name)
        with running:
            running._thread.join(60)
            expect(page.locator("#demo")).to_be_visible()
            expect(page.locator("#stream")).to_have_text(demo.ADAPTING)
            expect(page.locator("#rows tr", has_text=demo.ADAPTING).locator("td").nth(1)).to_have_text("20")
            for name in (demo.FROZEN, demo.ADAPTING):
                error = service.engine.residents.records[name].notes[-1]["error"]
                expect(page.locator(f"#{name}")).to_have_text(f"{100 * error:.0f} %")
            expect(page.locator("#demo-images figure").first).to_be_visible()
            expect(page.locator("#demo-chart polyline")).to_have_count(2)
        assert page.evaluate(WIDE) == []
        assert said == []
        page.close()
