"""The templates of pages: one file with everything inside, in which text from outside is always escaped."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testtime.storage import printable

if TYPE_CHECKING:
    import jinja2


def require() -> None:
    """Check that the extra `report` is installed.

    Raises:
        ModuleNotFoundError: It is not; the message says what to install.
    """
    for name in ("matplotlib", "jinja2"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"The page needs {name}: pip install 'testtime[report]'", name=name)


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
