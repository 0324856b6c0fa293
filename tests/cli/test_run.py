"""`python -m torch_marlin_metal.run` imports the integration in a program that was not written for this package."""

import sys

import pytest

from tests.support.llama import MODELS
from tests.support.programs import run_python
from torch_marlin_metal import run

PROGRAM = """import sys
from transformers import AutoModelForCausalLM
def main():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    print("layers", sum(type(module).__name__ == "MarlinLinear" for module in model.modules()), sys.argv[2:])
    return 7
if __name__ == "__main__":
    sys.exit(main())
"""
GPTQ = str(MODELS / "gptq-sym-g32-actorder")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Installs a package with a console script, as pip does."""
    (tmp_path / "tiny_program.py").write_text(PROGRAM)
    info = tmp_path / "tiny_program-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny_program\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[console_scripts]\ntiny-program = tiny_program:main\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_console_script_in_a_process_of_its_own(program, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(program))
    done = run_python("-m", "torch_marlin_metal.run", "tiny-program", GPTQ, "--help")
    assert (done.returncode, done.stdout) == (7, "layers 14 ['--help']\n"), done.stderr
    alone = run_python(program / "tiny_program.py", GPTQ)
    assert alone.returncode == 1 and "optimum" in alone.stderr


@pytest.mark.parametrize("words", [["tiny-program"], ["tiny_program.py"], ["-m", "tiny_program"]], ids=" ".join)
def test_a_script_a_file_and_a_module(words, program, monkeypatch, capsys) -> None:
    monkeypatch.chdir(program)
    monkeypatch.setattr(sys, "argv", ["run", *words, GPTQ, "a", "-m"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert (ended.value.code, capsys.readouterr().out) == (7, "layers 14 ['a', '-m']\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["no-such-program"],
            "no-such-program: expected the console script of an installed package, a file, or -m MODULE",
        ),
        (["no_such.py"], "no_such.py: expected a Python file, found none"),
        (["-m"], "-m: expected the name of a module after it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_no_program_is_named(words, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *words])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert (ended.value.code, capsys.readouterr().err) == (2, f"error: {message}\n")


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0)])
def test_its_help(words, code, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *words])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == code and "transformers serve" in capsys.readouterr().out
