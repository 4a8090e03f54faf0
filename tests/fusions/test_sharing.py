"""What a forward does between projections of one input: what can't write is passed over, all else is refused."""

from __future__ import annotations

import copy
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Cache,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DynamicCache,
    PvtV2Config,
    PvtV2ForImageClassification,
)

from patcher import Patcher
from patcher.compat.standing_alone import are_values
from patcher.fusions.callers import Caller
from patcher.fusions.fused_module import fused_class_of
from patcher.fusions.methods import NotUnderstoodError
from patcher.fusions.qkv import QKV
from patcher.fusions.sharing import Form, forms_of
from tests.fuzz.compare import compared, module_of
from tests.fuzz.generator import READS, source_of
from tests.support.fusing import fuse
from tests.support.tiny import randomize
from tests.support.written_modules import written_module

GROUP = ("q_proj", "k_proj", "v_proj")
ALL = "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)"


def between(statements: str, more: str = "", helpers: str = "") -> str:
    body = f"q = self.q_proj(x)\n{statements}\nk, v = self.k_proj(x), self.v_proj(x)\nreturn q + k + v"
    return source_of(body, more=more).replace("\nclass Odd", f"\n{helpers}\n\nclass Odd")


def form_of(source: str, path: Path) -> Form:
    forms = forms_of({"": (module_of(source, path), GROUP, None)})[""]
    if isinstance(forms, str):
        raise NotUnderstoodError(forms)
    (form,) = forms
    return form


# --- between the calls -----------------------------------------------------------------------------------------------

