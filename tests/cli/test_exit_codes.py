"""Tests what scripts rely on: exit codes, exactly one JSON object, and no control characters from files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.table import Table
from safetensors.torch import save_file

from tests.cli.test_cli import call
from tests.support.programs import run_python
from torch_marlin_metal import tuning
from torch_marlin_metal.cli import output
from torch_marlin_metal.cli.app import COMMANDS
from torch_marlin_metal.printing import RichText, table

ROOT = Path(__file__).parents[2]
LAYERS = ROOT / "tests/data/layers"
GPTQ = LAYERS / "gptq/gptqmodel-asym-g64-v1"
LAYER = "model.layers.0.self_attn.k_proj"
ESCAPES = "a\x1b[31m\x1b]0;title\x07[red][/b]\ud800\n:smile:"
SHOWN = r"a\x1b[31m\x1b]0;title\x07[red][/b]\ud800\n:smile:"


WRONG = {
    "inspect": ["x", "--gguf-names", "y"],
    "convert": ["x", "y", "--shard-mb", "0"],
    "verify": ["x", "y", "--tolerance", "-1"],
    "quantize": ["x", "y", "--shard-mb", "none"],
    "generate": ["x", "y", "--tokens", "0"],
    "perplexity": ["x", "y", "--context", "3"],
    "fit": ["x", "--context", "0"],
    "plan": ["8", "64"],
    "profile": ["--no-such-option"],
    "tune": ["--rows", "0"],
    "bench": ["--rows", "-1"],
    "doctor": ["--shallow"],
}


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_a_wrong_command_line_exits_with_2_and_prints_json_if_asked(command):
    code, out, err = call(command, *WRONG[command])
    assert (code, out) == (2, "")
    assert "Usage" in err
    code, out, err = call(command, *WRONG[command], "--json")
    assert (code, err) == (2, "")
    assert set(json.loads(out)) == {"error", "type"}


FAILURES = [
    (2, ["convert", GPTQ, "out", "--write-gptq-version", "2"], "--write-gptq-version is for --format gptq"),
    (2, ["convert", GPTQ, "out", "--format", "awq", "--write-gptq-version", "1"], "got --format awq"),
    (2, ["bench", "--device", "abacus"], "--device: expected cpu"),
    (2, ["bench", "--device", "cpu", "--variant", "all"], "--variant: expected auto, or all on mps, got 'all' on cpu"),
    (3, ["bench", "missing", "--device", "cpu"], "missing: does not exist"),
    (2, ["profile", "--gpu", "M1", "--measure"], "--measure: expected a Mac's GPU and no --gpu, got --gpu M1"),
    (
        2,
        ["quantize", "floats", "out", "--include", "*", "--group-size", "48"],
        "floats: b: group_size: expected one of",
    ),
    (
        2,
        ["quantize", "floats", "out", "--include", "*", "--weight-format", "nvfp4", "--group-size", "32"],
        "expected 16 for nvfp4",
    ),
    (2, ["quantize", "floats", "out", "--include", "c*"], "include: 'c*' matches none of the 2 layers"),
    (2, ["quantize", "floats", "out", "--include", "a", "--exclude", "*"], "they leave none of its 2 matrices"),
    (
        2,
        ["quantize", "floats", "out", "--include", "*", "--method", "gptq"],
        "method: expected 'rtn' or 'mse', got 'gptq'",
    ),
    (3, ["inspect", "missing"], "missing: does not exist"),
    (3, ["verify", GPTQ, "missing"], "missing: does not exist"),
    (3, ["convert", LAYERS / "torchao/int4-opaque-cpu-g64", "out"], "its codes are in a layout that depends on the"),
    (3, ["convert", LAYERS / "gguf/Q4_0", "out"], "no quantization settings"),
    (3, ["quantize", GPTQ, "out", "--include", "*"], "expected a checkpoint of floats, got one with"),
    (3, ["quantize", "floats", "out"], "transformers knows no model None: name the layers to quantize"),
    (2, ["convert", GPTQ, "floats"], "floats: exists already"),
    (2, ["convert", GPTQ, "out", "--gptq-version", "3"], "gptq_version: expected None, 1 or 2, got 3"),
    (2, ["quantize", "floats", "out", "--include", "*", "--weight-format", "int3"], "weight_format: expected one of"),
]


@pytest.mark.parametrize("case", FAILURES, ids=lambda case: " ".join(map(str, case[1][:1] + case[1][2:])))
def test_a_failure_is_one_line_or_one_object(tmp_path, monkeypatch, case):
    code, arguments, message = case
    monkeypatch.chdir(tmp_path)
    (tmp_path / "floats").mkdir()
    save_file({"a.weight": torch.ones(8, 48), "b.weight": torch.ones(8, 64)}, tmp_path / "floats/model.safetensors")
    got, out, err = call(*arguments)
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("error: ") and message in err
    got, out, err = call(*arguments, "--json")
    assert (got, err) == (code, "")
    assert message in json.loads(out)["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["floats"]


MOVED = OSError(18, "Invalid cross-device link", "a", None, "b")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("no GPU to tune for"), "no GPU to tune for"),
        (MemoryError(), "MemoryError"),
        (MOVED, "a -> b: Invalid cross-device link"),
    ],
)
def test_a_missing_device_or_too_little_memory_exits_with_3(monkeypatch, error, sentence):
    def tune(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(tuning, "tune", tune)
    code, out, err = call("tune", "--shape", "64,64")
    assert (code, out, err) == (3, "", f"error: {sentence}\n")
    code, out, _ = call("tune", "--shape", "64,64", "--json")
    assert (code, json.loads(out)["type"]) == (3, type(error).__name__)


def test_numbers_that_json_cannot_represent_are_null(tmp_path):
    save_file({f"{LAYER}.weight": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    code, out, _ = call("verify", GPTQ, tmp_path, "--json")
    assert code == 1
    (layer,) = json.loads(out, parse_constant=pytest.fail)["layers"]
    assert layer["max_error"] is None


def renamed(path: Path, name: str) -> Path:
    """Writes a checkpoint with a layer name that the safetensors library refuses to write."""
    path.mkdir()
    raw = (GPTQ / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = {key.replace(LAYER, name): value for key, value in json.loads(raw[8 : 8 + length]).items()}
    content = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + raw[8 + length :])
    (path / "config.json").write_text((GPTQ / "config.json").read_text())
    return path


def test_names_from_files_are_neither_markup_nor_escape_sequences(tmp_path):
    source = renamed(tmp_path / "m[red]x", ESCAPES)
    code, out, _ = call("inspect", source)
    assert code == 0
    assert SHOWN in out.replace("\n", "")
    assert "m[red]x" in out
    assert "\x1b" not in out
    code, out, _ = call("convert", source, tmp_path / "out[/x]")
    assert code == 0
    assert "out[/x]: 1 layers" in out
    code, out, _ = call("verify", source, tmp_path / "out[/x]")
    assert code == 0
    assert SHOWN in out


def test_an_error_shows_names_as_they_are(tmp_path):
    source = renamed(tmp_path / "m", ESCAPES)
    with (source / "model.safetensors").open("r+b") as file:
        file.truncate(os.path.getsize(source / "model.safetensors") - 1)
    code, out, err = call("inspect", source)
    assert (code, out) == (3, "")
    assert SHOWN in err
    assert err.count("\n") == 1


class Printed(RichText):
    def __init__(self, shown: Table) -> None:
        self.shown = shown

    def __rich__(self) -> Table:
        return self.shown


@pytest.mark.parametrize("how", ["show", "print"])
def test_brackets_of_a_table_are_text(how, capsys):
    rows = [["expected shape [any, 8], got [3, 4]"], ["[red] :smile:"]]
    shown = table("title [a]", "heading", rows=rows, caption="[b] of \x1b[0m")
    if how == "show":
        output.show({}, shown, as_json=False)
    else:
        print(Printed(shown))
    out = capsys.readouterr().out
    assert "[red] :smile:" in out
    assert "title [a]" in out
    assert "expected shape [any, 8], got [3, 4]" in out
    assert r"[b] of \x1b[0m" in out


def heed_ctrl_c() -> None:
    """Restores SIGINT, which a process ignores if a shell runs the tests in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("way", ["module", "script", "another program"])
