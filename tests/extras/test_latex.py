"""The LaTeX tables, compiled."""

from __future__ import annotations

import subprocess
from pathlib import Path

from report_runs import make_benchmark, make_columns, make_run
from testtime.report import collect
from testtime.report.run_tables import latex


def test_the_tables_compile(tmp_path: Path) -> None:
    methods = ("plain", "fixed", "episodic", "online", "uda", "alp")
    run = make_benchmark(tmp_path / "run", 20, "cifar10", methods=methods, seeds=(0, 1))
    odd = make_run(tmp_path / "odd", {("below-20%", "my_set & 50% <b>|x", 0): make_columns([True, False])})
    tables = "\n".join(latex(collect([one]), paper=True) for one in (run, odd))
    packages = r"\usepackage{booktabs}\usepackage{graphicx}"
    document = rf"\documentclass[twocolumn]{{article}}{packages}\begin{{document}}" + f"\n{tables}\n\\end{{document}}\n"
    (tmp_path / "tables.tex").write_text(document, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "tables.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout
