"""Fused attention writes static caches in one operator and converts a mask once: results, fallbacks and undo."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import torch_marlin_metal as tmm
from lab.token.operations import Operations
from tests.journeys.token_operations import model_of
from torch_marlin_metal.fuse import caches, masks, norms

LENGTH = 8


def new_tokens(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, tokens, size, generator=generator) for size in (4, 6))


def cache_of(layer: object) -> StaticCache:
    cache = copy.copy(StaticCache(config=model_of("llama", 1).config, max_cache_len=LENGTH))
    cache.layers = [layer]
    return cache


LAYERS = [
    lambda: StaticLayer(max_cache_len=LENGTH),
    lambda: StaticSlidingWindowLayer(max_cache_len=LENGTH, sliding_window=4),
]


@pytest.mark.parametrize("make", LAYERS, ids=["all tokens", "window"])
def test_a_writer_fills_a_cache_as_its_update_does(make):
    """The window is full after the second step. Then the original code moves the oldest tokens out."""
    ours, theirs = cache_of(make()), cache_of(make())
    writer = caches.CacheWriter(ours)
    for step, tokens in enumerate((3, 1, 1, 2)):
        new = new_tokens(tokens, step)
        for got, expected in zip(writer.update(*new, 0), theirs.update(*new, 0), strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)
        assert ours.get_seq_length() == theirs.get_seq_length()
    assert type(ours.layers[0]) is type(theirs.layers[0]) and "update" not in vars(ours.layers[0])
    assert len(writer) == len(ours) == 1 and writer.get_seq_length() == ours.get_seq_length()


def operations_of(call) -> set[str]:
    with Operations() as seen:
        call()
    return set(seen.counts)


def test_what_a_writer_leaves_to_the_original():
    new = new_tokens(2)
    static = caches.CacheWriter(cache_of(StaticLayer(max_cache_len=LENGTH)))
    write = "torch_marlin_metal.write_cache.default"
    assert write in operations_of(lambda: static.update(*new, 0))
    with torch.no_grad():
        wide = [t.double() for t in new]
        other = caches.CacheWriter(cache_of(StaticLayer(max_cache_len=LENGTH)))
        assert write not in operations_of(lambda: other.update(*wide, 0))
    needs_grad = new[0].clone().requires_grad_(), new[1]
    assert write not in operations_of(lambda: static.update(*needs_grad, 0))
    growing = caches.CacheWriter(DynamicCache())
    assert write not in operations_of(lambda: growing.update(*new, 0))
    assert caches.is_replaceable(DynamicCache())
    assert not caches.is_replaceable(DynamicCache(offloading=False).layers)

    class Own(StaticCache):
        def update(self, *args, **kwargs):
            raise NotImplementedError

    assert not caches.is_replaceable(Own(config=model_of("llama", 1).config, max_cache_len=LENGTH))


def test_a_write_of_another_kind_is_refused(monkeypatch):
    assert caches.is_proved()
    monkeypatch.setattr(caches, "write_cache", lambda keys, values, k, v, start: keys.zero_())
    assert not caches.is_proved.__wrapped__()


def test_generating_with_a_static_cache_on_mps_writes_in_one_dispatch(mps):
    import softmetal

    model = model_of("gemma3_text", 1)
    ids = torch.arange(5, 11)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    expected = model.generate(ids, **options)
    model.to(mps)
    tmm.fuse_layers(model)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    with torch.no_grad():
        model(input_ids=ids.to(mps), past_key_values=cache)
        torch.mps.synchronize()
        softmetal.faults()  # clears the list of dispatches
        model(input_ids=ids[:, :1].to(mps), past_key_values=cache)
        torch.mps.synchronize()
    kernels = [record.kernel for record in softmetal.counters()]
    assert sum("write_cache" in kernel for kernel in kernels) == 1, kernels
    assert torch.equal(model.generate(ids.to(mps), **options).cpu(), expected)


def test_a_mask_is_converted_once_and_again_after_a_change():
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ours, module = masks.converting(original), torch.nn.Module().eval()
    query, key, value = (torch.randn(1, 2, tokens, 8) for tokens in (3, 5, 5))
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool).tril(2)

    def agree() -> set[str]:
        results = []
        seen = operations_of(lambda: results.append(ours(module, query, key, value, mask)[0]))
        assert torch.equal(results[0], original(module, query, key, value, mask)[0])
        return seen

    assert "aten.masked_fill_.Scalar" in agree()
    assert "aten.masked_fill_.Scalar" not in agree()
    mask[0, 0, 2, 0] = False
    assert "aten.masked_fill_.Scalar" in agree()
    with torch.inference_mode():  # tensors then have no version counter
        mask = mask.clone()
        assert "aten.masked_fill_.Scalar" in agree()
        first, module = module, torch.nn.Module().eval()
        assert "aten.masked_fill_.Scalar" not in agree()
        mask[0, 0, 2, 1] = False
        module = first
        assert "aten.masked_fill_.Scalar" in agree()


def test_only_pytorch_s_attention_gets_numbers():
    table = masks.AttentionFunctions(ALL_ATTENTION_FUNCTIONS)
    assert table.get_interface("sdpa", None) is not ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert table.get_interface("eager", test_only_pytorch_s_attention_gets_numbers) is (
        test_only_pytorch_s_attention_gets_numbers
    )
    assert table.valid_keys() == ALL_ATTENTION_FUNCTIONS.valid_keys()
    assert masks.is_proved({"sdpa": ALL_ATTENTION_FUNCTIONS["sdpa"]})

    def other(module, query, key, value, attention_mask):
        return query * attention_mask.to(query.dtype).nan_to_num().sum(), None

    assert not masks.is_proved({"sdpa": other})


def test_the_norm_of_heads_keeps_their_order():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(8))
    forward = norms.fused_norm(None, norms.Norm(1e-5))
    heads = torch.randn(2, 3, 4, 8).transpose(1, 2)
    got = forward(module, heads)
    assert got.transpose(1, 2).is_contiguous()
    assert torch.equal(got, tmm.ops.rms_norm(heads.contiguous(), module.weight, eps=1e-5))
