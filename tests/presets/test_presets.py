"""Presets: each does on its architecture what it says, is pinned to the code that it was verified on, and is found."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import re
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn
from transformers import (
    BertConfig,
    CLIPConfig,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4vConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PhiConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    SiglipConfig,
    ViTConfig,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import (
    InvalidPatcherError,
    Patcher,
    PatcherWarning,
    PresetDriftError,
    UnmatchedPatchError,
    like,
    presets,
    report,
    verify,
)
from patcher.spec.fingerprints import check_pins, fingerprint
from patcher.verification.inputs import chosen_passes
from patcher.verification.passes import difference
from tests.support import shared
from tests.support.sampling import sampled
from tests.support.tiny import save_tiny, tiny_bert_config

TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EQUAL_HEADS = TEXT | {"num_key_value_heads": 4}
ENCODER = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"} | {"max_position_embeddings": 32}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
TOWER = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}

#: preset -> model class, a config of two layers, how many modules are fused
CASES: dict[str, tuple[str, Callable[[], Any], int]] = {
    "QWEN2_MOE_LINEAR_EXPERTS": (
        "Qwen2MoeForCausalLM",
        lambda: Qwen2MoeConfig(**TEXT | EXPERTS, moe_intermediate_size=32, shared_expert_intermediate_size=32),
        2,
    ),
    "QWEN3_MOE_LINEAR_EXPERTS": (
        "Qwen3MoeForCausalLM",
        lambda: Qwen3MoeConfig(**TEXT | EXPERTS, head_dim=8, moe_intermediate_size=32),
        2,
    ),
    "MIXTRAL_LINEAR_EXPERTS": ("MixtralForCausalLM", lambda: MixtralConfig(**TEXT, num_local_experts=4), 2),
    "DEEPSEEK_V3_LINEAR_EXPERTS": (
        "DeepseekV3ForCausalLM",
        lambda: DeepseekV3Config(**EQUAL_HEADS | LATENT | GROUPS, num_experts_per_tok=2, moe_intermediate_size=32),
        1,
    ),
    "GPT_OSS_LINEAR_EXPERTS": (
        "GptOssForCausalLM",
        lambda: GptOssConfig(**TEXT, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
        2,
    ),
    "OLMOE_LINEAR_EXPERTS": ("OlmoeForCausalLM", lambda: OlmoeConfig(**TEXT | EXPERTS), 2),
    "LLAMA_FUSED_PROJECTIONS": ("LlamaForCausalLM", lambda: LlamaConfig(**TEXT), 4),
    "MISTRAL_FUSED_PROJECTIONS": ("MistralForCausalLM", lambda: MistralConfig(**TEXT, head_dim=8), 4),
    "QWEN2_FUSED_PROJECTIONS": ("Qwen2ForCausalLM", lambda: Qwen2Config(**TEXT), 4),
    "QWEN3_FUSED_PROJECTIONS": ("Qwen3ForCausalLM", lambda: Qwen3Config(**TEXT, head_dim=8), 4),
    "GEMMA3_FUSED_PROJECTIONS": ("Gemma3ForCausalLM", lambda: Gemma3TextConfig(**TEXT, head_dim=8), 4),
    "PHI_FUSED_PROJECTIONS": ("PhiForCausalLM", lambda: PhiConfig(**EQUAL_HEADS), 2),
    "BERT_FUSED_PROJECTIONS": ("BertForMaskedLM", lambda: BertConfig(**ENCODER), 2),
    "QWEN2_VL_LINEAR_PATCH_EMBEDDINGS": (
        "Qwen2VLForConditionalGeneration",
        lambda: Qwen2VLConfig(
            vision_config={**TOWER, "embed_dim": 32, "mlp_ratio": 2}, text_config=TEXT | {"rope_parameters": ROPE}
        ),
        1,
    ),
    "QWEN2_5_VL_LINEAR_PATCH_EMBEDDINGS": (
        "Qwen2_5_VLForConditionalGeneration",
        lambda: Qwen2_5_VLConfig(
            vision_config={**TOWER, "intermediate_size": 64, "window_size": 16, "fullatt_block_indexes": [1]},
            text_config=TEXT | {"rope_parameters": ROPE},
        ),
        1,
    ),
    "QWEN3_VL_LINEAR_PATCH_EMBEDDINGS": (
        "Qwen3VLForConditionalGeneration",
        lambda: Qwen3VLConfig(
            vision_config={
                **TOWER,
                "intermediate_size": 64,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            text_config=TEXT | {"rope_parameters": ROPE, "head_dim": 8},
        ),
        1,
    ),
    "GLM4V_LINEAR_PATCH_EMBEDDINGS": (
        "Glm4vForConditionalGeneration",
        lambda: Glm4vConfig(
            vision_config={**TOWER, "intermediate_size": 64, "image_size": 16},
            text_config=TEXT | {"rope_parameters": ROPE, "pad_token_id": 0},
        ),
        2,
    ),
    "VIT_LINEAR_PATCH_EMBEDDINGS": ("ViTForImageClassification", lambda: ViTConfig(**VISION), 1),
    "CLIP_LINEAR_PATCH_EMBEDDINGS": (
        "CLIPModel",
        lambda: CLIPConfig(
            text_config=ENCODER | {"bos_token_id": 1, "eos_token_id": 2}, vision_config=dict(VISION), projection_dim=16
        ),
        1,
    ),
    "SIGLIP_LINEAR_PATCH_EMBEDDINGS": (
        "SiglipModel",
        lambda: SiglipConfig(text_config=ENCODER | {"bos_token_id": 1, "eos_token_id": 2}, vision_config=dict(VISION)),
        1,
    ),
}
#: The presets whose code isn't the same on all supported releases of transformers: each is verified on, and pinned to,
#: all of it.
DRIFTING = {
    "BERT_FUSED_PROJECTIONS": {"BertSelfAttention"},
    "CLIP_LINEAR_PATCH_EMBEDDINGS": {"CLIPVisionEmbeddings"},
    "DEEPSEEK_V3_LINEAR_EXPERTS": {"DeepseekV3Experts"},
    "GEMMA3_FUSED_PROJECTIONS": {"Gemma3Attention"},
    "GLM4V_LINEAR_PATCH_EMBEDDINGS": {"Glm4vVisionModel"},
    "GPT_OSS_LINEAR_EXPERTS": {"GptOssExperts"},
    "LLAMA_FUSED_PROJECTIONS": {"LlamaAttention"},
    "MISTRAL_FUSED_PROJECTIONS": {"MistralAttention"},
    "MIXTRAL_LINEAR_EXPERTS": {"MixtralExperts"},
    "OLMOE_LINEAR_EXPERTS": {"OlmoeExperts"},
    "PHI_FUSED_PROJECTIONS": {"PhiAttention"},
    "QWEN2_FUSED_PROJECTIONS": {"Qwen2Attention"},
    "QWEN2_MOE_LINEAR_EXPERTS": {"Qwen2MoeExperts"},
    "QWEN3_FUSED_PROJECTIONS": {"Qwen3Attention"},
    "QWEN3_MOE_LINEAR_EXPERTS": {"Qwen3MoeExperts"},
    "SIGLIP_LINEAR_PATCH_EMBEDDINGS": {"SiglipVisionEmbeddings"},
}


def test_every_preset_has_a_case() -> None:
    assert sorted([*CASES, "LIGER"]) == presets.NAMES


def test_all_of_them_are_imported_where_no_other_package_is_needed() -> None:
    scope: dict[str, Any] = {}
    exec("from patcher.presets import *", scope)
    assert scope.keys() - {"__builtins__"} == {*CASES}


@pytest.mark.parametrize("name", sampled(CASES, [*CASES][::3]))
def test_it_computes_and_saves_what_stock_does(name: str, tmp_path: Path) -> None:
    architecture, make, count = CASES[name]
    cls = getattr(transformers, architecture)
    folder = save_tiny(make(), tmp_path / "checkpoint", model_class=cls)
    stock, patched = (
        cls.from_pretrained(folder).eval(),
        cls.from_pretrained(folder, patcher=getattr(presets, name)).eval(),
    )

    assert len(report(patched).fused) == count
    with torch.no_grad():
        passes = chosen_passes(cls.from_pretrained(folder).eval())
        ours, theirs = ([output for one in passes for output in one.of(model)] for model in (patched, stock))
        gap = difference(ours, theirs)
    assert gap.within(1e-5), gap
    stock.save_pretrained(tmp_path / "stock")
    patched.save_pretrained(tmp_path / "patched")
    for path in sorted((tmp_path / "stock").iterdir()):
        assert (tmp_path / "patched" / path.name).read_bytes() == path.read_bytes(), path.name
    assert _owners(stock, patched) == set(getattr(presets, name).fingerprints) - {"SiglipAttention"}


def _owners(stock: nn.Module, patched: nn.Module) -> set[str]:
    """The classes of modeling code in which something was fused: those that have to be pinned."""
    modules = [(stock.get_submodule(path), path) for path, *_ in report(patched).fused]
    return {
        type(
            stock.get_submodule(path.rpartition(".")[0]) if type(one).__module__.startswith("torch.") else one
        ).__name__
        for one, path in modules
    }


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("_LINEAR_EXPERTS")])
def test_quantizers_find_every_weight_of_an_expert(name: str) -> None:
    architecture, make, _ = CASES[name]
    stock, patched = (
        getattr(transformers, architecture)._from_config(make(), patcher=patcher)
        for patcher in (None, getattr(presets, name))
    )
    paths = [path for path, *_ in report(patched).fused]

    assert all(_in_linear_layers(stock.get_submodule(path)) == 0 for path in paths)
    assert all(
        _in_linear_layers(patched.get_submodule(path))
        == sum(each.numel() for each in stock.get_submodule(path).parameters())
        for path in paths
    )


def _in_linear_layers(module: nn.Module) -> int:
    layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


def _gemma3_that_sees() -> Any:
    return Gemma3Config(text_config=TEXT | {"head_dim": 8}, vision_config=dict(VISION), mm_tokens_per_image=4)


def test_the_vision_tower_of_gemma3_is_fused_and_pinned(tmp_path: Path) -> None:
    cls = transformers.Gemma3ForConditionalGeneration
    folder = save_tiny(_gemma3_that_sees(), tmp_path / "checkpoint", model_class=cls)
    stock, patched = (
        cls.from_pretrained(folder).eval(),
        cls.from_pretrained(folder, patcher=presets.GEMMA3_FUSED_PROJECTIONS).eval(),
    )

    assert _owners(stock, patched) == set(presets.GEMMA3_FUSED_PROJECTIONS.fingerprints)
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = (model.get_image_features(pixels) for model in (patched, stock))
    torch.testing.assert_close(ours.pooler_output, theirs.pooler_output, atol=1e-5, rtol=1e-5)


@pytest.mark.nightly
def test_presets_are_verified_on_real_models(smollm2_small: Path, minilm: Path, smollm2_moe: Path) -> None:
    found = {
        "llama": verify(smollm2_small, presets.LLAMA_FUSED_PROJECTIONS),
        "bert": verify(minilm, presets.BERT_FUSED_PROJECTIONS),
        "mixtral": verify(smollm2_moe, presets.MIXTRAL_LINEAR_EXPERTS),
    }

    assert {name: verification.failures for name, verification in found.items()} == dict.fromkeys(found, ())
    assert {name: verification.replaced for name, verification in found.items()} == {
        "llama": 8,
        "bert": 6,
        "mixtral": len(report(transformers.AutoModelForCausalLM.from_pretrained(
            smollm2_moe, patcher=presets.MIXTRAL_LINEAR_EXPERTS)).fused),
    }  # fmt: skip
    assert found["llama"].floor is not None
    assert 0 < found["llama"].floor < 1e-4
    assert {stage.name for stage in found["llama"].stages if not stage.checked} == {"windows"}


@pytest.mark.parametrize("name", presets.NAMES)
def test_it_is_named_pinned_and_described(name: str) -> None:
    text = presets.describe(name)

    assert f"patcher bench MODEL --preset {name}" in text
    assert len(text.splitlines()) >= 3
    assert text.splitlines()[1] == ""
    assert "python -m tests" not in text  # not installed
    if name.endswith("FUSED_PROJECTIONS"):
        assert text.split("\n\n")[1].startswith("What it gains: one layer in place of two or three")
    if name in CASES:
        preset = getattr(presets, name)
        assert isinstance(preset, Patcher)
        assert preset.name == name
        assert preset.fingerprints
        assert Version(transformers.__version__) in SpecifierSet(preset.transformers)


# --- drift ---------------------------------------------------------------------------------------------------------


def test_the_table_says_which_presets_drift() -> None:
    two = {name: {key for key, pins in getattr(presets, name).fingerprints.items() if len(pins) > 1} for name in CASES}
    assert {name: keys for name, keys in two.items() if keys} == DRIFTING


@pytest.mark.parametrize("name", CASES)
def test_the_installed_code_is_one_that_it_is_pinned_to(name: str) -> None:
    architecture, _, _ = CASES[name]
    home = importlib.import_module(getattr(transformers, architecture).__module__)

    for key, pins in getattr(presets, name).fingerprints.items():
        own = home if hasattr(home, key) else importlib.import_module("transformers.models.siglip.modeling_siglip")
        assert fingerprint(getattr(own, key)) in pins, key


@pytest.fixture
def edited(tmp_path: Path) -> Iterator[Callable[[str, str], type[nn.Module]]]:
    """Llama's modeling file with a change in it, as the installed one: a release that has drifted."""
    from transformers.models.llama import modeling_llama

    path = Path(modeling_llama.__file__)
    names: list[str] = []

    def edit(old: str, new: str) -> Any:
        text = path.read_text(encoding="utf-8")
        assert old in text
        name = f"transformers.models.llama.modeling_drifted_{tmp_path.name.replace('-', '_')}"
        copy = tmp_path / f"{name.rsplit('.', 1)[1]}.py"
        copy.write_text(text.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, copy)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        names.append(name)
        spec.loader.exec_module(module)
        return module.LlamaForCausalLM

    yield edit
    for name in names:
        del sys.modules[name]


