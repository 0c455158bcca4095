"""Reports: tables, figures and an HTML page, generated from runs.

`publish` writes the report of evaluation runs, `collect` arranges their units in tables with intervals and tests, and
`paper_tables` returns the paper's numbers for comparison. `compare` writes the report of runs with other protocols than
`reset`: methods × protocols.

Text tables have no dependencies. Figures need matplotlib and pages jinja2, the extra `report`, imported on use;
`require` checks for them before a long run.
"""

from testtime.report.pages import require
from testtime.report.paper import paper_tables
from testtime.report.publish import compare, publish
from testtime.report.results import collect

__all__ = [
    "collect",
    "compare",
    "paper_tables",
    "publish",
    "require",
]
