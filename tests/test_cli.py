"""The command line, run for real: results, exit codes, one-line errors, killed and distributed trainings."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from testtime import cli, data
from testtime.learner import PRESETS
from testtime.networks import resnet26
from testtime.predict import (
    Answer,
    default_network,
    fit_for,
    predict,
    prepare_adapter,
    summarise,
    tell,
    tell_summary,
)
from testtime.runs.methods import USUAL

TINY = [
    "train",
    "--data",
    "digits",
    "--depth",
    "8",
    "--limit",
    "48",
    "--batch",
    "16",
    "--epochs",
    "3",
    "--device",
    "cpu",
]


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | variables
    command = [sys.executable, "-m", "testtime", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=environment
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no checkpoint within a minute"
        time.sleep(0.01)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
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


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in ("train", "eval", "report", "predict", "info", "diagnose", "correlate", "corrupt", "data", "demo"):
        assert command in out


@pytest.mark.parametrize("command", ["train", "predict", "info"])
def test_help_shows_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"testtime {command} " in out
    assert "Example" in out


def test_without_typer_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; import testtime.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: the command line needs typer: pip install 'testtime[cli]'\n"


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert run(capsys, "--version") == (0, f"testtime {version('testtime')}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["--nonsense"],
        ["train", "--out", "x", "--method", "magic"],
        ["train", "--out", "x", "--epochs", "0"],
        ["train", "--out", "x", "--epochs", "many"],
        ["train", "--out", "x", "--lr", "-1"],
        ["train", "--out", "x", "--depth", "9"],
        ["train", "--out", "x", "--data", "no-such-data"],
        ["train", "--out", "x", "--method", "uda"],
        ["train", "--out", "x", "--target", "digits"],
        ["train", "--out", "x", "--method", "uda", "--target", "no-such-set"],
        ["train", "--out", "x", "--seeds", "0-1", "--seed", "3"],
        ["train", "--out", "x", "--seeds", "0-99999999999"],
        ["train", "--out", "x", "--seeds", "9" * 5000],
        ["train", "--out", "x", "--start", "cifar10-resnet26-gn-joint"],
        ["train", "--out", "x", "--device", "abacus"],
        ["predict"],
        ["predict", "x.png", "--threshold", "2"],
        ["predict", "x.png", "--preset", "fastest"],
        ["info"],
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert not list(tmp_path.iterdir())


def test_failures_are_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, network: Path, pictures: Path
) -> None:
    fake = tmp_path / "fake.png"
    fake.write_text("I am a text\nof two lines")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(network.read_bytes()[:-9])
    for arguments in (
        ["predict", fake, "-c", network],
        ["predict", tmp_path / "missing.png", "-c", network],
        ["predict", tmp_path / "empty", "-c", network],
        ["predict", pictures, "-c", cut],
        ["predict", pictures, "-c", tmp_path / "missing"],
        ["info", cut],
        ["info", fake],
        ["train", "--data", "cifar10", "--data-root", tmp_path, "--out", tmp_path / "run"],
        [*TINY, "--out", tmp_path / "file"],
        [*TINY, "--lr", "1e30", "--out", tmp_path / "burnt"],
    ):
        code, out, err = run(capsys, *arguments)
        assert code == 1, arguments
        assert out == ""
        assert re.fullmatch(r"error: [^\n]+\n", err), err
    assert run(capsys, "predict", fake, "-c", network)[2] == f"error: {fake}: not a picture in a known format\n"


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (RuntimeError("CUDA out of memory.\nTried to allocate"), 1, "error: CUDA out of memory. Tried to allocate\n"),
        (MemoryError(), 1, "error: MemoryError\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_whatever_goes_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failure: BaseException, code: int, line: str
) -> None:
    def fail(source: str) -> None:
        raise failure

    monkeypatch.setattr(sys.modules["testtime.predict"], "summarise", fail)
    assert run(capsys, "info", "x") == (code, "", line)
    if isinstance(failure, Exception):
        monkeypatch.setenv("TESTTIME_DEBUG", "1")
        with pytest.raises(type(failure)):
            cli.run(["info", "x"])


def test_without_a_shipped_network_predict_says_how_to_get_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pictures: Path
) -> None:
    monkeypatch.setattr("testtime.networks.ynet.shipped", lambda: ())
    code, _, err = run(capsys, "predict", pictures)
    assert code == 1
    assert "testtime train" in err


def test_predict_uses_the_shipped_network_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "testtime.networks.ynet.shipped", lambda: ("a-digits", "cifar10-resnet26-bn-joint", "cifar10-resnet26-gn-joint")
    )
    assert default_network() == "cifar10-resnet26-gn-joint"
    monkeypatch.setattr("testtime.networks.ynet.shipped", lambda: ("a-digits", "b-faces"))
    assert default_network() == "a-digits"


def test_progress_in_a_pipe_is_plain_lines_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    for every, expected in ((0.0, ["read  0/3", "read  1/3", "read  2/3", "read  3/3"]), (1000.0, ["read  3/3"])):
        with cli.progress("read", every) as report:
            for done in range(4):
                report(done, 3, "words")
        lines = capsys.readouterr().err.splitlines()
        assert [line[:9] for line in lines] == expected
        assert all(line.endswith("  words") for line in lines)


def test_progress_measures_anew_when_something_else_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(float(second) for second in range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with cli.progress("work", every=0) as report:
        for done, total in ((0, 500), (500, 500), (0, 40), (10, 40)):
            report(done, total)
    lines = capsys.readouterr().err.splitlines()
    assert "left" not in lines[2]
    assert lines[3] == "work  10/40  0.33/s  1:30 left"  # the clock is asked three times for a line: 10 in 30 s


def test_progress_in_a_terminal_is_a_live_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "CI", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with cli.progress("read") as report:
        report(0, 0, "wait")
        report(1, 3)
        report(3, 3, "words")
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "\x1b" in terminal.getvalue()
    assert re.search(r"read .*3/3 .* words", written)


# Texts from outside --------------------------------------------------------------------------------------------------

EVIL = "a\nerror: b\x1b[31m\u202e\ud800[/red]"


def assert_tame(text: str) -> None:
    """Nothing in it steers a terminal or begins a line of its own."""
    assert all(line.isprintable() for line in text.split("\n"))
    assert not re.search(r"^error: b", text, re.MULTILINE)


def test_what_goes_wrong_is_printable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str) -> None:
        raise ValueError(EVIL)

    monkeypatch.setattr(sys.modules["testtime.predict"], "summarise", fail)
    for arguments in (["info", "x"], ["info", EVIL, EVIL], [EVIL], ["predict", "x", "--device", EVIL]):
        code, out, err = run(capsys, *arguments)
        assert code in (1, 2)
        assert out == ""
        assert err.count("\n") == 1
        assert_tame(err)


def test_echo_keeps_columns_and_begins_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    from testtime.cli.console import echo

    echo("a   b", "  c\td\x1b[31m\r\u2028e\nerror: f")
    echo("for the others", err=True)
    out, err = capsys.readouterr()
    assert out == "a   b\n  c d\\x1b[31m e error: f\n"
    assert err == "for the others\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_printable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.setenv("COLUMNS", "200")
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    with cli.progress(EVIL, every=0) as report:
        for done in range(3):
            report(done, 2, EVIL)
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n")
    assert "[31m" in written  # shown, and not obeyed
    assert "[/red]" in written
    assert_tame(written)


def test_answers_are_printable() -> None:
    answer = Answer(EVIL, EVIL, 0.5, EVIL, 0.5, 0.0, 0.5, 1.0, 1.0, True, False)
    assert "\n" not in tell(answer)
    assert_tame(tell(answer))


def test_summaries_of_networks_are_printable(network: Path) -> None:
    summary = summarise(network)
    plain = tell_summary(summary).count("\n")
    summary |= {"file": EVIL, "classes": [EVIL], "task": EVIL, "architecture": {"name": EVIL, EVIL: EVIL}}
    summary["augment"] = {"name": EVIL, EVIL: EVIL}
    summary["training"]["recipe"] = {"method": EVIL, "batch": EVIL}
    summary["training"]["data"] |= {"name": EVIL}
    summary["training"]["hardware"] = {"device": EVIL}
    assert tell_summary(summary).count("\n") == plain
    assert_tame(tell_summary(summary))


def test_the_command_of_a_run_is_kept_whatever_it_was(
    network: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a\udc80  b\n"
    code, said, err = run(
        capsys, "eval", "-c", network, "--data", "digits", "--methods", "fixed", "--limit", "2", "--out", out
    )
    assert code == 0, err
    assert_tame(said + err)
    assert "  b" in json.loads((out / "run.json").read_text())["command"]
    assert run(capsys, "report", out, "--out", tmp_path / "report")[0] == 0
    assert (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


# Predict and info ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["episodic", "online"])
def test_predict_prints_what_the_adapter_says(
    capsys: pytest.CaptureFixture[str], network: Path, pictures: Path, mode: str
) -> None:
    from testtime.adapters import Episodic, Online
    from testtime.networks import load

    options = [
        "--steps",
        "2",
        "--lr",
        "0.01",
        "--copies",
        "8",
        "--seed",
        "3",
        *(["--online"] if mode == "online" else []),
    ]
    code, out, err = run(capsys, "predict", pictures, "-c", network, "--device", "cpu", "--json", *options)
    assert code == 0
    assert re.fullmatch(r"pictures  3/3[^\n]*\n", err)
    document = json.loads(out)
    assert document["network"] == str(network)
    assert document["unread"] == []

    net = load(network)
    kind = Online if mode == "online" else Episodic
    adapter = kind(net, steps=2, lr=0.01, copies=8, seed=3)
    for number, answer in enumerate(document["answers"]):
        file = pictures / f"{number}.png"
        expected = adapter.predict(fit_for(net.card, file)[None])
        before, after = expected.logits_before.softmax(1)[0], expected.logits.softmax(1)[0]
        assert answer["image"] == str(file)
        assert answer["before"] == str(int(before.argmax()))
        assert answer["after"] == str(int(after.argmax()))
        assert answer["before_probability"] == pytest.approx(float(before.max()))
        assert answer["after_probability"] == pytest.approx(float(after.max()))
        assert answer["change"] == pytest.approx(float((after - before)[after.argmax()]))
        assert answer["adapted"] is True
    assert len(document["answers"]) == 3


@pytest.mark.parametrize("preset", PRESETS)
def test_predict_with_a_preset_learns_online(
    capsys: pytest.CaptureFixture[str], network: Path, pictures: Path, preset: Any
) -> None:
    from testtime.adapters import Online
    from testtime.networks import load

    code, out, _ = run(
        capsys, "predict", pictures, "-c", network, "--device", "cpu", "--json", "--preset", preset, "--copies", "8"
    )
    assert code == 0
    net = load(network)
    adapter = Online(net, preset=preset, copies=8)
    shown = torch.stack([fit_for(net.card, pictures / f"{number}.png") for number in range(3)])
    expected = adapter.predict(shown).logits.softmax(1).amax(1)
    found = [answer["after_probability"] for answer in json.loads(out)["answers"]]
    assert found == pytest.approx(expected.tolist(), rel=1e-6)


def test_help_names_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    predict, evaluate = (
        " ".join(run(capsys, command, "--help")[1].replace("│", " ").split()) for command in ("predict", "eval")
    )
    assert "|".join(PRESETS) in predict
    assert "testtime predict holiday/ --preset best" in predict
    assert f"Of {', '.join(USUAL)}, a network's name" in evaluate
    assert "best is online with the preset of that name" in evaluate


def test_predict_prints_one_line_a_picture(capsys: pytest.CaptureFixture[str], network: Path, pictures: Path) -> None:
    code, out, _ = run(capsys, "predict", pictures / "1.png", pictures / "0.png", "-c", network, "--threshold", "0")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [str(pictures / "1.png"), str(pictures / "0.png")]
    for line in lines:
        assert re.search(r"\d \d+\.\d% → \d \d+\.\d%  \+0\.0%  \(not adapted\)$", line)


def test_what_a_pipe_cannot_hold_is_replaced(network: Path, pictures: Path) -> None:
    arguments = ["predict", str(pictures / "0.png"), "-c", str(network), "--steps", "0"]
    process = start(*arguments, PYTHONIOENCODING="cp1252")
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    assert re.search(r"% \? \d \d+\.\d%  \+0\.0%  \(not adapted\)$", out.rstrip())


@pytest.mark.parametrize("together", [1, 2, 16])
def test_a_picture_that_cannot_be_read_costs_the_others_nothing(
    capsys: pytest.CaptureFixture[str], network: Path, pictures: Path, tmp_path: Path, together: int
) -> None:
    from testtime.networks import load

    bad = tmp_path / "bad.png"
    bad.write_bytes((pictures / "0.png").read_bytes()[:40])
    files = [pictures / "0.png", bad, pictures / "1.png", pictures / "1.png"]
    code, out, err = run(capsys, "predict", *files, "-c", network, "--copies", "2", "--json")
    assert code == 1
    fault = f"{bad}: not a picture in a known format"
    assert f"error: {fault}\n" in err
    document = json.loads(out)
    assert document["unread"] == [fault]
    assert [answer["image"] for answer in document["answers"]] == [str(file) for file in files if file != bad]
    code, told, err = run(capsys, "predict", *files, "-c", network, "--copies", "2")
    assert (code, len(told.splitlines()), err) == (1, 3, f"error: {fault}\n")

    net, faults = load(network), []
    adapter = prepare_adapter(net, copies=2)
    answers = list(predict(adapter, net.card, files, together, faults.append))
    assert [answer.image for answer in answers] == [str(file) for file in files if file != bad]
    assert [str(one) for one in faults] == [fault]
    with pytest.raises(data.DataError, match=r"bad\.png"):
        list(predict(adapter, net.card, files, together))


def test_a_picture_is_cut_to_its_central_square_and_made_gray(tmp_path: Path) -> None:

    wide = Image.new("RGB", (48, 16), "red")
    wide.paste((0, 255, 0), (16, 0, 32, 16))  # the central square is green
    wide.save(tmp_path / "wide.png")
    colour = fit_for(resnet26(2, depth=8, size=16).card, tmp_path / "wide.png")
    assert torch.equal(colour, torch.tensor([0, 255, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 16, 16))
    gray = fit_for(resnet26(2, depth=8, size=16, channels=1).card, tmp_path / "wide.png")
    assert torch.equal(gray, torch.full((1, 16, 16), 150, dtype=torch.uint8))  # 0.587 · 255


def test_info_counts_and_tells(capsys: pytest.CaptureFixture[str], network: Path) -> None:
    code, out, _ = run(capsys, "info", network, "--json")
    assert code == 0
    summary = json.loads(out)
    net = resnet26(10, depth=8, channels=1, size=16)
    counts = {
        part: sum(p.numel() for p in getattr(net, part).parameters()) for part in ("encoder", "classifier", "ssl")
    }
    assert summary["parameters"] == counts | {"total": sum(counts.values())}
    assert summary["classes"] == list("0123456789")
    assert summary["training"]["recipe"]["method"] == "joint"
    assert summary["training"]["epochs"] == 1
    code, out, _ = run(capsys, "info", network)
    assert code == 0
    for text in ("resnet26", f"{counts['encoder']:,}", "rotation", "joint, 1 epochs", "digits[48]", "mean 0.5"):
        assert text in out


@pytest.mark.parametrize(
    "record",
    [
        {"epochs": 3},
        {"epochs": "many"},
        {"epochs": [1]},
        {"epochs": [{"loss": "low", "test_error": []}], "configuration": 3, "seconds": "long", "hardware": "fast"},
        {"epochs": [{}], "configuration": {"recipe": [], "data": {"count": "all", "name": "\x1b[31m\nerror: x"}}},
    ],
)
def test_info_reads_odd_training_records(
    record: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    resnet26(depth=8, channels=1, size=8).describe(record=record).save(tmp_path / "net")
    assert cli.run(["info", str(tmp_path / "net")]) == 0
    output = capsys.readouterr()
    assert not output.err
    assert all(line.isprintable() and not line.startswith("error") for line in output.out.splitlines())


def test_info_reads_networks_that_only_their_owner_can_build(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from testtime.networks import YNet

    net = YNet(torch.nn.BatchNorm2d(3), torch.nn.Linear(5, 2), torch.nn.Linear(5, 4))
    net.save(tmp_path / "own.safetensors")
    code, out, _ = run(capsys, "info", tmp_path / "own.safetensors")
    assert code == 0
    assert "custom" in out
    assert "encoder 6, classifier 12, ssl 24" in out
    assert "no record" in out


# Training ------------------------------------------------------------------------------------------------------------


def test_training_shows_plain_progress_in_a_pipe_and_refuses_other_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, *TINY, "--out", tmp_path)
    assert code == 0
    assert out.startswith(f"{tmp_path / 'network.safetensors'}: epoch 3, loss ")
    assert re.fullmatch(r"train  9/9  .*epoch 3, loss [^\n]*\n", err)
    assert "\x1b" not in err
    code, _, err = run(capsys, *TINY, "--lr", "0.2", "--seed", "1", "--out", tmp_path)
    assert code == 1
    assert "recipe.lr: 0.1 there, 0.2 now" in err
    assert "recipe.seed: 0 there, 1 now" in err


def test_every_method_trains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ("plain", ["--weight-decay", "0.01"]), ("alp", ["--precision", "bf16"]), ("uda", ["--target", "digits"])
    for method, extra in given:
        code, _, err = run(
            capsys, *TINY, "--limit", "16", "--epochs", "1", "--method", method, *extra, "--out", tmp_path / method
        )
        assert code == 0, err
        record = json.loads((tmp_path / method / "record.json").read_text())
        recipe = record["configuration"]["recipe"]
        assert (recipe["method"], recipe["weight_decay"]) == (method, 0.01 if method == "plain" else 5e-4)


def test_a_killed_training_goes_on_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, "--limit", "128", "--epochs", "4"]
    process = start(*arguments, "--out", str(tmp_path / "killed"))
    try:
        wait_for(tmp_path / "killed" / "checkpoint.safetensors", process)
    finally:
        process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "network.safetensors").exists()
    for name in ("killed", "whole"):
        assert run(capsys, *arguments, "--out", tmp_path / name)[0] == 0
    killed, whole = (load_file(tmp_path / name / "network.safetensors") for name in ("killed", "whole"))
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed[name]), name
    assert not list((tmp_path / "killed").glob(".*"))


# A thread that nobody waits for, as Ctrl-C leaves behind where it strikes while a pool is starting one.
FORSAKEN = """
import sys, threading, time
import torch
{imports}

