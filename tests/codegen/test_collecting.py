"""The garbage collector is held back while a file is generated, and left as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from patcher.codegen import PatchConfig, generate
from patcher.codegen.generation import generator
from patcher.errors import CodegenError

LLAMA = "transformers.models.llama.modeling_llama"


@pytest.fixture(params=[True, False], ids=["on", "off"])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


def test_it_is_held_back_and_left_as_it_was(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    render = generator.render_header
    monkeypatch.setattr(generator, "render_header", lambda *given: seen.append(gc.isenabled()) or render(*given))

    generate(PatchConfig(LLAMA, "patched.py"))

    assert seen == [False]
    assert gc.isenabled() == enabled


def test_it_is_left_as_it_was_by_what_is_refused(enabled: bool) -> None:
    config = PatchConfig(LLAMA, "patched.py")
    config.replace_class("LlamaMPL", "class LlamaMPL: ...\n")

    with pytest.raises(CodegenError, match="Nearest: LlamaMLP"):
        generate(config)

    assert gc.isenabled() == enabled
