"""Models that `fully_shard` has split: trained, saved; state dicts and checkpoints of torch in both layouts."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from patcher import (
    fused_parameters,
    load_original_optimizer_state_dict,
    load_original_state_dict,
    original_optimizer_state_dict,
    original_state_dict,
    report,
)
from tests.compatibility.outcomes import compared
from tests.compatibility.rows import ROWS, Row
from tests.distributed.comparing import assert_same_weights
from tests.support.checkpoints import files
from tests.support.processes import two_processes
from tests.support.splitting import (
    ROUNDING,
    adamw,
    all_whole,
    batch,
    in_double_of,
    logits,
    split_by_hand,
    train,
    zeroed,
)

#: Of those whose parameters are others than in transformers.
CONVERTED = [row for row in ROWS if row.joins and row.name != "`gate_up`"]  # which is as `qkv` here
#: One of rows, and one of experts.
TWO = [row for row in ROWS if row.name in ("`qkv`", "`sequential_experts`")]


def _trained(row: Row, model: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = adamw(model)
    train(model, optimizer, batch(row))
    return model, optimizer


def _knows_itself(rows: list[Row], folder: Path, rank: int) -> None:
    for number, row in enumerate(rows):
        model = row.patched()
        before = fused_parameters(model), report(model).to_dict()["replaced"], report(model).to_dict()["fused"]
        split_by_hand(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), row.name
        after = report(model).to_dict()
        assert (fused_parameters(model), after["replaced"], after["fused"]) == before, row.name
        _trained(row, model)
        model.save_pretrained(folder / str(number))
        dist.barrier()
        again = row.load(folder / str(number), patcher=row.patcher)
        compared(original_state_dict(again), original_state_dict(model), rounding=0)

        fresh = split_by_hand(row.from_config(patcher=row.patcher))  # its conversions are found when it is saved
        fresh.save_pretrained(folder / f"{number} fresh")
        dist.barrier()
        compared(dict(row.load(folder / f"{number} fresh").state_dict()), original_state_dict(fresh), rounding=0)


def _looked_at(rows: list[Row], folder: Path, rank: int) -> None:
    for row in rows:
        stock, inputs = row.stock(), batch(row)
        model, optimizer = _trained(row, split_by_hand(row.patched()))
        before = original_optimizer_state_dict(model, optimizer)["state"]
        pieces = get_model_state_dict(split_by_hand(row.stock()))

        def look(model: Any = model, inputs: Any = inputs) -> Any:
            """Leaves whole parameters in the root."""
            logits(model, inputs)
            assert not all(isinstance(parameter, DTensor) for parameter in model.parameters())
            return model

        compared(original_optimizer_state_dict(look(), optimizer)["state"], before, rounding=0)
        load_original_state_dict(look(), stock.state_dict())
        assert_same_weights(look(), stock, rounding=0)
        assert not any(look().load_state_dict(dict(pieces)))
        assert_same_weights(look(), stock, rounding=0)
        look().save_pretrained(folder / row.name)
        dist.barrier()
        assert files(folder / row.name) == files(row.folder)


def test_after_a_forward_without_gradients(tmp_path: Path) -> None:
    assert [row.folder for row in TWO]
    two_processes(partial(_looked_at, TWO, tmp_path), tmp_path)


def test_what_a_model_knows_of_itself_outlives_the_split(tmp_path: Path) -> None:
    assert [row.folder for row in CONVERTED]
    two_processes(partial(_knows_itself, CONVERTED, tmp_path), tmp_path)


# --- checkpoints of torch --------------------------------------------------------------------------------------------


def _checkpoints(rows: list[Row], folder: Path, rank: int) -> None:
    for number, row in enumerate(rows):
        double, inputs = in_double_of(row), batch(row)

        def made(*, patched: bool, row: Row = row, double: dict[str, Any] = double) -> tuple[Any, Any]:
            """A split model of other weights, and its optimizer, which has been used."""
            model = split_by_hand(row.patched(**double) if patched else row.stock(**double))
            return _trained(row, model)

        # In the runtime layout, by what torch gives.
        model, optimizer = made(patched=True)
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / f"{number} runtime")
        other = split_by_hand(row.patched(**double))
        its = adamw(other)
        state = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, its)}
        dcp.load(state, checkpoint_id=folder / f"{number} runtime")
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, its, state["optimizer"])
        compared(all_whole(dict(other.state_dict())), all_whole(dict(model.state_dict())), rounding=0)
        losses = train(other, its, inputs), train(model, optimizer, inputs)
        assert losses[0] == losses[1], row.name

        # A run of stock, which a fused one resumes.
        stock, theirs = made(patched=False)
        state = {"model": get_model_state_dict(stock), "optimizer": get_optimizer_state_dict(stock, theirs)}
        dcp.save(state, checkpoint_id=folder / f"{number} stock")
        state = {
            "model": original_state_dict(model),
            "optimizer": original_optimizer_state_dict(model, optimizer),
        }
        dcp.load(state, checkpoint_id=folder / f"{number} stock")
        load_original_state_dict(model, state["model"])
        load_original_optimizer_state_dict(model, optimizer, state["optimizer"])
        assert_same_weights(model, stock, rounding=0)
        assert train(model, optimizer, inputs) == pytest.approx(train(stock, theirs, inputs), abs=ROUNDING), row.name
        assert_same_weights(model, stock)

        # And back.
        state = {"model": original_state_dict(model), "optimizer": original_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / f"{number} back")
        state = {"model": get_model_state_dict(stock), "optimizer": get_optimizer_state_dict(stock, theirs)}
        dcp.load(state, checkpoint_id=folder / f"{number} back")
        set_model_state_dict(stock, state["model"])
        set_optimizer_state_dict(stock, theirs, state["optimizer"])
        assert_same_weights(model, stock, rounding=0)
        assert train(model, optimizer, inputs) == pytest.approx(train(stock, theirs, inputs), abs=ROUNDING), row.name
        assert_same_weights(model, stock)


def test_checkpoints_of_torch_are_resumed_in_both_layouts(tmp_path: Path) -> None:
    assert [row.folder for row in TWO]
    two_processes(partial(_checkpoints, TWO, tmp_path), tmp_path)


# --- state dicts -----------------------------------------------------------------------------------------------------


def _state_dicts(rows: list[Row], rank: int) -> None:
    for row in rows:
        stock = row.stock()
        pieces = get_model_state_dict(split_by_hand(row.stock()))
        model = split_by_hand(row.patched())
        assert not any(zeroed(model).load_state_dict(dict(pieces)))
        assert_same_weights(model, stock, rounding=0)
        names = list(pieces)
        zeroed(model)
        for half in (names[::2], names[1::2]):  # the parts of one tensor in different ones
            assert not model.load_state_dict({name: pieces[name] for name in half}, strict=False).unexpected_keys
        assert_same_weights(model, stock, rounding=0)
        load_original_state_dict(zeroed(model), stock.state_dict())
        assert_same_weights(model, stock, rounding=0)
        load_original_state_dict(zeroed(model), load_file(row.folder / "model.safetensors"))  # names of the checkpoint
        assert_same_weights(model, stock, rounding=0)

        # Never materialized before: on meta, then at once with values.
        for assign in (False, True):
            with torch.device("meta"):
                empty = split_by_hand(row.from_config(patcher=row.patcher))
            if not assign:
                empty.to_empty(device="cpu")
            load_original_state_dict(empty, stock.state_dict(), assign=assign)
            assert all(isinstance(parameter, DTensor) for parameter in empty.parameters())
            assert_same_weights(empty, stock, rounding=0)

        # What torch refuses of the stock model, and what it wouldn't see: raised in both processes.
        with pytest.raises(RuntimeError, match="these are whole tensors, and the parameter is split over processes"):
            model.load_state_dict(stock.state_dict())
        with pytest.raises(RuntimeError, match="are both in the state dict, and one is made of the other"):
            set_model_state_dict(model, dict(stock.state_dict()), options=StateDictOptions(full_state_dict=True))
        with pytest.raises(RuntimeError, match="split over processes" if rank == 0 else "Missing key"):
            set_model_state_dict(
                model,
                dict(stock.state_dict()) if rank == 0 else {},
                options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
            )
        mixed = {**pieces, **{name: stock.state_dict()[name] for name in names[::2]}}
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor|these are whole tensors"):
            model.load_state_dict(mixed)
        load_original_state_dict(zeroed(model), mixed)
        assert_same_weights(model, stock, rounding=0)


def test_state_dicts_in_both_layouts(tmp_path: Path) -> None:
    assert [row.folder for row in CONVERTED]
    two_processes(partial(_state_dicts, CONVERTED), tmp_path)


def _tied(folder: Path, rank: int) -> None:
    from transformers import AutoModelForCausalLM

    from patcher import Patcher

    patcher = Patcher(fusions=["qkv", "gate_up"])
    model = split_by_hand(AutoModelForCausalLM.from_pretrained(folder / "tied", patcher=patcher))
    model.save_pretrained(folder / "saved")
    dist.barrier()
    assert files(folder / "saved") == files(folder / "tied")


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    from tests.support.tiny import save_tiny, tiny_llama_config

    (tmp_path / "tied").mkdir()
    save_tiny(tiny_llama_config(tie_word_embeddings=True), tmp_path / "tied")
    two_processes(partial(_tied, tmp_path), tmp_path)


# --- the FullyShardedDataParallel before `fully_shard` ---------------------------------------------------------------


def _flat(row: Row, folder: Path, rank: int) -> None:
    warnings.simplefilter("ignore")  # it is deprecated
    double, inputs = in_double_of(row), batch(row)
    split = partial(
        FullyShardedDataParallel,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    model, stock = split(row.patched(**double)), split(row.stock(**double))
    found, expected = (train(each, adamw(each), inputs) for each in (model, stock))
    assert found == pytest.approx(expected, abs=ROUNDING)
    whole = stock.state_dict()
    compared(original_state_dict(model), dict(whole), rounding=ROUNDING)
    for name, each in {"ours": model, "stock": stock}.items():
        state_dict = each.state_dict()
        if rank == 0:
            each.module.save_pretrained(folder / name, state_dict=state_dict)
    if rank == 0:
        found, expected = (load_file(folder / name / "model.safetensors") for name in ("ours", "stock"))
        compared(found, expected, rounding=ROUNDING)
    dist.barrier()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        load_original_state_dict(model, row.stock(**double).state_dict())
        compared(original_state_dict(model), dict(row.stock(**double).state_dict()), rounding=0)


def test_flat_pieces_are_put_together_too(tmp_path: Path) -> None:
    assert TWO[0].folder
    two_processes(partial(_flat, TWO[0], tmp_path), tmp_path)
