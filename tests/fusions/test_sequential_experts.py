"""`sequential_experts`: the model's own eager experts as linear layers; the same checkpoint; quantizers see them."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GptOssForCausalLM,
    MixtralForCausalLM,
    OpenAIPrivacyFilterConfig,
    OpenAIPrivacyFilterForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
    TorchAoConfig,
)
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from patcher import PatchedWeightsError, Patcher, UnmatchedPatchError
from patcher.compat.conversions import stock_revert
from patcher.fusions import SequentialExperts
from patcher.loading.saving import saved_state_dict
from tests.support import fresh, shared
from tests.support.checkpoints import same_checkpoint
from tests.support.tiny import (
    DECODER_SIZES,
    build_tiny,
    save_tiny,
    tiny_inputs,
    tiny_jamba_config,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
)
from tests.support.tiny_experts import (
    experts_of,
    tiny_gpt_oss_config,
    tiny_jetmoe_config,
    tiny_llama4_config,
    tiny_longcat_config,
    tiny_nemotron_h_config,
    tiny_qwen3_moe_config,
)

LISTED = Patcher(fusions="sequential_experts")

CASES = [
    pytest.param(tiny_mixtral_config(), id="Mixtral, experts apart on disk"),
    pytest.param(tiny_qwen2_moe_config(), id="Qwen2-MoE, a shared expert"),
    pytest.param(tiny_qwen3_moe_config(), id="Qwen3-MoE"),
    pytest.param(tiny_jamba_config(), id="Jamba, experts in some layers"),
    pytest.param(tiny_gpt_oss_config(), id="gpt-oss, transposed, interleaved, biases"),
    pytest.param(tiny_llama4_config(), id="Llama 4, all experts at once"),
]


def loaded(config: PretrainedConfig, folder: Path, **options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The stock model, eager, and the one with lists of layers, from one checkpoint."""
    save_tiny(config, folder)
    options = {"experts_implementation": "eager"} | options
    stock = AutoModelForCausalLM.from_pretrained(folder, **options)
    return stock, AutoModelForCausalLM.from_pretrained(folder, patcher=LISTED, **options)


@pytest.mark.parametrize("config", CASES)
def test_outputs_and_gradients_are_those_of_eager_experts(config: PretrainedConfig, tmp_path: Path) -> None:
    stock, listed = loaded(config, tmp_path)
    inputs = tiny_inputs(config)
    outputs = [model(**inputs).logits for model in (stock, listed)]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=0)

    for output in outputs:
        output.square().mean().backward()

    def zeros_if_unused(
        model: PreTrainedModel,
    ) -> dict[str, torch.Tensor]:  # an expert without a token has no gradient
        return {
            name: torch.zeros_like(value) if value.grad is None else value.grad
            for name, value in model.named_parameters()
        }

    expected = stock_revert(stock, zeros_if_unused(stock))
    found = saved_state_dict(listed, zeros_if_unused(listed))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("config", CASES)
def test_every_expert_is_a_plain_linear_layer(config: PretrainedConfig, tmp_path: Path) -> None:
    stock, listed = loaded(config, tmp_path)

    for experts in experts_of(listed):
        assert set(dict(experts.named_parameters(recurse=False))) == set()
        assert len(experts) == 4
        assert [experts[number] for number in range(4)] == list(experts)
        for number, expert in enumerate(experts):
            assert expert is experts.get_submodule(str(number)) is experts[number - 4]
            layers = dict(expert.named_children())
            assert sorted(layers) == ["down_proj", "gate_proj", "up_proj"]
            for layer in layers.values():
                assert type(layer) is nn.Linear
                assert tuple(layer.weight.shape) == (layer.out_features, layer.in_features)
                assert layer.weight.is_contiguous()
        with pytest.raises(IndexError, match="expert 4 of 4"):
            experts[4]
    assert not any(parameter.dim() == 3 and "conv" not in name for name, parameter in listed.named_parameters())
    assert sum(p.numel() for p in listed.parameters()) == sum(p.numel() for p in stock.parameters())


