"""State dicts, in memory and in files."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel

from patcher import load_original_state_dict, original_state_dict
from tests.compatibility.columns import column
from tests.compatibility.outcomes import EXACT, compared, worst
from tests.compatibility.rows import Row
from tests.support.checkpoints import saved
from tests.support.comparing import logits

SUBJECT = "State dicts"


def zeroed(model: Any) -> Any:
    """The model with nothing in it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def holds(model: nn.Module, row: Row) -> str:
    """Whether a patched model has the weights of the stock one, under its names and in its order."""
    assert not any(parameter.is_meta for parameter in model.parameters())
    return compared(original_state_dict(model), dict(row.stock().state_dict()), rounding=0)


@column(SUBJECT, "`load_state_dict`, names of transformers")
def load_state_dict(row: Row, folder: Path) -> str:
    model, state_dict = zeroed(row.patched()), row.stock().state_dict()
    assert not any(model.load_state_dict(state_dict))
    other = zeroed(row.patched())
    other.load_state_dict(state_dict, assign=True)
    return worst(holds(model, row), holds(other, row))


@column(SUBJECT, "`load_state_dict`, names of the checkpoint")
def load_checkpoint(row: Row, folder: Path) -> str:
    model, tensors = zeroed(row.patched()), load_file(row.folder / "model.safetensors")
    assert not any(model.load_state_dict(tensors))
    return holds(model, row)


@column(SUBJECT, "in halves")
def halves(row: Row, folder: Path) -> str:
    model = zeroed(row.patched())
    for tensors in (load_file(row.folder / "model.safetensors"), row.stock().state_dict()):
        names = list(tensors)
        for half in (names[::2], names[1::2]):
            assert not model.load_state_dict({name: tensors[name] for name in half}, strict=False).unexpected_keys
        assert holds(model, row) == EXACT
        zeroed(model)
    model.load_state_dict(tensors)
    return holds(model, row)


@column(SUBJECT, "`original_state_dict` and back")
def original(row: Row, folder: Path) -> str:
    model, stock = row.patched(), zeroed(row.stock())
    stock.load_state_dict(original_state_dict(model))
    load_original_state_dict(zeroed(model), stock.state_dict())
    return worst(compared(dict(stock.state_dict()), dict(row.stock().state_dict()), rounding=0), holds(model, row))


@column(SUBJECT, "`save_pretrained(state_dict=)`")
def save_state_dict(row: Row, folder: Path) -> str:
    expected, model = saved(row.stock(), folder / "stock"), zeroed(row.patched())
    given: Mapping[str, Mapping[str, torch.Tensor]] = {
        "runtime": row.patched().state_dict(),
        "stock": row.stock().state_dict(),
        "original": original_state_dict(row.patched()),
    }
    for name, state_dict in given.items():
        assert saved(model, folder / name, state_dict=dict(state_dict)) == expected, name
    return EXACT


@column(SUBJECT, "`copy.deepcopy`, `pickle`, `torch.save`")
def copies(row: Row, folder: Path) -> str:
    model = row.patched()
    torch.save(model, folder / "model.pt")
    torch.save(model.state_dict(), folder / "state.pt")
    made = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(folder / "model.pt", weights_only=False),
    ]
    expected = logits(model, row.inputs())
    outcomes = [compared(logits(each, row.inputs()), expected, rounding=0) for each in made]
    for each in made:
        zeroed(each).load_state_dict(row.stock().state_dict())
    other = zeroed(row.patched())
    other.load_state_dict(torch.load(folder / "state.pt"))
    return worst(*outcomes, *(holds(each, row) for each in (*made, other)))


@column(SUBJECT, "a state dict on the meta device, `init_empty_weights`")
def empty(row: Row, folder: Path) -> str:
    with init_empty_weights():
        model = row.from_config(patcher=row.patcher)
    with torch.device("meta"), row.patcher.applied():
        other = row.from_config()
    for each in (model, other):
        each.load_state_dict(row.stock().state_dict(), assign=True)
    return worst(holds(model, row), holds(other, row))


