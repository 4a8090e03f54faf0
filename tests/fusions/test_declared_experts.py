"""Experts by what their class declares: every declaration computes the same with layers; anything else is refused."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.moe import batched_mm_experts_forward, use_experts_implementation
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from patcher.errors import PatchConflictError
from patcher.fusions.fused_module import fused_class_of
from patcher.fusions.sequential_experts import SequentialExperts
from tests.support.fusing import fuse
from tests.support.tiny import tiny_mixtral_config

HIDDEN, INNER, EXPERTS = 8, 6, 4
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


class Stacks(nn.Module):
    """Stacks as some flags declare them, and the forward of transformers that goes by these flags."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rows = {"gate_up_proj": 2 * INNER} if config.has_gate else {"up_proj": INNER}
        for name, (inputs, outputs) in {
            **{name: (HIDDEN, many) for name, many in rows.items()},
            "down_proj": (INNER, HIDDEN),
        }.items():
            shape = (inputs, outputs) if config.is_transposed else (outputs, inputs)
            self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *shape)))
            if config.has_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, outputs)))
        self.num_experts = EXPERTS
        self.act_fn = nn.SiLU()
        self.post_expert_norm = nn.LayerNorm(HIDDEN)
        self._is_concatenated = config.is_concatenated

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        raise AssertionError("its own forward is of no interest here")

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1) if self._is_concatenated else (gate_up[..., ::2], gate_up[..., 1::2])
        return self.act_fn(gate) * (up + 1)


def config_of(**flags: bool) -> Any:
    return SimpleNamespace(_experts_implementation="eager", **flags)


def listed(stock: nn.Module, *, all_tokens: bool = False) -> Any:
    """The fused copy."""
    fusion = SequentialExperts(all_tokens=all_tokens)
    assert fusion.refusal(stock) == ""
    return fuse(fusion, copy.deepcopy(stock), fused_class_of(fusion, stock))


def refusal(module: nn.Module) -> str:
    return SequentialExperts().refusal(module)


