"""Any run that stock can make goes on with other fusions as it would have without, or is refused: never otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import nn, optim
from transformers import AutoModelForCausalLM

from patcher import (
    PatchedWeightsError,
    Patcher,
    load_original_optimizer_state_dict,
    load_original_state_dict,
    original_optimizer_state_dict,
    original_state_dict,
)
from tests.compatibility.outcomes import compared
from tests.support.resuming import outcome, through_a_file, train
from tests.support.tiny import tiny_inputs, tiny_llama_config

LAYER = "model.layers.0."
#: fusion -> what it joins
JOINS = {
    "qkv": {f"{LAYER}self_attn.qkv_proj.weight": tuple(f"{LAYER}self_attn.{each}_proj.weight" for each in "qkv")},
    "gate_up": {f"{LAYER}mlp.gate_up_proj.weight": tuple(f"{LAYER}mlp.{each}_proj.weight" for each in ("gate", "up"))},
}
CONFIG = tiny_llama_config(num_hidden_layers=1, hidden_size=16, intermediate_size=24)
INPUTS = tiny_inputs(CONFIG) | {"labels": tiny_inputs(CONFIG)["input_ids"]}
FUSIONS = [(), ("qkv",), ("gate_up",), ("qkv", "gate_up")]
KINDS: list[Callable[[Any], optim.Optimizer]] = [
    lambda groups: optim.AdamW(groups, amsgrad=True),
    lambda groups: optim.SGD(groups, lr=1e-2, momentum=0.9),
    lambda groups: optim.RMSprop(groups, momentum=0.5),
]
#: the options of three groups; what is in the last one is in no optimizer
GROUPS = [{"lr": 1e-2, "weight_decay": 0.1}, {"lr": 1e-3, "weight_decay": 0.0}, None]


def build(fusions: tuple[str, ...]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float64, patcher=Patcher(fusions=fusions))


MODELS = {fusions: build(fusions) for fusions in FUSIONS}
NAMES = [name for name, _ in MODELS[()].named_parameters()]


class Run:
    """A model and an optimizer, as a table says: parameter of stock -> its group, and whether it is frozen."""

    def __init__(self, fusions: tuple[str, ...], table: dict[str, tuple[int, bool]], make: Any) -> None:
        self.model = copy.deepcopy(MODELS[fusions])
        made = {name: parts for fusion in fusions for name, parts in JOINS[fusion].items()}
        #: whether each parameter is in one group, and frozen or not; of what is in no optimizer that doesn't matter
        self.can_be = True
        groups: list[list[nn.Parameter]] = [[], [], []]
        for name, parameter in self.model.named_parameters():
            told = [table[part] for part in made.get(name, (name,))]
            self.can_be = self.can_be and len({(place, frozen and place != 2) for place, frozen in told}) == 1
            groups[told[0][0]].append(parameter)
            parameter.requires_grad_(not told[0][1])
        self.optimizer = make(
            [{"params": held, **options} for held, options in zip(groups, GROUPS, strict=True) if options and held]
        )

    def train(self, steps: int) -> None:
        train(self.model, self.optimizer, INPUTS, steps)


TABLES = st.builds(
    lambda default, changes: {name: next((value for key, value in changes if key in name), default) for name in NAMES},
    st.tuples(st.sampled_from([0, 1]), st.booleans()),
    st.lists(
        st.tuples(
            st.sampled_from([*NAMES, "self_attn", "mlp", "norm"]), st.tuples(st.sampled_from([0, 1, 2]), st.booleans())
        ),
        max_size=4,
    ),
).filter(
    lambda table: (
        any(place != 2 for place, _ in table.values())
        and any(not frozen and place != 2 for place, frozen in table.values())
    )
)


#: The parts of a joined weight are in no optimizer, and one of them alone is frozen.
UNTRAINED = {name: (2, "q_proj" in name) if "self_attn" in name else (0, False) for name in NAMES}


@settings(max_examples=40, deadline=None)
@example(begin=(), end=("qkv",), make=KINDS[0], table=UNTRAINED, steps=(1, 1))
@example(begin=("qkv",), end=(), make=KINDS[1], table=UNTRAINED, steps=(1, 1))
@given(
    begin=st.sampled_from(FUSIONS),
    end=st.sampled_from(FUSIONS),
    make=st.sampled_from(KINDS),
    table=TABLES,
    steps=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_it_goes_on_as_stock_or_is_refused(
    begin: tuple[str, ...], end: tuple[str, ...], make: Any, table: dict[str, Any], steps: tuple[int, int]
) -> None:
    run, other, stock = (Run(fusions, table, make) for fusions in (begin, end, ()))
    if not run.can_be:
        begin, run = (), Run((), table, make)  # it began without
    run.train(steps[0])
    state = through_a_file(original_optimizer_state_dict(run.model, run.optimizer))
    load_original_state_dict(other.model, original_state_dict(run.model))
    if not other.can_be:
        with pytest.raises(PatchedWeightsError):
            load_original_optimizer_state_dict(other.model, other.optimizer, state)
        return
    load_original_optimizer_state_dict(other.model, other.optimizer, state)
    other.train(steps[1])
    stock.train(sum(steps))
    compared(outcome(other.model, other.optimizer), outcome(stock.model, stock.optimizer), rounding=1e-12)
