"""A stream that fails and one that recovers: digits whose light fades, before a frozen and an adapting network.

    python benchmarks/stream.py --out results/digits-stream.json

The setting is that of `testtime serve --demo` (src/testtime/serve/demo.py), without the service: the bundled network,
test digits in random order, the same for both, each answered once. Every `--every` images the digit is stored as it was
seen, with both answers: these are the frames of docs/figures/stream-*.svg. Half a minute on one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import testtime as tt
from testtime.provenance import describe_machine
from testtime.serve.demo import FADE, LIGHT, NETWORK, WINDOW, find_light, iterate_digits, make_method


def measure(count: int, every: int, seed: int) -> dict[str, Any]:
    """Send the digits to both networks; returns which answers were wrong, and the frames."""
    net = tt.load(NETWORK)
    adapters = {"frozen": tt.Fixed(net), "adapting": tt.Online(net, method=make_method(), seed=seed)}
    wrong: dict[str, list[int]] = {name: [] for name in adapters}
    frames: list[dict[str, Any]] = []
    for number, (image, label) in enumerate(itertools.islice(iterate_digits(seed), count)):
        answers = {name: int(adapter.predict(image[None]).classes[0]) for name, adapter in adapters.items()}
        for name, answer in answers.items():
            wrong[name].append(int(answer != label))
        if number % every == every - 1:
            pixels = image[0].numpy().tobytes().hex()
            frames.append({"number": number + 1, "label": label, "answers": answers, "pixels": pixels})
            frames[-1]["light"] = round(find_light(number), 4)
    return {"wrong": {name: "".join(map(str, bits)) for name, bits in wrong.items()}, "frames": frames}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="digits")
    parser.add_argument("--every", type=int, default=40, help="digits between two frames")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "seed": options.seed, "network": NETWORK}
    found |= {"images": options.count, "window": WINDOW, "fade": FADE, "light": LIGHT}
    found |= {**measure(options.count, options.every, options.seed), **describe_machine(torch.device("cpu"))}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, bits in found["wrong"].items():
        print(f"{name}: {bits.count('1')} of {len(bits)} wrong, {bits[-WINDOW:].count('1')} of the last {WINDOW}")


if __name__ == "__main__":
    main()
