"""Generated files where this package isn't: in a process in which importing it raises."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import MergeModulelist

from patcher import Patcher
from patcher.codegen import PatchConfig, generate, write
from patcher.compat.conversions import stock_conversions
from patcher.errors import CodegenError
from tests.codegen.models import BOTH_SIDES, ENCODER_DECODER, EXPERTS, GPT_OSS, PAIRS, SOUND, T5, clip, text_config
from tests.support import fresh, tiny
from tests.support.checkpoints import assert_saved_alike, files, tensors
from tests.support.comparing import logits
from tests.support.quantizers import Quantizer, bnb_int8, is_quantized, quanto_int8, torchao_int8
from tests.support.small_configs import small_configs

#: case -> model class, config, what is fused, and the inputs where token ids are not enough
CASES: dict[str, tuple[str, Callable[[], PretrainedConfig], list[str], dict[str, Any] | None]] = {
    "Llama, all, biases, grouped queries": (
        "LlamaForCausalLM",
        lambda: text_config("LlamaConfig", attention_bias=True, mlp_bias=True, num_key_value_heads=2),
        ["qkv", "gate_up"],
        None,
    ),
    "Llama, tied": (
        "LlamaForCausalLM", lambda: text_config("LlamaConfig", tie_word_embeddings=True), ["qkv"], None,
    ),
    "Llama, the base model alone": ("LlamaModel", lambda: text_config("LlamaConfig"), ["qkv"], None),
    "Llama, a head that an Auto class builds": (
        "LlamaForSequenceClassification", lambda: text_config("LlamaConfig"), ["qkv"], None,
    ),
    "Qwen2": ("Qwen2ForCausalLM", lambda: text_config("Qwen2Config"), ["qkv", "gate_up"], None),
    "T5, inputs that are told apart": (
        "T5ForConditionalGeneration", lambda: transformers.T5Config(**T5), ["qkv"], BOTH_SIDES,
    ),
    "Whisper, no bias of k": (
        "WhisperForConditionalGeneration",
        lambda: transformers.WhisperConfig(**ENCODER_DECODER, max_source_positions=32, max_target_positions=64),
        ["qkv"],
        SOUND,
    ),
    "HRM, which stock takes apart to the same names": (
        "HrmTextForCausalLM", lambda: next(small_configs(transformers.HrmTextConfig)), ["gate_up"], None,
    ),
    "NomicBERT, which stock takes apart": (
        "NomicBertForMaskedLM", lambda: next(small_configs(transformers.NomicBertConfig)), ["qkv", "gate_up"], None,
    ),
    "CLIP, two models in one": ("CLIPModel", clip, ["patch_embeddings", "qkv"], PAIRS),
    "Qwen2-VL": ("Qwen2VLForConditionalGeneration", tiny.tiny_qwen2_vl_config, ["patch_embeddings", "qkv"], None),
    "Mixtral": ("MixtralForCausalLM", tiny.tiny_mixtral_config, ["sequential_experts"], None),
    "Qwen3-MoE, and qkv": (
        "Qwen3MoeForCausalLM", lambda: text_config("Qwen3MoeConfig", **EXPERTS), ["sequential_experts", "qkv"], None,
    ),
    "Qwen3-MoE, qkv alone": ("Qwen3MoeForCausalLM", lambda: text_config("Qwen3MoeConfig", **EXPERTS), ["qkv"], None),
    "Qwen3-VL-MoE, stacks of either form": (
        "Qwen3VLMoeForConditionalGeneration", tiny.tiny_qwen3_vl_moe_config, ["sequential_experts"], None,
    ),
    "Qwen3-VL-MoE, experts in several layers": (
        "Qwen3VLMoeForConditionalGeneration", lambda: next(small_configs(transformers.Qwen3VLMoeConfig)),
        ["sequential_experts"], None,
    ),
    "gpt-oss, transposed, biases": (
        "GptOssForCausalLM", lambda: text_config("GptOssConfig", **GPT_OSS), ["sequential_experts", "qkv"], None,
    ),
}  # fmt: skip

SHARDS = "40KB"

ALONE = """
import importlib, json, sys
sys.modules["patcher"] = None
import torch
folder = sys.argv[1]
sys.path.insert(0, folder)
for number, name, inputs in json.loads(sys.argv[2]):
    cls = getattr(importlib.import_module(f"alone_{number}"), name)
    model = cls.from_pretrained(f"{folder}/{number}/sharded").eval()
    inputs = torch.load(f"{folder}/{number}/inputs.pt")
    output = model(**inputs)
    result = output.logits if "logits" in output else output[0]
    torch.save(result.detach(), f"{folder}/{number}/output.pt")
    model.save_pretrained(f"{folder}/{number}/own", max_shard_size="SHARDS")
    result.sum().backward()
    assert all(each.grad is not None for name, each in model.named_parameters() if "_proj" in name), number
