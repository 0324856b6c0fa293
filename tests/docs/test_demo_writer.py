"""Runs the demo that writes on a text that is learnt in a few steps: the packed model must continue it by the command."""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.programs import run_python

STEPS = 60


def run_forked(command, check):
    """Runs the command of the package, as the demo does, in a process that need not import torch again."""
    assert command[0] == sys.executable and check
    done = run_python(*command[1:])
    print(done.stdout)
    print(done.stderr, file=sys.stderr)
    assert done.returncode == 0


@pytest.fixture
def demo(monkeypatch):
    spec = importlib.util.spec_from_file_location("writer", Path(__file__).parents[2] / "examples/writer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    clock = itertools.count(0, 1 / STEPS)  # a fake clock gives the same steps on any machine
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run_forked))
    text = "one two three four five six seven eight nine ten "
    monkeypatch.setattr(module, "topics", {"a": text * 40})
    for name, value in {"PROMPT": "one two three", "WINDOW": 32, "BATCH": 4}.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_the_packed_model_writes_what_was_learnt(demo, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(sys, "argv", ["writer", "--seconds", "1", "--tokens", "6", "--folder", str(tmp_path)])
    demo.main()
    out, err = capfd.readouterr()
    assert "one two three four five six" in out.split("\n\n", 1)[1]
    assert "23 layers converted, 0 left" in out
    assert "of uint4 g64" in err and "generated: 6 tokens" in err
