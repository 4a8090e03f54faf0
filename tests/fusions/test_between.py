"""What stands between projections of one input: what is known to be pure is passed over, all else is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patcher.fusions.qkv import QKV
from tests.fuzz.compare import compared, module_of
from tests.fuzz.generator import READS, source_of

#: what stands between q and the others -> what the refusal says of it
REFUSED = {
    "x.mul_(2)": r"k_proj, v_proj after 'x\.mul_\(2\)', which writes in place",
    "x += 1": "after 'x += 1', which writes in place",
    "x[0] = 1": r"after an assignment to 'x\[0\]'",
    "x[0] += 1": r"after 'x\[0\] \+= 1', which writes in place",
    "x.data = x.data * 2": "after an assignment to 'x.data'",
    "x.requires_grad = False": "after an assignment to 'x.requires_grad'",
    "y = x\ny.add_(1)": r"after 'y\.add_\(1\)', which writes in place",
    "x.view(-1).mul_(2)": r"after 'x\.view\(-1\)\.mul_\(2\)', which writes in place",
    "y = x.transpose(0, 1)[0]\ny += 1": "after 'y += 1', which writes in place",
    "(a, b) = (x, 1)\na.add_(1)": r"after 'a\.add_\(1\)', which writes in place",
    "box = [x]\nbox[0].add_(1)": r"after 'box\[0\]\.add_\(1\)', which writes in place",
    "box = []\nsame = box\nbox.append(x)\nsame[0].add_(1)": r"after 'same\[0\]\.add_\(1\)'",
    "self.kept = x\nself.kept.add_(1)": r"after 'self\.kept\.add_\(1\)'",
    "torch.add(x, 1, out=x)": "after 'torch.add.x, 1, out=x.', which writes in place",
    "F.relu(x, inplace=True)": "after 'F.relu.x, inplace=True.', which writes in place",
    "F.relu(x, True)": "after 'F.relu.x, True.', which writes in place",
    "F.relu_(x)": "after 'F.relu_.x.', which writes in place",
    "self.act_in(x)": r"after 'self\.act_in\(x\)' \(ReLU\(inplace=True\) writes into its input\)",
    "self.chain(x)": r"after 'self\.chain\(x\)' \(ReLU\(inplace=True\) writes into its input\)",
    "self.writes(x)": r"\(Writes runs 't \+= 1', which writes in place, odd\.py:\d+\)",
    "writes(x)": r"after writes\(x\), which runs 't\.mul_\(0\.5\)', which writes in place \(odd\.py:\d+\)",
    "writes_deep(x)": r"after writes_deep\(x\), which runs 't\.mul_\(0\.5\)'",
    "self.write_method(x)": r"after self\.write_method\(x\), which runs 't\.view\(-1\)\.add_\(1\)'",
    "self.absent_method(x)": None,
    'getattr(x, "add_")(1)': "which writes in place",
    'name = "add_"\ngetattr(x, name)(1)': r"after 'getattr\(x, name\)\(1\)'",
    "do = x.add_\ndo(1)": r"after 'do\(1\)'",
    "do = lambda: x.add_(1)\ndo()": r"after 'do\(\)'",
    "list(map(lambda z: z.add_(1), [x]))": "after 'map",
    "sorted([x], key=lambda z: z.add_(1).sum())": "after 'sorted",
    "[z.add_(1) for z in [x]]": r"after 'z\.add_\(1\)', which writes in place",
    "y = (z.add_(1) for z in [x])\nlist(y)": r"after 'z\.add_\(1\)', which writes in place",
    "def do():\n    x.add_(1)\n\n\ndo()": r"after do\(\), which runs 'x\.add_\(1\)'",
    "match 1:\n    case 1:\n        x.add_(1)": r"after 'x\.add_\(1\)', which writes in place",
    "match x:\n    case y:\n        y.add_(1)": r"after 'y\.add_\(1\)', which writes in place",
    "try:\n    x.add_(1)\nfinally:\n    pass": r"after 'x\.add_\(1\)', which writes in place",
    "for _ in range(2):\n    x.add_(1)": r"after 'x\.add_\(1\)', which writes in place",
    "if x.sum() > 0:\n    x.add_(1)": r"after 'x\.add_\(1\)', which writes in place",
    "with torch.no_grad():\n    y = 2": r"after 'with torch\.no_grad\(\)'",
    "with torch.autocast('cpu'):\n    y = 2": "after 'with torch.autocast",
    "torch.set_grad_enabled(False)": r"after 'torch\.set_grad_enabled\(False\)'",
    "turns_off_gradients()": r"after turns_off_gradients\(\), which runs 'torch\.set_grad_enabled\(False\)'",
    "torch.no_grad().__enter__()": "after 'torch.no_grad",
    "self.k_proj.weight.data.mul_(2)": r"after 'self\.k_proj\.weight\.data\.mul_\(2\)'",
    "self.k_proj.register_forward_hook(print)": "after 'self.k_proj.register_forward_hook",
    "self.change()": "flag changes|after self.change",
    "torch._foreach_mul_([x], 2)": "after 'torch._foreach_mul_",
    "operator.imul(x, 2)": "after 'operator.imul",
    "x.__imul__(2)": "after 'x.__imul__",
    "exec('x.add_(1)')": "after 'exec",
    "class Local:\n    held = x.add_(1)": "after class Local",
    "import a_module_that_is_not_there": "after 'import a_module_that_is_not_there'",
    "@torch.no_grad()\ndef do():\n    pass": "after 'torch.no_grad|after the decorator",
    "sums(x, key=print)": "after",
    "(lambda t: writes(t))(x)": "after '.lambda",
}


@pytest.mark.parametrize("between", REFUSED)
def test_what_may_change_the_input_is_refused_with_its_line(between: str, tmp_path: Path) -> None:
    source = source_of(f"q = self.q_proj(x)\n{between}\nk, v = self.k_proj(x), self.v_proj(x)\nreturn q + k + v")

    reason = QKV().refusal(module_of(source, tmp_path / "odd.py"))

    assert re.search(REFUSED[between] or f"after '{re.escape(between)}'", reason), reason
    assert re.search(r"\(odd\.py:\d+\)$", reason), reason


@pytest.mark.parametrize("read", READS)
def test_what_is_known_to_be_pure_is_passed_over(read: str, tmp_path: Path) -> None:
    noise = read.format(t="x", u="q", n="y")
    source = source_of(f"q = self.q_proj(x)\n{noise}\nk, v = self.k_proj(x), self.v_proj(x)\nreturn q + k + v")

    assert compared(source, tmp_path / "odd.py").status == "same"


#: a forward -> why it is refused
ODD = {
    "q, k = self.q_proj(x), self.k_proj(x)\nv = self.v_proj((y := x))": "the input of v_proj is assigned in its call",
    "q = self.q_proj(x + 1)\nk, v = self.k_proj(x), self.v_proj(x)": r"the input of q_proj is 'x \+ 1', not a name",
    "if self.q_proj(x).sum() > 0:\n    pass\nq = k = v = x": "q_proj is called in the head of a compound statement",
    "q = k = v = x\nwhile self.q_proj(x).sum() > 9:\n    break": "q_proj is called in the head of a compound statement",
    "q = extra or self.q_proj(x)\nk = v = q": "q_proj is called in a part of an expression that may not run",
    "q = ((x := x * 2), self.q_proj(x))[1]\nk = v = q": "assigned in the statement that calls it",
    "q = (x.add_(1), self.q_proj(x))[1]\nk = v = q": r"q_proj is called after 'x\.add_\(1\)'.* in one statement",
    "q, k = self.q_proj(x), self.k_proj(x)\nv = q": "k_proj, q_proj of 'x', but v_proj is not called with it",
    "self.q_proj = self.k_proj\nq = k = v = x": "q_proj is assigned",
    "q, k, v = self.q_proj(x, x), self.k_proj(x), self.v_proj(x)": "q_proj is called with more than one input",
    "q, k, v = [self.q_proj(x) for _ in 'a'][0], self.k_proj(x), self.v_proj(x)": "used inside of a ListComp",
    "try:\n    q = self.q_proj(x)\nfinally:\n    k, v = self.k_proj(x), self.v_proj(x)": "used inside of a Try",
    "def f():\n    return self.q_proj(x)\n\n\nq, k, v = f(), self.k_proj(x), self.v_proj(x)": "inside of a FunctionDef",
    "q = self.q_proj(x); k = self.k_proj(x); v = self.v_proj(x)": "two statements share a line",
    "return super().forward(x)\nq, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)": "are never called",
    "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nsuper().train()": r"forward calls super\(\)",
    "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nself.__own = q": "forward uses private names",
    "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nyield q": "forward is a generator",
    "q = k = v = self.norm(x)": r"no method of Odd calls q_proj, k_proj, v_proj by name",
    "if self.flag:\n    q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nself.flag = False\n"
    "if self.flag:\n    q = k = v = self.q_proj(x)": "flag changes|not called with it",
    "for _ in range(2):\n    q, k = self.q_proj(x), self.k_proj(x)\n    x = x + 1\n    v = self.v_proj(x)": "of the same value",
    "q = self.q_proj(x)\nfor _ in range(2):\n    k, v = self.k_proj(x), self.v_proj(x)\n    x.add_(1)": "which writes in place",
    "with torch.no_grad():\n    q = self.q_proj(x)\nk, v = self.k_proj(x), self.v_proj(x)": "not of the same value",
}


@pytest.mark.parametrize("body", ODD)
def test_an_odd_forward_is_refused_with_its_reason(body: str, tmp_path: Path) -> None:
    stock = module_of(source_of(f"{body}\nreturn q + k + v"), tmp_path / "odd.py")

    assert not QKV().is_fusable(stock)
    assert re.search(ODD[body], QKV().refusal(stock)), QKV().refusal(stock)
