"""`testtime info`."""

from __future__ import annotations

import json
from typing import Annotated

from typer import Argument

from testtime.cli.console import echo
from testtime.cli.options import Json

Source = Annotated[str, Argument(help="Network: a file, or the name of a bundled one.", show_default=False)]


def info(checkpoint: Source, as_json: Json = False) -> None:
    """Describe a checkpoint: architecture, classes, parameters, and how it was trained.

    Example:
      testtime info runs/digits/network.safetensors
    """
    from testtime.evaluation import predict_files

    summary = predict_files.summarise(checkpoint)
    text = json.dumps(summary, indent=1) if as_json else predict_files.format_summary(summary)
    echo(*text.split("\n"))