@column(SUBJECT, "accelerate `save_state`")
def save_state(row: Row, folder: Path) -> str:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(row.patched())
    accelerator.save_state(str(folder))
    zeroed(model)
    accelerator.load_state(str(folder))
    return holds(accelerator.unwrap_model(model), row)


@column(SUBJECT, "accelerate `load_checkpoint_and_dispatch`")
def dispatched(row: Row, folder: Path) -> str:
    with init_empty_weights():
        model = row.from_config(patcher=row.patcher)
    return holds(load_checkpoint_and_dispatch(model, str(row.folder), device_map={"": "cpu"}), row)


@column(SUBJECT, "accelerate `save_model`, then dispatch")
def saved_by_accelerate(row: Row, folder: Path) -> str:
    Accelerator(cpu=True).save_model(row.patched(), str(folder))
    with init_empty_weights():
        model = row.from_config(patcher=row.patcher)
    return holds(load_checkpoint_and_dispatch(model, str(folder), device_map={"": "cpu"}), row)


@column(SUBJECT, "`torch.distributed.checkpoint`")
def distributed_checkpoint(row: Row, folder: Path) -> str:
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    dcp.save({"model": get_model_state_dict(row.patched())}, checkpoint_id=folder / "runtime")
    model = zeroed(row.patched())
    state_dict = get_model_state_dict(model)
    dcp.load({"model": state_dict}, checkpoint_id=folder / "runtime")
    set_model_state_dict(model, state_dict)
    # Fusions off and on: the names of transformers.
    dcp.save({"model": original_state_dict(row.patched())}, checkpoint_id=folder / "original")
    stock = zeroed(row.stock())
    found = get_model_state_dict(stock)
    dcp.load({"model": found}, checkpoint_id=folder / "original")
    set_model_state_dict(stock, found, options=StateDictOptions(full_state_dict=True))
    other = zeroed(row.patched())
    load_original_state_dict(other, found)
    return worst(
        holds(model, row),
        compared(dict(stock.state_dict()), dict(row.stock().state_dict()), rounding=0),
        holds(other, row),
    )


@column(SUBJECT, "`AveragedModel` (EMA)")
def averaged(row: Row, folder: Path) -> str:
    ours, theirs = AveragedModel(row.patched()), AveragedModel(row.stock())
    for average, model in ((ours, row.patched()), (theirs, row.stock())):
        for factor in (1.0, 0.5):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
            average.update_parameters(model)
    outcome = compared(original_state_dict(ours), dict(theirs.state_dict()), rounding=0)
    zeroed(ours).load_state_dict(theirs.state_dict())
    assert saved(ours.module, folder / "ours") == saved(theirs.module, folder / "theirs")
    return worst(outcome, compared(original_state_dict(ours), dict(theirs.state_dict()), rounding=0))


@column(SUBJECT, "`push_to_hub`")
def pushed(row: Row, folder: Path) -> str:
    assert uploaded(row.patched()) == uploaded(row.stock())
    return EXACT


def uploaded(model: Any) -> dict[str, bytes]:
    """What `push_to_hub` gives the client of the hub to send, by file."""
    from types import SimpleNamespace
    from unittest.mock import patch

    from huggingface_hub import HfApi, ModelCard

    sent: dict[str, bytes] = {}

    def commit(self: Any, operations: Any, **options: Any) -> None:
        for each in operations:
            content = each.path_or_fileobj
            sent[each.path_in_repo] = content if isinstance(content, bytes) else Path(content).read_bytes()

    with (
        patch.object(HfApi, "create_repo", lambda *args, **kwargs: SimpleNamespace(repo_id="someone/tiny")),
        patch.object(HfApi, "create_commit", commit),
        patch.object(ModelCard, "load", lambda *args, **kwargs: ModelCard("")),
    ):
        model.push_to_hub("someone/tiny")
    assert any(name.endswith(".safetensors") for name in sent)
    return sent
