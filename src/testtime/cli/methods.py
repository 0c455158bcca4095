"""`testtime methods`."""

from __future__ import annotations

import json

from testtime.cli.console import echo
from testtime.cli.options import Json


def methods(as_json: Json = False) -> None:
    """List the adaptation methods: what they need, their default mode, what they do, and their paper.

    batch: several images per call. branch: a trained self-supervised branch.
    statistics: those of training images, see train --statistics. batchnorm:
    layers of Batch Normalization.

    Example:
      testtime methods --json
    """
    from testtime.adaptation.methods import METHODS

    if as_json:
        names = ("name", "needs", "mode", "summary", "paper")
        found = [{name: getattr(method, name) for name in names} for method in METHODS.values()]
        echo(*json.dumps(found, indent=1, ensure_ascii=False).split("\n"))
        return
    echo(f"{'method':9} {'mode':9} {'needs':18} what it does, and its paper")
    for method in METHODS.values():
        echo(f"{method.name:9} {method.mode:9} {', '.join(method.needs) or '-':18} {method.summary}")
        echo(f"{'':38} {method.paper}")
    echo("testtime eval also takes plain, fixed, episodic, online, and auto, which decides whether a stream learns.")
