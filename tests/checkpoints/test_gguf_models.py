"""Loads whole models from GGUF files, also mixed ones, for each architecture that has a table of names."""

import re
import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.checkpoints.test_gguf import Writer
from tests.support.gguf_models import FAMILIES, IDS, model_of, outputs, write
from tests.support.llama import MODELS, write_gguf
from torch_marlin_metal import MarlinExperts, MarlinLinear, convert, load_quantized
from torch_marlin_metal.checkpoints.formats.gguf_blocks import DECODERS
from torch_marlin_metal.checkpoints.formats.gguf_names import ARCHITECTURES
from torch_marlin_metal.integrations import transformers
from torch_marlin_metal.integrations.transformers import packed_checkpoint
from torch_marlin_metal.integrations.transformers.take_over import logger as take_over_logger
from torch_marlin_metal.layers import ExpertWeights
from torch_marlin_metal.layers.packed_layer import PackedLayer

ROOT = Path(__file__).parents[2]
# llama.cpp stores the columns of one half of this matrix as rows.
LATENT = r".* of its matrices have no weight format and become floats: Q4_0 of attn_k_b \(\d+%\)\. .*"
WARNINGS = {family: [re.compile(LATENT)] for family in ("deepseek2", "deepseek_v2", "mistral4", "glm-dsa")}
for family, mixer, blocks in (
    ("mamba", "backbone.layers.{}.mixer.dt_proj is decoded to floats: MambaMixer", (0, 1)),
    ("falcon_mamba", "backbone.layers.{}.mixer.dt_proj is decoded to floats: FalconMambaMixer", (0, 1)),
    ("jamba", "model.layers.{}.mamba.dt_proj is decoded to floats: JambaMambaMixer", (0,)),
):
    why = " computes with its weight, instead of calling it"
    WARNINGS[family] = [f"{mixer.format(block)}{why}" for block in blocks]


@pytest.mark.parametrize(("architecture", "family"), FAMILIES)
def test_a_model_computes_what_its_decoded_weights_compute(architecture, family, tmp_path) -> None:
    model = model_of(family)
    path = write(tmp_path / "model.gguf", architecture, model)
    loaded = model_of(family)
    with torch.no_grad():
        for tensor in loaded.state_dict().values():
            tensor.zero_()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load_quantized(loaded, path, progress=False)
    expected = WARNINGS.get(family, [])
    assert len(told) == len(expected), [str(warning.message) for warning in told]
    for warning, text in zip(told, expected, strict=True):
        assert re.fullmatch(text if isinstance(text, re.Pattern) else re.escape(text), str(warning.message))
    stacks = [module for module in loaded.modules() if isinstance(module, MarlinExperts)]
    mixtures = {name.partition(".experts.")[0] for name in model.state_dict() if ".experts." in name}
    assert len(stacks) == len(mixtures)
    assert sum(isinstance(module, MarlinLinear) for module in loaded.modules()) >= (4 if "mamba" in family else 8)
    torch.testing.assert_close(outputs(loaded), outputs(model), rtol=1e-4, atol=1e-4)


def test_plain_projections_get_back_the_order_of_their_rows(tmp_path) -> None:
    """Mixed files store some matrices in 16 bits. llama.cpp reorders the rows of such q and k, too."""
    model = model_of("llama")
    path = write(
        tmp_path / "m.gguf", "llama", model, lambda name: "F16" if "attn_q" in name or "attn_k" in name else "Q4_0"
    )
    loaded = model_of("llama")
    load_quantized(loaded, path, progress=False)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    stored = convert.open_reader(path).tensors["blk.0.attn_q.weight"].read()
    assert not torch.equal(stored.float(), model.model.layers[0].self_attn.q_proj.weight)


def test_plain_matrices_of_gpt2_get_back_their_shape(tmp_path) -> None:
    """In transformers, these matrices are `[K, N]`, packed or not."""
    model, loaded = model_of("gpt2"), model_of("gpt2")
    path = write(tmp_path / "m.gguf", "gpt2", model, lambda name: "F16" if "ffn_up" in name else "Q4_0")
    load_quantized(loaded, path, progress=False)
    weights = (each.transformer.h[1].mlp.c_fc.weight for each in (loaded, model))
    assert torch.equal(*weights)
    torch.testing.assert_close(outputs(loaded), outputs(model), rtol=1e-4, atol=1e-4)


