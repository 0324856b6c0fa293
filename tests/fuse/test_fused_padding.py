"""fuse_layers preserves the results of batches in which some sequences are padded on the left."""

import copy

import pytest
import torch

import torch_marlin_metal as tmm
from tests.journeys.token_operations import model_of

FAMILIES = ("llama", "gemma3_text", "gpt_oss", "phi3", "cohere2")
PADDING = 3  # tokens before the second sequence
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [0, 0, 0, 12, 13, 14, 15]])
MASK = torch.tensor([[1] * 7, [0] * PADDING + [1] * 4])
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module", params=FAMILIES)
def models(request):
    """Returns a model and a fused copy of it."""
    model = model_of(request.param, 2)
    fused = copy.deepcopy(model)
    tmm.fuse_projections(fused)
    assert {"rotary", "mask"} <= {kind for _, kind in tmm.fuse_layers(fused).fused}
    return model, fused


def logits(model, ids, mask, **arguments):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **arguments).logits


@pytest.mark.parametrize("positions", ["given", "of the model", "with gaps"])
def test_logits_of_a_padded_batch_stay_the_same(models, positions):
    _, fused = models
    arguments = {}
    if positions == "given":  # as `generate` passes them
        arguments["position_ids"] = (MASK.cumsum(1) - 1).masked_fill(MASK == 0, 1)
    if positions == "with gaps":  # the angles of the first sequence would give wrong results for the second
        arguments["position_ids"] = torch.stack([torch.arange(7), 3 * torch.arange(7)])
    expected, got = (logits(each, IDS, MASK, **arguments) for each in models)
    real = MASK.bool()
    torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=1e-5)
    # Without the mask and the positions, the results of the padded sequence differ.
    other = logits(fused, IDS, torch.ones_like(MASK))
    assert (other[1, PADDING:] - got[1, PADDING:]).abs().max() > 1e-3
    if positions == "given":
        alone = logits(fused, IDS[1:, PADDING:], MASK[1:, PADDING:])
        torch.testing.assert_close(got[1, PADDING:], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_continues_a_padded_batch_with_the_same_tokens(models, cache):
    generated = [
        model.generate(input_ids=IDS, attention_mask=MASK, cache_implementation=cache, **GREEDY) for model in models
    ]
    assert generated[0].shape == (2, 12)
    assert torch.equal(generated[1], generated[0])
    alone = models[1].generate(
        input_ids=IDS[1:, PADDING:], attention_mask=MASK[1:, PADDING:], cache_implementation=cache, **GREEDY
    )
    assert torch.equal(generated[1][1, PADDING:], alone[0])
