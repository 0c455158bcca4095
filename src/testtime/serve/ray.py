"""The service on Ray Serve: several replicas that share a state folder, on this machine or on a cluster.

Ray Serve brings requests to any replica, which brings those of a stream to the stream's owner. The state folder and the
network must be at the same path on every machine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from starlette.types import Receive, Scope, Send

from testtime.adaptation.methods import Method, find_method
from testtime.evaluation.ray import check_address
from testtime.evaluation.recommended import make_recommended
from testtime.networks import sources
from testtime.networks.ynet import YNet
from testtime.precision import Precision, choose_precision
from testtime.serve.lease import Beats
from testtime.serve.peers import Call
from testtime.serve.replica import STOP, Replica
from testtime.serve.server import listen
from testtime.serve.service import Service
from testtime.serve.settings import ServeSettings

_APP = "testtime"
_STORE = 256 * 2**20  # bytes; requests are small
_REQUESTS = 4096  # at once in a replica, which limits them itself
_SAVING = 120.0  # seconds for a replica to finish and save


@dataclass(frozen=True)
class Work:
    """What every replica does.

    Attributes:
        source: The network: a file, a bundled name, or a model as `testtime.networks.sources` spells it.
        method: The name of the method.
        settings: The settings of the service.
        device: "cpu" or "cuda"; "auto": to be chosen.
        precision: See `testtime.Settings`.
        local: Whether all replicas are on this machine.
        secret: What replicas know each other by.
    """

    source: str
    method: str
    settings: ServeSettings
    device: str = "auto"
    precision: Precision | None = None
    local: bool = True
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def open_network(self, device: str) -> YNet:
        """Open the network.

        Raises:
            FileError: It cannot be read.
            ValueError: There is no such model.
        """
        return sources.open_network(self.source, find_method(self.method).needs_branch).to(device)

    def make_method(self, net: YNet) -> Method:
        """Return the method, with the settings that the network's card recommends.

        Raises:
            ValueError: The settings are not valid.
        """
        return make_recommended(find_method(self.method), net.card.settings)


class Ingress:
    """The class that Ray Serve makes replicas of.

    Args:
        work: What to do.
    """

    def __init__(self, work: Work) -> None:
        host = "127.0.0.1" if work.local else import_module("ray").util.get_node_ip_address()
        net = work.open_network(work.device)
        self.replica = Replica(
            net, work.make_method(net), work.settings, work.source, work.precision, host, work.secret
        )
        self.replica.start()

    def check_health(self) -> None:
        """Check that the replica works; Ray Serve replaces one that does not.

        Raises:
            RuntimeError: It does not.
        """
        if self.replica.service.phase == "ready" and not self.replica.service.batcher.is_alive:
            raise RuntimeError("The replica answers no more requests.")

    def __del__(self) -> None:
        if hasattr(self, "replica"):  # it could start
            self.replica.stop()


class _Front:
    """The application that Ray Serve knows: that of the replica in this process."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            ingress: Ingress = import_module("ray.serve").get_replica_context().servable_object
            return await ingress.replica.app(scope, receive, send)
        for word in ("startup", "shutdown"):  # a replica starts and stops by itself
            await receive()
            await send({"type": f"lifespan.{word}.complete"})


@contextlib.contextmanager
def open_cluster(address: str) -> Iterator[tuple[Any, Any]]:
    """Start Ray on this machine, or connect to a cluster; yields the modules `ray` and `ray.serve`.

    Args:
        address: "local" starts Ray on this machine; otherwise the address of a cluster, "auto" to detect it.

    Raises:
        ModuleNotFoundError: Ray Serve is not installed.
        ConnectionError: No cluster answers at the address.
        ValueError: Ray Serve is used for something else there.
    """
    # Read when ray is imported: no usage statistics, no warning about a future default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on any system: the machine's address is loopback
    try:
        ray, serve = import_module("ray"), import_module("ray.serve")
    except ModuleNotFoundError as missing:
        message = f"Several replicas need Ray Serve ({missing.name} is missing): pip install 'testtime[ray]'"
        raise ModuleNotFoundError(message, name=missing.name) from None
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address == "local":
        # "local" starts Ray even if RAY_ADDRESS is set.
        ray.init("local", include_dashboard=False, object_store_memory=_STORE, **quiet)
    else:
        check_address(address)
        ray.init(address, **quiet)
        if serve.status().proxies:
            ray.shutdown()
            raise ValueError("Ray Serve already runs on this cluster; it can serve one address only.")
    try:
        yield ray, serve
    finally:
        if address != "local":  # where it ends with Ray
            with contextlib.suppress(Exception):
                serve.shutdown()
        ray.shutdown()


def check_work(work: Work, net: YNet) -> int:
    """Check what can be checked before replicas are started, and clear the state folder of what killed ones left.

    Args:
        work: What the replicas will do.
        net: The network, on any device.

    Returns:
        The number of streams in the state folder.

    Raises:
        FileError: The state folder cannot be used.
        ValueError: Network, method and settings do not go together.
    """
    trial = replace(work.settings, slots=1, group=None)
    service = Service(net, work.make_method(net), trial, work.source, work.precision)
    restored = len(service.engine.residents.records)
    for file in (work.settings.state / "replicas").glob("*"):
        file.unlink()  # nobody else is here, as the service above holds the folder
    service.stop()
    return restored