def mixed(name: str) -> str:
    return "Q8_0" if "attn_v" in name or "token_embd" in name else "Q5_0" if "ffn_down" in name else "Q4_0"


@pytest.fixture
def unread(monkeypatch) -> None:
    """Makes two types unknown to the reader, in place of future types."""
    for kind in ("Q8_0", "Q5_0"):
        monkeypatch.delitem(DECODERS, kind)


def test_a_mixed_file_stays_packed(tmp_path) -> None:
    model = model_of("llama")
    path = write(tmp_path / "model.gguf", "llama", model, mixed)
    loaded = model_of("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_quantized(loaded, path, progress=False)
    for name, module in loaded.named_modules():
        if isinstance(module, PackedLayer):
            eight, five = name.endswith(("v_proj", "embed_tokens")), name.endswith("down_proj")
            assert module.weight_format == ("uint8b128" if eight else "uint5b16" if five else "uint4b8"), name
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("unread")
def test_a_mixed_file_says_its_share_and_loads(tmp_path) -> None:
    model = model_of("llama")
    path = write(tmp_path / "model.gguf", "llama", model, mixed)
    stored = {tensor.name: tensor for tensor in convert.open_reader(path).tensors.values() if not tensor.is_plain}
    other = [tensor for name, tensor in stored.items() if mixed(name) != "Q4_0"]
    share = sum(tensor.nbytes for tensor in other) / sum(tensor.nbytes for tensor in stored.values())
    loaded = model_of("llama")
    with pytest.warns(
        UserWarning, match=rf"{share:.0%} of the bytes .* floats: Q5_0 \(\d+%\), Q8_0 \(\d+%\)\. They"
    ) as caught:
        load_quantized(loaded, path, progress=False)
    assert type(loaded.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert isinstance(loaded.model.layers[0].mlp.up_proj, MarlinLinear)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    held, size = (sum(sizes) for sizes in zip(*((4 * np.prod(t.shape), t.nbytes) for t in other), strict=True))
    assert f"take {held / 1e6:.3g} MB instead of {size / 1e6:.3g} MB" in str(caught[0].message)
    with pytest.raises(convert.UnsupportedFormat, match="is not a type that is read"):
        load_quantized(model_of("llama"), path, on_unsupported="error", progress=False)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(("architecture", "family"), [("qwen3moe", "qwen3_moe"), ("gpt-oss", "gpt_oss")])
def test_only_the_stack_that_is_not_read_becomes_floats(architecture, family, tmp_path) -> None:
    """llama.cpp's Q4_K_M stores some down projections in more bits. Gate and up stay packed."""
    model = model_of(family)
    path = write(
        tmp_path / "m.gguf", architecture, model, lambda name: "Q8_0" if "blk.1.ffn_down_exps" in name else "Q4_0"
    )
    loaded = model_of(family)
    with pytest.warns(UserWarning, match=r"become floats: Q8_0 \(\d+%\)\. They"):
        report = load_quantized(loaded, path, progress=False)
    assert not [layer for layer in report.left if "experts" in layer.name]
    packed, mixed = (layer.mlp.experts for layer in loaded.model.layers)
    assert isinstance(packed, MarlinExperts) and isinstance(packed.down, ExpertWeights)
    assert isinstance(mixed, MarlinExperts) and isinstance(mixed.gate_up, ExpertWeights)
    whole = model.model.layers[1].mlp.experts.down_proj
    assert torch.equal(mixed.down.weight, whole if family == "qwen3_moe" else whole.mT)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(convert.UnsupportedFormat, match="Q8_0 is not a type that is read"):
        load_quantized(model_of(family), path, on_unsupported="error", progress=False)


FLOAT_STACKS = (
    ("qwen3moe", "qwen3_moe", "down"),
    ("qwen3moe", "qwen3_moe", "gate"),
    ("gpt-oss", "gpt_oss", "gate|up"),
    ("gemma4", "gemma4 mixture", "gate_up"),
    ("llama4", "llama4", "gate|up|down"),
    ("qwen3moe", "qwen3_moe", "gate|up|down"),
)


@pytest.mark.parametrize(("architecture", "family", "parts"), FLOAT_STACKS)
def test_stacks_of_experts_in_floats_stay_floats(architecture, family, parts, tmp_path) -> None:
    """A float stack loads beside packed stacks and alone, without a warning about its type."""
    model, loaded = model_of(family), model_of(family)
    stack = re.compile(rf"ffn_({parts})_exps")
    path = write(
        tmp_path / "m.gguf", architecture, model, lambda name: "F16" if stack.search(name) or "emb" in name else "Q4_0"
    )
    with torch.no_grad():
        for tensor in loaded.state_dict().values():
            tensor.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*computes something else than MarlinExperts")
        load_quantized(loaded, path, progress=False)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_from_pretrained_loads_experts_in_floats(tmp_path) -> None:
    """transformers reports none of these tensors as unexpected or missing."""
    model = model_of("gpt_oss")
    write(tmp_path / "m.gguf", "gpt-oss", model, lambda name: "F16" if "_exps" in name or "emb" in name else "Q4_0")
    config = model_of("gpt_oss").config
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", config=config, dtype=torch.float32, output_loading_info=True
    )
    assert not info["unexpected_keys"] and not info["missing_keys"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("unread")
def test_from_pretrained_says_it_and_loads(tmp_path, monkeypatch) -> None:
    _, weights = write_gguf(tmp_path / "tiny.gguf", MODELS / "auto-round-asym-g32", "Q4_0", embedding="Q8_0")
    told: list[str] = []
    monkeypatch.setattr(packed_checkpoint.logger, "warning", told.append)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float16)
    assert len(told) == 1 and "of its matrices have no weight format and become floats: Q8_0 (" in told[0]
    table = model.model.embed_tokens
    assert type(table) is torch.nn.Embedding and table.weight.dtype == torch.float16
    assert torch.equal(table.weight, torch.from_numpy(weights["model.embed_tokens"]).half())
    assert isinstance(model.model.layers[0].mlp.up_proj, MarlinLinear)
    transformers.take_over(on_unsupported="error")
    try:
        with pytest.raises(convert.UnsupportedFormat, match="Q8_0 is not a type"):
            AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    finally:
        transformers.take_over()


def test_value_heads_that_fill_no_groups_make_one_matrix_floats(tmp_path) -> None:
    """The reader reorders the output projection's columns by value heads, so a head must fill whole groups of 32."""
    small = {"linear_value_head_dim": 16}
    model, loaded = model_of("qwen35", **small), model_of("qwen35", **small)
    path = write(tmp_path / "m.gguf", "qwen35", model)
    report = load_quantized(loaded, path, progress=False)
    assert [(layer.name, "a value head does not fill whole groups of 32" in layer.reason) for layer in report.left] == [
        ("model.layers.0.linear_attn.out_proj", True)
    ]
    weights = (each.model.layers[0].linear_attn.out_proj.weight for each in (loaded, model))
    assert torch.equal(*weights)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_nvfp4_of_gemma_4_has_the_scales_of_experts_in_its_own(tmp_path) -> None:
    """The tensor `ffn_down_exps.scale` has the router's scales of the experts, and with NVFP4 also the weights' scales.

    With NVFP4 it therefore becomes the global scales of the weights, and the router gets ones.
    """
    scales = torch.tensor([0.5, 1.0, 2.0, 3.0])
    for kind, router in (("NVFP4", torch.ones(4)), ("Q4_0", scales)):
        blocks = np.full((4, 64, 36), 0x38 if kind == "NVFP4" else 0, dtype=np.uint8)
        writer = Writer(tmp_path / "m.gguf", "gemma4").add("blk.0.ffn_down_exps.weight", blocks, kind)
        path = writer.add("blk.0.ffn_down_exps.scale", scales.numpy()).write()
        reader = convert.open_reader(path, gguf_names="hf")
        layers = list(reader)
        assert [layer.name for layer in layers] == [f"model.layers.0.experts.{e}.down_proj" for e in range(4)]
        if kind == "NVFP4":
            assert torch.equal(torch.stack([layer.global_scale.view(()) for layer in layers]), scales)
        others = dict(reader.other_tensors())
        assert others.keys() == {"model.layers.0.router.per_expert_scale"}
        assert torch.equal(others["model.layers.0.router.per_expert_scale"], router)


def test_the_table_of_names_is_that_of_gguf_and_transformers() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "gguf_table.py"))
    assert made["text"]() == made["FILE"].read_text()


