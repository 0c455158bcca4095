"""Documents of which some parts are made from results files and the rest is written by hand.

    <!-- begin: NAME -->
    what stands here is made anew
    <!-- end -->

`testtime.report.readme` and `testtime.report.findings` make such parts; nothing outside the comments is their business.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from testtime.report.run_tables import difference
from testtime.storage import write_whole

_PART = re.compile(r"<!-- begin: (.*?) -->\n.*?<!-- end -->", re.DOTALL)


def fill(document: str, parts: Mapping[str, str]) -> str:
    """A document with its parts made anew.

    Args:
        document: Its text, with two comments around each part.
        parts: Their texts by name.

    Raises:
        ValueError: The document does not have exactly these parts, each once.
    """
    names = [found[1] for found in _PART.finditer(document)]
    if sorted(names) != sorted(parts) or document.count("<!-- begin:") != len(names):
        wanted = ", ".join(parts)
        raise ValueError(f"The document must have the parts {wanted}, each once and with an end; it has {names}.")
    return _PART.sub(lambda found: f"<!-- begin: {found[1]} -->\n{parts[found[1]]}\n<!-- end -->", document)


def update(documents: Mapping[Path, Mapping[str, str]], check: bool) -> bool:
    """Fill documents on disk, each written whole or not at all.

    Args:
        documents: Their parts by path.
        check: Write nothing.

    Returns:
        Whether all of them were what their parts say.

    Raises:
        ValueError: A document lacks a part.
    """
    held = {path: path.read_text(encoding="utf-8") for path in documents}
    wanted = {path: fill(held[path], parts) for path, parts in documents.items()}
    if not check:
        for path, text in wanted.items():
            write_whole(path, text)
    return held == wanted


def wrap(text: str, first: str = "", indent: str = "") -> str:
    """A paragraph in lines of 120.

    Args:
        text: Its words.
        first: What its first line begins with.
        indent: What the others begin with.
    """
    return textwrap.fill(
        text, 120, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def bullets(texts: Sequence[str]) -> str:
    """Paragraphs as a list."""
    return "\n".join(wrap(text, "- ", "  ") for text in texts)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: words in the first column, numbers in the others."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(heads) - 1), *lines[1:]])


def fold(command: str) -> str:
    """A command in lines of at most 120, each from an option on."""
    lines = [""]
    for part in re.split(r" (?=--)", command):
        if len(lines[-1]) + len(part) > 117:
            lines.append("   ")
        lines[-1] += f" {part}"
    return " \\\n".join(lines)[1:]


def commands(lines: Sequence[str]) -> str:
    """Commands as a block of code."""
    return "```sh\n" + "\n".join(fold(line) for line in lines) + "\n```"


def signed(gap: float) -> str:
    """A difference in points with its sign."""
    return difference(gap, 0.0)


def points(gap: float) -> str:
    """A difference in points to two places, with its sign."""
    return minus(f"{gap:+.2f}") if round(gap, 2) else "0.00"


def minus(text: str) -> str:
    """A number's text with the sign that is as wide as a plus."""
    return text.replace("-", "−")


def link(path: Path) -> str:
    """A file of the checkout as a document in `docs` links to it."""
    return f"[`{path.name}`](../{path})"
