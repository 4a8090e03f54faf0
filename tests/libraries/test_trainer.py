"""A patched model in the hands of `Trainer`: stopped and resumed, in many ways, and with what doesn't fit."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    Trainer,
    trainer_utils,
)
from transformers.core_model_loading import Transpose, WeightConverter

from patcher import PatchedWeightsError, Patcher, original_state_dict
from patcher.fusions import QKV
from tests.compatibility.outcomes import EXACT, compared
from tests.support import fresh, shared
from tests.support.checkpoints import same_checkpoint
from tests.support.replacements import JOINED, OWN, JoinedMLP, Turned, joining
from tests.support.tiny import tiny_llama_config, tiny_mixtral_config
from tests.support.trainer import FIRST_IS_BEST, MIDDLE, STEPS, batches, in_shards, losses, trained, trainer, weights

#: With dropout a resumed run has to go on with the random numbers of the one before.
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "Llama": lambda: tiny_llama_config(attention_dropout=0.2),
    "tied Llama": lambda: tiny_llama_config(attention_dropout=0.2, tie_word_embeddings=True),
    "Mixtral": lambda: tiny_mixtral_config(attention_dropout=0.2),
}
FUSED = Patcher(fusions=["qkv", "gate_up"])


TURNED = [WeightConverter("o_proj.weight", "o_proj.weight", [Transpose(0, 1)])]
PATCHERS = {
    "transposed": Patcher(module_mapping={"**.o_proj": Turned}, extra_weight_conversions=TURNED),
    "qkv": Patcher(fusions="qkv"),
    "qkv and gate_up": FUSED,
    "converting class mapping": JOINED,
    "converting class mapping and qkv": JOINED | Patcher(fusions="qkv"),
    "sequential_experts and qkv": Patcher(fusions=["sequential_experts", "qkv"]),
}
#: One of each kind: which parameters were joined doesn't matter to most of what follows.
FEW = [
    ("tied Llama", "qkv and gate_up"),
    ("Llama", "converting class mapping"),
    ("Mixtral", "sequential_experts and qkv"),
    ("Llama", "transposed"),
]
CASES = [
    *FEW,
    ("Llama", "qkv and gate_up"),
    ("tied Llama", "converting class mapping and qkv"),
    ("Mixtral", "qkv"),
]


@dataclass(frozen=True)
class Case:
    """A model, and the folder that its runs write below."""

    checkpoint: Path
    patcher: Patcher
    folder: Path

    def load(self, checkpoint: Path | None = None) -> Any:
        return AutoModelForCausalLM.from_pretrained(checkpoint or self.checkpoint, patcher=self.patcher)

    def stock(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.checkpoint)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: shared.checkpoint(config()) for name, config in CONFIGS.items()}


@pytest.fixture
def case(request: pytest.FixtureRequest, checkpoints: dict[str, Path], tmp_path: Path) -> Case:
    model, patcher = request.param
    return Case(checkpoints[model], PATCHERS[patcher], tmp_path)


def each(cases: list[tuple[str, str]], ci: list[tuple[str, str]] = FEW) -> pytest.MarkDecorator:
    """One run of a test for each case; those that CI leaves out are run at night."""
    marks = [() if case in ci else pytest.mark.nightly for case in cases]
    params = [pytest.param(case, id=" ".join(case), marks=mark) for case, mark in zip(cases, marks, strict=True)]
    return pytest.mark.parametrize("case", params, indirect=True)


@contextmanager
def said() -> Iterator[list[str]]:
    """What transformers logs of keys that it misses or doesn't know, but for tied heads: that is its own."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = record.getMessage()
            if " keys in the checkpoint" in line and "['lm_head.weight']" not in line:
                lines.append(line)

    handler, logger = Handler(), logging.getLogger("transformers.trainer")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def assert_same_run(one: Trainer, other: Trainer) -> None:
    assert len(losses(one)) == STEPS
    assert compared([losses(one), weights(one)], [losses(other), weights(other)], rounding=0) == EXACT