def tokens(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, choices, of which nobody's is the third expert, and weights."""
    chosen = torch.tensor([[0, 1], [0, 3], [1, 0], [3, 1], [3, 0]])
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(5, HIDDEN, generator=generator, dtype=torch.float64)
    return rows.to(dtype), chosen, torch.rand(5, 2, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("all_tokens", [False, True])
@pytest.mark.parametrize("flags", [*itertools.product([True, False], repeat=4)], ids=str)
def test_it_computes_what_transformers_computes_by_the_flags(flags: tuple[bool, ...], all_tokens: bool) -> None:
    declared = dict(zip(FLAGS, flags, strict=True))
    torch.manual_seed(0)
    stock: Any = use_experts_implementation(type("Decorated", (Stacks,), {}), **declared)(config_of(**declared))
    stock = stock.double()
    model = listed(stock, all_tokens=all_tokens)
    outputs = batched_mm_experts_forward(stock, *tokens()), model(*tokens())
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    parts = ["down_proj", "gate_proj", "up_proj"] if declared["has_gate"] else ["down_proj", "up_proj"]
    assert sorted(dict(model[2].named_children())) == parts
    assert not model[2].up_proj.weight.grad.any()
    for layout in (each.of(stock) for each in SequentialExperts().layouts(stock)):
        (found,) = layout.separate([model.get_parameter(name).grad for name in layout.fused])
        torch.testing.assert_close(found, stock.get_parameter(layout.stock[0]).grad)
    rows, chosen, weights = tokens()
    assert model(rows[:0], chosen[:0], weights[:0]).shape == (0, HIDDEN)
    beyond = chosen.where(chosen != 3, EXPERTS)  # of the number behind the last, which is nobody
    torch.testing.assert_close(model(rows, beyond, weights), model(rows, chosen, weights * (chosen != 3)))


@pytest.mark.parametrize("all_tokens", [False, True])
def test_the_norm_behind_each_expert(all_tokens: bool) -> None:
    stock = Own().double()
    model = listed(stock, all_tokens=all_tokens)
    model.has_post_expert_norm = True  # since transformers 5.23 an argument of the decorator
    rows, chosen, weights = tokens()
    expected = torch.zeros_like(rows)
    for token, number in enumerate(chosen[:, 0].tolist()):
        gate, up = nn.functional.linear(rows[token], stock.gate_up_proj[number]).chunk(2, -1)
        row = nn.functional.linear(nn.functional.silu(gate) * (up + 1), stock.down_proj[number])
        expected[token] = nn.functional.layer_norm(row, (HIDDEN,)) * weights[token, 0]
    torch.testing.assert_close(model(rows, chosen[:, :1], weights[:, :1]), expected)


# --- as transformers' own --------------------------------------------------------------------------------------------


def eager(cls: Any, **settings: Any) -> Any:
    """An object of a class of transformers that runs its eager forward."""
    torch.manual_seed(0)
    module = cls(SimpleNamespace(_experts_implementation="eager", hidden_size=HIDDEN, hidden_act="silu", **settings))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def nemotron() -> Any:
    return eager(
        NemotronHExperts,
        n_routed_experts=EXPERTS,
        moe_intermediate_size=INNER,
        moe_latent_size=None,
        mlp_hidden_act="relu2",
    )


def longcat() -> Any:
    return eager(LongcatFlashExperts, expert_ffn_hidden_size=INNER, n_routed_experts=3, zero_expert_num=1)


def mixtral() -> Any:
    return eager(MixtralExperts, num_local_experts=EXPERTS, intermediate_size=INNER)


def inkling2() -> Any:
    home = importlib.import_module("transformers.models.inkling2.modeling_inkling2")
    sizes: dict[str, Any] = {"n_routed_experts": EXPERTS, "moe_intermediate_size": INNER}
    return eager(home.Inkling2Experts, **sizes, mlp_gate_softcap=2.0, mlp_up_softcap=2.0)


#: those that the installed transformers has
EAGER = [mixtral, nemotron, longcat, *([inkling2] if find_spec("transformers.models.inkling2") else [])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", EAGER, ids=lambda make: make.__name__)
def test_it_is_the_eager_forward(make: Any, dtype: torch.dtype) -> None:
    """With weights of tokens in float32, as routers give them: classes differ in the type in which they sum up.

    To the bit on many processors; others compute the rows of a smaller matrix in another order.
    """
    stock = make().to(dtype)
    rows, chosen, weights = tokens(dtype)
    expected, found = (each(rows, chosen, weights.float()) for each in (stock, listed(stock)))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


# --- what is declared, and for which forward -------------------------------------------------------------------------


class Own(Stacks):
    """A class of one's own, without the decorator."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self) -> None:
        super().__init__(config_of(**{name: getattr(self, name) for name in FLAGS}))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return batched_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)

    _is_expert_parallel = has_post_expert_norm = False


class Inherited(Own):
    pass


class Overridden(Own):
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights) * 2


class Declared(Overridden):
    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return Own.forward(self, hidden_states, top_k_index, top_k_weights)


class Undeclared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[0]


class DoubledMixtral(MixtralExperts):
    def forward(self, *args: Any) -> Any:
        return super().forward(*args) * 2


class ForgetfulMixtral(MixtralExperts):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))


@pytest.mark.parametrize("cls", [Own, Inherited, Declared])
@pytest.mark.parametrize("all_tokens", [False, True])
def test_a_class_of_ones_own_declares_it_in_its_body(cls: Any, all_tokens: bool) -> None:
    stock = cls().double()
    torch.testing.assert_close(listed(stock, all_tokens=all_tokens)(*tokens()), stock(*tokens()))


HOW = "Decorate the class that has it with use_experts_implementation of transformers, or set has_gate, "


def test_a_class_that_declares_nothing_is_refused_with_what_to_set() -> None:
    assert refusal(Undeclared()).startswith(f"its class doesn't declare how forward uses the stacks. {HOW}")


@pytest.mark.parametrize("make", [Overridden, lambda: DoubledMixtral(tiny_mixtral_config())])
def test_a_declaration_of_another_forward_is_refused(make: Any) -> None:
    found = refusal(make())
    assert found.startswith("what the class declares is about another forward than the one that runs, ")
    assert f"{type(make()).__name__}.forward of {__name__}. {HOW}" in found


def doubled(self: Any, *args: Any) -> torch.Tensor:
    return torch.as_tensor(args[0]) * 2


@pytest.mark.parametrize("make", [mixtral, longcat, Own], ids=lambda make: make.__name__)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_forward_that_another_tool_has_put_there_is_refused(
    make: Any, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listed(make())
    owner = next(base for base in type(before).__mro__ if base.__name__ in type(make()).__qualname__)
    was = vars(owner)["forward"]
    monkeypatch.setattr(owner, "forward", functools.wraps(was)(doubled) if wrapped else doubled)
    assert refusal(make()).startswith("what the class declares is about another forward than the one that runs, ")
    monkeypatch.undo()
    assert refusal(make()) == ""


def test_a_gate_that_another_tool_has_put_there_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = mixtral()
    model = listed(stock)
    monkeypatch.setattr(MixtralExperts, "_apply_gate", lambda self, gate_up: gate_up.chunk(2, -1)[0])
    changed = model(*tokens(torch.float32))
    assert not torch.equal(changed, stock(*tokens(torch.float32)))
    assert torch.equal(listed(stock)(*tokens(torch.float32)), changed)


def test_a_forward_with_other_globals_is_not_the_one_that_is_declared() -> None:
    """As the classes of a model have that runs with other functions."""
    for cls, make in ((MixtralExperts, mixtral), (LongcatFlashExperts, longcat)):
        was: Any = cls.forward
        forward = FunctionType(was.__code__, {**was.__globals__}, was.__name__, was.__defaults__, was.__closure__)
        functools.update_wrapper(forward, was)
        module = make()
        module.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__qualname__": cls.__qualname__})
        module.__class__.__module__ = cls.__module__
        assert "another forward than the one that runs" in refusal(module)


def test_a_module_must_be_as_it_declares() -> None:
    assert refusal(ForgetfulMixtral()) == ("it has no has_gate: its __init__ doesn't call that of the declared class")

    stock = Own()
    stock.num_experts = 3
    assert refusal(stock) == "num_experts is 3, and down_proj has 4 experts"

    stock = Own()
    stock.down_proj = nn.Parameter(torch.randn(3, HIDDEN, INNER))
    stock.num_experts = 3
    assert refusal(stock).startswith("its stacks are of different numbers of experts: ")

    stock = Own()
    stock.gate_up_proj = nn.Parameter(torch.randn(4, 11, 8))
    assert refusal(stock).startswith("gate_up_proj of the shape (4, 11, 8) can't be cut into 2 equal parts")

    stock = Own()
    stock.gate_up_proj = nn.Parameter(torch.randn(4, HIDDEN, 2 * INNER))
    assert refusal(stock) == (
        "gate_up_proj of the shape (4, 8, 12) and down_proj of the shape (4, 8, 6) don't fit together as "
        "is_transposed=False has it"
    )

    stock = Own()
    stock.scale = nn.Parameter(torch.ones(EXPERTS))
    assert refusal(stock) == (
        "it has the parameters down_proj, gate_up_proj, scale, and declares down_proj, gate_up_proj"
    )

    stock = Own()
    stock.add_module("0", nn.Linear(1, 1))
    assert refusal(stock) == "it has 0 already, which an expert would be called"

    sized = type("Sized", (Own,), {"__len__": lambda self: 4})
    assert refusal(sized()) == "it has __len__ of its own"

    stock = Own()
    stock.forward = stock.forward
    assert refusal(stock) == "its forward was replaced on the object"

    ungated = type("Ungated", (Own,), {"_apply_gate": None})
    assert refusal(ungated()) == "it has no _apply_gate, which a forward by its declaration calls"


def test_a_stack_under_its_old_name_is_an_error_that_says_where_it_is() -> None:
    model = listed(Own())

    with pytest.raises(
        AttributeError, match=r"gate_up_proj is fused: its values are in 0\.gate_proj\.weight, 0\.up_proj"
    ):
        model.gate_up_proj.shape  # noqa: B018
    with pytest.raises(PatchConflictError, match=r"down_proj is fused: its values are in 0\.down_proj\.weight"):
        model.down_proj[0]


def test_experts_of_llama4_are_an_adapters_own() -> None:
    config = SimpleNamespace(num_local_experts=EXPERTS, intermediate_size=INNER, hidden_size=HIDDEN, hidden_act="silu")
    stock = Llama4TextExperts(config)
    for parameter in stock.parameters():
        nn.init.normal_(parameter)
    rows = torch.randn(3 * EXPERTS, HIDDEN)
    assert SequentialExperts(all_tokens=True).refusal(stock) == ""
    for all_tokens in (False, True):
        torch.testing.assert_close(listed(stock, all_tokens=all_tokens)(rows), stock(rows), atol=1e-4, rtol=1e-4)
