"""fuse_layers looks behind decorators and argument names, and warns of the parts that it does not recognize."""

import functools
import inspect
import warnings

import pytest
import torch
from transformers.models.llama import modeling_llama

import torch_marlin_metal as tmm
from tests.journeys.token_operations import model_of
from torch_marlin_metal.fuse import forwards

ORIGINAL = modeling_llama.LlamaAttention.forward
ATTENTION = "model.layers.0.self_attn"
IDS = torch.arange(5, 13)[None]
CALLS = []


def counting(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        CALLS.append(function.__name__)
        return function(*args, **kwargs)

    return wrapper


def hiding(function):
    held = [function]

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return held[0](*args, **kwargs)

    return wrapper


def fused(monkeypatch, forward):
    """Fuses a Llama whose attention has another forward. Returns the changes in its attention, and the warnings."""
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    model = model_of("llama", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = tmm.fuse_layers(model)
    messages = " ".join(str(warning.message) for warning in caught if "fuse_layers" in str(warning.message))
    kinds = {kind for name, kind in report.fused if name == ATTENTION}
    return model, kinds, [reason for name, reason in report.left if name == ATTENTION], messages


def test_a_decorated_forward_is_fused_and_its_decorator_stays(monkeypatch):
    model, kinds, left, messages = fused(monkeypatch, counting(torch.no_grad()(ORIGINAL)))
    assert (kinds, left, messages) == ({"rotary", "mask", "write_cache"}, [], "")
    CALLS.clear()
    model(input_ids=IDS, use_cache=False)
    assert CALLS == ["forward"]


def test_a_decorator_that_hides_the_forward_is_reported(monkeypatch):
    _, kinds, left, messages = fused(monkeypatch, hiding(ORIGINAL))
    assert kinds == {"write_cache"} and left == ["rotary, mask: a decorator hides the forward"]
    assert "transformers" in messages and "LlamaAttention: rotary, mask: a decorator hides the forward" in messages


def test_a_rotation_and_a_cache_of_unknown_forms_are_reported(monkeypatch):
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda a, b, c, d: rotate(a, b, c, d))
    monkeypatch.setattr("torch_marlin_metal.fuse.caches.is_proved", lambda: False)
    _, kinds, left, messages = fused(monkeypatch, ORIGINAL)
    assert kinds == {"mask"} and [reason.partition(":")[0] for reason in left] == [
        "a rotary embedding",
        "a static cache",
    ]
    assert all(reason in messages for reason in left)


def with_branch(self, x, memory=None, *, other=None, **kwargs):
    kwargs.update(a=1)
    if memory is not None:
        x = memory.update(x, self)
    return x


@pytest.mark.parametrize(
    ("forward", "argument"),
    [
        (with_branch, "memory"),
        (counting(with_branch), "memory"),
        (lambda self, x, *, cache: cache.update(x), "cache"),
        (lambda self, cache: self.cache.update(cache), None),
        (lambda self, x, **kwargs: kwargs.update(x=x), None),
        (torch.relu, None),
    ],
)
def test_the_argument_whose_update_is_called(forward, argument):
    assert forwards.updated_argument(forward) == argument


def test_keywords_that_a_function_reads():
    kinds = (inspect.Parameter.VAR_KEYWORD,)
    assert forwards.reads(with_branch, kinds)
    assert not forwards.reads(lambda x, **kwargs: x, kinds)
    assert forwards.reads(torch.relu, kinds)