""".replace("SHARDS", SHARDS)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what each file did, by the number of its case."""
    folder = tmp_path_factory.mktemp("alone")
    told = []
    for number, (name, make, fusions, inputs) in enumerate(CASES.values()):
        cls: type[PreTrainedModel] = getattr(transformers, name)
        config = make()
        made = tiny.save_tiny(config, folder / str(number) / "whole", model_class=cls)
        cls.from_pretrained(made).save_pretrained(folder / str(number) / "sharded", max_shard_size=SHARDS)
        described = PatchConfig.from_patcher(
            Patcher(fusions=fusions), cls, config=config, target_file=f"alone_{number}.py"
        )
        write(described, folder)
        torch.save(tiny.tiny_inputs(config) if inputs is None else inputs, folder / str(number) / "inputs.pt")
        told.append((number, name, None))
    fresh.run(ALONE, folder, json.dumps(told))
    return folder


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_a_file_reads_computes_and_writes_as_the_original(case: str, alone: Path) -> None:
    folder, (name, _, fusions, inputs) = alone / str(list(CASES).index(case)), CASES[case]
    cls: Any = getattr(transformers, name)
    stock = cls.from_pretrained(folder / "sharded")
    torch.testing.assert_close(torch.load(folder / "output.pt"), logits(stock, inputs), atol=1e-4, rtol=1e-4)
    patched = logits(cls.from_pretrained(folder / "sharded", patcher=Patcher(fusions=fusions)), inputs)
    torch.testing.assert_close(torch.load(folder / "output.pt"), patched, atol=1e-6, rtol=1e-6)
    stock.save_pretrained(folder / "stock", max_shard_size=SHARDS)
    expected = files(folder / "stock")
    assert len(expected) > 3
    if any(isinstance(each, MergeModulelist) for each in operations_of(stock)):
        # What stock writes of a stack are views, and these lie in one file: there the borders of files are others.
        assert tensors(folder / "own") == tensors(folder / "stock")
        return
    assert files(folder / "own") == expected


def operations_of(model: PreTrainedModel) -> list[Any]:
    conversions: Any = stock_conversions(model)
    return [operation for each in conversions for operation in getattr(each, "operations", ())]


def test_conversions_of_several_layers_are_written_once_as_they_are() -> None:
    name, make, fusions, _ = CASES["Qwen3-VL-MoE, experts in several layers"]
    text = generate(PatchConfig.from_patcher(Patcher(fusions=fusions), getattr(transformers, name), config=make()))
    assert text.count("    ExpertsConverter(\n") == 2
    assert '"mlp.experts.gate_up_proj(?!_)",' in text  # not of the biases, which have converters of their own


@pytest.mark.parametrize("case", CASES)
def test_a_file_imports_nothing_of_this_package(case: str) -> None:
    name, make, fusions, _ = CASES[case]
    text = generate(PatchConfig.from_patcher(Patcher(fusions=fusions), getattr(transformers, name), config=make()))
    assert "import patcher" not in text
    assert "from patcher" not in text
    for word in ("_original_init", "__class__ ="):
        assert word not in text
    known = Path(__import__(getattr(transformers, name).__module__, fromlist=["x"]).__file__ or "").read_text("utf-8")
    assert [line for line in text.splitlines() if len(line) > 119 and line not in known] == []


