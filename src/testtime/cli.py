"""The command line: arguments in, library calls, results out. No logic lives here.

Every command imports what it needs inside itself, so that `testtime --help` does not wait for torch. A command lets
exceptions pass: `main` turns them into one line on standard error and an exit code (2 for bad arguments, 1 for what
failed, 130 for Ctrl-C); `TESTTIME_DEBUG=1` shows the stack instead. Long work reports through `progress`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

try:
    import rich  # noqa: F401  (progress and help need it; better to know now)
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(f"error: the command line needs {missing.name}: pip install 'testtime[cli]'") from None

app = typer.Typer(
    name="testtime",
    help="Test-Time Training: a vision model that learns, without labels, from each image it is about to classify.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; ends the process with the exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and say what went wrong, if anything, in one line.

    Args:
        arguments: What follows the program's name.

    Returns:
        The exit code.
    """
    try:
        code = app(args=arguments or ["--help"], prog_name="testtime", standalone_mode=False)
        sys.stdout.flush()
        if code == 130:
            print("stopped", file=sys.stderr)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output went away; Python must not try to flush into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("TESTTIME_DEBUG"):
            raise
        usage = getattr(error, "format_message", None)  # what typer raises for bad arguments
        if usage is not None:
            text, context = usage(), getattr(error, "ctx", None)
            hint = f" (see {context.command_path} --help)" if context is not None else ""
            print(f"error: {_one_line(text)}{hint}", file=sys.stderr)
            return 2
        print(f"error: {_one_line(str(error) or type(error).__name__)}", file=sys.stderr)
        return 1


def _one_line(text: str) -> str:
    return " ".join(text.split())


@contextlib.contextmanager
def as_bad_arguments(*passing: type[Exception]) -> Iterator[None]:
    """Let a `ValueError` raised while arguments are checked count as a bad argument: exit code 2.

    Args:
        *passing: Kinds of `ValueError` that are not the arguments' fault, such as `DataError`.
    """
    try:
        yield
    except passing:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


class Report(Protocol):
    """What `progress` yields; it fits every progress callback of the library."""

    def __call__(self, done: int, total: int, text: str = "", /) -> None:
        """Say that `done` of `total` things are done, with a word on how it goes."""
        ...