CHANGES = {
    "the class": ("gate_proj(x)) * self.up_proj(x)", "gate_proj(x)) + self.up_proj(x)", "LlamaMLP"),
    "a function that it calls": ("torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, x1), dim=-1)", "LlamaAttention"),
    "a comment": ("class LlamaMLP(nn.Module):", "# A comment.\nclass LlamaMLP(nn.Module):", ""),
    "blank lines": ("class LlamaMLP(nn.Module):\n", "class LlamaMLP(nn.Module):\n\n\n", ""),
    "a docstring": ("class LlamaMLP(nn.Module):\n", 'class LlamaMLP(nn.Module):\n    """Text."""\n', ""),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "named"), CHANGES.values(), ids=CHANGES.keys())
def test_changed_code_raises_and_formatting_does_not(
    old: str, new: str, named: str, edited: Callable[[str, str], Any], tmp_path: Path
) -> None:
    cls = edited(old, new)
    config = LlamaConfig(**TEXT)
    if not named:
        assert report(cls._from_config(config, patcher=presets.LLAMA_FUSED_PROJECTIONS)).fused
        return
    said = rf"{named}: pinned [0-9a-f, ]+, found .*patcher verify MODEL --preset NAME"
    with pytest.raises(
        PresetDriftError, match=rf"(?s)LLAMA_FUSED_PROJECTIONS.*>=5.17.*{transformers.__version__}.*{said}"
    ):
        cls._from_config(config, patcher=presets.LLAMA_FUSED_PROJECTIONS)


