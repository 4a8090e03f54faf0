"""Code under a patch that changes upstream fails the check, and is shown as it was and as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from packaging.version import Version

from patcher.codegen.generation.provenance import recorded
from patcher.source.definitions import find
from tests.codegen.drifting import CONFIG, NEW, OLD, excerpt

INSTALLED = Version(transformers.__version__)


@pytest.mark.skipif(Version(OLD) < INSTALLED < Version(NEW), reason="the excerpts are of other releases")
def test_the_drift_of_these_tests_is_real() -> None:
    """The excerpt is what transformers ships, decorators apart: 5.24 has dropped one."""
    old = ast.parse(excerpt(OLD if Version(OLD) == INSTALLED else NEW))
    from transformers.models.mixtral import modeling_mixtral

    shipped = ast.parse(Path(str(modeling_mixtral.__file__)).read_text("utf-8"))
    for name in ("MixtralExperts", "MixtralRotaryEmbedding", "load_balancing_loss_func"):
        (mine,), (theirs,) = find(old, name), find(shipped, name)
        for node in (*ast.walk(mine), *ast.walk(theirs)):
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []
        assert ast.dump(mine) == ast.dump(theirs)


def test_a_changed_original_fails_the_check_and_both_are_shown(drifted: SimpleNamespace) -> None:
    drifted.config.write_text(re.sub(r"maybe_autocast\(.*\)", "torch.no_grad()", CONFIG))
    drifted.install(OLD)
    drifted.written(diff=True)
    drifted.install(NEW)
    before = drifted.path.read_bytes(), drifted.path.with_suffix(".diff").read_bytes()
    for fix in (False, True):
        result = drifted.checked(fix=fix)
        assert (result.ok, result.fixed, result.error) == (False, False, "")
        assert result.drift
        assert [change.target for change in result.originals] == [
            "MixtralExperts.forward",
            "MixtralRotaryEmbedding.forward",
            "load_balancing_loss_func",
        ]
        said = str(result)
        assert f"{drifted.config}:10: override_method('MixtralExperts.forward') patches code that has changed" in said
        assert "one_hot(top_k_index, num_classes=self.num_experts)\n+  " in said
        assert "one_hot(top_k_index, num_classes=self.num_experts + 1)\n   " in said
        assert (drifted.path.read_bytes(), drifted.path.with_suffix(".diff").read_bytes()) == before
    # generated again, it is taken over
    drifted.written(diff=True)
    assert drifted.checked().ok


def test_an_original_that_breaks_the_patch_is_shown_with_the_error(drifted: SimpleNamespace) -> None:
    result = drifted.checked()
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


def test_without_a_diff_that_fits_nothing_is_guessed(drifted: SimpleNamespace) -> None:
    diff = drifted.path.with_suffix(".diff")
    good = diff.read_bytes()
    for damage, reason in DAMAGED:
        damaged = damage(good)
        assert damaged != good
        diff.unlink(missing_ok=True)
        if damaged is not None:
            diff.write_bytes(damaged)
        result = drifted.checked(rebase=True)
        assert [change.then for change in result.originals] == [None] * 3
        assert reason in str(result), reason
        assert "+ 1)" in result.originals[0].now
        assert result.merged is None
        assert not drifted.path.with_suffix(".rebase").exists()


def test_a_file_without_fingerprints_has_nothing_to_compare(drifted: SimpleNamespace) -> None:
    """One that was written before there were any."""
    text = re.sub(r"# Differs:(.|\n)*?(?=# ---)", "", drifted.path.read_text())
    drifted.path.write_text(text)
    assert drifted.checked().originals == ()
    assert recorded(text) == {}
