"""`testtime eval` and `report`: runs, and what is made of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from testtime.cli.console import Device, as_bad_arguments, echo, name_folder, pick_device, progress

_EACH = "; METHOD=NUMBER for one method. May be repeated."


class EvaluateCommand(TyperCommand):
    """`testtime eval`, whose `--ray` may stand without a value: it then means local."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        whole: list[str] = []
        for place, word in enumerate(args):
            whole.append(word)
            if word == "--ray" and (place + 1 == len(args) or args[place + 1].startswith("-")):
                whole.append("local")
        return super().parse_args(ctx, whole)


def evaluate(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder; if it holds a part of this run, the rest is run.",
            show_default="runs/eval-…, a name made of the options",
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "-c", help="Jointly trained network: a file, or a shipped one's name."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Network trained on classes only, for the method plain.", show_default=False)
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="A further network; FILE may hold {set}, {corruption}, {level}. May be repeated.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="cifar10-c, digits-c, cifar10-c/*/5, cifar10.1, a folder, …; may be repeated."),
    ] = None,
    matrix: Annotated[
        str | None, typer.Option(help="A whole study: a TOML file, or a shipped one's name.", show_default=False)
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Of plain, fixed, episodic, online, best, a network's name (or the study's). "
            "best is online with the preset of that name.",
            show_default="all that have networks, but best",
        ),
    ] = None,
    levels: Annotated[
        str | None, typer.Option(help="Levels of corrupted sets: 1-5, 5, 1,3.", show_default="all")
    ] = None,
    corruptions: Annotated[str | None, typer.Option(help="Corruptions: fog,frost or all.", show_default="all")] = None,
    original: Annotated[
        bool | None,
        typer.Option("--original/--no-original", help="Include the set without corruption.", show_default="included"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many images of each set.", show_default="all")
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(help="Seed of augmentations and order; may be repeated.", show_default="0"),
    ] = None,
    shuffle: Annotated[
        bool | None,
        typer.Option("--shuffle/--no-shuffle", help="Shuffle each set once by the seed.", show_default="not shuffled"),
    ] = None,
    steps: Annotated[
        list[str] | None,
        typer.Option(help=f"Gradient steps on an image{_EACH}", show_default="10; online 1", rich_help_panel="Method"),
    ] = None,
    lr: Annotated[
        list[str] | None,
        typer.Option(help=f"Learning rate{_EACH}", show_default="0.001", rich_help_panel="Method"),
    ] = None,
    copies: Annotated[
        list[str] | None,
        typer.Option(help=f"Augmented copies in a step{_EACH}", show_default="32", rich_help_panel="Method"),
    ] = None,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Adapt only below this confidence of the rotation task, or to a share such as 20%{_EACH}",
            show_default="1",
            rich_help_panel="Method",
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Arithmetic of learning: fp32, tf32 or bf16; METHOD=… for one method. May be repeated.",
            show_default="the study's, else fp32",
            rich_help_panel="Method",
        ),
    ] = None,
    on_bad_image: Annotated[
        Literal["fail", "skip"],
        typer.Option(help="A picture that cannot be read: stop before the run, or leave it out and name it."),
    ] = "fail",
    data_root: Annotated[
        Path | None, typer.Option(help="Where data sets are.", show_default="$TESTTIME_DATA", rich_help_panel="Machine")
    ] = None,
    together: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Online streams that advance side by side, at most.",
            show_default="what fits",
            rich_help_panel="Machine",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Units that run side by side on a CPU, a thread each.", rich_help_panel="Machine")
    ] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Distribute over Ray: without an address on workers started here.",
            show_default=False,
            rich_help_panel="Machine",
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Evaluate methods on test sets and keep every record.

    Each method, set and seed is one file under OUT, written when it is
    finished. Run it again to go on after an interruption: only what is
    missing is run.

    Examples:
      testtime eval -c net.safetensors --data digits-c --levels 5
      testtime eval -c net.safetensors --data photos/ --lr 0.003 --out runs/p
      testtime eval -c net.safetensors --data cifar10-c --shuffle --out runs/c
      testtime eval -c n.safetensors --data photos/ --methods fixed,best --out b
      testtime eval -c net.safetensors --matrix gradual --out runs/gradual
      testtime eval --network uda=uda/{set}.safetensors --data digits --out u
    """
    from testtime import data as datasets
    from testtime import runs

    place = pick_device(device)
    out = out or name_folder("eval", context.params)
    with as_bad_arguments(datasets.DataError):
        plan = runs.make_plan(
            matrix,
            checkpoint=checkpoint,
            baseline=baseline,
            networks=_read_networks(network or []),
            data=data,
            methods=methods,
            levels=levels,
            corruptions=corruptions,
            original=original,
            seeds=seed,
            shuffle=shuffle,
            limit=limit,
            data_root=data_root,
            on_bad_image=on_bad_image,
            steps=steps,
            lr=lr,
            copies=copies,
            threshold=threshold,
            precision=precision,
        )
    command = shlex.join(["testtime", *context.obj])
    with progress("views") as report:
        run = runs.run_plan(
            plan, out, device=place, command=command, together=together, jobs=jobs, ray=ray, progress=report
        )
    echo(*runs.tell(run).split("\n"), f"{out}: {len(run.units)} units")


def _read_networks(texts: list[str]) -> dict[str, str]:
    """Files by name from texts NAME=FILE."""
    files: dict[str, str] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise ValueError(f"--network must be NAME=FILE, got {text!r}.")
        if name in files:
            raise ValueError(f"--network names {name!r} twice.")
        files[name] = file
    return files


def report(
    context: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of runs, or their summary.json.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    formats: Annotated[
        str, typer.Option("--format", help="Some of md, latex, csv, json and html; html brings the figures.")
    ] = "md,latex,csv,json,html",
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Show accuracies instead of errors.")] = False,
    paper: Annotated[bool, typer.Option("--paper", help="Show the paper's own numbers beside ours.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the confidence intervals.")] = 0,
    data_root: Annotated[
        Path | None, typer.Option(help="Where data sets are, for sample pictures.", show_default="$TESTTIME_DATA")
    ] = None,
    diagnosis: Annotated[
        Path | None, typer.Option(help="What testtime diagnose wrote, for the page.", show_default=False)
    ] = None,
) -> None:
    """Make tables, figures and a page of evaluation runs.

    Several runs or seeds of one method are repetitions. OUT/index.html is the
    page; tables.md, tables.tex and tables.csv have its numbers, figures/ its
    figures as SVG and PNG. summary.json is the runs without their records: a
    RUN of which the same tables are made again.

    Examples:
      testtime report runs/digits-c
      testtime report runs/cifar-c --paper --out report
      testtime report runs/seed0 runs/seed1 runs/seed2 --format md,latex
    """
    from rich.console import Console

    from testtime.report.diagnosis import as_sections, read_diagnoses
    from testtime.report.publish import publish, read_formats
    from testtime.report.run_tables import explain, terminal

    words = as_sections(read_diagnoses(diagnosis)) if diagnosis is not None else []
    with as_bad_arguments():
        chosen = read_formats(formats)
    measure = "accuracy" if accuracy else "error"
    command = shlex.join(["testtime", *context.obj])
    with progress("figures") as show:
        results = publish(
            runs,
            out,
            formats=chosen,
            measure=measure,
            paper=paper,
            seed=seed,
            root=data_root,
            words=words,
            command=command,
            progress=show,
        )
    console = Console()
    for table in terminal(results, measure, paper, console.width):
        console.print(table)
    place = out / "index.html" if "html" in chosen else out
    echo(*explain(results, measure), *results.notes, f"{place}: written")
