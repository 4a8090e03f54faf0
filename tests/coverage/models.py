"""Which architectures the installed transformers has, and small configs for them, by one table of attribute names.

>>> from tests.coverage.models import architectures
>>> architectures()["LlamaForCausalLM"]
Architecture(name='LlamaForCausalLM', kind='causal-lm', model_type='llama')

What the table can't know (sizes of one architecture that depend on each other) is tried: `small_configs` gives several
configs, and whoever uses them takes the first whose model can be built, saved, loaded and run by stock transformers.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from tests.support import tiny

__all__ = ["KINDS", "Architecture", "architectures", "class_named", "randomize", "small_configs"]

#: kind -> the tables of the Auto classes that list it
KINDS: dict[str, tuple[str, ...]] = {
    "causal-lm": ("CAUSAL_LM",),
    "masked-lm": ("MASKED_LM",),
    "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "vision-language": ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "VISUAL_QUESTION_ANSWERING"),
    "vision": ("IMAGE_CLASSIFICATION",),
}
#: Vision as well; of these one class for each model that the table above doesn't have.
MORE_VISION = (
    "IMAGE VIDEO_CLASSIFICATION ZERO_SHOT_IMAGE_CLASSIFICATION OBJECT_DETECTION ZERO_SHOT_OBJECT_DETECTION "
    "UNIVERSAL_SEGMENTATION SEMANTIC_SEGMENTATION INSTANCE_SEGMENTATION IMAGE_SEGMENTATION DEPTH_ESTIMATION "
    "MASK_GENERATION MASKED_IMAGE_MODELING IMAGE_TO_IMAGE KEYPOINT_DETECTION KEYPOINT_MATCHING POSE_ESTIMATION "
    "IMAGE_MATTING BACKBONE"
).split()


@dataclass(frozen=True)
class Architecture:
    """A model class, where the Auto classes list it, and under which model type."""

    name: str
    kind: str
    model_type: str


def architectures() -> dict[str, Architecture]:
    """Every architecture of the kinds above, and of each model that has none of them the base class, as `other`."""
    found: dict[str, Architecture] = {}
    folders: set[str] = set()

    def add(kind: str, mapping: dict[str, Any], *, new_folders_only: bool = False) -> None:
        before = set(folders)
        for model_type, names in mapping.items():
            folder = model_type_to_module_name(model_type)
            if new_folders_only and folder in (folders if kind == "other" else before):
                continue
            for name in names if isinstance(names, list | tuple) else [names]:
                known = found.setdefault(name, Architecture(name, kind, model_type))
                if known.kind == kind and _is_named_after(name, model_type) > _is_named_after(name, known.model_type):
                    found[name] = Architecture(name, kind, model_type)  # others use its class as well
                folders.add(folder)

    for kind, tables in KINDS.items():
        for table in tables:
            add(kind, getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}))
    for table in MORE_VISION:
        add("vision", getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}), new_folders_only=True)
    add("other", modeling_auto.MODEL_MAPPING_NAMES, new_folders_only=True)
    return found


def _is_named_after(name: str, model_type: str) -> bool:
    return name.lower().startswith(model_type.replace("_", "").replace("-", ""))


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Random values of a size that keeps activations near 1, through convolutions as well."""
    tiny.randomize(model)  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and "weight" in module._parameters:
            module.weight *= (module.weight.shape[-1] / module.weight[0].numel()) ** 0.5


def class_named(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


# --- what is small -------------------------------------------------------------------------------------------------

_WIDTHS = (
    "hidden_size d_model n_embd dim emb_dim embed_dim model_dim word_embed_proj_dim embedding_size embedding_dim "
    "encoder_hidden_size decoder_hidden_size out_hidden_size output_hidden_size text_hidden_size projection_dim "
    "attention_hidden_size adapter_in_dim decoder_hidden_dim feature_size fpn_hidden_size mask_feature_size"
)
_FEED_FORWARD = (
    "intermediate_size ffn_dim d_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim n_inner mlp_hidden_size mlp_dim "
    "dim_feedforward"
)
_EXPERT_WIDTHS = (
    "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size expert_dim"
)
_HEAD_WIDTHS = (
    "d_kv head_dim global_head_dim attention_head_dim kv_channels d_head kv_lora_rank q_lora_rank o_lora_rank "
    "v_head_dim qk_head_dim hidden_size_per_layer_input"
)
_LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers encoder_depth decoder_depth"
)
_HEADS = (
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "encoder_num_attention_heads decoder_num_attention_heads attention_heads"
)
_KEY_VALUE_HEADS = (
    "num_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads num_kv_heads "
    "num_global_key_value_heads"
)
_EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts"
_CHOSEN_EXPERTS = "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"

