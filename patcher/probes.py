"""What a model is run on to see whether it computes the same: deterministic, and reaching all of its layers."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from patcher.inputs import NoInputsError, Pass, chosen_passes, parameters_of
from patcher.model_classes import PLACES

__all__ = ["Probe", "probes_for", "processor_of"]

#: The lengths of the rows of the padded batch, and of the short and the long row, in tokens.
_BATCH, _SHORT, _LONG = (16, 11, 5), 5, 64


@dataclass(frozen=True)
class Probe:
    """One run of a model, and which positions of its outputs mean something."""

    name: str
    run: Pass
    #: (batch, length), True where a token stands; None where all count
    counted: torch.Tensor | None = None
    #: how many tokens at the end come one by one, with what was kept of those before; 0 for one call
    steps: int = 0

    def outputs_of(self, model: nn.Module, *, gradients: bool = False) -> list[torch.Tensor]:
        """All floating-point tensors that the run gives; of what is padding, none."""
        with _without_memory(model), torch.set_grad_enabled(gradients):
            outputs = self._stepwise(model) if self.steps else self.run.of(model)
        if self.counted is None:
            return outputs
        mask = self.counted
        return [output[mask.to(output.device)] if output.shape[:2] == mask.shape else output for output in outputs]

    def _stepwise(self, model: nn.Module) -> list[torch.Tensor]:
        ids = self.run.arguments["input_ids"].to(next(model.parameters()).device)
        first = ids.shape[1] - self.steps
        call: Any = model
        result = call(input_ids=ids[:, :first], use_cache=True)
        found = [result.logits]
        for place in range(first, ids.shape[1]):
            result = call(input_ids=ids[:, place : place + 1], past_key_values=result.past_key_values, use_cache=True)
            found.append(result.logits)
        return found


@contextmanager
def _without_memory(model: nn.Module) -> Iterator[None]:
    """Some models keep what they computed of one call for the next: afterwards they have what they had before."""
    # Dicts in place and one level deep: hooks that a call installs go together with the flag that says they are there.
    before = [
        (module, [(name, value, _content(value)) for name, value in vars(module).items()])
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            for name, value, content in attributes:
                if content is not None:
                    value.clear()
                    value.update(content)
                vars(module)[name] = value


def _content(value: Any) -> dict[Any, Any] | None:
    return dict(value) if type(value) in (dict, OrderedDict) else None


def probes_for(model: PreTrainedModel, processor: Any, seed: int) -> list[Probe]:
    """The runs for one model: a short row, a long one, a padded batch, a prompt with steps after it; and whatever
    else reaches layers that these don't, such as images for a vision tower.

    Args:
        model: the stock model.
        processor: what makes inputs of texts, images and sounds for it, from `processor_of`.
        seed: of token ids, where there is no tokenizer.

    Raises:
        NoInputsError: nothing that was tried runs on the stock model.
    """
    probes = [probe for probe in _text_probes(model, _token_rows(model, processor, seed)) if _runs(model, probe)]
    try:
        with _without_memory(model):
            passes = chosen_passes(model, _processed(model, processor))
        probes += [Probe(f"{one.path or 'the model'}: {_names(one)}", one) for one in passes]
    except NoInputsError:
        if not probes:
            raise
    return probes


def _names(one: Pass) -> str:
    return f"{'' if one.method == 'forward' else one.method + ' '}{', '.join(one.arguments)}"


def _runs(model: PreTrainedModel, probe: Probe) -> bool:
    try:
        return bool(probe.outputs_of(model))
    except Exception:  # whatever a model raises for what it isn't made for
        return False


def _text_probes(model: PreTrainedModel, rows: list[list[int]]) -> list[Probe]:
    taken = parameters_of(model)
    if "input_ids" not in taken:
        return []
    text = model.config.get_text_config()
    longest = min(_LONG, getattr(text, "max_position_embeddings", None) or _LONG)
    steps_back = max(1, min(longest, len(rows[0])))
    decoder = {"decoder_input_ids": torch.tensor([rows[0][:6]])} if "decoder_input_ids" in taken else {}

    def one(name: str, ids: list[int], steps: int = 0) -> Probe:
        return Probe(name, Pass("forward", {"input_ids": torch.tensor([ids])} | decoder), steps=steps)

    probes = [one("a short row", rows[0][:_SHORT]), one("a long row", rows[0][:steps_back])]
    if "attention_mask" in taken:
        lengths = [min(length, longest) for length in _BATCH]
        pad = text.pad_token_id if isinstance(getattr(text, "pad_token_id", None), int) else 0
        ids = torch.full((len(lengths), max(lengths)), max(pad, 0))
        mask = torch.zeros_like(ids)
        left = model.can_generate() and not getattr(model.config, "is_encoder_decoder", False)
        for number, length in enumerate(lengths):
            place = slice(ids.shape[1] - length, None) if left else slice(0, length)
            ids[number, place] = torch.tensor(rows[(number + 1) % len(rows)][:length])
            mask[number, place] = 1
        arguments = {"input_ids": ids, "attention_mask": mask}
        if decoder:
            arguments["decoder_input_ids"] = torch.tensor([row[:6] for row in (rows * 3)[: len(lengths)]])
        probes.append(Probe("a padded batch", Pass("forward", arguments), None if decoder else mask.bool()))
    if "past_key_values" in taken and model.can_generate() and not decoder:
        probes.append(one("a prompt, then token by token", rows[0][: min(12, steps_back)], steps=3))
    return probes


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


# --- what lies beside a checkpoint ---------------------------------------------------------------------------------


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
    taken = parameters_of(model)
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=generator).numpy()
    rate = getattr(getattr(processor, "feature_extractor", processor), "sampling_rate", None)
    sound = torch.randn(rate or 1, generator=generator).numpy()
    spoken: dict[str, Any] = {"sampling_rate": rate}
    seen, heard = getattr(processor, "image_token", ""), getattr(processor, "audio_token", "")
    said = {"text": [f"{seen or ''}{heard or ''} What is it?"]}
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    decoder = {"decoder_input_ids": torch.tensor([[0, 1, 2, 3]])} if "decoder_input_ids" in taken else {}
    calls: list[Callable[[], Any]] = [
        lambda: processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
        ),
        lambda: processor(images=[image], **said, return_tensors="pt"),
        lambda: processor(audio=[sound], **said, **spoken, return_tensors="pt"),
        lambda: processor(images=[image], return_tensors="pt"),
        lambda: processor(audio=[sound], **spoken, return_tensors="pt"),
        lambda: processor([sound], **spoken, return_tensors="pt"),
    ]
    for call in calls if processor is not None else ():
        with suppress(Exception):  # it takes something else
            made = {name: value for name, value in call().items() if name in taken and isinstance(value, torch.Tensor)}
            if any(value.is_floating_point() for value in made.values()):  # an image or a sound, which it took
                yield Pass("forward", decoder | made)
