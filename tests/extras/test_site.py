"""The site: it builds without a warning, has every public name and command, requests nothing elsewhere, and fits."""

from __future__ import annotations

import html
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import typer

import testtime as tt
from testtime.cli.commands import app

sync_api = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).parents[2]
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as by `make docs`."""
    folder = tmp_path_factory.mktemp("site")
    command = ("-m", "sphinx", "--fail-on-warning", "--quiet", "-d", folder / "doctrees", "docs", folder / "html")
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    return folder / "html"


def test_every_public_name_and_command_has_an_anchor(site: Path) -> None:
    reference = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    anchors = set(re.findall(r'id="([^"]+)"', reference))
    for name in set(tt.__all__) - {"__version__"}:
        assert {f"testtime.{name}", f"module-testtime.{name}"} & anchors, name
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        names = [f"{name}-{part}" for part in command.commands] if hasattr(command, "commands") else [name]
        assert {f"testtime-{each}" for each in names} <= anchors


def test_links_lead_to_files_and_anchors_of_the_site(site: Path) -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'id="([^"]+)"', text)) for page, text in texts.items()}
    broken = []
    for page, text in texts.items():
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            file, _, anchor = urllib.parse.unquote(html.unescape(target)).partition("#")
            path = (page.parent / file.partition("?")[0]).resolve() if file else page
            is_ours = "://" not in target and not target.startswith("data:")
            if is_ours and not (path.is_file() and (not anchor or anchor in anchors.get(path, {anchor}))):
                broken.append((page.name, target))
    assert broken == []


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_and_request_nothing_elsewhere(width: int, scheme: str, site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    wide = []
    files = sorted(site.rglob("*.html")) if scheme == "light" else [site / "index.html", site / "speed.html"]
    for file in files:
        page.goto(file.as_uri())
        if page.evaluate(WIDE) > 0:
            wide.append(file.relative_to(site).as_posix())
    page.close()
    assert wide == []
    assert said == []
    assert [url for url in asked if not url.startswith((site.as_uri(), "data:"))] == []


def test_the_search_finds_a_page_offline(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "search.html").as_uri() + "?q=poisoning")
    page.wait_for_selector("#search-results li a")
    assert "Guards" in page.inner_text("#search-results")
    page.close()
