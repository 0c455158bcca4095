"""`testtime serve` and `testtime send`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from testtime.cli.console import as_bad_arguments, echo, pick_device, progress
from testtime.cli.options import MACHINE, METHOD, Checkpoint, Classes, Device, Images, Weights, open_network

if TYPE_CHECKING:
    from socket import socket

    from testtime.serve.service import Service

STREAMS, LIMITS, NETWORKING = "Streams", "Limits", "Network access"  # panels of the help

State = Annotated[
    Path | None,
    Option(
        help="State folder; created, or continued from.",
        show_default="streams; a temporary folder with --demo",
        rich_help_panel=STREAMS,
    ),
]
MethodName = Annotated[
    str, Option("--method", help="Adaptation method: ttt, best, tent, …", rich_help_panel=METHOD, show_default=True)
]
Precision = Annotated[
    Literal["fp32", "tf32", "bf16"] | None,
    Option(help="Precision of layers.", show_default="tf32 on CUDA, else fp32", rich_help_panel=MACHINE),
]
Slots = Annotated[int, Option(min=1, help="Resident streams; others are in the folder.", rich_help_panel=STREAMS)]
Group = Annotated[
    int | None,
    Option(
        min=1,
        help="Pad every step to this many streams: slower, but answers are bit-identical whichever streams share the "
        "step.",
        show_default="as few as there are",
        rich_help_panel=STREAMS,
    ),
]
CheckpointEvery = Annotated[
    int, Option(min=0, help="Images that a crash may lose per stream; 0 writes first.", rich_help_panel=STREAMS)
]
Ttl = Annotated[
    float | None,
    Option(help="Delete streams that are not used for so many seconds.", show_default="never", rich_help_panel=STREAMS),
]
Shadow = Annotated[
    bool,
    Option("--shadow", help="Answer with the original network; adapted ones run along.", rich_help_panel=STREAMS),
]
OnCollapse = Annotated[
    Literal["guard", "report", "reset", "rollback", "freeze"],
    Option(
        help="What to do when a stream has collapsed; guard: what the guard of the method does, if it looks for it.",
        rich_help_panel=STREAMS,
    ),
]
NoImageMemory = Annotated[
    bool, Option("--no-image-memory", help="Refuse methods that store images.", rich_help_panel=STREAMS)
]
Thumbnails = Annotated[
    bool, Option("--thumbnails", help="Show the last images of streams on the live page.", rich_help_panel=STREAMS)
]
IsDemo = Annotated[
    bool, Option("--demo", help="Serve digits whose light fades, to a frozen and to an adapting stream.")
]
MaxStreams = Annotated[int, Option(min=1, help="Streams at most, resident or stored.", rich_help_panel=LIMITS)]
MaxQueue = Annotated[int, Option(min=1, help="Waiting images at most; more are refused.", rich_help_panel=LIMITS)]
MaxUpload = Annotated[int, Option(min=1, help="Bytes of a request at most.", rich_help_panel=LIMITS)]
MaxWait = Annotated[
    float, Option("--max-wait-ms", min=0, help="How long a request waits to share a step.", rich_help_panel=LIMITS)
]
Rate = Annotated[
    float | None, Option(help="Requests per second of a client at most.", show_default="any", rich_help_panel=LIMITS)
]
ClientStreams = Annotated[
    int | None, Option(min=1, help="Streams that a client may create.", show_default="any", rich_help_panel=LIMITS)
]
Host = Annotated[
    str, Option(help="Address; one that other machines can reach needs a token.", rich_help_panel=NETWORKING)
]
Port = Annotated[int, Option(min=0, max=65535, help="Port; 0 lets the system choose.", rich_help_panel=NETWORKING)]
TokenFile = Annotated[
    Path | None,
    Option(help="File with the token of the service.", show_default=False, rich_help_panel=NETWORKING),
]
Ray = Annotated[
    str | None,
    Option(
        help="Serve with several replicas on Ray, started on this machine or at an address.",
        metavar="[ADDRESS]",
        show_default=False,
        rich_help_panel=MACHINE,
    ),
]
Replicas = Annotated[
    int, Option(min=1, help="Replicas with --ray, each on a GPU or on its share of cores.", rich_help_panel=MACHINE)
]


def serve(
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    classes: Classes = None,
    method: MethodName = "ttt",
    state: State = None,
    slots: Slots = 64,
    group: Group = None,
    checkpoint_every: CheckpointEvery = 16,
    ttl: Ttl = None,
    shadow: Shadow = False,
    on_collapse: OnCollapse = "guard",
    no_image_memory: NoImageMemory = False,
    thumbnails: Thumbnails = False,
    max_streams: MaxStreams = 10_000,
    max_queue: MaxQueue = 1024,
    max_upload: MaxUpload = 16 << 20,
    max_wait_ms: MaxWait = 2.0,
    rate: Rate = None,
    client_streams: ClientStreams = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_file: TokenFile = None,
    device: Device = "auto",
    precision: Precision = None,
    ray: Ray = None,
    replicas: Replicas = 2,
    demo: IsDemo = False,
) -> None:
    """Serve a network over HTTP that adapts to many streams of images, each separately.

    Every stream has its own adapted network. The address is also that of a page
    that shows all streams as they adapt. Stop the service with Ctrl-C or SIGTERM:
    it finishes its requests and saves all streams. The settings of the method are
    those that the network's card recommends (see testtime info), and otherwise
    the paper's.

    Examples:
      testtime serve --demo
      testtime serve -c cifar10-resnet26-gn-joint --method best --state streams
      testtime serve --shadow --on-collapse reset
      testtime serve --host 0.0.0.0 --token-file token.txt --checkpoint-every 0
      testtime serve --ray --replicas 4 --state /shared/streams
    """
    with _explain_missing():
        from testtime.serve import demo as serve_demo
        from testtime.serve import server
    from testtime.adaptation.methods import find_method
    from testtime.evaluation.recommended import make_recommended
    from testtime.serve.service import Service
    from testtime.serve.settings import ServeSettings
    from testtime.storage import FileError

    if demo and (checkpoint is not None or weights is not None or method != "ttt" or shadow):
        raise typer.BadParameter("the demo has its own network and method, and answers with it.", param_hint="--demo")
    if demo and ray is not None:
        raise typer.BadParameter("the demo runs in one process.", param_hint="--ray")
    given: dict[str, Any] = {"slots": slots, "group": group, "checkpoint_every": checkpoint_every, "ttl": ttl}
    given |= {"shadow": shadow, "on_collapse": on_collapse, "image_memory": not no_image_memory, "rate": rate}
    given |= {"max_streams": max_streams, "max_queue": max_queue, "max_upload": max_upload, "max_wait_ms": max_wait_ms}
    given |= {"client_streams": client_streams, "host": host, "port": port, "thumbnails": thumbnails or demo}
    with contextlib.ExitStack() as stack:
        folder = state or _choose_folder(stack, demo)
        with as_bad_arguments(FileError):
            settings = ServeSettings(folder, token=_read_token(token_file), **given)
            chosen = find_method(method)
        opened = serve_demo.NETWORK if demo else checkpoint, weights, classes, chosen.needs_branch
        if ray is not None:
            source, net = open_network(*opened, "cpu")
            return _serve_on_ray(source, net, method, settings, device, precision, ray, replicas)
        name, net = open_network(*opened, pick_device(device))
        with as_bad_arguments(FileError):
            chosen = serve_demo.make_method() if demo else make_recommended(chosen, net.card.settings)
        listening = stack.enter_context(server.listen(host, port))
        with as_bad_arguments(FileError):
            service = Service(net, chosen, settings, name, precision)
        _run(service, listening, f"{name}, {method}", demo)


@contextlib.contextmanager
def _explain_missing() -> Iterator[None]:
    """Say which extra to install if a package of the service is missing."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name not in ("fastapi", "uvicorn", "starlette", "pydantic"):
            raise
        message = f"the service needs {missing.name}: pip install 'testtime[serve]'"
        raise ModuleNotFoundError(message, name=missing.name) from None


