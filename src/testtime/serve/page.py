"""The live page: one file, which the browser may connect to nothing but the service with."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files


@functools.cache
def load_page() -> tuple[str, Mapping[str, str]]:
    """Return the page and the headers that go with it.

    The page contains nothing of a stream: its script fetches everything. The Content-Security-Policy allows exactly the
    script and the style in it, by their hashes.
    """
    text = files("testtime.serve").joinpath("page.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash_element(text, "script"),
        "style-src": _hash_element(text, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash_element(text: str, name: str) -> str:
    (content,) = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
