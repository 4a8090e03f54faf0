"""Loads: what matched nothing, weights that don't fit, what is not supported together."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Concatenate,
    EncoderDecoderModel,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralForCausalLM,
    WeightConverter,
    pipeline,
)
from transformers.core_model_loading import Transpose, WeightRenaming
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

from patcher import Patcher
from tests.project.advice import OwnMLP, Place, Steps, advice, load, same, written
from tests.support.computing import ThereOnly, Twice
from tests.support.gguf_files import write_qwen35_gguf
from tests.support.offloaded import places
from tests.support.quantizers import bnb_nf4
from tests.support.replacements import JOIN, JOINED, JoinedMLP, With, joining
from tests.support.tiny import save_tiny, tiny_bert_config, tiny_llama_config, tiny_tokenizer

OWN = Patcher({"LlamaMLP": OwnMLP})
PARTS = ("mlp.gate_proj.weight", "mlp.up_proj.weight")


class Renamed(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.upper = self.up_proj
        del self.up_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.upper(x))


class BothRenamed(Renamed):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lower = self.gate_proj
        del self.gate_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.lower(x)) * self.upper(x))


class Wide(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.up_proj = nn.Linear(config.hidden_size + 1, config.intermediate_size, bias=False)
        nn.init.constant_(self.up_proj.weight, 3)


class OneWay(Concatenate):
    """An operation that says nothing of its reverse."""

    @property
    def reverse_op(self) -> Any:
        raise NotImplementedError


def changed(folder: Path, to: Path, change: Any) -> Path:
    """A checkpoint with other tensors."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


# --- what matched nothing ------------------------------------------------------------------------------------------


@advice(
    ": a key is the bare name of a class, which is replaced wherever it is; write {}, or give a path in module_map",
    "Correct or remove them; with strict=False this is a warning.",
)
def paths_and_dotted_names_as_keys(at: Place) -> Steps:
    home = "transformers.models.llama.modeling_llama.LlamaMLP"
    for key in (home, "model.layers.0.mlp", "model.layers[1].mlp", "model.layers.*.mlp", "model.layers.{0..1}.mlp"):
        said = yield lambda key=key: load(at.llama, Patcher({key: OwnMLP}))  # type: ignore[misc]
        name = written(said, "write ('.*?')")
        model = load(at.llama, Patcher({name: OwnMLP}))
        assert type(model.model.layers[0].mlp) is OwnMLP
        assert same(model, at.llama)
    model = load(at.llama, Patcher(module_mapping={"model.layers.{0..1}.mlp": OwnMLP}))
    assert type(model.model.layers[1].mlp) is OwnMLP


@advice("Correct or remove them; with strict=False this is a warning.")
def the_nearest_name_is_the_one_that_was_meant(at: Place) -> Steps:
    typos: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"class_mapping": {"LlamaMPL": OwnMLP}}, {"class_mapping": {"LlamaMLP": OwnMLP}}),
        ({"new_weights": "adaptor"}, {"new_weights": ["adapter", "scales"]}),
        (
            {"extra_weight_conversions": joining(*PARTS, target="mlp.gate_up_prj")},
            {"extra_weight_conversions": JOIN},
        ),
    ]
    for wrong, right in typos:
        base = Patcher({"LlamaMLP": JoinedMLP if "extra_weight_conversions" in right else With})
        said = yield lambda base=base, wrong=wrong: load(at.llama, base.replace(**wrong))  # type: ignore[misc]
        assert "nearest: " in said
        if "new_weights" in right:
            assert (load(at.llama, base.replace(**right)).model.layers[0].mlp.adapter.weight == 2).all()
        else:
            assert same(load(at.llama, base.replace(**right)), at.llama)


@advice(": an expression leaves replacements alone; as a key of its own write {}")
def an_expression_for_a_replacement(at: Place) -> Steps:
    mapping = {"Llama.*Norm": type("Norm", (LlamaRMSNorm,), {}), ".*RMSNorm$": LlamaRMSNorm}
    said = yield lambda: load(at.llama, Patcher(mapping))
    key = written(said, r"as a key of its own write ([^\n]*)\n")
    model = load(at.llama, Patcher(mapping | {key: mapping["Llama.*Norm"]}))
    assert type(model.model.norm).__name__ == "Norm"


