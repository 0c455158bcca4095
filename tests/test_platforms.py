"""Other systems: everything imports and adapts where what only POSIX systems have is missing, without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HIDE = """
import os, signal, sys  # the dependencies come first: they have ways of their own
import fastapi, jinja2, matplotlib.pyplot, numpy, PIL.Image, rich.progress, torch, typer, uvicorn

for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
for name in ("fork", "geteuid", "getgid", "getuid", "killpg", "sched_getaffinity", "setsid"):
    delattr(os, name)
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1"):
    delattr(signal, name)
os.environ["PATH"] = ""  # no compiler
os.environ.pop("CXX", None)
"""
IMPORT = """
import importlib, pkgutil
import testtime

names = [one.name for one in pkgutil.walk_packages(testtime.__path__, "testtime.") if "kernels.cuda" not in one.name]
optional = ("lightning", "ray", "tensorboard", "huggingface_hub")
count = 0
for name in names:
    if name == "testtime.__main__":
        continue
    try:
        importlib.import_module(name)
        count += 1
    except ModuleNotFoundError as error:
        assert error.name in optional, (name, error)
assert count > 200, count
"""
USE = """
import testtime as tt
from testtime.evaluation import make_plan, run_plan
from testtime.threads import count_cpus
from testtime import kernels

net = tt.load("digits-resnet8-gn-joint")
images = tt.data.open("digits").images(range(4))
adapter = tt.Online(net, lr=0.02, copies=2)
assert not torch.equal(adapter(images), net(images))
adapter.save("stream.safetensors")
plan = make_plan(networks={"joint": "digits-resnet8-gn-joint"}, data="digits", methods="fixed", limit=20)
assert len(run_plan(plan, "run").units) == 1  # in a folder that is locked elsewhere
assert count_cpus() >= 1
assert "none found" in kernels.describe(torch.device("cpu"))["compiler"]
"""


def run(code: str, folder: Path) -> None:
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_everything_imports_and_adapts_without_what_only_posix_systems_have(tmp_path: Path) -> None:
    run(HIDE + IMPORT + USE, tmp_path)