def test_a_forward_that_another_tool_has_bound_is_not_the_pinned_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(x))

    with pytest.raises(PresetDriftError, match=r"LlamaMLP: .* found .*<lambda> of .*test_presets\.py in its place"):
        check_pins(presets.LLAMA_FUSED_PROJECTIONS, LlamaForCausalLM)


def test_a_namesake_in_the_file_of_another_model_is_not_judged(edited: Callable[[str, str], Any]) -> None:
    edited(*CHANGES["the class"][:2])  # imported, and not what is loaded
    stock = transformers.LlamaForCausalLM._from_config(LlamaConfig(**TEXT), patcher=presets.LLAMA_FUSED_PROJECTIONS)

    assert len(report(stock).fused) == 4


def test_a_model_within_the_model_is_judged_where_there_is_one() -> None:
    pinned = presets.GEMMA3_FUSED_PROJECTIONS
    drifted = pinned.replace(fingerprints={**pinned.fingerprints, "SiglipAttention": "0" * 16})

    with pytest.raises(PresetDriftError, match=r"modeling_siglip\.SiglipAttention: pinned 0+, found 1cc0"):
        transformers.Gemma3ForConditionalGeneration._from_config(_gemma3_that_sees(), patcher=drifted)
    text = transformers.Gemma3ForCausalLM._from_config(Gemma3TextConfig(**TEXT, head_dim=8), patcher=drifted)
    assert len(report(text).fused) == 4