#: what the refusal says -> what is between q and the others
REFUSED = {
    "it may write in place": [
        "x.mul_(2)",
        "x += 1",
        "y = x\ny.add_(1)",
        "x.view(-1).mul_(2)",
        "y = x.transpose(0, 1)[0]\ny += 1",
        "(a, b) = (x, 1)\na.add_(1)",
        "box = [x]\nbox[0].add_(1)",
        "F.relu(x, inplace=True)",
        "F.relu(x, True)",
        "F.relu(x, **{'inplace': True})",
        "[z.add_(1) for z in [x]]",
        "for _ in range(2):\n    x.add_(1)",
        "if x.sum() > 0:\n    x.add_(1)",
        "torch.no_grad().__enter__()",
        "self.k_proj.weight.data.mul_(2)",
        "x.__imul__(2)",
        "del box[x.add_(1)]",
        "assert x.add_(1) is not None",
        "f'{x.add_(1)}'",
        "self.writes(x)",
        "writes(x)",
        "writes_deep(x)",
        # of containers, a sum or a product holds what they did
        "z = [x]\nw = z\n(w + w)[0].add_(1)",
        "if extra is None:\n    z = [x]\nw = z\n(w + w)[0].add_(1)",
        "z = x.split(4, -1)\n(z + z)[0].add_(1)",
        "z = x.unbind(0)\ny = z * 2\ny[0].add_(1)",
        "z = dict(a=x)\ny = z | z\ny['a'].add_(1)",
        "y = x.max(-1) + x.split(8, -1)\ny[-1].add_(1)",
        "for z in [[x]]:\n    (z + z)[0].add_(1)",
        "z = gives_back([x])\n(z + z)[0].mul_(0.5)",
        "z = torch.unbind(x)\n(z + z)[0].mul_(0.5)",
        "z = [x] if extra is None else [x]\n(z + z)[0].mul_(0.5)",
        "x[0] += 1",
        # what is new is new memory, and not what a new container holds
        "z = [x] * 1\nfor y in z:\n    y += 1",
        "y, z = [x, x] * 1\ny += 1",
        "y = z = x\nfor _ in range(2):\n    y = z\n    z = y\ny += 1",
        "z = gives_back(x)\nz += 1",
        "z = self.identity(x)\nz += 1",
        "z = self.drop(x)\nz += 1",
        "box = []\nsame = box\nbox.append(x)\nsame[0].add_(1)",
        "z = x * 1\nz += 1",
    ],
    "a class that isn't followed": ["class Local:\n    held = x.add_(1)"],
    "is assigned": [
        "x[0] = 1",
        "x.data = x.data * 2",
        "x.requires_grad = False",
        "self.kept = x",
        "z = [torch.zeros(1)]\nz[0] = x\nz[0].mul_(0.5)",
        "z = x * 1\nz[0] = x[0]",
    ],
    "it writes into 'out'": ["torch.add(x, 1, out=x)"],
    "torch's relu_ may modify its arguments": ["F.relu_(x)"],
    "torch's _foreach_mul_ may modify": ["torch._foreach_mul_([x], 2)"],
    "torch's imul may modify": ["operator.imul(x, 2)"],
    "torch's instance_norm may modify": ["F.instance_norm(x, x[0, 0], x[0, 1])"],
    "ReLU has inplace=True": ["self.act_in(x)"],
    "the type of 't.view(-1).add_(1)' isn't known": ["self.write_method(x)"],
    "the called function isn't known": [
        'getattr(x, "add_")(1)',
        'name = "add_"\ngetattr(x, name)(1)',
        "(lambda t: writes(t))(x)",
        "[writes][0](x)",
        "self.layers[1](x)",
    ],
    "do isn't known before it runs": ["do = x.add_\ndo(1)", "do = writes\ndo(x)"],
    "may run anything": ["list(map(lambda z: z.add_(1), [x]))", "max([x], key=writes)"],
    "a function that isn't followed": [
        "do = lambda: x.add_(1)\ndo()",
        "def do():\n    x.add_(1)\n\n\ndo()",
        "def do(z):\n    z.add_(1)\n\n\ndo(x)",
    ],
    "no_grad is a class": ["@torch.no_grad()\ndef do():\n    pass"],
    "a generator that isn't followed": ["y = (z.add_(1) for z in [x])\nlist(y)", "sum(z.add_(1).sum() for z in [x])"],
    "a 'match' that isn't followed": [
        "match x:\n    case y:\n        y.add_(1)",
        "match 1:\n    case 1:\n        x.add_(1)",
    ],
    "a 'try' that isn't followed": ["try:\n    x.add_(1)\nfinally:\n    pass"],
    "a context that isn't followed": [
        "with torch.no_grad():\n    y = 2",
        "with torch.autocast('cpu'):\n    y = 2",
        "with torch.no_grad() as y:\n    pass",
    ],
    "an import that isn't followed": ["import a_module_that_is_not_there"],
    "a 'global' that isn't followed": ["global KEPT\nKEPT = x"],
    "set_grad_enabled is a class": ["torch.set_grad_enabled(False)", "turns_off_gradients()"],
    "sorted() may run anything": ["sorted([x], key=lambda z: z.add_(1).sum())"],
    "exec() may run anything": ["exec('x.add_(1)')"],
    "the type of 'self.k_proj' isn't known": ["self.k_proj.register_forward_hook(print)"],
    "a loop over 'self.layers', which isn't known": [
        "for layer in self.layers:\n    layer(x)",
        "[z for z in self.layers]",
    ],
    # row 28: what a method does tells its object, not its name
    "the type of 'self.kept' isn't known": ["self.kept.update(x)", "self.kept.copy(x)"],
}


@pytest.mark.parametrize(
    ("statements", "what"), [(each, what) for what, several in REFUSED.items() for each in several]
)
def test_what_may_change_the_input_is_refused_with_its_line(statements: str, what: str, tmp_path: Path) -> None:
    reason = QKV().refusal(module_of(between(statements), tmp_path / "odd.py"))

    assert re.match(r"between the projections: .*\(odd\.py:\d+\)\)*$", reason), reason
    assert what in reason


#: an object of a user, whose operators write
OPERATORS = """
class Writing:
    def __add__(self, other):
        return other.add_(1)

    __matmul__ = __rmul__ = __getitem__ = __eq__ = __contains__ = __add__


WRITING = Writing()
"""


