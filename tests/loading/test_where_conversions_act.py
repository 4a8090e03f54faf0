"""A patcher's conversion acts on what the patcher has replaced (row 25)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    LlamaForCausalLM,
    LlamaModel,
    WeightConverter,
)
from transformers.core_model_loading import SplitModulelist, Transpose, WeightRenaming
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import (
    PatchedWeightsError,
    Patcher,
    checkpoint_weights,
    load_checkpoint_weights,
    load_original_state_dict,
    original_optimizer_state_dict,
    original_state_dict,
    plan,
)
from tests.support.checkpoints import assert_saved_alike
from tests.support.comparing import logits
from tests.support.replacements import JoinedAttention, Turned, joining
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_llava_config

LAYERS = 4


class Straight(nn.Module):
    """What GPT-2 has as a `Conv1D`, by a weight that lies as in a linear layer."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nf, nx)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def turning(name: str) -> WeightConverter:
    return WeightConverter(name, name, operations=[Transpose(0, 1)])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_llama_config(num_hidden_layers=LAYERS), tmp_path_factory.mktemp("llama"))


def assert_as_stock(folder: Path, patcher: Patcher, out: Path) -> None:
    patched, stock = (AutoModelForCausalLM.from_pretrained(folder, patcher=each) for each in (patcher, None))
    torch.testing.assert_close(logits(patched), logits(stock))
    assert_saved_alike(patched, stock, out)


@pytest.mark.parametrize("where", ["1", "{0..2}", "*"])
def test_a_square_weight_is_turned_where_its_layer_is_replaced(where: str, llama: Path, tmp_path: Path) -> None:
    """One of four layers replaced, and all four were transposed: off by 0.77, and the plan was content."""
    patcher = Patcher(
        module_mapping={f"model.layers.{where}.self_attn.o_proj": Turned},
        extra_weight_conversions=turning("o_proj.weight"),
    )
    assert_as_stock(llama, patcher, tmp_path)
    planned = plan(llama, patcher)
    assert planned.ok
    ((text, keys),) = planned.conversions_added
    assert text == "o_proj.weight -> o_proj.weight [Transpose]"
    shown = where if where != "*" else "{0..3}"
    assert keys == (f"model.layers.{shown}.self_attn.o_proj.weight",)


def test_a_namesake_elsewhere_is_left_alone(tmp_path: Path) -> None:
    """GPT-2's `attn.c_proj` is replaced, and its `mlp.c_proj` was transposed as well."""
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_inner=64, vocab_size=128, n_positions=64)
    folder = save_tiny(config, tmp_path / "checkpoint")
    patcher = Patcher(
        module_mapping={"transformer.h.*.attn.c_proj": Straight}, extra_weight_conversions=turning("c_proj.weight")
    )
    assert_as_stock(folder, patcher, tmp_path / "out")


def test_projections_of_another_part_of_the_model_are_left_alone(tmp_path: Path) -> None:
    """A vision tower has layers of the same names: queries and keys were taken from it."""

    class OneProjection(JoinedAttention):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            self.v_proj = self.qkv_proj
            del self.qkv_proj

    folder = save_tiny(tiny_llava_config(), tmp_path / "llava")
    conversion = joining(*(rf"self_attn\.{name}_proj\.weight" for name in "qkv"), target="self_attn.v_proj.weight")
    patcher = Patcher({"LlamaAttention": OneProjection}, extra_weight_conversions=conversion)
    model, stock = (AutoModelForImageTextToText.from_pretrained(folder, patcher=each) for each in (patcher, None))
    tower = stock.model.vision_tower.state_dict()
    assert all(torch.equal(value, tower[key]) for key, value in model.model.vision_tower.state_dict().items())
    for mine, its in zip(model.model.language_model.layers, stock.model.language_model.layers, strict=True):
        parts = [its.self_attn.get_submodule(f"{name}_proj").weight for name in "qkv"]
        assert torch.equal(mine.self_attn.v_proj.weight, torch.cat(parts))
    assert_saved_alike(model, stock, tmp_path / "out")


def test_other_names_and_turns_of_one_tensor_act_together(llama: Path, tmp_path: Path) -> None:
    class Renamed(Turned):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.w = self.weight
            del self.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    conversions = [WeightRenaming("o_proj.weight", "o_proj.w"), turning("o_proj.w")]
    patcher = Patcher(
        module_mapping={"model.layers.2.self_attn.o_proj": Renamed}, extra_weight_conversions=conversions
    )
    assert_as_stock(llama, patcher, tmp_path)


def test_where_the_checkpoint_fits_neither_way_both_are_named(llama: Path, tmp_path: Path) -> None:
    turned = {
        key: value.T.contiguous() if "down_proj" in key else value
        for key, value in load_file(llama / "model.safetensors").items()
    }
    folder = save_tiny(tiny_llama_config(num_hidden_layers=LAYERS), tmp_path / "turned")
    save_file(turned, folder / "model.safetensors", {"format": "pt"})
    some = {"model.layers.{0,3}.mlp": type("OwnMLP", (_mlp(),), {})}
    patcher = Patcher(module_mapping=some, extra_weight_conversions=turning("down_proj.weight"))
    said = (
        r"(?s)makes parameters of modules that the patcher replaces:.*  model\.layers\.\{0,3\}\.mlp\.down_proj\.weight"
        r".*and of others.*  model\.layers\.1\.mlp\.down_proj\.weight: found \(96, 64\), expected \(64, 96\)"
    )
    with pytest.raises(PatchedWeightsError, match=said) as raised:
        AutoModelForCausalLM.from_pretrained(folder, patcher=patcher)
    assert plan(folder, patcher).problems[0] == str(raised.value)
    everywhere = Patcher({"LlamaMLP": some["model.layers.{0,3}.mlp"]}, (), turning("down_proj.weight"))
    stock = AutoModelForCausalLM.from_pretrained(llama)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder, patcher=everywhere)), logits(stock))