@pytest.mark.parametrize("config", CASES)
@pytest.mark.parametrize("all_tokens", [False, True])
def test_hooks_run_on_an_expert_as_on_its_layers(config: PretrainedConfig, all_tokens: bool, tmp_path: Path) -> None:
    """Calibration registers them on `experts[3]`, and one that never runs would count no token."""
    save_tiny(config, tmp_path)
    patcher = Patcher(fusions=[SequentialExperts(all_tokens=all_tokens)])
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, patcher=patcher)
    rows: dict[nn.Module, int] = {}
    pairs = [(expert, expert.down_proj) for experts in experts_of(model) for expert in experts]
    for module in itertools.chain(*pairs):
        module.register_forward_hook(lambda module, given, _: rows.update({module: len(given[0])}))
    model(**tiny_inputs(config))

    assert {expert: rows[layer] for expert, layer in pairs if layer in rows} == {
        expert: rows[expert] for expert, _ in pairs if expert in rows
    }
    assert len(rows) == 2 * len(pairs)
    experts, given = pairs[0][0], torch.randn(3, model.config.get_text_config().hidden_size)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'run'"):
        experts(given)


@pytest.mark.crossed
@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
@pytest.mark.parametrize("config", CASES)
def test_saving_writes_what_stock_writes(config: PretrainedConfig, max_shard_size: str, tmp_path: Path) -> None:
    save_tiny(config, tmp_path / "checkpoint", max_shard_size=max_shard_size, dtype=torch.bfloat16)
    for name, options in {"stock": {}, "listed": {"patcher": LISTED}}.items():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", **options)
        model.save_pretrained(tmp_path / name, max_shard_size=max_shard_size)

    assert same_checkpoint(tmp_path / "listed", tmp_path / "stock")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_eager_experts(dtype: torch.dtype, tmp_path: Path) -> None:
    stock, listed = loaded(tiny_mixtral_config(), tmp_path, dtype=dtype)
    inputs = tiny_inputs(stock.config)

    torch.testing.assert_close(listed(**inputs).logits, stock(**inputs).logits, atol=0, rtol=0)


def test_a_real_model_of_experts_gives_the_same_and_comes_back_whole(smollm2_moe: Path, tmp_path: Path) -> None:
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    stock = AutoModelForCausalLM.from_pretrained(smollm2_moe, **options)
    listed = AutoModelForCausalLM.from_pretrained(smollm2_moe, patcher=LISTED, **options)
    tokens = torch.arange(40, 72)[None]
    with torch.no_grad():
        torch.testing.assert_close(listed(tokens).logits, stock(tokens).logits, atol=1e-4, rtol=0)
    del stock

    listed.save_pretrained(tmp_path)

    assert same_checkpoint(tmp_path, smollm2_moe)


PEAK = """
import sys
from transformers import MixtralForCausalLM
from patcher import Patcher
import patcher.fusions.sequential_experts
from tests.support.memory import peak
patcher = Patcher(fusions="sequential_experts")
before = peak()
MixtralForCausalLM.from_pretrained(sys.argv[1], patcher=patcher)
print(peak() - before)
"""


@pytest.mark.process
def test_a_load_holds_no_more_than_checkpoint_model_and_one_layer(smollm2_moe: Path) -> None:
    done = fresh.run(PEAK, smollm2_moe)
    size = sum(path.stat().st_size for path in smollm2_moe.glob("*.safetensors"))
    layer = 4 * 3 * 576 * 1536 * 4  # experts, projections, float32

    assert int(done.stdout.split()[-1]) < 2 * size + layer


# --- the class -------------------------------------------------------------------------------------------------------