@pytest.mark.parametrize(
    "operation",
    ["self.odd + x", "WRITING @ x", "self.odd[x]", "self.odd == x", "x in self.odd", "self.through(x, self.odd)",
     "y = self.odd == 1\nz = y + x"],
)  # fmt: skip
def test_operators_of_an_object_that_is_not_known_may_write(operation: str, tmp_path: Path) -> None:
    more = "self.odd = WRITING"
    through = "\n    def through(self, t, odd):\n        return odd + t\n"
    module = module_of(between(operation, more, OPERATORS) + through, tmp_path / "odd.py")

    assert re.search(r"\(the type of '(self\.odd|WRITING|odd|y)' isn't known", QKV().refusal(module))


@pytest.mark.parametrize(
    "body",
    ["y = x\nq = self.q_proj(y)\nx = WRITING\nx + y\nk, v = self.k_proj(y), self.v_proj(y)",
     "if extra is None:\n    extra = x\ny = extra\nq = self.q_proj(y)\nextra = WRITING\nz = extra @ y\n"
     "k, v = self.k_proj(y), self.v_proj(y)"],
)  # fmt: skip
def test_a_variable_that_had_the_input_is_not_known_once_it_is_assigned_again(body: str, tmp_path: Path) -> None:
    source = source_of(f"{body}\nreturn q + k + v").replace("\nclass Odd", f"\n{OPERATORS}\n\nclass Odd")

    assert re.search(r"\(the type of '(x|extra)' isn't known", QKV().refusal(module_of(source, tmp_path / "odd.py")))