@contextlib.contextmanager
def progress(title: str, every: float = 10.0) -> Iterator[Report]:
    """Show how far some work is, at which rate, and the time left, on standard error.

    A terminal gets a live bar; a pipe gets a plain line now and then.

    Args:
        title: What is going on.
        every: Seconds between two lines in a pipe.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        clock = _Clock()
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=None, rate="", text="")

            def show(done: int, total: int, text: str = "", /) -> None:
                rate, _ = clock.measure(done, total)
                bar.update(task, completed=done, total=total, rate=rate, text=text)

            yield show
        return

    clock, last = _Clock(), time.monotonic()

    def write(done: int, total: int, text: str = "", /) -> None:
        nonlocal last
        rate, left = clock.measure(done, total)
        if done < max(total, 1) and time.monotonic() - last < every:
            return
        last = time.monotonic()
        parts = [title, f"{done:,}/{total:,}", rate, left, text]
        print("  ".join(part for part in parts if part), file=sys.stderr, flush=True)

    yield write


class _Clock:
    """Rate and time left since the first report; a resumed run does not start from zero."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None

    def measure(self, done: int, total: int) -> tuple[str, str]:
        now = time.monotonic()
        if self.first is None:
            self.first = now, done
        seconds, count = now - self.first[0], done - self.first[1]
        if seconds <= 0 or count <= 0:
            return "", ""
        rate = count / seconds
        left = f"{_duration((total - done) / rate)} left" if done < total else f"in {_duration(seconds)}"
        return (f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"), left


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"testtime {version('testtime')}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


data_app = typer.Typer(help="Data sets: what there is, where it is, getting and checking it.", no_args_is_help=True)
app.add_typer(data_app, name="data")

_DATA_ROOT = typer.Option(
    None, "--data-root", help="Folder of the data sets; else TESTTIME_DATA, else the user's cache folder."
)


@data_app.command("list")
def list_data(data_root: str | None = _DATA_ROOT) -> None:
    """List the known data sets: what they are, where they are looked for, and whether they are there."""
    from testtime import data

    for found in data.describe_all(data_root):
        typer.echo(f"{found.name:17} {found.state:11} {found.what}")
        if found.place is not None:
            typer.echo(f"{'':29} {found.place}")
        if found.detail:
            typer.echo(f"{'':29} {found.detail}")


@data_app.command("get")
def get_data(
    name: str = typer.Argument(help="cifar10, cifar10-c or cifar10.1."), data_root: str | None = _DATA_ROOT
) -> None:
    """Download a data set from its official place; a transfer that broke off goes on."""
    from testtime import data
    from testtime.data.download import remotes

    with as_bad_arguments():
        remotes(name, data_root)
    with progress(f"bytes of {name}") as report:
        place = data.get(name, data_root, report)
    typer.echo(f"{name} is in {place}")


@data_app.command("check")
def check_data(
    name: str = typer.Argument(help="A data set, or a part of one such as imagenet-c/fog/5."),
    data_root: str | None = _DATA_ROOT,
) -> None:
    """Read a data set through and name every fault; exit code 1 if there are any."""
    from testtime import data

    with as_bad_arguments(), progress(f"checking {name}") as report:
        faults = data.check(name, data_root, report)
    for fault in faults:
        typer.echo(fault)
    if faults:
        raise typer.Exit(1)
    typer.echo(f"{name} is sound")


# ---------------------------------------------------------------------------------------------------------------------
# train, predict, info
# ---------------------------------------------------------------------------------------------------------------------

Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, mps; auto takes a GPU if there is one.", rich_help_panel="Machine")
]