@advice("Replace the class that builds it, or give a path in module_mapping")
def a_class_of_torch_as_a_key(at: Place) -> Steps:
    yield lambda: load(at.llama, Patcher({"Linear": nn.Linear}))
    assert same(load(at.llama, Patcher({"LlamaMLP": OwnMLP})), at.llama)
    assert same(load(at.llama, Patcher(module_mapping={"**.q_proj": type("Own", (nn.Linear,), {})})), at.llama)


# --- weights -------------------------------------------------------------------------------------------------------


def added(said: str) -> dict[str, Any]:
    """The arguments in the line to add."""
    found: dict[str, Any] = eval(f"dict({said.partition('add to the Patcher: ')[2].splitlines()[0]})")
    return found


@advice("If they are meant to be {}, add to the Patcher: {}")
def weights_that_are_new(at: Place) -> Steps:
    patcher = Patcher({"LlamaMLP": With})
    said = yield lambda: load(at.llama, patcher)
    model = load(at.llama, patcher.replace(**added(said)))
    assert (model.model.layers[0].mlp.adapter.weight == 2).all()


@advice("Where shapes differ, load with ignore_mismatched_sizes=True as well.")
def weights_of_another_shape(at: Place) -> Steps:
    patcher = Patcher({"LlamaMLP": Wide})
    said = yield lambda: load(at.llama, patcher)
    model = load(at.llama, patcher.replace(**added(said)), ignore_mismatched_sizes=True)
    assert (model.model.layers[0].mlp.up_proj.weight == 3).all()


class TurnedDown(LlamaMLP):
    """Holds the weight of its last layer transposed."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.down_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)) @ self.down_proj.weight


@advice("The checkpoint has some transposed. Convert them ")
def weights_that_are_transposed(at: Place) -> Steps:
    patcher = Patcher({"LlamaMLP": TurnedDown})
    said = yield lambda: load(at.llama, patcher)
    conversions = written(said, r"extra_weight_conversions=(\[.*?\])\n", Transpose=Transpose)
    assert same(load(at.llama, patcher.replace(extra_weight_conversions=conversions)), at.llama)


@advice("Correct the conversion, or give the parameter the shape that the conversion makes.")
def a_conversion_that_makes_another_shape(at: Place) -> Steps:
    sideways = WeightConverter([*PARTS], ["mlp.gate_up_proj.weight"], operations=[Concatenate(dim=1)])
    said = yield lambda: load(at.llama, JOINED.replace(extra_weight_conversions=sideways))
    assert "[Concatenate(dim=1)] makes (96, 128), the model has (192, 64)" in said
    assert same(load(at.llama, JOINED), at.llama)


@advice(
    "If a conversion is missing, add it: extra_weight_conversions=[WeightConverter([...], [...], operations=[...])]."
)
def weights_whose_names_and_shapes_do_not_tell(at: Place) -> Steps:
    patcher = Patcher({"LlamaMLP": BothRenamed})
    yield lambda: load(at.llama, patcher)
    names = {"gate_proj": "lower", "up_proj": "upper"}
    renamings = [WeightRenaming(f"mlp.{old}", f"mlp.{new}") for old, new in names.items()]
    assert same(load(at.llama, patcher.replace(extra_weight_conversions=renamings)), at.llama)


@advice("Replace those modules as well, or take a checkpoint that fits them: there a conversion runs only if nothing ")
def a_conversion_that_other_modules_need_as_well(at: Place) -> Steps:
    def turned(*layers: int) -> Path:
        state = load_file(at.llama / "model.safetensors")
        names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in layers]
        folder = save_tiny(tiny_llama_config(), at.tmp / f"turned{len(layers)}")
        save_file(
            {key: value.T.contiguous() if key in names else value for key, value in state.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        return folder

    turn = WeightConverter("down_proj.weight", "down_proj.weight", operations=[Transpose(0, 1)])
    one = Patcher(module_mapping={"model.layers.0.mlp": OwnMLP}, extra_weight_conversions=turn)
    yield lambda: load(turned(0, 1), one)
    every = Patcher({"LlamaMLP": OwnMLP}, extra_weight_conversions=turn)
    assert same(load(turned(0, 1), every), at.llama)
    assert same(load(turned(0), one), at.llama)


class OwnMixtralNorm(MixtralRMSNorm):
    pass


@advice("A filter drops a stock conversion for the whole model: replace every class that needs it, or take the filter")
def a_filter_that_others_need(at: Place) -> Steps:
    patcher = Patcher({"MixtralRMSNorm": OwnMixtralNorm}, "experts")
    yield lambda: MixtralForCausalLM.from_pretrained(at.moe, patcher=patcher)
    model = MixtralForCausalLM.from_pretrained(at.moe, patcher=Patcher({"MixtralRMSNorm": OwnMixtralNorm}))
    assert same(model, at.moe)


@advice("Check the patterns, the order of the sources and the operations of this conversion.")
def a_conversion_that_fails(at: Place) -> Steps:
    wrong = joining("mlp.gate_proj.weight", "mlp.down_proj.weight")
    yield lambda: load(at.llama, JOINED.replace(extra_weight_conversions=wrong))
    assert same(load(at.llama, JOINED), at.llama)


# --- fused layouts -------------------------------------------------------------------------------------------------


@advice(
    "Take a checkpoint that has them; or load this one without the patcher, which initialises them, save "
    "that, and load it with the patcher."
)
def a_checkpoint_that_lacks_a_part(at: Place) -> Steps:
    key = "model.layers.1.self_attn.k_proj.weight"
    folder = changed(at.llama, at.tmp / "less", lambda tensors: tensors.pop(key))
    said = yield lambda: load(folder, Patcher(fusions="qkv"))
    assert f"  {key}\n" in said
    load(folder, None).save_pretrained(at.tmp / "whole")
    assert same(load(at.tmp / "whole", Patcher(fusions="qkv")), at.tmp / "whole")


@advice("The checkpoint holds {}. Take one of them out.")
def a_checkpoint_that_holds_a_part_twice(at: Place) -> Steps:
    def twice(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"].clone()

    folder = changed(at.llama, at.tmp / "twice", twice)
    said = yield lambda: load(folder, Patcher(fusions="qkv"))
    assert "layers.0.self_attn.k_proj.weight" in said
    other = changed(folder, at.tmp / "once", lambda tensors: tensors.pop("layers.0.self_attn.k_proj.weight"))
    assert same(load(other, Patcher(fusions="qkv")), at.llama)


def original(model: Any) -> dict[str, torch.Tensor]:
    """What a model saves."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def first_keys(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]


