"""Patches are merged, on request, with what happened to the code under them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from patcher.codegen import PatchConfig, write
from patcher.codegen.files.rebase import changed_originals, write_rebase
from tests.codegen.drifting import CONFIG, OLD


def test_patches_are_merged_with_what_happened_to_their_originals(drifted: SimpleNamespace) -> None:
    kept = {path: path.read_bytes() for path in (drifted.config, *drifted.path.parent.iterdir())}
    result = drifted.checked(rebase=True, fix=True)
    assert result.merged == (drifted.path.with_suffix(".rebase"), 1)
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


def test_what_was_merged_is_taken_over_and_checks(drifted: SimpleNamespace) -> None:
    """The text of the merge, without its conflict, in the place of the patches: what the comment says to do."""
    text = drifted.checked(rebase=True).merged[0].read_text()
    ours = re.compile(r"<<<<<<<.*?=======\n(.*?)>>>>>>>[^\n]*\n", re.DOTALL)
    _, experts, rotary, _ = re.split(r"^# moe_patch_gen_config.py.*\n# .*\n", text, flags=re.MULTILINE)
    head, _, rest = CONFIG.partition("def silu_forward")
    _, decorator, rest = rest.partition('@config.override_method("MixtralRotaryEmbedding')
    first = rest.index("\n") + 1
    last = rest.index("config.patches.append")
    rotary = ours.sub(r"\1", rotary)
    drifted.config.write_text(
        f"{head}{experts.strip()}\n\n\n{decorator}{rest[:first]}{rotary.strip()}\n\n\n{rest[last:]}"
    )
    drifted.written(diff=True)
    assert drifted.checked().ok
    assert "self.num_experts + 1" in drifted.path.read_text()


def test_work_in_the_side_file_is_kept(drifted: SimpleNamespace) -> None:
    side = drifted.checked(rebase=True).merged[0]
    assert drifted.checked(rebase=True).merged[0] == side  # the same again
    side.write_text("mine")
    result = drifted.checked(rebase=True)
    assert "is there already, and differs from what --rebase would write" in result.error
    assert side.read_text() == "mine"


def test_nothing_to_merge(drifted: SimpleNamespace) -> None:
    drifted.install(OLD)
    result = drifted.checked(rebase=True)
    assert result.ok
    assert result.merged is None
    assert not drifted.path.with_suffix(".rebase").exists()


def test_a_merge_without_git(drifted: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "--rebase merges with git, which is not installed" in drifted.checked(rebase=True).error


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


def test_docstrings_move_with_the_code_that_is_merged(place: Callable[..., str], tmp_path: Path) -> None:
    """In a method of the original they stand deeper than in the function of a config; other strings are text."""
    lines = [
        "def f(self):",
        '    """Says',
        "",
        "    more.",
        '    """',
        '    a = """',
        "  text",
        '        """',
        "    return {}",
    ]
    method = "class A:\n" + "".join(f"    {line}\n" if line and line != "  text" else f"{line}\n" for line in lines)
    config = PatchConfig(place(method.replace("{}", "1")), "out.py")
    mine = "\n".join(lines).replace("{}", "1").replace('        """', '            """').replace("Says", "Says, here,")
    config.override_method("A.f", mine)
    path = write(config, tmp_path, diff=True)
    place(method.replace("{}", "2"), config.source_module)
    merged = write_rebase(config, changed_originals(config, path), path)
    assert merged is not None
    assert merged[1] == 0, merged[0].read_text()
    assert merged[0].read_text().partition("conflicts\n")[2] == mine.replace("return 1", "return 2") + "\n"
