"""Reports: tables, figures and one HTML page, made from runs and nothing else.

`publish` makes the report of evaluation runs: `collect` sorts their units into tables with intervals and tests, and
`paper_tables` has the paper's own numbers to compare with.

Text tables need nothing. Figures need matplotlib and pages jinja2, the extra `report`; both are imported when one is
made, and `require` says what is missing before a long run starts.
"""

from testtime.report.pages import require
from testtime.report.paper import paper_tables
from testtime.report.publish import publish
from testtime.report.results import collect

__all__ = [
    "collect",
    "paper_tables",
    "publish",
    "require",
]
