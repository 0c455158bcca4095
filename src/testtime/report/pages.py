"""Templates of self-contained HTML pages; external text is always escaped."""

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
        ModuleNotFoundError: It is not; the message gives the command to install it.
    """
    for name in ("matplotlib", "jinja2"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"The page needs {name}: pip install 'testtime[report]'", name=name)


def open_template(name: str) -> jinja2.Template:
    """Open a template of this package; values are escaped unless they are `Markup`."""
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
    return printable(value) if type(value) is str else value  # leave `Markup` unchanged