# --- what is not supported -----------------------------------------------------------------------------------------


@advice("Load the model without the patcher, save it with save_pretrained, and load that with it.")
def a_device_mesh(at: Place) -> Steps:
    yield lambda: load(at.llama, Patcher(fusions="qkv"), device_mesh=object())
    load(at.llama).save_pretrained(at.tmp / "again")
    assert same(load(at.tmp / "again", Patcher(fusions="qkv")), at.llama)


@advice(
    "this pipeline was given one that is loaded; write "
    'model=patcher.apply(model), or pipeline(..., model="repo", model_kwargs={"patcher": patcher}).'
)
def a_pipeline_of_a_loaded_model(at: Place) -> Steps:
    model, tokenizer = load(at.llama), tiny_tokenizer()
    patcher = Patcher(fusions="qkv")
    said = yield lambda: pipeline("text-generation", model=model, tokenizer=tokenizer, patcher=patcher)
    applied = written(said, r"write model=(.*?),", patcher=patcher, model=model)
    for each in (applied, load(at.llama, patcher)):
        made = pipeline("text-generation", model=each, tokenizer=tokenizer)
        assert type(made.model.model.layers[0].self_attn).__name__ == "FusedLlamaAttention"


@advice("write patcher=a | b alone.")
def a_pipeline_with_two_patchers(at: Place) -> Steps:
    a, b, tokenizer = Patcher(fusions="qkv"), Patcher(fusions="gate_up"), tiny_tokenizer()
    options: dict[str, Any] = {"model": str(at.llama), "tokenizer": tokenizer}
    said = yield lambda: pipeline("text-generation", patcher=a, model_kwargs={"patcher": b}, **options)
    both = written(said, r"write patcher=(.*) alone", a=a, b=b)
    assert same(pipeline("text-generation", patcher=both, **options).model, at.llama)


