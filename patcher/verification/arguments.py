"""Every argument of `forward` that stock reacts to, found by trying values of its type in the shapes of the inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from patcher.compat.models import TransformersKwargs
from patcher.verification.comparing import Pair, Reference
from patcher.verification.numerics import differences
from patcher.verification.passes import Pass, parameters_of

#: Compared otherwise: caches in steps and chunks, masks as padding.
_LEFT_OUT = {"cache", "past_key_values", "cache_params", "encoder_outputs", "input_ids", "args"}
#: Taken by some attention kernels only.
_OF_KERNELS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "is_causal", "seq_idx"}
#: Not tried again beside labels.
_WITHOUT_LABELS = {"logits_to_keep", "position_ids", "inputs_embeds", "labels", "return_dict"}


def reactions(pair: Pair, base: Pass) -> Iterator[Reference]:
    """The runs with one more argument to which stock gives something else, or that give the loss for labels.

    Where there is a loss, each argument is tried beside labels as well: some say how it is computed.
    """
    (plain,) = pair.references([base])
    labelled: list[Reference] = []
    for reference in _reacting(pair, plain, _names(pair.stock)):
        labelled += [reference] if "labels" in reference.run.arguments else []
        yield reference
    for reference in labelled[:1]:
        yield from _reacting(pair, reference, _names(pair.stock, _WITHOUT_LABELS), "loss")


def _reacting(pair: Pair, base: Reference, names: Iterable[tuple[str, str]], output: str = "") -> Iterator[Reference]:
    """Those to which a certain output reacts, by default any."""

    def of_it(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: each for name, each in values.items() if output in name and not name.endswith(" after the call")}

    for name, annotation in names:
        given = dict(base.run.arguments)
        values = _values(pair.stock, given, name, annotation)
        if name == "inputs_embeds":
            given.pop("input_ids", None)  # in the place of which it is
        for text, value in values.items():
            run = Pass("forward", given | {name: value}, base.run.path, f"{base.run.name}, {name}: {text}")
            found = list(pair.references([run]))
            found = [one for one in found if differences(of_it(one.expected), of_it(base.expected)).absolute > 0]
            yield from found
            if found and name not in _ALL:
                break


def recording(stock: nn.Module, base: Pass) -> Iterator[Pass]:
    """A run with each argument that has something recorded, then with all of them."""
    names = [name for name, kind in _names(stock) if name.startswith("output_") and "bool" in kind]
    for some in [*([name] for name in names), names] if len(names) > 1 else [names]:
        title = f"{base.name} with {', '.join(some)}"
        yield replace(base, arguments=base.arguments | dict.fromkeys(some, True), title=title)


def _names(stock: nn.Module, left_out: Container[str] = ()) -> list[tuple[str, str]]:
    """The arguments by name, with the texts of their types; those of all models where `forward` takes any keyword."""
    found: dict[str, str] = {"return_dict": "bool"}
    for name, parameter in parameters_of(stock).items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            of_all = {key: str(kind) for key, kind in TransformersKwargs.__annotations__.items()}
            others = of_all | {"shift_labels": "torch.LongTensor"}
            found = {key: kind for key, kind in others.items() if key not in _OF_KERNELS} | found
        elif name not in _LEFT_OUT:
            found[name] = str(parameter.annotation)
    return [(name, kind) for name, kind in found.items() if name not in left_out]


def _values(stock: Any, given: dict[str, Any], name: str, annotation: str) -> dict[str, Any]:
    """Values for an argument: by its name where that says what it means, else by its type."""
    ids = given.get("input_ids")
    leading = next((value for value in given.values() if isinstance(value, torch.Tensor) and value.dim()), None)
    if (name in given and name != "use_cache") or leading is None or (name == "attention_mask" and ids is not None):
        return {}
    found: dict[str, Any] = {"True": True, "False": False} if "bool" in annotation else {}
    found |= {"1": 1, "3": 3} if "int" in annotation else {}
    found |= {"0.5": 0.5} if "float" in annotation else {}
    if "Tensor" not in annotation and "_empty" not in annotation:
        return found
    if name == "inputs_embeds" and ids is not None:
        with suppress(Exception), torch.no_grad():
            found["those of other tokens"] = stock.get_input_embeddings()(ids.flip(-1)) * 1.5
    if name in _BY_NAME and ids is not None:
        found |= _BY_NAME[name](ids)
    if name in (*_BY_NAME, "inputs_embeds"):
        return found
    # By the type alone: numbers of every usual shape. Stock refuses what doesn't fit.
    generator = torch.Generator().manual_seed(1)
    rows, length = leading.shape[0], leading.shape[1] if leading.dim() > 1 else 1
    width = getattr(stock.config.get_text_config(), "hidden_size", None) or 1
    for shape in ((rows, length), (rows,), (rows, length, width), (1, length), (rows, 1)):
        size = torch.Size(shape)
        if "Float" not in annotation and len(shape) < 3:
            found[f"ones and zeros of {list(shape)}"] = ((torch.arange(size.numel()) // 2 + 1) % 2).reshape(size)
        if not any(kind in annotation for kind in ("Long", "Int", "Bool")):
            found[f"numbers of {list(shape)}"] = torch.randn(size, generator=generator)
    return found


def _later_positions(ids: torch.Tensor) -> dict[str, torch.Tensor]:
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
        "the ids, of which some don't count": ignored,
        "a class a token": classes,
        "a class a row": classes[:, 0],
        "a number a row": classes[:, 0].float(),
    }


#: What values mean by the name of the argument: made of the ids; and the arguments of which every value is compared,
#: not the first that stock reacts to alone.
_BY_NAME: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "position_ids": _later_positions,
    "labels": _labels,
    "next_sentence_label": lambda ids: {text: value for text, value in _labels(ids).items() if value.dim() == 1},
    "shift_labels": lambda ids: {"the ids before": ids.roll(1, -1)},
    "logits_to_keep": lambda ids: {"two indices": torch.tensor([0, 2])},
    "num_items_in_batch": lambda ids: {"a tensor": torch.tensor(7)},
}
_ALL = ("position_ids", "logits_to_keep")
