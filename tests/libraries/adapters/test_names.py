"""What an adapter names is un-fused, by whatever setting; the rest stays fused, and what can't be is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig, GPTNeoXConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from patcher import InvalidPatcherError, PatchedWeightsError, Patcher, report
from patcher.fusions import QKV
from tests.support.adapters import (
    LOADS,
    SEVEN,
    Load,
    adapted_layers,
    as_peft_model,
    assert_close,
    assert_same_files,
    base,
    config,
    new_adapter,
    settings_of,
    tensors_of,
    train,
    with_little_memory,
)
from tests.support.beside import FUSED_QKV
from tests.support.checkpoints import same_checkpoint
from tests.support.comparing import logits
from tests.support.processes import two_processes
from tests.support.replacements import JOINED
from tests.support.tiny import save_tiny, tiny_inputs, tiny_llama_config, tiny_qwen2_vl_config
from tests.support.trainer import FIRST_IS_BEST, MIDDLE, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
FUSED = Patcher(fusions=["qkv", "gate_up"])
ATTENTIONS = {"0.self_attn", "1.self_attn"}
#: name -> the settings of a LoRA, the modules that are un-fused for it
NAMED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "seven": ({"target_modules": SEVEN}, {"0.self_attn", "1.self_attn", "0.mlp", "1.mlp"}),
    "one of the parts": ({"target_modules": ["k_proj"]}, ATTENTIONS),
    "others": ({"target_modules": ["o_proj", "down_proj"]}, set()),
    "a joined layer": ({"target_modules": ["qkv_proj", "o_proj"]}, set()),
    "all-linear": ({"target_modules": "all-linear"}, {"0.self_attn", "1.self_attn", "0.mlp", "1.mlp"}),
    "an expression": ({"target_modules": r".*layers\.1\.(self_attn\.(q|v)_proj|mlp\.down_proj)"}, {"1.self_attn"}),
    "some layers": ({"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]}, {"1.self_attn"}),
    "a path": ({"target_modules": ["layers.0.mlp.up_proj", "o_proj"]}, {"0.mlp"}),
    "the default": ({}, ATTENTIONS),
    "excluded": (
        {
            "target_modules": r".*\.(q_proj|o_proj|up_proj)",
            "exclude_modules": ["q_proj", "model.layers.0.mlp.up_proj"],
        },
        {"0.self_attn", "1.self_attn", "0.mlp", "1.mlp"},
    ),
    "ranks": ({"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}}, ATTENTIONS),
    "a rank": ({"target_modules": ["o_proj"], "rank_pattern": {r"layers\.1\.mlp\.up_proj": 2}}, {"1.mlp"}),
    "an alpha": ({"target_modules": ["o_proj"], "alpha_pattern": {"gate_proj": 2}}, {"0.mlp", "1.mlp"}),
    "a part to save": ({"target_modules": ["o_proj"], "modules_to_save": ["v_proj"]}, ATTENTIONS),
    "a module to save": ({"target_modules": ["down_proj"], "modules_to_save": ["self_attn"]}, ATTENTIONS),
    "a layer to save": (
        {"target_modules": ["lm_head"], "modules_to_save": ["layers.1"]},
        {"1.self_attn", "1.mlp"},
    ),
    "a head to save": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, ATTENTIONS),
    "a parameter": ({"target_modules": ["o_proj"], "target_parameters": ["q_proj.weight"]}, ATTENTIONS),
    "biases": ({"target_modules": ["q_proj"], "bias": "all"}, ATTENTIONS),
}
#: Of joined layers stock has none.
HERE = {"a joined layer"}


def unfused(model: Any) -> set[str]:
    reasons = dict(report(model).refused)
    found = {path for path, reason in reasons.items() if reason == "an adapter names its layers"}
    fused = {path for path, *_ in report(model).fused}
    assert not found & fused
    assert len(found | fused) == 4
    return {path.removeprefix("model.layers.") for path in found}


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("name", NAMED)
def test_what_is_named_is_unfused_and_the_adapter_is_that_of_stock(name: str, llama: Path, tmp_path: Path) -> None:
    settings, expected = NAMED[name]
    model = base(llama, patcher=FUSED)
    joined = {path: part.weight.data_ptr() for path, part in model.named_modules() if path.endswith("qkv_proj")}
    computed = new_adapter(model, tmp_path / "ours", **settings)
    assert unfused(model) == expected
    for path, address in joined.items():  # on the storage that the joined weight had
        if path.removeprefix("model.layers.").removesuffix(".qkv_proj") in expected:
            layer: Any = model.get_submodule(path.replace("qkv_proj", "q_proj"))
            if hasattr(layer, "base_layer"):
                assert layer.base_layer.weight.data_ptr() == address
    if name not in HERE:
        assert_close(computed, new_adapter(base(llama), tmp_path / "theirs", **settings))
        assert_same_files(tmp_path / "ours", tmp_path / "theirs")


#: Whether transformers reads what `modules_to_save` has saved.
READS = "a part to save", "a module to save", "a layer to save", "a head to save"


@pytest.mark.crossed
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
@pytest.mark.parametrize("name", NAMED)
def test_an_adapter_of_stock_is_loaded_by_every_way(name: str, load: Load, llama: Path, tmp_path: Path) -> None:
    settings, expected = NAMED[name]
    on = FUSED if name in HERE else None
    new_adapter(base(llama, patcher=on), tmp_path / "adapter", **settings)
    stock = load(llama, tmp_path / "adapter", patcher=on)
    model = load(llama, tmp_path / "adapter", patcher=FUSED)
    assert unfused(model.get_base_model() if hasattr(model, "get_base_model") else model) == expected
    assert adapted_layers(model) == adapted_layers(stock)
    assert_close(logits(model), logits(stock))
    for each, folder in ((model, tmp_path / "ours"), (stock, tmp_path / "theirs")):
        each.save_pretrained(folder)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


def test_a_state_dict_says_which_layers(llama: Path) -> None:
    """`inject_adapter_in_model(state_dict=)` goes by its keys, whatever the config targets."""
    keys = [f"model.layers.1.self_attn.k_proj.lora_{each}.weight" for each in "AB"]
    model = base(llama, patcher=FUSED)
    settings = config(target_modules=["k_proj"])
    inject_adapter_in_model(settings, model, state_dict={key: torch.zeros(4, 4) for key in keys})
    assert unfused(model) >= {"1.self_attn"}
    assert adapted_layers(model) == 1
    assert hasattr(model.model.layers[1].self_attn.k_proj, "lora_A")


def test_a_second_adapter_unfuses_more(llama: Path) -> None:
    found = []
    for patcher in (FUSED, None):
        torch.manual_seed(0)
        model = get_peft_model(base(llama, patcher=patcher), config(target_modules=["q_proj"]))
        model.add_adapter("second", config(target_modules=["up_proj", "o_proj"]))
        found.append(logits(model))
        model.set_adapter("second")
        found.append(logits(model))
        if patcher is not None:
            assert unfused(model.get_base_model()) == {"0.self_attn", "1.self_attn", "0.mlp", "1.mlp"}
    assert_close(torch.stack(found[:2]), torch.stack(found[2:]))


class Tower(nn.Module):
    """A model of transformers in a module that says nothing of itself."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def prepared(method: str, model: Any) -> Any:
    """A model with an adapter whose values come from gradients or inputs of the layers before there is an adapter."""
    targets, inputs = ["q_proj", "o_proj", "down_proj"], {"input_ids": torch.arange(3, 120)[None]}
    if method == "lora_ga":
        settings = LoraConfig(r=4, target_modules=targets, init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())
        preprocess_loraga(model, settings, lambda: model(**inputs, labels=inputs["input_ids"]).loss.backward())
    else:
        settings = LoraConfig(r=4, target_modules=targets, init_lora_weights="corda", corda_config=CordaConfig())
        preprocess_corda(model, settings, run_model=lambda: model(**inputs))
    torch.manual_seed(0)
    return get_peft_model(model, settings)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the hooks of PEFT
