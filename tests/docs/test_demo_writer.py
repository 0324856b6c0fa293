"""Runs the demo that writes, on a text that a model learns in a few steps. The packed model must continue the text."""

import itertools
import sys
from types import SimpleNamespace

import pytest

from examples import writer
from tests.support.programs import run_python

STEPS = 60


def run_forked(command, check):
    """Runs the package's command in a fork that has already imported torch."""
    assert command[0] == sys.executable and check
    done = run_python(*command[1:])
    print(done.stdout)
    print(done.stderr, file=sys.stderr)
    assert done.returncode == 0


@pytest.fixture
def demo(monkeypatch):
    clock = itertools.count(0, 1 / STEPS)  # a fake clock gives the same steps on any machine
    monkeypatch.setattr(writer, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(writer, "subprocess", SimpleNamespace(run=run_forked))
    text = "one two three four five six seven eight nine ten "
    monkeypatch.setattr(writer, "topics", {"a": text * 40})
    for name, value in {"PROMPT": "one two three", "WINDOW": 32, "BATCH": 4}.items():
        monkeypatch.setattr(writer, name, value)
    return writer


def test_the_packed_model_writes_what_was_learnt(demo, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(
        sys, "argv", ["writer", *f"--seconds 1 --steps {STEPS} --tokens 6 --folder".split(), str(tmp_path)]
    )
    demo.main()
    out, err = capfd.readouterr()
    assert "one two three four five six" in out.split("\n\n", 1)[1]
    assert "training for 1 s, and for at least 60 steps" in out
    assert "23 layers converted, 0 left" in out
    assert "of uint4 g64" in err and "generated: 6 tokens" in err


def test_training_lasts_for_the_time_and_the_steps():
    assert writer.share_of(60, 45, steps=15, least_steps=100) == 0.15
    assert writer.share_of(22.5, 45, steps=100, least_steps=100) == 0.5
    assert writer.share_of(45, 45, steps=200, least_steps=100) == 1
