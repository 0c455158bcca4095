"""The code blocks of the documents, and how a page is run: in order, in one namespace, in a folder of its own.

Every Python block is run. A comment directly above a block says how, if not as usual:

    <!-- run -->              a shell block is run too, not only parsed
    <!-- run: slow -->        the page takes longer: it is run by `make test-extras`
    <!-- run: background -->  a service, which is started and stopped after the page
    <!-- run: models -->      needs timm: run by tests/extras/test_documented_models.py
    <!-- run: tests/… -->     run by that test, which needs data or changes sizes
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from testtime import METHODS, cli

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
_BLOCK = re.compile(
    r"(?:^<!-- run(?P<mark>(?:: [^>]*?)?) -->\n)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
_PORT = "8000"  # of the documents' services; another one is used here


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page: The document.
        line: Its first line there.
        language: What stands behind the fence.
        mark: What the comment above it says; "" for a plain `<!-- run -->`, None without one.
        code: Its text.
    """

    page: Path
    line: int
    language: str
    mark: str | None
    code: str

    @property
    def is_elsewhere(self) -> bool:
        """Whether another test runs it."""
        return self.mark == "models" or (self.mark or "").startswith("tests/")

    def commands(self) -> list[list[str]]:
        """The commands of a shell block, as lists of words."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]

    def execute(self, names: dict[str, Any]) -> None:
        """Run a Python block; line numbers in a traceback are those of the page."""
        exec(compile("\n" * self.line + self.code, str(self.page), "exec"), names)


def read_blocks(page: Path) -> list[Block]:
    """The code blocks of a document, in order."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for found in _BLOCK.finditer(text):
        mark = None if found["mark"] is None else found["mark"].removeprefix(": ")
        line = text.count("\n", 0, found.start("code"))
        blocks.append(Block(page, line, found["language"], mark, found["code"]))
    return blocks


def is_run(page: Path) -> bool:
    """Whether a document has anything to run."""
    return any(_runs(block) for block in read_blocks(page))


def is_slow(page: Path) -> bool:
    """Whether a document takes longer than `make test` has time for."""
    return any(block.mark in ("slow", "background") for block in read_blocks(page))


def run_page(page: Path) -> dict[str, Any]:
    """Run a document in the current folder; returns the names its Python defined, and forgets methods that it added."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.ExitStack() as services, mock.patch.dict(METHODS):
        port = _find_port()
        for block in filter(_runs, read_blocks(page)):
            block = Block(block.page, block.line, block.language, block.mark, block.code.replace(_PORT, port))
            if block.language == "python":
                block.execute(names)
            elif block.mark == "background":
                for words in block.commands():
                    services.enter_context(_serve(words[1:], port))
            else:
                for words in block.commands():
                    assert words[0] == "testtime", words
                    assert cli.run(words[1:]) == 0, words
    return names


def _runs(block: Block) -> bool:
    if block.language == "python":
        return not block.is_elsewhere
    return block.language == "sh" and block.mark in ("", "slow", "background")


def _find_port() -> str:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return str(made.getsockname()[1])


@contextlib.contextmanager
def _serve(arguments: list[str], port: str) -> Iterator[None]:
    """Run a service in a process of its own until it is no longer needed; it must end cleanly."""
    process = subprocess.Popen([sys.executable, "-m", "testtime", *arguments, "--port", port])
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5)
                break
            assert process.poll() is None
            time.sleep(0.1)
        yield
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
