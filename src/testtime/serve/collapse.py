"""When a stream has failed: the guard that notices it, for the service to act on.

The guard is `testtime.Guard`, the same as elsewhere. It undoes the update that shows a collapse, or weights that have
gone too far; what else happens is up to `on_collapse`, after the request:

    guard     nothing else; streams have only the guard of their method, which may not look for a collapse
    report    it is counted and reported
    reset     the stream returns to the original network
    rollback  to its newest stored version; if it fails again, to the one before, at last to the original network
    freeze    it answers without learning
"""

from __future__ import annotations

from dataclasses import replace

from testtime.adaptation.guard import Guard
from testtime.adaptation.methods import Method
from testtime.adaptation.settings import Settings


def follow(method: Method) -> Method:
    """Return a method whose guard follows streams; its own, if it is a `Guard`."""
    own = method.settings.get("guard", Settings.guard)
    guard = own if isinstance(own, Guard) else Guard(own)
    return replace(method, settings={**method.settings, "guard": replace(guard, fallback="undo")})
