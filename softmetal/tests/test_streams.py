"""Tests PyTorch's streams on the software device: encoding, commits, and each thread's current stream."""

from __future__ import annotations

import threading

import pytest
import torch

import softmetal

SOURCE = """
kernel void add(device float* x, constant float& y, uint i [[thread_position_in_grid]]) { x[i] += y; }
"""


@pytest.fixture(scope="module")
def add():
    return torch.mps.compile_shader(SOURCE).add


def test_counts_follow_what_is_encoded_and_committed(add) -> None:
    x = torch.zeros(8, device="mps")
    torch.mps.synchronize()
    before = softmetal.stream_counts()
    assert before.uncommitted == 0
    for _ in range(3):
        add(x, 1.0)
    encoded = softmetal.stream_counts()
    assert (encoded.uncommitted, encoded.commits - before.commits) == (3, 0)
    assert encoded.encoders - before.encoders == 1
    torch.mps.synchronize()
    after = softmetal.stream_counts()
    assert (after.uncommitted, after.commits - before.commits) == (0, 1)
    assert after.waits > before.waits  # more than one wait if earlier tests made streams
    assert after.most_in_a_commit >= 3
    torch.mps.synchronize()
    idle = softmetal.stream_counts()
    assert idle.commits == after.commits
    assert idle.empty_commits >= after.empty_commits
    assert x.tolist() == [3.0] * 8


def test_each_thread_has_its_own_current_stream(add) -> None:
    x, y = (torch.zeros(4, device="mps") for _ in range(2))
    torch.mps.synchronize()
    before = softmetal.stream_counts()

    def work() -> None:
        add(y, 5.0)  # a new thread starts with the default stream

    with softmetal.stream(2):
        add(x, 1.0)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with softmetal.stream(0):
            add(y, 1.0)
    counts = softmetal.stream_counts()
    assert counts.encoders - before.encoders == 2  # one for the default stream, one for stream 2
    torch.mps.synchronize()  # commits all streams, as in torch 2.15
    assert softmetal.stream_counts().commits - before.commits == 2
    assert (x.tolist(), y.tolist()) == ([1.0] * 4, [6.0] * 4)


def test_a_stream_that_is_not_in_the_pool() -> None:
    for number in (-1, 33):
        with pytest.raises(ValueError, match=rf"stream: expected 0 to 32, got {number}"), softmetal.stream(number):
            pass


@pytest.mark.skipif(not hasattr(torch.mps, "Stream"), reason="torch.mps has streams since 2.15")
def test_streams_of_torch_mps(add) -> None:
    default, other = torch.mps.default_stream(), torch.mps.Stream()
    assert torch.mps.current_stream() == default != other
    x = torch.zeros(8, device="mps")
    torch.mps.synchronize()
    with torch.mps.stream(other):
        assert torch.mps.current_stream() == other
        add(x, 1.0)
    other.synchronize()
    assert torch.mps.current_stream() == default
    assert x[0].item() == 1
    assert len({default, torch.mps.Stream(stream_id=other.stream_id), other}) == 2
