"""`Patcher.apply`: a model in memory, patched, patched otherwise, and back to stock, without reading it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from patcher import InvalidPatcherError, Patcher
from tests.support.replacements import JOINED, JoinedMLP
from tests.support.shared import checkpoint
from tests.support.tiny import tiny_llama_config


class Norm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class AdaptedMLP(LlamaMLP):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.adapter = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.adapter


NORM = Patcher({"LlamaRMSNorm": Norm})
ADAPTED = Patcher({"LlamaMLP": AdaptedMLP}, new_weights="adapter")
IDS = torch.arange(100, 140).view(2, 20)


@pytest.fixture(params=["a tiny Llama", pytest.param("SmolLM2, four layers", marks=pytest.mark.real)])
def folder(request: pytest.FixtureRequest) -> Path:
    """A tied Llama."""
    if request.param != "a tiny Llama":
        return request.getfixturevalue("smollm2_small")
    return checkpoint(tiny_llama_config(vocab_size=256, num_hidden_layers=4, tie_word_embeddings=True))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def storages(model: nn.Module) -> dict[int, int]:
    return {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}


def shared(one: nn.Module, other: nn.Module) -> float:
    """The share of the bytes of `one` that lie in the memory of `other`."""
    mine, theirs = storages(one), storages(other)
    return sum(size for pointer, size in mine.items() if pointer in theirs) / sum(mine.values())


def weights(model: nn.Module) -> dict[str, bytes]:
    return {key: tensor.numpy().tobytes() for key, tensor in model.state_dict().items()}


def test_patched_otherwise_and_back_on_a_real_model(folder: Path, tmp_path: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folder)
    bytes_before, logits_before = weights(stock), logits(stock)

    norms = NORM.apply(stock)
    assert {type(layer.input_layernorm) for layer in norms.model.layers} == {Norm}
    assert shared(norms, stock) == 1.0  # nothing converts
    assert torch.allclose(logits(norms), logits_before, atol=1e-3)

    joined = JOINED.apply(norms)
    assert {type(layer.mlp) for layer in joined.model.layers} == {JoinedMLP}
    assert {type(layer.input_layernorm) for layer in joined.model.layers} == {LlamaRMSNorm}
    converted = sum(2 * layer.mlp.gate_proj.weight.nbytes for layer in stock.model.layers)
    assert shared(joined, stock) == pytest.approx(1 - converted / sum(storages(stock).values()), abs=1e-6)
    assert torch.allclose(logits(joined), logits_before, atol=1e-4)

    adapted = ADAPTED.apply(joined)
    assert not adapted.model.layers[0].mlp.adapter.any()
    back = Patcher().apply(adapted)
    assert type(back) is type(stock)
    assert {type(module) for module in back.modules()} == {type(module) for module in stock.modules()}
    assert torch.equal(logits(back), logits_before)

    assert weights(stock) == bytes_before
    assert torch.equal(logits(stock), logits_before)
    for name, model in {"joined": joined, "back": back}.items():
        model.save_pretrained(tmp_path / name)
        saved = (tmp_path / name / "model.safetensors").read_bytes()
        assert saved == (folder / "model.safetensors").read_bytes()


def test_a_training_step_of_the_new_model_is_its_own(folder: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folder)
    patched = NORM.apply(stock)
    patched(IDS, labels=IDS).loss.backward()
    assert patched.model.layers[0].mlp.up_proj.weight.grad is not None
    assert stock.model.layers[0].mlp.up_proj.weight.grad is None


def test_what_the_model_was_set_to_is_kept(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    model.train()
    model.generation_config.max_new_tokens = 7
    patched = JOINED.apply(model)
    assert patched.training
    assert patched.dtype == torch.bfloat16
    assert patched.config._attn_implementation == "eager"
    assert patched.generation_config.max_new_tokens == 7
    assert patched.lm_head.weight is patched.model.embed_tokens.weight
    model.eval()
    assert not JOINED.apply(model).training


def test_weights_of_several_dtypes_keep_them() -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stock.lm_head.float()
    nn.init.normal_(stock.lm_head.weight)
    patched = Patcher(fusions="gate_up").apply(stock)
    assert torch.equal(patched.lm_head.weight, stock.lm_head.weight)
    assert patched.lm_head.weight.dtype == torch.float32
    assert patched.model.layers[0].mlp.gate_up_proj.weight.dtype == torch.bfloat16

    stock.model.layers[1].mlp.float()
    patched = Patcher(fusions="gate_up").apply(stock)
    kinds = [layer.mlp.gate_up_proj.weight.dtype for layer in patched.model.layers]
    assert kinds == [torch.bfloat16, torch.float32]
    kinds = [layer.mlp.gate_up_proj.weight.dtype for layer in JOINED.apply(stock).model.layers]
    assert kinds == [torch.bfloat16, torch.float32]
    assert [each.dtype for each in Patcher().apply(JOINED.apply(stock)).parameters()] == [
        each.dtype for each in stock.parameters()
    ]
    stock.model.layers[1].mlp.up_proj.bfloat16()
    with pytest.raises(
        InvalidPatcherError,
        match=r"can't convert weights of several dtypes: model\.layers\.1\.mlp\.gate_proj\.weight, "
        r"model\.layers\.1\.mlp\.up_proj\.weight would be joined",
    ):
        JOINED.apply(stock)


@pytest.mark.libraries
def test_a_quantized_model_is_refused(folder: Path) -> None:
    quantized = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(InvalidPatcherError, match=r"can't take a quantized model.*Load it again with patcher="):
        NORM.apply(quantized)


def test_an_offloaded_model_is_refused(folder: Path, tmp_path: Path) -> None:
    device_map = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    device_map |= {f"model.layers.{number}": "disk" if number else "cpu" for number in range(4)}
    offloaded = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path)
    with pytest.raises(InvalidPatcherError, match=r"whose weights are offloaded.*Load it again with patcher="):
        NORM.apply(offloaded)


def test_only_models_are_taken() -> None:
    with pytest.raises(InvalidPatcherError, match=r"takes a model of transformers, found Linear"):
        NORM.apply(nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("patcher", [JOINED, Patcher(fusions="qkv")], ids=["replaced", "fused"])
def test_a_default_device_without_values_does_not_matter(folder: Path, patcher: Patcher) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.device("meta"):
        patched = patcher.apply(model)
        back = Patcher().apply(patched)
    assert not [name for name, value in (*patched.named_parameters(), *patched.named_buffers()) if value.is_meta]
    torch.testing.assert_close(logits(patched), logits(model))
    assert torch.equal(logits(back), logits(model))