def _serve_on_ray(
    source: str,
    net: Any,
    method: str,
    settings: Any,
    device: str,
    precision: Any,
    address: str,
    replicas: int,
) -> None:
    from testtime.serve import ray as cluster
    from testtime.storage import FileError

    work = cluster.Work(cluster.resolve_source(source), method, settings, device, precision)
    with as_bad_arguments(FileError):
        _exit_unless(cluster.run(work, net, address, replicas, lambda line: echo(line, err=True)))


def _run(service: Service, listening: socket, title: str, demo: bool) -> None:
    """Serve until the process is told to stop, and print on what address."""
    from testtime.serve import server
    from testtime.serve.demo import Demo

    restored, folder = len(service.engine.residents.records), service.settings.state
    url = f"http://{service.settings.host}:{listening.getsockname()[1]}"
    echo(f"restored {restored} streams from {folder}" if restored else f"state folder: {folder}", err=True)
    echo(f"serving {title}, on {url}", err=True)
    with Demo(service, url) if demo else contextlib.nullcontext():
        if demo:
            echo(f"open {url} in a browser and watch for a minute; Ctrl-C ends the demo", err=True)
        _exit_unless(server.run(service, listening))


def _exit_unless(whole: bool) -> None:
    if not whole:
        echo("error: some streams could not be saved", err=True)
        raise typer.Exit(1)