def test_the_page_lists_the_architectures() -> None:
    page = (ROOT / "docs" / "formats" / "checkpoints.md").read_text()
    assert "".join(f"| {name} | {known.model_type} |\n" for name, known in ARCHITECTURES.items()) in page


def test_what_both_projects_have_is_read_or_refused_with_a_reason() -> None:
    """Checks the architectures whose names in gguf and transformers are equal, except for punctuation and a suffix."""
    page = (ROOT / "docs" / "formats" / "checkpoints.md").read_text()
    refused = page.partition("Some architectures that both llama.cpp and transformers support are not read:\n\n")[2]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", refused.partition("\n\n")[0], re.MULTILINE)
    stated = {name for row in rows[1:] for name in row.split(", ")}
    theirs = {re.sub("[^a-z0-9]|text$", "", kind) for kind in MODEL_MAPPING_NAMES}
    both = {name for name in MODEL_ARCH_NAMES.values() if re.sub("[^a-z0-9]", "", name) in theirs}
    assert len(stated) > 10 and both - ARCHITECTURES.keys() - stated == {"clip"}  # clip is the image encoder of a model


def test_an_unknown_architecture_says_what_to_do(tmp_path) -> None:
    model = model_of("llama")
    path = write(tmp_path / "m.gguf", "llama", model)
    text = b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0"
    path.write_bytes(path.read_bytes().replace(text + b"llama", text + b"plamo"))
    said = (
        r"m\.gguf: the architecture 'plamo' has no table of transformers' names; load the safetensors of the model "
        r"that was converted, or read the tensors under their own names: gguf_names='gguf'$"
    )
    with pytest.raises(convert.UnsupportedFormat, match=said):
        load_quantized(model, path, progress=False)
    with pytest.raises(convert.UnsupportedFormat, match=said):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert len(convert.open_reader(path)) == 16