def test_a_transposed_weight_is_recognised(llama: Path) -> None:
    class TurnedDown(_mlp()):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.down_proj = Turned(config.intermediate_size, config.hidden_size)

    line = "[WeightConverter('down_proj.weight', 'down_proj.weight', operations=[Transpose(0, 1)])]"
    with pytest.raises(PatchedWeightsError, match=rf"(?s)has some transposed.*{re.escape(line)}"):
        AutoModelForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": TurnedDown}))
    patcher = Patcher({"LlamaMLP": TurnedDown}, (), turning("down_proj.weight"))
    stock = AutoModelForCausalLM.from_pretrained(llama)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(llama, patcher=patcher)), logits(stock))


def _mlp() -> Any:
    from transformers.models.llama.modeling_llama import LlamaMLP

    return LlamaMLP


class Row(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.empty(size))


class Rows(LlamaMLP):
    """An MLP whose last weight has a parameter for each row."""

    conversion_mapping = (WeightConverter(["down_proj.weight"], ["rows.*.row"], [SplitModulelist(dim=0)]),)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.down_proj
        self.rows = nn.ModuleList(Row(config.intermediate_size) for _ in range(config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return nn.functional.linear(x, torch.stack([each.row for each in self.rows]))


@pytest.mark.parametrize("target", [LlamaForCausalLM, LlamaModel])
@pytest.mark.parametrize("source", [LlamaForCausalLM, LlamaModel])
def test_several_parameters_of_a_base_model_and_of_one_with_a_head(source: Any, target: Any, tmp_path: Path) -> None:
    folder = save_tiny(tiny_llama_config(tie_word_embeddings=True), tmp_path / "stock", model_class=source)
    stock = target.from_pretrained(folder)
    patched = target.from_pretrained(folder, patcher=Patcher({"LlamaMLP": Rows}))
    assert torch.allclose(logits(patched), logits(stock), atol=1e-5)
    assert_saved_alike(patched, stock, tmp_path / "saved")


# --- conversions that exchange names -----------------------------------------------------------------------------


class Exchanged(LlamaMLP):
    """Names the gate and the up projection the other way round."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def test_names_may_be_exchanged(llama: Path, tmp_path: Path) -> None:
    patcher = Patcher(
        {"LlamaMLP": Exchanged},
        extra_weight_conversions=[
            WeightRenaming("mlp.gate_proj", "mlp.other"),
            WeightRenaming("mlp.up_proj", "mlp.gate_proj"),
            WeightRenaming("mlp.other", "mlp.up_proj"),
        ],
    )
    assert_as_stock(llama, patcher, tmp_path)
    load = AutoModelForCausalLM.from_pretrained
    model, stock = load(llama, patcher=patcher), load(llama)
    expected, original = logits(stock), {name: value.clone() for name, value in stock.state_dict().items()}
    assert_equal(original_state_dict(model), original)
    assert_equal(dict(checkpoint_weights(model)), original)
    ours, theirs = (steps(each) for each in (model, stock))
    torch.testing.assert_close(ours["state"], theirs["state"])

    for write in (load_original_state_dict, load_checkpoint_weights):
        other = load(llama, patcher=patcher)
        torch.nn.init.zeros_(other.model.layers[0].mlp.gate_proj.weight)
        write(other, {name: value.clone() for name, value in original.items()})
        torch.testing.assert_close(logits(other), expected)
        other.load_state_dict(other.state_dict())
        torch.testing.assert_close(logits(other), expected)
        with pytest.raises(RuntimeError, match=r"has the same name and shape before and after .* doesn't say which"):
            other.load_state_dict(original)
        torch.testing.assert_close(logits(other), expected)  # it isn't written to


def test_ambiguous_names_of_fused_layers_are_not_written_either(tmp_path: Path) -> None:
    """Projections that conversions exchange, and that are joined afterwards."""
    renamings = [
        WeightRenaming("self_attn.q_proj", "self_attn.other"),
        WeightRenaming("self_attn.k_proj", "self_attn.q_proj"),
        WeightRenaming("self_attn.other", "self_attn.k_proj"),
    ]
    save_tiny(tiny_llama_config(num_key_value_heads=4), tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    patcher = Patcher(fusions="qkv", extra_weight_conversions=renamings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, patcher=patcher)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"has the same name and shape before and after .* doesn't say which"):
        model.load_state_dict(stock.state_dict())
    assert_equal(dict(model.state_dict()), before)


def steps(model: Any) -> dict[str, Any]:
    """The optimizer state after a step, in the layout of transformers."""
    ids = torch.tensor([[3, 4, 5, 6]])
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return original_optimizer_state_dict(model, optimizer)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_two_renamings_do_not_exchange_names(llama: Path) -> None:
    renamings = [WeightRenaming("mlp.gate_proj", "mlp.up_proj"), WeightRenaming("mlp.up_proj", "mlp.gate_proj")]
    patcher = Patcher({"LlamaMLP": Exchanged}, extra_weight_conversions=renamings)
    said = r"gate_proj\.weight twice: .* \(renamings run one after another: they exchange names through a third\)"
    with pytest.raises(PatchedWeightsError, match=said):
        AutoModelForCausalLM.from_pretrained(llama, patcher=patcher)
