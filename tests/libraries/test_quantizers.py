"""A patcher together with a quantizer: what is made of weights is quantized, or left alone, as these would be.

What each quantizer makes of each kind of patch, and what of it is saved, is in `tests/compatibility`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
    TorchAoConfig,
)
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from patcher import (
    InvalidPatcherError,
    PatchConflictError,
    PatchedWeightsError,
    Patcher,
    checkpoint_weights,
    fused_parameters,
    plan,
)
from patcher.fusions import QKV
from tests.support import shared
from tests.support.beside import FUSED_QKV, LINEAR_EXPERTS, LinearExperts
from tests.support.comparing import logits
from tests.support.quantizers import (
    Quantizer,
    bnb_int8,
    bnb_nf4,
    is_quantized,
    layers,
    quanto_int8,
    torchao_int8,
)
from tests.support.replacements import JOINED, OWN
from tests.support.tiny import (
    save_tiny,
    tiny_gpt2_config,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
)

both = pytest.mark.parametrize("quantizer", [bnb_int8, torchao_int8])
each = pytest.mark.parametrize("quantizer", [bnb_int8, torchao_int8, quanto_int8])
GATE_UP = Patcher(fusions="gate_up")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Every expert is used: a router that decides between nearly equal experts would hide how near the outputs are.
    return shared.checkpoint(tiny_qwen2_moe_config(num_experts_per_tok=4))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_mixtral_config())


# --- a packed layer, part by part ----------------------------------------------------------------------------------


@each
def test_one_part_of_a_packed_layer_is_quantized_by_itself(quantizer: Quantizer, tmp_path: Path) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
    config = GPTNeoXConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    folder, split = shared.checkpoint(config), Patcher(fusions="split")
    others = quantizer(["q_proj", "v_proj", "dense", "dense_h_to_4h", "dense_4h_to_h", "embed_out", "lm_head"])
    model = AutoModelForCausalLM.from_pretrained(folder, patcher=split, quantization_config=others)

    packed = model.gpt_neox.layers[0].attention.query_key_value
    assert [name for name, part in packed.named_children() if is_quantized(part)] == ["k_proj"]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    weight = plain.gpt_neox.layers[0].attention.query_key_value.weight
    assert torch.equal(packed.q_proj.weight, weight.view(4, 3, 16, 64)[:, 0].flatten(0, 1))
    assert torch.nn.functional.cosine_similarity(logits(model), logits(plain), dim=-1).min() > 0.99
    with pytest.raises(PatchedWeightsError, match=r"k_proj.weight can.t be saved in the original format"):
        model.save_pretrained(tmp_path)


@each
@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
def test_rows_of_a_quantized_layer_are_those_of_stock(quantizer: Quantizer, name: str, llama: Path) -> None:
    patchers = None, Patcher(fusions="qkv")
    models = [LlamaForCausalLM.from_pretrained(llama, patcher=x, quantization_config=quantizer()) for x in patchers]
    layer, part = (getattr(model.model.layers[1].self_attn, name) for model in models)
    values = [getattr(found.weight, "dequantize", found.weight.detach)() for found in (layer, part)]
    assert torch.equal(values[0], values[1])
    x = torch.randn(3, 64)
    torch.testing.assert_close(part(x), layer(x))
    lengths = [piece.length for piece in fused_parameters(models[1])["model.layers.1.self_attn.qkv_proj.weight"]]
    assert lengths == [64, 32, 32]


def test_a_weight_that_is_packed_has_no_rows(llama: Path) -> None:
    """Two values of four bits are a byte, and bytes are one column, or lie in tiles after the first forward."""
    qkv = Patcher(fusions="qkv")
    model = LlamaForCausalLM.from_pretrained(llama, patcher=qkv, quantization_config=bnb_nf4())
    stock = LlamaForCausalLM.from_pretrained(llama, quantization_config=bnb_nf4())
    part = model.model.layers[1].self_attn.k_proj
    for _ in range(2):
        with pytest.raises(
            PatchConflictError, match=r"k_proj is rows of qkv_proj .* its weight is quantized, and packed"
        ):
            part.weight.sum()
        with pytest.raises(InvalidPatcherError, match=r"qkv_proj.weight is quantized and packed, so none of .*k_proj"):
            fused_parameters(model)
        x = torch.randn(3, 64)
        torch.testing.assert_close(part(x), stock.model.layers[1].self_attn.k_proj(x))


# --- a replacement of layers that stock doesn't quantize -----------------------------------------------------------


@both
def test_experts_as_linear_layers_are_all_quantized(quantizer: Quantizer, moe: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(moe, patcher=LINEAR_EXPERTS, quantization_config=quantizer())
    experts = [module for module in model.modules() if isinstance(module, LinearExperts)]
    linear = [module for part in experts for module in part.modules() if isinstance(module, nn.Linear)]
    assert (len(experts), len(linear)) == (2, 2 * 4 * 3)
    assert all(is_quantized(module) for module in linear)
    # Stock quantizes the other linear layers and no expert, which is why one replaces them.
    stock = AutoModelForCausalLM.from_pretrained(moe, quantization_config=quantizer())
    assert stock.model.layers[0].mlp.experts.down_proj.dtype != torch.int8
    assert len(layers(stock)) == 2 * 8 + 1
    assert layers(stock) == {name: value for name, value in layers(model).items() if ".experts." not in name}


@both
def test_quantized_experts_compute_nearly_what_the_stock_quantized_model_does(quantizer: Quantizer, moe: Path) -> None:
    stock = logits(AutoModelForCausalLM.from_pretrained(moe, quantization_config=quantizer()))
    ours = logits(AutoModelForCausalLM.from_pretrained(moe, patcher=LINEAR_EXPERTS, quantization_config=quantizer()))
    plain = logits(AutoModelForCausalLM.from_pretrained(moe))
    assert not torch.equal(ours, stock)  # the experts are quantized as well
    error = (stock - plain).norm() / plain.norm()
    assert (ours - plain).norm() / plain.norm() < 1.5 * error
    assert torch.nn.functional.cosine_similarity(ours, stock, dim=-1).min() > 0.99


@both
def test_computed_buffers_survive_quantization(quantizer: Quantizer, moe: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(moe, patcher=LINEAR_EXPERTS, quantization_config=quantizer())
    for layer in model.model.layers:
        torch.testing.assert_close(layer.mlp.experts.thirds.float(), torch.full((3,), 1 / 3), atol=1e-3, rtol=0)
        assert torch.equal(layer.mlp.experts.offset, torch.arange(5))


# --- names of stock layers in a config -----------------------------------------------------------------------------

JOINING = {
    "qkv": (Patcher(fusions="qkv"), ["q_proj", "k_proj", "v_proj"]),
    "gate_up": (GATE_UP, ["gate_proj", "up_proj"]),
    "class mapping": (JOINED, ["gate_proj", "up_proj"]),
}
joining = pytest.mark.parametrize(("patcher", "parts"), JOINING.values(), ids=JOINING)


def quantized_paths(folder: Path, quantizer: Any, patcher: Patcher | None = None) -> set[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, patcher=patcher, quantization_config=quantizer)
    return {path for path, is_it in layers(model).items() if is_it}


@each
@joining
def test_names_of_parts_are_refused_with_those_of_the_joined_layers(
    quantizer: Quantizer, patcher: Patcher, parts: Sequence[str], llama: Path
) -> None:
    joined = "qkv_proj" if "q_proj" in parts else "gate_up_proj"
    for names in ([parts[-1]], parts):
        pattern = rf"quantization_config names layers (?s:.*)layers\.{{0\.\.1}}\..*{parts[-1]}: part of .*\.{joined}\n"
        if names is parts and joined.endswith(parts[-1]) and quantizer is not torchao_int8:
            LlamaForCausalLM.from_pretrained(llama, patcher=patcher, quantization_config=quantizer(names))
            continue  # the name fits the joined layer too, and all that it is made of is named
        with pytest.raises(InvalidPatcherError, match=pattern):
            LlamaForCausalLM.from_pretrained(llama, patcher=patcher, quantization_config=quantizer(names))


@joining
def test_an_expression_may_name_the_parts_and_the_joined_layer(
    patcher: Patcher, parts: Sequence[str], llama: Path
) -> None:
    inside, joined = ("self_attn", "qkv_proj") if "q_proj" in parts else ("mlp", "gate_up_proj")
    every = quantized_paths(llama, bnb_int8(), patcher)
    skip = rf".*1.{inside}.({'|'.join([*parts, joined])})"
    (left,) = every - quantized_paths(llama, bnb_int8([skip, "lm_head"]), patcher)
    assert left == f"model.layers.1.{inside}.{joined}"


def test_the_names_that_the_model_has_here_are_as_good(llama: Path) -> None:
    """Also beside the name of a part, for one config that serves both models."""
    qkv = Patcher(fusions="qkv")
    every = quantized_paths(llama, bnb_int8(), qkv)
    for skip in (["qkv_proj"], ["k_proj", "qkv_proj"]):
        left = every - quantized_paths(llama, bnb_int8([*skip, "lm_head"]), qkv)
        assert left == {f"model.layers.{layer}.self_attn.qkv_proj" for layer in range(2)}


def test_a_name_that_fits_the_joined_layer_and_one_part_is_no_name_of_both(llama: Path) -> None:
    """`gate_up_proj` ends with `up_proj`."""
    with pytest.raises(InvalidPatcherError, match=r"mlp\.up_proj: part of .*gate_up_proj"):
        LlamaForCausalLM.from_pretrained(llama, patcher=GATE_UP, quantization_config=bnb_int8(["up_proj"]))


def test_modules_that_are_not_fused_are_named_as_ever(llama: Path) -> None:
    patcher = Patcher(fusions=QKV(modules="model.layers.0.self_attn"))
    found = quantized_paths(llama, bnb_int8(["model.layers.1.self_attn.k_proj", "lm_head"]), patcher)
    assert "model.layers.0.self_attn.qkv_proj" in found
    assert "model.layers.1.self_attn.q_proj" in found
    assert "model.layers.1.self_attn.k_proj" not in found


@pytest.mark.parametrize("name", ["experts", "model.layers.{}.mlp.experts", "gate_up_proj"])
@each
def test_stacks_are_named_by_the_layers_that_they_are_here(quantizer: Quantizer, name: str, mixtral: Path) -> None:
    names = [name.format(layer) for layer in range(2)]
    split = Patcher(fusions="sequential_experts")
    is_prefix = name.startswith("model") or (quantizer is torchao_int8 and name != "gate_up_proj")
    if is_prefix:  # which the quantizer takes for the name of all layers in it
        found = quantized_paths(mixtral, quantizer([*names, "lm_head"]), split)
        assert not [path for path in found if ".experts." in path]
    else:
        text = r"experts: part of model\.layers\.{0\.\.1}\.mlp\.experts\.{0\.\.3}\."
        with pytest.raises(InvalidPatcherError, match=text):
            quantized_paths(mixtral, quantizer([*names, "lm_head"]), split)
    left = quantized_paths(mixtral, quantizer([r".*\.experts\..*", "lm_head"]), split)
    assert left == quantized_paths(mixtral, quantizer())


def test_one_expert_can_be_left_alone(mixtral: Path) -> None:
    patcher = Patcher(fusions="sequential_experts")
    every = quantized_paths(mixtral, bnb_int8(), patcher)
    left = every - quantized_paths(mixtral, bnb_int8(["model.layers.1.mlp.experts.2", "lm_head"]), patcher)
    assert left == {f"model.layers.1.mlp.experts.2.{name}_proj" for name in ("gate", "up", "down")}


def test_what_a_replacement_makes_of_stacks_is_left_alone_with_them(moe: Path) -> None:
    stock = quantized_paths(moe, bnb_int8(["experts", "lm_head"]))
    assert quantized_paths(moe, bnb_int8([r".*\.experts\..*", "lm_head"]), LINEAR_EXPERTS) == stock
    with pytest.raises(InvalidPatcherError, match=r"experts: part of .*experts\.{0\.\.3}\.gate_proj"):
        quantized_paths(moe, bnb_int8(["gate_up_proj"]), LINEAR_EXPERTS)


def test_torchao_goes_by_names_of_parameters(llama: Path) -> None:
    """So `q_proj` names nothing, of stock and here alike."""
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=["q_proj", "k_proj", "v_proj", "lm_head"])
    assert len(quantized_paths(llama, config)) == 2 * 7
    assert len(quantized_paths(llama, config, Patcher(fusions="qkv"))) == 2 * 5


def test_settings_of_single_layers_are_by_the_names_of_joined_ones(llama: Path) -> None:
    from torchao.quantization import FqnToConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    dynamic, weights = Int8DynamicActivationInt8WeightConfig(), Int8WeightOnlyConfig()
    here = "model.layers.0.self_attn"
    parts: dict[str, Any] = {f"{here}.{name}_proj": dynamic for name in "qkv"}
    qkv = Patcher(fusions="qkv")

    def load(settings: dict[str, Any], patcher: Patcher | None = qkv) -> Any:
        config = TorchAoConfig(FqnToConfig(settings))
        return LlamaForCausalLM.from_pretrained(llama, patcher=patcher, quantization_config=config)

    with pytest.raises(InvalidPatcherError, match=rf"{here}\.v_proj: part of {here}\.qkv_proj\n"):
        load(parts)
    rest = {r"re:.*layers\.1.*\.(q|k|v|qkv)_proj": weights, r"re:.*\.o_proj\.weight": weights}
    model = load({f"{here}.qkv_proj": dynamic, **rest})
    assert {path.removeprefix("model.layers.") for path, is_it in layers(model).items() if is_it} == {
        f"{layer}.self_attn.{name}" for layer in range(2) for name in ("qkv_proj", "o_proj")
    }
    kinds = [layer.self_attn.qkv_proj.weight.act_quant_kwargs is not None for layer in model.model.layers]
    assert kinds == [True, False]
    stock = load(parts | rest, None)
    torch.testing.assert_close(logits(model), logits(stock), atol=1e-5, rtol=1e-5)
    both = load(parts | rest | {f"{here}.qkv_proj": weights})  # one config for both models
    assert both.model.layers[0].self_attn.qkv_proj.weight.act_quant_kwargs is None


class OwnConfig(QuantizationConfigMixin):
    def __init__(self, **settings: Any) -> None:
        self.quant_method = "own"  # type: ignore[assignment]
        self.settings = settings


class OwnQuantizer(HfQuantizer):
    """Quantizes nothing, and asks nobody which layers it shall leave alone."""

    is_trainable = True

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)

    def is_serializable(self) -> bool:
        return True


def test_a_quantizer_that_looks_for_names_in_its_own_way_is_given_none_of_parts(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "own", OwnQuantizer)
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "own", OwnConfig)
    for settings in ({"only": ["k_proj"]}, {"model.layers.1.self_attn.k_proj": 4}):
        config = OwnConfig(**settings)
        LlamaForCausalLM.from_pretrained(llama, quantization_config=config)
        LlamaForCausalLM.from_pretrained(llama, patcher=GATE_UP, quantization_config=config)
        with pytest.raises(InvalidPatcherError, match=r"self_attn\.k_proj: part of .*self_attn\.qkv_proj"):
            LlamaForCausalLM.from_pretrained(llama, patcher=Patcher(fusions="qkv"), quantization_config=config)


# --- checkpoints that are quantized --------------------------------------------------------------------------------


@pytest.mark.parametrize("quantizer", [bnb_int8, bnb_nf4, torchao_int8])
@pytest.mark.parametrize("patcher", [JOINED, FUSED_QKV, JOINED.replace(strict=False), GATE_UP])
def test_of_quantized_weights_no_others_are_made(
    quantizer: Quantizer, patcher: Patcher, llama: Path, tmp_path: Path
) -> None:
    LlamaForCausalLM.from_pretrained(llama, quantization_config=quantizer()).save_pretrained(tmp_path)
    part = "q_proj" if patcher is FUSED_QKV else "gate_proj"
    advice = r"Load the full-precision checkpoint with the patcher, and quantize that while it loads\.\Z"
    pattern = rf"quantized, and the patcher converts or replaces(?s:.*){part}(?s:.*){advice}"
    with pytest.raises(PatchedWeightsError, match=pattern):
        LlamaForCausalLM.from_pretrained(tmp_path, patcher=patcher)


@pytest.mark.parametrize("quantizer", [bnb_int8, bnb_nf4])
def test_what_isnt_quantized_in_a_file_cant_be_in_the_model(
    quantizer: Quantizer, mixtral: Path, tmp_path: Path
) -> None:
    """Stock leaves stacks as they are, and as layers its quantizer takes them for quantized ones."""
    MixtralForCausalLM.from_pretrained(mixtral, quantization_config=quantizer()).save_pretrained(tmp_path)
    with pytest.raises(
        PatchedWeightsError,
        match=r"converts or replaces(?s:.*)experts(?s:.*)Load the full-prec",
    ):
        MixtralForCausalLM.from_pretrained(tmp_path, patcher=Patcher(fusions="sequential_experts"))


class OwnLinear(nn.Module):
    """Neither a layer that a quantizer takes, nor one that knows scales."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


