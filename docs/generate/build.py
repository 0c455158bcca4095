"""Every generated table and figure, and the document it belongs to."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from testtime.evaluation import Run, open_runs
from testtime.report.correlation import Joined, join
from testtime.report.results import Results, collect
from testtime.storage import printable, write_atomic

from . import (
    comparison,
    drift,
    errors,
    figures,
    imagenet,
    methods,
    moving,
    photographs,
    poison,
    service,
    speed,
    streams,
    trainings,
    variants,
)
from .documents import fill, link, table
from .result_files import (
    CIFAR,
    CONTROL,
    EARLIER,
    MAIN,
    PICTURES,
    ROBUST,
    ROOT,
    SEEDS,
    by_level,
    find_methods,
    find_past,
    format_command,
    format_hardware,
    format_sources,
    in_cifar,
    read_file,
    read_main,
    read_past,
    read_results,
    read_runs,
)

FIGURES = Path("docs/figures")
DEMO = Path("results/digits-demo.json")
FAMILIAR = Path("results/cifar10/familiar.json")
LOW_RANK = Path("results/low-rank-vit.json")
STREAM = Path("results/digits-stream.json")

HARM = {
    "clean": "original images in between",
    "mixed": "mixed",
    "correlated": "sorted by class, almost",
    "long": "21 sets in a row",
}
CHOSEN = {"reset": "a set each", "clean": HARM["clean"], "correlated": HARM["correlated"]}
"""Names of streams in which learning might harm, and titles; those with held-out images."""
MARGINS = {"margin-0.2": "0.2", "best": "0.35", "margin-0.5": "0.5", CONTROL: f"`{CONTROL}`"}
"""Methods of the files on the margin of `best`, whose default was 0.35 then, and titles."""

Parts = dict[str, str]


def make_parts() -> dict[Path, Parts]:
    """The generated parts of every document, by its path and their names."""
    docs = Path("docs")
    return {
        Path("README.md"): make_readme(),
        docs / "demo.md": {"demo": errors.format_demo(collect(open_runs(ROOT / DEMO)))},
        docs / "kernels.md": {
            "kernels on the GPU": speed.format_gpu_kernels(read_file(Path("results/kernels-h200.json"))),
            "kernels on the CPU": speed.format_cpu_kernels(read_file(Path("results/kernels-cpu.json"))),
        },
        docs / "speed.md": make_speed(),
        docs / "imagenet.md": make_imagenet(),
        docs / "serving.md": {
            "service on the CPU": service.format_service(Path("results/serve-cpu.json")),
            "service on the GPU": service.format_service(Path("results/serve-h200.json")),
        },
        docs / "results.md": make_summary(),
        docs / "results/levels.md": make_levels(),
        docs / "results/streams.md": make_streams(),
        docs / "results/variants.md": make_variants(),
        docs / "results/networks.md": make_networks(),
        docs / "results/branches.md": make_branches(),
        docs / "results/rehearsal.md": make_rehearsal(),
        docs / "results/vit.md": make_vit(),
        docs / "results/gradients.md": {
            "gradients": errors.format_correlations(join_gradients("correlations")),
            "without labels": errors.format_correlations(join_gradients("stand-ins")),
        },
        docs / "results/photographs.md": make_photographs(),
        docs / "results/poison.md": make_poison(),
        docs / "results/auto.md": make_auto(),
        docs / "comparison.md": make_comparison(),
    }


def make_readme() -> Parts:
    """The parts of the README."""
    networks = {"`cifar10-resnet26-gn-joint`": by_level(read_main())[5]}
    for name, width in (("robust", ""), ("robust, width 2", "x2")):
        own, main = (by_level(results)[5] for results in read_past()[name])
        networks[f"`cifar10-resnet26{width}-gn-robust`"] = replace(main, rows={**own.rows, **main.rows})
    return {"expected": errors.format_expected(networks, ("fixed", "episodic", "online", "mirrored", "best"))}


def make_speed() -> Parts:
    """The parts of the page on speed."""
    cpu, gpu, training = (
        read_file(Path(f"results/{name}.json")) for name in ("engine-cpu", "engine-h200", "train-h200")
    )
    return {
        "engine on the CPU": speed.format_engine(cpu, "resnet26"),
        "engine on the GPU": speed.format_engine(gpu, "resnet26"),
        "engine on the GPU at 224": speed.format_engine(gpu, "resnet18"),
        "training on the GPU": speed.format_joint_training(training),
        "large models": speed.format_large_models(read_file(Path("results/models-h200.json"))),
        "memory": speed.format_heap(read_file(Path("results/heap-cpu.json"))),
        "models": speed.format_models(read_file(Path("results/models-cpu.json"))),
        "methods": speed.format_methods(read_file(Path("results/methods-cpu.json")), read_methods()),
    }


def read_methods() -> Mapping[str, Any]:
    """The speed of methods on the GPU; later rows, of `ttt` and `best`, replace those of the first file."""
    held, later = (read_file(Path(f"results/methods-{name}.json")) for name in ("h200", "h200-bn"))
    return {**held, "rows": [*held["rows"], *later["rows"]]}


def make_imagenet() -> Parts:
    """The parts of the page on ImageNet."""
    training, engine = (read_file(Path(f"results/{name}-h200.json")) for name in ("photographs", "engine"))
    return {
        "disk": imagenet.format_disk(),
        "training": imagenet.format_training(training),
        "evaluation": imagenet.format_evaluation(engine, training),
        "memory": imagenet.format_memory(engine),
    }


def make_summary() -> Parts:
    """The parts of the summary of results."""
    results = read_main()
    return {
        "means": errors.format_means(results),
        "level 5": errors.format_table(results, by_level(results)[5]),
        "sources": format_sources(*MAIN),
    }


def make_levels() -> Parts:
    """The parts of the page on levels 1 to 4."""
    results = read_main()
    parts = {"differences": errors.format_differences(results)}
    for level in (4, 3, 2, 1):
        parts[f"level {level}"] = errors.format_table(results, by_level(results)[level])
    return parts | {
        "sources": format_sources(*in_cifar("levels", "standard-levels-1-4", "baseline", "alp", "best-levels"))
    }


def make_streams() -> Parts:
    """The parts of the page on streams."""
    results = read_main()
    mild = ("mild-orders", "mild-networks", "mild-fp32", "mild-longer", "mild-variants")
    noise = in_cifar("noise", "noise-fog")
    return {
        "along the stream": streams.format_thousands(results),
        "flips": errors.format_flips(by_level(results)[5]),
        "online above fixed": streams.format_harm(results),
        "orders": streams.format_orders(read_results("mild-orders").tables[0], _name_networks()),
        "noise": streams.format_noise([read_file(file) for file in noise]),
        "gradual": streams.format_gradual(read_results("gradual", "gradual-uda")),
        "sources": format_sources(*in_cifar("levels", *mild), *noise, *in_cifar("gradual", "gradual-uda")),
    }


def _name_networks() -> dict[str, Run]:
    """The runs in several orders by how their network was trained."""
    (own,), others = (read_runs(file) for file in in_cifar("mild-orders", "mild-networks"))
    named = {"the bundled network": own}
    for run in others:  # called mild-seed-3, mild-tf32-0
        kind, seed = run.path.name.split("-")[1:]
        named[f"seed {seed}, {'bf16' if kind == 'seed' else kind}"] = run
    return named


def make_variants() -> Parts:
    """The parts of the page on other settings."""
    (costs,) = in_cifar("costs")
    timed = read_runs(costs)
    batch = read_results("batch-norm")
    cheaper = read_results("fast", "threshold", main=("fixed", "episodic"))
    choice = find_methods(read_runs(CIFAR / "past-joint-parts.json"))[variants.MIRRORED]
    names = ("past-joint-parts", "best-levels", "tuning", "fast", "threshold", "steps", "batch-norm")
    precisions = ("fp32", "tf32", "bf16")
    return {
        "mirrored": variants.format_mirrored(read_results("past-joint-parts", "best-levels", main=("fixed", "online"))),
        "candidates": variants.format_candidates(read_results("tuning"), timed, choice),
        "cheaper": variants.format_cheaper(cheaper, timed, ("fast", "below-20%")),
        "steps and copies": variants.format_grid(read_results("steps", main=("fixed",)), timed),
        "batch normalization": errors.format_table(batch, batch.tables[0]),
        "arithmetic": errors.format_precisions({name: read_results(f"precision-{name}") for name in precisions}),
        "costs": variants.format_costs(timed),
        "sources": format_sources(*in_cifar(*names, *(f"precision-{name}" for name in precisions)), costs),
    }


def make_networks() -> Parts:
    """The parts of the page on networks."""
    seeds, earlier = read_results(*SEEDS, main=("fixed", "online")), read_results(*EARLIER)
    robust, wide = read_results(*ROBUST), read_results("robust-x2-level-5")
    tried = {
        "severity 3, weight 12": "severity-3",
        "severity 6, weight 12": "severity-6",
        "severity 10, weight 12": "severity-10",
        "severity 3, weight 6": "consistency-6",
    }
    chosen = {title: read_results(f"selection-{name}").tables[0] for title, name in tried.items()}
    return {
        "trainings": trainings.format_trainings(),
        "seeds": errors.format_table(seeds, by_level(seeds)[5]),
        "seeds of 0.1": errors.format_table(earlier, by_level(earlier)[5]),
        "robust": errors.format_table(robust, by_level(robust)[5]),
        "robust, width 2": errors.format_table(wide, by_level(wide)[5]),
        "robust, held out": methods.format_held_out(chosen),
        "sources": format_sources(
            *in_cifar("levels", *SEEDS, *EARLIER, "tf32-0", "tf32-1", *ROBUST, "robust-x2-level-5", "uda"),
            *in_cifar(*(f"selection-{name}" for name in tried.values())),
        ),
    }


def make_branches() -> Parts:
    """The parts of the page on branches for networks without one."""
    files = {
        ("Group Normalization", "branch alone, 20 epochs"): [("branch-gn-20-0", "past-branch")],
        ("Group Normalization", "branch and encoder, 6 epochs"): [("branch-gn-joint-0",)],
        ("Group Normalization", "jointly from scratch"): [("levels", "past-joint")],
        ("Batch Normalization", "branch alone, 20 epochs"): [("branch-bn-20-0",), ("branch-bn-20-1",)],
        ("Batch Normalization", "branch and encoder, 6 epochs"): [("branch-bn-joint-0",)],
    }
    ways = {key: [by_level(read_results(*fit))[5] for fit in fits] for key, fits in files.items()}
    tried = {
        "copy, 6 epochs": "6",
        "copy, 20 epochs": "20",
        "copy, 20 epochs, rate 0.1": "lr-0.1",
        "copy, 20 epochs, AdamW": "adamw",
        "new, 20 epochs": "own",
        "copy and encoder, 6 epochs": "joint",
        "copy and encoder, rate 0.005": "joint-lr-0.005",
    }
    chosen = {title: read_results(f"selection-branch-gn-{name}").tables[0] for title, name in tried.items()}
    return {
        "branches": methods.format_branches(ways),
        "held out": methods.format_held_out(chosen),
        "sources": format_sources(
            *in_cifar(*(name for fits in files.values() for fit in fits for name in fit)),
            *in_cifar(*(f"selection-branch-gn-{name}" for name in tried.values())),
        ),
    }


def make_rehearsal(past: Path = CIFAR) -> Parts:
    """The parts of the page on how the settings of `rehearsal` were chosen.

    Args:
        past: The folder of the results of the study `best`.
    """
    files = [file for own in find_past(past).values() for file in own]
    runs = {title: read_runs(CIFAR / f"harm-{name}.json")[0] for name, title in HARM.items()}
    held_out = {title: read_runs(CIFAR / f"selection-{name}.json")[0] for name, title in CHOSEN.items()}
    margins = {title: read_runs(CIFAR / f"margin-{name}.json")[0] for name, title in CHOSEN.items()}
    titles = {name: f"`{name}`" for name in (methods.BEST, "without-original", CONTROL)}
    choices = {
        name: read_file(CIFAR / f"tune-{name}.json") for name in ("ttt", "mirrored", "rehearsal", "memory", "drift")
    }
    commands = [
        [f"[`tune-{name}.json`](../../results/cifar10/tune-{name}.json)", f"`{held['command']}`"]
        for name, held in choices.items()
    ]
    return {
        "parts": methods.format_tuned(choices),
        "grid": methods.format_grid(choices["rehearsal"]),
        "drift": methods.format_grid(choices["drift"]),
        "original network": streams.format_answers(held_out, titles),
        "margin": streams.format_answers(margins, MARGINS),
        "test sets": methods.format_ablation(read_past(past)),
        "streams": streams.format_gaps(runs, methods.BEST, CONTROL),
        "sources of the test sets": format_sources(*files, *in_cifar(*(f"harm-{name}" for name in HARM))),
        "sources of the original network": format_sources(
            *in_cifar(*(f"{kind}-{name}" for kind in ("selection", "margin") for name in CHOSEN))
        ),
        "sources": table(["file", "command"], commands, words=(0, 1)),
    }


def make_vit() -> Parts:
    """The parts of the page on vision transformers."""
    names = {"`cifar10-vit-masked`": "vit-masked", "ViT, rotation": "vit-rotation"}
    files = {title: [f"{name}-level-5"] for title, name in names.items()}
    files["`cifar10-vit-masked`"].append("vit-masked-episodic")
    networks = {title: by_level(read_results(*own))[5] for title, own in files.items()}
    chosen = {
        name: read_file(CIFAR / f"tune-{name}.json")
        for name in ("vit-masked", "vit-masked-episodic", "vit-rotation", "vit-rotation-best")
    }
    commands = [
        [f"[`tune-{name}.json`](../../results/cifar10/tune-{name}.json)", f"`{held['command']}`"]
        for name, held in chosen.items()
    ]
    return {
        "errors": errors.format_expected(networks, ("fixed", "episodic", "online", "best")),
        **{name: methods.format_grid(choice) for name, choice in chosen.items()},
        "low rank": methods.format_low_rank(read_file(LOW_RANK)),
        "choices": table(["file", "command"], commands, words=(0, 1)),
        "sources": format_sources(*in_cifar(*(name for own in files.values() for name in own))),
        "sources of low rank": format_benchmarks([LOW_RANK]),
    }


def make_auto() -> Parts:
    """The parts of the page on what drift predicts."""
    files = {name: Path(f"results/drift-gn-{name}.json") for name in ("joint", "robust")}
    held = {f"`cifar10-resnet26-gn-{name}`": read_file(file) for name, file in files.items()}
    fitted = Path("results/auto-held-out.json")
    return {
        "fit": drift.format_fit(read_file(fitted)),
        "scores": drift.format_scores(held),
        "levels": drift.format_levels(held),
        "sources": format_benchmarks([fitted, *files.values()]),
        "sources of the run": format_sources(*in_cifar("auto")),
    }


def make_comparison() -> Parts:
    """The parts of the page that compares methods."""
    networks = comparison.find_files()
    return {
        **{network: comparison.format_errors(network, comparison.SHIFTS) for network in networks},
        **{f"{network}, streams": comparison.format_errors(network, comparison.STREAMS) for network in networks},
        "guards": comparison.format_guards(),
        "costs": comparison.format_costs(read_methods()),
        "sources": comparison.format_files(),
    }


def make_poison() -> Parts:
    """The parts of the page on hostile images."""
    files = {name: Path(f"results/poison-{name}.json") for name in ("original", "noise", "bn-original", "bn-noise")}
    held = {name: read_file(file) for name, file in files.items()}
    return {
        **{name: poison.format_kinds(one, 0.1) for name, one in held.items()},
        "shares": poison.format_shares(held["noise"]),
        "sources": format_benchmarks(files.values()),
    }


def format_benchmarks(files: Iterable[Path]) -> str:
    """Where the numbers of benchmarks come from."""
    held = {file: read_file(file) for file in files}
    rows = [
        [link(file), format_hardware(one["hardware"]), format_command(one["command"])] for file, one in held.items()
    ]
    return table(["file", "hardware", "command"], rows, words=(0, 1, 2))


def make_photographs() -> Parts:
    """The parts of the page on photographs."""
    whole, some = (read_results(name, folder=PICTURES) for name in ("level-5", "standard-level-5"))
    joint, robust = (read_results(f"{name}-level-5", folder=PICTURES) for name in ("tf32", "robust"))
    files = {"joint": PICTURES / "motion-blur.json", "robust": PICTURES / "motion-blur-robust.json"}
    blurred = {name: read_file(file) for name, file in files.items()}
    return {
        "accuracy": _format_accuracy(whole),
        "accuracy of TTT": _format_accuracy(some),
        "gains": errors.format_gains({"episodic": some, "online": whole}),
        "joint": _format_accuracy(joint),
        "robust": _format_accuracy(robust),
        "motion blur": photographs.format_directions(blurred),
        "motion blur by class": photographs.format_classes(blurred["joint"]),
        "familiar": errors.format_familiar(read_file(FAMILIAR)),
        "sources": format_sources(
            *(PICTURES / f"{name}.json" for name in ("level-5", "standard-level-5", "tf32-level-5", "robust-level-5"))
        ),
    }


def _format_accuracy(results: Results) -> str:
    return errors.format_table(results, replace(results.tables[0], paper=None), "accuracy")


@functools.cache
def join_gradients(study: str) -> Mapping[str, Joined]:
    """A study of gradients joined with the improvement of `episodic` and of `online`."""
    file = ROOT / CIFAR / f"{study}.json"
    standard = [ROOT / each for each in in_cifar("seed-0-standard-level-5", "seed-0-standard-levels-1-4")]
    return {"episodic": join(file, standard), "online": join(file, [ROOT / CIFAR / "seed-0.json"])}


def make_figures() -> dict[Path, str]:
    """Every figure as SVG, by its path."""
    drawn = figures.draw_main(read_main()) | figures.draw_gradients(join_gradients("correlations"))
    gradual, photographs = read_results("gradual", "gradual-uda"), read_results("level-5", folder=PICTURES)
    drawn |= figures.draw_others(gradual, photographs, collect(open_runs(ROOT / DEMO)))
    made = {name: drawing.svg(inline=False) for name, drawing in drawn.items() if drawing is not None}
    made |= {f"stream-{scheme}": moving.draw_stream(read_file(STREAM), scheme) for scheme in moving.PALETTES}
    return {FIGURES / f"{name}.svg": svg for name, svg in made.items()}


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Update the documents and the figures; the exit code.

    Args:
        arguments: Of the command line.
        root: The checkout whose documents are updated.
    """
    parser = argparse.ArgumentParser(description="Make the tables and figures of the documents from the result files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table is not current")
    check = parser.parse_args(arguments).check
    try:
        parts = make_parts()
        held = {page: (root / page).read_text(encoding="utf-8") for page in parts}
        wanted = {page: fill(held[page], own, page) for page, own in parts.items()}
    except (OSError, ValueError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    stale = [page for page in wanted if wanted[page] != held[page]]
    if check:
        for page in stale:
            print(f"{page}: not current; run python docs/generate", file=sys.stderr)
        return int(bool(stale))
    for page in stale:
        write_atomic(root / page, wanted[page])
    for path, svg in make_figures().items():
        write_atomic(root / path, svg)
    return 0