def test_ctrl_c_while_torch_is_loaded(tmp_path, way):
    """A module `torch` that waits takes the place of torch, so that the signal arrives during the import."""
    (tmp_path / "torch.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(100)\n")
    script = tmp_path / ("torch-marlin-metal" if way == "script" else "program.py")
    script.write_text("from torch_marlin_metal.cli.main import main\nmain()\n")
    arguments = ["-m", "torch_marlin_metal"] if way == "module" else [str(script)]
    process = subprocess.Popen(
        [sys.executable, *arguments, "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == ""
    if way == "another program":
        assert process.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in err
    else:
        assert (process.returncode, err) == (130, "interrupted\n")


def test_ctrl_c_in_a_command_is_an_exception_of_the_command(tmp_path):
    """After the imports, Ctrl-C must raise KeyboardInterrupt in the command, so that it can clean up."""
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["torch-marlin-metal", "convert", sys.argv[1], sys.argv[2]]
from torch_marlin_metal.cli.main import main
from torch_marlin_metal.checkpoints import writer
def interrupted(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        import time; time.sleep(100)
    except KeyboardInterrupt:
        print("cleaned up", flush=True)
        raise
writer._write_rest = interrupted
main()
"""
    done = run_python("-c", code, GPTQ, tmp_path / "out", env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (130, "cleaned up\n")
    assert done.stderr.endswith("interrupted\n")


def run(*arguments: str, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_marlin_metal", *arguments]
    # The child's output is buffered, so a failing write is detected only at a flush. These tests fail if a command does
    # not flush.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, check=False, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done


def test_a_full_disk_behind_stdout():
    with open("/dev/full", "w") as full:
        done = run("inspect", str(GPTQ), "--json", stdout=full.fileno())
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "No space left on device" in done.stderr


def test_a_closed_pipe_behind_stdout():
    reading, writing = os.pipe()
    os.close(reading)
    done = run("inspect", str(GPTQ), stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_stdout():
    command = f'exec "{sys.executable}" -m torch_marlin_metal inspect "{GPTQ}" >&-'
    done = subprocess.run(["sh", "-c", command], check=False, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (3, "error: stdout is closed\n")


def test_an_unknown_cpu_family_is_an_error():
    environment = os.environ | {"TORCH_MARLIN_METAL_CPU_ISA": "abacus"}
    done = run_python("-m", "torch_marlin_metal", "verify", GPTQ, GPTQ, env=environment)
    assert done.returncode == 3
    assert done.stderr.startswith("error: TORCH_MARLIN_METAL_CPU_ISA: expected one of ")


def test_a_table_that_is_too_wide_for_its_terminal_becomes_lines():
    cells = [["model.layers.0.mlp.up_proj", "1.5", "a remark"], ["[b]", "2", ""]]
    shown = table("title", "name", "a number", "remarks", rows=cells, right=["a number"], caption="end")
    assert list(output._fitted(shown, 60)) == ["title", shown, "end"]
    shown = table("title", "name", "a number", "remarks", rows=cells, right=["a number"], caption="end")
    lines = "name: model.layers.0.mlp.up_proj\na number: 1.5\nremarks: a remark\n\nname: [b]\na number: 2"
    assert list(output._fitted(shown, 30)) == ["title", lines, "end"]
