"""The templates of pages: one file with everything inside, in which no text from outside is more than a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from testtime.storage import printable

if TYPE_CHECKING:
    import jinja2


def open_template(name: str) -> jinja2.Template:
    """A template of this package; what it is filled with is escaped, but for what is marked as HTML already."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _finalize(value: Any) -> Any:
    return printable(value) if type(value) is str else value  # HTML that is marked as such is of a type of its own