RESUMED = """
import importlib, sys
sys.modules["patcher"] = None
import torch
from transformers import Trainer, TrainingArguments
folder = sys.argv[1]
sys.path.insert(0, folder)
cls = getattr(importlib.import_module("resumed"), sys.argv[2])
ids = [torch.arange(3 + n, 15 + n)[None] for n in range(8)]
items = [{"input_ids": each, "labels": each} for each in ids]
def run(out, steps, resume=None):
    model = cls.from_pretrained(f"{folder}/checkpoint")
    arguments = TrainingArguments(out, max_steps=steps, save_steps=2, per_device_train_batch_size=1, use_cpu=True,
        report_to=[], disable_tqdm=True, learning_rate=1e-2, lr_scheduler_type="constant")
    trainer = Trainer(model=model, args=arguments, train_dataset=items, data_collator=lambda batch: batch[0])
    trainer.train(resume_from_checkpoint=resume)
    return model
whole = run(f"{folder}/whole", 4)
run(f"{folder}/half", 2)
resumed = run(f"{folder}/other", 4, f"{folder}/half/checkpoint-2")
for (name, one), other in zip(whole.named_parameters(), resumed.parameters()):
    torch.testing.assert_close(one, other, msg=name)
before = dict(cls.from_pretrained(f"{folder}/checkpoint").named_parameters())
assert all(not torch.equal(one, before[name]) for name, one in whole.named_parameters() if "proj" in name)
"""


@pytest.mark.process
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_trainer_resumes(model_type: str, tmp_path: Path) -> None:
    llama = model_type == "llama"
    cls: Any = transformers.LlamaForCausalLM if llama else transformers.MixtralForCausalLM
    config = tiny.tiny_llama_config() if llama else tiny.tiny_mixtral_config()
    fusions = ["qkv", "gate_up"] if llama else ["sequential_experts", "qkv"]
    folder = tiny.save_tiny(config, tmp_path / "checkpoint", model_class=cls)
    write(PatchConfig.from_patcher(Patcher(fusions=fusions), cls, config=config, target_file="resumed.py"), tmp_path)
    fresh.run(RESUMED, tmp_path, cls.__name__)
    written, original = (load_file(each / "model.safetensors") for each in (tmp_path / "half/checkpoint-2", folder))
    assert written.keys() == original.keys()


def test_stock_classes_of_the_process_stay_what_they_are(imported: Any, tmp_path: Path) -> None:
    folder = tiny.save_tiny(tiny.tiny_mixtral_config(), tmp_path / "checkpoint")
    cls = transformers.MixtralForCausalLM
    before = cls.from_pretrained(folder)
    module: Any = imported(PatchConfig.from_patcher(Patcher(fusions=["sequential_experts", "qkv"]), cls))
    model = module.MixtralForCausalLM.from_pretrained(folder)
    after = cls.from_pretrained(folder)
    assert torch.equal(logits(before), logits(after))
    assert_saved_alike(model, after, tmp_path / "saved")


def test_files_of_two_configs_are_read_beside_one_another(imported: Any, tmp_path: Path) -> None:
    """One patcher and one model class: the layers that are fused, and so the conversions, depend on the config."""
    cls, sizes = transformers.DeepseekV3ForCausalLM, {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "qk_rope_head_dim": 8}
    models, folders = [], []
    for dense in (0, 2):
        config = text_config("DeepseekV3Config", **sizes, qk_nope_head_dim=8, first_k_dense_replace=dense)
        folders.append(tiny.save_tiny(config, tmp_path / str(dense), model_class=cls))
        models.append(imported(PatchConfig.from_patcher(Patcher(fusions=["gate_up"]), cls, config=config)))
    for module, folder in (*zip(models, folders, strict=True), (models[0], folders[0])):
        own, stock = (each.from_pretrained(folder) for each in (module.DeepseekV3ForCausalLM, cls))
        assert torch.allclose(logits(own), logits(stock), atol=1e-5)
        assert_saved_alike(own, stock, tmp_path / "saved")


def test_names_that_belong_to_the_whole_model_are_read_and_written(imported: Any, tmp_path: Path) -> None:
    """Checkpoints have the text model of a larger one: its names have a prefix that a part of the file can't know."""
    cls = transformers.Qwen3_5ForCausalLM
    config = next(small_configs(transformers.Qwen3_5TextConfig))
    file = tiny.save_tiny(config, tmp_path / "checkpoint", model_class=cls) / "model.safetensors"
    save_file({k.replace("model.", "model.language_model.", 1): v for k, v in load_file(file).items()}, file)
    stock = cls.from_pretrained(file.parent)
    module: Any = imported(PatchConfig.from_patcher(Patcher(fusions=["gate_up"]), cls, config=config))
    model = module.Qwen3_5ForCausalLM.from_pretrained(file.parent)
    torch.testing.assert_close(logits(model), logits(stock), atol=1e-5, rtol=0)
    assert_saved_alike(model, stock, tmp_path / "saved")


