"""Runs on texts: lengths, padding, caches, repeated calls, and every other argument of the forward beside a text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from patcher.compat.models import TransformersKwargs, cache_argument
from patcher.display.shown import pluralize
from patcher.verification.comparing import Pair, Reference
from patcher.verification.passes import AFTER, Pass, differences, parameters_of

#: In tokens. The long row isn't a multiple of a block of 16, a row of 128 is.
SHORT, LONG = 5, 200
#: The titles of the texts that run with all layers, and in the stages for which the details of others don't matter.
FEW = ("a short row", "a padded batch")
STEPS, CHUNKS = "a prompt, then token by token", "a prompt in chunks"
_LENGTHS = (1, 128)
_BATCHES = (2, 3, 4, 5, 6, 7, 8, 17)
_PADDED = (11, 8, 4)
#: The prompt and 40 tokens after it; pieces of a prompt, of which some are short.
_STEPS, _CHUNKS = (12, *[1] * 40), (13, 1, 17, 2, 11)


def text_passes(model: PreTrainedModel, rows: list[list[int]]) -> Iterator[Pass]:
    """Yield the runs of a model that takes token ids; those that it refuses are left out later."""
    accepted = parameters_of(model)
    if "input_ids" not in accepted:
        return
    limit, cache = len(rows[0]), cache_argument(model)
    decoder, positions, masked = (name in accepted for name in ("decoder_input_ids", "position_ids", "attention_mask"))

    def text(title: str, ids: torch.Tensor, mask: Any = None, **more: Any) -> Pass:
        arguments = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
        if decoder:
            arguments["decoder_input_ids"] = ids
        if "use_cache" in accepted:
            arguments["use_cache"] = False
        counted = None if decoder or mask is None else mask.bool()[:, -ids.shape[1] :]
        return Pass("forward", arguments | more, title=title, counted=counted)

    def pieces(title: str, ids: torch.Tensor, sizes: tuple[int, ...], mask: Any = None) -> Pass:
        cached: dict[str, Any] = {"use_cache": True} if "use_cache" in accepted else {}
        cached |= {"input_ids": ids} if decoder else {}
        stops = [stop for stop in accumulate(sizes, initial=0) if stop <= limit]
        calls = [
            text(
                f"tokens {start + 1} to {stop}", ids[:, start:stop], None if mask is None else mask[:, :stop], **cached
            )
            for start, stop in pairwise(stops)
        ]
        return Pass("forward", {}, title=title, calls=tuple(calls), cache=cache or "")

    first = torch.tensor(rows[:1])
    short = text("a short row", first[:, :SHORT])
    yield short
    yield text("a long row", first)
    batches = {count: batch(rows, [SHORT if count <= 8 else 2] * count) for count in _BATCHES}
    in_a_row = [short, text("another row", batches[2][:1, :SHORT]), text("a batch", batches[2][:, :SHORT]), short]
    if masked:
        sizes = [min(size, limit) for size in _PADDED]
        ids = batch(rows, sizes)
        left = model.can_generate() and not decoder
        sides = {side: _padded(ids, sizes, model.config, left=side == "left") for side in ("left", "right")}
        for side, is_usual in (("left", left), ("right", not left)):
            yield text("a padded batch" if is_usual else f"a batch padded on the {side}", *sides[side])
        gaps = torch.ones_like(ids)
        gaps[0, 2:4] = gaps[1, 1] = 0
        yield text("a batch with gaps in its mask", ids, gaps)
        if positions:
            ids, mask = sides["left"]
            usual = (mask.cumsum(-1) - 1).clamp(min=0)
            yield text("a batch padded on the left, with its positions", ids, mask, position_ids=usual)
            # With a mask: without one, positions that aren't consecutive separate several texts in one row.
            steps = torch.arange(ids.shape[1]) * torch.tensor([[3], [1], [2]])
            yield text("a batch with other positions in each row", ids, torch.ones_like(ids), position_ids=steps)
        in_a_row += [text(f"padded on the {side}", ids[1:], mask[1:]) for side, (ids, mask) in sides.items()]
    for length in _LENGTHS:
        if length < limit:
            yield text(f"a row of {pluralize(length, 'token')}", first[:, :length])
    for count, ids in batches.items():
        yield text(f"a batch of {count}", ids[:, :limit])
    yield replace(short, title="calls one after another", calls=tuple(in_a_row))
    if cache is not None and model.can_generate():
        yield pieces(STEPS, first, _STEPS)
        sizes = [min(sum(_CHUNKS), limit), min(sum(_CHUNKS), limit) - 5]
        ids, mask = _padded(batch(rows, sizes), sizes, model.config, left=True)
        yield pieces(CHUNKS, ids, _CHUNKS, mask if masked and not decoder else None)


def batch(rows: list[list[int]], sizes: list[int]) -> torch.Tensor:
    """Return a row for each size, as long as the largest of them; no two rows are the same."""
    joined = [token for row in rows for token in row]
    return torch.tensor([(joined[index * 7 % 97 :] + joined)[: max(sizes)] for index in range(len(sizes))])


def _padded(ids: torch.Tensor, sizes: list[int], config: Any, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace all but `sizes` tokens of each row by padding, and return the mask too."""
    pad = getattr(text_config_of(config), "pad_token_id", None)
    indices, lengths = torch.arange(ids.shape[1]), torch.tensor(sizes)[:, None]
    mask = (indices >= ids.shape[1] - lengths) if left else (indices < lengths)
    return ids.masked_fill(~mask, max(pad, 0) if isinstance(pad, int) else 0), mask.long()