#: What makes a model small. Queries have 4 heads, keys and values 2, wherever a config lets them differ.
SMALL: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS.split(), 64),
    **dict.fromkeys(_FEED_FORWARD.split(), 96),
    **dict.fromkeys(_EXPERT_WIDTHS.split(), 32),
    **dict.fromkeys(_HEAD_WIDTHS.split(), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(_LAYERS.split(), 2),
    **dict.fromkeys(_HEADS.split(), 4),
    **dict.fromkeys(_KEY_VALUE_HEADS.split(), 2),
    **dict.fromkeys(_EXPERTS.split(), 4),
    **dict.fromkeys(_CHOSEN_EXPERTS.split(), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "num_hash_layers": 0,
    "tie_word_embeddings": False,
    # positions and tokens
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    **dict.fromkeys(("forced_eos_token_id", "forced_bos_token_id", "begin_suppress_tokens", "suppress_tokens")),
    **dict.fromkeys(("image_token_id", "image_token_index"), 120),
    **dict.fromkeys(("video_token_id", "video_token_index"), 121),
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
    **dict.fromkeys(("audio_token_id", "audio_token_index"), 124),
    # images
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "in_channels": 3,
    "num_labels": 4,
    "num_image_tokens": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "num_frames": 4,
    "frames_per_clip": 4,
    "crop_size": 32,
    "tubelet_size": [2, 8, 8],
    "num_queries": 5,
    # A sliding window or a chunk that is shorter than the input would only test the mask.
    "sliding_window": 64,
    "use_mambapy": True,
}
#: Names of numbers of layers, heads and experts: what shrinks a model whose widths depend on each other.
FEW = frozenset(f"{_LAYERS} {_EXPERTS} {_CHOSEN_EXPERTS} vocab_size vocab_size_per_layer_input".split())

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2}

#: Sizes of one architecture that depend on each other in a way that no name tells; of a config inside: `part.name`.
PARTICULAR: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 32},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "chameleon": {"vocabulary_map": {"<image>": 120}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "emu3": {"vocabulary_map": {"<image>": 120, "<|extra_200|>": 119}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32]},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "gemma4_assistant": {"text_config.hidden_size_per_layer_input": 0},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "2/4"},
    "muse_spark": {"audio_config.out_hidden_size": 64},
    "nemotron_h_omni": {"vision_config.video_temporal_patch_size": 2},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe": {"head_config.audio_hidden_size": 64},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "dia": {"delay_pattern": [0, 1, 2]},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 2}
    | {"layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0, 0.0]}
    | {"intermediate_size": [96, 96]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16, "zero_expert_num": 1},
    "mamba2": {"num_heads": 8},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "perceiver": {"d_latents": 64, "num_self_attends_per_block": 2, "num_self_attention_heads": 1}
    | {"num_cross_attention_heads": 1, "train_size": [32, 32]},
    "qwen4_exp_text": {"indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_n_heads": 2}
    | {"indexer_kv_heads": 1, "indexer_head_dim": 16},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 48)},
    "xmod": {"default_language": "en_XX"},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "vibevoice_acoustic_tokenizer": {"num_filters": 2, "depths": [1] * 7},
    "molmo2": {"vision_config.image_size": [32, 32], "adapter_config.vision_feature_layer": [0, 1]},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def small_configs(config_class: type[PretrainedConfig]) -> Iterator[PretrainedConfig]:
    """Configs to try, the smallest first.

    Raises:
        Exception: no config can be made: what the first attempt says.
    """
    seen: list[Any] = []
    first: Exception | None = None
    for keep in (_everything, _of_the_same_type, _numbers_of_layers, _nothing):
        try:
            arguments = _small(config_class, keep)
            config = config_class(**arguments)
        except Exception as error:
            first = first or error
            continue
        if arguments not in seen:
            seen.append(arguments)
            yield config
    if not seen and first is not None:
        raise first


def _everything(name: str, value: Any, default: Any) -> bool:
    return True


def _of_the_same_type(name: str, value: Any, default: Any) -> bool:
    return type(value) is type(default)


def _numbers_of_layers(name: str, value: Any, default: Any) -> bool:
    return name in FEW and type(value) is type(default)


def _nothing(name: str, value: Any, default: Any) -> bool:
    return False


def _small(
    config_class: type[PretrainedConfig], keep: Any, default: PretrainedConfig | None = None, *, is_part: bool = False
) -> dict[str, Any]:
    """Arguments for a config of this class, of those of the table that `keep` wants."""
    if default is None:
        with contextlib.suppress(Exception):  # a config that has to be given something
            default = config_class()
    known = _known(config_class, default)
    parts = _parts(config_class, default)
    # One size for each stage: they are small enough, and must fit together.
    staged = any(
        isinstance(known.get(name), list | tuple) for name in ("num_heads", "num_attention_heads", "depths", "depth")
    )
    fixed = _fixed(config_class, known)
    arguments: dict[str, Any] = {}
    for name, value in SMALL.items():
        if (
            name not in known
            or name in fixed
            or name in parts
            or (staged and name not in ("num_labels", "tie_word_embeddings"))
        ):
            continue
        if isinstance(value, int) and name == "image_size" and isinstance(known[name], list | tuple):
            value = [value] * len(known[name])
        if keep(name, value, known[name]):
            arguments[name] = value
    if keep is not _nothing:
        _tokens(arguments, known)
        _shorten(arguments, known, fixed)
        if "qk_rope_head_dim" in arguments:
            arguments.pop("head_dim", None)  # of the part with rotary embeddings alone: it follows
            arguments["num_key_value_heads"] = 4
        _rope(arguments, known, is_part=is_part)
    for name, (part_class, part) in parts.items():
        arguments[name] = _small(part_class, keep, part, is_part=True)
        if part_class.model_type:
            arguments[name]["model_type"] = part_class.model_type
    if keep is not _nothing:
        for name, value in PARTICULAR.get(config_class.model_type, {}).items():
            part, _, inner = name.rpartition(".")
            (arguments[part] if part else arguments)[inner] = value
    return arguments


