"""Code under a patch that changes upstream: seen by its fingerprint, shown, and merged on request."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from hypothesis import example, given, settings, strategies as st

from patcher.codegen import CheckResult, PatchConfig, check, create_patch_from_external, generate, write
from patcher.codegen.files.rebase import changed_originals, write_rebase
from patcher.codegen.generation.provenance import recorded
from patcher.errors import CodegenError
from patcher.source.canonical import fingerprint
from patcher.source.definitions import find
from patcher.source.differences import exact_diff, reversed_diff

NEWLINES = st.sampled_from(["\n", "\r\n", "\r", "\x0c", "\u2028", ""])
LINES = st.sampled_from(["", "x", "y", "-- x", "++ x", "\\ No newline at end of file", " ", "@@ -1 +1 @@", "é"])
TEXTS = st.lists(st.tuples(LINES, NEWLINES).map("".join), max_size=25).map("".join)


@settings(max_examples=300, deadline=None)
@given(old=TEXTS, new=TEXTS)
@example(old="", new="x")
@example(old="x", new="")
@example(old="x\n" * 20, new="x\n" * 9 + "y")
def test_a_diff_and_one_text_give_the_other(old: str, new: str) -> None:
    diff = exact_diff(old, new, "a", "b")
    assert reversed_diff(diff, new) == old
    assert (diff == "") == (old == new)


@settings(max_examples=200, deadline=None)
@given(old=TEXTS, new=TEXTS, other=TEXTS)
def test_a_diff_of_another_text_is_refused_or_touches_nothing_that_differs(old: str, new: str, other: str) -> None:
    diff = exact_diff(old, new, "a", "b")
    try:
        result = reversed_diff(diff, other)
    except ValueError:
        return
    # every line that the diff tells was there, so the way back is the same diff but for where its hunks are
    again = exact_diff(result, other, "a", "b")
    changed = [sorted(line for line in each.split("\n")[2:] if line[:1] in "+-") for each in (diff, again)]
    assert changed[0] == changed[1] or diff == "" or reversed_diff(again, other) == result


# --- the fingerprint -----------------------------------------------------------------------------------------------

#: a source with two variants of each part: what is added in front or behind in the second makes no difference
SOURCE = '''
import math

from torch import nn


class Norm(nn.Module):
    """Normalizes."""

    def __init__(self, size: int = 1):
        super().__init__()
        self.size = size{norm_init}

    def forward(self, x):
        """Forward."""
        return x * math.pi{norm_forward}

    @property
    def eps(self):
        return 1{norm_eps}

    @eps.setter
    def eps(self, value):
        self.value = value{norm_eps_setter}


class Model(nn.Module):
    class Inner:
        def f(self):
            return 1{inner_f}

    def forward(self, x: int) -> int:
        return rotate(x){model_forward}


if math:

    def rotate(x):
        return x{rotate}

else:

    def rotate(x):
        return 0{rotate_else}


def unpatched(x):
    return x{unpatched}
'''
#: the hole of the source, and the name of what is patched there
PATCHED = {
    "norm_init": "Norm.__init__",
    "norm_forward": "Norm.forward",
    "norm_eps_setter": "Norm.eps.setter",
    "inner_f": "Model.Inner.f",
    "rotate": "rotate",
    "rotate_else": "rotate",
}
HOLES = re.findall(r"\{(\w+)\}", SOURCE)
CODE = [" + 1", "; pass", " or math.e", " if 1 else 2"]
NO_CODE = ["  # a comment", "  # type: ignore", "\n\n", " "]
#: edits of the whole text that no patch has to know of
FORMATTING = [
    ("x * math.pi", "(x\n            * math.pi)"),
    ('"""Forward."""', '"""Forward,\n        in other words."""'),
    ('"""Normalizes."""', "'Normalizes more.'"),
    ("size: int = 1", "size: float | None = 1"),
    ("def forward(self, x):", "def forward(self, x: float) -> float:"),
    ("    def rotate(x):", "    # Copied from elsewhere\n    def rotate(x) -> None:"),
    ("return rotate(x)", "return (rotate(x))"),
]


def patched(module: str) -> PatchConfig:
    config = PatchConfig(module, "out.py")
    config.modify_init("Norm", "def init(original_init, self, size):\n    original_init(self, size)")
    config.override_method("Norm.forward", "def forward(self, x):\n    return x")
    config.override_method("Norm.eps.setter", "@eps.setter\ndef eps(self, value):\n    pass")
    config.override_method("Model.Inner.f", "def f(self):\n    return 2")
    config.override_method("Model.extra", "def extra(self):\n    return 2", new=True)
    config.replace_function("rotate", "def rotate(x):\n    return 2")
    return config


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Writes a module, a new one for each name."""
    root = tmp_path_factory.mktemp("originals")
    numbers = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))

        def put(text: str, name: str = "") -> str:
            name = name or f"modeling_original_{next(numbers)}"
            (root / f"{name}.py").write_bytes(text.encode())
            importlib.invalidate_caches()
            return name

        yield put


