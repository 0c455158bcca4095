"""Tables of runs as Markdown, LaTeX with booktabs, CSV, and for the terminal.

In Markdown and LaTeX, methods are rows and sets are columns, as in the paper; below each method are the half width of
its 95% interval and, with `paper`, the paper's values and the differences. In the terminal, sets are rows, because
seventeen columns do not fit. CSV has one line per cell with all its statistics.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from testtime.report.paper import PAPER_NAMES, Measure
from testtime.report.results import (
    BASELINE,
    FEW,
    MEAN,
    SIGNIFICANT,
    Cell,
    Results,
    Table,
    column_title,
    method_title,
)
from testtime.storage import printable

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

CSV_FIELDS = (
    "table",
    "family",
    "level",
    "method",
    "paper_method",
    "column",
    "measure",
    "percent",
    "low",
    "high",
    "spread",
    "images",
    "repetitions",
    "p_value",
    "to_right",
    "to_wrong",
    "paper",
    "difference",
)


def explain(results: Results, measure: Measure) -> list[str]:
    """Explain the numbers and symbols of the tables, one sentence each."""
    better = "lower" if measure == "error" else "higher"
    lines = [
        f"{'Wrong' if measure == 'error' else 'Right'} predictions in percent, {better} is better; the best of a set "
        "is in bold.",
        f"± is half the width of the 95% interval: bootstrap over images, or Wilson's for fewer than {FEW} errors.",
    ]
    if any(len(entries) > 1 for entries in results.sources.values()):
        lines.append("Repetitions (seeds, runs) are averaged image by image; s is their standard deviation.")
    if BASELINE in results.methods and len(results.methods) > 1:
        lines.append(
            f"* better and † worse than {BASELINE} on the same images: exact sign test on the images that flip "
            f"(McNemar), p < {SIGNIFICANT} after Holm's correction within a table."
        )
    return lines


def has_paper(table: Table) -> bool:
    """Whether the paper has numbers for a table."""
    cells = [(method, column) for method in table.rows for column in table.columns]
    return any(table.paper_value(method, column, "error") is not None for method, column in cells)


def difference(value: float, paper: float) -> str:
    """Format our value minus the paper's, both as printed, with its sign."""
    change = round(round(value, 1) - round(paper, 1), 1)
    return f"{change:+.1f}".replace("-", "−") if change else "0.0"


def _rows(table: Table, measure: Measure, paper: bool) -> list[tuple[str, str, list[str]]]:
    """Return kind, heading and cells of each line of a table; cells are plain text, possibly empty."""
    lines: list[tuple[str, str, list[str]]] = []
    for method, row in table.rows.items():
        cells = [row.get(column) for column in table.columns]
        lines.append((method, method_title(method), [_number(cell, measure) for cell in cells]))
        lines.append(("interval", "± 95%", [f"{cell.half_width:.1f}" if cell else "" for cell in cells]))
        if any(cell and cell.spread is not None for cell in cells):
            spreads = [f"{cell.spread:.1f}" if cell and cell.spread is not None else "" for cell in cells]
            lines.append(("spread", "s", spreads))
        known = [table.paper_value(method, column, measure) for column in table.columns]
        if paper and any(value is not None for value in known):
            lines.append(("paper", "paper", [f"{value:.1f}" if value is not None else "" for value in known]))
            changes = [
                difference(cell.value(measure), value) if cell and value is not None else ""
                for cell, value in zip(cells, known, strict=True)
            ]
            lines.append(("difference", "difference", changes))
    return lines


def _number(cell: Cell | None, measure: Measure) -> str:
    return f"{cell.value(measure):.1f}{cell.significance}" if cell else ""


def markdown(results: Results, measure: Measure = "error", paper: bool = False) -> str:
    """Format all tables as Markdown, with an explanation of the symbols."""
    parts: list[str] = []
    for table in results.tables:
        heading = [measure + " in %", *map(escape_markdown, table.short_titles())]
        lines = [
            f"### {escape_markdown(table.title)}",
            "",
            format_line(heading),
            "|---|" + "---:|" * len(table.columns),
        ]
        for kind, title, cells in _rows(table, measure, paper):
            texts = [escape_markdown(text) for text in cells]
            if kind in table.rows:
                texts = [
                    f"**{text}**" if text and table.is_best(kind, column) else text
                    for text, column in zip(texts, table.columns, strict=True)
                ]
            lines.append(format_line([escape_markdown(title), *texts]))
        parts.append("\n".join(lines))
    words = [*explain(results, measure), *results.notes]
    return "\n\n".join([*parts, "\n".join(f"- {escape_markdown(line)}" for line in words)]) + "\n"