def test_a_model_on_which_nothing_of_it_was_verified_is_told() -> None:
    """Its fusions are found in any architecture, and its pins say nothing of that."""
    message = r"'BERT_FUSED_PROJECTIONS' was verified on other models, with BertSelfAttention\."
    with pytest.warns(PatcherWarning, match=message):
        transformers.LlamaForCausalLM._from_config(LlamaConfig(**TEXT), patcher=presets.BERT_FUSED_PROJECTIONS)
    stock = transformers.LlamaForCausalLM._from_config(LlamaConfig(**TEXT))
    with pytest.warns(PatcherWarning, match=message):
        presets.BERT_FUSED_PROJECTIONS.apply(stock)


def test_a_class_that_is_gone_has_drifted() -> None:
    """A release that renames what a fusion rewrites: the fusion still finds it, and the pin says nothing of it."""
    pinned = presets.LLAMA_FUSED_PROJECTIONS
    renamed = pinned.replace(fingerprints={**pinned.fingerprints, "LlamaOfAnotherName": "0" * 16})

    with pytest.raises(
        PresetDriftError, match=r"LlamaOfAnotherName: pinned 0+, and there is no such class or function"
    ):
        transformers.LlamaForCausalLM._from_config(LlamaConfig(**TEXT), patcher=renamed)


