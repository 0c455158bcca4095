"""Make the result files of this folder again: the networks and every measurement of docs/results.md.

    python results/measure.py --list                        # the steps, and which results exist
    python results/measure.py selection-joint joint levels  # some steps, in this order
    python results/measure.py --all                         # hours on one H200

A step is a `testtime` command, run from the root of the repository: `train-` steps train a network, `fit-` steps a
branch for one, `tune-` steps choose settings, the others evaluate. Its run folder is `runs/STEP`; an interrupted step
is resumed. Its result is then copied here: the record of a training, the choice, the summary of an evaluation. Needs
CIFAR-10, and CIFAR-10-C made with the frost photographs, under $TESTTIME_DATA, see docs/results.md (without CIFAR-10-C,
frost is procedural). Between tuning and testing, results/bundle.py adds the chosen settings to the file of a network:
`recommended.safetensors` of a ViT, `runs/tuned-gn.safetensors` for the comparison of methods. To what the
`auto-` steps find, benchmarks/auto.py fits a calibration. For the steps on photographs the eight classes of ImageNet in
`photographs/`, see docs/results/photographs.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from testtime.evaluation import Run, open_run
from testtime.provenance import describe_machine
from testtime.report.comparison import compare_runs

ROOT = Path(__file__).resolve().parents[1]
RESULTS, RUNS = ROOT / "results", ROOT / "runs"
JOINT, ROBUST = "cifar10-resnet26-gn-joint", "cifar10-resnet26-gn-robust"
ROBUST_X2 = "cifar10-resnet26x2-gn-robust"
PHOTOGRAPHS = (
    "--data photographs --network resnet18 --size 128 --crop-area 0.25 --batch 128 --lr 0.05 --weight-decay 0.0005 "
    "--precision tf32"
)
GRADUAL = ",".join(f"cifar10-gradual/{name}_noise" for name in ("gaussian", "impulse", "shot"))
UDA_SETS = f"cifar10,{GRADUAL},cifar10-c/*/5"

TRAININGS = {
    **{
        f"selection-{name}": f"--data cifar10 --hold-out 5000 --recipe robust --precision bf16 {setting}"
        for name, setting in (
            ("severity-3", "--epochs 30 --severity 3"),
            ("severity-6", "--epochs 30 --severity 6"),
            ("severity-10", "--epochs 30 --severity 10"),
            ("consistency-6", "--epochs 30 --consistency 6"),
            ("random-views", "--epochs 30 --views random"),
            ("epochs-75", "--epochs 75"),
            ("epochs-150", "--epochs 150"),
        )
    },
    "selection-plain": "--data cifar10 --hold-out 5000 --method plain --precision tf32",
    "selection-bn-plain": "--data cifar10 --hold-out 5000 --method plain --norm batch --precision tf32",
    "selection-joint": "--data cifar10 --hold-out 5000 --precision tf32",
    "selection-bn-joint": "--data cifar10 --hold-out 5000 --norm batch --precision tf32",
    "selection-robust": "--data cifar10 --hold-out 5000 --recipe robust --precision tf32",
    "selection-short": "--data cifar10 --hold-out 5000 --views random --epochs 25",
    "selection-bn-short": "--data cifar10 --hold-out 5000 --views random --epochs 25 --norm batch",
    "joint": "--data cifar10 --seeds 0-2 --precision tf32",
    "robust": "--data cifar10 --recipe robust --seeds 0-2 --precision tf32",
    "robust-x2": "--data cifar10 --recipe robust --width 2 --epochs 75 --precision tf32",
    "plain": "--data cifar10 --method plain --precision tf32",
    "bn-joint": "--data cifar10 --norm batch --precision tf32",
    "bn-plain": "--data cifar10 --norm batch --method plain --precision tf32",
    "alp": "--data cifar10 --method alp --precision tf32",
    "uda": f"--data cifar10 --method uda --targets '{UDA_SETS}' --start {JOINT} --epochs 18 --lr 0.004 "
    "--views random --precision bf16",
    **{
        f"vit-{name}": f"--data cifar10 --hold-out 5000 --network vit --statistics 0 --precision bf16 {setting}"
        for name, setting in (
            ("masked", "--task masked --epochs 150"),
            ("rotation", "--views random --epochs 100"),
            ("plain", "--method plain --epochs 100"),
            ("masked-robust", "--task masked --recipe robust --epochs 100"),
            ("rotation-robust", "--views random --recipe robust --epochs 100"),
        )
    },
    "photographs-tf32": f"{PHOTOGRAPHS} --epochs 160",
    "photographs-robust": f"{PHOTOGRAPHS} --epochs 80 --recipe robust",
}
"""Name → arguments of `testtime train`. Settings of the ViTs are chosen with themselves, on images they never saw;
others with the networks whose names begin with `selection-`."""

WAYS = {
    "6": "--copy --epochs 6",
    "20": "--copy --epochs 20",
    "joint": "--copy --joint --epochs 6",
}
"""Ways to make a plain network adaptable; SGD 0.05 (joint 0.02), batches of 256."""
TRIED = WAYS | {
    "own": "--epochs 20",
    "adamw": "--copy --epochs 20 --optimizer adamw",
    "lr-0.1": "--copy --epochs 20 --lr 0.1",
    "joint-lr-0.005": "--copy --joint --epochs 6 --lr 0.005",
}
"""Ways that are compared on held-out images."""
FITS = {
    **{
        f"selection-branch-{norm}-{way}": f"-c runs/selection-{plain}/network.safetensors --data cifar10 "
        f"--hold-out 5000 --precision bf16 {options}"
        for norm, plain in (("gn", "plain"), ("bn", "bn-plain"))
        for way, options in TRIED.items()
    },
    "vit-branch": "-c runs/vit-plain/network.safetensors --data cifar10 --hold-out 5000 --copy --epochs 20 "
    "--optimizer adamw --precision bf16",
    **{
        f"branch-{norm}-{way}-{seed}": f"-c cifar10-resnet26-{norm}-plain --data cifar10 --hold-out 0 --seed {seed} "
        f"--precision bf16 {options}"
        for norm in ("gn", "bn")
        for way, options in WAYS.items()
        for seed in (0, 1, 2)
    },
}
"""Name → arguments of `testtime fit-branch`."""

SOME = "--limit 2000 --shuffle"
BATCHED = "fixed,norm,tent,shot,eta,eata,rdumb,sar,cotta,lame,t3a,roid,rotta,actmad"
SINGLE = "fixed,online,best"
PROTOCOLS = {
    "reset": "--protocol reset",
    "continual": "--protocol continual",
    **{f"continual-{order}": f"--protocol continual --order {order}" for order in (1, 2)},
    "mixed": "--protocol mixed",
    **{
        f"correlated-{concentration}": f"--protocol correlated --concentration {concentration}"
        for concentration in ("1", "0.1", "0.01")
    },
    "clean": "--protocol clean",
}
"""Name → protocol."""
COMPARED = {"gn": JOINT, "bn": "cifar10-resnet26-bn-joint", "robust": ROBUST}
"""Name → network."""
COMPARISONS = {
    **{
        f"{name}{suffix}": f"--methods {methods} --batch 200 {images} {protocol}"
        for suffix, methods in (("", BATCHED), ("-single", SINGLE))
        for name, protocol, images in (
            *((name, protocol, SOME) for name, protocol in PROTOCOLS.items()),
            *((f"{name}-full", PROTOCOLS[name], "--shuffle") for name in ("reset", "continual")),
        )
    },
    "batch-1": f"--methods fixed,norm,tent,eata,rotta --batch 1 {SOME}",
    **{f"batch-{batch}": f"--methods {BATCHED} --batch {batch} --limit 500 --shuffle" for batch in (16, 64)},
    **{
        f"{name}{suffix}": f"--methods {methods} --batch 200 --shuffle {options}"
        for name, options in (
            ("gradual", "--limit 200 --protocol gradual"),
            ("seeds", "--limit 1000 --seed 0 --seed 1 --seed 2"),
        )
        for suffix, methods in (("", BATCHED), ("-single", SINGLE))
    },
    "reset-memo": f"--methods memo {SOME}",
}
"""Name → arguments of the comparison of methods; those that learn from single images run on their own."""
SELECTED = "-c runs/selection-joint/network.safetensors --precision tf32"
TUNINGS = {
    "ttt": f"{SELECTED} --method ttt --lr 0.001 --limit 3000",
    "mirrored": f"{SELECTED} --method mirrored --lr 0.0005,0.001,0.002 --limit 3000",
    "rehearsal": f"{SELECTED} --method rehearsal --lr 0.0005,0.001,0.002 --constant weight=0.5,1,2 --constant drift=0 "
    "--limit 3000",
    "memory": f"{SELECTED} --method rehearsal --lr 0.0005 --constant weight=2.0 --constant drift=0 "
    "--constant memory=0,16,64,256 --limit 3000",
    **{
        f"{name}-{method}": f"-c runs/selection-{name}/network.safetensors --method {method} "
        "--lr 0.0001,0.0003,0.001,0.003 --batch 200 --limit 1000"
        for name in ("short", "bn-short")
        for method in ("tent", "shot", "eta", "eata", "sar", "cotta", "roid", "rotta", "actmad")
    },
    "drift": f"{SELECTED} --method rehearsal --lr 0.0005 --constant weight=2.0 --constant drift=0,1.2,1.5,2,3 "
    "--levels 1-5 --limit 2000",
    **{
        f"vit-{task}{recipe}{suffix}": f"-c runs/vit-{task}{recipe}/network.safetensors --precision bf16 {options}"
        for task, rates in (("masked", "0.003,0.01,0.03,0.1"), ("rotation", "0.0003,0.001,0.003,0.01"))
        for recipe in ("", "-robust")
        for suffix, options in (
            ("", f"--lr {rates} --limit 1000"),
            ("-best", f"--method best --lr {rates} --limit 1000"),
            ("-episodic", f"--mode episodic --lr {rates} --limit 200"),
        )
    },
    "vit-branch": "-c runs/vit-branch/network.safetensors --precision bf16 --lr 0.0003,0.001,0.003,0.01 --limit 1000",
}
"""Name → arguments of `testtime tune`; "memory" and "drift" have what the one before has chosen."""
HELD_OUT = "--data cifar10-held-out-c --levels 5 --methods fixed,online --precision bf16 --shuffle"
LEVEL_5 = "--data cifar10-c --levels 5 --methods fixed,online --precision bf16 --shuffle"
EVALUATIONS = {
    **{
        name: f"-c runs/{name}/network.safetensors {HELD_OUT}"
        for name in (*TRAININGS, *FITS)
        if name.startswith("selection-") and not name.endswith("-plain")
    },
    "levels": f"-c {JOINT} --data cifar10-c --methods fixed,online --precision bf16 --shuffle",
    "standard-level-5": f"-c {JOINT} --data cifar10-c --levels 5 --methods fixed,episodic --precision bf16 --shuffle",
    "standard-levels-1-4": f"-c {JOINT} --data cifar10-c --levels 1-4 --no-original --methods fixed,episodic "
    "--precision bf16 --shuffle",
    "baseline": "--baseline cifar10-resnet26-gn-plain --data cifar10-c --methods plain --shuffle",
    "alp": "--network alp=cifar10-resnet26-gn-alp --data cifar10-c --methods alp --shuffle",
    "uda": "--network 'uda=runs/uda/{set}/network.safetensors' --matrix baselines --methods uda",
    "best-levels": f"-c {JOINT} --matrix best --methods mirrored,fixed-mirrored --levels 1-4 --no-original "
    "--precision bf16",
    "batch-norm": "-c cifar10-resnet26-bn-joint --baseline cifar10-resnet26-bn-plain --matrix bn --precision bf16 "
    "--limit 2000",
    "fast": f"-c {JOINT} --matrix fast --methods fast --precision bf16",
    "steps": f"-c {JOINT} --matrix steps --precision bf16 --limit 128",
    "threshold": f"-c {JOINT} --matrix threshold --methods below-20% --precision bf16",
    "gradual": f"-c {JOINT} --baseline cifar10-resnet26-gn-plain --matrix gradual --precision bf16",
    "gradual-uda": "--network 'uda=runs/uda/{set}/network.safetensors' --data cifar10-gradual --methods uda",
    "mild-orders": f"-c {JOINT} --matrix mild --methods fixed,online --precision bf16",
    **{f"joint-{seed}": f"-c runs/joint/seed-{seed}/network.safetensors {LEVEL_5}" for seed in (1, 2)},
    "robust-levels": f"-c {ROBUST} --data cifar10-c --methods fixed,online --precision bf16 --shuffle",
    **{f"robust-{seed}": f"-c runs/robust/seed-{seed}/network.safetensors {LEVEL_5}" for seed in (1, 2)},
    **{name: f"-c runs/{name}/network.safetensors {LEVEL_5}" for name in FITS if name.startswith("branch-")},
    **{
        f"past-{name}{suffix}": f"-c {network} --matrix best --precision bf16 --methods {options}"
        for name, network in (("joint", JOINT), ("robust", ROBUST), ("robust-x2", ROBUST_X2))
        for suffix, options in (
            ("", "best,fixed-mirrored"),
            ("-mild", "best,fixed-mirrored --levels 1 --no-original --limit 2000"),
            ("-parts", "without-original,without-both,mirrored,fixed-mirrored"),
            ("-mild-parts", "without-original,fixed-mirrored --levels 1 --no-original"),
        )
    },
    **{
        f"harm-{name}": f"-c {JOINT} --matrix best --methods best,fixed-mirrored --precision bf16 --batch 200 {options}"
        for name, options in (
            ("clean", "--protocol clean --limit 2000"),
            ("mixed", "--protocol mixed --limit 2000"),
            ("correlated", "--protocol correlated --limit 2000"),
            (
                "long",
                "--protocol continual --original --levels 1,2 --corruptions brightness,contrast,defocus_blur,fog,"
                "elastic_transform,frost,motion_blur,pixelate,snow,zoom_blur",
            ),
        )
    },
    **{
        f"selection-{protocol}": "-c runs/selection-short/network.safetensors --matrix best --data cifar10-held-out-c "
        f"--methods best,without-original,without-memory,fixed-mirrored --batch 200 --protocol {protocol} --limit 1000"
        for protocol in ("reset", "clean", "correlated")
    },
    **{
        f"margin-{protocol}": "-c runs/selection-joint/network.safetensors --matrix best --data cifar10-held-out-c "
        "--methods best,margin-0.35,margin-0.5,fixed-mirrored --precision bf16 --batch 200 "
        f"--protocol {protocol} --limit 2000"
        for protocol in ("reset", "clean", "correlated")
    },
    **{
        f"auto-{name}": f"-c runs/selection-{network}/network.safetensors --data cifar10-held-out-c --levels 1-5 "
        "--methods fixed,episodic,online --precision bf16 --limit 1000 --shuffle"
        for name, network in (("joint", "joint"), ("bn-joint", "bn-joint"), ("robust", "epochs-150"))
    },
    "past-branch": "-c runs/branch-gn-20-0/network.safetensors --matrix best --precision bf16 --methods best,"
    "fixed-mirrored",
    "robust-x2-level-5": f"-c {ROBUST_X2} {LEVEL_5}",
    **{
        f"comparison-{name}-{protocol}": f"-c {network} --data cifar10-c "
        f"--precision {'bf16' if protocol.endswith('-single') else 'tf32'} {options}"
        + ("" if protocol.startswith("gradual") else " --levels 5")
        for name, network in COMPARED.items()
        for protocol, options in COMPARISONS.items()
    },
    **{
        f"comparison-{name}-{protocol}-guarded": f"-c {network} --matrix guards --precision tf32 --batch 200 "
        f"--limit 2000 {PROTOCOLS[protocol]}"
        for name, network in COMPARED.items()
        for protocol in ("reset", "continual")
    },
    **{
        f"comparison-{name}-{protocol}-tuned": f"-c runs/tuned-{name}.safetensors --data cifar10-c --levels 5 "
        f"--precision tf32 --methods tent,shot,eta,eata,sar,cotta,roid,rotta,actmad --batch 200 {SOME} "
        f"{PROTOCOLS[protocol]}"
        for name in COMPARED
        for protocol in ("reset", "continual")
    },
    **{
        f"comparison-bn-{protocol}-dua": f"-c {COMPARED['bn']} --data cifar10-c --levels 5 --precision tf32 "
        f"--methods dua {SOME} {PROTOCOLS[protocol]}"
        for protocol in ("reset", "continual")
    },
    **{
        f"comparison-gn-recurring{suffix}": f"-c {JOINT} --data cifar10-c --levels 5 --precision {precision} "
        f"--methods {methods} --batch 200 --shuffle --limit {limit} --protocol recurring"
        for suffix, precision, methods, limit in (
            ("", "tf32", "fixed,tent,eata,rdumb,cotta,roid", 2000),
            ("-single", "bf16", SINGLE, 200),
        )
    },
    **{
        f"photographs-{name}-level-5": f"-c runs/photographs-{name}/network.safetensors --data imagenet-c --levels 5 "
        "--data-root photographs --methods fixed,online --copies 64 --precision bf16 --shuffle --limit 1000"
        for name in ("tf32", "robust")
    },
    **{
        f"vit-{name}-{suffix}": f"-c runs/vit-{name}/recommended.safetensors --data cifar10-c --levels 5 "
        f"--methods {chosen} --precision bf16 {SOME}"
        for name in ("masked", "rotation", "masked-robust", "rotation-robust", "branch")
        for suffix, chosen in (("level-5", "fixed,online,best"), ("episodic", "episodic"))
    },
}
"""Name → arguments of `testtime eval`."""


def main() -> None:
    """Run the steps named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--all", action="store_true", help="every step")
    parser.add_argument("--list", action="store_true", help="list the steps and leave")
    options = parser.parse_args()
    known = list_steps()
    if options.list or not (options.steps or options.all):
        for name in known:
            print(f"{name:36} testtime {command(name)}")
        return
    unknown = sorted(set(options.steps) - set(known))
    if unknown:
        parser.error(f"there is no step {unknown[0]!r}; --list shows them")
    for name in known if options.all else options.steps:
        take(name)