def choose_device(ray: Any, device: str) -> str:
    """Return the device of replicas: CUDA by default if the cluster has a GPU.

    Raises:
        ValueError: There is no such device.
    """
    gpus = ray.cluster_resources().get("GPU", 0)
    chosen = ("cuda" if gpus else "cpu") if device == "auto" else device
    if chosen not in ("cpu", "cuda"):
        raise ValueError(f"`device` must be auto, cpu or cuda with --ray, got {device}.")
    if chosen == "cuda" and not gpus:
        raise ValueError("Ray has no GPU available; use --device cpu.")
    return chosen


def choose_resources(ray: Any, replicas: int, device: str) -> dict[str, int]:
    """Return what a replica needs: a GPU each, or the cores divided evenly.

    Raises:
        ValueError: There are not enough of them.
    """
    name = "GPU" if device == "cuda" else "CPU"
    nodes = [int(node["Resources"].get(name, 0)) for node in ray.nodes() if node["Alive"]]
    if sum(nodes) < replicas:
        raise ValueError(f"{replicas} replicas need as many {name}s; Ray has {sum(nodes)}.")
    if device == "cuda":
        return {"num_gpus": 1, "num_cpus": 1}
    most = max(1, sum(nodes) // replicas)
    return {"num_cpus": next(each for each in range(most, 0, -1) if sum(node // each for node in nodes) >= replicas)}


def serve_on_ray(ray: Any, serve: Any, work: Work, replicas: int) -> str:
    """Start the replicas; returns the address of the service.

    Args:
        ray: The module, connected.
        serve: The module `ray.serve`.
        work: What the replicas do.
        replicas: Their number.

    Raises:
        OSError: The address cannot be used.
        RuntimeError: The replicas do not start.
        ValueError: The cluster is too small.
    """
    resources = choose_resources(ray, replicas, work.device)
    with listen(work.settings.host, work.settings.port) as free:  # a clear error now, and a free port for 0
        port = free.getsockname()[1]
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    options = {"host": work.settings.host, "port": port}
    serve.start(proxy_location="EveryNode", http_options=options, logging_config=quiet)
    wrapped = serve.ingress(_Front())(Ingress)
    deployment = serve.deployment(
        name=_APP,
        num_replicas=replicas,
        ray_actor_options=resources,
        max_ongoing_requests=_REQUESTS,
        health_check_period_s=5,
        health_check_timeout_s=15,
        graceful_shutdown_timeout_s=_SAVING,
        graceful_shutdown_wait_loop_s=0.5,
    )(wrapped)
    try:
        serve.run(deployment.bind(work), name=_APP, route_prefix="/", logging_config=quiet)
    except RuntimeError as error:
        reason = next(iter(reversed(str(error).strip().splitlines())), "")
        raise RuntimeError(f"The replicas do not start: {reason}") from None
    return f"http://{work.settings.host}:{port}"


def wait_and_stop(work: Work) -> bool:
    """Wait for SIGTERM or Ctrl-C, then let all replicas finish and save; returns whether all states were written."""
    beats, ended = Beats(work.settings.state), threading.Event()
    beats.start()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not ended.wait(0.2):
            pass
        return stop_replicas(beats, work.secret)
    finally:
        beats.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_replicas(beats: Beats, secret: str) -> bool:
    """Let all replicas finish and save, at the same time; returns whether all states were written."""

    def stop(address: str) -> bool:
        try:
            return bool(json.loads(Call(address, secret, _SAVING).send("POST", STOP).body)["whole"])
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return False

    addresses = list(beats.list_alive().values())
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return all(pool.map(stop, addresses))


def resolve_source(source: str) -> str:
    """Return a network's source with the absolute path of a file, for processes that start in another folder."""
    is_file = sources.parse_source(source) is None and os.path.isfile(source)
    return str(Path(source).resolve()) if is_file else source


def run(work: Work, net: YNet, address: str, replicas: int, report: Callable[[str], None]) -> bool:
    """Serve on Ray until a signal comes; returns whether all states were written.

    Args:
        work: What the replicas do; device "auto" and precision None are chosen here.
        net: The network, on any device.
        address: See `open_cluster`.
        replicas: Their number.
        report: Called with lines for the user.

    Raises:
        FileError: The state folder cannot be used.
        ValueError: Something does not go together, or the cluster is too small.
        OSError: The address cannot be used, or no cluster answers.
        ModuleNotFoundError: Ray Serve is not installed.
        RuntimeError: The replicas do not start.
    """
    with open_cluster(address) as (ray, serve):
        device = choose_device(ray, work.device)
        precision = work.precision or choose_precision(torch.device(device))
        settings = replace(work.settings, state=work.settings.state.resolve())
        work = replace(work, device=device, precision=precision, settings=settings, local=address == "local")
        restored = check_work(work, net)
        report(f"restored {restored} streams" if restored else f"state folder: {settings.state}")
        url = serve_on_ray(ray, serve, work, replicas)
        report(f"serving {work.source}, {work.method}, with {replicas} replicas on {device}, on {url}")
        return wait_and_stop(work)
