"""`Patcher.apply` keeps what a model holds beyond its config, both ways, or refuses it by name."""

from __future__ import annotations

import functools
import gc
import logging
import pickle
import types
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BartConfig,
    BartForConditionalGeneration,
    BertModel,
    EncoderDecoderModel,
    MixtralForCausalLM,
    PretrainedConfig,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)
from transformers.core_model_loading import Chunk, Transpose, WeightConverter, WeightRenaming
from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeAttention
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2Encoder

from patcher import (
    InvalidPatcherError,
    PatchConstructionError,
    PatchedWeightsError,
    Patcher,
    UnmatchedPatchError,
    checkpoint_weights,
    load_original_state_dict,
    original_state_dict,
    report,
)
from patcher.fusions import Fusion
from tests.functions.modeling_tiny import TinyConfig, TinyModel
from tests.support.beside import LINEAR_EXPERTS
from tests.support.bringing import ExpertLinears, ExpertStack
from tests.support.comparing import logits
from tests.support.replacements import JOINED, OWN, OwnLayer, OwnNorm
from tests.support.shared import checkpoint
from tests.support.tiny import (
    ENCODER_DECODER_SIZES,
    build_tiny,
    tiny_bert_config,
    tiny_inputs,
    tiny_llama_config,
    tiny_llava_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
    tiny_qwen3_config,
)

BOTH = Patcher(fusions=["qkv", "gate_up"])
Hold = Callable[[Any], object]


class SameMLP(LlamaMLP):
    """What `LlamaMLP` is, under another name."""


class ScaledAttention(LlamaAttention):
    """What `LlamaAttention` is, under another name."""


