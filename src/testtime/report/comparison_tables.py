"""The tables of a comparison, and what each of them states: settings, order, resets, source data, batch, images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from testtime.adaptation.methods import METHODS
from testtime.evaluation import Run
from testtime.evaluation.columns import WINDOW
from testtime.report.comparison import Comparison, ProtocolResults
from testtime.report.results import BASELINE, method_title
from testtime.report.run_tables import difference
from testtime.report.scores import Score
from testtime.report.sheets import Entry, Sheet

_COMPARED = ("steps", "lr", "copies", "threshold", "update", "share", "optimizer", "resets")
_NEEDS = {"branch": "a branch trained on source images", "statistics": "statistics of source images"}


def make_sheets(comparison: Comparison) -> list[Sheet]:
    """Return all tables: methods × protocols, then those of each protocol."""
    sheets = [make_overview(comparison)] if len(comparison.protocols) > 1 else []
    return sheets + [sheet for one in comparison.protocols for sheet in make_protocol_sheets(one)]


def make_protocol_sheets(results: ProtocolResults) -> list[Sheet]:
    """Return the tables of one protocol: all measures, and how often methods change order."""
    several = len(results.repetitions) > 1 and len(results.scores) > 1
    return [_make_measures(results), *([_make_swaps(results)] if several else [])]


def explain_comparison() -> list[str]:
    """Explain the measures, one sentence each."""
    return [
        "Error: wrong predictions after the update in percent, lower is better; the best is in bold; ± is half the "
        "width of the 95% interval (bootstrap over images), s the standard deviation over repetitions.",
        "Clean: error on the uncorrupted images after the first corrupted ones; under reset and correlated, on the "
        f"uncorrupted set as a stream of its own; in parentheses, the difference to {BASELINE}.",
        "ECE: expected calibration error in percent, 15 bins of equal width, of the predictions before and after the "
        "update, over all images of the streams; mean over repetitions.",
        f"Flips: answers that are right, but wrong with {BASELINE} (to right), and the opposite (to wrong), in percent "
        "of the answers.",
        f"Collapses: in {WINDOW} consecutive images, more than 80% of the predictions are one class that fewer than "
        "half of the labels are; overlapping windows count once.",
        "Rank: among the methods by error, mean over the repetitions (order of the sets, seed, network) that all "
        "methods have.",
    ]


def make_overview(comparison: Comparison) -> Sheet:
    """Return the errors, methods × protocols."""
    rows = []
    for method in comparison.methods:
        scores = [one.scores.get(method) for one in comparison.protocols]
        bests = [_find_best(one, lambda score: score.error) for one in comparison.protocols]
        rows.append((method_title(method), tuple(map(_error, scores, bests))))
    titles = tuple(one.title for one in comparison.protocols)
    notes = [" ".join(f"{name}: {text}." for name, text in _state(one)) for one in comparison.protocols]
    stated = tuple(zip(titles, notes, strict=True))
    return Sheet("Methods and protocols", "error in %", titles, tuple(rows), stated)


def _make_measures(results: ProtocolResults) -> Sheet:
    columns = ("error in %", "rank", "clean", "ECE before", "ECE after", "to right", "to wrong", "collapses")
    columns += ("ms per image", "peak memory", "state per stream")
    best = _find_best(results, lambda score: score.error)
    least = _find_best(results, lambda score: score.ece_after)
    base = results.scores.get(BASELINE)
    rows = []
    for method, score in results.scores.items():
        parallel = f"({score.together} in parallel)" if score.together > 1 else ""
        entries = (
            _error(score, best),
            _number(score.rank, 2),
            _number(score.clean, more=_change(method, score, base)),
            _number(score.ece_before),
            _number(score.ece_after, best=_is_best(score.ece_after, least)),
            _number(score.to_right),
            _number(score.to_wrong),
            _collapses(score),
            Entry(f"{score.milliseconds:.3g}", score.milliseconds, parallel),
            _bytes(score.peak_bytes),
            _bytes(score.state_bytes),
        )
        rows.append((method_title(method), entries))
    return Sheet(results.title, "method", columns, tuple(rows), tuple(_state(results))).drop_empty()


def _make_swaps(results: ProtocolResults) -> Sheet:
    """Return how often each pair of methods changes order, of all repetitions."""
    methods = sorted(results.scores, key=lambda method: results.scores[method].error)
    rows = []
    for one in methods:
        pairs = [results.swaps(one, other) for other in methods]
        entries = [Entry(f"{swapped} of {count}", swapped) for swapped, count in pairs]
        entries[methods.index(one)] = Entry()
        rows.append((method_title(one), tuple(entries)))
    note = ("Counted", "repetitions in which two methods are in another order than by their mean errors")
    return Sheet(f"{results.title}: changes of order", "method", tuple(methods), tuple(rows), (note, *_state(results)))


def _find_best(results: ProtocolResults, value: Callable[[Score], float | None]) -> float | None:
    """Return the lowest value, as printed, if there are several."""
    found = [round(one, 1) for score in results.scores.values() if (one := value(score)) is not None]
    return min(found) if len(found) > 1 else None


def _is_best(value: float | None, best: float | None) -> bool:
    return value is not None and round(value, 1) == best


def _error(score: Score | None, best: float | None) -> Entry:
    if score is None:
        return Entry()
    more = f"±{score.half_width:.1f}" + (f" s {score.spread:.1f}" if score.spread is not None else "")
    return Entry(f"{score.error:.1f}", score.error, more, _is_best(score.error, best))


def _number(value: float | None, digits: int = 1, more: str = "", best: bool = False) -> Entry:
    return Entry() if value is None else Entry(f"{value:.{digits}f}", value, more, best)


def _change(method: str, score: Score, base: Score | None) -> str:
    if method == BASELINE or base is None or base.clean is None or score.clean is None:
        return ""
    return f"({difference(score.clean, base.clean)})"


def _collapses(score: Score) -> Entry:
    if score.collapses is None:
        return Entry()
    more = f"in {score.collapsed} of {score.streams}" if score.collapses and score.streams > 1 else ""
    return Entry(str(score.collapses), score.collapses, more)


def _bytes(count: int | None) -> Entry:
    if count is None:
        return Entry()
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return Entry(f"{size:.3g} {units[0]}", count)


def _state(results: ProtocolResults) -> list[tuple[str, str]]:
    """State how the numbers of a protocol were made."""
    entries = _find_methods(results.runs)
    own = {method: entries.get(method, {}) for method in results.scores}
    keys = sorted({key for score in results.scores.values() for key in score.errors})
    orders = ", ".join(str(order) for order in sorted({key.order for key in keys}))
    seeds = ", ".join(str(seed) for seed in sorted({key.seed for key in keys}))
    networks = len({key.network for key in keys})
    limit = results.runs[0].configuration.get("limit")
    counts = sorted({score.answers for score in results.scores.values()})
    answers = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    devices = dict.fromkeys(name for score in results.scores.values() for name in score.devices)
    batch = results.protocol.batch
    facts = [
        ("Answers", "after the update"),
        ("Images", f"{answers} answers per repetition{f', at most {limit:,} of a set' if limit else ''}"),
        ("Repetitions", f"{len(keys)}, seeds {seeds}" + (f", {networks} networks" if networks > 1 else "")),
        ("Order", f"{orders} (0: as given; others are permutations)" if results.protocol.order is not None else "–"),
        ("Resets", _describe_resets(results, own)),
        ("Batch", f"{batch} images per call" if batch else "by the size of the images"),
        ("Settings", _group({method: _describe_choice(method, results.runs, own) for method in own})),
        ("Source data", _group({method: _describe_source(entry) for method, entry in own.items()})),
        ("Device", ", ".join(devices) or "not recorded"),
    ]
    paced = {unit.method: unit.about["every"] for run in results.runs for unit in run.units if "every" in unit.about}
    if results.protocol.rate is not None:
        texts = {method: f"from one call in {every}" for method, every in paced.items() if method in own}
        facts.insert(6, ("Learning", _group(texts)))
    return [fact for fact in facts if fact[1] != "–"]


def _find_methods(runs: Sequence[Run]) -> dict[str, Mapping[str, Any]]:
    """Return the description of each method of some runs."""
    return {name: about for run in runs for name, about in run.configuration.get("methods", {}).items()}


def _settings_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    held = entry.get("settings")
    return held if isinstance(held, Mapping) else {}


def _method_name(entry: Mapping[str, Any]) -> str | None:
    """Return the name in `METHODS`; None for the network as trained, or if unknown."""
    if entry.get("mode") not in ("episodic", "online"):
        return None
    settings = _settings_of(entry)
    name = settings.get("method", "mirrored" if settings.get("mirrored") else "ttt")
    return name if isinstance(name, str) and name in METHODS else None


def _describe_resets(results: ProtocolResults, own: Mapping[str, Mapping[str, Any]]) -> str:
    texts = ["none within a stream" if results.protocol.joins else "before every set"]
    episodic = [method for method, entry in own.items() if entry.get("mode") == "episodic"]
    if episodic:
        texts.append(f"after every image ({', '.join(episodic)})")
    for method, entry in own.items():
        if isinstance(every := _settings_of(entry).get("resets"), int):
            texts.append(f"every {every:,} updates ({method})")
    return "; ".join(texts)


def _describe_choice(method: str, runs: Sequence[Run], own: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe how the settings of a method were chosen."""
    for run in runs:
        choice = run.about.get("choices", {}).get(method)
        if choice is not None:
            held = choice.get("sets")
            sets = f" on {', '.join(map(str, held))}" if held and isinstance(held, list | Mapping) else ""
            return f"{choice.get('rule', 'selected')}{sets}"
    entry = own[method]
    name, settings = _method_name(entry), _settings_of(entry)
    if name is None:
        return "none" if entry.get("mode") == "fixed" else "not recorded"
    usual = METHODS[name].make_settings(entry["mode"], {}).describe()
    changed = {key: value for key, value in settings.items() if key in _COMPARED and value != usual.get(key)}
    if "resets" in usual and "resets" not in settings:
        changed["resets"] = "never"
    if not changed:
        return "not selected: the papers' settings"
    return "not selected: the papers' settings but for " + ", ".join(f"{key} {value}" for key, value in changed.items())


def _describe_source(entry: Mapping[str, Any]) -> str:
    name = _method_name(entry)
    needs = () if name is None else METHODS[name].needs
    return " and ".join(_NEEDS[need] for need in needs if need in _NEEDS) or "none"


def _group(texts: Mapping[str, str]) -> str:
    """Join the texts of methods; those of several methods once."""
    groups: dict[str, list[str]] = {}
    for method, text in texts.items():
        groups.setdefault(text, []).append(method)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{text} ({', '.join(methods)})" for text, methods in groups.items())