BY_NAME = [
    ("NemotronHForCausalLM", "sequential_experts", r"by which model\.embeddings\.weight has another name in a"),
    ("HrmTextForCausalLM", "qkv", r"gqkv_proj\.weight -> .*, which a file can't write as one with the fusion"),
    ("Tipsv2VisionModel", "qkv", r"attn\\.qkv\\.weight -> .*, which a file can't write as one with the fusion"),
    ("BridgeTowerModel", "qkv kv", r"crossattention\.self\.key\.\w+ has the name of what is fused elsewhere"),
    ("ProphetNetForConditionalGeneration", "siblings", r"would convert self_attn\.key_proj in different ways"),
    # in newer releases
    ("BailingHybridForCausalLM", "qkv", r"model\.layers\.\d\.self_attn\.q_proj\.weight has the name of what is"),
    ("Step3p7ForConditionalGeneration", "sequential_experts", r"moe\.gate_proj\.weight, moe\.up_proj\.weight -> "),
]


@pytest.mark.parametrize(("name", "fusion", "message"), [case for case in BY_NAME if hasattr(transformers, case[0])])
def test_what_conversions_by_name_would_get_wrong_is_refused(name: str, fusion: str, message: str) -> None:
    cls: Any = getattr(transformers, name)
    config: Any = next(small_configs(cls.config_class))
    if hasattr(config, "q_lora_rank"):
        config.q_lora_rank = None  # since 5.24 Bailing's attention has no q_proj otherwise
    with pytest.raises(CodegenError, match=message):
        PatchConfig.from_patcher(Patcher(fusions=fusion.split()), cls, config=config)


def test_a_base_model_is_saved_under_the_name_of_the_original(imported: Any, tmp_path: Path) -> None:
    folder = tiny.save_tiny(tiny.tiny_llama_config(), tmp_path / "checkpoint")
    module: Any = imported(PatchConfig.from_patcher(Patcher(fusions=["qkv"]), transformers.LlamaForCausalLM))
    model = module.LlamaModel.from_pretrained(folder)
    assert re.fullmatch("Qkv[0-9A-F]{4}LlamaModel", type(model).__name__)
    model.save_pretrained(tmp_path / "base")
    assert json.loads((tmp_path / "base" / "config.json").read_text())["architectures"] == ["LlamaModel"]
    assert torch.equal(
        logits(transformers.LlamaModel.from_pretrained(tmp_path / "base")),
        logits(transformers.LlamaModel.from_pretrained(folder)),
    )


def test_a_model_of_a_class_without_conversions_is_not_saved_in_its_own_layout(imported: Any, tmp_path: Path) -> None:
    """`fully_shard` gives a model such a class; one that was loaded knows its conversions."""
    config = text_config("LlamaConfig")
    module = imported(PatchConfig.from_patcher(Patcher(fusions=["qkv"]), transformers.LlamaForCausalLM))
    model = module.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "whole")
    model.model.__class__ = type("Wrapped", (type(model.model),), {})
    with pytest.raises(NotImplementedError, match="Wrapped has no conversions, which go by names"):
        model.save_pretrained(tmp_path / "wrapped")
    loaded = module.LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    loaded.model.__class__ = type("Wrapped", (type(loaded.model),), {})
    loaded.save_pretrained(tmp_path / "wrapped")
    assert files(tmp_path / "wrapped") == files(tmp_path / "whole")