@advice("{} is not in the checkpoint, and the device map puts it on the disk: say where, with offload_folder=...")
def a_new_weight_on_the_disk(at: Place) -> Steps:
    patcher = Patcher({"LlamaMLP": With}, new_weights=["adapter", "scales"])
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    yield lambda: load(at.llama, patcher, device_map=places)
    load(at.llama, patcher, device_map=places, offload_folder=str(at.tmp / "disk"))


@advice("Name those instead, or leave these modules out of the patcher.")
def a_map_of_parts_of_a_joined_layer(at: Place) -> Steps:
    patcher, stock = Patcher(fusions="qkv"), load(at.llama)
    device_map = places(stock, lambda path: path == "model.layers.1.self_attn.q_proj")
    options = {"offload_folder": str(at.tmp / "disk")}
    said = yield lambda: load(at.llama, patcher, device_map=device_map, **options)
    assert "model.layers.{0..1}.self_attn.q_proj: part of model.layers.{0..1}.self_attn.qkv_proj" in said
    right = {key: place for key, place in device_map.items() if not re.search(r"attn\.[qkv]_proj", key)}
    right |= {f"model.layers.{number}.self_attn.qkv_proj": "disk" for number in range(2)}
    model = load(at.llama, patcher, device_map=right, **options)
    assert model.get_submodule("model.layers.1.self_attn.qkv_proj").weight.is_meta
    assert same(model, at.llama)
    assert same(load(at.llama, Patcher(fusions="gate_up"), device_map=in_whole_mlps(device_map), **options), at.llama)


def in_whole_mlps(device_map: dict[str, Any]) -> dict[str, Any]:
    """The map with the MLPs as wholes."""
    return {key: at for key, at in device_map.items() if ".mlp." not in key} | {
        f"model.layers.{number}.mlp": "cpu" for number in range(2)
    }


@advice(
    "Load the model without the patcher (with quantization_config=GgufConfig(dequantize=True)), save it with "
    "save_pretrained, and load that with it."
)
def a_gguf_file_that_is_converted(at: Place) -> Steps:
    write_qwen35_gguf(at.tmp / "model.gguf")
    options: dict[str, Any] = {"gguf_file": "model.gguf", "quantization_config": GgufConfig(dequantize=True)}
    patcher = Patcher(fusions="gate_up")
    yield lambda: AutoModelForCausalLM.from_pretrained(at.tmp, patcher=patcher, **options)
    AutoModelForCausalLM.from_pretrained(at.tmp, **options).save_pretrained(at.tmp / "saved")
    model = AutoModelForCausalLM.from_pretrained(at.tmp / "saved", patcher=patcher)
    assert hasattr(model.model.layers[1].mlp, "gate_up_proj")


@advice("Pass it to what loads or constructs a model; the parts of a composite model take encoder_patcher=")
def a_patcher_in_a_config(at: Place) -> Steps:
    patcher, bert = Patcher(fusions="qkv"), at.tmp / "bert"
    yield lambda: LlamaForCausalLM(LlamaConfig(**tiny_llama_config().to_dict() | {"patcher": patcher}))
    model = AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher)
    assert hasattr(model.model.layers[0].self_attn, "qkv_proj")
    save_tiny(tiny_bert_config(), bert, model_class=AutoModel)
    together = EncoderDecoderModel.from_encoder_decoder_pretrained
    yield lambda: together(bert, bert, patcher=patcher)
    model = together(bert, bert, encoder_patcher=patcher, decoder_patcher=patcher)
    assert [type(module).__name__ for module in model.modules()].count("FusedBertSelfAttention") == 4


# --- a layout on the disk ------------------------------------------------------------------------------------------


def in_layout(at: Place, name: str) -> Path:
    """A checkpoint in a runtime layout."""
    load(at.llama, Patcher(fusions="qkv")).save_pretrained(at.tmp / name, save_original_format=False)
    return at.tmp / name


@advice('Restore "fusion_config": {"patcher": [...]} in that file, as save_pretrained(..., ')
def a_layout_that_nothing_names(at: Place) -> Steps:
    folder = in_layout(at, "layout")
    config = json.loads((folder / "config.json").read_text())
    names = config.pop("fusion_config")
    (folder / "config.json").write_text(json.dumps(config))
    yield lambda: load(folder)
    (folder / "config.json").write_text(json.dumps(config | {"fusion_config": names}))
    assert same(load(folder), at.llama)


