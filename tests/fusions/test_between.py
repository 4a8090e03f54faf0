"""What stands between projections of one input: what is known to be pure is passed over, all else is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patcher.fusions.methods import NotUnderstoodError
from patcher.fusions.proof.tracing import Guards, prove
from patcher.fusions.proof.understanding import joining_methods
from patcher.fusions.qkv import QKV
from tests.fuzz.compare import compared, module_of
from tests.fuzz.generator import READS, source_of

#: what stands between q and the others -> what the refusal says of it
REFUSED = {
    "x.mul_(2)": r"k_proj, v_proj after 'x\.mul_\(2\)', which writes in place",
    "x += 1": "not of the same value",
    "x[0] = 1": r"after an assignment to 'x\[0\]'",
    "x[0] += 1": r"after 'x\[0\] \+= 1', which writes in place",
    "x.data = x.data * 2": "after an assignment to 'x.data'",
    "x.requires_grad = False": "after an assignment to 'x.requires_grad'",
    "y = x\ny.add_(1)": r"after 'y\.add_\(1\)', which writes in place",
    "x.view(-1).mul_(2)": r"after 'x\.view\(-1\)\.mul_\(2\)', which writes in place",
    "y = x.transpose(0, 1)[0]\ny += 1": r"after 'y \+= 1', which writes in place",
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
    "torch._foreach_mul_([x], 2)": "after 'torch._foreach_mul_",
    "operator.imul(x, 2)": "after 'operator.imul",
    "x.__imul__(2)": "after 'x.__imul__",
    "exec('x.add_(1)')": "after .exec",
    "class Local:\n    held = x.add_(1)": "after class Local",
    "import a_module_that_is_not_there": "after 'import a_module_that_is_not_there'",
    "@torch.no_grad()\ndef do():\n    pass": "after 'torch.no_grad|after the decorator",
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


HEAD = "q_proj is called in the head of a compound statement"
ALL = "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)"
DEAD = f"if False:\n    {ALL}\n"  # they never run
#: a forward -> why it is refused
ODD = {
    "q, k = self.q_proj(x), self.k_proj(x)\nv = self.v_proj((y := x))": "the input of v_proj is assigned in its call",
    "q = self.q_proj(x + 1)\nk, v = self.k_proj(x), self.v_proj(x)": r"the input of q_proj is 'x \+ 1', not a name",
    f"{DEAD}if self.q_proj(x).sum() > 0:\n    pass\nq = k = v = x": HEAD,
    f"{DEAD}q = k = v = x\nwhile self.q_proj(x).sum() > 9:\n    break": HEAD,
    f"{DEAD}q = extra or self.q_proj(x)\nk = v = q": "q_proj is called in a part of an expression that may not run",
    f"{DEAD}q = ((x := x * 2), self.q_proj(x))[1]\nk = v = q": "assigned in the statement that calls it",
    f"{DEAD}q = (x.add_(1), self.q_proj(x))[1]\nk = v = q": r"called after 'x\.add_\(1\)'.* in one statement",
    f"{DEAD}q, k = self.q_proj(x), self.k_proj(x)\nv = q": "k_proj, q_proj of 'x', but v_proj is not called with it",
    f"{DEAD}self.q_proj = self.k_proj\nq = k = v = x": "q_proj is assigned",
    "q, k, v = self.q_proj(x, x), self.k_proj(x), self.v_proj(x)": "q_proj is called with more than one input",
    "q, k, v = [self.q_proj(x) for _ in 'a'][0], self.k_proj(x), self.v_proj(x)": "used inside of a ListComp",
    "try:\n    q = self.q_proj(x)\nfinally:\n    k, v = self.k_proj(x), self.v_proj(x)": "used inside of a Try",
    f"def f():\n    return self.q_proj(x)\n\n\n{ALL}": "inside of a FunctionDef",
    "q = self.q_proj(x); k = self.k_proj(x); v = self.v_proj(x)": "two statements share a line",
    f"return x\n{ALL}": "are never called",
    f"{ALL}\nsuper().train()": r"forward calls super\(\)",
    f"{ALL}\nself.__own = q": "forward uses private names",
    f"{ALL}\nyield q": "forward is a generator",
    "q = k = v = self.norm(x)": r"no method of Odd calls q_proj, k_proj, v_proj by name",
    "for _ in range(2):\n    q, k = self.q_proj(x), self.k_proj(x)\n    x = x + 1\n    v = self.v_proj(x)": "not of",
    "q = self.q_proj(x)\nfor _ in range(2):\n    k, v = self.k_proj(x), self.v_proj(x)\n    x.add_(1)": "in place",
    "with torch.no_grad():\n    q = self.q_proj(x)\nk, v = self.k_proj(x), self.v_proj(x)": "not of the same value",
}


@pytest.mark.parametrize("body", ODD)
def test_an_odd_forward_is_refused_with_its_reason(body: str, tmp_path: Path) -> None:
    stock = module_of(source_of(f"{body}\nreturn q + k + v"), tmp_path / "odd.py")

    assert not QKV().is_fusable(stock)
    assert re.search(ODD[body], QKV().refusal(stock)), QKV().refusal(stock)


@pytest.mark.parametrize(
    ("body", "guards", "reason"),
    [
        ("self.flag = False", Guards(attributes=(("flag", True),)), "self.flag changes"),
        ("self.identity = self.norm", Guards(identities=("identity",)), "self.identity changes"),
    ],
)
def test_what_is_assumed_of_a_module_must_not_change(body: str, guards: Guards, reason: str, tmp_path: Path) -> None:
    cls = type(module_of(source_of(f"{body}\n{ALL}\nreturn q + k + v"), tmp_path / "odd.py"))
    (method,) = joining_methods(cls, ("q_proj", "k_proj", "v_proj"))

    with pytest.raises(NotUnderstoodError, match=reason):
        prove(cls, method, ("q_proj", "k_proj", "v_proj"), guards)


def test_an_attribute_is_unknown_behind_what_may_have_changed_it(tmp_path: Path) -> None:
    body = 'y = x\nvars(self)["flag"] = False\nif not self.flag:\n    y = x + 1\n'
    source = source_of(f"{body}q, k, v = self.q_proj(x), self.k_proj(y), self.v_proj(y)\nreturn q + k + v")

    assert "not of the same value" in QKV().refusal(module_of(source, tmp_path / "odd.py"))


#: a child of the module, called between -> what the refusal says of it
CHILDREN = {
    "self.child = Sub(); self.child.register_forward_hook(print)": "Sub has hooks",
    "self.child = Sub(); self.child.forward = writes": "the forward of Sub was replaced on the object",
    "self.child = nn.Embedding(8, 8, max_norm=1.0)": r"Embedding\(max_norm=True\) writes into its weight",
    "self.child = Sub(); Sub.__call__ = Sub.forward": "Sub isn't called by its forward alone",
    "self.child = Keeping()": "Keeping keeps what it is given",
    "self.child = Later()": r"Later may run 't\.add_\(1\)', which writes in place later, odd\.py:\d+",
    "self.child = Giving()": "Giving gives back a function",
    "self.child = Changing()": r"Changing runs 'self\.buffer\.add_\(1\)', which writes in place, odd\.py:\d+",
    "self.child = Homeless()": "Homeless has no parameter for itself",
    "self.child = eval('lambda t: t')": "the source of <lambda> can't be read",
    "self.child = Sub()" + "; self.child = nn.Sequential(self.child)" * 5: "Sequential is nested too deep",
}
SUBMODULES = """

