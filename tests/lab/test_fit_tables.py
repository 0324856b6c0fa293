"""lab.whole_models.fit: for a trained model, choosing formats by a text is no worse than one format of equal bytes."""

from examples import writer
from lab.whole_models import fit


def test_a_choice_by_a_text_is_no_worse_than_one_format_for_the_smallest_model(monkeypatch) -> None:
    for module, name, value in (
        (fit, "CALIBRATION", 512), (fit, "HELD_OUT", 1024), (writer, "WINDOW", 64), (writer, "BATCH", 8),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    texts = [f"the sum of {i} and {j} is {i + j}; the product is {i * j}." for i in range(30) for j in range(10)]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    one = fit.trained("sums", texts, 280, 30, **sizes)
    tables = [fit.compare(one, uniform, 32) for uniform in ("uint4b8", "uint5b16")]
    for plain, *others in tables:
        assert [row.name for row in others] == ["by the errors of weights", "with a text"]
        for row in others:
            assert row.held <= plain.held
            assert abs(row.stated / row.held - 1) < 0.02
        assert others[1].mean <= plain.mean
    assert len(fit.of_llama(tables)) == 2 + 2 * 3