def test_it_is_still_an_object_of_the_class_that_it_was(tmp_path: Path) -> None:
    _, listed = loaded(tiny_mixtral_config(), tmp_path)

    assert all(isinstance(experts, MixtralExperts) for experts in experts_of(listed))
    again = copy.deepcopy(listed)
    tokens = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(again(tokens).logits, listed(tokens).logits, atol=0, rtol=0)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_whatever_implementation_is_asked_for_the_experts_run_one_by_one(implementation: str, tmp_path: Path) -> None:
    stock, listed = loaded(tiny_mixtral_config(), tmp_path, experts_implementation=implementation)
    inputs = tiny_inputs(stock.config)

    assert listed.config._experts_implementation == implementation
    torch.testing.assert_close(listed(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)


def test_threads_may_share_the_model(tmp_path: Path) -> None:
    stock, listed = loaded(tiny_mixtral_config(), tmp_path)
    batches = [tiny_inputs(stock.config, seed=seed) for seed in range(4)]
    results: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        with torch.no_grad():
            results[number] = listed(**batches[number]).logits

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for number, batch in enumerate(batches):
        torch.testing.assert_close(results[number], stock(**batch).logits, atol=1e-5, rtol=0)


# --- variants of the layout ------------------------------------------------------------------------------------------

VARIANTS = [
    pytest.param(tiny_nemotron_h_config(), ["down_proj", "up_proj"], id="Nemotron-H, no gate"),
    pytest.param(tiny_jetmoe_config(), [], id="JetMoe, experts get their own part"),
    pytest.param(tiny_longcat_config(), ["down_proj", "gate_proj", "up_proj"], id="LongCat, experts that do nothing"),
]


@pytest.mark.parametrize(("config", "names"), VARIANTS)
def test_other_layouts(config: PretrainedConfig, names: list[str], tmp_path: Path) -> None:
    stock, listed = loaded(config, tmp_path / "checkpoint")
    inputs = tiny_inputs(config)
    stock.save_pretrained(tmp_path / "stock")
    listed.save_pretrained(tmp_path / "listed")

    for experts in experts_of(listed):
        assert sorted(name for name, _ in experts[0].named_children()) == names
        assert names or all(type(expert) is nn.Linear for expert in experts)
    torch.testing.assert_close(listed(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)
    assert same_checkpoint(tmp_path / "listed", tmp_path / "stock")


def test_experts_that_compute_in_another_type_than_their_weights_are_refused() -> None:
    config = OpenAIPrivacyFilterConfig(
        **DECODER_SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    )
    resolution = LISTED.resolve(OpenAIPrivacyFilterForTokenClassification, config)

    assert not resolution.fused
    for reason in resolution.refused.values():
        assert reason.startswith("its forward computes in float32, and a linear layer")


def test_a_model_without_experts_is_an_error(tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(), tmp_path)
    with pytest.raises(UnmatchedPatchError, match="'sequential_experts' found no module that it can fuse"):
        AutoModelForCausalLM.from_pretrained(tmp_path, patcher=LISTED)


# --- without a checkpoint, and in memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("config", [tiny_mixtral_config(), tiny_gpt_oss_config()], ids=lambda c: c.model_type)
def test_a_model_made_without_a_checkpoint_starts_and_saves_as_stock(config: PretrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(1)
    stock = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(1)
    listed = AutoModelForCausalLM.from_config(config, patcher=LISTED)
    stock.save_pretrained(tmp_path / "stock")
    listed.save_pretrained(tmp_path / "listed")

    assert experts_of(listed)
    assert same_checkpoint(tmp_path / "listed", tmp_path / "stock")


def test_it_is_applied_to_a_model_in_memory_and_taken_back() -> None:
    stock = build_tiny(tiny_gpt_oss_config())
    listed = LISTED.apply(stock)
    back = Patcher().apply(listed)
    tokens = torch.tensor([[3, 4, 5]])

    torch.testing.assert_close(listed(tokens).logits, stock(tokens).logits, atol=1e-5, rtol=0)
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in back.state_dict().items())


def test_training_an_expert_changes_its_part_of_the_saved_stack(tmp_path: Path) -> None:
    _, listed = loaded(tiny_gpt_oss_config(), tmp_path / "checkpoint")
    with torch.no_grad():
        listed.model.layers[1].mlp.experts[2].gate_proj.weight += 1
    listed.save_pretrained(tmp_path / "trained")
    before = GptOssForCausalLM.from_pretrained(tmp_path / "checkpoint").state_dict()
    after = GptOssForCausalLM.from_pretrained(tmp_path / "trained").state_dict()

    changed = {name: (after[name] - before[name]) for name in before if not torch.equal(after[name], before[name])}
    ((name, difference),) = changed.items()
    assert name == "model.layers.1.mlp.experts.gate_up_proj"
    assert [part.abs().max().item() > 0.5 for part in difference] == [False, False, True, False]
    assert (difference[2, :, ::2] > 0.5).all()  # the columns of the gate
    assert not difference[2, :, 1::2].any()


def test_it_combines_with_the_other_families(tmp_path: Path) -> None:
    save_tiny(tiny_mixtral_config(), tmp_path / "checkpoint")
    stock = shared.stock(tmp_path / "checkpoint", MixtralForCausalLM)
    both = MixtralForCausalLM.from_pretrained(
        tmp_path / "checkpoint", patcher=Patcher(fusions=["qkv", "sequential_experts"])
    )
    inputs = tiny_inputs(stock.config)
    stock.save_pretrained(tmp_path / "stock")
    both.save_pretrained(tmp_path / "both")

    torch.testing.assert_close(both(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)
    assert same_checkpoint(tmp_path / "both", tmp_path / "stock")


def test_a_checkpoint_that_lacks_an_expert_is_an_error(tmp_path: Path) -> None:
    save_tiny(tiny_mixtral_config(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(
        PatchedWeightsError,
        match=r"the checkpoint lacks:\n  model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight\n",
    ):
        MixtralForCausalLM.from_pretrained(tmp_path, patcher=LISTED)


# --- quantizers ------------------------------------------------------------------------------------------------------


def quantizers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    if importlib.util.find_spec("bitsandbytes"):
        found["bitsandbytes, 8 bits"] = BitsAndBytesConfig(load_in_8bit=True)
        found["bitsandbytes, 4 bits"] = BitsAndBytesConfig(load_in_4bit=True)
    if importlib.util.find_spec("torchao"):
        from torchao.quantization import Int8WeightOnlyConfig

        found["torchao, int8"] = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    return found


def is_quantized(layer: nn.Module) -> bool:
    weight: Any = layer.weight
    return weight.dtype in (torch.int8, torch.uint8) or type(weight.data) is not torch.Tensor


@pytest.mark.libraries
@pytest.mark.parametrize("name", ["bitsandbytes, 8 bits", "bitsandbytes, 4 bits", "torchao, int8"])
@pytest.mark.parametrize(
    "config",
    [tiny_qwen3_moe_config(), tiny_mixtral_config(), tiny_gpt_oss_config()],
    ids=["Qwen3-MoE", "Mixtral", "gpt-oss"],
)
def test_quantizers_quantize_every_expert(config: PretrainedConfig, name: str, tmp_path: Path) -> None:
    quantizer = quantizers().get(name)
    if quantizer is None:
        pytest.skip(f"{name.partition(',')[0]} is not installed")
    save_tiny(config, tmp_path)
    options: dict[str, Any] = {"dtype": torch.float32, "quantization_config": quantizer}

    def quantized_experts(model: nn.Module) -> int:
        return sum(
            ".experts." in path and isinstance(module, nn.Linear) and is_quantized(module)
            for path, module in model.named_modules()
        )

    stock = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    listed = AutoModelForCausalLM.from_pretrained(tmp_path, patcher=LISTED, **options)

    assert quantized_experts(stock) == 0
    assert quantized_experts(listed) == 2 * 4 * 3  # layers, experts, projections
    inputs = tiny_inputs(config)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(**inputs).logits
    error = (listed(**inputs).logits - exact).pow(2).mean().sqrt() / exact.std()
    assert error < (0.5 if "4 bits" in name else 0.2)
    # Under the names that a checkpoint may have for each expert, stock would take the weights of none of them.
    with pytest.raises(PatchedWeightsError, match=r"experts\.0\.gate_proj\.weight.* is quantized"):
        listed.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_model_with_lists_can_be_pickled(tmp_path: Path) -> None:
    _, listed = loaded(tiny_mixtral_config(), tmp_path)
    tokens = torch.tensor([[3, 4, 5]])

    again = pickle.loads(pickle.dumps(listed))

    torch.testing.assert_close(again(tokens).logits, listed(tokens).logits, atol=0, rtol=0)