def work():
    while True:
        torch.randn(64, 64) @ torch.randn(64, 64)

def interrupt(*arguments, **named):
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.05)
    print("half a line", end="")
    raise KeyboardInterrupt

{call}
"""


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        (
            "import testtime.cli, testtime.predict",
            "sys.modules['testtime.predict'].summarise = interrupt; sys.argv[1:] = ['info', 'x']; testtime.cli.main()",
        ),
        (
            "import runpy, testtime.analysis.study",
            "testtime.analysis.study.load = interrupt; sys.argv[1:] = '--checkpoint x --data digits --out x'.split(); "
            "runpy.run_module('testtime.analysis', run_name='__main__')",
        ),
    ],
)
def test_interrupting_ends_well_whatever_a_forsaken_thread_does(imports: str, call: str) -> None:
    program = FORSAKEN.format(imports=imports, call=call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "half a line", "stopped\n")


TWICE = """
import signal, sys, time
import testtime.cli, testtime.predict

def clean_up():
    try:
        yield
    finally:
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)

def interrupt(source):
    held = clean_up()
    next(held)
    signal.raise_signal(signal.SIGINT)

sys.modules["testtime.predict"].summarise = interrupt
sys.argv[1:] = ["info", "x"]
testtime.cli.main()
"""


def test_a_second_ctrl_c_ends_a_command_that_is_still_stopping() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_where_ctrl_c_is_ignored_it_stays_ignored() -> None:
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "import testtime.cli; testtime.cli.app = lambda **named: signal.raise_signal(signal.SIGINT)\n"
        "testtime.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_that_breaks_a_lock_is_ctrl_c_and_a_failing_disk_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(failure: Exception) -> Callable[[str], None]:
        def act(source: str) -> None:
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                raise failure

        return act

    broken = RuntimeError("cannot release un-acquired lock")
    monkeypatch.setattr(sys.modules["testtime.predict"], "summarise", interrupt(broken))
    assert run(capsys, "info", "x") == (130, "", "stopped\n")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(sys.modules["testtime.predict"], "summarise", interrupt(full))
    assert run(capsys, "info", "x") == (1, "", "error: [Errno 28] No space left on device\n")


def test_interrupting_is_one_line_and_exit_code_130(tmp_path: Path) -> None:
    process = start(*TINY, "--epochs", "1000", "--out", str(tmp_path))
    wait_for(tmp_path / "checkpoint.safetensors", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "stopped"
    assert "Traceback" not in err


def test_a_run_without_a_folder_gets_one_that_the_same_options_find_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        code, out, _ = run(capsys, *TINY)
        assert code == 0
    (trained,) = (tmp_path / "runs").iterdir()
    assert out.startswith(f"runs/{trained.name}/network.safetensors: epoch 3, loss ")
    evaluation = ["eval", "-c", f"runs/{trained.name}/network.safetensors", "--data", "digits", "--methods", "fixed"]
    for device in ("cpu", "auto"):
        code, out, _ = run(capsys, *evaluation, "--limit", "5", "--device", device)
        assert code == 0
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert out.endswith(f"runs/{folders[0]}: 1 units\n")
    assert folders[0].startswith("eval-")
    assert run(capsys, *evaluation, "--limit", "6")[0] == 0
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_two_processes_train_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTTIME_COMPILE", "0")  # kernels round more, and the great steps of a beginning enlarge that
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    together = [
        start(*TINY, "--out", str(tmp_path / "two"), WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank,
              MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in "01"
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in together]
    assert [process.returncode for process in together] == [0, 0], outputs
    assert outputs[1] == ("", "")  # the first process speaks for both
    assert run(capsys, *TINY, "--out", tmp_path / "one")[0] == 0
    two, one = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("two", "one"))
    assert two["hardware"]["processes"] == 2
    assert two["configuration"] == one["configuration"]
    for key, slack in (("loss", 0), ("main", 0), ("task", 0), ("train_error", 1 / 48), ("test_error", 2 / 500)):
        curves = [[entry[key] for entry in record["epochs"]] for record in (two, one)]
        assert curves[0] == pytest.approx(curves[1], rel=1e-4, abs=slack), key  # rounding may tip an image or two
    networks = [load_file(tmp_path / name / "network.safetensors") for name in ("two", "one")]
    for name, tensor in networks[1].items():
        torch.testing.assert_close(networks[0][name], tensor, rtol=0, atol=1e-3)