def test_a_model_for_which_the_file_has_no_conversions_is_refused(imported: Any, tmp_path: Path) -> None:
    """A text tower of the layers that were fused in images: its q, k and v would be random, and saved as one."""
    folder = tiny.save_tiny(clip(), tmp_path / "checkpoint", model_class=transformers.CLIPModel)
    module: Any = imported(PatchConfig.from_patcher(Patcher(fusions=["qkv"]), transformers.CLIPVisionModel))
    stock = transformers.CLIPVisionModel.from_pretrained(folder)
    assert_saved_alike(module.CLIPVisionModel.from_pretrained(folder), stock, tmp_path / "saved")
    refusal = "CLIPTextModel has no conversions, which go by names, for its FusedCLIPAttention: load another model"
    for load in (module.CLIPModel.from_pretrained, module.CLIPTextModel.from_pretrained):
        with pytest.raises(NotImplementedError, match=refusal):
            load(folder)
    with pytest.raises(NotImplementedError, match=refusal):
        module.CLIPModel(clip()).save_pretrained(tmp_path / "new")


def test_layers_that_the_checkpoint_lacks_are_saved_in_the_original_layout(imported: Any, tmp_path: Path) -> None:
    """transformers remembers the conversions that a load used."""
    folder = tiny.save_tiny(clip(), tmp_path / "images", model_class=transformers.CLIPModel)
    weights = load_file(folder / "model.safetensors")
    save_file({key: weights[key] for key in weights if "text_model" not in key}, folder / "model.safetensors")
    module: Any = imported(PatchConfig.from_patcher(Patcher(fusions=["qkv"]), transformers.CLIPModel))
    module.CLIPModel.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert tensors(tmp_path / "saved").keys() == weights.keys()


@pytest.mark.libraries
@pytest.mark.parametrize("quantizer", [bnb_int8, torchao_int8, quanto_int8])
def test_fused_layers_are_quantized(quantizer: Quantizer, imported: Any, tmp_path: Path) -> None:
    """quanto expects what converters are given: a list of tensors."""
    folder = tiny.save_tiny(tiny.tiny_llama_config(), tmp_path / "checkpoint")
    module: Any = imported(PatchConfig.from_patcher(Patcher(fusions=["qkv"]), transformers.LlamaForCausalLM))
    model = module.LlamaForCausalLM.from_pretrained(folder, quantization_config=quantizer())
    assert is_quantized(model.model.layers[0].self_attn.qkv_proj)
    stock = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=quantizer())
    torch.testing.assert_close(logits(model), logits(stock), atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", [case for case in CASES if "sequential_experts" in CASES[case][2]])
def test_a_state_dict_of_the_original_and_one_of_a_checkpoint_are_loaded(
    case: str, imported: Any, tmp_path: Path
) -> None:
    """The original's parameters are stacks where a checkpoint has each expert by itself."""
    name, make, fusions, _ = CASES[case]
    cls: Any = getattr(transformers, name)
    folder = tiny.save_tiny(make(), tmp_path / "checkpoint", model_class=cls)
    module: Any = imported(PatchConfig.from_patcher(Patcher(fusions=fusions), cls, config=make()))
    model = getattr(module, name).from_pretrained(folder)
    expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for given in (cls.from_pretrained(folder).state_dict(), load_file(folder / "model.safetensors"), expected):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert not any(model.load_state_dict(given))
        assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())


@pytest.mark.libraries
@pytest.mark.parametrize("quantizer", [bnb_int8, torchao_int8, quanto_int8])
def test_every_layer_of_a_split_stack_is_quantized(quantizer: Quantizer, imported: Any, tmp_path: Path) -> None:
    """Some quantizers convert the first parameter that they are given: all other experts were random."""
    folder = tiny.save_tiny(text_config("GptOssConfig", **GPT_OSS), tmp_path / "checkpoint")
    sequential = Patcher(fusions=["sequential_experts"])
    module: Any = imported(PatchConfig.from_patcher(sequential, transformers.GptOssForCausalLM))
    model = module.GptOssForCausalLM.from_pretrained(folder, quantization_config=quantizer())
    assert all(is_quantized(expert.up_proj) for expert in model.model.layers[0].mlp.experts)
    patched: Any = transformers.GptOssForCausalLM.from_pretrained(
        folder, quantization_config=quantizer(), patcher=sequential
    )
    torch.testing.assert_close(logits(model), logits(patched), atol=1e-5, rtol=0)


