"""Reports: tables, figures and one HTML page, made from runs and nothing else.

`publish` makes the report of evaluation runs: `collect` sorts their units into tables with intervals and tests, and the
paper's own numbers (`paper_tables`) can stand beside them.

Text tables need nothing. Figures need matplotlib and pages jinja2, the extra `report`; both are imported when one is
made, and `require` says what is missing before a long run starts.
"""

from importlib.util import find_spec

from testtime.report.paper import paper_tables
from testtime.report.publish import publish
from testtime.report.results import collect

__all__ = [
    "collect",
    "paper_tables",
    "publish",
    "require",
]


def require() -> None:
    """Check that the extra `report` is installed.

    Raises:
        ModuleNotFoundError: It is not; the message says what to install.
    """
    for name in ("matplotlib", "jinja2"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"The page needs {name}: pip install 'testtime[report]'", name=name)
