"""Plain tables as Markdown, LaTeX with booktabs, CSV, and for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from testtime.report.run_tables import escape_latex, escape_markdown, format_line
from testtime.storage import printable

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from rich.text import Text

CSV_FIELDS = ("table", "row", "column", "value", "text")
_GAP = 2  # between the columns of a terminal


class Entry(NamedTuple):
    """A cell.

    Attributes:
        text: What is shown; empty if there is nothing.
        value: The number, for sorting and CSV.
        more: Shown less prominently after the text.
        best: Whether to emphasise it.
    """

    text: str = ""
    value: float | None = None
    more: str = ""
    best: bool = False

    @property
    def whole(self) -> str:
        """Everything that is shown."""
        return f"{self.text} {self.more}".strip()


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: Its title.
        corner: The heading of the rows.
        columns: The headings.
        rows: The title and entries of each row.
        notes: What the numbers are, each a name and a text.
    """

    title: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]
    notes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for title, entries in self.rows:
            if len(entries) != len(self.columns):
                raise ValueError(f"`rows` must have {len(self.columns)} entries, got {len(entries)} for {title}.")

    def drop_empty(self) -> Sheet:
        """Return it without the columns that have no entry."""
        kept = [k for k in range(len(self.columns)) if any(entries[k].text for _, entries in self.rows)]
        rows = tuple((title, tuple(entries[k] for k in kept)) for title, entries in self.rows)
        return Sheet(self.title, self.corner, tuple(self.columns[k] for k in kept), rows, self.notes)


def format_markdown(sheets: Sequence[Sheet], words: Sequence[str] = ()) -> str:
    """Format tables as Markdown, followed by some sentences."""
    parts: list[str] = []
    for sheet in sheets:
        lines = [
            f"### {escape_markdown(sheet.title)}",
            "",
            format_line([escape_markdown(text) for text in (sheet.corner, *sheet.columns)]),
            "|---|" + "---:|" * len(sheet.columns),
        ]
        for title, entries in sheet.rows:
            texts = [escape_markdown(entry.text) for entry in entries]
            marked = [f"**{text}**" if entry.best else text for text, entry in zip(texts, entries, strict=True)]
            cells = [f"{text} {escape_markdown(e.more)}".strip() for text, e in zip(marked, entries, strict=True)]
            lines.append(format_line([escape_markdown(title), *cells]))
        lines += ["", *(f"- {escape_markdown(f'{name}: {text}')}" for name, text in sheet.notes)]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join([*parts, *(["\n".join(f"- {escape_markdown(line)}" for line in words)] if words else [])]) + "\n"


def format_latex(sheets: Sequence[Sheet], words: Sequence[str] = ()) -> str:
    """Format tables as LaTeX floats, which need the packages booktabs and graphicx; sentences go into the captions."""
    parts = ["% needs \\usepackage{booktabs} and \\usepackage{graphicx}"]
    for sheet in sheets:
        lines = [
            r"\begin{table*}[t]",
            r"\centering\footnotesize\setlength\tabcolsep{3.5pt}",
            r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{l{'r' * len(sheet.columns)}}}",
            r"\toprule",
            " & ".join(escape_latex(text) for text in (sheet.corner, *sheet.columns)) + r" \\",
            r"\midrule",
        ]
        for title, entries in sheet.rows:
            cells = [escape_latex(title)]
            for entry in entries:
                text = escape_latex(entry.text)
                text = rf"\textbf{{{text}}}" if entry.best else text
                more = rf" {{\scriptsize {escape_latex(entry.more)}}}" if entry.more else ""
                cells.append(text + more)
            lines.append(" & ".join(cells) + r" \\")
        notes = [f"{name}: {text}." for name, text in sheet.notes]
        caption = escape_latex(" ".join([f"{sheet.title}.", *notes, *words]))
        lines += [r"\bottomrule", r"\end{tabular}}", rf"\caption{{{caption}}}", r"\end{table*}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def format_csv(sheets: Sequence[Sheet]) -> str:
    """Format every entry of every table as one CSV line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for sheet in sheets:
        for title, entries in sheet.rows:
            for column, entry in zip(sheet.columns, entries, strict=True):
                if entry.text:
                    value = None if entry.value is None else f"{entry.value:.6g}"
                    writer.writerow([sheet.title, title, column, value, entry.whole])
    return out.getvalue()


def drop_repeated_notes(sheets: Sequence[Sheet]) -> list[list[tuple[str, str]]]:
    """Return the notes of tables that are shown together, without those of the previous one or named like a table."""
    titles = {sheet.title for sheet in sheets}
    found: list[list[tuple[str, str]]] = []
    previous: tuple[tuple[str, str], ...] = ()
    for sheet in sheets:
        found.append([note for note in sheet.notes if note not in previous and note[0] not in titles])
        previous = sheet.notes
    return found


def format_terminal(sheets: Sequence[Sheet], width: int = 80) -> list[RichTable | Text]:
    """Format tables for a terminal, split where the columns do not fit the width, each followed by its notes."""
    from rich.text import Text

    made: list[RichTable | Text] = []
    for sheet, notes in zip(sheets, drop_repeated_notes(sheets), strict=True):
        first = _GAP + max(len(printable(text)) for text in (sheet.corner, *(title for title, _ in sheet.rows)))
        part: list[int] = []
        used = first
        for number, column in enumerate(sheet.columns):
            size = _GAP + max(len(text) for text in (column, *(entries[number].whole for _, entries in sheet.rows)))
            if part and used + size > width:
                made.append(_make_table(sheet, part))
                part, used = [], first
            part.append(number)
            used += size
        made.append(_make_table(sheet, part))
        if notes:
            made.append(Text(printable("; ".join(f"{name}: {text}" for name, text in notes)), style="dim"))
    return made


def _make_table(sheet: Sheet, columns: Sequence[int]) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    # `Text`, because rich interprets brackets in strings as markup.
    shown = RichTable(
        title=Text(printable(sheet.title)), title_justify="left", title_style="bold", header_style="", box=None
    )
    shown.add_column(Text(printable(sheet.corner)), no_wrap=True)
    for number in columns:
        shown.add_column(Text(printable(sheet.columns[number])), justify="right", no_wrap=True)
    for title, entries in sheet.rows:
        cells = [Text(printable(title))]
        for number in columns:
            entry = entries[number]
            cell = Text(printable(entry.text or "–"), style="bold" if entry.best else "")
            cells.append(cell.append(f" {printable(entry.more)}", style="dim") if entry.more else cell)
        shown.add_row(*cells)
    return shown