def token_rows(stock: PreTrainedModel, processor: Any, seed: int) -> list[list[int]]:
    """Return three rows of token ids as long as the longest run: English if there is a tokenizer, else random ids."""
    text = text_config_of(stock.config)
    vocabulary = getattr(text, "vocab_size", None) or 100
    longest = max([LONG, *(largest(size) + 40 for size in windows_of(stock.config).values() if largest(size) <= 512)])
    limit = getattr(text, "max_position_embeddings", None)
    longest = max(8, min(longest, limit)) if isinstance(limit, int) and limit > 0 else longest
    rows = _english(getattr(processor, "tokenizer", processor), longest)
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
    drawn = torch.randint(0, len(ordinary), (3, longest), generator=generator)
    return [[ordinary[index] for index in row] for row in drawn.tolist()]


def _english(tokenizer: Any, length: int) -> list[list[int]]:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return []
    from pydoc_data.topics import topics

    texts = [topics[name].split("\n", 3)[-1] for name in ("assert", "while", "lambda")]
    texts = [(text * (1 + 6 * length // len(text)))[: 6 * length] for text in texts]
    with suppress(Exception):  # it takes other inputs, or doesn't know a character
        rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:length] for text in texts]
        return rows if all(len(row) == length for row in rows) else []
    return []


def text_config_of(config: PretrainedConfig) -> Any:
    """Return the config of the part that takes token ids; a decoder beside a text encoder may compute other things."""
    return getattr(config, "text_encoder", None) or config.get_text_config()


def parts_of(config: PretrainedConfig, path: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield a config and its sub-configs, with their paths."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from parts_of(value, f"{path}{name}.")


def windows_of(config: PretrainedConfig) -> dict[str, int | list[int]]:
    """Return the sizes of windows, beyond which tokens of some layers don't attend, by name in the config.

    A list has one for each layer.
    """
    return {
        f"{path}{name}": value
        for path, part in parts_of(config)
        for name, value in vars(part).items()
        if name in ("attention_chunk_size", "local_attention")
        or ("window" in name and "layer" not in name and not name.endswith(("indices", "indexes")))
        if value and all(isinstance(size, int) and size > 1 for size in (value if type(value) is list else [value]))
    }


def largest(size: int | list[int]) -> int:
    return max(size) if isinstance(size, list) else size


#: Compared by other runs: caches in steps and chunks, masks as padding.
_LEFT_OUT = {"cache", "past_key_values", "cache_params", "encoder_outputs", "input_ids", "args"}
#: Accepted by some attention kernels only.
_OF_KERNELS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "is_causal", "seq_idx"}
#: Not repeated beside labels.
_WITHOUT_LABELS = {"logits_to_keep", "position_ids", "inputs_embeds", "labels", "return_dict"}


def reactions(pair: Pair, base: Pass) -> Iterator[Reference]:
    """Yield the runs with one more argument that change the outputs of the stock model.

    Where labels give a loss, each argument is tried beside labels too: some say how the loss is computed.
    """
    bases = [(plain, "") for plain in pair.references([base])]  # and the name of outputs that have to change
    for plain, output in bases:

        def compared(results: dict[str, torch.Tensor], output: str = output) -> dict[str, torch.Tensor]:
            return {name: value for name, value in results.items() if output in name and not name.endswith(AFTER)}

        for name, annotation in _names(pair.stock, _WITHOUT_LABELS if output else ()):
            arguments = dict(plain.run.arguments)
            values = _values(pair.stock, arguments, name, annotation)
            if name == "inputs_embeds":
                arguments.pop("input_ids", None)
            for text, value in values.items():
                run = Pass("forward", arguments | {name: value}, base.path, f"{plain.run.name}, {name}: {text}")
                changed = [
                    reference
                    for reference in pair.references([run])
                    if differences(compared(reference.expected), compared(plain.expected)).absolute
                ]
                yield from changed
                if "labels" in run.arguments and not output and len(bases) == 1:
                    bases += [(reference, "loss") for reference in changed]
                if changed and name not in _ALL:
                    break


def recording(stock: nn.Module, base: Pass) -> Pass:
    """Return a run with all arguments such as `output_attentions`."""
    names = [name for name, kind in _names(stock) if name.startswith("output_") and "bool" in kind]
    arguments = base.arguments | dict.fromkeys(names, True)
    return replace(base, arguments=arguments, title=f"{base.name} with {', '.join(names)}")


def _names(stock: nn.Module, left_out: Container[str] = ()) -> list[tuple[str, str]]:
    """Return the names of arguments with their annotations, common ones too where `forward` has `**kwargs`."""
    kinds: dict[str, str] = {"return_dict": "bool"}
    for name, parameter in parameters_of(stock).items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            common = {key: str(kind) for key, kind in TransformersKwargs.__annotations__.items()}
            common["shift_labels"] = "torch.LongTensor"
            kinds = {key: kind for key, kind in common.items() if key not in _OF_KERNELS} | kinds
        elif name not in _LEFT_OUT:
            kinds[name] = str(parameter.annotation)
    return [(name, kind) for name, kind in kinds.items() if name not in left_out]


def _values(stock: Any, arguments: dict[str, Any], name: str, annotation: str) -> dict[str, Any]:
    """Return values for one more argument: by its name if that has a known meaning, else by its annotation."""
    ids = arguments.get("input_ids")
    first = next((value for value in arguments.values() if isinstance(value, torch.Tensor) and value.dim()), None)
    is_set = name in arguments and name != "use_cache"
    if is_set or first is None or (name == "attention_mask" and ids is not None):
        return {}
    values: dict[str, Any] = {"True": True, "False": False} if "bool" in annotation else {}
    values |= {"1": 1, "3": 3} if "int" in annotation else {}
    values |= {"0.5": 0.5} if "float" in annotation else {}
    if "Tensor" not in annotation and "_empty" not in annotation:
        return values
    if name == "inputs_embeds" and ids is not None:
        with suppress(Exception), torch.no_grad():
            values["those of other tokens"] = stock.get_input_embeddings()(ids.flip(-1)) * 1.5
    if name in _BY_NAME and ids is not None:
        values |= _BY_NAME[name](ids)
    if name in (*_BY_NAME, "inputs_embeds"):
        return values
    # By the annotation alone: tensors of every usual shape. The model refuses unsuitable ones.
    generator = torch.Generator().manual_seed(1)
    rows, length = first.shape[0], first.shape[1] if first.dim() > 1 else 1
    width = getattr(text_config_of(stock.config), "hidden_size", None) or 1
    for shape in ((rows, length), (rows,), (rows, length, width), (1, length), (rows, 1)):
        size = torch.Size(shape)
        if "Float" not in annotation and len(shape) < 3:
            values[f"ones and zeros of {list(shape)}"] = ((torch.arange(size.numel()) // 2 + 1) % 2).reshape(size)
        if not any(kind in annotation for kind in ("Long", "Int", "Bool")):
            values[f"numbers of {list(shape)}"] = torch.randn(size, generator=generator)
    return values


def _positions(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, length = ids.shape
    plain, half = torch.arange(length).expand(rows, length), length // 2
    return {
        "those of two texts in one row": torch.cat([plain[:, :half], plain[:, : length - half]], 1),
        "every third": plain * 3,
        "another in each row": plain * torch.arange(1, rows + 1)[:, None] + torch.arange(rows)[:, None],
        "later ones": plain + 5,
    }


def _labels(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    ignored = ids.clone()
    ignored[:, ids.shape[1] // 2] = -100  # not the first, which no causal model predicts
    classes = (torch.arange(ids.numel()).view_as(ids) % 2).long()
    return {
        "the ids, some ignored": ignored,
        "a class a token": classes,
        "a class a row": classes[:, 0],
        "a number a row": classes[:, 0].float(),
    }


#: Values of arguments whose names have a known meaning, from the ids; and the arguments of which all values are
#: compared, not only the first that changes the outputs.
_BY_NAME: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "position_ids": _positions,
    "labels": _labels,
    "next_sentence_label": lambda ids: {text: value for text, value in _labels(ids).items() if value.dim() == 1},
    "shift_labels": lambda ids: {"the ids before": ids.roll(1, -1)},
    "logits_to_keep": lambda ids: {"two indices": torch.tensor([0, 2])},
    "num_items_in_batch": lambda ids: {"a tensor": torch.tensor(7)},
}
_ALL = ("position_ids", "logits_to_keep")
