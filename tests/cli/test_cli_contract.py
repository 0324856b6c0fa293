"""Each failure of each command has the exit code of docs/use/command-line.md and prints one line or one JSON object."""

import importlib
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torch_marlin_metal import tuning
from torch_marlin_metal.cli.app import COMMANDS, app
from torch_marlin_metal.convert import CheckpointError, UnsupportedFormat

PAGE = Path(__file__).parents[2] / "docs" / "use" / "command-line.md"
# For each command: valid arguments, and a function that the command calls. A test makes this function fail.
LINES = {
    "inspect": (["x"], "open_reader"),
    "convert": (["x", "y"], "open_reader"),
    "verify": (["x", "y"], "open_reader"),
    "quantize": (["x", "y"], "FloatReader"),
    "generate": (["x", "y"], "device_of"),
    "perplexity": (["x", "y"], "device_of"),
    "fit": (["x"], "gpu_memory"),
    "plan": (["8", "64", "64", "--gpu", "M1"], "make_plan"),
    "profile": (["--gpu", "M1"], "tile_table"),
    "tune": (["--shape", "64,64"], "tune"),
    "bench": (["--shape", "64,64", "--rows", "1", "--device", "cpu"], "describe_machine"),
    "doctor": ([], "machine"),
}
FAILURES = {
    "a wrong value": (ValueError("level: expected 1, got 2"), 2),
    "a destination that exists": (FileExistsError("y: exists already"), 2),
    "a missing package": (ImportError("needs matplotlib: pip install matplotlib"), 2),
    "a damaged checkpoint": (CheckpointError("x: damaged"), 3),
    "an unsupported layer": (UnsupportedFormat("x: layer 'a': 3 bits"), 3),
    "no permission": (PermissionError(13, "Permission denied", "x"), 3),
    "a full disk": (OSError(28, "No space left on device", "y"), 3),
    "no device": (RuntimeError("no mps device on this machine"), 3),
    "no memory": (MemoryError(), 3),
}
SENTENCES = {  # expected messages that differ from the exception's own text
    "no permission": "x: Permission denied",
    "a full disk": "y: No space left on device",
    "no memory": "MemoryError",
}


def test_the_table_of_failures_has_every_command_and_every_code():
    assert list(LINES) == [command.__name__ for command in COMMANDS]
    rows = re.findall(r"^\| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    # Codes 0 and 1 are not failures; test_cli.py tests them.
    assert {int(row) for row in rows} == {0, 1, 130, 141} | {code for _, code in FAILURES.values()}


def failing(monkeypatch, command: str, error: BaseException, *options: str):
    def fail(*_: object, **__: object) -> None:
        raise error

    line, function = LINES[command]
    (module,) = (one.__module__ for one in COMMANDS if one.__name__ == command)
    owner = tuning if command == "tune" else importlib.import_module(module)
    monkeypatch.setattr(owner, function, fail)
    done = CliRunner().invoke(app, [command, *line, *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done


@pytest.mark.parametrize("command", LINES)
@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_has_its_code_and_prints_one_line_or_one_object(monkeypatch, tmp_path, command, kind):
    monkeypatch.chdir(tmp_path)
    error, code = FAILURES[kind]
    sentence = SENTENCES.get(kind, str(error))
    done = failing(monkeypatch, command, error)
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr == f"error: {sentence}\n"
    done = failing(monkeypatch, command, error, "--json")
    assert (done.exit_code, done.stderr) == (code, "")
    assert json.loads(done.stdout) == {"error": sentence, "type": type(error).__name__}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("command", LINES)
def test_an_interrupted_command_prints_no_result(monkeypatch, tmp_path, command, options):
    monkeypatch.chdir(tmp_path)
    done = failing(monkeypatch, command, KeyboardInterrupt(), *options)
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "interrupted\n")
    done = failing(monkeypatch, command, BrokenPipeError(), *options)
    assert (done.exit_code, done.stdout, done.stderr) == (141, "", "")