# --- resuming ------------------------------------------------------------------------------------------------------


@each(CASES)
def test_a_resumed_run_is_the_one_that_never_stopped(case: Case) -> None:
    whole = trained(case.load(), case.folder / "whole")
    middle = case.folder / "whole" / MIDDLE
    with said() as lines:
        assert_same_run(trained(case.load(), case.folder / "resumed", middle), whole)
    assert lines == []
    stock = trained(case.stock(), case.folder / "stock")
    compared([losses(whole), weights(whole)], [losses(stock), weights(stock)])


@each(FEW)
def test_the_best_model_is_loaded_at_the_end(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with said() as lines:
        run = trained(case.load(), case.folder / "files", **FIRST_IS_BEST)
    assert lines == []
    best = case.folder / "files" / MIDDLE
    assert run.state.best_model_checkpoint == str(best)
    assert compared(weights(run), original_state_dict(case.load(best)), rounding=0) == EXACT

    last = trainer(case.load(), case.folder / "shards")
    last.state.best_model_checkpoint = str(in_shards(best, case.folder / "best"))
    with said() as lines:
        last._load_best_model()
    assert lines == []
    assert compared(weights(last), weights(run), rounding=0) == EXACT


@each(FEW)
def test_weights_alone_are_resumed_with_a_new_optimizer(case: Case) -> None:
    trained(case.load(), case.folder / "run", save_only_model=True)
    middle = case.folder / "run" / MIDDLE
    assert not list(middle.glob("*optimizer*"))
    resumed = trained(case.load(), case.folder / "resumed", middle)
    loaded = trained(case.load(middle), case.folder / "loaded", middle)
    assert_same_run(resumed, loaded)
    assert not torch.equal(losses(resumed)[-1], losses(resumed)[0])


def test_stock_mixtral_resumes_wrong_by_itself(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Its `load_state_dict` doesn't know the names of its checkpoint. Where this fails, transformers has mended it."""
    case = Case(checkpoints["Mixtral"], PATCHERS["qkv"], tmp_path)
    outcomes = {}
    for name, load in {"stock": case.stock, "patched": case.load}.items():
        whole = trained(load(), tmp_path / name)
        with said() as lines:
            resumed = trained(load(), tmp_path / "resumed", tmp_path / name / MIDDLE)
        outcomes[name] = (
            max(float((value - weights(resumed)[key]).abs().max()) for key, value in weights(whole).items()),
            len(lines),
        )
    assert outcomes["patched"] == (0, 0)
    assert outcomes["stock"][0] > 1e-3
    assert outcomes["stock"][1] == 2


# --- ways to train -------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.1},
    "bfloat16": {"bf16": True},
}


@each(FEW)
def test_trained_with_accumulation(case: Case) -> None:
    _trained_in(case, "accumulation")


@each(FEW)
def alone_trained_in_bfloat16(case: Case) -> None:
    _trained_in(case, "bfloat16")


def test_trained_in_bfloat16() -> None:
    """In a process of its own: behind thousands of other tests a resumed run in bfloat16 was once another run.

    Which of them does that, to stock as well or not, isn't known.
    """
    done = fresh.run_pytest("-m", "libraries", "-o", "python_functions=alone_*", __file__)
    assert done.returncode == 0, done.stdout
    assert f"{len(FEW)} passed" in done.stdout


def _trained_in(case: Case, way: str) -> None:
    whole = trained(case.load(), case.folder / "whole", **WAYS[way])
    assert_same_run(trained(case.load(), case.folder / "resumed", case.folder / "whole" / MIDDLE, **WAYS[way]), whole)
    stock = trained(case.stock(), case.folder / "stock", **WAYS[way])
    rounding = 1e-2 if way == "bfloat16" else 1e-5
    compared([losses(whole), weights(whole)], [losses(stock), weights(stock)], rounding=rounding)


@each(FEW)
def test_trained_with_gradient_checkpointing(case: Case) -> None:
    def checkpointing(model: Any) -> Any:
        # The name of 5.23, and the one before.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        assert model.is_gradient_checkpointing
        return model

    whole = trained(checkpointing(case.load()), case.folder / "whole")
    resumed = trained(checkpointing(case.load()), case.folder / "resumed", case.folder / "whole" / MIDDLE)
    assert_same_run(resumed, whole)
    assert_same_run(trained(case.load(), case.folder / "without"), whole)


@each(FEW)
def test_evaluated_and_saved_as_stock(case: Case) -> None:
    run, stock = trainer(case.load(), case.folder / "run"), trainer(case.stock(), case.folder / "stock")
    compared(torch.tensor(run.evaluate()["eval_loss"]), torch.tensor(stock.evaluate()["eval_loss"]))
    found, expected = (torch.from_numpy(each.predict(batches(stock.model)).predictions) for each in (run, stock))  # type: ignore[arg-type]
    compared(found, expected)
    for each_run in (run, stock):
        each_run.save_model()
    assert same_checkpoint(case.folder / "run", case.folder / "stock")


# --- shards --------------------------------------------------------------------------------------------------------


@each(FEW[:-1])  # shards of what is transposed may be of either layout, so they are refused
def test_shards_are_loaded_strictly(case: Case) -> None:
    """transformers' own function, which compares names with those of the model in memory."""
    other = case.load()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1
    other.save_pretrained(case.folder / "one")
    shards = in_shards(case.folder / "one", case.folder / "shards")
    model = case.load()
    found = trainer_utils.load_sharded_checkpoint(model, shards, strict=True)
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert compared(original_state_dict(model), original_state_dict(other), rounding=0) == EXACT


@each(FEW, ci=FEW[:1])
def test_what_shards_lack_is_named_as_in_the_checkpoint(case: Case) -> None:
    case.load().save_pretrained(case.folder / "one")
    shards = in_shards(case.folder / "one", case.folder / "shards")
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    key = next(key for key in index["weight_map"] if key.endswith((".up_proj.weight", ".experts.2.w1.weight")))
    file = shards / index["weight_map"].pop(key)
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_file(file)
    del tensors[key]
    save_file(tensors | {"nobody.weight": torch.ones(1)}, file)
    model = case.load()
    before = original_state_dict(model)

    assert trainer_utils.load_sharded_checkpoint(model, shards, strict=False).missing_keys == [key]
    with pytest.raises(RuntimeError, match=rf"Missing key\(s\): {re.escape(key)}\.$"):
        trainer_utils.load_sharded_checkpoint(model, shards)
    assert compared(original_state_dict(model), before, rounding=0) == EXACT

    index["weight_map"]["nobody.weight"] = file.name
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert trainer_utils.load_sharded_checkpoint(model, shards, strict=False).unexpected_keys == ["nobody.weight"]
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\): nobody\.weight\.$"):
        trainer_utils.load_sharded_checkpoint(model, shards)


