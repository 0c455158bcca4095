"""`testtime methods`."""

from __future__ import annotations

import json

from command_line import Run

from testtime.adaptation.methods import METHODS


def test_every_method_is_listed_with_what_it_needs(run: Run) -> None:
    code, out, _ = run("methods")
    assert code == 0
    *lines, last = out.splitlines()[1:]
    assert "auto" in last
    for (name, method), line, paper in zip(METHODS.items(), lines[::2], lines[1::2], strict=True):
        assert line.split()[:2] == [name, method.mode]
        assert all(need in line for need in method.needs)
        assert line.endswith(method.summary)
        assert paper.strip() == method.paper


def test_the_list_as_json(run: Run) -> None:
    code, out, _ = run("methods", "--json")
    assert code == 0
    found = {one["name"]: one for one in json.loads(out)}
    assert found.keys() == METHODS.keys()
    assert all(found[name]["needs"] == list(method.needs) for name, method in METHODS.items())
    assert all(found[name]["paper"] == method.paper for name, method in METHODS.items())