def test_integers_are_not_the_weight_of_a_layer_that_isnt_quantized(llama: Path, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(llama, quantization_config=bnb_int8()).save_pretrained(tmp_path)
    patcher = Patcher(module_mapping={"model.layers.0.self_attn.o_proj": OwnLinear})
    with pytest.raises(PatchedWeightsError, match=r"converts or replaces(?s:.*):\n.*o_proj\.SCB"):
        LlamaForCausalLM.from_pretrained(tmp_path, patcher=patcher)
    assert not plan(tmp_path, patcher).ok


class OwnGPT2MLP(GPT2MLP):  # type: ignore[misc]
    """The same layers."""


class OwnNorm(nn.LayerNorm):
    conversion_mapping = (WeightConverter("weight", "weight", [Transpose(0, 0)]),)


class LinearGPT2MLP(GPT2MLP):  # type: ignore[misc]
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.c_fc = nn.Linear(self.c_fc.nx, self.c_fc.nf)


@pytest.mark.parametrize("quantizer", [bnb_int8, bnb_nf4])
def test_weights_that_a_quantizer_transposes_have_the_right_shapes(quantizer: Quantizer, tmp_path: Path) -> None:
    """bitsandbytes does so with Conv1D, and only with that."""
    folder = save_tiny(tiny_gpt2_config(), tmp_path / "stock")
    options: dict[str, Any] = {"quantization_config": quantizer(), "dtype": torch.float32}
    stock = GPT2LMHeadModel.from_pretrained(folder, **options)
    for patcher in (Patcher({"GPT2MLP": OwnGPT2MLP}), Patcher(module_mapping={"transformer.ln_f": OwnNorm})):
        assert torch.equal(logits(GPT2LMHeadModel.from_pretrained(folder, patcher=patcher, **options)), logits(stock))
        assert plan(folder, patcher, quantization_config=quantizer()).ok
    with pytest.raises(PatchedWeightsError, match=r"mlp\.c_fc\.weight: (?s:.*)has some transposed"):
        GPT2LMHeadModel.from_pretrained(folder, patcher=Patcher({"GPT2MLP": LinearGPT2MLP}), **options)


def test_a_part_that_alone_was_left_alone_is_no_part(llama: Path, tmp_path: Path) -> None:
    config = bnb_int8(["q_proj", "lm_head"])
    LlamaForCausalLM.from_pretrained(llama, quantization_config=config).save_pretrained(tmp_path)
    with pytest.raises(InvalidPatcherError, match=r"self_attn\.q_proj: part of .*self_attn\.qkv_proj"):
        LlamaForCausalLM.from_pretrained(tmp_path, patcher=Patcher(fusions="qkv"))


def test_a_plan_says_so_too(llama: Path, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(llama, quantization_config=bnb_int8()).save_pretrained(tmp_path)
    found = plan(tmp_path, GATE_UP)
    assert not found.ok
    assert re.search("Load the full-precision checkpoint", str(found))


# --- saving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patcher", [FUSED_QKV, GATE_UP, Patcher(fusions="qkv")], ids=["classes", "gate_up", "qkv"])
@both
def test_what_was_joined_and_then_quantized_is_not_saved_wrong(
    quantizer: Quantizer, patcher: Patcher, llama: Path, tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher, quantization_config=quantizer())
    with pytest.raises(PatchedWeightsError, match=r"layers\.0\.\w+\.(qkv|gate_up)_proj\.weight.*is quantized"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(PatchedWeightsError, match=r"layers\.0\.\w+\.(qkv|gate_up)_proj\.weight.*is quantized"):
        list(checkpoint_weights(model))  # of torchao it gets `_weight_qdata` in the place of the weight


def test_a_quanto_model_says_that_it_is_quantized(llama: Path, tmp_path: Path) -> None:
    """Its state dict has `weight._data` in the place of the weight. quanto itself saves none."""
    model = LlamaForCausalLM.from_pretrained(llama, patcher=GATE_UP, quantization_config=quanto_int8())
    with pytest.raises(PatchedWeightsError, match=r"gate_up_proj\.weight.*is quantized"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@both
def test_a_quantized_model_without_conversions_is_saved_and_loaded_again(
    quantizer: Quantizer, llama: Path, tmp_path: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=OWN, quantization_config=quantizer())
    model.save_pretrained(tmp_path)
    for options in ({"patcher": OWN}, {}):
        again = LlamaForCausalLM.from_pretrained(tmp_path, **options)
        assert is_quantized(again.model.layers[0].mlp.up_proj)
        torch.testing.assert_close(logits(again), logits(model), atol=1e-5, rtol=1e-5)


def test_apply_refuses_a_quantized_model_before_it_reads_anything(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, quantization_config=bnb_int8())
    with pytest.raises(InvalidPatcherError, match=r"quantized model.*Load it again with patcher="):
        OWN.apply(model)


@pytest.mark.parametrize("patcher", [None, OWN, JOINED], ids=["stock", "own", "joined"])
def test_a_quantizer_that_fails_is_not_said_to_lack_weights(patcher: Patcher | None, llama: Path) -> None:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    config = TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(7)))
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        AutoModelForCausalLM.from_pretrained(llama, patcher=patcher, quantization_config=config)
