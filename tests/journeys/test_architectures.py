"""Tests some of the architectures that `architectures.py` tries, or all of them with --everything."""

import pytest

from tests.journeys.architectures import FIRST, families, result_of

SAMPLE = (
    *FIRST,
    *("falcon_mamba", "gpt2", "falcon", "whisper", "vit", "gte", "inkling_text", "fastspeech2_conformer"),
    "olmo",  # has no float parameter if all its matrices are packed
    "xlm-roberta",  # defines its head before its table, and the head has the bias of another tensor
    "qwen3_omni_moe_thinker",  # its blocks initialize the tensors of their experts
)


def pytest_generate_tests(metafunc) -> None:
    everything = metafunc.config.getoption("--everything")
    metafunc.parametrize("family", families() if everything else SAMPLE)


@pytest.mark.filterwarnings("ignore")
def test_a_family_is_loaded_run_saved_and_loaded(family) -> None:
    result, note = result_of(family)
    if family in SAMPLE:
        assert result == "right", note
    assert not result.isupper(), f"{result}: {note}"