def _known(config_class: type[PretrainedConfig], default: PretrainedConfig | None) -> dict[str, Any]:
    """What a config can be given, and the values that it has then; `...` where that isn't known."""
    known: dict[str, Any] = dict.fromkeys(inspect.signature(config_class.__init__).parameters, ...)
    for base in config_class.__mro__[:-1]:
        known |= dict.fromkeys(getattr(base, "__annotations__", {}), ...)
    known |= dict.fromkeys(getattr(config_class, "attribute_map", {}), ...)
    if default is not None:
        for name in known:
            with contextlib.suppress(Exception):  # what differs from layer to layer has no value
                known[name] = getattr(default, name)
        known |= default.to_dict()
    return known


def _fixed(config_class: type[PretrainedConfig], known: Iterable[str]) -> set[str]:
    """What a config computes and can't be given."""
    other_names = getattr(config_class, "attribute_map", {})
    return {name for name in known if isinstance(getattr(config_class, other_names.get(name, name), None), property)}


def _parts(
    config_class: type[PretrainedConfig], default: PretrainedConfig | None
) -> dict[str, tuple[type[PretrainedConfig], PretrainedConfig | None]]:
    """The configs inside of a config: attribute -> class, and how it is by default."""
    parts: dict[str, tuple[type[PretrainedConfig], PretrainedConfig | None]] = {}
    for name, part_class in getattr(config_class, "sub_configs", {}).items():
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            parts[name] = (type(part), part)
        elif isinstance(part, dict) and part.get("model_type") in CONFIG_MAPPING:
            parts[name] = (CONFIG_MAPPING[part["model_type"]], None)
        elif part_class.__name__ != "AutoConfig" and issubclass(part_class, PretrainedConfig):
            parts[name] = (part_class, None)
    return parts


def _tokens(arguments: dict[str, Any], known: dict[str, Any]) -> None:
    """All other vocabularies are as small, and no token lies outside of them."""
    free = iter(range(127, 0, -1))
    for name, value in known.items():
        if name in arguments or not isinstance(value, int) or value < 120:
            continue
        if name.endswith("vocab_size"):
            arguments[name] = 128
        elif name.endswith(("token_id", "token_index")):
            arguments[name] = next(number for number in free if number not in arguments.values())


def _shorten(arguments: dict[str, Any], known: dict[str, Any], fixed: set[str]) -> None:
    """Lists with an entry for each layer: one layer of every kind that occurs, and at least two."""
    count_name = next((name for name in _LAYERS.split() if name in arguments and isinstance(known[name], int)), None)
    if count_name is None:
        return
    count = known[count_name]
    lists = {
        name: value for name, value in known.items() if isinstance(value, list | tuple) and len(value) == count > 2
    }
    lists = {name: value for name, value in lists.items() if name not in arguments}
    if not lists:
        return
    kinds: dict[str, int] = {}
    for number, entries in enumerate(zip(*lists.values(), strict=True)):
        kinds.setdefault(repr(entries), number)
    chosen = sorted(kinds.values())[:6]
    chosen += [number for number in range(count) if number not in chosen][: max(0, 2 - len(chosen))]
    chosen.sort()
    if fixed.intersection(lists):  # computed: layers can only be left out at the end
        chosen = list(range(min(count, 8, chosen[-1] + 1)))
    for name, value in lists.items():
        if name not in fixed:
            arguments[name] = [value[number] for number in chosen]
    for name in _LAYERS.split():
        if name in arguments and known[name] == count:
            arguments[name] = len(chosen)


def _rope(arguments: dict[str, Any], known: dict[str, Any], *, is_part: bool) -> None:
    """Rotary embeddings of several axes: sections that fill a small head. Others don't look at them."""
    rope = known.get("rope_parameters", ...)
    rope = {"rope_type": "default", "rope_theta": 10000.0} if rope is None else rope
    if not isinstance(rope, dict) or "rope_type" not in rope or "hidden_size" not in arguments:
        return
    sections = rope.get("mrope_section") or ([1, 1, 1] if is_part else None)
    if not sections:
        return
    half = int(16 * rope.get("partial_rotary_factor", 1.0)) // 2
    parts = [half // len(sections)] * len(sections)
    parts[-1] += half - sum(parts)
    arguments["rope_parameters"] = rope | {"mrope_section": parts}