def format_line(cells: Sequence[str]) -> str:
    """Format a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def escape_markdown(text: str) -> str:
    """Escape cell separators, emphasis, links, formulas and HTML."""
    text = html.escape(printable(text), quote=False)
    for sign in "\\|*_`[]$":
        text = text.replace(sign, "\\" + sign)
    return text


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "*": r"$^{*}$",
    "†": r"$^{\dagger}$",
    "±": r"$\pm$",
    "−": "$-$",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    "[": "{[}",
    "]": "{]}",
    "→": r"$\to$",
}


def latex(results: Results, measure: Measure = "error", paper: bool = False) -> str:
    """Format all tables as LaTeX floats, which need the packages booktabs and graphicx."""
    parts = ["% needs \\usepackage{booktabs} and \\usepackage{graphicx}"]
    for table in results.tables:
        columns = "l" + "r" * len(table.columns)
        if table.columns[-1] == MEAN:
            columns = columns[:-1] + "|r"
        lines = [
            r"\begin{table*}[t]",
            r"\centering\footnotesize\setlength\tabcolsep{3.5pt}",
            r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            " & ".join(["", *map(escape_latex, table.short_titles())]) + r" \\",
            r"\midrule",
        ]
        for index, (kind, title, cells) in enumerate(_rows(table, measure, paper)):
            texts = [escape_latex(text) for text in cells]
            if kind in table.rows:
                if index and paper:
                    lines.append(r"\addlinespace")
                texts = [
                    rf"\textbf{{{text}}}" if text and table.is_best(kind, column) else text
                    for text, column in zip(texts, table.columns, strict=True)
                ]
                lines.append(" & ".join([escape_latex(title), *texts]) + r" \\")
            else:
                quiet = [rf"{{\scriptsize {text}}}" if text else "" for text in (escape_latex(title), *texts)]
                lines.append(" & ".join(quiet) + r" \\")
        caption = " ".join([f"{table.title}: {measure} in %.", *explain(results, measure)])
        lines += [r"\bottomrule", r"\end{tabular}}", rf"\caption{{{escape_latex(caption)}}}", r"\end{table*}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def escape_latex(text: str) -> str:
    """Escape a text for LaTeX."""
    return "".join(_LATEX.get(sign, sign) for sign in printable(text))


def as_csv(results: Results, measure: Measure = "error") -> str:
    """Format every cell of every table as one CSV line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for table in results.tables:
        for method, row in table.rows.items():
            for column in table.columns:
                cell = row.get(column)
                if cell is None:
                    continue
                low, high = cell.ends(measure)
                value, known = cell.value(measure), table.paper_value(method, column, measure)
                writer.writerow(
                    [
                        table.title,
                        table.family,
                        table.level,
                        method,
                        PAPER_NAMES.get(method),
                        column,
                        measure,
                        f"{value:.4f}",
                        f"{low:.4f}",
                        f"{high:.4f}",
                        None if cell.spread is None else f"{cell.spread:.4f}",
                        cell.images,
                        cell.repetitions,
                        None if cell.p_value is None else f"{cell.p_value:.3g}",
                        cell.to_right,
                        cell.to_wrong,
                        None if known is None else f"{known:.4g}",
                        None if known is None else f"{value - known:.4f}",
                    ]
                )
    return out.getvalue()


def terminal(results: Results, measure: Measure = "error", paper: bool = False, width: int = 80) -> list[RichTable]:
    """Format the tables for a terminal, sets as rows; split if the methods do not fit the width."""
    made: list[RichTable] = []
    for table in results.tables:
        compared = {
            method
            for method in table.rows
            if paper and any(table.paper_value(method, column, measure) is not None for column in table.columns)
        }
        methods = list(table.rows)
        repeated = any(cell.spread is not None for row in table.rows.values() for cell in row.values())
        together = max(1, (width - 20) // ((24 if compared else 15) + (6 if repeated else 0)))
        made += [
            _terminal_table(table, methods[start : start + together], compared, measure)
            for start in range(0, len(methods), together)
        ]
    return made


def _terminal_table(table: Table, methods: Sequence[str], compared: set[str], measure: Measure) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    # `Text`, because rich interprets brackets in strings as markup.
    shown = RichTable(
        title=Text(printable(table.title)), title_justify="left", title_style="bold", header_style="", box=None
    )
    shown.add_column(f"{measure} in %", no_wrap=True)
    for method in methods:
        shown.add_column(Text(method_title(method)), justify="right")
        if method in compared:
            shown.add_column("paper", justify="right", style="dim", no_wrap=True)
    for column in table.columns:
        cells: list[Text] = [Text(column_title(column), style="bold" if column == MEAN else "")]
        for method in methods:
            cell = table.rows[method].get(column)
            cells.append(_terminal_cell(cell, measure, table.is_best(method, column)) if cell else Text("–"))
            if method in compared:
                known = table.paper_value(method, column, measure)
                change = f" {difference(cell.value(measure), known):>5}" if cell and known is not None else ""
                cells.append(Text(f"{known:.1f}{change}" if known is not None else ""))
        shown.add_row(*cells)
    return shown


def _terminal_cell(cell: Cell, measure: Measure, best: bool) -> Text:
    from rich.text import Text

    text = Text(f"{cell.value(measure):.1f}", style="bold" if best else "")
    text.append(cell.significance or " ")
    text.append(f" ±{cell.half_width:<4.1f}", style="dim")
    return text if cell.spread is None else text.append(f" s {cell.spread:.1f}", style="dim")