# --- finding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_presets_of_a_model_are_found_by_its_config(name: str) -> None:
    _, make, _ = CASES[name]
    found = presets.for_model(make())

    assert found[0] == getattr(presets, name)


def test_they_are_found_by_its_folder() -> None:
    assert presets.for_model(str(shared.checkpoint(tiny_bert_config()))) == (presets.BERT_FUSED_PROJECTIONS,)


def test_a_model_without_presets_has_none_and_is_told_why() -> None:
    found = presets.for_model(transformers.GPT2Config())

    assert found == ()
    assert repr(found) == f"()  # {found.reason}"
    assert "No preset was verified on models of the type 'gpt2'; there are presets for bert, clip," in found.reason
    assert "LIGER" in found.reason
    with pytest.raises(InvalidPatcherError, match=r"^No preset was verified on models of the type 'gpt2'"):
        presets.best(transformers.GPT2Config())


def test_the_best_one_is_the_first() -> None:
    assert presets.best(MixtralConfig()) == presets.for_model(MixtralConfig())[0] == presets.MIXTRAL_LINEAR_EXPERTS


def test_a_preset_is_shown_by_its_name_and_what_is_made_of_it_is_not() -> None:
    preset = presets.LLAMA_FUSED_PROJECTIONS
    assert eval(repr(preset)) == preset == pickle.loads(pickle.dumps(preset))
    assert repr(preset.replace(strict=False)).startswith("Patcher(fusions=")
    assert repr(preset | Patcher(new_weights="x")).startswith("Patcher(fusions=")


def test_a_tuple_of_patchers_is_told_in_one_line_what_to_write() -> None:
    load = partial(LlamaForCausalLM._from_config, LlamaConfig(**TEXT))
    patchers = (Patcher(fusions="qkv"), Patcher(fusions="gate_up"))
    message = r"\(tuple\); write for instance patcher=(.*), or patcher=(.*)\.$"
    with pytest.raises(InvalidPatcherError, match=message) as raised:
        load(patcher=patchers)
    assert "\n" not in str(raised.value)
    one, both = re.search(message, str(raised.value)).groups()  # type: ignore[union-attr]
    assert len(report(load(patcher=eval(one))).fused) == 2
    assert len(report(load(patcher=eval(both))).fused) == 4


@pytest.mark.parametrize("value", [None, 3, presets])
def test_only_models_have_presets(value: Any) -> None:
    with pytest.raises(InvalidPatcherError, match="doesn't name a model: write the path of an existing folder"):
        presets.for_model(value)


def test_a_misspelt_preset_is_told_the_nearest() -> None:
    for misspelt in (presets.describe, partial(getattr, presets)):
        with pytest.raises(AttributeError, match=r"'LLAMA_FUSED'; write patcher\.presets\.LLAMA_FUSED_PROJECTIONS"):
            misspelt("LLAMA_FUSED")


