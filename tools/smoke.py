"""What works in an installed wheel, tried with the interpreter that runs this: `python tools/smoke.py VERSION`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def call(*arguments: str) -> str:
    command = [sys.executable, "-m", "testtime", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def check(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"smoke test failed: {what}")


def main(version: str) -> None:
    import testtime as tt

    check("torch" not in sys.modules, "importing testtime imported torch")
    check("site-packages" in str(tt.__file__), f"testtime was imported from {tt.__file__}")
    check(tt.__version__ == version, f"its version is {tt.__version__}")
    check(call("--version").split() == ["testtime", version], "`testtime --version`")

    shifted = tt.data.open("digits-c/contrast/5", scale="imagenet")
    net = tt.load("digits-resnet8-gn-joint")
    learn = {"lr": 0.02, "copies": 1, "task": tt.Rotation("all"), "augment": tt.CropFlip(padding=0, flip=False)}
    adapters = tt.Fixed(net), tt.Online(net, steps=2, **learn), tt.Episodic(net, steps=2, **learn)
    fixed, online, episodic = (tt.error(list(tt.evaluate(one, shifted, limit=150))) for one in adapters)
    check(online < fixed - 0.1, f"online error {online:.0%}, fixed {fixed:.0%}")
    check(episodic <= fixed, f"episodic error {episodic:.0%}, fixed {fixed:.0%}")

    tt.Online(net).network().save("network.safetensors")
    check(tt.load("network.safetensors").fingerprint() == net.fingerprint(), "saving and loading a network")
    call("demo", "--quick", "--out", "demo")
    check(Path("demo/index.html").stat().st_size > 10_000, "`testtime demo --quick` wrote no page")

    import numpy
    import torch

    found = f"Python {sys.version.split()[0]}, torch {torch.__version__}, numpy {numpy.__version__}"
    print(f"smoke test passed: {found}; error {fixed:.0%} fixed, {online:.0%} online")


if __name__ == "__main__":
    main(sys.argv[1])
