"""`kv`: keys and values of cross attention as one projection; caches, saves, adapters and generated files with it."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import patcher
from patcher import InvalidPatcherError, PatchConflictError, Patcher, UnmatchedPatchError, plan, report
from patcher.conversions.fused_weights import fused_modules
from patcher.fusions import KV, QKV
from tests.support.checkpoints import same_checkpoint
from tests.support.tiny import ENCODER_DECODER_SIZES, randomize, tiny_bert_config, tiny_llama_config

ALONE = Patcher(fusions="kv")
ORDERS = [("qkv", "kv"), ("kv", "qkv"), ("kv",)]
T5_SIZES: dict[str, Any] = {"vocab_size": 128, "d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_heads": 4}
CROSSED: dict[str, Any] = {"is_decoder": True, "add_cross_attention": True}


def text(*length: int) -> torch.Tensor:
    return torch.randint(3, 100, (2, *length), generator=torch.Generator().manual_seed(0))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Case:
    """A model with cross attention.

    Attributes:
        inputs: what its forward takes.
        cross: the cross attention of a layer, by its number; `own`: its self attention.
        generated: what it generates from.
    """

    cls: Any
    config: Callable[[], Any]
    inputs: dict[str, torch.Tensor]
    cross: str
    own: str
    generated: str = ""


CASES = {
    "Bart": Case(
        BartForConditionalGeneration,
        lambda: BartConfig(**ENCODER_DECODER_SIZES, max_position_embeddings=64),
        {"input_ids": text(9), "decoder_input_ids": text(5)},
        "model.decoder.layers.{}.encoder_attn",
        "model.decoder.layers.{}.self_attn",
        "input_ids",
    ),
    "T5": Case(
        T5ForConditionalGeneration,
        lambda: T5Config(**T5_SIZES, decoder_start_token_id=0),
        {"input_ids": text(9), "decoder_input_ids": text(5)},
        "decoder.block.{}.layer.1.EncDecAttention",
        "decoder.block.{}.layer.0.SelfAttention",
        "input_ids",
    ),
    "Whisper, keys without a bias": Case(
        WhisperForConditionalGeneration,
        lambda: WhisperConfig(**ENCODER_DECODER_SIZES, num_mel_bins=16, max_source_positions=20),
        {"input_features": numbers(16, 40), "decoder_input_ids": text(5)},
        "model.decoder.layers.{}.encoder_attn",
        "model.decoder.layers.{}.self_attn",
        "input_features",
    ),
    "BERT as a decoder": Case(
        BertLMHeadModel,
        lambda: BertConfig(**tiny_bert_config().to_diff_dict() | CROSSED),
        {"input_ids": text(5), "encoder_hidden_states": numbers(7, 64)},
        "bert.encoder.layer.{}.crossattention.self",
        "bert.encoder.layer.{}.attention.self",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        model = case.cls(case.config()).eval()
        randomize(model)
        found[name] = tmp_path_factory.mktemp("kv") / "checkpoint"
        model.save_pretrained(found[name])
    return found


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


@pytest.mark.parametrize("fusions", ORDERS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_and_files_are_those_of_stock(
    name: str, fusions: tuple[str, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    case = CASES[name]
    stock = case.cls.from_pretrained(folders[name])
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


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.generated])
def test_generation_projects_the_encoder_output_as_often_as_stock(
    name: str, options: dict[str, Any], folders: dict[str, Path]
) -> None:
    case = CASES[name]
    stock = case.cls.from_pretrained(folders[name])
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


def test_it_is_asked_for_at_some_paths_only_and_travels(folders: dict[str, Path], tmp_path: Path) -> None:
    family = KV("model.decoder.layers.1.*")
    stock = BartForConditionalGeneration.from_pretrained(folders["Bart"])
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


def test_either_layout_is_loaded_and_a_part_takes_values(folders: dict[str, Path]) -> None:
    stock = BartForConditionalGeneration.from_pretrained(folders["Bart"])
    model = BartForConditionalGeneration._from_config(CASES["Bart"].config(), patcher=Patcher(fusions=["qkv", "kv"]))
    model.eval().load_state_dict(stock.state_dict())
    inputs = CASES["Bart"].inputs
    torch.testing.assert_close(model(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)

    new = nn.Linear(64, 64)
    stock.model.decoder.layers[1].encoder_attn.v_proj = new
    model.model.decoder.layers[1].encoder_attn.v_proj = copy.deepcopy(new)
    torch.testing.assert_close(model(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)
    original = patcher.original_state_dict(model)
    assert all(torch.equal(original[key], value) for key, value in stock.state_dict().items())
    parts = patcher.fused_parameters(model)["model.decoder.layers.1.encoder_attn.kv_proj.weight"]
    assert [(part.name.rpartition("encoder_attn.")[2], part.start, part.length) for part in parts] == [
        ("k_proj.weight", 0, 64),
        ("v_proj.weight", 64, 64),
    ]


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


@pytest.mark.parametrize("settings", [{}, {"target_modules": ["v_proj", "q_proj"], "use_rslora": True}], ids=str)
def test_an_adapter_of_the_stock_layers_computes_the_same(
    settings: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    asked = {"target_modules": ["k_proj", "v_proj"], "r": 4, "rank_pattern": {"v_proj": 2}} | settings
    stock = peft.get_peft_model(
        BartForConditionalGeneration.from_pretrained(folders["Bart"]), peft.LoraConfig(**asked)
    ).eval()
    with torch.no_grad():
        for name, value in stock.named_parameters():
            if "lora_" in name:
                value.normal_(generator=torch.Generator().manual_seed(len(name)))
    stock.save_pretrained(tmp_path / "adapter")
    inputs = CASES["Bart"].inputs
    model = BartForConditionalGeneration.from_pretrained(folders["Bart"], patcher=Patcher(fusions=["qkv", "kv"]))
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()

    assert any("encoder_attn.kv_proj.lora_A" in name for name, _ in adapted.named_parameters())
    torch.testing.assert_close(adapted(**inputs).logits, stock(**inputs).logits, atol=1e-4, rtol=0)
    adapted.save_pretrained(tmp_path / "again")
    mine, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("again", "adapter"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_an_adapter_of_the_joined_layer_is_one_of_the_stock_layers(folders: dict[str, Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = BartForConditionalGeneration.from_pretrained(folders["Bart"], patcher=ALONE)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["kv_proj"], r=4)).eval()
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_" in name:
                value.normal_(generator=torch.Generator().manual_seed(len(name)))
    inputs = CASES["Bart"].inputs
    expected = adapted(**inputs).logits
    adapted.save_pretrained(tmp_path)
    stock = BartForConditionalGeneration.from_pretrained(folders["Bart"])

    torch.testing.assert_close(
        peft.PeftModel.from_pretrained(stock, tmp_path).eval()(**inputs).logits, expected, atol=1e-4, rtol=0
    )
    # Whoever wrote the tensors one by one has the names of the model in memory.
    tensors = {key.replace(".default", ""): value for key, value in adapted.state_dict().items() if "lora_" in key}
    other = peft.get_peft_model(
        BartForConditionalGeneration.from_pretrained(folders["Bart"]), peft.LoraConfig(target_modules=["k_proj"], r=4)
    )
    with pytest.raises(
        InvalidPatcherError, match=r"The adapter is for .*encoder_attn\.kv_proj, which .* doesn't have"
    ):
        peft.set_peft_model_state_dict(other, tensors)


def test_it_trains_as_stock_and_its_optimizer_has_the_state_of_stock(folders: dict[str, Path]) -> None:
    found = []
    for asked in (Patcher(), Patcher(fusions=["qkv", "kv"])):
        model = BartForConditionalGeneration.from_pretrained(folders["Bart"], patcher=asked)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for number in range(3):
            torch.manual_seed(number)
            model(input_ids=text(9), labels=torch.randint(3, 100, (2, 4))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state = patcher.original_optimizer_state_dict(model, optimizer)["state"]
        found.append(
            (patcher.original_state_dict(model), {key: value["momentum_buffer"] for key, value in state.items()})
        )

    (weights, moments), (ours, our_moments) = found
    assert weights.keys() == ours.keys()
    assert moments.keys() == our_moments.keys()
    assert "model.decoder.layers.0.encoder_attn.v_proj.weight" in moments
    for theirs, mine in ((weights, ours), (moments, our_moments)):
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key], value, atol=1e-5, rtol=1e-4)
