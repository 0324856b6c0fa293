"""Runs the programs of lab/mac that time the mLSTM and commits. Times on the software device mean nothing."""

import json
import sys

import pytest

from lab.mac import commit_times, mlstm_times
from torch_marlin_metal import tuning


def test_both_ways_are_timed_forward_and_backward(device, monkeypatch, capsys):
    for name, size in (("HEADS", 1), ("DK", 8), ("DV", 16)):
        monkeypatch.setattr(mlstm_times, name, size)
    clock = iter([1.0, 3.0] * 100)
    monkeypatch.setattr(mlstm_times, "_seconds", lambda *_: next(clock))
    line = f"- --device {device} --dtype float32 --rounds 3 --tokens 2 5"
    monkeypatch.setattr(sys, "argv", line.split())
    mlstm_times.main()
    results = json.loads(capsys.readouterr().out)["results"]
    passes = [(row["pass"], row["S"]) for row in results]
    assert passes == [(name, S) for name in ("forward", "forward and backward") for S in (2, 5)]
    for row in results:
        assert row["seconds"] == {"chunkwise": 1.0, "token by token": 3.0}
        assert row["times_faster"] == 3.0


def test_two_ways_that_disagree_are_an_error(monkeypatch):
    monkeypatch.setattr(mlstm_times, "_token_by_token", lambda *inputs: inputs[2])
    monkeypatch.setattr(sys, "argv", ["-", "--device", "cpu", "--tokens", "3"])
    with pytest.raises(RuntimeError, match="the two ways differ"):
        mlstm_times.main()


def test_each_interval_of_commits_is_timed(mps, monkeypatch):
    try:
        found = commit_times.times("mps", rounds=1, products=2)
    finally:
        tuning.set_commit_interval(3e-3)
    assert list(found) == ["every_0_ms", "every_1_ms", "every_3_ms", "every_10_ms"]
    assert min(found.values()) > 0