# --- the optimizer of other parameters -----------------------------------------------------------------------------

SWAPPED = Patcher(
    {"LlamaMLP": JoinedMLP}, extra_weight_conversions=joining("mlp.up_proj.weight", "mlp.gate_proj.weight")
)
BY_LAYER = [Patcher(fusions=[QKV(modules=f"model.layers.{layer}.self_attn")]) for layer in (0, 1)]


class UpBeforeGate(nn.Module):
    """`LlamaMLP`, with parameters of one shape in another order."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


ORDERED = Patcher({"LlamaMLP": UpBeforeGate})


@pytest.mark.parametrize(
    ("before", "after", "there", "here"),
    [
        pytest.param(None, FUSED, "q_proj.weight", "qkv_proj.weight", id="switched on"),
        pytest.param(FUSED, None, "qkv_proj.weight", "q_proj.weight", id="switched off"),
        pytest.param(*BY_LAYER, "self_attn.qkv_proj", "layers.0.self_attn.q_proj", id="in another layer"),
        pytest.param(JOINED, SWAPPED, "gate_up_proj.weight", r"\S+ \(\S*up_proj.weight, \S*gate", id="otherwise"),
        pytest.param(None, ORDERED, "gate_proj.weight", "up_proj.weight", id="order"),
        pytest.param(ORDERED, None, "up_proj.weight", "gate_proj.weight", id="order, back"),
    ],
)
def test_the_optimizer_of_other_parameters_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, before: Any, after: Any, there: str, here: str
) -> None:
    """torch looks at their number, and its fused AdamW at their memory: of one number and size they would pass."""

    def load(patcher: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(checkpoints["Llama"], patcher=patcher)

    trained(load(before), tmp_path)
    with pytest.raises(PatchedWeightsError, match=rf"other parameters: number \d+ is \S*{there}.*, and \S*{here}"):
        trained(load(after), tmp_path / "resumed", tmp_path / MIDDLE)


def test_the_optimizer_of_a_stock_run_fits_where_parameters_stay_as_they_are(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    case = Case(checkpoints["Llama"], OWN, tmp_path)
    stock = trained(case.stock(), tmp_path / "stock")
    assert_same_run(trained(case.load(), tmp_path / "on", tmp_path / "stock" / MIDDLE), stock)
    trained(case.load(), tmp_path / "patched")
    assert_same_run(trained(case.stock(), tmp_path / "off", tmp_path / "patched" / MIDDLE), stock)


def test_activation_checkpointing_may_be_switched_between_runs(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As on stock: its wrappers are in the names of parameters, and not in those of state dicts."""

    def wrapped(model: Any) -> Any:
        model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
        return model

    fused, own = (Case(checkpoints["Llama"], patcher, tmp_path) for patcher in (FUSED, OWN))
    whole = trained(wrapped(fused.load()), tmp_path / "fused")
    assert_same_run(trained(fused.load(), tmp_path / "off", tmp_path / "fused" / MIDDLE), whole)
    stock = trained(own.stock(), tmp_path / "stock")
    assert_same_run(trained(wrapped(own.load()), tmp_path / "own", tmp_path / "stock" / MIDDLE), stock)