@pytest.mark.parametrize("method", ["lora_ga", "corda"])
def test_values_that_come_from_layers_before_there_is_an_adapter(method: str, llama: Path) -> None:
    fused = base(llama, patcher=FUSED)
    with pytest.raises(InvalidPatcherError, match=rf"^init_lora_weights='{method}' was prepared .*\.self_attn\. "):
        prepared(method, fused)
    models = {}
    for name, model in {"fused": Patcher().apply(fused), "stock": base(llama)}.items():
        torch.manual_seed(0)
        models[name] = prepared(method, model).state_dict()
    adapters = {key: value for key, value in models["stock"].items() if "lora_" in key}
    assert len(adapters) == 2 * 3 * 2
    for key, value in adapters.items():
        # Singular vectors have no sign: rounding may turn them.
        torch.testing.assert_close(models["fused"][key].abs(), value.abs(), atol=1e-4, rtol=1e-3)


def test_inside_of_another_module(llama: Path) -> None:
    found = []
    for patcher in (FUSED, None):
        torch.manual_seed(0)
        model = get_peft_model(
            Tower(base(llama, patcher=patcher)), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        )
        model.add_adapter("second", LoraConfig(target_modules=["up_proj", "o_proj"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "second"])
        found.append(logits(model, tiny_inputs(tiny_llama_config())))
    assert_close(*found)


def test_a_convolution_of_patches(tmp_path: Path) -> None:
    folder = save_tiny(tiny_qwen2_vl_config(), tmp_path / "base")
    load = AutoModelForImageTextToText.from_pretrained
    adapters = []
    for patcher in (Patcher(fusions=["patch_embeddings", "qkv"]), None):
        torch.manual_seed(0)
        settings = config(target_modules=["patch_embed.proj", "q_proj"], task_type=None, rank_pattern={"q_proj": 2})
        adapters.append(get_peft_model(load(folder, patcher=patcher), settings))
        adapters[-1].save_pretrained(tmp_path / str(patcher is None))
    assert_close(logits(adapters[0]), logits(adapters[1]))
    assert_same_files(tmp_path / "True", tmp_path / "False")
    own = get_peft_model(load(folder, patcher=Patcher(fusions="patch_embeddings")), config(target_modules=["linear"]))
    assert own.peft_config["default"].target_modules == {"linear"}  # which is no expert


@pytest.mark.parametrize("options", [{}, {"autocast_adapter_dtype": False}], ids=["float32", "as the model"])
def test_in_half_precision_the_types_are_those_of_stock(options: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    new_adapter(base(llama), tmp_path / "adapter", target_modules=SEVEN)
    found = []
    for patcher in (FUSED, None):
        model = base(llama, patcher=patcher, dtype=torch.bfloat16)
        adapted = PeftModel.from_pretrained(model, tmp_path / "adapter", **options)
        adapted.save_pretrained(tmp_path / str(patcher is None))
        kinds = {value.dtype for name, value in adapted.named_parameters() if "lora_" in name}
        found.append((kinds, logits(adapted).float()))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], atol=0.15, rtol=0.05)
    assert_same_files(tmp_path / "True", tmp_path / "False")


