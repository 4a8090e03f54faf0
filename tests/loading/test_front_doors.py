"""Where else a model is loaded from, and where a patcher must not get lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    EncoderDecoderModel,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.core_model_loading import WeightRenaming
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5MLP

from patcher import InvalidPatcherError, PatchedWeightsError, Patcher
from tests.support.checkpoints import saved
from tests.support.comparing import logits
from tests.support.gguf_files import write_gguf, write_qwen35_gguf
from tests.support.replacements import JOINED, With
from tests.support.tiny import build_tiny, save_tiny, tiny_bert_config, tiny_llama_config, tiny_tokenizer

IDS = torch.tensor([[3, 4, 5]])
BOTH = Patcher(fusions=["qkv", "gate_up"])

# --- GGUF ----------------------------------------------------------------------------------------------------------


def of_gguf(folder: Path, patcher: Patcher | None = None, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", patcher=patcher, quantization_config=GgufConfig(dequantize=True), **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [BOTH, JOINED | Patcher(fusions="qkv")], ids=["fusions", "a conversion"])
def test_quantized_files_are_read_as_stock_reads_them(asked: Patcher, dtype: torch.dtype, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = build_tiny(tiny_llama_config(tie_word_embeddings=True))
    write_gguf(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    stock, patched = of_gguf(tmp_path, dtype=dtype), of_gguf(tmp_path, asked, dtype=dtype)
    assert 0 < (logits(stock) - logits(model)).abs().max() < 0.5
    assert saved(patched, tmp_path / "ours") == saved(stock, tmp_path / "theirs")
    torch.testing.assert_close(logits(patched), logits(stock), atol=1e-5, rtol=1e-5)
    assert torch.equal(logits(of_gguf(tmp_path, asked, dtype=dtype, device_map="cpu")), logits(patched))


@pytest.mark.parametrize(
    "asked",
    [
        Patcher(fusions="gate_up"),
        Patcher({"Qwen3_5MLP": Qwen3_5MLP}, extra_weight_conversions=WeightRenaming("a", "b")),
        Patcher({"Qwen3_5MLP": Qwen3_5MLP}, filtered_weight_conversion_patterns="visual"),
    ],
    ids=["a fusion", "a conversion", "a filter"],
)
def test_files_that_are_read_by_conversions_are_refused(asked: Patcher, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_qwen35_gguf(tmp_path / "model.gguf")
    text = "a GGUF file of Qwen3_5ForCausalLM, which transformers reads by conversions of its own"
    with pytest.raises(InvalidPatcherError, match=text):
        of_gguf(tmp_path, asked)


def test_a_class_mapping_alone_follows_such_a_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_qwen35_gguf(tmp_path / "model.gguf")
    patched = of_gguf(tmp_path, Patcher({"Qwen3_5MLP": type("OwnMLP", (Qwen3_5MLP,), {})}))
    stock = of_gguf(tmp_path)
    assert torch.equal(logits(patched, {"input_ids": IDS}), logits(stock, {"input_ids": IDS}))
    assert saved(patched, tmp_path / "ours") == saved(stock, tmp_path / "theirs")


def test_what_a_gguf_file_lacks_is_said(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_gguf(build_tiny(tiny_llama_config()), tmp_path / "model.gguf")
    with pytest.raises(PatchedWeightsError, match=r"Not in the checkpoint.*\n.*mlp\.adapter"):
        of_gguf(tmp_path, Patcher({"LlamaMLP": With}))


# --- a patcher is never lost ----------------------------------------------------------------------------------------


def test_a_patcher_in_a_config_is_refused() -> None:
    with pytest.raises(InvalidPatcherError, match="patcher= was given to the config of LlamaForCausalLM"):
        LlamaForCausalLM(LlamaConfig(**tiny_llama_config().to_dict() | {"patcher": BOTH}))


def test_parts_of_a_model_that_is_put_together_take_a_patcher_each(tmp_path: Path) -> None:
    folder = save_tiny(tiny_bert_config(), tmp_path / "bert", model_class=AutoModel)
    asked = Patcher(fusions="qkv")
    parts = [str(folder), str(folder)]
    with pytest.raises(InvalidPatcherError, match="encoder_patcher=, decoder_patcher="):
        EncoderDecoderModel.from_encoder_decoder_pretrained(*parts, patcher=asked)
    torch.manual_seed(0)  # the decoder attends to the encoder, which the checkpoint knows nothing of
    stock = EncoderDecoderModel.from_encoder_decoder_pretrained(*parts)
    torch.manual_seed(0)
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(*parts, encoder_patcher=asked, decoder_patcher=asked)
    fused = [module for module in model.modules() if type(module).__name__ == "FusedBertSelfAttention"]
    assert len(fused) == 4
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    torch.testing.assert_close(logits(model, inputs), logits(stock, inputs), atol=1e-5, rtol=1e-5)
    assert saved(model, tmp_path / "ours") == saved(stock, tmp_path / "theirs")


@pytest.mark.libraries
def test_sentence_transformers_take_a_patcher_in_model_kwargs_only(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    save_tiny(tiny_bert_config(), tmp_path, model_class=AutoModel)
    tiny_tokenizer().save_pretrained(tmp_path)
    asked = Patcher(fusions="qkv")
    model = library.SentenceTransformer(str(tmp_path), device="cpu", model_kwargs={"patcher": asked})
    assert any(type(module).__name__ == "FusedBertSelfAttention" for module in model.modules())
    stock = library.SentenceTransformer(str(tmp_path), device="cpu")
    found, expected = (each.encode(["w4 w5", "w6"], convert_to_tensor=True) for each in (model, stock))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'patcher'"):
        library.SentenceTransformer(str(tmp_path), device="cpu", patcher=asked)
