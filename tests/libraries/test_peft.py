"""A patched model with PEFT adapters: trained, saved, loaded onto another patched model, merged, saved again."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, WeightConverter
from transformers.core_model_loading import Concatenate

from patcher import Patcher, report
from patcher.codegen import PatchConfig, write
from tests.support import fresh, shared
from tests.support.beside import FUSED_QKV, LINEAR_EXPERTS, count
from tests.support.comparing import logits
from tests.support.replacements import OwnMLP
from tests.support.tiny import tiny_inputs, tiny_llama_config, tiny_qwen2_moe_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {"llama": tiny_llama_config(), "moe": tiny_qwen2_moe_config()}
    return {name: shared.checkpoint(config) for name, config in configs.items()}


CASES = pytest.mark.parametrize(
    ("name", "patched", "targets", "adapted"),
    [
        ("llama", FUSED_QKV, ["qkv_proj"], 2),
        ("llama", Patcher({"LlamaMLP": OwnMLP}), ["gate_proj", "q_proj"], 4),
        ("moe", LINEAR_EXPERTS, ["gate_proj", "down_proj"], 2 * (4 + 1) * 2),
        ("moe", LINEAR_EXPERTS, ["q_proj"], 2),
    ],
    ids=["joined projections", "MLP", "experts that stock has not", "beside the replaced experts"],
)


def trained(folder: Path, patched: Patcher, targets: list[str]) -> Any:
    """An adapter on a patched model, after one step of training."""
    model = AutoModelForCausalLM.from_pretrained(folder, patcher=patched)
    adapter = LoraConfig(target_modules=targets, r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, adapter)
    before = {name: value.detach().clone() for name, value in adapted.named_parameters()}
    inputs = tiny_inputs(model.config)
    optimizer = torch.optim.SGD([value for value in adapted.parameters() if value.requires_grad], lr=0.1)
    adapted(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimizer.step()
    changed = {name for name, value in adapted.named_parameters() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert report(adapted) == report(adapted.get_base_model())  # that of the model in the wrapper
    return adapted


def onto_a_new_model(adapter: Path, base: Path, patched: Patcher) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, patcher=patched), adapter)


def load_adapter(adapter: Path, base: Path, patched: Patcher) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, patcher=patched)
    model.load_adapter(str(adapter))
    return model


def from_the_adapter_folder(adapter: Path, base: Path, patched: Patcher) -> Any:
    return AutoModelForCausalLM.from_pretrained(adapter, patcher=patched)


@CASES
@pytest.mark.parametrize("load", [onto_a_new_model, load_adapter, from_the_adapter_folder])
def test_an_adapter_of_a_patched_model_is_loaded_again(
    load: Callable[[Path, Path, Patcher], Any],
    name: str,
    patched: Patcher,
    targets: list[str],
    adapted: int,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    model = trained(folders[name], patched, targets)
    assert sum(hasattr(module, "lora_A") for module in model.modules()) == adapted
    model.save_pretrained(tmp_path)
    again = load(tmp_path, folders[name], patched)
    assert sum(hasattr(module, "lora_A") for module in again.modules()) == adapted
    torch.testing.assert_close(logits(again), logits(model), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(again), logits(AutoModelForCausalLM.from_pretrained(folders[name])), atol=1e-3)


@CASES
def test_a_merged_adapter_is_saved_in_the_original_format(
    name: str, patched: Patcher, targets: list[str], adapted: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    adapted_model = trained(folders[name], patched, targets)
    expected = logits(adapted_model)
    adapted_model.merge_and_unload().save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert count(stock, "FusedAttention", "LinearExperts", "OwnMLP") == 0
    torch.testing.assert_close(logits(stock), expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_of_the_stock_model_fits_what_the_patcher_leaves_alone(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = trained(folders["moe"], Patcher(), ["q_proj", "o_proj"])
    model.save_pretrained(tmp_path)
    again = onto_a_new_model(tmp_path, folders["moe"], LINEAR_EXPERTS)
    torch.testing.assert_close(logits(again), logits(model), atol=1e-5, rtol=1e-5)


JOIN_GATE_UP = WeightConverter(["mlp.gate_proj", "mlp.up_proj"], "mlp.gate_up_proj", operations=[Concatenate(0)])


class GateUpMLP(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("load", [onto_a_new_model, load_adapter, from_the_adapter_folder])
def test_a_conversion_that_peft_rewrites_for_adapters_does_not_disturb_one(
    load: Callable[[Path, Path, Patcher], Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    # peft makes conversions of its own, of the same class, from those whose target ends with `gate_up_proj`.
    patched = Patcher({"LlamaMLP": GateUpMLP}, extra_weight_conversions=JOIN_GATE_UP)
    model = trained(folders["llama"], patched, ["gate_up_proj", "q_proj"])
    model.save_pretrained(tmp_path)
    again = load(tmp_path, folders["llama"], patched)
    torch.testing.assert_close(logits(again), logits(model), atol=1e-5, rtol=1e-5)


def test_the_order_of_imports_does_not_matter(folders: dict[str, Path], tmp_path: Path) -> None:
    trained(folders["moe"], LINEAR_EXPERTS, ["gate_proj"]).save_pretrained(tmp_path)
    program = (
        "import sys\n"
        "import peft, peft.utils.transformers_weight_conversion\n"
        "from tests.libraries.test_peft import LINEAR_EXPERTS, onto_a_new_model\n"
        "from pathlib import Path\n"
        "onto_a_new_model(Path(sys.argv[1]), Path(sys.argv[2]), LINEAR_EXPERTS)\n"
        "print('loaded')\n"
    )
    assert "loaded" in fresh.run(program, tmp_path, folders["moe"]).stdout


def test_adapters_on_a_model_of_a_generated_file(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter of the layers of the file is PEFT's own; one of the layers of the original raises."""
    config = PatchConfig.from_patcher(FUSED_QKV, LlamaForCausalLM)
    config.target_file = "modeling_with_adapters.py"
    write(config, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = importlib.import_module("modeling_with_adapters")

    def adapted(cls: Any, *targets: str) -> tuple[Any, Path]:
        lora = LoraConfig(target_modules=list(targets), r=4, init_lora_weights=False)
        model = get_peft_model(cls.from_pretrained(folders["llama"]), lora)
        model.save_pretrained(tmp_path / targets[0])
        return model, tmp_path / targets[0]

    own, saved = adapted(module.LlamaForCausalLM, "qkv_proj", "o_proj")
    again = PeftModel.from_pretrained(module.LlamaForCausalLM.from_pretrained(folders["llama"]), saved)
    assert torch.equal(logits(again), logits(own))
    _, of_stock = adapted(LlamaForCausalLM, "q_proj", "o_proj")
    with pytest.raises(RuntimeError, match=r"q_proj\.lora_A\.weight is for a layer of the original model only"):
        PeftModel.from_pretrained(module.LlamaForCausalLM.from_pretrained(folders["llama"]), of_stock)
