"""Pins: the fingerprint of the code decides, the release alone is worth a warning."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

from patcher import InvalidPatcherError, Patcher, PatcherWarning, PresetDriftError
from patcher.spec.fingerprints import check_pins, fingerprint
from tests.support import shared
from tests.support.tiny import tiny_llama_config

BASE = """
    from torch import nn

    SCALE = 2.0

    def helper(x):
        return x * SCALE

    def unrelated(x):
        return x

    LIMIT: float = 1.0

    if SCALE > 1:
        def guarded(x):
            return x + LIMIT

    class Block(nn.Module):
        '''A block.'''

        def forward(self, x):
            return helper(guarded(x))  # the helper
"""


@pytest.fixture
def define(tmp_path: Path) -> Callable[[str], type[nn.Module]]:
    def make(source: str) -> type[nn.Module]:
        path = tmp_path / f"code_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module.Block

    return make


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        pytest.param(lambda s: s.replace("# the helper", "# another comment"), False, id="comment"),
        pytest.param(
            lambda s: s.replace("guarded(x))  #", "guarded(\n                x,\n            ))  #"),
            False,
            id="format",
        ),
        pytest.param(lambda s: s.replace("A block.", "Another block."), False, id="docstring"),
        pytest.param(lambda s: s.replace("def unrelated(x):\n        return x", ""), False, id="unrelated function"),
        pytest.param(lambda s: s.replace("return helper(", "return 1 + helper("), True, id="method"),
        pytest.param(lambda s: s.replace("return x * SCALE", "return x / SCALE"), True, id="function that it calls"),
        pytest.param(lambda s: s.replace("SCALE = 2.0", "SCALE = 2.5"), True, id="constant that it uses"),
        pytest.param(lambda s: s.replace("return x + LIMIT", "return x - LIMIT"), True, id="function under an if"),
        pytest.param(lambda s: s.replace("= 1.0", "= 1.5"), True, id="constant with a type"),
    ],
)
def test_what_counts_as_a_change(define: Callable[[str], type], change: Callable[[str], str], counts: bool) -> None:
    assert change(BASE) != BASE
    assert (fingerprint(define(BASE)) != fingerprint(define(change(BASE)))) is counts


@pytest.mark.parametrize("value", ["LlamaMLP", len, int])
def test_only_code_of_python_has_one(value: Any) -> None:
    found = re.escape(repr(value))
    with pytest.raises(InvalidPatcherError, match=f"takes a class or a function of Python, found {found}"):
        fingerprint(value)


def test_a_file_that_is_written_anew_is_read_anew(define: Callable[[str], type[nn.Module]]) -> None:
    cls = define(BASE)
    before = fingerprint(cls)
    path = Path(str(sys.modules[cls.__module__].__file__))
    path.write_text(textwrap.dedent(BASE.replace("return x * SCALE", "return x / SCALE")), encoding="utf-8")
    assert fingerprint(cls) != before
    path.write_text(textwrap.dedent(BASE), encoding="utf-8")
    assert fingerprint(cls) == before


def test_a_pin_of_the_text_of_a_file_that_was_edited_is_none_of_what_runs(
    define: Callable[[str], type[nn.Module]],
) -> None:
    cls = define(BASE)
    path = Path(str(sys.modules[cls.__module__].__file__))
    path.write_text(textwrap.dedent(BASE.replace("return helper(", "return 1 + helper(")), encoding="utf-8")
    linecache.checkcache(str(path))
    with pytest.raises(PresetDriftError, match=r"Block: pinned \w+, found the source of forward isn't what runs"):
        check_pins(Patcher(fingerprints={"Block": fingerprint(cls)}), cls)


@pytest.mark.parametrize("name", ["__init__", "forward"])
def test_a_pin_sees_what_another_tool_has_wrapped_a_method_in(
    name: str, define: Callable[[str], type[nn.Module]], monkeypatch: pytest.MonkeyPatch
) -> None:
    init = "def __init__(self):\n            super().__init__()\n\n        @torch.no_grad()\n        def forward"
    cls = define(BASE.replace("from torch", "import torch\n    from torch").replace("def forward", init))
    pinned = Patcher(fingerprints={"Block": fingerprint(cls)})
    check_pins(pinned, cls)
    method = getattr(cls, name)
    monkeypatch.setattr(cls, name, functools.wraps(method)(lambda *args: method(*args)))
    with pytest.raises(PresetDriftError, match=rf"found Block\.{name} of .*test_fingerprints\.py in its place"):
        check_pins(pinned, cls)


class MyNorm(LlamaRMSNorm):
    pass


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


def test_a_load_on_the_pinned_code_passes(llama: Path) -> None:
    pinned = Patcher({"LlamaRMSNorm": MyNorm}, fingerprints={"LlamaRMSNorm": ["0" * 16, fingerprint(LlamaRMSNorm)]})
    assert type(AutoModelForCausalLM.from_pretrained(llama, patcher=pinned).model.norm) is MyNorm


def test_a_load_on_other_code_raises(llama: Path) -> None:
    pinned = Patcher({"LlamaRMSNorm": MyNorm}, name="norms", fingerprints={"LlamaMLP": "0" * 16})
    with pytest.raises(
        PresetDriftError, match=f"(?s)'norms'.*modeling_llama.LlamaMLP: pinned 0+, found {fingerprint(LlamaMLP)}"
    ):
        AutoModelForCausalLM.from_pretrained(llama, patcher=pinned)
    with pytest.raises(PresetDriftError, match="LlamaMLP"):
        AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=pinned)
    with pytest.raises(PresetDriftError, match="LlamaMLP"), pinned.applied():
        pass


def test_two_pins_of_one_function_both_count(llama: Path) -> None:
    name = "transformers.models.llama.modeling_llama:rotate_half"
    pinned = Patcher(
        {"LlamaRMSNorm": MyNorm}, fingerprints=dict.fromkeys(["rotate_half", name], fingerprint(rotate_half))
    )
    assert type(AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=pinned).model.norm) is MyNorm
    for key in pinned.fingerprints:
        with pytest.raises(PresetDriftError, match="rotate_half: pinned 0, found"):
            AutoModelForCausalLM.from_config(
                tiny_llama_config(), patcher=pinned.replace(fingerprints={**pinned.fingerprints, key: "0"})
            )


def test_another_release_only_warns(llama: Path) -> None:
    pinned = Patcher({"LlamaRMSNorm": MyNorm}, transformers="<5")
    with pytest.warns(PatcherWarning, match=r"verified on transformers <5, installed is 5\.") as said:
        model = AutoModelForCausalLM.from_pretrained(llama, patcher=pinned)
    assert type(model.model.norm) is MyNorm
    assert [Path(one.filename) for one in said] == [Path(__file__)]  # the line of the load, not one of ours


def warn_of(patcher: Patcher) -> None:
    check_pins(patcher)


@pytest.mark.parametrize("enter", [lambda p: p.applied().__enter__(), warn_of], ids=["a block", "the check itself"])
def test_the_warning_points_at_the_line_of_the_user(enter: Callable[[Patcher], object]) -> None:
    with pytest.warns(PatcherWarning, match="verified on transformers <5") as said:
        enter(Patcher(transformers="<5"))
    assert [Path(one.filename) for one in said] == [Path(__file__)]
    line = Path(__file__).read_text(encoding="utf-8").splitlines()[said[0].lineno - 1]
    assert "applied()" in line or "check_pins(" in line


def test_the_advice_of_a_drifted_pin_is_followed(llama: Path) -> None:
    pinned = Patcher({"LlamaRMSNorm": MyNorm}, fingerprints={"LlamaRMSNorm": "0" * 16})
    with pytest.raises(PresetDriftError, match=r"found by patcher\.replace\(fingerprints=\{...\}\)") as caught:
        AutoModelForCausalLM.from_pretrained(llama, patcher=pinned)
    (found,) = re.findall("found ([0-9a-f]{16})", str(caught.value))
    mended = pinned.replace(fingerprints={"LlamaRMSNorm": found})
    assert type(AutoModelForCausalLM.from_pretrained(llama, patcher=mended).model.norm) is MyNorm