def pick_device(name: str) -> str:
    """The device that a `--device` option means; a bad one is a bad argument."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"cannot use {name!r}: {reason}", param_hint="--device") from None
    return name


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="The run's folder; if it holds a part of this run, training goes on.")],
    data: Annotated[
        str, typer.Option(help="digits (built in), cifar10, imagenet, or a folder with a folder for each class.")
    ] = "digits",
    method: Annotated[
        Literal["joint", "plain", "alp", "uda"],
        typer.Option(
            help="joint: classes and rotations (what adapts later); plain: classes only; "
            "alp: adversarial logit pairing; uda: joint, and rotations of --target."
        ),
    ] = "joint",
    target: Annotated[
        str | None, typer.Option(help="Unlabelled target set for uda, such as cifar10-c/fog/5.", show_default=False)
    ] = None,
    network: Annotated[
        Literal["resnet26", "resnet18", "resnet50"], typer.Option(help="Architecture.", rich_help_panel="Network")
    ] = "resnet26",
    depth: Annotated[
        int | None,
        typer.Option(help="Depth of resnet26, 6n + 2.", show_default="26; digits 8", rich_help_panel="Network"),
    ] = None,
    norm: Annotated[
        Literal["group", "batch"], typer.Option(help="Normalization layers.", rich_help_panel="Network")
    ] = "group",
    size: Annotated[
        int | None,
        typer.Option(
            min=8, help="Side of a folder's pictures.", show_default="the network's", rich_help_panel="Network"
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Passes over the data; the learning rate's drops move along.",
            show_default="the paper's: 150 (group), 75 (batch), 90 (imagenet); digits 20",
            rich_help_panel="Recipe",
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate.", show_default="0.1", rich_help_panel="Recipe")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Images in a step, over all processes.",
            show_default="128; imagenet 256; digits 32",
            rich_help_panel="Recipe",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, order and augmentation.", rich_help_panel="Recipe")] = 0,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Compute in bfloat16 where that is safe.", rich_help_panel="Recipe")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Train on this many images only.", show_default="all")
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Where data sets are.", show_default="$TESTTIME_DATA", rich_help_panel="Machine")
    ] = None,
    device: Device = "auto",
) -> None:
    """Train a network.

    Run it again to go on after an interruption, bit for bit.
    OUT/network.safetensors is the result, OUT/record.json has loss and error
    by epoch.

    Examples:
      testtime train --data digits --out runs/digits
      testtime train --data cifar10 --method joint --bf16 --out runs/cifar
      testtime train --data photos/ --size 64 --epochs 30 --out runs/photos
      torchrun --nproc-per-node 4 -m testtime train --data cifar10 --out runs/c
    """
    from testtime import data as datasets
    from testtime.training import is_first, prepare, process_group, tell
    from testtime.training import train as train_network

    if (target is not None) != (method == "uda"):
        raise typer.BadParameter("uda needs a target set, and only uda takes one.", param_hint="--target")
    changes: dict[str, Any] = {"lr": lr, "batch": batch, "method": method, "bf16": bf16}
    with process_group(pick_device(device)) as place, contextlib.ExitStack() as stack:
        first = is_first()
        report = stack.enter_context(progress("train")) if first else None
        with as_bad_arguments(datasets.DataError):
            setup = prepare(data, network, depth=depth, norm=norm, size=size, seed=seed, root=data_root, limit=limit)
            unlabelled = None if target is None else datasets.open(target, data_root)
            recipe = setup.recipe.change(epochs=epochs, **changes)
        net = train_network(
            setup.net.to(place),
            setup.source,
            recipe=recipe,
            folder=out,
            test=setup.test,
            target=unlabelled,
            progress=report,
        )
    if first:
        typer.echo(f"{out / 'network.safetensors'}: {tell(net.card.record['epochs'][-1])}")


@app.command()
def predict(
    images: Annotated[list[Path], typer.Argument(help="Picture files or folders of them.", show_default=False)],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "-c", help="Network file, or a shipped network's name.", show_default="shipped"),
    ] = None,
    online: Annotated[
        bool, typer.Option("--online", help="Keep what was learned from one picture for the next.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=0, help="Gradient steps on each picture.", show_default="10; online 1")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="0.001")] = None,
    copies: Annotated[int | None, typer.Option(min=1, help="Augmented copies in a step.", show_default="32")] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Adapt only below this confidence of the rotation task.", show_default="1"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the augmentations.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    device: Device = "auto",
) -> None:
    """Classify pictures, before and after the network has learned from each.

    A picture's central square is scaled to the network's size. The last
    column is the change, by adaptation, of the probability of the class that
    is predicted after it.

    Examples:
      testtime predict cat.jpg
      testtime predict holiday/ --online --json
      testtime predict *.png -c runs/photos/network.safetensors --steps 1
    """
    import json
    from dataclasses import asdict

    from testtime.networks import load
    from testtime.predict import default_network, find_pictures, prepare_adapter, tell
    from testtime.predict import predict as predict_pictures

    place = pick_device(device)
    pictures = find_pictures(images)
    name = checkpoint or default_network()
    net = load(name).to(place)
    if checkpoint is None:
        typer.echo(f"network: {name} (another one: --checkpoint)", err=True)
    together = 16 if place.startswith("cuda") and not online else 1
    with as_bad_arguments():
        adapter = prepare_adapter(
            net, online, together, steps=steps, lr=lr, copies=copies, threshold=threshold, seed=seed
        )
    answers = predict_pictures(adapter, net.card, pictures, together)
    if as_json:
        typer.echo(json.dumps({"network": name, "answers": [asdict(answer) for answer in answers]}, indent=1))
        return
    for answer in answers:
        typer.echo(tell(answer))


@app.command()
def info(
    checkpoint: Annotated[str, typer.Argument(help="Network file, or a shipped network's name.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what a checkpoint holds: architecture, classes, parameters, and how it was trained.

    Example:
      testtime info runs/digits/network.safetensors
    """
    import json

    from testtime.predict import summarise, tell_summary

    summary = summarise(checkpoint)
    typer.echo(json.dumps(summary, indent=1) if as_json else tell_summary(summary))


