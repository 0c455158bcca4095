"""`testtime info`."""

from __future__ import annotations

import json
from typing import Annotated, Any

from typer import Argument

from testtime.cli.console import echo
from testtime.cli.options import Json

Source = Annotated[str, Argument(help="Network: a file, or the name of a bundled one.", show_default=False)]


def info(checkpoint: Source, as_json: Json = False) -> None:
    """Describe a checkpoint: architecture, classes, training, recommended settings and statistics.

    Example:
      testtime info runs/digits/network.safetensors
    """
    from testtime.evaluation import predict_files
    from testtime.networks.checkpoint import find_checkpoint, read_parts

    summary = predict_files.summarise(checkpoint)
    card, _, statistics = read_parts(find_checkpoint(checkpoint))
    summary |= {"settings": card.settings, "statistics": None}
    if statistics is not None:
        parameters = sum(tensor.numel() for tensor in statistics.fisher.values())
        summary["statistics"] = statistics.about | {"parameters": parameters, "layers": len(statistics.means)}
    text = json.dumps(summary, indent=1) if as_json else predict_files.format_summary(summary)
    echo(*text.split("\n"))
    if not as_json:
        echo(*_format_rest(summary["settings"], summary["statistics"]))


def _format_rest(settings: dict[str, dict[str, Any]], statistics: dict[str, Any] | None) -> list[str]:
    from testtime.evaluation.recommended import format_settings

    lines = [f"settings   {name}: {format_settings(chosen)}" for name, chosen in settings.items()]
    if statistics is not None:
        images, source = statistics.get("images", "?"), statistics.get("set") or "a tensor"
        contents = "Fisher information of {parameters:,} parameters, moments of {layers} layers".format(**statistics)
        lines.append(f"statistics {images} images of {source}: {contents}")
    return lines