def test_an_architecture_that_only_transformers_reads_is_loaded_by_transformers(tmp_path, monkeypatch) -> None:
    """T5 has no table of names here. transformers' own code for T5 decodes the whole file."""
    sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 1, "num_heads": 2}
    config = T5Config(**sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0)
    file = Writer(tmp_path / "m.gguf", "t5")
    model, writer = T5ForConditionalGeneration(config).eval(), file.gguf
    for name, value in {
        "embedding_length": 64,
        "feed_forward_length": 96,
        "block_count": 1,
        "context_length": 512,
    }.items():
        writer.add_uint32(f"t5.{name}", value)
    for name, value in {"head_count": 2, "key_length": 32, "value_length": 32, "relative_buckets_count": 32}.items():
        writer.add_uint32(f"t5.attention.{name}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_decoder_start_token_id(0)
    writer.add_token_list([f"t{number}" for number in range(64)])
    names, kind = get_tensor_name_map(MODEL_ARCH.T5, 1), GGMLQuantizationType.Q4_0
    for name, tensor in model.state_dict().items():
        target, values = names.get_name(name, try_suffixes=(".weight",)), tensor.numpy()
        if name.endswith("embed_tokens.weight"):
            continue  # these names are tied to the shared table
        if values.ndim == 1 or "relative" in name:
            writer.add_tensor(target, values)
            continue
        stored = quantize(values, kind)
        writer.add_tensor(target, stored, raw_dtype=kind)
        values[...] = dequantize(stored, kind)
    file.write()
    told: list[str] = []
    monkeypatch.setattr(take_over_logger, "warning", told.append)
    load = AutoModelForSeq2SeqLM.from_pretrained
    loaded = load(tmp_path, gguf_file="m.gguf", dtype=torch.float32, device_map="cpu")
    assert len(told) == 1 and "without torch_marlin_metal, because: " in told[0] and "architecture 't5'" in told[0]
    with transformers.restored():
        theirs = load(tmp_path, gguf_file="m.gguf", dtype=torch.float32, device_map="cpu")
    with torch.no_grad():
        expected = theirs(IDS, decoder_input_ids=IDS).logits
        assert torch.equal(loaded(IDS, decoder_input_ids=IDS).logits, expected)
    assert torch.equal(loaded.shared.weight, model.shared.weight)
    with pytest.raises(convert.UnsupportedFormat, match="'t5' has no table of transformers' names"):
        load(tmp_path, gguf_file="m.gguf", quantization_config=transformers.MarlinConfig())