def test_transformers_adds_and_saves_one(llama: Path, tmp_path: Path) -> None:
    model = base(llama, patcher=FUSED)
    model.add_adapter(config(target_modules=["q_proj", "up_proj"]))
    expected = logits(train(model))
    model.save_pretrained(tmp_path)
    assert settings_of(tmp_path)["target_modules"] == ["q_proj", "up_proj"]
    for load in LOADS:
        assert_close(logits(load(llama, tmp_path)), expected)
        assert_close(logits(load(llama, tmp_path, patcher=FUSED)), expected)


def test_it_resumes_in_trainer(llama: Path, tmp_path: Path) -> None:
    def run(patcher: Patcher | None, folder: Path, **arguments: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        settings = config(target_modules=["q_proj", "k_proj", "o_proj"], init_lora_weights=True)
        model = get_peft_model(base(llama, patcher=patcher), settings)
        return model, trainer(model, folder, **arguments)

    whole, runner = run(FUSED, tmp_path)
    runner.train()
    checkpoint = tmp_path / MIDDLE
    assert {key.rsplit(".", 3)[1] for key in tensors_of(checkpoint)} == {"q_proj", "k_proj", "o_proj"}
    for patcher in (FUSED, None):
        resumed, again = run(patcher, tmp_path / f"again {patcher is None}")
        again.train(resume_from_checkpoint=str(checkpoint))
        torch.testing.assert_close(logits(resumed), logits(whole), atol=1e-5, rtol=1e-5)
    best, third = run(FUSED, tmp_path / "best", **FIRST_IS_BEST)
    third.train()
    assert_close(logits(best), logits(as_peft_model(llama, tmp_path / "best" / MIDDLE)))
    assert not torch.allclose(logits(as_peft_model(llama, checkpoint)), logits(whole), atol=1e-4)


def test_only_some_layers_are_fused(llama: Path, tmp_path: Path) -> None:
    expected = new_adapter(base(llama), tmp_path, target_modules=SEVEN, rank_pattern={"v_proj": 2})
    model = as_peft_model(llama, tmp_path, patcher=Patcher(fusions=QKV(modules="model.layers.0.self_attn")))
    assert adapted_layers(model) == 2 * 7
    assert_close(logits(model), expected)


def test_a_file_of_pickles(llama: Path, tmp_path: Path) -> None:
    expected = new_adapter(base(llama), tmp_path, target_modules=SEVEN)
    torch.save(tensors_of(tmp_path), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    for load in (as_peft_model, with_little_memory):  # transformers itself reads no such file that is local
        assert_close(logits(load(llama, tmp_path, patcher=FUSED)), expected)


# --- what can't be -------------------------------------------------------------------------------------------------


def untouched(model: PreTrainedModel) -> list[tuple[str, int]]:
    return [(name, id(part)) for name, part in model.named_modules()] + [
        (name, id(value)) for name, value in model.named_parameters()
    ]


def test_quantized_weights_stay_joined(llama: Path) -> None:
    quantizer = BitsAndBytesConfig(load_in_8bit=True)
    model = base(llama, patcher=FUSED, quantization_config=quantizer)
    before = untouched(model)
    text = (
        r"model\.layers\.0\.self_attn is fused, and its layers are needed .*qkv_proj\S* is (quantized|a Linear8bitLt)"
    )
    for adapt in (get_peft_model, lambda model, settings: model.add_adapter(settings)):
        with pytest.raises(InvalidPatcherError, match=f"{text}.*leaves this module out: modules="):
            adapt(model, config(target_modules=["q_proj"]))
        assert untouched(model) == before
    adapted = get_peft_model(model, config(target_modules=["qkv_proj", "o_proj"]))
    assert adapted_layers(adapted) == 4


@pytest.mark.process
def test_weights_that_processes_share_stay_joined(llama: Path, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        model = base(llama, patcher=FUSED, distributed_config=DistributedConfig(tp_size=2))
        before = untouched(model)
        text = (
            r"model\.layers\.0\.self_attn is fused, .*qkv_proj\.(weight|bias) is shared by processes\. Load the model"
        )
        with pytest.raises(InvalidPatcherError, match=text):
            get_peft_model(model, config(target_modules=["q_proj"]))
        assert untouched(model) == before

    two_processes(work, tmp_path)


def test_one_that_cannot_be_leaves_the_others_as_they_are(llama: Path, tmp_path: Path) -> None:
    model = base(llama, patcher=FUSED)
    handle = model.model.layers[1].mlp.gate_up_proj.register_forward_hook(lambda *_: None)
    before = untouched(model)
    with pytest.raises(InvalidPatcherError, match=r"layers\.1\.mlp is fused.*gate_up_proj has hooks"):
        get_peft_model(model, config(target_modules=SEVEN))
    with pytest.raises(InvalidPatcherError, match="has hooks"):
        model.add_adapter(config(target_modules=SEVEN))
    assert untouched(model) == before
    model.save_pretrained(tmp_path)  # transformers doesn't take it for an adapted one
    assert same_checkpoint(tmp_path, llama)
    handle.remove()
    assert adapted_layers(get_peft_model(model, config(target_modules=SEVEN))) == 14


@pytest.mark.parametrize("patcher", [FUSED_QKV, JOINED], ids=["qkv", "gate_up"])
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
def test_what_a_class_mapping_converts_is_refused(load: Load, patcher: Patcher, llama: Path, tmp_path: Path) -> None:
    part = "q_proj" if patcher is FUSED_QKV else "up_proj"
    new_adapter(base(llama), tmp_path / "part", target_modules=[part, "o_proj"])
    text = r"The adapter names layers of model\.layers\.0\.\w+ whose weights a class mapping converts"
    with pytest.raises(InvalidPatcherError, match=text):
        load(llama, tmp_path / "part", patcher=patcher)
    expected = new_adapter(base(llama), tmp_path / "others", target_modules=["o_proj", "down_proj"])
    assert_close(logits(load(llama, tmp_path / "others", patcher=patcher)), expected)


def test_a_name_that_nothing_has_is_an_error_of_peft(llama: Path) -> None:
    with pytest.raises(ValueError, match=r"Target modules .* not found in the base model"):
        get_peft_model(base(llama, patcher=FUSED), config(target_modules=["no_proj"]))


def test_a_model_that_is_fused_in_part_is_saved_as_it_was(llama: Path, tmp_path: Path) -> None:
    """By the names of fusions a layout can only say that all is fused."""
    settings = {"target_modules": ["q_proj"], "layers_to_transform": [1]}
    model = get_peft_model(base(llama, patcher=FUSED), config(**settings)).merge_and_unload()
    expected = logits(model)
    with pytest.raises(PatchedWeightsError, match=r"not fused, as others are: model\.layers\.1\.self_attn\n"):
        model.save_pretrained(tmp_path / "layout", save_original_format=False)
    assert not (tmp_path / "layout").exists()
    model.save_pretrained(tmp_path / "original")
    assert_close(logits(base(tmp_path / "original")), expected)
    whole = get_peft_model(base(llama, patcher=FUSED), config(target_modules=["q_proj"])).merge_and_unload()
    whole.save_pretrained(tmp_path / "layout", save_original_format=False)
    again = base(tmp_path / "layout")
    assert {path.rpartition(".")[2] for path, *_ in report(again).fused} == {"mlp"}
    assert_close(logits(again), logits(whole))


def test_copies_unfuse_by_themselves(llama: Path) -> None:
    model = base(llama, patcher=FUSED)
    other = copy.deepcopy(model)
    get_peft_model(other, config(target_modules=SEVEN))
    assert unfused(other)
    assert not unfused(model)
    assert_close(logits(model), logits(base(llama)))


# --- parts of a packed layer ---------------------------------------------------------------------------------------

#: what is adapted of GPT-NeoX, of which `query_key_value` is split -> the rows that change: queries, keys, values
PARTS: dict[str, tuple[Any, tuple[bool, bool, bool]]] = {
    "queries and values": (["q_proj", "v_proj"], (True, False, True)),
    "the packed layer": (["query_key_value"], (True, True, True)),
    "all-linear": ("all-linear", (True, True, True)),
    "the default": (None, (True, True, True)),
}


@pytest.mark.parametrize("kind", PARTS)
def test_an_adapter_on_parts_changes_their_rows_of_the_packed_weight(kind: str, tmp_path: Path) -> None:
    targets, changes = PARTS[kind]
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
    folder = save_tiny(GPTNeoXConfig(**sizes, num_hidden_layers=2, num_attention_heads=4), tmp_path / "base")
    split = Patcher(fusions="split")
    expected = new_adapter(base(folder, patcher=split), tmp_path / "adapter", target_modules=targets)

    for load in LOADS:
        torch.testing.assert_close(logits(load(folder, tmp_path / "adapter", patcher=split)), expected)
    merged = as_peft_model(folder, tmp_path / "adapter", patcher=split).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    before, after = (load_file(each / "model.safetensors")[name] for each in (folder, tmp_path / "merged"))
    assert (after - before).view(4, 3, 16, 64).abs().amax((0, 2, 3)).bool().tolist() == list(changes)
    torch.testing.assert_close(logits(base(tmp_path / "merged")), expected)
