"""Texts in which a patch can be wrong: lengths, batches, padding, positions, caches, and calls after one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from patcher.compat.models import cache_argument
from patcher.verification.passes import Pass, parameters_of

#: In tokens. The long row isn't a multiple of a block of 16, the other one of 128 is.
SHORT, LONG = 5, 200
#: The titles of what is run on all layers, and on further models as well: what the others differ in isn't what is
#: compared there.
FEW = ("a short row", "a padded batch")
STEPS, CHUNKS = "a prompt, then token by token", "a prompt in chunks"
_LENGTHS = (1, 128)
_BATCHES = (2, 3, 4, 5, 6, 7, 8, 17)
_PADDED = (11, 8, 4)
#: The prompt and 40 tokens after it; pieces of a prompt, of which some are short.
_STEPS, _CHUNKS = (12, *[1] * 40), (13, 1, 17, 2, 11)


def text_passes(model: PreTrainedModel, rows: list[list[int]]) -> Iterator[Pass]:
    """What the stock model is to be run on, if it takes token ids; what it refuses is left out later."""
    taken = parameters_of(model)
    if "input_ids" not in taken:
        return
    limit, cache = len(rows[0]), cache_argument(model)
    decoder, positioned, masked = (name in taken for name in ("decoder_input_ids", "position_ids", "attention_mask"))

    def text(title: str, ids: torch.Tensor, mask: Any = None, chunks: tuple[int, ...] = (), **more: Any) -> Pass:
        arguments = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
        if decoder:
            arguments["decoder_input_ids"] = ids
        if "use_cache" in taken:
            arguments["use_cache"] = bool(chunks)
        counted = None if decoder or mask is None else mask.bool()
        return Pass("forward", arguments | more, title=title, counted=counted, chunks=chunks, cache=cache or "")

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
        for side, named in (("left", left), ("right", not left)):
            yield text("a padded batch" if named else f"a batch padded on the {side}", *sides[side])
        gaps = torch.ones_like(ids)
        gaps[0, 2:4] = gaps[1, 1] = 0
        yield text("a batch with gaps in its mask", ids, gaps)
        if positioned:
            ids, mask = sides["left"]
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            yield text("a batch padded on the left, with its positions", ids, mask, position_ids=positions)
            # With a mask: without one, positions that aren't consecutive separate several texts in one row.
            steps = torch.arange(ids.shape[1]) * torch.tensor([[3], [1], [2]])
            yield text("a batch with other positions in each row", ids, torch.ones_like(ids), position_ids=steps)
        in_a_row += [text(f"padded on the {side}", ids[1:], mask[1:]) for side, (ids, mask) in sides.items()]
    for length in _LENGTHS:
        if length < limit:
            yield text(f"a row of {length} token{'s' if length > 1 else ''}", first[:, :length])
    for count, ids in batches.items():
        yield text(f"a batch of {count}", ids[:, :limit])
    yield replace(short, title="calls one after another", calls=tuple(in_a_row))
    if cache is not None and model.can_generate():
        yield text(STEPS, first[:, : sum(_STEPS)], chunks=_within(_STEPS, limit))
        sizes = [min(sum(_CHUNKS), limit), min(sum(_CHUNKS), limit) - 5]
        ids, mask = _padded(batch(rows, sizes), sizes, model.config, left=True)
        yield text(CHUNKS, ids, mask if masked and not decoder else None, chunks=_within(_CHUNKS, limit))


def batch(rows: list[list[int]], sizes: list[int]) -> torch.Tensor:
    """A batch of as many rows as there are sizes, as long as the largest of them: no two rows are the same."""
    long = max(sizes)
    joined = [token for row in rows for token in row]
    return torch.tensor([(joined[place * 7 % 97 :] + joined)[:long] for place in range(len(sizes))])


def _padded(ids: torch.Tensor, sizes: list[int], config: Any, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first rows of ids with padding, and their mask."""
    pad = getattr(config.get_text_config(), "pad_token_id", None)
    places = torch.arange(ids.shape[1])
    ends = torch.tensor(sizes)[:, None]
    mask = (places >= ids.shape[1] - ends) if left else (places < ends)
    return ids.masked_fill(~mask, max(pad, 0) if isinstance(pad, int) else 0), mask.long()


def _within(chunks: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return tuple(size for size, stop in zip(chunks, accumulate(chunks), strict=True) if stop <= limit)


def token_rows(stock: PreTrainedModel, processor: Any, seed: int) -> list[list[int]]:
    """Three rows of token ids, as long as the longest that is run: English by the model's own tokenizer, or else drawn
    at random."""
    text = stock.config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None) or 100
    longest = max([LONG, *(size + 40 for size in windows_of(stock.config).values() if size <= 512)])
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
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:length] for text in texts]
    return rows if all(len(row) == length for row in rows) else []


def parts_of(config: PretrainedConfig, path: str = "") -> Iterator[tuple[str, PretrainedConfig]]:
    """A config and those inside of it, by their paths."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from parts_of(value, f"{path}{name}.")


def windows_of(config: PretrainedConfig) -> dict[str, int]:
    """How far back tokens see, in the layers of a model that don't see all: by the name in the config."""
    return {
        f"{path}{name}": value
        for path, part in parts_of(config)
        for name, value in vars(part).items()
        if (name in ("attention_chunk_size", "local_attention") or ("window" in name and "layer" not in name))
        and isinstance(value, int)
        and value > 1
    }
