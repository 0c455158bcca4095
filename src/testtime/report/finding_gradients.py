"""Gradient correlation in the document of results, with labels and without."""

from __future__ import annotations

from collections.abc import Mapping

from testtime.report.committed import STAND_INS, Findings, by_level
from testtime.report.correlation import PAPER, PREDICTORS, Fit, Joined
from testtime.report.documents import minus, table, wrap
from testtime.report.finding_levels import images_of
from testtime.report.paper import PAPER_NAMES
from testtime.report.results import method_title


def tell_gradients(found: Findings) -> str:
    """The linear correlations with the improvement, the paper's beside its own."""
    methods, fits = list(found.gradients), _fits(found.gradients)
    best = [
        f"{PAPER_NAMES[method]} that of {PREDICTORS[fit.predictor]} ({fit.correlation:.2f})"
        for method in methods
        if (fit := max((fit for fit in fits.values() if fit.method == method), key=lambda fit: fit.correlation))
    ]
    names = [len(joined.names) for joined in found.gradients.values()]
    words = (
        f"{names[0]} sets; intervals by bootstrap over sets. TTT's improvements at levels 1 to 4 are those on "
        f"{images_of(by_level(found.part)[1]):,} images: its points carry more chance than TTT-Online's. The highest "
        f"of the correlations is for {' and for '.join(best)}. The inner product, the cosine and the error need "
        "labels, but for the rows without."
    )
    return f"{_correlation_table(found.gradients)}\n\n{wrap(words)}"


def tell_stand_ins(found: Findings) -> str:
    """How well the improvement is predicted without labels, by the balance of the predictions among others."""
    fits = _fits(found.stand_ins)
    study = found.stand_in_study
    sets, images = len(study["sets"]), study["configuration"]["limit"]
    pairs = [
        f"{fits['balance.inner', method].correlation:.2f} for {PAPER_NAMES[method]} "
        f"({fits['batch.inner', method].correlation:.2f} with labels)"
        for method in found.stand_ins
    ]
    words = (
        f"{sets} sets, the first {images} images of each, in batches of {study['configuration']['batch']}; "
        f'[`{STAND_INS.name}`](../{STAND_INS.as_posix()}), {study["hardware"]["processor"]}. "Balance" takes, in '
        "place of the classes' loss, how uneven the mean prediction of a batch is: no labels, but classes that are "
        f"about equally frequent. Its inner product with the task's gradient gives {' and '.join(pairs)}. "
        "Confident predictions in place of labels do worse: a wrong one turns its gradient around."
    )
    return f"{_correlation_table(found.stand_ins)}\n\n{wrap(words)}"


def _fits(gradients: Mapping[str, Joined]) -> dict[tuple[str, str], Fit]:
    return {(fit.predictor, fit.method): fit for joined in gradients.values() for fit in joined.fits}


def _correlation_table(gradients: Mapping[str, Joined]) -> str:
    methods, fits = list(gradients), _fits(gradients)
    rows = []
    for key, words in PREDICTORS.items():
        if any((key, method) not in fits for method in methods):
            continue  # the study does not have it
        cells = []
        for method in methods:
            fit = fits[key, method]
            ends = " to ".join(minus(f"{end:.2f}") for end in fit.interval)
            known = f"{PAPER[method]:.2f}" if key == "batch.inner" else ""
            cells += [minus(f"{fit.correlation:.2f}"), ends, known]
        rows.append([words, *cells])
    heads = ["r with the improvement in error"]
    for method in methods:
        heads += [method_title(method), "95%", "the paper's"]
    return table(heads, rows)
