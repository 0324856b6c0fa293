"""If fused layers choose another token than the original layers, the two logits differ by less than their errors."""

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import AutoModelForCausalLM

import torch_marlin_metal as tmm
import torch_marlin_metal.integrations.transformers
from tests.integrations.test_peft import dense_twin
from tests.support.llama import FOLDERS, IDS
from tests.support.reference import UNIT_ROUNDOFF

# The largest allowed error of a logit, in roundings of the largest logit. In float32, the sums of products also round.
ROUNDINGS = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 16}
TOKENS = 10


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["stored dtype", "float32"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tokens_differ_only_at_near_ties(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, **({} if dtype is None else {"dtype": dtype}))
    reference = dense_twin(model).double()
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    original = model.generate(IDS, **options)
    tmm.fuse_layers(model)
    fused = model.generate(IDS, **options)
    prompt = IDS.shape[1]
    tokens = [result.sequences[0, prompt:] for result in (original, fused)]
    other = torch.nonzero(tokens[0] != tokens[1])[:1]
    count = int(other) + 1 if len(other) else TOKENS  # after the first difference, the models continue different texts
    with torch.no_grad():
        expected = reference(original.sequences).logits[0, prompt - 1 : prompt - 1 + count]
    bound = ROUNDINGS[model.dtype] * UNIT_ROUNDOFF[model.dtype] * expected.abs().max()
    for result in (original, fused):
        assert (torch.stack(result.logits, 1)[0, :count].double() - expected).abs().max() <= bound
    if dtype is not None:
        assert not len(other)
    if len(other):
        assert model.dtype == torch.bfloat16
        chosen = [int(one[count - 1]) for one in tokens]
        assert sorted(chosen) == sorted(expected[-1].topk(2).indices.tolist())
        assert (expected[-1, chosen[0]] - expected[-1, chosen[1]]).abs() <= bound
