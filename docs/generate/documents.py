"""Documents with generated tables: Markdown between `<!-- begin: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_PART = re.compile(r"<!-- begin: (.*?) -->\n.*?<!-- end -->", re.DOTALL)


def fill(document: str, parts: Mapping[str, str], page: Path = Path("README.md")) -> str:
    """Replace the generated parts of a document.

    Args:
        document: Its text, with two comments around each part.
        parts: Their texts by name; links to `/FILE` start at the root of the repository.
        page: Where the document is, from that root.

    Raises:
        ValueError: The document does not have exactly these parts, each once.
    """
    names = [found[1] for found in _PART.finditer(document)]
    if sorted(names) != sorted(parts) or document.count("<!-- begin:") != len(names):
        raise ValueError(f"{page} must have the parts {', '.join(parts)}, each once and with an end; it has {names}.")
    up = "../" * (len(page.parts) - 1)
    texts = {name: text.replace("](/", f"]({up}") for name, text in parts.items()}
    return _PART.sub(lambda found: f"<!-- begin: {found[1]} -->\n{texts[found[1]]}\n<!-- end -->", document)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """A Markdown table; columns are aligned to the right but for those in `words`."""
    rule = "|".join("---" if place in words else "---:" for place in range(len(heads)))
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def points(gap: float) -> str:
    """A difference in points, with its sign."""
    return minus(f"{gap:+.2f}") if round(gap, 2) else "0.00"


def minus(text: str) -> str:
    """A number with a minus sign that is as wide as a plus."""
    return text.replace("-", "−")


def ends(interval: Sequence[float]) -> str:
    """The ends of an interval of differences in points."""
    return " to ".join(points(end) for end in interval)


def link(file: Path) -> str:
    """A link to a file of the repository."""
    return f"[`{file.name}`](/{file.as_posix()})"
