"""The steps of measure.py: the commands that train the networks, choose settings, and measure.

What they read and write follows from their names, see `find_product`.
"""

from __future__ import annotations

from collections.abc import Sequence

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
SHORT = {"gn": "short", "bn": "bn-short", "robust": "severity-3"}
"""Network of the comparison → name of one that was trained in a similar way, for fewer epochs."""
RECIPES = ("", "-robust")
"""How the names of ViTs end."""
TUNED = ("tent", "shot", "eta", "eata", "sar", "cotta", "roid", "rotta", "actmad")
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
        for name in SHORT.values()
        for method in TUNED
    },
    "drift": f"{SELECTED} --method rehearsal --lr 0.0005 --constant weight=2.0 --constant drift=0,1.2,1.5,2,3 "
    "--levels 1-5 --limit 2000",
    **{
        f"vit-{task}{recipe}{suffix}": f"-c runs/vit-{task}{recipe}/network.safetensors --precision bf16 {options}"
        for task, rates in (("masked", "0.003,0.01,0.03,0.1"), ("rotation", "0.0003,0.001,0.003,0.01"))
        for recipe in RECIPES
        for suffix, options in (
            ("", f"--lr {rates} --limit 1000"),
            ("-best", f"--method best --lr {rates} --limit 1000"),
            ("-episodic", f"--mode episodic --lr {rates} --limit 200"),
        )
    },
    "vit-branch": "-c runs/vit-branch/network.safetensors --precision bf16 --lr 0.0003,0.001,0.003,0.01 --limit 1000",
}
"""Name → arguments of `testtime tune`; "memory" and "drift" have what the one before has chosen."""
BUNDLES = {
    **{
        f"vit-{name}": f"runs/vit-{name}/network.safetensors runs/vit-{name}/recommended.safetensors --choices "
        + " ".join(f"results/cifar10/tune-vit-{name}{suffix}.json" for suffix in suffixes)
        for name, suffixes in (
            *(
                (name, ("", "-best", "-episodic"))
                for name in ("masked", "rotation", "masked-robust", "rotation-robust")
            ),
            ("branch", ("",)),
        )
    },
    **{
        f"tuned-{name}": f"{network} runs/tuned-{name}.safetensors --choices "
        + " ".join(f"results/cifar10/tune-{SHORT[name]}-{method}.json" for method in TUNED)
        for name, network in COMPARED.items()
    },
}
"""Name → arguments of results/bundle.py."""
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
    "auto": "-c runs/selection-short/network.safetensors --data cifar10-held-out-c --levels 1-5 "
    "--methods fixed,online --limit 1000 --shuffle",
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
        f"--precision tf32 --methods {','.join(TUNED)} --batch 200 {SOME} "
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


def list_steps() -> list[str]:
    """Return the names of all steps, each after those that it needs."""
    made = [*(f"train-{name}" for name in TRAININGS), *(f"fit-{name}" for name in FITS)]
    chosen = [*(f"tune-{name}" for name in TUNINGS), *(f"bundle-{name}" for name in BUNDLES)]
    return [*made, *chosen, *EVALUATIONS]


def command(name: str) -> str:
    """Return the command of a step."""
    kind, _, rest = name.partition("-")
    if kind == "train":
        return f"testtime train {TRAININGS[rest]} --out runs/{rest}"
    if kind == "fit":
        return f"testtime fit-branch {FITS[rest]} --out runs/{rest}"
    if kind == "tune":
        return f"testtime tune {TUNINGS[rest]} --out runs/{name}"
    if kind == "bundle":
        return f"python results/bundle.py {BUNDLES[rest]}"
    return f"testtime eval {EVALUATIONS[name]} --out runs/eval-{name}"


def find_needed(name: str) -> list[str]:
    """Return the steps whose results the command of a step reads."""
    words = command(name)
    return [other for other in list_steps() if other != name and find_product(other) in words]


def find_product(name: str) -> str:
    """Return what a step makes: the beginning of a path, as it stands in the commands of others."""
    kind, _, rest = name.partition("-")
    if kind in ("train", "fit"):
        return f"runs/{rest}/"
    if kind == "bundle":
        return BUNDLES[rest].split()[1]
    return f"results/cifar10/{name}.json"


def add_needed(names: Sequence[str]) -> list[str]:
    """Return steps with all that they need, each after those that it needs."""
    found, open_names = set(names), list(names)
    while open_names:
        new = set(find_needed(open_names.pop())) - found
        found |= new
        open_names += new
    return [name for name in list_steps() if name in found]