def _choose_folder(stack: contextlib.ExitStack, demo: bool) -> Path:
    """Return the default state folder; that of the demo is removed at the end."""
    import tempfile

    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="testtime-"))) if demo else Path("streams")


def _read_token(path: Path | None) -> str | None:
    from testtime.storage import FileError, check_file, error_text

    if path is None:
        return None
    check_file(path)
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise FileError(path, f"not a token ({error_text(error)})") from None


Url = Annotated[str, Argument(help="Address of the service, e.g. http://127.0.0.1:8000.", show_default=False)]
StreamName = Annotated[str, Option("--stream", help="Name of the stream.", show_default=False)]
AsJson = Annotated[bool, Option("--json", help="Print one JSON document a line, as it is answered.")]


def send(url: Url, images: Images, stream: StreamName, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Send images to a service as one stream, in order, and print its answers.

    A request that fails is repeated; the service learns from every image once.
    Missing or unusable image files are reported and left out; the exit code is
    then 1.

    Examples:
      testtime send http://127.0.0.1:8000 holiday/ --stream camera-7
      testtime send http://127.0.0.1:8000 *.png --stream camera-7 --json
    """
    import json

    from testtime.serve.client import SUFFIXES, Client, PictureError
    from testtime.storage import FileError, find_files

    token = _read_token(token_file)
    with as_bad_arguments():
        target = Client(url, token).stream(stream)
    files, faults = find_files(images, SUFFIXES, "PNG, JPEG or WebP files"), 0
    with progress("images") as report:
        for done, file in enumerate(files):
            report(done, len(files), "")
            try:
                answer = target.predict(file)
            except (FileError, PictureError) as error:
                fault = error if isinstance(error, FileError) else FileError(file, str(error))
                echo(f"error: {fault}", err=True)
                faults += 1
                continue
            first = answer.answers[0]
            if as_json:
                typer.echo(json.dumps({"image": str(file), **answer.raw}))
            else:
                notes = "" if first.adapted else "  (rolled back)" if first.rolled_back else "  (not adapted)"
                before = f"{first.before.name} {first.before.probability:.1%}"
                echo(f"{file}  {before} → {first.name} {first.probability:.1%}{notes}")
        report(len(files), len(files), "")
    if faults:
        raise typer.Exit(1)
