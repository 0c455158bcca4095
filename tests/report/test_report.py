"""Reports need their extra only when a page is made."""

from __future__ import annotations

import subprocess
import sys


def test_the_core_needs_no_extra() -> None:
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'jinja2', 'typer', 'rich', 'markupsafe'): sys.modules[name] = None\n"
        "import testtime, testtime.report\n"
        "assert all(hasattr(testtime, name) for name in testtime.__all__)\n"
        "assert callable(testtime.train) and callable(testtime.evaluate) and testtime.__version__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
