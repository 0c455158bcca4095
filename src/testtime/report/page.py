"""The demo's page: one HTML file with everything inside, so that it opens from a disk and can be sent to someone.

Every number on it comes from the results; the template `demo.html` holds the words.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testtime.report.figures import draw_bars, draw_streams, picture_png, stream_mean
from testtime.report.tables import MODES, rows
from testtime.storage import write_whole

WINDOW = 100


def write_page(results: Mapping[str, Any], out: str | Path) -> Path:
    """Write `demo.json` and `index.html` into a folder, each whole or not at all.

    Args:
        results: What `testtime.demo.run` measured.
        out: The folder; it is made if it is not there.

    Returns:
        The page's path.
    """
    folder = Path(out)
    page = render_page(results)
    write_whole(folder / "demo.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / "index.html", page)
    return folder / "index.html"


def render_page(results: Mapping[str, Any]) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": lambda value: f"{value:.1f}", "picture": _picture}
    count = results["count"]
    window = min(WINDOW, count)
    return environment.get_template("demo.html").render(
        results=results,
        modes=MODES,
        rows=rows(results),
        gain=tell_gain(results),
        bars=Markup(draw_bars(results)),
        streams=Markup(draw_streams(results, window)),
        window=window,
        first={mode: stream_mean(results, mode, slice(None, window)) for mode in ("fixed", "online")},
        last={mode: stream_mean(results, mode, slice(count - window, None)) for mode in ("fixed", "online")},
    )


def tell_gain(results: Mapping[str, Any]) -> dict[str, str]:
    """The result in words, whatever it is: a headline and a sentence on the clean digits."""
    summary, count = results["summary"], len(results["sets"]) - 1
    fixed, online = summary["fixed"]["mean"], summary["online"]["mean"]
    if online < fixed:
        headline = f"Learning from unlabelled digits cut the error on {count} shifts from {fixed:.1f}% to {online:.1f}%"
        share = f"{summary['online']['reduction']:.0f}% fewer mistakes"
    else:
        headline = f"Learning from unlabelled digits did not help here: error {fixed:.1f}% before, {online:.1f}% after"
        share = "no fewer mistakes"
    change = summary["online"]["clean"] - summary["fixed"]["clean"]
    clean = (
        "does not change" if abs(change) < 0.05 else f"{'rises' if change > 0 else 'falls'} by {abs(change):.1f} points"
    )
    return {"headline": headline, "share": share, "clean": clean}


def _picture(pixels: str, side: int) -> str:
    png = picture_png(base64.b64decode(pixels), side)
    return "data:image/png;base64," + base64.b64encode(png).decode()