# ---------------------------------------------------------------------------------------------------------------------
# corrupt
# ---------------------------------------------------------------------------------------------------------------------


@app.command()
def corrupt(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Picture, folder, or data set.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="What to write.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Corruption, such as fog.", show_default=False)] = None,
    severity: Annotated[int, typer.Option(min=1, max=5, help="How much of it.")] = 3,
    whole: Annotated[
        bool, typer.Option("--all", help="All 15 at all 5 severities, in the layout of CIFAR-10-C or ImageNet-C.")
    ] = False,
    gallery: Annotated[
        bool, typer.Option("--gallery", help="One PNG with every corruption of a picture at every severity.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    frost: Annotated[
        Path | None, typer.Option(help="Folder with photographs frost1 to frost5.", show_default="made by code")
    ] = None,
    scale: Annotated[
        Literal["auto", "cifar", "imagenet"], typer.Option(help="Whose severities; auto goes by a picture's size.")
    ] = "auto",
    device: Device = "auto",
) -> None:
    """Corrupt a picture, a folder of pictures, or a whole data set.

    A folder keeps its tree. With --all, IN is CIFAR-10's folder or a folder of
    pictures such as ImageNet's validation set. Run it again to go on after an
    interruption.

    Examples:
      testtime corrupt cat.jpg foggy.jpg --name fog --severity 3
      testtime corrupt photos/ snowy/ --name snow --severity 5
      testtime corrupt cifar-10-batches-bin/ CIFAR-10-C/ --all
      testtime corrupt --gallery cat.jpg gallery.png
    """
    from testtime import corruptions, data
    from testtime.data import cifar

    if (name is not None) + whole + gallery != 1:
        raise typer.BadParameter("give one of --name, --all and --gallery.")
    with as_bad_arguments(corruptions.FileError, data.DataError), progress("corrupt") as report:
        if gallery:
            corruptions.write_gallery(source, target, seed=seed, scale=scale, frost=frost)
            report(1, 1)
            return
        settings: dict[str, Any] = {"seed": seed, "frost": frost, "device": pick_device(device)}
        if name is not None:
            steps = corruptions.corrupt_path(source, target, name, severity, scale=scale, **settings)
        elif cifar.find(source) is not None:
            clean = cifar.load(source)
            assert clean.labels is not None
            steps = corruptions.corrupt_cifar(clean.images(slice(None)), clean.labels, target, **settings)
        else:
            steps = corruptions.corrupt_imagenet(source, target, **settings)
        for step in steps:
            report(step.done, step.total, step.what)


# ---------------------------------------------------------------------------------------------------------------------
# eval
# ---------------------------------------------------------------------------------------------------------------------

_EACH = "; METHOD=NUMBER for one method. May be repeated."