class SquareMLP(LlamaMLP):
    """The down projection is on the right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.gate_proj(x)) * self.up_proj(x) @ self.down_proj.weight


class DoubledMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


MLPS, ATTENTION = Patcher({"LlamaMLP": SameMLP}), Patcher({"LlamaAttention": ScaledAttention})
ROOT = Patcher({"LlamaForCausalLM": type("OwnLlama", (LlamaForCausalLM,), {})})


# --- what a model holds ----------------------------------------------------------------------------------------------


def bias(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.bias = nn.Parameter(torch.linspace(0, 1, 64))


def part_bias(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.linspace(0, 1, 64))


def _doubles(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def _doubles_first(module: nn.Module, args: Any) -> Any:
    return (2 * args[0], *args[1:])


def _doubles_gradients(module: nn.Module, incoming: Any, outgoing: Any) -> Any:
    return tuple(2 * each for each in incoming)


def hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(_doubles)


def hook_on_a_part(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(_doubles)


def pre_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_pre_hook(_doubles_first)


def backward_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_full_backward_hook(_doubles_gradients)


def edited_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 0.5


def scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.9


def _negative(self: Any, x: torch.Tensor) -> torch.Tensor:
    return -self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def method(model: Any) -> None:
    model.model.layers[1].mlp.forward = types.MethodType(_negative, model.model.layers[1].mlp)


def _positive(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, self.weight).abs()


def method_of_a_part(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.forward = types.MethodType(_positive, model.model.layers[1].mlp.up_proj)


def other_class(model: Any) -> None:
    model.model.layers[0].mlp.__class__ = DoubledMLP


def other_layer(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj, nn.Tanh())


def added_layer(model: Any) -> None:
    model.model.layers.append(LlamaDecoderLayer(model.config, 3))
    model.config.num_hidden_layers = 4


def frozen(model: Any) -> None:
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].mlp.up_proj.requires_grad_(False)


def tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def untie(model: Any) -> None:
    model.config.tie_word_embeddings = True
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def tie_of_parts(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight


def modes(model: Any) -> None:
    model.train()
    model.model.layers[0].eval()


def generation(model: Any) -> None:
    model.generation_config.max_new_tokens = 7


def lora_on_the_head(model: Any) -> None:
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False))


def lora_on_a_part(model: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], layers_to_transform=[0], init_lora_weights=False)
    model.add_adapter(config)


def checkpointing(model: Any) -> None:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def plain_weight(model: Any) -> None:
    layer = model.model.layers[0].mlp.down_proj
    weight = layer.weight.detach()
    del layer.weight
    layer.weight = weight


def parametrization(model: Any) -> None:
    parametrizations.weight_norm(model.model.layers[0].mlp.down_proj)
    model.model.layers[0].mlp.down_proj.parametrizations.weight.original0.data *= 2


def parametrization_of_a_part(model: Any) -> None:
    parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    model.model.layers[0].mlp.up_proj.parametrizations.weight.original0.data *= 2


def dtypes(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.double()
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    model.model.layers[0].mlp.gate_proj.double()
    model.model.layers[0].mlp.down_proj.double()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output.float())


def implementation(model: Any) -> None:
    model.set_attn_implementation("eager")


def recorded(model: Any) -> None:
    model(**tiny_inputs(model.config), output_hidden_states=True, output_attentions=True)


#: What is held -> whether the logits show it.
HELD: dict[Hold, bool] = {
    bias: True,
    part_bias: True,
    hook: True,
    hook_on_a_part: True,
    pre_hook: True,
    backward_hook: False,
    edited_buffer: True,
    scaling: True,
    method: True,
    method_of_a_part: True,
    other_class: True,
    other_layer: True,
    added_layer: True,
    frozen: False,
    tie: True,
    tie_of_parts: True,
    modes: False,
    generation: False,
    lora_on_the_head: True,
    lora_on_a_part: True,
    checkpointing: False,
    parametrization: True,
    parametrization_of_a_part: True,
    dtypes: False,
    implementation: False,
    recorded: False,
}
MARKED = [pytest.param(each, marks=[pytest.mark.libraries] if "lora" in each.__name__ else []) for each in HELD]


def holding(hold: Hold, **changes: Any) -> Any:
    model = build_tiny(tiny_llama_config(num_hidden_layers=3, **changes))
    torch.manual_seed(0)
    hold(model)
    return model


def described(model: nn.Module) -> dict[str, Any]:
    """All that a model is and holds, so that two descriptions can be compared."""
    names = {id(each): path for path, each in model.named_modules()}
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found[f"{path} is"] = names[id(module)], type(module), module.training
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                for name, tensor in value.items():
                    found[f"{path}.{name}"] = _told(tensor)
            elif key not in ("_modules", "_weight_conversions", "_output_capturing_hooks_installed"):
                found[f"{path} has {key}"] = _told(value)
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[f"{name} is"] = first.setdefault(id(parameter), name)
    return found


def _told(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        kind = value.shape, value.dtype, value.requires_grad, type(value)
        return (*kind, value.detach().view(torch.uint8).numpy().tobytes() if value.dim() else value.item())
    if isinstance(value, dict):
        if all(isinstance(key, int) for key in value):  # hooks, but for those that record outputs
            return [_told(each) for each in value.values() if "output_capturing" not in str(each)]
        return {key: _told(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return sorted(map(str, value)) if isinstance(value, set) else [_told(each) for each in value]
    if isinstance(value, types.MethodType):
        return value.__func__, type(value.__self__)
    if isinstance(value, PretrainedConfig):
        return value.to_dict()
    return value if isinstance(value, bool | int | float | str | type | types.FunctionType) else type(value)


# --- fusions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", MARKED)
def test_a_fused_model_has_it_and_so_has_the_model_after_the_way_back(hold: Hold) -> None:
    if HELD[hold]:
        assert not torch.allclose(logits(holding(hold)), logits(holding(lambda model: None)), atol=1e-3)
    given = holding(hold)
    before = described(given)

    fused = BOTH.apply(given)
    assert described(given) == before
    assert hasattr(fused.model.layers[1].self_attn, "qkv_proj")
    assert {name: each.training for name, each in fused.named_modules() if name in dict(given.named_modules())} == {
        name: each.training for name, each in given.named_modules() if name in dict(fused.named_modules())
    }
    assert fused.generation_config.max_new_tokens == given.generation_config.max_new_tokens
    back = Patcher().apply(fused)
    assert described(back) == before
    assert torch.allclose(logits(fused), logits(given), atol=1e-5)
    assert torch.equal(logits(back), logits(given))


@pytest.mark.parametrize("hold", [backward_hook, checkpointing, frozen, tie, hook])
def test_a_step_of_a_fused_model_is_that_of_the_given_one(hold: Hold) -> None:
    given, changed = holding(hold), holding(hold)
    fused, inputs = BOTH.apply(changed), tiny_inputs(given.config)
    for model in (given, fused):
        model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert all(parameter.grad is None for parameter in changed.parameters())
    back = Patcher().apply(fused)
    for (name, expected), found in zip(given.named_parameters(), back.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=1e-5), name
        assert found.requires_grad is expected.requires_grad, name


@pytest.mark.parametrize(
    "hold", [hook_on_a_part, method_of_a_part, parametrization_of_a_part, other_layer, tie_of_parts]
)
def test_a_module_that_can_not_be_fused_any_more_is_left_alone_and_told(hold: Hold) -> None:
    fused = BOTH.apply(holding(hold))
    assert sum(hasattr(layer.mlp, "gate_up_proj") for layer in fused.model.layers) in (1, 2)
    assert any(path.endswith("mlp") for path, reason in report(fused).refused)


@pytest.mark.parametrize(
    ("config", "model_class", "fusions"),
    [
        (tiny_bert_config(), None, "qkv"),
        (tiny_qwen3_config(), None, ["qkv", "gate_up"]),
        (BartConfig(**ENCODER_DECODER_SIZES), BartForConditionalGeneration, ["qkv", "kv"]),
        (tiny_mixtral_config(), None, ["qkv", "sequential_experts"]),
        (
            ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8),
            ViTModel,
            "patch_embeddings",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_architectures(config: Any, model_class: Any, fusions: Any) -> None:
    given = build_tiny(config, model_class=model_class).eval()
    inputs = tiny_inputs(config) if config.model_type != "vit" else {"pixel_values": torch.randn(2, 3, 32, 32)}
    for number, (name, module) in enumerate(given.named_modules()):
        if name.endswith(("layernorm", "LayerNorm", "layer_norm")):
            module.register_forward_hook(_doubles)
            module.weight.requires_grad_(bool(number % 2))
    before = described(given)
    fused = Patcher(fusions=fusions).apply(given)
    assert described(given) == before
    assert report(fused).fused
    back = Patcher().apply(fused)
    assert described(back) == before
    assert torch.allclose(logits(fused, inputs), logits(given, inputs), atol=1e-4)
    assert torch.equal(logits(back, inputs), logits(given, inputs))


# --- replacements ----------------------------------------------------------------------------------------------------


def bias_beside(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.bias = nn.Parameter(torch.ones(64))


def lora_beside(model: Any) -> None:
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


#: What is held in a Llama of which modules are replaced, and goes with it.
CARRIED = [edited_buffer, scaling, frozen, tie, untie, tie_of_parts, modes, generation, checkpointing, implementation]
CARRIED += [recorded, lora_beside, lora_on_the_head, bias_beside]
#: (patcher, what is held) -> why it is refused.
REFUSED = {
    (
        "attention",
        "lora_beside",
    ): r"self_attn\.q_proj has an adapter, which would be lost, because a module there is replaced\. Merge it",
    (
        "attention",
        "bias_beside",
    ): r"o_proj\.bias has the shape \(64,\) \(its config says None\), which would be lost",
    ("mlp and qkv", "lora_beside"): r"'qkv' found no module that it can fuse; .*q_proj is a Linear of peft\.",
    ("layer", "lora_beside"): r"self_attn\.q_proj has an adapter",
    ("layer", "bias_beside"): r"o_proj\.bias has the shape \(64,\)",
    ("model", "lora_beside"): r"self_attn\.q_proj has an adapter, which would be lost",
    ("model", "lora_on_the_head"): r"lm_head has an adapter, which would be lost",
    ("model", "checkpointing"): r"embed_tokens has hooks \(_forward_hooks\), .* Remove them",
    ("model", "bias_beside"): r"o_proj\.bias has the shape \(64,\) \(its config says None\), which would be lost",
}
PATCHERS = {"mlp": MLPS, "attention": ATTENTION, "model": ROOT, "mlp and qkv": MLPS | Patcher(fusions="qkv")}
PATCHERS["layer"] = Patcher({"LlamaDecoderLayer": OwnLayer})


@pytest.mark.parametrize(
    "hold", [pytest.param(each, marks=[pytest.mark.libraries] if "lora" in each.__name__ else []) for each in CARRIED]
)
@pytest.mark.parametrize("name", PATCHERS)
def test_a_replaced_model_has_it_and_so_has_the_model_after_the_way_back(name: str, hold: Hold) -> None:
    patcher, given = PATCHERS[name], holding(hold)
    before = described(given)
    if (name, hold.__name__) in REFUSED:
        with pytest.raises((InvalidPatcherError, UnmatchedPatchError), match=REFUSED[name, hold.__name__]):
            patcher.apply(given)
        assert described(given) == before
        return
    patched = patcher.apply(given)
    assert described(given) == before
    assert report(patched).replaced
    trained, now = ({key: each.requires_grad for key, each in each.named_parameters()} for each in (given, patched))
    assert all(trained[key] is now[key] for key in trained.keys() & now.keys())
    again = patcher.apply(patched)
    back = Patcher().apply(again)
    assert described(back) == before
    for model in (patched, again):
        assert torch.allclose(logits(model), logits(given), atol=1e-5)
    assert torch.equal(logits(back), logits(given))


@pytest.mark.parametrize(
    ("hold", "what"),
    [
        (hook, r"mlp has hooks \(_forward_hooks\), .* Remove them, and register them on the result"),
        (hook_on_a_part, r"up_proj has hooks \(_forward_hooks\)"),
        (pre_hook, r"mlp has hooks \(_forward_pre_hooks\)"),
        (backward_hook, r"mlp has hooks \(_backward_hooks\)"),
        (
            method,
            r"mlp\.forward was changed since the model was constructed, .* Undo that, apply the patcher, and change",
        ),
        (method_of_a_part, r"up_proj\.forward was changed"),
        (
            other_class,
            r"mlp is a DoubledMLP \(its config says LlamaMLP\), .* Undo that, apply the patcher, and change",
        ),
        (other_layer, r"up_proj is a Sequential \(its config says Linear\)"),
        (parametrization, r"down_proj is a ParametrizedLinear \(its config says Linear\)"),
        (plain_weight, r"down_proj\.weight isn't a parameter \(its config says \(64, 96\)\)"),
        (dtypes, "can't convert weights of several dtypes|has hooks"),
    ],
)
def test_what_a_replacement_would_lose_is_refused_by_name(hold: Hold, what: str) -> None:
    given = holding(hold)
    expected, before = logits(given), described(given)
    for patcher in (MLPS, JOINED):
        with pytest.raises(InvalidPatcherError, match=what):
            patcher.apply(given)
    assert described(given) == before
    assert torch.equal(logits(given), expected)


def test_a_layer_that_was_put_beside_its_fused_parameter_is_not_lost() -> None:
    fused = Patcher(fusions="qkv").apply(build_tiny(tiny_llama_config()))
    attention = fused.model.layers[0].self_attn
    attention._modules["q_proj"] = nn.Linear(64, 64, bias=False)
    with pytest.raises(InvalidPatcherError, match=r"0\.self_attn is fused, .*: q_proj was put into its _modules"):
        Patcher().apply(fused)


class OwnEncoder(Wav2Vec2Encoder):  # type: ignore[misc]
    """A replacement around a layer with weight_norm."""


def test_a_replacement_around_a_parametrized_layer_of_the_config() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Wav2Vec2Config(**sizes, conv_dim=(16,), conv_stride=(2,), conv_kernel=(3,), num_feat_extract_layers=1)
    given = Wav2Vec2Model(config).eval()
    inputs = {"input_values": torch.randn(2, 400)}
    patched = Patcher({"Wav2Vec2Encoder": OwnEncoder}).apply(given)
    assert type(patched.encoder) is OwnEncoder
    back = Patcher().apply(patched)
    assert type(back.encoder) is Wav2Vec2Encoder
    weights = [{name: each.data_ptr() for name, each in model.named_parameters()} for model in (given, patched, back)]
    assert weights[0] == weights[1] == weights[2]
    expected = given(**inputs).last_hidden_state
    assert all(torch.equal(model(**inputs).last_hidden_state, expected) for model in (patched, back))


def test_a_layer_that_was_added_is_not_left_as_it_is_in_silence() -> None:
    given = build_tiny(tiny_llama_config())
    given.model.layers.append(LlamaDecoderLayer(given.config, 2))
    with pytest.raises(InvalidPatcherError, match=r"can't replace model\.layers\.2\.mlp, a LlamaMLP that was added"):
        MLPS.apply(given)
    given.model.layers[0].extra = LlamaMLP(given.config)
    with pytest.raises(InvalidPatcherError, match=r"model\.layers\.0\.extra, a LlamaMLP that was added"):
        MLPS.apply(given)


def test_what_was_trained_comes_back_from_a_converting_replacement() -> None:
    given, inputs = build_tiny(tiny_llama_config()), tiny_inputs(tiny_llama_config())
    given.model.embed_tokens.requires_grad_(False)
    given.model.layers[0].mlp.requires_grad_(False)
    patched = JOINED.apply(given)
    assert [layer.mlp.gate_up_proj.weight.requires_grad for layer in patched.model.layers] == [False, True]
    for model in (given, patched):
        model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    back = Patcher().apply(patched)
    assert {type(layer.mlp) for layer in back.model.layers} == {LlamaMLP}
    for (name, expected), found in zip(given.named_parameters(), back.parameters(), strict=True):
        assert found.requires_grad is expected.requires_grad, name


def test_parts_that_are_frozen_each_its_own_way_are_not_joined() -> None:
    given = build_tiny(tiny_llama_config())
    given.model.layers[1].mlp.up_proj.requires_grad_(False)
    with pytest.raises(
        InvalidPatcherError, match=r"layers\.1\.mlp\.up_proj\.weight is frozen, and others of .*gate_proj"
    ):
        JOINED.apply(given)
    given.model.layers[1].self_attn.q_proj.requires_grad_(False)
    given.model.layers[1].self_attn.k_proj.requires_grad_(False)
    refused = dict(report(Patcher(fusions="qkv").apply(given)).refused)
    assert refused == {
        "model.layers.1.self_attn": "q_proj.weight, k_proj.weight are frozen, and others of q_proj.weight, "
        "k_proj.weight, v_proj.weight aren't"
    }


def test_a_trained_model_and_its_copy_share_what_is_not_converted_and_nothing_else() -> None:
    given = build_tiny(tiny_llama_config())
    for patcher in (BOTH, JOINED, MLPS, ROOT, Patcher()):
        own = {each.data_ptr(): name for name, each in given.named_parameters()}
        patched = patcher.apply(given)
        shared = {name for name, each in patched.named_parameters() if each.data_ptr() in own}
        made = {name for name, _ in patched.named_parameters() if "gate_up_proj" in name or "qkv_proj" in name}
        assert {name for name, _ in patched.named_parameters()} - made == shared
        assert not {id(each) for each in given.parameters()} & {id(each) for each in patched.parameters()}
        assert not {each.data_ptr() for each in given.buffers()} & {each.data_ptr() for each in patched.buffers()}


@pytest.mark.parametrize("patcher", [JOINED, MLPS, ROOT])
def test_nothing_is_loaded_and_a_model_is_constructed_without_weights(
    patcher: Patcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = build_tiny(tiny_llama_config())
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", _fail)
    made = list[torch.Tensor]()
    stock = LlamaMLP.__init__

    def constructed(self: Any, config: Any) -> None:
        stock(self, config)
        made.append(self.down_proj.weight)

    monkeypatch.setattr(LlamaMLP, "__init__", constructed)
    Patcher().apply(patcher.apply(given))
    assert made
    assert all(each.is_meta for each in made) or patcher is ROOT


def test_modules_that_are_replaced_follow_the_config_of_the_model() -> None:
    patched = ATTENTION.apply(build_tiny(tiny_llama_config()))
    patched.set_attn_implementation("eager")
    assert patched(**tiny_inputs(patched.config), output_attentions=True).attentions[0] is not None
    assert {id(module.config) for module in patched.modules() if hasattr(module, "config")} == {id(patched.config)}


def test_an_attribute_that_was_deleted_stays_so() -> None:
    given = build_tiny(tiny_llama_config())
    del given.model.layers[0].mlp.intermediate_size
    patched = MLPS.apply(given)
    back = Patcher().apply(patched)
    for model in (patched, back):
        assert [hasattr(layer.mlp, "intermediate_size") for layer in model.model.layers] == [False, True]


def test_one_patcher_after_the_other() -> None:
    given = build_tiny(tiny_llama_config())
    expected, before = logits(given), described(given)
    model: Any = given
    for patcher in (JOINED, BOTH, OWN, ROOT, JOINED.replace(name="again")):
        with OWN.applied():
            model = patcher.apply(model)
            LlamaForCausalLM(tiny_llama_config())  # which the block is for
        assert torch.allclose(logits(model), expected, atol=1e-5)
    assert described(Patcher().apply(model)) == before


class ScaledMLP(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(x) + self.steps


def test_new_weights_that_were_trained_stay_where_the_patcher_declares_them_again() -> None:
    scaled = Patcher({"LlamaMLP": ScaledMLP}, new_weights=[r"\.scale$", r"\.steps$"])
    patched = scaled.apply(build_tiny(tiny_llama_config()))
    for number, layer in enumerate(patched.model.layers):
        layer.mlp.scale.data.fill_(2.0 + number)
        layer.mlp.steps.fill_(0.5)
    patched.model.layers[0].mlp.scale.requires_grad_(False)
    for patcher in (scaled, scaled | Patcher(fusions="qkv")):
        again = patcher.apply(patched)
        assert torch.allclose(logits(again), logits(patched), atol=1e-5)
        assert [layer.mlp.scale.requires_grad for layer in again.model.layers] == [False, True]
        assert again.model.layers[0].mlp.steps is not patched.model.layers[0].mlp.steps
    assert {layer.mlp.scale.item() for layer in scaled.apply(Patcher().apply(patched)).model.layers} == {1.0}


def removed(model: Any) -> Any:
    del model.model.layers[0]
    return model


def exchanged(model: Any) -> Any:
    model.model.layers[0] = build_tiny(tiny_llama_config()).model.layers[0]
    return model


def moved(model: Any) -> Any:
    stock = build_tiny(tiny_llama_config())
    stock.model.layers[1] = model.model.layers[0]
    return stock


def in_two_places(model: Any) -> Any:
    model.model.layers[1].mlp = model.model.layers[0].mlp
    return model


def sub_model_moved(model: Any) -> Any:
    stock = build_tiny(tiny_llama_config())
    stock.model = model.model
    return stock


def part_patched(model: Any) -> Any:
    model.model = Patcher(fusions="gate_up").apply(model.model)
    return model


@pytest.mark.parametrize("change", [removed, exchanged, moved, in_two_places, sub_model_moved, part_patched])
@pytest.mark.parametrize(
    "patcher",
    [BOTH, MLPS, MLPS | Patcher(fusions="qkv"), Patcher(module_mapping={"model.layers.0.mlp": SameMLP})],
    ids=["fused", "replaced", "either", "by path"],
)
def test_the_way_back_of_a_model_whose_parts_were_changed(patcher: Patcher, change: Callable[[Any], Any]) -> None:
    patched = change(patcher.apply(build_tiny(tiny_llama_config())))
    back = Patcher().apply(patched)
    stock = build_tiny(tiny_llama_config())
    assert {type(module) for module in back.modules()} == {type(module) for module in stock.modules()}
    assert torch.allclose(logits(back), logits(patched), atol=1e-5)
    assert not report(back).patchers


def test_parts_that_were_patched_one_by_one_come_back(tmp_path: Path) -> None:
    config = tiny_bert_config()
    folder = str(checkpoint(config, model_class=BertModel))
    stock, inputs = EncoderDecoderModel.from_encoder_decoder_pretrained(folder, folder), tiny_inputs(config)
    inputs = {"input_ids": inputs["input_ids"], "decoder_input_ids": inputs["input_ids"]}
    stock.save_pretrained(tmp_path / "stock")
    model = EncoderDecoderModel.from_pretrained(tmp_path / "stock")
    model.encoder = Patcher({"BertOutput": OwnBertOutput}).apply(model.encoder)
    model.decoder = Patcher({"BertIntermediate": OwnBertIntermediate}, fusions="qkv").apply(model.decoder)
    assert len(report(model).replaced) == 4
    for patcher in (Patcher({"BertOutput": OwnBertOutput}), Patcher()):
        other = patcher.apply(model)
        assert len(report(other).replaced) == 4 * bool(patcher.class_mapping)
        assert torch.allclose(logits(other, inputs), logits(model, inputs), atol=1e-5)
    assert {type(module) for module in other.modules()} == {type(module) for module in stock.modules()}
    other.save_pretrained(tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        tmp_path / "stock" / "model.safetensors"
    ).read_bytes()


def test_a_class_that_was_derived_from_a_replacement_is_not_lost_on_the_way_back() -> None:
    patched = MLPS.apply(build_tiny(tiny_llama_config()))
    patched.model.layers[0].mlp.__class__ = type("Derived", (SameMLP,), {})
    assert [new for _, _, new in report(patched).replaced] == ["SameMLP", "SameMLP"]
    with pytest.raises(InvalidPatcherError, match=r"mlp is a Derived \(its config says SameMLP\)"):
        Patcher().apply(patched)


class OwnBertOutput(BertOutput):
    pass


class OwnBertIntermediate(BertIntermediate):
    pass


# --- what can't be copied --------------------------------------------------------------------------------------------


def closure(model: Any) -> None:
    original = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: 2 * original(x)


def closure_of_a_method(model: Any) -> None:
    original = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = types.MethodType(lambda self, x: original(x), model.model.layers[0].mlp)


def closure_of_a_hook(model: Any) -> None:
    other = model.model.layers[1].mlp
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + other(*args))


def closure_over_a_weight(model: Any) -> None:
    weight = model.lm_head.weight
    model.model.norm.register_forward_hook(functools.partial(lambda *args: args[-1] + weight[0]))


def compiled(model: Any) -> None:
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")


def compiled_in_place(model: Any) -> None:
    model.model.layers[0].compile(backend="eager")


def gradient_hook(model: Any) -> None:
    model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)


def computed(model: Any) -> None:
    model.model.layers[0].scale = model.lm_head.weight * 2


@pytest.mark.parametrize(
    ("hold", "what"),
    [
        (
            closure,
            r"layers\.0\.mlp\.forward: a function has model\.layers\.0\.mlp in its closure, .* types\.MethodType",
        ),
        (closure_of_a_method, r"layers\.0\.mlp\.forward: a function has model\.layers\.0\.mlp in its closure"),
        (closure_of_a_hook, r"layers\.0\.mlp\._forward_hooks: .* has model\.layers\.1\.mlp in its closure"),
        (closure_over_a_weight, r"model\.norm\._forward_hooks: .* has lm_head\.weight in its closure"),
        (compiled, r"a compiled module \(model\.layers\.0\.mlp\)\. Compile the result instead"),
        (compiled_in_place, r"a compiled module \(model\.layers\.0\)\. Compile the result instead"),
        (gradient_hook, r"a hook on the gradient of lm_head\.weight: .* Register it on the result"),
        (computed, r"a model that can't be copied \(RuntimeError: Only Tensors created explicitly by the user"),
    ],
)
def test_what_can_not_be_copied_is_refused_by_name(hold: Hold, what: str) -> None:
    given = holding(hold)
    with pytest.raises(InvalidPatcherError, match=f"Patcher.apply can't take .*{what}"):
        BOTH.apply(given)


def test_a_failure_leaves_the_given_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(LlamaMLP):
        def __init__(self, config: Any) -> None:
            raise ValueError("no")

    given = holding(frozen)
    given.model.norm.register_forward_hook(_doubles)
    fused = BOTH.apply(given)
    for model in (given, fused):
        before = described(model)
        with pytest.raises(PatchConstructionError, match="no"):
            Patcher({"LlamaMLP": Failing}).apply(model)
        with monkeypatch.context() as patch:
            patch.setattr("patcher.loading.applying.store_record", _fail)
            with pytest.raises(RuntimeError, match="in the middle"):
                BOTH.apply(model)
        assert described(model) == before


def _fail(*args: Any) -> None:
    raise RuntimeError("in the middle")


# --- what else comes back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [tiny_mixtral_config(), tiny_llava_config(), tiny_llama_config()], ids=lambda c: c.model_type
)
def test_a_model_from_a_checkpoint_saves_that_again(config: Any, tmp_path: Path) -> None:
    folder = checkpoint(config)
    expected = (folder / "model.safetensors").read_bytes()
    load = AutoModelForImageTextToText if config.model_type == "llava" else AutoModelForCausalLM
    fused = Patcher(fusions=["qkv", "sequential_experts"] if config.model_type == "mixtral" else ["qkv"])
    norms = Patcher({"(Llama|Mixtral)RMSNorm": OwnNorm})
    plain = load.from_pretrained(folder)
    plain.save_pretrained(tmp_path / "saved")  # which changes the patterns of its conversions
    models = [fused.apply(plain), norms.apply(plain), (norms | fused).apply(plain), Patcher().apply(plain)]
    models += [load.from_pretrained(folder, patcher=each) for each in (fused, norms, norms | fused)]
    for model in chain(models, map(Patcher().apply, models)):  # back to stock after they were saved
        model.save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "model.safetensors").read_bytes() == expected


def test_what_a_family_has_constructed_anew_comes_back() -> None:
    class Doubled(Fusion):
        target_modules_patterns = (r"\.mlp$",)

        def is_fusable(self, module: nn.Module) -> bool:
            return True

        def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
            return DoubledMLP

    stock = build_tiny(tiny_llama_config())
    model: Any = LlamaForCausalLM._from_config(stock.config, patcher=Patcher(fusions=[Doubled(), "qkv"]))
    load_original_state_dict(model, stock.state_dict())
    back = Patcher().apply(model)
    assert {type(module) for module in back.modules()} == {type(module) for module in stock.modules()}
    assert torch.equal(logits(back), logits(stock))
    with pytest.raises(InvalidPatcherError, match=r"can't fuse model\.layers\.0\.mlp: DoubledMLP is constructed from"):
        Patcher(fusions=Doubled()).apply(stock)


def test_a_function_that_a_construction_calls_is_refused() -> None:
    patcher = Patcher(function_mapping={"scale": lambda value: 10 * value})
    with pytest.raises(PatchConstructionError, match=r"Part\.__init__ calls it, and has run before functions are"):
        patcher.apply(TinyModel(TinyConfig()))


def test_a_hook_on_a_fused_patch_embedding_comes_back() -> None:
    config = ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8)
    fused = Patcher(fusions="patch_embeddings").apply(build_tiny(config, model_class=ViTModel))
    fused.embeddings.patch_embeddings.projection.register_forward_hook(_doubles)
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    assert torch.allclose(logits(Patcher().apply(fused), inputs), logits(fused, inputs), atol=1e-5)


def test_hooks_of_a_fused_patch_embedding_are_of_the_same_kind_and_handles_know_them() -> None:
    config = ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8)
    fused = Patcher(fusions="patch_embeddings").apply(build_tiny(config, model_class=ViTModel))
    layer = fused.embeddings.patch_embeddings.projection
    fused.handle = layer.register_forward_hook(_doubles)  # as transformers keeps its own
    layer.register_full_backward_hook(_doubles_gradients)
    back = Patcher().apply(fused)
    gc.collect()
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32, requires_grad=True)}
    gradients = [
        torch.autograd.grad(model(**inputs).last_hidden_state.square().sum(), inputs["pixel_values"])[0]
        for model in (fused, back)
    ]
    assert torch.allclose(*gradients, atol=1e-4)
    pickle.loads(pickle.dumps(back)).handle.remove()
    hooked = logits(back, inputs)
    back.handle.remove()
    assert not torch.allclose(logits(back, inputs), hooked)
    assert torch.allclose(logits(fused, inputs), hooked, atol=1e-5)


def test_a_tie_is_not_kept_where_a_conversion_changes_the_values() -> None:
    """The name and the shape stay."""
    turned = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", operations=[Transpose(0, 1)])
    patcher = Patcher({"LlamaMLP": SquareMLP}, extra_weight_conversions=turned)
    given = build_tiny(tiny_llama_config(intermediate_size=64))
    expected, before = logits(given), described(given)
    patched = patcher.apply(given)
    assert torch.allclose(logits(patched), expected, atol=1e-5)
    assert described(Patcher().apply(patched)) == before
    given.model.layers[0].mlp.down_proj.weight = given.model.layers[1].self_attn.o_proj.weight
    with pytest.raises(InvalidPatcherError, match=r"layers\.0\.mlp\.down_proj\.weight is tied .* Untie it"):
        patcher.apply(given)


@pytest.mark.parametrize("patcher", [BOTH, JOINED, OWN, ROOT, JOINED | Patcher(fusions="qkv")])
def test_a_model_whose_checkpoint_has_other_names(patcher: Patcher, tmp_path: Path) -> None:
    config = tiny_llama_config()
    named = {key.replace("mlp", "ffn"): value for key, value in build_tiny(config).state_dict().items()}
    config.save_pretrained(tmp_path)
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    options: Any = {"key_mapping": {r"\.ffn\.": ".mlp."}}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    patched = patcher.apply(plain)
    assert torch.allclose(logits(patched), logits(plain), atol=1e-5)
    plain.save_pretrained(tmp_path / "plain")
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == named.keys()
    patched.save_pretrained(tmp_path / "patched")
    assert load_file(tmp_path / "patched" / "model.safetensors").keys() == named.keys()
    back = Patcher().apply(patched)
    assert torch.equal(logits(back), logits(plain))

    if patcher not in (BOTH, OWN, ROOT):
        return
    back = Patcher().apply(AutoModelForCausalLM.from_pretrained(tmp_path, patcher=patcher, **options))
    assert torch.equal(logits(back), logits(plain))
    back.save_pretrained(tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == named.keys()


class OutAttention(Qwen2MoeAttention):
    """Its output projection has another name."""

    o_proj = property(lambda self: self.out)  # type: ignore[assignment]

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.out = self._modules.pop("o_proj")


RENAMED = WeightRenaming(r"self_attn\.o_proj", "self_attn.out")
OUT = Patcher({"Qwen2MoeAttention": OutAttention}, extra_weight_conversions=RENAMED)


@pytest.mark.parametrize("patcher", [LINEAR_EXPERTS, LINEAR_EXPERTS | OUT])
def test_filtered_conversions_of_stock_come_back(patcher: Patcher, tmp_path: Path) -> None:
    folder = checkpoint(tiny_qwen2_moe_config())
    expected = (folder / "model.safetensors").read_bytes()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for model in (patcher.apply(plain), AutoModelForCausalLM.from_pretrained(folder, patcher=patcher)):
        back = Patcher().apply(model)
        for each in (model, back):
            assert torch.allclose(logits(each), logits(plain), atol=1e-5)
        model.save_pretrained(tmp_path / "patched")
        written = load_file(tmp_path / "patched" / "model.safetensors")
        assert {key for key in written if "offset" not in key} == load_file(folder / "model.safetensors").keys()
        back.save_pretrained(tmp_path / "saved")
        assert (tmp_path / "saved" / "model.safetensors").read_bytes() == expected


STACKS, LISTS = Patcher({"MixtralExperts": ExpertStack}), Patcher(module_mapping={"**.1.mlp.experts": ExpertLinears})


@pytest.mark.parametrize("patcher", [STACKS, STACKS | Patcher(fusions="qkv"), LISTS])
def test_conversions_of_stock_that_those_of_a_class_preceded_are_reversed(patcher: Patcher, tmp_path: Path) -> None:
    folder = checkpoint(tiny_mixtral_config())
    expected = (folder / "model.safetensors").read_bytes()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for model in (patcher.apply(plain), AutoModelForCausalLM.from_pretrained(folder, patcher=patcher)):
        back = Patcher().apply(model)
        assert torch.equal(logits(back), logits(plain))
        for each in (model, back, patcher.apply(back)):
            each.save_pretrained(tmp_path / "saved")
            assert (tmp_path / "saved" / "model.safetensors").read_bytes() == expected
            assert dict(checkpoint_weights(each)).keys() == load_file(folder / "model.safetensors").keys()


def test_no_module_is_replaced_by_one_of_random_weights() -> None:
    class NoMLP(LlamaMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            del self.up_proj

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)))

    patched = Patcher({"LlamaMLP": NoMLP}, dropped_weights="up_proj").apply(build_tiny(tiny_llama_config()))
    with pytest.raises(InvalidPatcherError, match=r"finds no weights for model\.layers\.0\.mlp\.up_proj\.weight"):
        Patcher().apply(patched)


@pytest.mark.libraries
def test_nothing_is_logged_of_weights_that_are_there(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        MLPS.apply(holding(lora_beside))
        MLPS.apply(holding(bias_beside))
    finally:
        logger.removeHandler(caplog.handler)
    assert "MISSING" not in caplog.text
    assert "UNEXPECTED" not in caplog.text


class UpperMLP(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.upper = nn.Linear(config.hidden_size, config.intermediate_size // 2, bias=False)
        del self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.upper(x).repeat(1, 1, 2))


class LowerAttention(LlamaAttention):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.lower = nn.Linear(config.hidden_size, config.intermediate_size // 2, bias=False)


def test_what_a_conversion_has_put_into_several_modules_comes_back(tmp_path: Path) -> None:
    names = ["mlp.upper.weight", "self_attn.lower.weight"]
    cut = WeightConverter(["mlp.up_proj.weight"], names, operations=[Chunk(dim=0)])
    patcher = Patcher({"LlamaMLP": UpperMLP, "LlamaAttention": LowerAttention}, extra_weight_conversions=cut)
    build_tiny(tiny_llama_config(), model_class=LlamaModel).save_pretrained(folder := tmp_path / "stock")
    plain = LlamaModel.from_pretrained(folder)
    patched = patcher.apply(plain)
    patched.load_state_dict(plain.state_dict())
    patched.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    back = Patcher().apply(patched)
    assert described(back) == described(plain.eval())


def test_layers_that_share_a_joined_weight_share_its_parts_after_the_way_back() -> None:
    model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=Patcher(fusions="gate_up"))
    one, other = (layer.mlp for layer in model.model.layers)
    other.gate_up_proj.weight = one.gate_up_proj.weight
    stock = Patcher().apply(model)
    one, other = (layer.mlp for layer in stock.model.layers)
    assert other.gate_proj.weight is one.gate_proj.weight
    assert other.up_proj.weight is one.up_proj.weight is not one.gate_proj.weight


def hooked_expert(expert: Any) -> None:
    expert.register_forward_hook(lambda module, args, output: output)


def frozen_expert(expert: Any) -> None:
    expert.requires_grad_(False)


def cast_expert(expert: Any) -> None:
    expert.to(torch.bfloat16)


def grown_expert(expert: Any) -> None:
    expert.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (hooked_expert, "1 has hooks, which belong to none of these layers"),
        (cast_expert, r"\.down_proj\.weight have different types|up_proj\.weight have different types"),
        (grown_expert, r"1\.scale was added to it"),
        (frozen_expert, r"1\.gate_proj\.weight, 1\.up_proj\.weight are frozen, and others of .* aren't"),
    ],
)
def test_the_way_back_loses_nothing_of_one_expert(change: Callable[[Any], None], message: str) -> None:
    model = MixtralForCausalLM._from_config(tiny_mixtral_config(), patcher=Patcher(fusions="sequential_experts"))
    change(model.model.layers[0].mlp.experts[1])
    for patcher in (Patcher(), Patcher(fusions="qkv")):
        with pytest.raises(InvalidPatcherError, match=message):
            patcher.apply(model)


def test_an_expert_of_another_dtype_is_not_saved() -> None:
    model = MixtralForCausalLM._from_config(tiny_mixtral_config(), patcher=Patcher(fusions="sequential_experts"))
    cast_expert(model.model.layers[0].mlp.experts[1])
    with pytest.raises(
        PatchedWeightsError, match=r"layers\.0\.mlp\.experts\.\w+ can't be saved in the original format: 1\."
    ):
        original_state_dict(model)


@pytest.mark.parametrize("target", ["up_proj", "gate_proj"])
def test_a_layer_that_replaced_modules_share_is_refused(target: str) -> None:
    model = build_tiny(tiny_llama_config())
    one, other = (layer.mlp for layer in model.model.layers)
    (other if target == "up_proj" else one).up_proj = getattr(one, target)
    with pytest.raises(InvalidPatcherError, match="is tied to another parameter, which would be lost"):
        JOINED.apply(model)