def test_what_was_noted_of_another_run_is_gone_with_its_checkpoint(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    case = Case(checkpoints["Llama"], FUSED, tmp_path)
    trained(case.load(), tmp_path)
    stock = trained(case.stock(), tmp_path)
    assert_same_run(trained(case.stock(), tmp_path / "resumed", tmp_path / MIDDLE), stock)


def test_parameters_that_are_not_trained_may_lie_as_they_like(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    case = Case(checkpoints["Llama"], FUSED, tmp_path)

    def head_only(model: Any) -> Any:
        model.requires_grad_(False).lm_head.requires_grad_(True)
        return model

    stock = trained(head_only(case.stock()), tmp_path / "stock")
    switched = trained(head_only(case.load()), tmp_path / "on", tmp_path / "stock" / MIDDLE)
    compared([losses(switched), weights(switched)], [losses(stock), weights(stock)])
    trained(head_only(case.load()), tmp_path / "patched")
    back = trained(head_only(case.stock()), tmp_path / "off", tmp_path / "patched" / MIDDLE)
    compared([losses(back), weights(back)], [losses(stock), weights(stock)])


IMPORTED_LATER = """
import patcher
patcher.install()
from transformers import Trainer
from transformers.trainer import load_sharded_checkpoint as one
from transformers.trainer_utils import load_sharded_checkpoint as other
hooked = [one, other, Trainer._save_optimizer_and_scheduler, Trainer._load_optimizer_and_scheduler]
print(all(hasattr(each, "__wrapped__") for each in hooked))
"""


def test_a_trainer_that_is_imported_later_is_hooked_then() -> None:
    assert fresh.run(IMPORTED_LATER).stdout == "True\n"
