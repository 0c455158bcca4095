"""Links of the documents: files, and anchors of headings as GitHub makes them. Nothing is requested."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def find_anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    seen: Counter[str] = Counter()
    anchors = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        anchors.add(slug if not seen[slug] else f"{slug}-{seen[slug]}")
        seen[slug] += 1
    return anchors


def find_links(text: str) -> list[str]:
    bare = CODE.sub("", text)
    # A title in backticks is removed above, which leaves `[](target)`.
    found = re.findall(r"\]\(([^)\s]+)\)", bare) + re.findall(r'(?:src|srcset|href)="([^"\s]+)"', bare)
    return [target for target in found if "://" not in target and not target.startswith("mailto:")]


def find_faults(page: Path, text: str) -> list[str]:
    return [target for target in find_links(text) if not is_there(page, target)]


def is_there(page: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    path = (page.parent / file).resolve() if file else page
    if not path.exists() or not path.is_relative_to(ROOT):
        return False
    return not anchor or (path.suffix == ".md" and anchor in find_anchors(path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert find_faults(page, page.read_text(encoding="utf-8")) == []


def test_broken_links_are_found() -> None:
    page = ROOT / "docs/results.md"
    for text, faults in {
        "[a](results/streams.md#nothing) [`b`](methods.md) [c](#level-5)": ["results/streams.md#nothing"],
        '[a](no.md) [b](#nowhere) <img src="no.png"> `[c](d.md)`': ["no.md", "#nowhere", "no.png"],
        "[a](https://example.org) [b](../../outside.md)": ["../../outside.md"],
    }.items():
        assert find_faults(page, text) == faults


def test_every_page_is_in_the_navigation() -> None:
    docs = ROOT / "docs"
    pages = {page for page in PAGES if page.is_relative_to(docs)}
    listed = {docs / "index.md"}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            files = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{file}.md").resolve() for file in files}
    assert pages == listed