@pytest.mark.libraries
@pytest.mark.parametrize("quantizer", [bnb_int8, quanto_int8])
def test_a_quantized_patch_embedding_is_not_initialized(quantizer: Quantizer, imported: Any, tmp_path: Path) -> None:
    """CLIP initializes the kernel from the module around it, which is no real tensor where the layer is quantized."""
    folder = tiny.save_tiny(clip(), tmp_path / "checkpoint", model_class=transformers.CLIPModel)
    patcher = Patcher(fusions=["patch_embeddings"])
    module: Any = imported(PatchConfig.from_patcher(patcher, transformers.CLIPModel))
    model = module.CLIPModel.from_pretrained(folder, quantization_config=quantizer())
    patched: Any = transformers.CLIPModel.from_pretrained(folder, quantization_config=quantizer(), patcher=patcher)
    stock: Any = transformers.CLIPModel.from_pretrained(folder)
    found, same, near = (logits_of_pairs(each) for each in (model, patched, stock))
    torch.testing.assert_close(found, same, atol=1e-5, rtol=0)
    torch.testing.assert_close(found, near, atol=0.05, rtol=0)


def logits_of_pairs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**PAIRS).logits_per_image  # type: ignore[no-any-return]


def test_a_patcher_on_top_of_a_file(imported: Any, tmp_path: Path) -> None:
    folder = tiny.save_tiny(tiny.tiny_llama_config(), tmp_path / "checkpoint")
    stock = transformers.LlamaForCausalLM.from_pretrained(folder)
    module: Any = imported(PatchConfig.from_patcher(Patcher(fusions=["qkv"]), transformers.LlamaForCausalLM))

    class Norm(module.LlamaRMSNorm):  # type: ignore[name-defined, misc]
        pass

    model = module.LlamaForCausalLM.from_pretrained(
        folder, patcher=Patcher({"LlamaRMSNorm": Norm}, fusions=["gate_up"])
    )
    assert type(model.model.norm) is Norm
    names = dict(model.named_modules())
    assert "model.layers.0.self_attn.qkv_proj" in names
    assert "model.layers.0.mlp.gate_up_proj" in names
    torch.testing.assert_close(logits(model), logits(stock), atol=1e-4, rtol=0)
    assert_saved_alike(model, stock, tmp_path / "saved")


def test_weights_for_layers_of_the_original_are_not_left_out_in_silence(imported: Any, tmp_path: Path) -> None:
    """PEFT loads an adapter through its own module around the model, without `strict`."""
    folder = tiny.save_tiny(tiny.tiny_llama_config(), tmp_path / "checkpoint")
    module: Any = imported(PatchConfig.from_patcher(Patcher(fusions=["qkv"]), transformers.LlamaForCausalLM))
    around = nn.ModuleDict({"model": module.LlamaForCausalLM.from_pretrained(folder)})
    own = {key: tensor + 1 for key, tensor in around.state_dict().items()}
    assert not any(around.load_state_dict(own, strict=False))
    assert all(torch.equal(tensor, own[key]) for key, tensor in around.state_dict().items())
    of_an_adapter = {"model.model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(2, 64)}
    with pytest.raises(
        RuntimeError, match=r"q_proj\.lora_A\.default\.weight is for a layer of the original model only"
    ):
        around.load_state_dict(of_an_adapter, strict=False)
    stock = nn.ModuleDict({"model": transformers.LlamaForCausalLM.from_pretrained(folder)})
    assert stock.load_state_dict(of_an_adapter, strict=False).unexpected_keys == [*of_an_adapter]  # for PEFT to fill
    of_others = {"model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1)}  # as old checkpoints have it
    assert around.load_state_dict(of_others, strict=False).unexpected_keys == [*of_others]


def test_a_load_that_is_split_over_processes_is_refused(imported: Any, tmp_path: Path) -> None:
    folder = tiny.save_tiny(tiny.tiny_llama_config(), tmp_path / "checkpoint")
    from transformers.distributed import DistributedConfig

    module: Any = imported(PatchConfig.from_patcher(Patcher(fusions=["qkv"]), transformers.LlamaForCausalLM))
    with pytest.raises(
        NotImplementedError, match="is of a generated file, whose layers a distributed_config or tp_plan"
    ):
        module.LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))


def test_rows_of_one_layer_are_its_parts() -> None:
    from patcher.compat.standing_alone import JoinedPart

    whole, bias = nn.Linear(4, 8), None
    part = JoinedPart(whole, 6, 2, bias)
    features = torch.randn(3, 4)
    assert torch.allclose(part(features), whole(features)[:, 6:])
