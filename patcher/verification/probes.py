"""What a model is run on to see whether it computes the same: deterministic, and reaching all of its layers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from patcher.checkpoints.model_classes import PLACES
from patcher.verification.inputs import Pass, chosen_passes, parameters_of

#: The lengths of the rows of the padded batch, and of the short and the long row, in tokens.
_BATCH, _SHORT, _LONG = (16, 11, 5), 5, 64


def passes_for(model: PreTrainedModel, processor: Any, seed: int) -> list[Pass]:
    """The runs for one model: a short row, a long one, a padded batch, a prompt with steps after it; and whatever
    reaches layers with weights, such as images for a vision tower.

    Args:
        model: the stock model.
        processor: what makes inputs of texts, images and sounds for it, from `processor_of`.
        seed: of token ids, where there is no tokenizer.

    Raises:
        NoInputsError: nothing that was tried runs on the stock model.
    """
    texts = _texts(model, _token_rows(model, processor, seed))
    return chosen_passes(model, texts, _processed(model, processor))


def _texts(model: PreTrainedModel, rows: list[list[int]]) -> Iterator[Pass]:
    taken = parameters_of(model)
    if "input_ids" not in taken:
        return
    text = model.config.get_text_config()
    longest = min(_LONG, getattr(text, "max_position_embeddings", None) or _LONG)
    row = torch.tensor(rows[:1])[:, : max(1, longest)]
    decoder = {"decoder_input_ids": row[:, :6]} if "decoder_input_ids" in taken else {}
    for title, ids in (("a short row", row[:, :_SHORT]), ("a long row", row)):
        yield Pass("forward", {"input_ids": ids} | decoder, title=title)
    if "attention_mask" in taken:
        batch = [torch.tensor(rows[(n + 1) % len(rows)][: min(size, longest)]) for n, size in enumerate(_BATCH)]
        pad = text.pad_token_id if isinstance(getattr(text, "pad_token_id", None), int) else 0
        left = model.can_generate() and not getattr(model.config, "is_encoder_decoder", False)
        padded = partial(pad_sequence, batch_first=True, padding_side="left" if left else "right")
        ids, mask = padded(batch, padding_value=max(pad, 0)), padded([torch.ones_like(each) for each in batch])
        arguments = {"input_ids": ids, "attention_mask": mask}
        if decoder:
            arguments["decoder_input_ids"] = torch.tensor([each[:6] for each in (rows * 3)[: len(batch)]])
        yield Pass("forward", arguments, title="a padded batch", counted=None if decoder else mask.bool())
    if "past_key_values" in taken and model.can_generate() and not decoder:
        yield Pass("forward", {"input_ids": row[:, :12]}, title="a prompt, then token by token", steps=3)


def _token_rows(stock: PreTrainedModel, processor: Any, seed: int) -> list[list[int]]:
    """Rows of token ids: English by the model's own tokenizer, or else drawn at random."""
    text = stock.config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None) or 100
    rows = _english(getattr(processor, "tokenizer", processor))
    if rows and all(max(row) < vocabulary for row in rows):
        return rows
    special = {
        value
        for config in (stock.config, text)
        for name, value in vars(config).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    generator = torch.Generator().manual_seed(seed)
    ordinary = [token for token in range(min(vocabulary, 4096)) if token not in special] or [0]
    drawn = torch.randint(0, len(ordinary), (3, _LONG), generator=generator)
    return [[ordinary[index] for index in row] for row in drawn.tolist()]


def _english(tokenizer: Any) -> list[list[int]]:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return []
    from pydoc_data.topics import topics

    texts = [topics[name].split("\n", 3)[-1] for name in ("assert", "while", "lambda")]
    rows = [tokenizer(text[:2000], add_special_tokens=False)["input_ids"][:_LONG] for text in texts]
    return rows if all(len(row) >= max(_BATCH) for row in rows) else []


def processor_of(model: Any, options: Mapping[str, Any]) -> Any:
    """What makes inputs of texts, images and sounds: the processor of a folder or a repo, or its image processor,
    feature extractor or tokenizer. None where there is none, or it needs a package that isn't here.
    """
    places = {key: value for key, value in options.items() if key in PLACES - {"variant"}}
    for auto in (AutoProcessor, AutoTokenizer) if isinstance(model, str | os.PathLike) else ():
        with suppress(Exception):
            return auto.from_pretrained(model, **places)
    return None


def _processed(model: PreTrainedModel, processor: Any) -> Iterator[Pass]:
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
                yield Pass("forward", decoder | made)
