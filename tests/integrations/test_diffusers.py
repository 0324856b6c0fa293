"""Models of diffusers that were quantized in memory."""

import pytest
import torch

from tests.support.models import same
from torch_marlin_metal import MarlinLinear, quantize_model

diffusers = pytest.importorskip("diffusers")


def transformer(seed: int):
    torch.manual_seed(seed)
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip


def test_saving_is_refused_with_advice_that_works(tmp_path) -> None:
    model = transformer(0)
    model.save_pretrained(tmp_path / "floats")
    quantize_model(model, "uint4", 32, progress=False)
    assert any(isinstance(module, MarlinLinear) for module in model.modules())
    with pytest.raises(ValueError, match=r"FluxTransformer2DModel has packed 4-bit layers .*load_state_dict"):
        model.save_pretrained(tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = transformer(1)
    quantize_model(again, "uint4", 32, progress=False)
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert same(again.state_dict(), model.state_dict())
