"""Forwards from a grammar, as source: statements that read, alias and write stand around projections of one input."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

HELPERS = Path(__file__).with_name("helpers.py")

#: What reads a tensor `{t}`, and gives another one.
READS = [
    "{n} = {t} * 2",
    "{n} = {t} + {u}",
    "{n} = torch.sigmoid({t})",
    "{n} = F.gelu({t})",
    "{n} = F.relu({t}, inplace=False)",
    "{n} = F.dropout({t} + 1, 0.0, self.training)",
    "{n} = self.norm({t})",
    "{n} = self.reads({t})",
    "{n} = self.function({t})",
    "{n} = self.read_method({t})",
    "{n} = reads({t})",
    "{n} = sums({t}, {u})",
    "{n} = sums(*[{t}, {u}])",
    "{n} = sums(a={t}, b={u})",
    "{n} = {t}.clone()",
    "{n} = {t}.softmax(-1)",
    "{n} = torch.cat([{t}, {u}], dim=0)[:2] + 1",
    "{n} = torch.stack([{t}, {u}]).sum(0)",
    "{n} = -{t}",
    "{n} = [z * 2 for z in [{t}, {u}]][0]",
    "{n} = sum(z * 2 for z in ({t}, {u}))",
    "{n} = {t} if {t}.shape[0] == 2 else {u} * 2",
    "{n} = self.layers[1]({t})",
    "{n} = 0\nfor layer in self.layers:\n    {n} = {n} + layer({t})",
    "{n} = {t} * self.peeked",
    "def inner(z):\n    return z * 3\n\n\n{n} = inner({t})",
    "{n} = {t} * (1 if isinstance({t}, torch.Tensor) and len({t}.shape) == 3 else 2)",
    "assert {t}.shape[-1] == 8, 'a shape'",
    "size = {t}.size(0)\nsize += 1\n{n} = {t} * size",
    "total = {t}.new_zeros(())\ntotal = total + {u}.mean()\n{n} = {t} * total",
    "import math\n{n} = {t} * math.sqrt(2)",
    "pair = ({t}, {u})\n{n} = pair[0] * pair[1]",
]
#: What shares memory with a tensor.
ALIASES = [
    "{n} = {t}",
    "{n} = {t}",
    "{n} = {t}.view(2, 3, 8)",
    "{n} = {t}[:]",
    "{n} = {t}.transpose(0, 1).transpose(0, 1)",
    "{n} = {t}.reshape(-1).view(2, 3, 8)",
    "{n} = {t}.view(-1).view(2, 3, 8)",
    "{n} = {t}.contiguous()",
    "{n} = {t}.to({t}.dtype)",
    "{n} = {t}.detach()",
    "{n} = {t}.narrow(-1, 0, 8)",
    "{n} = {t}.chunk(1, dim=-1)[0]",
    "{n} = self.identity({t})",
    "{n} = self.drop({t})",
    "{n} = gives_back({t})",
    "{n} = gives_back({u}, other={t})",
    "{n} = ({t}, {u})[0]",
    "{n}, other = {t}, {u}",
    "{n} = [{t}, {u}][0]",
    'box = {{"a": {t}}}\n{n} = box["a"]',
    "box = [{u}]\nbox.append({t})\n{n} = box[-1]",
    "{n} = {t} if {u}.sum() > 0.1 else {u}",
    "{n} = {u}\nif {u}.sum() > 0.1:\n    {n} = {t}",
    "({n} := {t})",
    "{n} = torch.as_strided({t}, (2, 3, 8), {t}.stride())",
    "{n} = {u}\nfor {n} in [{t}]:\n    pass",
    "{n} = {u}\ntry:\n    {n} = {t}\nfinally:\n    pass",
    "{n} = {u}\nmatch ({t}, {u}):\n    case ({n}, _):\n        pass",
]
#: What writes into a tensor, or does something else that the projections may feel.
WRITES = [
    "{t}.mul_(0.5)",
    "{t} += 1",
    "{t} *= {u}",
    "{t}[0] = 1.0",
    "{t}[..., 0] *= 0.5",
    "{t}.view(-1).add_(1)",
    "{t}.data.mul_(0.5)",
    "{t}.data = {t}.data * 2",
    "torch.add({t}, 1, out={t})",
    "torch.mul({t}, {u}, out={t})",
    "F.relu_({t})",
    "F.relu({t}, inplace=True)",
    "F.relu({t}, True)",
    "F.dropout({t}, 0.5, False, True)",
    "F.hardtanh({t}, -1.0, 0.5, True)",
    "self.act_in({t})",
    "self.chain({t})",
    "self.writes({t})",
    "writes({t})",
    "writes_deep({t})",
    "writes_first({t}, {u})",
    "writes_first(*[{t}, {u}])",
    "self.write_method({t})",
    'getattr({t}, "mul_")(0.5)',
    'name = "mul_"\ngetattr({t}, name)(0.5)',
    "method = {t}.mul_\nmethod(0.5)",
    "[{t}.mul_(0.5) for _ in range(2)]",
    "[z.mul_(0.5) for z in [{t}]]",
    "[y := {t}.add_(1) for _ in range(1)]",
    "sum(z.mul_(0.5).sum() for z in [{t}])",
    "later = (z.add_(1) for z in [{t}])\nlist(later)",
    "(lambda: {t}.add_(1))()",
    "(lambda z: z.add_(1))({t})",
    "do = lambda: {t}.add_(1)\ndo()",
    "list(map(lambda z: z.mul_(0.5), [{t}]))",
    "list(map(torch.Tensor.neg_, [{t}]))",
    "sorted([{t}], key=lambda z: z.mul_(0.5).sum())",
    "def write():\n    {t}.add_(1)\n\n\nwrite()",
    "def write(z):\n    z[0] = 0.0\n\n\nwrite({t})",
    "match 1:\n    case 1:\n        {t}.add_(1)",
    "match {t}:\n    case w:\n        w.add_(1)",
    "try:\n    {t}.mul_(0.5)\nfinally:\n    pass",
    "try:\n    raise ValueError\nexcept ValueError:\n    {t}.mul_(0.5)",
    "with torch.no_grad():\n    {t}.mul_(0.5)",
    "for _ in range(2):\n    {t}.mul_(0.5)",
    "for z in [{t}]:\n    z.mul_(0.5)",
    "count = 0\nwhile count < 2:\n    count += 1\n    {t}.mul_(0.5)",
    "if {t}.sum() > 0.1:\n    {t}.mul_(0.5)",
    "{t}.copy_({u} * 0.5)",
    "torch._foreach_mul_([{t}], 0.5)",
    "operator.imul({t}, 2)",
    "{t}.__imul__(2)",
    "{t}.__setitem__(0, 1.0)",
    "torch.Tensor.mul_({t}, 0.5)",
    "torch.nn.init.constant_({t}, 0.25)",
    "self.kept = {t}\nself.write_kept()\nself.kept = None",
    "self.kept = {t}\nself.kept.mul_(0.5)\nself.kept = None",
    "KEPT.append({t})\nKEPT.pop().mul_(0.5)",
    "box = [{t}]\nbox[0].mul_(0.5)",
    "box = [{t}]\nbox[0] += 1",
    'box = {{}}\nbox["a"] = {t}\nbox["a"].mul_(0.5)',
    "box = []\nother_box = box\nbox.append({t})\nother_box[0].mul_(0.5)",
    "{t}.swapaxes(0, 1).mul_(0.5)",
    "{t}.unbind(0)[0].mul_(0.5)",
    "torch.flatten({t}).add_(1)",
    "first, *rest = {t}\nfirst.mul_(0.5)",
    "{t}.masked_fill_({t} > 0, 0.5)",
    "{t}.clamp_(max=0.5)",
    "{t}.t_() if {t}.dim() == 2 else {t}.neg_()",
    "eval('{t}').mul_(0.5)",
    "z = {t}.numpy(force=True)\nz *= 0.5",
    "a = b = {t}\nb.mul_(0.5)",
    "a = {u}\nfor _ in range(2):\n    a.mul_(0.5)\n    a = {t}",
    "def first():\n    return {t}\n\n\nfirst().mul_(0.5)",
    "class Local:\n    held = {t}\n\n\nLocal.held.mul_(0.5)",
    "box = []\nbox += [{t}]\nbox[0].mul_(0.5)",
    "box = [0]\nbox[0] = {t}\nbox[0].mul_(0.5)",
    'box = {{}}\nbox.update(a={t})\nbox["a"].mul_(0.5)',
    'box = {{}}\nbox.setdefault("a", {t}).mul_(0.5)',
    "a, *rest = [{u}, {t}]\nrest[0].mul_(0.5)",
    "def keep(z, held=[]):\n    held.append(z)\n    return held\n\n\nkeep({t})[-1].mul_(0.5)",
    "self.kept = [{t}]\nself.kept[0].mul_(0.5)\nself.kept = None",
    "it = iter([{t}])\nnext(it).mul_(0.5)",
    "for i, z in enumerate([{t}]):\n    z.mul_(0.5)",
    "for a, b in zip([{t}], [{u}]):\n    a.mul_(0.5)",
    "z = ({t},) + ({u},)\nz[0].mul_(0.5)",
    "z = [{t}] * 2\nz[1].mul_(0.5)",
    "for z in reversed([{t}]):\n    z.mul_(0.5)",
    'z = dict(a={t})\nz["a"].mul_(0.5)',
    'z = {{**dict(a={t})}}\nz["a"].mul_(0.5)',
    "z = [*[{t}]]\nz[0].mul_(0.5)",
    "z = torch.broadcast_tensors({u}, {t})[1]\nz.mul_(0.5)",
    "torch.split({t}, 8, -1)[0].mul_(0.5)",
    "{t}.expand(2, 3, 8).mul_(0.5)",
    "{t}.mT.mul_(0.5)",
    'getattr({t}, "data").mul_(0.5)',
    "operator.itemgetter(0)([{t}]).mul_(0.5)",
    "(lambda z={t}: z.mul_(0.5))()",
    "[z for z in [{t}]][0].mul_(0.5)",
    "gives_back(**dict(t={t})).mul_(0.5)",
    "self.identity.forward({t}).mul_(0.5)",
    "while True:\n    z = {t}\n    break\nz.mul_(0.5)",
    "try:\n    z = {t}\n    raise ValueError\nexcept ValueError:\n    z.mul_(0.5)",
    "w = z = {u} * 1\nfor _ in range(2):\n    w = z\n    z = {t}\nw.mul_(0.5)",
    "def outer():\n    return first()\n\n\ndef first():\n    return {t}\n\n\nouter().mul_(0.5)",
    "assert {t}.mul_(0.5) is not None",
    "f'{{{t}.mul_(0.5).sum()}}'",
    "{t}[{t}.mul_(0.5).dim() - 3 :]",
    "Base.write_method(self, {t})",
    "type(self).write_method(self, {t})",
    "self.__dict__['kept'] = {t}\nself.write_kept()\nself.kept = None",
    "z = {t}.unsqueeze(0)\nz[0, 0] = 0.0",
    "z = torch.einsum('abc->abc', {t})\nz.mul_(0.5)",
    "z = F.pad({t}, (0, 0))\nz.mul_(0.5)",
    "z = torch.atleast_1d({u}, {t})[1]\nz.mul_(0.5)",
    "z = {t}.type_as({u})\nz.mul_(0.5)",
    "z = gives_back({u}, {t})\nz += 1",
    "do = gives_back\nz = do({t})\nz.mul_(0.5)",
    "do = self.write_method\ndo({t})",
    "do = writes if {u} is not None else reads\ndo({t})",
]
#: Writes that are allowed where nothing else can hold what is written to: most others never are.
OPERATORS = ["{t} += 1", "{t} *= {u}", "{t} -= 0.5 * {t}", "{t} @= torch.ones(8, 8).to({t})"]
#: What binds a name anew.
REBINDS = [
    "{t} = {t} * 2",
    "({t} := {t} + 1)",
    "def rebind():\n    nonlocal {t}\n    {t} = {t} + 1\n\n\nrebind()",
    "[{t} := {t} + 1 for _ in range(1)]",
    "later = ({t} := {t} + 1 for _ in range(1))\nlist(later)",
    "for {t} in [{t} * 2]:\n    pass",
    "if {u}.sum() > 0.1:\n    {t} = {t} * 2",
    "({u}.sum() > 0.1).item() and ({t} := {t} * 2)",
    "with torch.no_grad():\n    {t} = {t} * 2",
    "{t}, {u} = {u}, {t}",
    "try:\n    {t} = {t} * 2\n    raise ValueError\nexcept ValueError:\n    pass",
]
#: What changes how projections compute.
MODES = [
    "torch.set_grad_enabled(False)",
    "turns_off_gradients()",
    "with torch.no_grad():\n    self.k_proj.weight.mul_(0.5)",
    "self.v_proj.weight.data.add_(1)",
    "self.change()",
    "self.flag = not self.flag",
    'setattr(self, "flag", False)',
    'vars(self)["flag"] = False',
    "gradients = torch.no_grad()\ngradients.__enter__()",
    "torch.autocast('cpu', torch.bfloat16).__enter__()",
]
#: What is around statements.
AROUND = [
    "if self.flag:",
    "if not self.flag:",
    'if self.kind == "a":',
    "if x.sum() > 0.1:",
    "if extra is None:",
    "if extra is not None:",
    "for _ in range(2):",
    "with torch.no_grad():",
    "with torch.autocast('cpu', torch.bfloat16):",
    "try:",
    "match 1:",
]
PROJECTION = [
    "{p} = self.{p}_proj({t})",
    "{p} = self.{p}_proj({t})",
    "{p} = self.{p}_proj({t})",
    "{p} = self.{p}_proj({t}) * 2",
    "{p} = self.{p}_proj({t}).view(2, 3, 8)",
    "{p} = self.norm(self.{p}_proj({t}))",
    "{p} = self.act_in(self.{p}_proj({t}))",
    "{p} = self.identity(self.{p}_proj({t}))",
    "{p} = self.{p}_proj({t}) if {t}.sum() > 0.1 else {t}",
    "{p} = self.{p}_proj((w := {t}))",
    "{p} = ({t}.mul_(0.5), self.{p}_proj({t}))[1]",
    "{p} = gives_back(self.{p}_proj({t}), other=None)",
    "{p} = self.{p}_proj(self.identity({t}))",
]


class _Program:
    """One forward, as it grows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.parts = ["gate", "up"] if self.random.random() < 0.2 else ["q", "k", "v"]
        self.names = ["x"]
        self.free = 0
        self.lines: list[str] = []

    def source(self) -> str:
        pick = self.random
        for _ in range(pick.choice([0, 0, 0, 1, 2, 3])):
            self.noise(READS + ALIASES)
        #: what the projections are called with: mostly one name
        given = pick.choice(["x", *self.names]) if pick.random() < 0.5 else "x"
        if pick.random() < 0.15:
            given = self.aliased()
        groups = [[part] for part in self.parts]
        if pick.random() < 0.3:
            groups = [self.parts]
        if pick.random() < 0.1:
            groups = []
            self.branched(given)
        for number, group in enumerate(groups):
            if number and pick.random() < 0.45:
                self.noise(self.between())
            others = [name for name in self.names if name not in self.parts]
            target = given if pick.random() < 0.93 else pick.choice(others)
            self.project(group, target)
        for _ in range(pick.choice([0, 1, 1, 2, 3])):
            self.noise(pick.choice([READS, ALIASES, WRITES, WRITES, REBINDS]))
        if pick.random() < 0.08:
            self.noise(MODES)
        self.lines.append(f"return {self.result()}")
        return self.module()

    def aliased(self) -> str:
        """A new name for what another name holds that was computed here: mostly that one is written to then."""
        made = f"made{self.free}"
        self.lines.append(f"{made} = {self.random.choice(['x * 2', 'x + x', 'self.norm(x)', 'torch.sigmoid(x)'])}")
        self.names += [made] * 4
        self.lines.append(self.random.choice(ALIASES).format(n=f"other{self.free}", t=made, u="x"))
        return f"other{self.free}"

    def branched(self, given: str) -> None:
        """All projections in either branch of a condition, some of them of another tensor there."""
        pick, names, branches = self.random, self.names.copy(), list[str]()
        for _ in range(2):
            start = len(self.lines)
            for part in self.parts:
                if pick.random() < 0.3:
                    self.noise(self.between())
                target = given if pick.random() < 0.8 else pick.choice(self.names)
                self.lines.append(PROJECTION[0].format(p=part, t=target))
            branches.append("\n".join(f"    {line}" for text in self.lines[start:] for line in text.splitlines()))
            del self.lines[start:]
            self.names = names.copy()
        head = pick.choice([each for each in AROUND if each.startswith("if ")])
        self.lines.append(f"{head}\n{branches[0]}\nelse:\n{branches[1]}")
        self.names += self.parts

    def between(self) -> list[str]:
        return self.random.choices([READS, ALIASES, WRITES, OPERATORS, REBINDS, MODES], [10, 5, 5, 3, 1, 1])[0]

    def project(self, group: list[str], target: str) -> None:
        pick = self.random
        if len(group) > 1 and pick.random() < 0.5:
            calls = ", ".join(f"self.{part}_proj({target})" for part in group)
            text = f"{', '.join(group)} = {calls}"
        else:
            plain = pick.random() < 0.7
            forms = PROJECTION[:1] if plain else PROJECTION
            text = "\n".join(pick.choice(forms).format(p=part, t=target) for part in group)
        if pick.random() < 0.06:
            text += f"\n{pick.choice(group)} = {pick.choice(group)} + self.{group[0]}_proj({target})"
        if pick.random() < 0.12:
            before = "".join(f"{part} = {target} * 1\n" for part in group)
            text = before + self.around(text)
        self.lines.append(text)
        self.names += group

    def around(self, text: str) -> str:
        head = self.random.choice(AROUND)
        body = "\n".join(f"    {line}" for line in text.splitlines())
        if head == "try:":
            return f"try:\n{body}\nfinally:\n    pass"
        if head == "match 1:":
            inner = "\n".join(f"    {line}" for line in body.splitlines())
            return f"match 1:\n    case 1:\n{inner}"
        if head == "for _ in range(2):" and self.random.random() < 0.5:
            target = self.random.choice(self.names)
            body += "\n" + self.random.choice([f"    {target}.mul_(0.5)", f"    {target} = {target} * 2"])
        return f"{head}\n{body}"

    def noise(self, choices: list[str]) -> None:
        pick = self.random
        target = pick.choice([*self.names, self.names[-1], "x"])
        self.free += 1
        name = f"t{self.free}"
        form = pick.choice(choices)
        text = form.format(t=target, u=pick.choice(self.names), n=name)
        # A nested function with `nonlocal` needs a name of the method itself.
        if pick.random() < 0.1:
            text = (f"{name} = {target}\n" if "{n}" in form else "") + self.around(text)
        self.lines.append(text)
        if "{n}" in form:
            self.names.append(name)

    def result(self) -> str:
        pick = self.random
        total = " + ".join(f"{number + 1} * {name}" for number, name in enumerate(self.parts))
        if pick.random() < 0.25:
            names = pick.sample(self.names, min(2, len(self.names)))
            return f"({total}, {', '.join(names)})"
        return f"torch.tanh({total}) * {pick.choice(self.names)}.sum()"

    def module(self) -> str:
        biases = [self.random.random() < 0.5 for _ in self.parts]
        if any("autocast" in line for line in self.lines):  # a bias that is added afterwards is rounded once more
            biases = [biases[0]] * len(biases)
        return source_of("\n".join(self.lines), dict(zip(self.parts, biases, strict=True)))


def source_of(body: str, parts: Mapping[str, bool] | None = None, more: str = "") -> str:
    """A module with a class `Odd` whose forward has this body.

    Args:
        parts: what is projected, and whether with a bias.
        more: more of its `__init__`.
    """
    parts = {"q": False, "k": False, "v": False} if parts is None else parts
    made = [f"self.{part}_proj = nn.Linear(8, 8, bias={bias})" for part, bias in parts.items()]
    return (
        f"{HELPERS.read_text()}\n\nclass Odd(Base):\n    def __init__(self):\n        super().__init__()\n"
        f"{_indented([*made, *more.splitlines()])}\n\n    def forward(self, x, extra=None):\n"
        f"{_indented(body.splitlines())}\n"
    )


def _indented(lines: list[str]) -> str:
    return "\n".join(f"        {line}" if line else "" for line in lines)


def program(seed: int) -> str:
    """The source of a module with a class `Odd`, the same for one seed."""
    return _Program(seed).source()


def forward_of(source: str) -> str:
    """The forward of a generated module, without the helpers."""
    return source[source.index("class Odd(") :]