# --- kernels -------------------------------------------------------------------------------------------------------


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of Liger's names and parameters in plain torch: the mechanics need no GPU."""

    class Applied:
        def __init__(self, function: Callable[..., torch.Tensor]) -> None:
            self.apply = function

    def normed(states, weight, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        assert not in_place
        scale = 1 if weight is None else weight + offset
        return (scale * nn.functional.rms_norm(states.float(), states.shape[-1:], eps=eps)).to(states.dtype)

    ops: Any = types.ModuleType("liger_kernel.ops")
    ops.LigerRMSNormFunction = Applied(normed)
    ops.LigerSiLUMulFunction = Applied(lambda gate, up: nn.functional.silu(gate) * up)
    ops.LigerGELUMulFunction = Applied(lambda gate, up: nn.functional.gelu(gate, approximate="tanh") * up)
    package: Any = types.ModuleType("liger_kernel")
    package.ops = ops
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", ops)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)


LIGER: dict[str, Callable[[], Any]] = {
    "Llama": lambda: LlamaConfig(**TEXT, mlp_bias=True),
    "Mistral": lambda: MistralConfig(**TEXT, head_dim=8),
    "Qwen3": lambda: Qwen3Config(**TEXT, head_dim=8),
    "Gemma3": lambda: Gemma3TextConfig(**TEXT, head_dim=8),
    "DeepseekV3": CASES["DEEPSEEK_V3_LINEAR_EXPERTS"][1],
    "Olmoe": CASES["OLMOE_LINEAR_EXPERTS"][1],
}


@pytest.mark.parametrize("family", LIGER)
def test_kernels_take_the_place_of_norms_and_mlps(family: str, liger: None, tmp_path: Path) -> None:
    config = LIGER[family]()
    folder = save_tiny(config, tmp_path / "checkpoint")
    cls = getattr(transformers, f"{family}ForCausalLM")
    stock, patched = (cls.from_pretrained(folder, patcher=each).eval() for each in (None, presets.LIGER))

    norms = {path for path, module in stock.named_modules() if type(module).__name__.endswith("RMSNorm")}
    gated = {path for path, module in stock.named_modules() if type(module).__name__.endswith("MLP")}
    assert {path for path, *_ in report(patched).replaced} == norms | gated
    ids = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(patched(ids).logits, stock(ids).logits, atol=1e-5, rtol=1e-5)
    assert presets.for_model(config)[-1] == presets.LIGER


def test_kernels_are_compiled_in_one_graph(liger: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.LlamaForCausalLM._from_config(LlamaConfig(**TEXT), patcher=presets.LIGER)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # which torch asks as well
    states = torch.randn(2, 3, 32, requires_grad=True)
    for module in (model.model.norm, model.model.layers[0].mlp):
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(states), module(states))


def test_the_installed_code_is_that_which_kernels_are_pinned_to(liger: None) -> None:
    pins = presets.LIGER.fingerprints
    assert len(pins) == len(presets.LIGER.class_mapping)
    for key in presets.LIGER.class_mapping:
        target = key.resolve()
        assert fingerprint(target) in pins[target.__name__]
        if presets.LIGER.class_mapping[key].layer.__name__ == "LigerGatedMLP":
            assert like(LlamaMLP.forward).why_not(target.forward) == ""


def test_what_has_none_of_their_classes_is_refused_and_not_recommended(liger: None) -> None:
    with pytest.raises(UnmatchedPatchError, match="LlamaRMSNorm"):
        transformers.BertModel._from_config(tiny_bert_config(), patcher=presets.LIGER)
    assert presets.LIGER not in presets.for_model(tiny_bert_config())


def test_a_model_within_the_model_is_recommended_for(liger: None) -> None:
    assert presets.for_model(_gemma3_that_sees())[-1] == presets.LIGER
    assert presets.for_model(transformers.LlavaConfig())[-1] == presets.LIGER


def test_without_the_package_the_hint_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    with pytest.raises(InvalidPatcherError, match=r"LIGER needs Liger's kernels.*pip install liger-kernel"):
        _ = presets.LIGER


def test_without_a_gpu_it_says_so(liger: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(InvalidPatcherError, match="LIGER needs a GPU"):
        _ = presets.LIGER
    assert not hasattr(presets, "LIGER")  # so that `help(presets)` works
    assert presets.for_model(LlamaConfig(**TEXT)) == (presets.LLAMA_FUSED_PROJECTIONS,)


if torch.cuda.is_available() and shutil.which("nvidia-smi"):  # where there is none, there is nothing to measure

    @pytest.mark.parametrize("family", LIGER)
    def test_kernels_compute_what_stock_does(family: str, tmp_path: Path) -> None:
        folder = save_tiny(LIGER[family](), tmp_path / "checkpoint")
        found = verify(folder, presets.LIGER, device_map="cuda")
        assert found.failures == ()
