"""Runs another program's command line after the import that lets transformers load packed checkpoints.

    python -m torch_marlin_metal.run transformers serve MODEL
    python -m torch_marlin_metal.run lm_eval --model hf --model_args pretrained=MODEL --tasks TASK
    python -m torch_marlin_metal.run script.py ARGUMENTS
    python -m torch_marlin_metal.run -m MODULE ARGUMENTS

The program is the console script of an installed package, a Python file, or a module. It runs in this process, so the
import does not affect processes that the program starts.
"""

import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path

WRONG_USE = 2


def main() -> None:
    """Runs the Python program that the command line names, with the arguments that follow its name."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, end="")
        sys.exit(WRONG_USE if len(sys.argv) < 2 else 0)
    is_module = sys.argv[1] == "-m"
    if is_module and len(sys.argv) < 3:
        _fail("-m: expected the name of a module after it")
    program, arguments = sys.argv[1 + is_module], sys.argv[2 + is_module :]
    is_file = not is_module and (program.endswith(".py") or "/" in program)
    scripts = [] if is_module or is_file else list(entry_points(group="console_scripts", name=program))
    if is_file and not Path(program).is_file():
        _fail(f"{program}: expected a Python file, found none")
    if not (is_module or is_file or scripts):
        _fail(f"{program}: expected the console script of an installed package, a file, or -m MODULE")

    import torch_marlin_metal.integrations.transformers  # noqa: F401

    sys.argv = [program, *arguments]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif is_file:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")
    else:
        sys.exit(scripts[0].load()())


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(WRONG_USE)


if __name__ == "__main__":
    main()
