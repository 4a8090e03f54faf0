"""What makes inputs of images and sounds: the processor that lies beside a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel

from patcher.checkpoints.model_classes import PLACES
from patcher.verification.passes import Pass, parameters_of


def processor_of(model: Any, options: Mapping[str, Any]) -> Any:
    """What makes inputs of texts, images and sounds: the processor of a folder or a repo, or its image processor,
    feature extractor or tokenizer. None where there is none, or it needs a package that isn't here.
    """
    places = {key: value for key, value in options.items() if key in PLACES - {"variant"}}
    for auto in (AutoProcessor, AutoTokenizer) if isinstance(model, str | os.PathLike) else ():
        with suppress(Exception):
            return auto.from_pretrained(model, **places)
    return None


def processed(model: PreTrainedModel, processor: Any) -> Iterator[Pass]:
    """What a processor makes of a generated image and a sound, with a text where it takes one: the richest first."""
    if processor is None:
        return
    taken = parameters_of(model)
    generator = torch.Generator().manual_seed(0)
    rate = getattr(getattr(processor, "feature_extractor", processor), "sampling_rate", None)
    image = torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=generator).numpy()
    sound = torch.randn(rate or 1, generator=generator).numpy()
    tokens = [getattr(processor, name, None) or "" for name in ("image_token", "audio_token")]
    text = {"text": [f"{''.join(tokens)} What is it?"]}
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    seen, heard = {"images": [image]}, {"audio": [sound], "sampling_rate": rate}
    spoken = {"raw_speech": [sound], "sampling_rate": rate}  # as feature extractors call it
    calls: list[Any] = [
        lambda: processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
        ),
        *(
            partial(processor, **each, return_tensors="pt")
            for each in (seen | text, heard | text, seen, heard, spoken)
        ),
    ]
    decoder = {"decoder_input_ids": torch.tensor([[0, 1, 2, 3]])} if "decoder_input_ids" in taken else {}
    for call in calls:
        with suppress(Exception):  # it takes something else
            made = {name: value for name, value in call().items() if name in taken and isinstance(value, torch.Tensor)}
            if any(value.is_floating_point() for value in made.values()):  # an image or a sound, which it took
                yield Pass("forward", decoder | made | ({"use_cache": False} if "use_cache" in taken else {}))
