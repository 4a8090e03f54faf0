"""What fused parameters are read from: the parts, however the checkpoint has them, or an error that names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Chunk, LlamaConfig, LlamaForCausalLM, WeightConverter

from patcher import PatchedWeightsError, Patcher, plan
from tests.support import shared
from tests.support.tiny import build_tiny, save_tiny, tiny_llama_config, tiny_mixtral_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


def write(tensors: dict[str, torch.Tensor], folder: Path, config: LlamaConfig | None = None) -> None:
    """A checkpoint of a tiny Llama, with these tensors."""
    config = tiny_llama_config() if config is None else config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, *fusions: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, patcher=Patcher(fusions=fusions))


def test_parts_of_wrong_shapes_whose_sum_is_right_are_an_error(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.{}_proj.weight"
    both = torch.cat([tensors[key.format("gate")], tensors[key.format("up")]])
    rows = tensors[key.format("gate")].shape[0] - 8
    tensors[key.format("gate")], tensors[key.format("up")] = both[:rows].clone(), both[rows:].clone()
    write(tensors, tmp_path)
    message = (
        r"Tensors that are joined don't have the shapes that the model has for them:\n"
        rf"  model\.layers\.1\.mlp\.gate_proj\.weight: found \({rows}, 64\), expected \({rows + 8}, 64\)\n"
        rf"  model\.layers\.1\.mlp\.up_proj\.weight: found \({rows + 16}, 64\), expected \({rows + 8}, 64\)"
    )

    with pytest.raises(PatchedWeightsError, match=message) as raised:
        load(tmp_path, "gate_up")

    planned = plan(tmp_path, Patcher(fusions="gate_up"))
    assert not planned.ok
    assert planned.problems[0] == str(raised.value)


def test_a_checkpoint_with_both_layouts_of_one_tensor_is_an_error(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.{}_proj.weight"
    tensors[key.format("gate_up")] = torch.cat([tensors[key.format("gate")], tensors[key.format("up")]])
    write(tensors, tmp_path)

    message = r"holds model\.layers\.1\.mlp\.gate_up_proj\.weight twice: as it is, and as model\.layers\.1\.mlp\.gate"
    with pytest.raises(PatchedWeightsError, match=message):
        load(tmp_path, "gate_up")


def test_a_checkpoint_with_one_part_under_two_names_is_an_error(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.1.mlp.gate_proj.weight"] = tensors["model.layers.1.mlp.gate_proj.weight"] + 1
    write(tensors, tmp_path)

    message = r"holds model\.layers\.1\.mlp\.gate_proj\.weight twice: as it is, and as layers\.1\.mlp\.gate_proj\."
    with pytest.raises(PatchedWeightsError, match=message):
        load(tmp_path, "gate_up")


@pytest.mark.parametrize("fusions", [(), ("qkv",)])
def test_a_conversion_may_make_parts_and_others_at_once(fusions: tuple[str, ...], tmp_path: Path) -> None:
    config = tiny_llama_config(num_key_value_heads=4)
    tensors = dict(build_tiny(config).state_dict())
    names = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    for layer in range(config.num_hidden_layers):
        parts = [tensors.pop(f"model.layers.{layer}.{name}") for name in names]
        tensors[f"model.layers.{layer}.self_attn.all.weight"] = torch.cat(parts)
    write(tensors, tmp_path, config)
    cut = WeightConverter(["self_attn.all.weight"], names, operations=[Chunk(dim=0)])

    patcher = Patcher(fusions=fusions, extra_weight_conversions=cut)
    model = LlamaForCausalLM.from_pretrained(tmp_path, patcher=patcher)
    assert plan(tmp_path, patcher, model_class=LlamaForCausalLM).ok
    layer = model.model.layers[1].self_attn
    joined = layer.qkv_proj.weight if fusions else torch.cat([layer.get_submodule(f"{n}_proj").weight for n in "qkv"])
    assert torch.equal(torch.cat([joined, layer.o_proj.weight]), tensors["model.layers.1.self_attn.all.weight"])

    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)


def test_a_whole_expert_that_is_missing_is_named_by_its_keys(tmp_path: Path) -> None:
    save_tiny(tiny_mixtral_config(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [f"model.layers.1.block_sparse_moe.experts.2.w{number}.weight" for number in (1, 2, 3)]
    save_file({key: tensors[key] for key in tensors.keys() - set(names)}, tmp_path / "model.safetensors")

    with pytest.raises(PatchedWeightsError) as raised:
        load(tmp_path, "sequential_experts")
    lines = str(raised.value).splitlines()
    assert lines[0].endswith("of which the checkpoint lacks:")
    assert {line.strip() for line in lines[1:4]} == set(names)
    assert "shapes" not in str(raised.value)


def test_parts_that_stock_misses_as_well_are_no_affair_of_a_fusion(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    left = {key: value for key, value in tensors.items() if not key.startswith("model.layers.1.self_attn.")}
    write(left, tmp_path)

    model, stock = load(tmp_path, "qkv"), AutoModelForCausalLM.from_pretrained(tmp_path)
    found = plan(tmp_path, Patcher(fusions="qkv"))
    assert found.ok
    assert found.missing == ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.qkv_proj.weight")
    one, other = (each.model.layers[0].self_attn for each in (model, stock))
    assert torch.equal(one.qkv_proj.weight, torch.cat([other.get_submodule(f"{name}_proj").weight for name in "qkv"]))


def test_what_a_runtime_layout_lacks_it_lacks_under_its_own_name(folder: Path) -> None:
    state = dict(load(folder, "qkv").state_dict())
    config, patcher = tiny_llama_config(), Patcher(fusions="qkv")
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, patcher=patcher)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())

    del state["model.layers.1.self_attn.qkv_proj.weight"]
    with pytest.raises(
        PatchedWeightsError, match=r"Not in the checkpoint, .*\n  model\.layers\.1\.self_attn\.qkv_proj"
    ):
        LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, patcher=patcher)


def test_a_renaming_that_only_the_keys_of_sources_match_is_not_reversed_by_a_save(
    folder: Path, tmp_path: Path
) -> None:
    """Fused parameters are read under keys of their own; `timm_wrapper` has a renaming that takes any name."""
    renaming = {r"^(?!model\.|lm_head)(.+)": r"model.\1"}
    for name, patcher in {"stock": None, "fused": Patcher(fusions=["qkv", "gate_up"])}.items():
        options: Any = {} if patcher is None else {"patcher": patcher}
        model = AutoModelForCausalLM.from_pretrained(folder, key_mapping=renaming, **options)
        model.save_pretrained(tmp_path / name)
    assert load_file(tmp_path / "fused/model.safetensors").keys() == load_file(folder / "model.safetensors").keys()

    # Where a key of the checkpoint is renamed, it is reversed as stock does.
    tensors = load_file(folder / "model.safetensors")
    write({key.removeprefix("model."): value for key, value in tensors.items()}, tmp_path / "bare")
    for name, patcher in {"stock": None, "fused": Patcher(fusions=["qkv", "gate_up"])}.items():
        options = {} if patcher is None else {"patcher": patcher}
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "bare", key_mapping=renaming, **options)
        model.save_pretrained(tmp_path / f"{name}-bare")
    stock, fused = (load_file(tmp_path / f"{name}-bare/model.safetensors") for name in ("stock", "fused"))
    assert stock.keys() == fused.keys()
    assert "layers.0.self_attn.q_proj.weight" in stock