class Sub(nn.Module):
    def forward(self, t):
        return t * 2


class Keeping(nn.Module):
    def forward(self, t):
        self.last = t
        return t


class Later(nn.Module):
    def forward(self, t):
        return (t.add_(1) for _ in range(1))


class Giving(nn.Module):
    def forward(self, t):
        return lambda: t.add_(1)


class Homeless(nn.Module):
    def forward(*given):
        return given[1]


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(1))

    def forward(self, t):
        self.buffer.add_(1)
        return t * 2
"""


@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_that_may_write_is_told(child: str, tmp_path: Path) -> None:
    body = "q = self.q_proj(x)\nself.child(x)\nk, v = self.k_proj(x), self.v_proj(x)\nreturn q + k + v"
    source = source_of(body, more="\n".join(child.split("; "))).replace("\nclass Odd", f"{SUBMODULES}\n\nclass Odd")

    reason = QKV().refusal(module_of(source, tmp_path / "odd.py"))

    assert re.search(f"after 'self.child\\(x\\)' \\({CHILDREN[child]}", reason), reason


#: a function, called between -> what the refusal says of it
FUNCTIONS = {
    "def helper(t):\n    return t if t.sum() > 0 else helper(t)": "which calls itself",
    "def helper(t):\n    yield t": "which is a generator",
    "def helper(t, *, n):\n    return t": "whose arguments are not known",
    "exec('def helper(t): return t')": "whose source can't be read",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_that_is_not_followed_is_told(function: str, tmp_path: Path) -> None:
    body = "q = self.q_proj(x)\nhelper(x)\nk, v = self.k_proj(x), self.v_proj(x)\nreturn q + k + v"
    source = source_of(body).replace("\nclass Odd", f"\n{function}\n\n\nclass Odd")

    assert FUNCTIONS[function] in QKV().refusal(module_of(source, tmp_path / "odd.py"))


def test_a_function_that_gets_a_function_is_not_followed(tmp_path: Path) -> None:
    body = "q = self.q_proj(x)\nreads(lambda: x)\nk, v = self.k_proj(x), self.v_proj(x)\nreturn q + k + v"

    reason = QKV().refusal(module_of(source_of(body), tmp_path / "odd.py"))

    assert "after 'reads(lambda: x)', which gets a function" in reason


def test_calls_are_followed_only_so_deep(tmp_path: Path) -> None:
    functions = "".join(f"def f{n}(t):\n    return f{n + 1}(t)\n\n\n" for n in range(20))
    body = "q = self.q_proj(x)\nf0(x)\nk, v = self.k_proj(x), self.v_proj(x)\nreturn q + k + v"
    source = source_of(body).replace("\nclass Odd", f"\n{functions}\n\nclass Odd")

    assert "which goes too deep" in QKV().refusal(module_of(source, tmp_path / "odd.py"))