@advice("Delete one of them; without {} take ")
def weights_twice(at: Place) -> Steps:
    folder = in_layout(at, "layout")
    shutil.copy(at.llama / "model.safetensors", folder)
    yield lambda: load(folder)
    (folder / "model.safetensors").unlink()
    assert same(load(folder), at.llama)
    shutil.copy(at.llama / "model.safetensors", folder)
    (folder / "model.patcher.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["fusion_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert same(load(folder), at.llama)


@advice(
    "by which a load finds them, and as no other. Leave variant out, or save in the original format (the default)."
)
def a_variant_of_a_layout(at: Place) -> Steps:
    model = load(at.llama, Patcher(fusions="qkv"))
    yield lambda: model.save_pretrained(at.tmp / "a", variant="fp16", save_original_format=False)
    model.save_pretrained(at.tmp / "b", save_original_format=False)
    model.save_pretrained(at.tmp / "c", variant="fp16")
    assert same(load(at.tmp / "b"), at.llama)
    assert same(load(at.tmp / "c", variant="fp16"), at.llama)


@advice("and these are in the original format. Give another variant, or none.")
def our_variant_of_the_original(at: Place) -> Steps:
    model = load(at.llama, Patcher(fusions="qkv"))
    yield lambda: model.save_pretrained(at.tmp / "a", variant="patcher")
    model.save_pretrained(at.tmp / "b")
    assert same(load(at.tmp / "b"), at.llama)


@advice("Save in the original format (the default), or express the layout as a fusion.")
def a_layout_that_no_fusion_describes(at: Place) -> Steps:
    model = load(at.llama, JOINED)
    yield lambda: model.save_pretrained(at.tmp / "a", save_original_format=False)
    model.save_pretrained(at.tmp / "b")
    assert same(load(at.tmp / "b"), at.llama)
    load(at.llama, Patcher(fusions="gate_up")).save_pretrained(at.tmp / "c", save_original_format=False)
    assert same(load(at.tmp / "c"), at.llama)


@advice("save_original_format=False would write what nothing can load. Save in the original format.")
def a_fused_layer_in_a_stock_model(at: Place) -> Steps:
    model, fused = load(at.llama), load(at.llama, Patcher(fusions="qkv"))
    model.model.layers[0].self_attn = fused.model.layers[0].self_attn
    yield lambda: model.save_pretrained(at.tmp / "a", save_original_format=False)
    model.save_pretrained(at.tmp / "b")
    assert same(load(at.tmp / "b"), at.llama)


@advice("Give its operations a `reverse_op` that inverts them, or save the runtime layout yourself with ")
def an_operation_without_a_reverse(at: Place) -> Steps:
    from safetensors.torch import save_model

    wrong = WeightConverter([*PARTS], ["mlp.gate_up_proj.weight"], operations=[OneWay(dim=0)])
    model = load(at.llama, JOINED.replace(extra_weight_conversions=wrong))
    yield lambda: model.save_pretrained(at.tmp / "a")
    save_model(model, str(at.tmp / "model.safetensors"))
    assert "model.layers.0.mlp.gate_up_proj.weight" in load_file(at.tmp / "model.safetensors")
    load(at.llama, JOINED).save_pretrained(at.tmp / "b")
    assert same(load(at.tmp / "b"), at.llama)


@advice("Correct its reverse, the `reverse_op` of an operation or the `separate` of a layout, or save the runtime ")
def an_operation_whose_reverse_computes_something_else(at: Place) -> Steps:
    from safetensors.torch import save_model

    def doubled(operation: Twice) -> Any:
        converter = WeightConverter(["mlp.up_proj.weight"], ["mlp.up_proj.weight"], operations=[operation])
        return load(at.llama, Patcher(extra_weight_conversions=converter))

    model = doubled(ThereOnly())
    yield lambda: model.save_pretrained(at.tmp / "a")
    save_model(model, str(at.tmp / "model.safetensors"))
    doubled(Twice()).save_pretrained(at.tmp / "b")
    assert same(load(at.tmp / "b"), at.llama)


@advice("Assign layers to a fused module by its attributes, or take the fusions off with Patcher().apply(model)")
def a_stock_weight_beside_a_fused_one(at: Place) -> Steps:
    model = load(at.llama, Patcher(fusions="qkv"))
    attention, keys = model.model.layers[0].self_attn, first_keys(at.llama)
    extra = {"model.layers.0.self_attn.k_proj.weight": keys}
    yield lambda: model.save_pretrained(at.tmp / "a", state_dict=model.state_dict() | extra)
    linear = nn.Linear(*reversed(keys.shape), bias=False)
    linear.weight.data.copy_(keys)
    attention.k_proj = linear
    model.save_pretrained(at.tmp / "b")
    assert same(load(at.tmp / "b"), at.llama)
    assert same(Patcher().apply(model), at.llama)


@advice("Take it off before saving, or take the fusions off with Patcher().apply(model) before it is added")
def a_parameter_added_to_a_fused_layer(at: Place) -> Steps:
    model = load(at.llama, Patcher(fusions="qkv"))
    joined = model.model.layers[0].self_attn.qkv_proj
    joined.bias = nn.Parameter(torch.zeros(joined.weight.shape[0]))
    yield lambda: model.save_pretrained(at.tmp / "a")
    joined.bias = None
    model.save_pretrained(at.tmp / "b")
    assert same(load(at.tmp / "b"), at.llama)


@advice("Take the fusions off with Patcher().apply(model) first, or load the model without them.")
def a_part_of_a_packed_weight(at: Place) -> Steps:
    model = load(at.llama, Patcher(fusions="qkv"), quantization_config=bnb_nf4())
    yield lambda: model.model.layers[0].self_attn.k_proj.weight
    plain = load(at.llama, quantization_config=bnb_nf4())
    assert plain.model.layers[0].self_attn.k_proj.weight.dtype == torch.uint8


@advice("Take the fusions off with Patcher().apply(model) first")
def a_wrapper_for_a_part(at: Place) -> Steps:
    model = load(at.llama, Patcher(fusions="qkv"))
    wrapper = nn.Sequential(nn.Linear(64, 32, bias=False))
    yield lambda: setattr(model.model.layers[0].self_attn, "k_proj", wrapper)
    plain = Patcher().apply(model)
    plain.model.layers[0].self_attn.k_proj = wrapper
    plain(input_ids=torch.tensor([[3, 4]]))


@advice("{}. Use these. ")
def an_index_of_experts(at: Place) -> Steps:
    model = MixtralForCausalLM.from_pretrained(at.moe, patcher=Patcher(fusions="sequential_experts"))
    experts = model.model.layers[0].mlp.experts
    said = yield lambda: experts.gate_up_proj[0]
    named = said.partition("its values are in ")[2].partition(",")[0]
    assert experts.get_parameter(named).shape


@advice("Use {} of these", error=AttributeError)
def an_attribute_of_experts(at: Place) -> Steps:
    model = MixtralForCausalLM.from_pretrained(at.moe, patcher=Patcher(fusions="sequential_experts"))
    experts = model.model.layers[0].mlp.experts
    said = yield lambda: experts.gate_up_proj.shape
    named = said.partition("its values are in ")[2].partition(",")[0]
    assert experts.get_parameter(named).shape


@advice("Leave it out.")
def a_distributed_checkpoint_of_a_fused_model(at: Place) -> Steps:
    model = load(at.llama, Patcher(fusions="qkv"))
    yield lambda: model.save_pretrained(at.tmp / "a", distributed_checkpoint=True)
    model.save_pretrained(at.tmp / "b")
    assert same(load(at.tmp / "b"), at.llama)


# --- construction --------------------------------------------------------------------------------------------------


class OneArgument(LlamaMLP):
    def __init__(self) -> None:
        super().__init__(tiny_llama_config())


class AnyArguments(LlamaMLP):
    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config)


@advice(": take them all, or accept **kwargs")
def a_replacement_with_other_arguments(at: Place) -> Steps:
    yield lambda: load(at.llama, Patcher({"LlamaMLP": OneArgument}))
    assert same(load(at.llama, Patcher({"LlamaMLP": AnyArguments})), at.llama)