@app.command("eval")
def evaluate(
    out: Annotated[Path, typer.Option(help="The run's folder; if it holds a part of this run, the rest is run.")],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "-c", help="Jointly trained network: a file, or a shipped one's name."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Network trained on classes only, for the method plain.", show_default=False)
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
        typer.Option(help="Of plain, fixed, episodic, online (or the study's).", show_default="all that have networks"),
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
            help=f"Adapt only below this confidence of the rotation task{_EACH}",
            show_default="1",
            rich_help_panel="Method",
        ),
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Where data sets are.", show_default="$TESTTIME_DATA", rich_help_panel="Machine")
    ] = None,
    together: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Online streams that advance side by side.",
            show_default="1; on CUDA what fits",
            rich_help_panel="Machine",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Distribute over Ray: local starts workers here, an address finds a cluster.",
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
      testtime eval -c net.safetensors --data digits-c --levels 5 --out runs/d
      testtime eval -c net.safetensors --data photos/ --lr 0.003 --out runs/p
      testtime eval -c net.safetensors --data cifar10-c --shuffle --out runs/c
      testtime eval -c net.safetensors --matrix gradual --out runs/gradual
    """
    from testtime import data as datasets
    from testtime import runs

    place = pick_device(device)
    with as_bad_arguments(datasets.DataError):
        plan = runs.make_plan(
            matrix,
            checkpoint=checkpoint,
            baseline=baseline,
            data=data,
            methods=methods,
            levels=levels,
            corruptions=corruptions,
            original=original,
            seeds=seed,
            shuffle=shuffle,
            limit=limit,
            data_root=data_root,
            steps=steps,
            lr=lr,
            copies=copies,
            threshold=threshold,
        )
    command = shlex.join(["testtime", *sys.argv[1:]])
    with progress("views") as report:
        run = runs.run_plan(plan, out, device=place, command=command, together=together, ray=ray, progress=report)
    typer.echo(runs.tell(run))
    typer.echo(f"{out}: {len(run.units)} units")


# ---------------------------------------------------------------------------------------------------------------------
# report
# ---------------------------------------------------------------------------------------------------------------------


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    formats: Annotated[
        str, typer.Option("--format", help="Some of md, latex, csv and html; html brings the figures.")
    ] = "md,latex,csv,html",
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Show accuracies instead of errors.")] = False,
    paper: Annotated[bool, typer.Option("--paper", help="Show the paper's own numbers beside ours.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the confidence intervals.")] = 0,
    data_root: Annotated[
        Path | None, typer.Option(help="Where data sets are, for sample pictures.", show_default="$TESTTIME_DATA")
    ] = None,
) -> None:
    """Make tables, figures and a page of evaluation runs.

    Several runs or seeds of one method are repetitions. OUT/index.html is the
    page; tables.md, tables.tex and tables.csv have its numbers, figures/ its
    figures as SVG and PNG.

    Examples:
      testtime report runs/digits-c
      testtime report runs/cifar-c --paper --out report
      testtime report runs/seed0 runs/seed1 runs/seed2 --format md,latex
    """
    from rich.console import Console

    from testtime.report.publish import publish, read_formats
    from testtime.report.run_tables import explain, terminal

    with as_bad_arguments():
        chosen = read_formats(formats)
    measure = "accuracy" if accuracy else "error"
    command = shlex.join(["testtime", *sys.argv[1:]])
    with progress("figures") as show:
        results = publish(
            runs,
            out,
            formats=chosen,
            measure=measure,
            paper=paper,
            seed=seed,
            root=data_root,
            command=command,
            progress=show,
        )
    console = Console()
    for table in terminal(results, measure, paper, console.width):
        console.print(table)
    for line in (*explain(results, measure), *results.notes):
        typer.echo(line)
    typer.echo(f"{out / 'index.html' if 'html' in chosen else out}: written")


# ---------------------------------------------------------------------------------------------------------------------
# demo
# ---------------------------------------------------------------------------------------------------------------------


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and its numbers.")] = Path("demo"),
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the training digits.", show_default="25; quick 3")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A rough version in seconds.")] = False,
) -> None:
    """Train on the built-in digits, shift the test digits, adapt, and write a page.

    It needs no download and no GPU, and takes two to three minutes on two free cores.
    OUT/index.html is the page, OUT/demo.json has every number on it.

    Example:
      testtime demo --out demo
    """
    from testtime.demo import run
    from testtime.report import text_table

    results = run(out, epochs=epochs, seed=seed, quick=quick, progress=progress)
    typer.echo(text_table(results))
    typer.echo(f"\n{out / 'index.html'}: open it in a browser ({results['seconds']['total']:.0f} s)")