def filled(holes: dict[str, str]) -> str:
    return SOURCE.format(**{name: holes.get(name, "") for name in HOLES})


@settings(max_examples=60, deadline=None)
@given(
    code=st.dictionaries(st.sampled_from(HOLES), st.sampled_from(CODE), max_size=2),
    quiet=st.dictionaries(st.sampled_from(HOLES), st.sampled_from(NO_CODE), max_size=3),
    edits=st.sets(st.sampled_from(FORMATTING)),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_the_alarm_is_of_the_patches_whose_code_changed(
    place: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
    code: dict[str, str],
    quiet: dict[str, str],
    edits: set[tuple[str, str]],
    newline: str,
) -> None:
    module = place(filled({}))
    config = patched(module)
    path = write(config, tmp_path_factory.mktemp("out"), diff=True)
    assert changed_originals(config, path) == ()
    text = filled(quiet | code)
    for old, new in sorted(edits):
        text = text.replace(old, new, 1)
    place(text.replace("\n", newline), module)
    changes = changed_originals(config, path)
    assert {change.target for change in changes} == {PATCHED[hole] for hole in code if hole in PATCHED}
    for change in changes:
        then = find(ast.parse(filled({})), change.target)
        assert [ast.dump(node) for node in then] == [ast.dump(node) for node in ast.parse(change.then or "").body]
    # a file of the new source has nothing to say
    assert changed_originals(config, write(config, path.parent)) == ()


def test_what_appears_where_a_patch_adds_and_what_goes_away(place: Callable[..., str], tmp_path: Path) -> None:
    module = place("class A:\n    pass\n\n\ndef f():\n    return 1\n")
    config = PatchConfig(module, "out.py")
    config.override_method("A.g", "def g(self):\n    return 2")
    config.replace_function("f", "def f():\n    return 2")
    path = write(config, tmp_path, diff=True)
    assert recorded(path.read_text())["A.g"] == "none"
    place("class A:\n    def g(self):\n        return 3\n", module)
    changes = changed_originals(config, path)
    told = {change.target: (change.then, change.now) for change in changes}
    assert told == {"A.g": ("", "def g(self):\n    return 3\n"), "f": ("def f():\n    return 1\n", "")}
    assert "and is gone" in str(changes[1])


def test_what_is_left_out_counts_where_something_takes_its_place(place: Callable[..., str], tmp_path: Path) -> None:
    source = "def f():\n    return 1\n\n\ndef g():\n    return 1\n\n\nX = 1\nY = 1\n"
    config = PatchConfig(place(source), "out.py")
    config.exclude_from_output("f", "g", "X", "Y")
    config.add_helper("def f():\n    return 2")
    config.add_post_import_block("X = 2")
    path = write(config, tmp_path, diff=True)
    assert set(recorded(path.read_text())) == {"f", "X"}
    place(source.replace("1", "7"), config.source_module)
    assert [(c.target, c.asked) for c in changed_originals(config, path)] == [
        ("X", "exclude_from_output('X')"),
        ("f", "exclude_from_output('f')"),
    ]


def test_of_many_patches_the_fingerprints_stand_at_the_patches(place: Callable[..., str], tmp_path: Path) -> None:
    """The header stays short, and every one of them is found again."""
    names = [f"a_function_with_a_long_name_{number}" for number in range(120)]
    source = "".join(
        f"def {name}():\n    return 1\n\n\nclass {name.title()}:\n    def f(self): ...\n\n\n" for name in names
    )
    config = PatchConfig(place(source), "out.py", "For " + "a long reason, " * 60)
    for name in names:
        config.replace_function(name, f"def {name}():\n    return 2", description="why " * 30)
        config.override_method(f"{name.title()}.f", "def f(self):\n    return 2")
        config.add_import("math", names=[f"pi as {name}_pi"])
    path = write(config, tmp_path, diff=True)
    text = path.read_text()
    header = text[: text.index("# ---", 10)].splitlines()
    assert len(header) + 1 < 40
    assert "# - replace function: 120 times" in header
    assert recorded(text) == {
        name: fingerprint(find(ast.parse(source), name)) for patch in config.patches for name in [patch.definition]
    }
    place(source.replace("return 1", "return 3", 1), config.source_module)
    assert [change.target for change in changed_originals(config, path)] == [names[0]]


@pytest.mark.parametrize("count", [1, 5, 12, 16, 25, 40])
def test_the_header_is_shortened_step_by_step(place: Callable[..., str], count: int) -> None:
    names = [f"function_{number}" for number in range(count)]
    config = PatchConfig(place("".join(f"def {name}():\n    return 1\n\n\n" for name in names)), "out.py")
    for name in names:
        config.replace_function(name, f"def {name}():\n    return 2", description="a reason of some length " * 5)
    text = generate(config)
    header = text[: text.index("# ---", 10)]
    assert header.count("\n") + 1 < 40
    assert ("a reason of some" in header) == (count <= 12)
    assert all(re.search(rf"\b{name}\b", header) for name in names)
    assert len(recorded(text)) == count


# --- the check -----------------------------------------------------------------------------------------------------

HERE = Path(__file__).parent
CONFIG = """
import torch
from torch import nn

from patcher.codegen import PatchConfig, create_patch_from_external

config = PatchConfig("drifting.models.modeling_mixtral", "patched_modeling_mixtral.py")


@config.override_method("MixtralExperts.forward", description="one activation, known in advance")
def silu_forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
    final_hidden_states = torch.zeros_like(hidden_states)
    with torch.no_grad():
        expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes=self.num_experts)
        expert_mask = expert_mask.permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()

    for expert_idx in expert_hit:
        expert_idx = expert_idx[0]
        if expert_idx == self.num_experts:
            continue
        top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
        current_state = hidden_states[token_idx]
        gate, up = nn.functional.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
        current_hidden_states = nn.functional.silu(gate) * up  # the one activation
        current_hidden_states = nn.functional.linear(current_hidden_states, self.down_proj[expert_idx])
        current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
        final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))

    return final_hidden_states


@config.override_method("MixtralRotaryEmbedding.forward", description="in double precision")
@torch.no_grad()
def double_forward(self, x, position_ids):
    inv_freq_expanded = (
        self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1).to(dtype=torch.double, device=x.device)
    )
    position_ids_expanded = position_ids[:, None, :].double()

    device_type = x.device.type if isinstance(x.device.type, str) and x.device.type != "mps" else "cpu"
    # Disable any outside autocast context if any, to really force fp32
    with maybe_autocast(device_type=device_type, enabled=False):
        freqs = (inv_freq_expanded @ position_ids_expanded).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling

    return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


config.patches.append(create_patch_from_external("load_balancing_loss_func", "math", "fsum"))
config.drop_decorators("MixtralExperts", "use_experts_implementation")
"""
OLD, NEW = "5.17.0", "5.23.0"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A project whose file was generated from the older of two releases, and the newer one in its place."""
    package = tmp_path / "lib" / "drifting" / "models"
    package.mkdir(parents=True)
    for init in (package, package.parent):
        (init / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text("")
    config = tmp_path / "moe_patch_gen_config.py"
    config.write_text(CONFIG)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)

    def install(release: str) -> None:
        (package / "modeling_mixtral.py").write_text((HERE / "drift" / f"modeling_mixtral_{release}.txt").read_text())

    def checked(**options: bool) -> CheckResult:
        sys.modules.pop("moe_patch_gen_config", None)
        (result,) = check([config], **options)
        return result

    def written(**options: bool) -> Path:
        from patcher.codegen.files.projects import load_configs

        sys.modules.pop("moe_patch_gen_config", None)
        return write(load_configs(str(config))[0], **options)

    install(OLD)
    path = written(diff=True)
    install(NEW)
    yield SimpleNamespace(config=config, path=path, checked=checked, written=written, install=install)
    sys.modules.pop("moe_patch_gen_config", None)


@pytest.mark.skipif(transformers.__version__ not in (OLD, NEW), reason="the excerpts are of other releases")
def test_the_drift_of_these_tests_is_real() -> None:
    """The excerpt is what transformers ships."""
    release = transformers.__version__
    excerpt = ast.parse((HERE / "drift" / f"modeling_mixtral_{release}.txt").read_text())
    from transformers.models.mixtral import modeling_mixtral

    shipped = ast.parse(Path(str(modeling_mixtral.__file__)).read_text("utf-8"))
    for name in ("MixtralExperts", "MixtralRotaryEmbedding", "load_balancing_loss_func"):
        (mine,), (theirs,) = find(excerpt, name), find(shipped, name)
        assert ast.dump(mine) == ast.dump(theirs)


def test_a_changed_original_fails_the_check_and_both_are_shown(project: SimpleNamespace) -> None:
    project.config.write_text(re.sub(r"maybe_autocast\(.*\)", "torch.no_grad()", CONFIG))
    project.install(OLD)
    project.written(diff=True)
    project.install(NEW)
    before = project.path.read_bytes(), project.path.with_suffix(".diff").read_bytes()
    for fix in (False, True):
        result = project.checked(fix=fix)
        assert (result.ok, result.fixed, result.error) == (False, False, "")
        assert result.drift
        assert [change.target for change in result.originals] == [
            "MixtralExperts.forward",
            "MixtralRotaryEmbedding.forward",
            "load_balancing_loss_func",
        ]
        said = str(result)
        assert f"{project.config}:10: override_method('MixtralExperts.forward') patches code that has changed" in said
        assert "one_hot(top_k_index, num_classes=self.num_experts)\n+  " in said
        assert "one_hot(top_k_index, num_classes=self.num_experts + 1)\n   " in said
        assert (project.path.read_bytes(), project.path.with_suffix(".diff").read_bytes()) == before
    # generated again, it is taken over
    project.written(diff=True)
    assert project.checked().ok


def test_an_original_that_breaks_the_patch_is_shown_with_the_error(project: SimpleNamespace) -> None:
    result = project.checked()
    assert "'maybe_autocast', which patched_modeling_mixtral.py does not define" in result.error
    assert len(result.originals) == 3
    assert "+    freqs = position_ids[..., None].float() * self.inv_freq.to(" in str(result)


#: what becomes of the diff, and why it tells nothing
DAMAGED: list[tuple[Callable[[bytes], bytes | None], str]] = [
    (
        lambda _: None,
        "There is no patched_modeling_mixtral.diff beside the file to tell what it was; --diff writes it.",
    ),
    (lambda good: good.replace(b"+from math import fsum", b"+from math import fabs"), "does not fit the file."),
    (lambda good: good.replace(b"-    return overall_loss", b"-    return other_loss"), "is of another source."),
    (lambda _: b"", "is of another source."),
    (lambda _: b"\xff", "does not fit the file."),
    (lambda good: good[: len(good) // 2], "does not fit the file."),
]


def test_without_a_diff_that_fits_nothing_is_guessed(project: SimpleNamespace) -> None:
    diff = project.path.with_suffix(".diff")
    good = diff.read_bytes()
    for damage, reason in DAMAGED:
        damaged = damage(good)
        assert damaged != good
        diff.unlink(missing_ok=True)
        if damaged is not None:
            diff.write_bytes(damaged)
        result = project.checked(rebase=True)
        assert [change.then for change in result.originals] == [None] * 3
        assert reason in str(result), reason
        assert "+ 1)" in result.originals[0].now
        assert result.merged is None
        assert not project.path.with_suffix(".rebase").exists()


def test_a_file_without_fingerprints_has_nothing_to_compare(project: SimpleNamespace) -> None:
    """One that was written before there were any."""
    text = re.sub(r"# Replaced originals:(.|\n)*?(?=# ---)", "", project.path.read_text())
    project.path.write_text(text)
    assert project.checked().originals == ()
    assert recorded(text) == {}


# --- the merge -----------------------------------------------------------------------------------------------------


def test_patches_are_merged_with_what_happened_to_their_originals(project: SimpleNamespace) -> None:
    kept = {path: path.read_bytes() for path in (project.config, *project.path.parent.iterdir())}
    result = project.checked(rebase=True, fix=True)
    assert result.merged == (project.path.with_suffix(".rebase"), 1)
    assert {path: path.read_bytes() for path in kept} == kept
    text = result.merged[0].read_text()
    experts, rotary, loss = re.split(r"^# moe_patch_gen_config.py:\d+: ", text, flags=re.MULTILINE)[1:]
    # what changed upstream, and what the patch changes, both
    assert experts.startswith(
        "override_method('MixtralExperts.forward'), original of then -> now\n# 0 conflicts\ndef silu_forward("
    )
    assert "num_classes=self.num_experts + 1)" in experts
    assert "nn.functional.silu(gate) * up  # the one activation" in experts
    assert "<<<<" not in experts
    # both changed the same lines: the three of them
    assert re.findall(r"^(?:<<<<<<<|\|\|\|\|\|\|\||=======|>>>>>>>).*", rotary, re.MULTILINE) == [
        "<<<<<<< the patch",
        "||||||| the original, then",
        "=======",
        ">>>>>>> the original, now",
    ]
    assert rotary.index("torch.double") < rotary.index("|||||||") < rotary.index("maybe_autocast", 900)
    assert "@config" not in text
    # nothing of the original is in the config: its change alone
    assert "# no edited copy of the original, so nothing to merge\n--- load_balancing_loss_func (then)\n" in loss
    assert "+    histc_dtype = " in loss


def test_what_was_merged_is_taken_over_and_checks(project: SimpleNamespace) -> None:
    """The text of the merge, without its conflict, in the place of the patches: what the comment says to do."""
    text = project.checked(rebase=True).merged[0].read_text()
    ours = re.compile(r"<<<<<<<.*?=======\n(.*?)>>>>>>>[^\n]*\n", re.DOTALL)
    _, experts, rotary, _ = re.split(r"^# moe_patch_gen_config.py.*\n# .*\n", text, flags=re.MULTILINE)
    head, _, rest = CONFIG.partition("def silu_forward")
    _, decorator, rest = rest.partition('@config.override_method("MixtralRotaryEmbedding')
    first = rest.index("\n") + 1
    last = rest.index("config.patches.append")
    rotary = ours.sub(r"\1", rotary)
    project.config.write_text(
        f"{head}{experts.strip()}\n\n\n{decorator}{rest[:first]}{rotary.strip()}\n\n\n{rest[last:]}"
    )
    project.written(diff=True)
    assert project.checked().ok
    assert "self.num_experts + 1" in project.path.read_text()


def test_work_in_the_side_file_is_kept(project: SimpleNamespace) -> None:
    side = project.checked(rebase=True).merged[0]
    assert project.checked(rebase=True).merged[0] == side  # the same again
    side.write_text("mine")
    result = project.checked(rebase=True)
    assert "is there already, and differs from what --rebase would write" in result.error
    assert side.read_text() == "mine"


def test_nothing_to_merge(project: SimpleNamespace) -> None:
    project.install(OLD)
    result = project.checked(rebase=True)
    assert result.ok
    assert result.merged is None
    assert not project.path.with_suffix(".rebase").exists()


def test_a_merge_without_git(project: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "--rebase merges with git, which is not installed" in project.checked(rebase=True).error


def test_an_external_patch_of_a_method(place: Callable[..., str], tmp_path: Path) -> None:
    module = place("class A:\n    def f(self):\n        return 1\n")
    config = PatchConfig(module, "out.py")
    config.patches.append(create_patch_from_external("A.f", "math", "pi"))
    path = write(config, tmp_path, diff=True)
    place("class A:\n    def f(self):\n        return 2\n", module)
    (change,) = changed_originals(config, path)
    assert (change.then, change.now) == ("def f(self):\n    return 1\n", "def f(self):\n    return 2\n")
    with pytest.raises(CodegenError, match=r"can't be found"):
        changed_originals(PatchConfig("nothing_there_of_this_name", "out.py"), path)


def test_what_is_merged_has_the_name_that_the_patch_gives_it(place: Callable[..., str], tmp_path: Path) -> None:
    """A replacement of another name and a helper in the place of what is left out: only real changes conflict."""
    body = "    def f(self):\n        a = 1\n        b = 2\n        c = 3\n        d = {}\n        return d\n"
    function = "    a = 1\n    b = 2\n    c = 3\n    d = {}\n    return d\n"
    source = f"import abc\n\n\nclass Norm(object):\n{body}\n\ndef turn(x):\n{function}"
    config = PatchConfig(place(source.replace("{}", "4")), "out.py")
    config.replace_class("Norm", f"class FastNorm(object):\n{body.replace('{}', '4').replace('a = 1', 'a = 7')}")
    config.exclude_from_output("turn")
    config.add_helper(f"def turn(x):\n{function.replace('{}', '4').replace('a = 1', 'a = 7')}")
    path = write(config, tmp_path, diff=True)
    place(source.replace("(object)", "(abc.ABC)").replace("{}", "5"), config.source_module)
    changes = changed_originals(config, path)
    merged = write_rebase(config, changes, path)
    assert merged == (path.with_suffix(".rebase"), 0)
    text = merged[0].read_text()
    assert (
        "class FastNorm(abc.ABC):\n    def f(self):\n        a = 7\n        b = 2\n        c = 3\n        d = 5\n"
        in text
    )
    assert "def turn(x):\n    a = 7\n    b = 2\n    c = 3\n    d = 5\n" in text


def test_a_modified_init_has_nothing_to_merge(place: Callable[..., str], tmp_path: Path) -> None:
    source = "class A:\n    def __init__(self):\n        self.a = 1\n"
    config = PatchConfig(place(source), "out.py")
    config.modify_init("A", "def init(original_init, self):\n    original_init(self)")
    path = write(config, tmp_path, diff=True)
    place(source.replace("1", "2"), config.source_module)
    merged = write_rebase(config, changed_originals(config, path), path)
    assert merged is not None
    assert "nothing to merge\n--- A.__init__ (then)\n+++ A.__init__ (now)\n" in merged[0].read_text()
    assert "+    self.a = 2\n" in merged[0].read_text()