@pytest.mark.parametrize(("name", "plain", "writing"), [("odd", [1.0], "[WRITING]"), ("_odd", 1.0, "WRITING")])
def test_another_object_of_the_class_may_hold_others(
    name: str, plain: Any, writing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = f"self.{name}[0]" if name == "odd" else f"self.{name}"
    module = module_of(between(f"{taken} + x", f"self.{name} = {plain}", OPERATORS), tmp_path / "odd.py")
    names = type(module).forward.__globals__
    monkeypatch.setitem(sys.modules, type(module).__module__, SimpleNamespace(**names))  # answers are remembered
    assert QKV().is_fusable(module)

    setattr(module, name, eval(writing, names))

    assert f"the type of '{taken}' isn't known" in QKV().refusal(module)


def test_what_super_gives_is_not_a_value(tmp_path: Path) -> None:
    through = "\n    def through(self, t):\n        base = super()\n        base.write_method(t)\n"
    module = module_of(between("self.through(x)") + through, tmp_path / "odd.py")

    assert "the type of 'base' isn't known" in QKV().refusal(module)


#: what is refused where it is between projections, and may be right: it isn't followed
NOT_FOLLOWED = ("sum(z * 2", "self.layers", "import math", "self.peeked", "size += 1", "def inner")
#: what is passed over, besides what generated forwards have
PASSED = [
    "box = [x]\nbox.append(x * 2)\nz = box[1].sum()",
    "y = x\ndel y",
    "print(x.shape, str(x.dtype))",
    "a, b = x.chunk(2, -1)\nc = a + b",
]


@pytest.mark.parametrize(
    "read", [*(each for each in READS if not any(part in each for part in NOT_FOLLOWED)), *PASSED]
)
def test_what_writes_into_nothing_is_passed_over(read: str, tmp_path: Path) -> None:
    assert compared(between(read.format(t="x", u="q", n="y")), tmp_path / "odd.py").status == "same"


#: a child of the module, called between -> what the refusal says of it; "" where it is passed over
CHILDREN = {
    "self.child = Sub(); self.child.register_forward_hook(print)": r"Sub has hooks",
    "self.child = Sub(); self.child.forward = writes": r"Sub isn't called by the forward of its class",
    "self.child = Sub(); Sub.__call__ = Sub.forward": r"Sub isn't called by the forward of its class",
    "self.child = nn.Embedding(8, 8, max_norm=1.0)": r"Embedding has max_norm=1\.0",
    "self.child = Keeping()": r"'self\.last' is assigned \(odd\.py:\d+\)",
    "self.child = Later()": r"a generator that isn't followed \(odd\.py:\d+\)",
    "self.child = Giving()": r"a function that isn't followed \(odd\.py:\d+\)",
    "self.child = Changing()": r"'self\.buffer\.add_\(1\)' \(it may write in place\) \(odd\.py:\d+\)",
    "self.child = Peeking()": r"the property 'peeked' isn't followed \(odd\.py:\d+\)",
    "self.child = eval('lambda t: t')": r"the source of <lambda> can't be read",
    "self.child = nn.Sequential(Sub(), nn.Dropout())": r"a loop over 'self', which isn't known \(container\.py:\d+\)",
    "self.child = Homeless()": "",
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


class Peeking(Changing):
    @property
    def peeked(self):
        return self.buffer.add_(1)

    def forward(self, t):
        return t * self.peeked
"""


@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_that_may_write_is_told(child: str, tmp_path: Path) -> None:
    source = between("self.child(x)", "\n".join(child.split("; ")), SUBMODULES)

    reason = QKV().refusal(module_of(source, tmp_path / "odd.py"))

    if CHILDREN[child]:
        assert re.match(rf"between the projections: 'self\.child\(x\)' \({CHILDREN[child]}", reason), reason
    else:
        assert compared(source, tmp_path / "again.py").status == "same"


#: a function, called between -> what the refusal says of it; "" where it is passed over
FUNCTIONS = {
    "def helper(t):\n    return t if t.sum() > 0 else helper(t)": "'helper(t)' (it calls itself)",
    "def helper(t):\n    yield t": "a 'yield' that isn't followed",
    "exec('def helper(t): return t')": "the source of helper can't be read",
    "def helper(t):\n    return t.transpose_(0, 1)": "'t.transpose_(0, 1)' (it may write in place)",
    "def helper(t, *more, **named):\n    return named.get('u', more)[0].add_(1)": "(it may write in place)",
    "def helper(t, n=KEPT):\n    n.append(t)": "the type of 'n' isn't known",
    "def helper(t, n=1, *more, m=None, **named):\n    n = n * 2\n    return t * n + (0 if m is None else m)": "",
    "def helper(t):\n    if t.dim() > 9:\n        return None\n    return [z * 2 for z in t.unbind()]": "",
    "".join(f"def f{n}(t):\n    return f{n + 1}(t)\n\n\n" for n in range(9)) + "helper = f0": "(it goes too deep)",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_that_may_write_is_told(function: str, tmp_path: Path) -> None:
    source = between("helper(x)", helpers=function)

    reason = QKV().refusal(module_of(source, tmp_path / "odd.py"))

    if FUNCTIONS[function]:
        assert reason.startswith("between the projections: 'helper(x)' (")
        assert FUNCTIONS[function] in reason
    else:
        assert compared(source, tmp_path / "again.py").status == "same"


# --- the calls themselves --------------------------------------------------------------------------------------------

BOTH = "if extra is not None:\n    y = extra\nelse:\n    y = x\n"
#: a forward -> why it is refused; True where it is one call and a split, False where it is asked at run time
ODD: dict[str, str | bool] = {
    ALL: True,
    "q = self.q_proj(x)\nk = self.k_proj(x)\nif extra is None:\n    v = self.v_proj(x)\nelse:\n    v = k": True,
    "q = self.q_proj(x); k = self.k_proj(x); v = self.v_proj(x)": True,
    "y = x\nq, k, v = self.q_proj(x), self.k_proj(y), self.v_proj(y)": False,
    f"{ALL}\nk = k + self.k_proj(x)": False,
    "if self.q_proj(x).sum() > 0:\n    pass\nq, k, v = x, self.k_proj(x), self.v_proj(x)": False,
    "q = x if extra is not None else self.q_proj(x)\nk, v = self.k_proj(x), self.v_proj(x)": False,
    "q = extra or self.q_proj(x)\nk, v = self.k_proj(x), self.v_proj(x)": False,
    "try:\n    q = self.q_proj(x)\nfinally:\n    k, v = self.k_proj(x), self.v_proj(x)": True,
    f"return x\n{ALL}": True,
    f"{BOTH}q, k, v = self.q_proj(x), self.k_proj(y), self.v_proj(y)": False,
    f"if extra is not None:\n    return extra\n{ALL}": True,
    f"for _ in range(2):\n    {ALL}\n    x = q + k + v": "q_proj is called in a loop",
    "q, k = self.q_proj(x), self.k_proj(x)\nv = self.v_proj((y := x))": "passes something other than one variable",
    "q = self.q_proj(x + 1)\nk, v = self.k_proj(x), self.v_proj(x)": "passes something other than one variable",
    "q = ((x := x * 2), self.q_proj(x))[1]\nk, v = self.k_proj(x), self.v_proj(x)": False,
    "q, k = self.q_proj(x), self.k_proj(x)\nv = self.v_proj(extra)": "they are given different variables: .*extra",
    # As in Reformer: in one branch they are given one variable.
    f"if extra is None:\n    {ALL}\nelse:\n    y = torch.cat([x, extra])\n    q, k, v = self.q_proj(x), "
    "self.k_proj(y)[: len(x)], self.v_proj(y)[: len(x)]": False,
    # As in Luke: keys and values are given one variable, and queries another one as well.
    "y = x + 1\nk, v = self.k_proj(y), self.v_proj(y)\nif extra is None:\n    q = self.q_proj(x)\nelse:\n"
    "    q = self.q_proj(y)": "they are given different variables",
    f"{BOTH}y = y + 1\nq, k, v = self.q_proj(x), self.k_proj(y), self.v_proj(y)": "given different variables",
    "y = x + 1\nq, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(y)": "given different variables",
    # As in DETR: positions are added for queries and keys, and values are given what was there before.
    "if extra is not None:\n    y = x\n    x = x + extra\nq, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(y)": (
        "they are given different variables: q_proj x, k_proj x, v_proj y"
    ),
    "x = x + 1\ny = x\nq, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(y)": False,
    f"if False:\n    {ALL}\nq, k = self.q_proj(x), self.k_proj(x)\nv = q": "forward calls k_proj, q_proj alone",
    f"{ALL}\nself.q_proj = self.k_proj": r"Odd\.forward\(\) takes self\.q_proj, self\.k_proj, which must stay",
    f"{ALL}\nother = self.q_proj": r"Odd\.forward\(\) takes self\.q_proj, which must stay modules",
    "q, k, v = self.q_proj(x, x), self.k_proj(x), self.v_proj(x)": "passes something other than one variable",
    "q, k, v = self.q_proj(*[x]), self.k_proj(x), self.v_proj(x)": "passes something other than one variable",
    "q, k, v = [self.q_proj(x) for _ in 'a'][0], self.k_proj(x), self.v_proj(x)": "called in a comprehension",
    f"def f():\n    return self.q_proj(x)\n\n\n{ALL}": "q_proj is called in a nested function",
    f"def f():\n    x.add_(1)\n\n\n{ALL}": "between the projections: a function that isn't followed",
    f"f = lambda: x.add_(1)\n{ALL}": "between the projections: a function that isn't followed",
    f"def f(x):\n    return x\n\n\n{ALL}": "between the projections: a function that isn't followed",
    f"{ALL}\nsuper().train()": r"forward calls super\(\)",
    f"{ALL}\nwith torch.no_grad():\n    self.k_proj.weight.mul_(0.5)": True,
    f"{ALL}\nself.__own = q": "forward uses private names",
    f"{ALL}\nyield q": "forward is a generator",
    "q = k = v = self.norm(x)": r"no method of Odd calls q_proj, k_proj, v_proj together",
    "for _ in range(2):\n    q, k = self.q_proj(x), self.k_proj(x)\n    x = x * 2\n    v = self.v_proj(x)": "loop",
    "q, k = self.q_proj(x), self.k_proj(x)\nfor x in [x]:\n    pass\nv = self.v_proj(x)": "x is assigned between",
    "q, k = self.q_proj(x), self.k_proj(x)\ny = [x for x in (1, 2)]\nv = self.v_proj(x)": "x is assigned between",
    f"y = [x for x in (1, 2)]\n{ALL}": True,
    "q, k = self.q_proj(x), self.k_proj(x)\n(x := x * 2)\nv = self.v_proj(x)": "x is assigned between",
    "q, k = self.q_proj(x), self.k_proj(x)\ny = x\ndel x\nx = y\nv = self.v_proj(x)": "x is assigned between",
    f"if x.sum() > 0:\n    {ALL}\nelse:\n    x = x + 1\n    {ALL}": "x is assigned between the projections",
    "q = self.q_proj(x)\nfor _ in range(2):\n    k, v = self.k_proj(x), self.v_proj(x)\n    x.add_(1)": "in a loop",
    "q = self.q_proj(x)\nfor _ in range(2):\n    k, v = self.k_proj(x), self.v_proj(x)\n    x[0] = 1": "in a loop",
    "with torch.no_grad():\n    q = self.q_proj(x)\nk, v = self.k_proj(x), self.v_proj(x)": (
        "between the projections: a context that isn't followed"
    ),
}


@pytest.mark.parametrize("body", ODD)
def test_how_projections_are_called_decides_how_they_are_joined(body: str, tmp_path: Path) -> None:
    source, expected = source_of(f"{body}\nreturn q + k + v"), ODD[body]
    stock = module_of(source, tmp_path / "odd.py")

    if isinstance(expected, str):
        assert not QKV().is_fusable(stock)
        assert re.search(expected, QKV().refusal(stock)), QKV().refusal(stock)
    else:
        assert form_of(source, tmp_path / "form.py").is_split is expected
        assert compared(source, tmp_path / "again.py").status == "same"


# --- what is known of parameters -------------------------------------------------------------------------------------

UNLIKE = """
class Unlike:
    def update(self, t, *others):
        t.mul_(0.5)
        return t, t

    add = copy = append = view = update
"""


@pytest.mark.parametrize("method", ["update", "add", "copy", "append", "view"])
def test_what_is_no_value_runs_the_original(method: str, tmp_path: Path) -> None:
    """Row 28: what a method does tells its object, not its name."""
    body = f"q = self.q_proj(x)\nif extra is not None:\n    extra.{method}(x)\n{ALL.replace('q, ', '', 1)}"
    source = source_of(f"{body.replace('self.q_proj(x), self.k', 'self.k', 1)}\nreturn q + k + v")
    source = source.replace("\nclass Odd", f"{UNLIKE}\n\nclass Odd")
    stock: Any = module_of(source, tmp_path / "odd.py")
    fused: Any = fuse(QKV(), copy.deepcopy(stock), fused_class_of(QKV(), stock))
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    unlike = stock.forward.__globals__["Unlike"]()

    assert form_of(source, tmp_path / "form.py").checked == ("self.are_values(extra)",)
    for extra in (None, unlike):
        torch.testing.assert_close(fused(x.clone(), extra), stock(x.clone(), extra), atol=1e-9, rtol=0)


#: what writes into its second argument, as the convolutions of linear attention do into the state of a cache
STEP = "def step(t, state):\n    state.copy_(torch.cat([state, t])[-len(state):])\n    return t * 2\n"
#: what is between the projections -> what the refusal says; "" where it is passed over
STATES = {
    "state = extra.get_conv_state(0)\nstep(x, state)": "",
    "state = None if extra is None else extra.get_recurrent_state(0)\nif state is not None:\n    step(x, state)": "",
    "state = extra.get_conv_state(0)\nstep(state, x)": r"'state\.copy_.*' \(it may write in place\)",
    "state = extra.get_conv_state(0) if extra else x\nstep(x, state)": r"'state\.copy_.*' \(it may write in place\)",
    "state = extra.get_conv_state(0)\nstate = x\nstep(x, state)": r"'state\.copy_.*' \(it may write in place\)",
    "state = extra.view(0)\nstep(x, state)": r"'state\.copy_.*' \(it may write in place\)",
    "state = self.kept.get_conv_state(0)\nstep(x, state)": r"the type of 'self\.kept' isn't known",
    "state = extra.get_conv_state(0)\nstate.set_(x)\nstep(x, state)": r"'state\.set_\(x\)' \(it may write in place\)",
}


@pytest.mark.parametrize("statements", STATES)
def test_the_state_of_a_cache_may_be_written_to(statements: str, tmp_path: Path) -> None:
    reason = QKV().refusal(module_of(between(statements, helpers=STEP), tmp_path / "odd.py"))

    if hasattr(Cache, "get_conv_state"):  # the oldest release has none
        assert re.search(STATES[statements] or "^$", reason)
    else:
        assert "it may write in place" in reason or "isn't known" in reason


VALUES = [None, 1, 0.5, "a", torch.zeros(1), [1, (2.0, {"a": torch.zeros(1)})], DynamicCache(), torch.Size([1])]
OTHERS = [object(), nn.Identity(), [1, object()], {"a": (object(),)}, len, torch.float32.__class__]


def test_what_values_are() -> None:
    assert all(are_values([each]) for each in VALUES)
    assert not any(are_values([each]) for each in OTHERS)


# --- what is known of the module -------------------------------------------------------------------------------------

PROJECTIONS = "q, k, v = self.q_proj(x), self.k_proj(y), self.v_proj(y)"
#: name -> (forward, what the module says so that it can be fused, what it says so that it can't)
DECIDED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a string": (
        f'y = x\nif self.kind == "rotary":\n    y = x + 1\n{PROJECTIONS}',
        {"kind": "relative"},
        {"kind": "rotary"},
    ),
    "a number": (f"y = x\nif self.ratio > 1:\n    y = x * self.ratio\n{PROJECTIONS}", {"ratio": 1}, {"ratio": 2}),
    "a fraction": (f"y = x\nif not self.share <= 0.5:\n    y = x + 1\n{PROJECTIONS}", {"share": 0.5}, {"share": 0.75}),
    "a write": (
        "q = self.q_proj(x)\nif self.share > 0.5:\n    x.add_(1)\nk, v = self.k_proj(x), self.v_proj(x)",
        {"share": 0.5},
        {"share": 0.75},
    ),
}


def attention(body: str, tmp_path: Path) -> nn.Module:
    source = (
        "from torch import nn\n\n\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.q_proj, self.k_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)\n\n"
        "    def forward(self, x):\n"
        f"{textwrap.indent(body, ' ' * 8)}\n"
        "        return q.sum(-1) + k.sum(-1) + v.sum(-1)\n"
    )
    odd: nn.Module = written_module(source, tmp_path / "odd_modeling.py").Odd()
    randomize(odd)
    return odd


def say(module: nn.Module, said: dict[str, Any]) -> None:
    for name, value in said.items():
        setattr(module, name, value)


@pytest.mark.parametrize("name", DECIDED)
def test_what_a_module_says_of_itself_decides_a_branch(name: str, tmp_path: Path) -> None:
    body, fusable, other = DECIDED[name]
    stock = attention(body, tmp_path)
    say(stock, fusable)
    fused = copy.deepcopy(stock)

    fused = fuse(QKV(), fused, fused_class_of(QKV(), fused))
    inputs = torch.randn(2, 5, 64)

    torch.testing.assert_close(fused(inputs.clone()), stock(inputs.clone()))
    assert "qkv_proj" in dict(fused.named_children())
    for module in (stock, fused):  # what was said is checked at every call
        say(module, other)
    torch.testing.assert_close(fused(inputs.clone()), stock(inputs.clone()))


@pytest.mark.parametrize("name", DECIDED)
def test_what_a_module_says_of_itself_refuses_it(name: str, tmp_path: Path) -> None:
    body, fusable, other = DECIDED[name]
    stock = attention(body, tmp_path)
    say(stock, fusable)
    assert QKV().is_fusable(stock)
    say(stock, other)  # what was found out isn't remembered for a module that says something else

    assert not QKV().is_fusable(stock)
    assert re.search(r"different variables|between the projections: 'x\.add_", QKV().refusal(stock))


@pytest.mark.parametrize("change", ["self.flag = False", "self.change()"])
def test_what_methods_assign_decides_no_branch(change: str, tmp_path: Path) -> None:
    body = f"{change}\nq = self.q_proj(x)\nif not self.flag:\n    x.add_(1)\nk, v = self.k_proj(x), self.v_proj(x)"

    reason = QKV().refusal(module_of(source_of(f"{body}\nreturn q + k + v"), tmp_path / "odd.py"))

    assert "between the projections: 'x.add_(1)' (it may write in place)" in reason


def test_modules_that_say_different_things_share_a_class_where_it_decides_nothing(tmp_path: Path) -> None:
    one = attention(f"y = x\nif self.number < 1:\n    print(x)\n{PROJECTIONS}", tmp_path)
    two = copy.deepcopy(one)
    say(one, {"number": 0})
    say(two, {"number": 1})

    assert fused_class_of(QKV(), one) is fused_class_of(QKV(), two)


def test_layers_of_one_class_are_fused_where_they_reduce_nothing() -> None:
    config = PvtV2Config(
        hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], sr_ratios=[8, 4, 2, 1]
    )

    resolution = Patcher(fusions="qkv").resolve(PvtV2ForImageClassification, config)

    assert len(resolution.fused) == 1
    assert len(resolution.refused) == 3
    assert all("hidden_states is assigned between the projections" in each for each in resolution.refused.values())


# --- how the modules around call it ----------------------------------------------------------------------------------

#: how the layers of a list are called, with `state` as the parameter in question -> whether None may be expected
CALLED = {
    "one after the other": ("for layer in self.layers:\n    x = layer(x)", True),
    "with their numbers": ("for i, layer in enumerate(self.layers):\n    x = layer(x, None)", True),
    "by number": ("for i in range(2):\n    x = self.layers[i](x)", True),
    "taken by number": ("layer = self.layers[0]\nx = layer(x)", True),
    "passed on": ("for layer in self.layers:\n    x = layer(x, state=state)", True),
    "set where there is one": (
        "for layer in self.layers:\n    x = layer(x, state)\n    if state is not None:\n        state = x",
        True,
    ),
    "given whatever else comes": ("for layer in self.layers:\n    x = layer(x, **kwargs)", True),
    "given all that comes": ("for layer in self.layers:\n    x = layer(*kwargs.values())", False),
    "given something": ("for layer in self.layers:\n    x = layer(x, state=x)", False),
    "called by nothing": ("pass", False),
}
AROUND = """
from torch import nn


class Layer(nn.Module):
    def forward(self, x, state=None):
        return x


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x, state=None, **kwargs):
{BODY}
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x{MORE}):
        return self.encoder(x{MORE})
"""


def around(tmp_path: Path, body: str, more: str = "") -> dict[str, nn.Module]:
    source = AROUND.replace("{BODY}", textwrap.indent(body, " " * 8)).replace("{MORE}", more)
    return dict(written_module(source, tmp_path / "odd_modeling.py").Model().named_modules())


@pytest.mark.parametrize("name", CALLED)
def test_how_the_layers_of_a_list_are_called_is_followed(name: str, tmp_path: Path) -> None:
    body, is_none = CALLED[name]

    found = Caller(around(tmp_path, body), "encoder.layers.1")._passes_nothing("state")

    assert found is is_none


def test_layers_that_are_passed_nothing_on_are_fused() -> None:
    config = DebertaV2Config(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )

    resolution = Patcher(fusions="qkv").resolve(DebertaV2ForMaskedLM, config)

    assert list(resolution.fused) == [f"deberta.encoder.layer.{number}.attention.self" for number in range(2)]


def test_a_class_that_is_given_no_module_has_no_form() -> None:
    reason = forms_of({"": (nn.Linear(2, 2), GROUP, None)})[""]
    assert reason == "no method of Linear calls q_proj, k_proj, v_proj together"
