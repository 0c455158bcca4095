"""What the tests of the command line share: a command run in this process, a trained network, pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import TINY, Run
from PIL import Image

from testtime import cli, data


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network trained for one epoch by the command line."""
    folder = tmp_path_factory.mktemp("run")
    assert cli.run([*TINY, "--epochs", "1", "--out", str(folder)]) == 0
    return folder / "network.safetensors"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, image in enumerate(data.open("digits").images(slice(3))):
        Image.fromarray(image[0].numpy()).resize((40, 30)).convert("RGB").save(folder / f"{number}.png")
    return folder
