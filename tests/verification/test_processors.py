"""A processor that lies beside a checkpoint makes the inputs that it is verified with."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CLIPImageProcessor,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ViTForImageClassification,
    ViTImageProcessor,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from patcher.verification.inputs import NoInputsError, chosen_passes, processed, processor_of
from patcher.verification.texts import token_rows
from tests.support.tiny import build_tiny, save_tiny, tiny_llava_config
from tests.verification.models import VIT, WHISPER

WORDS = {word: number for number, word in enumerate(["<pad>", "<unk>", "<image>", "What", "is", "it?"])}


def tiny_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    tokens = Tokenizer(WordLevel(WORDS, unk_token="<unk>"))
    tokens.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="<unk>", pad_token="<pad>", **special)


def passes_of(model: PreTrainedModel, folder: Path) -> list[dict[str, torch.Tensor]]:
    return [one.arguments for one in chosen_passes(model, processed(model, processor_of(folder, {})))]


def test_an_image_goes_through_the_image_processor(tmp_path: Path) -> None:
    """Stock takes one size here, which the config doesn't tell."""
    model = build_tiny(copy.deepcopy(VIT), model_class=ViTForImageClassification)
    model.config.image_size = 32
    with pytest.raises(NoInputsError):
        chosen_passes(model)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)

    (arguments,) = passes_of(model, tmp_path)
    assert arguments["pixel_values"].shape == (1, 3, 16, 16)


def test_a_sound_goes_through_the_feature_extractor(tmp_path: Path) -> None:
    WHISPER.save_pretrained(tmp_path)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1, n_fft=400, hop_length=125).save_pretrained(tmp_path)

    (arguments,) = passes_of(build_tiny(WHISPER, model_class=WhisperForConditionalGeneration), tmp_path)
    assert arguments["input_features"].shape == (1, 16, 128)
    assert "decoder_input_ids" in arguments


def test_an_image_with_its_tokens_goes_through_the_processor(tmp_path: Path) -> None:
    config = tiny_llava_config(image_token_index=WORDS["<image>"])
    images = CLIPImageProcessor(size={"height": 28, "width": 28}, crop_size={"height": 28, "width": 28})
    tokenizer = tiny_tokenizer(extra_special_tokens={"image_token": "<image>"})
    LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)

    arguments, *_ = passes_of(build_tiny(config), tmp_path)
    assert arguments["input_ids"].tolist() == [[WORDS[word] for word in ["<image>"] * 4 + ["What", "is", "it?"]]]
    assert arguments["pixel_values"].shape == (1, 3, 28, 28)


def test_where_nothing_lies_beside_it_inputs_are_guessed(tmp_path: Path) -> None:
    save_tiny(VIT, tmp_path, model_class=ViTForImageClassification)
    assert processor_of(tmp_path, {}) is None
    assert processor_of(VIT, {}) is None
    (arguments,) = passes_of(build_tiny(VIT, model_class=ViTForImageClassification), tmp_path)
    assert arguments["pixel_values"].shape == (2, 3, 16, 16)


def test_of_a_tokenizer_that_takes_no_english_ids_are_drawn() -> None:
    model = build_tiny(tiny_llava_config())
    tokens = Tokenizer(WordLevel({"<pad>": 0}))  # without a token for unknown words
    rows = token_rows(model, PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>"), seed=0)
    assert rows == token_rows(model, None, seed=0)