def list_steps() -> list[str]:
    """Return the names of all steps."""
    made = [*(f"train-{name}" for name in TRAININGS), *(f"fit-{name}" for name in FITS)]
    return [*made, *(f"tune-{name}" for name in TUNINGS), *EVALUATIONS]


def command(name: str) -> str:
    """Return the command of a step."""
    training = name.removeprefix("train-")
    if name.startswith("train-"):
        return f"train {TRAININGS[training]} --out runs/{training}"
    if name.startswith("fit-"):
        fit = name.removeprefix("fit-")
        return f"fit-branch {FITS[fit]} --out runs/{fit}"
    if name.startswith("tune-"):
        return f"tune {TUNINGS[name.removeprefix('tune-')]} --out runs/{name}"
    return f"eval {EVALUATIONS[name]} --out runs/eval-{name}"


def take(name: str) -> None:
    """Run a step and copy its result."""
    testtime(*shlex.split(command(name)))
    results = RESULTS / ("imagenette" if "photographs-" in name else "cifar10")
    if name.startswith(("train-", "fit-")):
        folder = RUNS / name.partition("-")[2]
        records = sorted(folder.rglob("record.json"))
        if name == "train-uda":  # a network for each set
            held = {record.parent.relative_to(folder).as_posix(): json.loads(record.read_text()) for record in records}
            return store(held, results / "training-uda.json")
        for record in records:
            place = "-".join(record.parent.relative_to(RUNS).parts)
            copy(record, results / f"training-{place.removeprefix('photographs-')}.json")
    elif name.startswith("tune-"):
        machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        about = {"command": f"testtime {command(name)}", "machine": machine}
        copy(RUNS / name / "choice.json", results / f"{name}.json", about)
    elif name.startswith("comparison-"):
        target = RESULTS / "comparison" / f"{name.removeprefix('comparison-')}.json"
        target.parent.mkdir(exist_ok=True)
        store(condense(open_run(RUNS / f"eval-{name}")), target)
    else:
        folder = RUNS / f"eval-{name}"
        testtime("report", str(folder), "--format", "json", "--out", str(folder / "report"))
        copy(folder / "report" / "summary.json", results / f"{name.removeprefix('photographs-')}.json")


def testtime(*arguments: str) -> None:
    """Run `testtime`; stops the program if it fails."""
    print("testtime", shlex.join(arguments), flush=True)
    done = subprocess.run([sys.executable, "-m", "testtime", *arguments], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def condense(run: Run) -> dict[str, Any]:
    """Return the scores of a run by method, without the single answers, which would be megabytes."""
    (results,) = compare_runs([run]).protocols
    rows = []
    for method, score in results.scores.items():
        row = {"method": method, **asdict(score), "errors": list(score.errors.values())}
        rows.append({key: value for key, value in row.items() if key not in ("rank", "devices")})
    about = {key: run.about[key] for key in ("command", "seeds", "versions", "hardware")}
    return {**about, "networks": run.configuration["networks"], "protocol": results.title, "rows": rows}


def copy(source: Path, target: Path, about: dict[str, Any] | None = None) -> None:
    """Copy a JSON file, after parsing it, with more entries."""
    store((about or {}) | json.loads(source.read_text()), target)


def store(document: dict[str, Any], target: Path) -> None:
    """Write a JSON file, without white space, which would be half of it."""
    target.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    print(target.relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
