"""What a forward of experts must look like to be rewritten; everything else is refused, with the line."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patcher.fusions.fused_module import fuse, fused_class_of
from patcher.fusions.sequential_experts import SequentialExperts

#: The loop of transformers. Cases change lines of it.
EXPERTS = """
import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.last = 4, 3
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x, chosen, weights):
        final = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=self.num_experts + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            expert = expert[0]
            if expert == self.num_experts:
                continue
            place, token = torch.where(mask[expert])
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            current = F.linear(gate.relu() * up, self.down_proj[expert])
            current = current * weights[token, place, None]
            final.index_add_(0, token, current)
        return final

    def cut(self, both):
        first, second = both.chunk(2, dim=-1)
        return first * second
"""
SPLIT = "gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, dim=-1)"
#: Where a line is put in, and the indentation there.
WEIGHING, IN_LOOP = "            current = current *", "            "
CUT = """        first, second = both.chunk(2, dim=-1)
        return first * second"""
PRODUCT = "F.linear(x[token], self.gate_up_proj[expert])"
GATED = "gate.relu() * up"


def experts(folder: Path, *changes: tuple[str, str]) -> Any:
    """An object of the class above, with other lines."""
    source = EXPERTS
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    file = folder / f"modeling_experts_{len(sys.modules)}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.Experts().double()


def listed(stock: nn.Module, fusion: SequentialExperts) -> Any:
    model = copy.deepcopy(stock)
    return fuse(fusion, model, fused_class_of(fusion, stock))


UNDERSTOOD = {
    "as in transformers": [],
    "the number as an int": [("expert = expert[0]", "expert = expert.item()")],
    "another name for it": [
        ("for expert in hit", "for one in hit"),
        ("expert = expert[0]", "expert = int(one.item())"),
    ],
    "hit without a second axis": [(".nonzero()", ".nonzero().squeeze(-1)"), ("expert = expert[0]", "pass")],
    "the mask turned later": [
        (".permute(2, 1, 0)\n", "\n        mask = mask.permute(2, 1, 0)\n"),
    ],
    "tokens are asked for": [
        (
            "            gate, up =",
            "            if token.numel() == 0:\n                continue\n            gate, up =",
        ),
    ],
    "no calls, no rows": [
        ("        mask = F", "        if chosen.numel() == 0:\n            return final\n        mask = F"),
    ],
    "up comes first": [(SPLIT, SPLIT.replace("gate, up", "up, gate"))],
    "rows take turns": [
        (SPLIT, f"both = {PRODUCT}\n            gate, up = both[..., ::2], both[..., 1::2]"),
    ],
    "cut by a method": [
        (SPLIT, f"current = self.cut({PRODUCT})"),
        (GATED, "current"),
        ("first, second = both.chunk", "gate, up = both.chunk"),
        ("first * second", "gate.relu() * up"),
    ],
    "cut by a method of a method": [
        (SPLIT, f"current = self.cut({PRODUCT})"),
        (GATED, "current"),
        (
            "        first, second = both.chunk(2, dim=-1)\n        return first * second",
            "        return self.halve(both)",
        ),
        (
            "    def cut(self, both):",
            "    def halve(self, x):\n        up, gate = torch.chunk(x, 2, -1)\n        return gate.relu() * up\n\n"
            "    def cut(self, both):",
        ),
    ],
    "activation over all, gate named later": [
        ("gate.relu() * up", "gate.relu() * up + expert_input.sum()"),
        ("        final = torch", "        expert_input = x[:1] * 0\n        final = torch"),
    ],
    "other names": [
        ("self.gate_up_proj", "self.input_linear"),
        ("self.down_proj", "self.output_linear"),
    ],
}


@pytest.mark.parametrize("all_tokens", [False, True])
@pytest.mark.parametrize("case", UNDERSTOOD)
def test_what_is_understood_computes_the_same(case: str, all_tokens: bool, tmp_path: Path) -> None:
    stock = experts(tmp_path, *UNDERSTOOD[case])
    fusion = SequentialExperts(all_tokens=all_tokens)
    assert fusion.refusal(stock) == ""
    model = listed(stock, fusion)
    x = torch.randn(5, 8, dtype=torch.float64)
    chosen = torch.tensor([[0, 1], [0, 3], [1, 0], [3, 1], [4, 0]])  # nobody chooses 2; 4 is none of them
    weights = torch.rand(5, 2, dtype=torch.float64)

    outputs = [each(x, chosen, weights) for each in (stock, model)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    assert sorted(dict(model[2].named_children())) == ["down_proj", "gate_proj", "up_proj"]
    assert not model[2].up_proj.weight.grad.any()
    for layout in (each.of(stock) for each in fusion.layouts(stock)):
        (found,) = layout.separate([model.get_parameter(name).grad for name in layout.fused])
        torch.testing.assert_close(found, stock.get_parameter(layout.stock[0]).grad)
    assert model(x[:0], chosen[:0], weights[:0]).shape == (0, 8)


def test_gate_and_up_are_told_apart_by_the_source(tmp_path: Path) -> None:
    for case, rows in {
        "as in transformers": slice(6),
        "up comes first": slice(6, 12),
        "rows take turns": slice(0, 12, 2),
    }.items():
        stock = experts(tmp_path, *UNDERSTOOD[case])
        assert torch.equal(listed(stock, SequentialExperts())[1].gate_proj.weight, stock.gate_up_proj[1, rows]), case


NAMES = {
    "w1, v1 and w2": ("w1", "v1", "w2", ["down_proj", "gate_proj", "up_proj"]),
    "w1, w3 and w2": ("w1", "w3", "w2", ["down_proj", "gate_proj", "up_proj"]),
    "names of its own": ("first", "second", "third", ["first", "second", "third"]),
}


@pytest.mark.parametrize("case", NAMES)
def test_layers_are_named_by_their_role(case: str, tmp_path: Path) -> None:
    gate, up, down, layers = NAMES[case]
    stock = experts(
        tmp_path,
        (
            "self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))",
            f"self.{gate} = nn.Parameter(torch.randn(4, 6, 8))"
            f"\n        self.{up} = nn.Parameter(torch.randn(4, 6, 8))",
        ),
        (SPLIT, f"gate, up = F.linear(x[token], self.{gate}[expert]), F.linear(x[token], self.{up}[expert])"),
        ("self.down_proj", f"self.{down}"),
    )

    assert sorted(dict(listed(stock, SequentialExperts())[0].named_children())) == layers


REFUSED = {
    "which is the gate": (
        [(SPLIT, f"current = self.cut({PRODUCT})"), (GATED, "current")],
        "which of first and second is the gate isn't said",
        SPLIT,
    ),
    "cut in another way": (
        [(SPLIT, f"both = {PRODUCT}\n            gate, up = both[:, :6], both[:, 6:]")],
        r"the product with self\.gate_up_proj is cut into gate and up in a way that isn't known",
        SPLIT,
    ),
    "cut in three": (
        [("chunk(2, dim=-1)\n            cur", "chunk(3, dim=-1)\n            cur")],
        r"the product with self\.gate_up_proj is cut into gate and up in a way that isn't known",
        SPLIT,
    ),
    "cut along the tokens": (
        [("chunk(2, dim=-1)\n            cur", "chunk(2, dim=0)\n            cur")],
        r"the product with self\.gate_up_proj is cut into gate and up in a way that isn't known",
        SPLIT,
    ),
    "other experts too": (
        [("self.down_proj[expert]", "self.down_proj[expert - 1]")],
        r"self\.down_proj\[expert - 1\]: expert - 1 isn't the number that the loop is at",
        "current = F.linear",
    ),
    "the number changes": (
        [("            place, token", "            expert = expert + 1\n            place, token")],
        "the number of the expert is changed",
        "for expert in hit",
    ),
    "some are left out": (
        [("if expert == self.num_experts", "if expert > 2")],
        r"the loop leaves out experts under a condition that isn't known, expert > 2",
        "continue",
    ),
    "it ends early": (
        [("                continue", "                break")],
        "the loop over the experts may end early",
        "continue",
    ),
    "under a condition": (
        [("current = F.linear(gate", "current = gate if x.sum() > 0 else F.linear(gate")],
        "the weight of an expert is used under a condition",
        "current = gate",
    ),
    "in a branch": (
        [("current = F.linear(gate", "if x.sum() > 0:\n                current = F.linear(gate")],
        "the weight of an expert is used under a condition",
        "current = F.linear",
    ),
    "experts of another list": (
        [("for expert in hit", "for expert in torch.tensor([[0], [1]])")],
        r"the loop runs over torch\.tensor\(\[\[0\], \[1\]\]\), not known to be experts",
        "for expert in hit",
    ),
    "no choice of tokens": (
        [("torch.where(mask[expert])", "mask[expert].nonzero(as_tuple=True)")],
        "the loop isn't seen to choose the tokens of an expert from a mask",
        "for expert in hit",
    ),
    "a mask that lies otherwise": (
        [("permute(2, 1, 0)", "permute(2, 0, 1)")],
        "mask isn't understood as a mask of the tokens of each expert",
        "for expert in hit",
    ),
    "what goes on to the next": (
        [
            (
                "            current = current *",
                "            final = final + current.mean()\n            current = current *",
            )
        ],
        "final is used after the loop over the experts",
        "return final",
    ),
    "what is used afterwards": (
        [("return final\n", "return final + current.mean()\n")],
        "current is used after the loop over the experts",
        "return final",
    ),
    "what is counted": (
        [(WEIGHING, f"{IN_LOOP}self.seen += 1\n{WEIGHING}")],
        "the loop over the experts does something that isn't known",
        "current = current *",
    ),
    "what is told": (
        [(WEIGHING, f"{IN_LOOP}print(expert)\n{WEIGHING}")],
        "the loop over the experts does something that isn't known",
        "current = current *",
    ),
    "tokens for something else": (
        [("final.index_add_(0, token, current)", "final[token] = final[token] + current")],
        "token is used in a way that isn't known|does something that isn't known",
        "final.index_add_",
    ),
    "tokens as values": (
        [(WEIGHING, f"{IN_LOOP}current = current + token[:, None]\n{WEIGHING}")],
        "token is used in a way that isn't known",
        "current = current +",
    ),
    "places as values": (
        [(WEIGHING, f"{IN_LOOP}current = current + place[:, None]\n{WEIGHING}")],
        "place is used for something else than the weight of tokens",
        "current = current +",
    ),
    "two loops": (
        [("        return final\n", f"        for expert in hit:\n{IN_LOOP}{SPLIT}\n        return final\n")],
        "the weight of one expert is used outside of one loop over the experts",
        SPLIT,
    ),
    "what another expert left": (
        [(WEIGHING, f"{IN_LOOP}current = current + (before if expert else 0)\n{IN_LOOP}before = current\n{WEIGHING}")],
        "before may be what another expert left",
        "current = current +",
    ),
    "outside of the loop": (
        [("        return final\n", "        return final + F.linear(final[:, :6], self.down_proj[0])\n")],
        "the weight of one expert is used outside of one loop over the experts",
        "return final",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_with_the_line(case: str, tmp_path: Path) -> None:
    changes, reason, line = REFUSED[case]
    stock = experts(tmp_path, *changes)

    refusal = SequentialExperts().refusal(stock)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refusal)
    source = Path(sys.modules[type(stock).__module__].__file__ or "").read_text().splitlines()
    number = int(refusal.rpartition(":")[2].rstrip(")"))
    # At the changed line, or at one that it is part of.
    near = "\n".join(source[number - 2 : number + 2])
    assert line in near or any(new.strip().splitlines()[0].strip() in near for _, new in changes), refusal


ALL_TOKENS_REFUSED = {
    "in place": (
        [(WEIGHING, f"{IN_LOOP}gate *= 2\n{WEIGHING}")],
        "all_tokens=True: the loop changes something in place",
    ),
    "in place by a call": (
        [(WEIGHING, f"{IN_LOOP}gate = gate.mul_(2)\n{WEIGHING}")],
        "all_tokens=True: the loop changes something in place",
    ),
    "the mask for more": (
        [("        return final\n", "        return final + mask.sum()\n")],
        "all_tokens=True: mask is used besides the choice of tokens",
    ),
}


@pytest.mark.parametrize("case", ALL_TOKENS_REFUSED)
def test_all_tokens_is_refused_where_the_choice_is_needed(case: str, tmp_path: Path) -> None:
    changes, reason = ALL_TOKENS_REFUSED[case]
    stock = experts(tmp_path, *changes)

    assert SequentialExperts().refusal(stock) == ""
    assert SequentialExperts(all_tokens=True).refusal(stock).startswith(reason)


def test_the_module_must_be_what_its_forward_takes_it_for(tmp_path: Path) -> None:
    def refusal(stock: nn.Module) -> str:
        return SequentialExperts().refusal(stock)

    stock = experts(tmp_path)
    stock.num_experts = 3
    assert refusal(stock) == "num_experts is 3, and experts up to 4 have weights"

    stock = experts(tmp_path)
    stock.down_proj = nn.Parameter(torch.randn(3, 8, 6))
    assert refusal(stock).startswith("its stacks are of different numbers of experts: ")

    stock = experts(tmp_path)
    stock.gate_up_proj = nn.Parameter(torch.randn(4, 11, 8))
    assert "gate_up_proj of the shape (4, 11, 8) can't be cut into 2 equal parts for each expert" in refusal(stock)

    stock = experts(tmp_path)
    stock.add_module("0", nn.Linear(1, 1))
    assert refusal(stock) == "it has 0 already, which an expert would be called"

    stock = experts(tmp_path, ("    def cut(", "    def __len__(self):\n        return 4\n\n    def cut("))
    assert refusal(stock) == "it has __len__ of its own"

    stock = experts(tmp_path, ("first * second", "self.down_proj"))
    assert refusal(stock) == "its method cut uses down_proj"


def test_a_stack_under_its_old_name_is_an_error_that_says_where_it_is(tmp_path: Path) -> None:
    model = listed(experts(tmp_path), SequentialExperts())

    with pytest.raises(
        AttributeError, match=r"gate_up_proj is fused: its values are in 0\.gate_proj\.weight, 0\.up_proj"
    ):
        model.gate_up_proj.shape  # noqa: B018
    with pytest.raises(TypeError):
        model.down_proj[0]
