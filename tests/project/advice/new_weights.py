"""Weights that patchers add, and patchers as files."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import LayerNorm

from patcher import Patcher, load_new_weights, save_new_weights
from tests.project.advice import Place, Steps, advice, load, same, written

CENTRED = Patcher({"LlamaRMSNorm": LayerNorm}, new_weights=r"norm\.bias$", name="centred")


def trained(at: Place, patcher: Patcher = CENTRED) -> Any:
    model = load(at.llama, patcher)
    with torch.no_grad():
        model.model.norm.bias.fill_(0.5)
    return model


@advice(
    "They are of {}. Load the model with that patcher, from_pretrained(..., patcher=patcher); or leave them out: "
    "patcher=Patcher(dropped_weights={})."
)
def new_weights_that_a_load_has_no_place_for(at: Place) -> Steps:
    trained(at).save_pretrained(at.tmp)
    said = yield lambda: load(at.tmp)
    assert torch.equal(load(at.tmp, CENTRED).model.norm.bias, torch.full((64,), 0.5))
    dropping = written(said, r"patcher=(Patcher\(dropped_weights=.*\))\.")
    assert not any(re.search(each, "model.layers.0.self_attn.q_proj.bias") for each in dropping.dropped_weights)
    assert same(load(at.tmp, dropping), at.llama)


@advice(
    "{} has metadata {} that can't be read ({}). Save the model again with the patcher that it is of.",
)
def metadata_that_can_not_be_read(at: Place) -> Steps:
    trained(at).save_pretrained(at.tmp)
    file = at.tmp / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "patcher_new_weights": "{"})
    yield lambda: load(at.tmp, CENTRED)
    trained(at).save_pretrained(at.tmp)
    load(at.tmp, CENTRED)


@advice(
    "{} has no weights that a patcher declares as new, so there is nothing to save. Declare them: Patcher(..., "
    "new_weights=[...])."
)
def nothing_new_to_save(at: Place) -> Steps:
    yield lambda: save_new_weights(load(at.llama, Patcher(fusions="qkv")), at.tmp)
    save_new_weights(load(at.llama, CENTRED), at.tmp)


@advice("Save and load the new weights of each: save_new_weights(model.{}, folder).")
def new_weights_of_a_part(at: Place) -> Steps:
    model = load(at.llama)
    model.model = trained(at).model
    yield lambda: save_new_weights(model, at.tmp)
    save_new_weights(model.model, at.tmp)
    load_new_weights(load(at.llama, CENTRED).model, at.tmp)


@advice("{} can't be read ({}: {}). Give the folder that patcher.save_new_weights(model, folder) has written.")
def a_folder_without_new_weights(at: Place) -> Steps:
    model = trained(at)
    yield lambda: load_new_weights(model, at.tmp)
    save_new_weights(model, at.tmp)
    load_new_weights(load(at.llama, CENTRED), at.tmp)


@advice(
    "The weights in {} are those of a patcher with other {} than that of the model. Load the model with "
    "patcher=Patcher.load({}, allowed=[...])."
)
def new_weights_of_another_patcher(at: Place) -> Steps:
    save_new_weights(trained(at, CENTRED | Patcher(fusions="qkv")), at.tmp)
    said = yield lambda: load_new_weights(trained(at), at.tmp)
    patcher = written(said.replace("[...]", "[LayerNorm]"), r"patcher=(Patcher\.load\(.*\))\.", LayerNorm=LayerNorm)
    load_new_weights(load(at.llama, patcher), at.tmp)


@advice("Nothing was written. Give a folder that was saved from a model of the same config.")
def new_weights_of_another_size(at: Place) -> Steps:
    save_new_weights(trained(at), at.tmp)
    file = at.tmp / "new_weights.safetensors"
    save_file({name: value[1:].clone() for name, value in load_file(file).items()}, file)
    yield lambda: load_new_weights(trained(at), at.tmp)
    save_new_weights(trained(at), at.tmp)
    load_new_weights(trained(at), at.tmp)


@advice(
    "{} is not a folder, and no {} of such a repo on the hub can be fetched ({}: {}). Write the path of a folder in "
    "which Patcher.save has put one.",
    "{} is not the file of a patcher ({}: {}). Write it with Patcher.save.",
)
def a_patcher_that_is_no_file(at: Place) -> Steps:
    yield lambda: Patcher.load(at.tmp / "nowhere")
    (at.tmp / "patcher.json").write_text(json.dumps({"schema": 1})[1:])
    yield lambda: Patcher.load(at.tmp)
    Patcher(fusions="qkv").save(at.tmp)
    assert Patcher.load(at.tmp) == Patcher(fusions="qkv")
