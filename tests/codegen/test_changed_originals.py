"""Code under a patch that changes upstream fails the check, and is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from packaging.version import Version

from patcher.codegen.generation.header import recorded
from patcher.source.scopes import find
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


def test_a_changed_original_fails_the_check(drifted: SimpleNamespace) -> None:
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
        assert (drifted.path.read_bytes(), drifted.path.with_suffix(".diff").read_bytes()) == before
    # generated again, it is taken over
    drifted.written(diff=True)
    assert drifted.checked().ok


def test_an_original_that_breaks_the_patch_is_named_with_the_error(drifted: SimpleNamespace) -> None:
    result = drifted.checked()
    assert "'maybe_autocast', which patched_modeling_mixtral.py does not define" in result.error
    assert len(result.originals) == 3


def test_a_file_without_fingerprints_has_nothing_to_compare(drifted: SimpleNamespace) -> None:
    """One that was written before there were any."""
    text = re.sub(r"# Differs:(.|\n)*?(?=# ---)", "", drifted.path.read_text())
    drifted.path.write_text(text)
    assert drifted.checked().originals == ()
    assert recorded(text) == {}
