"""`kv`: keys and values of cross attention as one projection: outputs, gradients, caches, files."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, LlamaForCausalLM

from patcher import PatchConflictError, Patcher, UnmatchedPatchError, plan, report
from patcher.fusions import KV, QKV
from patcher.layouts.carried import fused_modules
from tests.support import shared
from tests.support.checkpoints import same_checkpoint
from tests.support.cross_attention import CASES, save
from tests.support.tiny import ENCODER_DECODER_SIZES, randomize, tiny_llama_config

ALONE = Patcher(fusions="kv")
ORDERS = [("qkv", "kv"), ("kv", "qkv"), ("kv",)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(name, tmp_path_factory.mktemp("kv") / "checkpoint") for name in CASES}


def projections(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("kv_proj") and "qkv" not in name]


def calls(modules: list[nn.Module]) -> list[int]:
    """How often each is called from now on."""
    counted = [0] * len(modules)
    for number, module in enumerate(modules):

        def count(*_: Any, number: int = number) -> None:
            counted[number] += 1

        module.register_forward_hook(count)
    return counted


@pytest.mark.crossed
@pytest.mark.parametrize("fusions", ORDERS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_and_files_are_those_of_stock(
    name: str, fusions: tuple[str, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    case = CASES[name]
    stock = shared.stock(folders[name], case.cls)
    model = case.cls.from_pretrained(folders[name], patcher=Patcher(fusions=fusions))

    families = {path: carried.fusion for path, _, carried in fused_modules(model)}
    assert families.keys() == {path for path, *_ in report(model).fused}
    assert {path for path, family in families.items() if family == "kv"} == {case.cross.format(n) for n in (0, 1)}
    if "qkv" in fusions:
        assert {case.own.format(n) for n in (0, 1)} <= {path for path, family in families.items() if family == "qkv"}
    else:
        refused = dict(report(model).refused)
        assert refused[case.own.format(0)] == "queries, keys and values have one input, for which there is 'qkv'"
    expected, found = (one(**case.inputs).logits for one in (stock, model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for logits in (expected, found):
        logits.square().mean().backward()
    gradients = {key: value.grad for key, value in model.named_parameters()}
    theirs = {key: value.grad for key, value in stock.named_parameters()}
    for path, module in ((p, m) for p, m in model.named_modules() if p in families):
        joined = module._joined
        prefix = f"{path}.{joined.name}"
        rows = torch.cat([theirs.pop(f"{path}.{part}.weight") for part in joined.projections])
        torch.testing.assert_close(gradients.pop(f"{prefix}.weight"), rows, atol=1e-5, rtol=0)
    for key in gradients.keys() & theirs.keys():
        if gradients[key] is not None:
            torch.testing.assert_close(gradients[key], theirs[key], atol=1e-5, rtol=0)
    for folder, one in (("stock", stock), ("fused", model)):
        one.save_pretrained(tmp_path / folder, max_shard_size="60KB")
    assert same_checkpoint(tmp_path / "stock", tmp_path / "fused")


@pytest.mark.crossed
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.generated])
def test_generation_projects_the_encoder_output_as_often_as_stock(
    name: str, options: dict[str, Any], folders: dict[str, Path]
) -> None:
    case = CASES[name]
    stock = shared.stock(folders[name], case.cls)
    model = case.cls.from_pretrained(folders[name], patcher=Patcher(fusions=["qkv", "kv"]))
    theirs = calls([part for n in (0, 1) for part in (_keys(stock.get_submodule(case.cross.format(n))),)])
    ours = calls(projections(model))
    given = {case.generated: case.inputs[case.generated]} | options | {"max_new_tokens": 6, "min_new_tokens": 6}

    assert torch.equal(model.generate(**given), stock.generate(**given))
    assert ours == theirs
    assert max(ours) == (1 if options.get("use_cache", True) else 6)


def _keys(attention: nn.Module) -> nn.Module:
    return next(getattr(attention, name) for name in ("k_proj", "k", "key") if hasattr(attention, name))


def test_the_source_has_one_call_in_the_branch_of_the_two(folders: dict[str, Path]) -> None:
    model = BartForConditionalGeneration.from_pretrained(folders["Bart"], patcher=ALONE)
    source = inspect.getsource(type(model.model.decoder.layers[0].encoder_attn).forward)

    branch = source.partition("            # reuse k,v, cross_attentions\n")[2].partition("        else:\n")[2]
    assert branch.startswith(
        "            k_proj_output, v_proj_output = self.kv_proj(current_states).split(self.kv_proj_sizes, dim=-1)\n"
    )
    assert "self.q_proj(hidden_states)" in source


def test_a_model_without_cross_attention_says_why() -> None:
    message = r"'kv' found no module that it can fuse; it refused .*\(queries, keys and values have one input, for"
    with pytest.raises(UnmatchedPatchError, match=message):
        LlamaForCausalLM._from_config(tiny_llama_config(), patcher=ALONE)
    with pytest.raises(PatchConflictError, match="both claim"):
        BartForConditionalGeneration._from_config(CASES["Bart"].config(), patcher=Patcher(fusions=["kv", KV("**")]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # as some releases define the model
def test_keys_that_another_method_calls_alone_are_left_alone() -> None:
    """SEW-D, as DeBERTa, projects relative positions with the layers of queries and keys."""
    from transformers import SEWDConfig, SEWDModel

    config = SEWDConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    resolution = ALONE.resolve(SEWDModel, config)

    assert not resolution.fused
    (reason,) = resolution.refused.values()
    assert "disentangled_attention_bias calls key_proj alone" in reason


def test_it_is_asked_for_at_some_paths_only_and_travels(folders: dict[str, Path], tmp_path: Path) -> None:
    family = KV("model.decoder.layers.1.*")
    stock = shared.stock(folders["Bart"], BartForConditionalGeneration)
    model = BartForConditionalGeneration.from_pretrained(folders["Bart"], patcher=Patcher(fusions=[family, "qkv"]))
    inputs = CASES["Bart"].inputs

    assert [name for name, _ in model.named_modules() if name.endswith("kv_proj") and "encoder_attn" in name] == [
        "model.decoder.layers.1.encoder_attn.kv_proj"
    ]
    for number, copied in enumerate((model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        torch.testing.assert_close(copied(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)
        copied.save_pretrained(tmp_path / str(number))
        assert (
            load_file(tmp_path / str(number) / "model.safetensors").keys()
            == load_file(folders["Bart"] / "model.safetensors").keys()
        )


def test_its_layout_on_disk_is_read_by_its_name(folders: dict[str, Path], tmp_path: Path) -> None:
    model = BartForConditionalGeneration.from_pretrained(folders["Bart"], patcher=Patcher(fusions=["qkv", "kv"]))
    model.save_pretrained(tmp_path, save_original_format=False)
    again = BartForConditionalGeneration.from_pretrained(tmp_path)

    said = json.loads((tmp_path / "config.json").read_text())["fusion_config"]
    assert said == {"patcher": ["qkv", "kv"]}
    mine, theirs = model.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert Patcher.from_fusion_config({"kv": True}) == ALONE
    assert Patcher.from_dict(ALONE.to_dict()) == ALONE
    assert plan(folders["Bart"], ALONE).ok


@pytest.mark.parametrize("seed", range(4))
def test_any_sizes_and_any_subset_of_layers(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    heads, width, layers = choose.choice([1, 2, 4]), choose.choice([4, 8]), choose.choice([1, 3])
    sizes = {"d_model": heads * width, "decoder_layers": layers, "encoder_layers": 1, "decoder_attention_heads": heads}
    config = BartConfig(**ENCODER_DECODER_SIZES | sizes | {"encoder_attention_heads": heads})
    torch.manual_seed(seed)
    model = BartForConditionalGeneration(config).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    chosen = sorted(choose.sample(range(layers), choose.randint(1, layers)))
    family = KV([f"model.decoder.layers.{number}.encoder_attn" for number in chosen])
    fused = BartForConditionalGeneration.from_pretrained(tmp_path, patcher=Patcher(fusions=[family, QKV()]))

    assert len(projections(fused)) == len(chosen)
    ids = torch.randint(3, 100, (choose.randint(1, 3), choose.randint(1, 9)))
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, : choose.randint(1, 4)]}
    torch.testing.assert_close(fused(**inputs).logits, model(**inputs).logits, atol=1e-5, rtol=0)
