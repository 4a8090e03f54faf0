"""Decorators of classes: which keep a patched method from running, and files without them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from patcher import PatcherWarning
from patcher.codegen import PatchConfig, generate
from tests.support import tiny
from tests.support.comparing import logits

MIXTRAL = "transformers.models.mixtral.modeling_mixtral"
FORWARD = "def forward(self, hidden_states, *args):\n    return hidden_states * 0\n"


@pytest.mark.parametrize(
    ("target", "warned"),
    [("MixtralExperts.forward", True), ("MixtralRMSNorm.forward", True), ("MixtralExperts.__init__", False)]
    + [("MixtralAttention.forward", False), ("MixtralModel.forward", False)],
)
def test_a_patch_that_may_never_run_is_told_of(target: str, warned: bool) -> None:
    config = PatchConfig(MIXTRAL, "out.py")
    config.override_method(target, "def f(self, *args, **kwargs):\n    pass\n")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        generate(config)
    assert [each.category for each in said] == [PatcherWarning] * warned
    assert all(f"override_method('{target}') may never run: @use_" in str(each.message) for each in said)
    assert all(each.filename == __file__ for each in said)


def test_without_the_decorator_the_patch_runs_in_the_file_and_at_run_time(
    imported: Callable[[PatchConfig], ModuleType], tmp_path: Path
) -> None:
    folder = tiny.save_tiny(tiny.tiny_mixtral_config(), tmp_path / "checkpoint")
    configs = [PatchConfig(MIXTRAL, "out.py") for _ in range(2)]
    for config in configs:
        config.override_method("MixtralExperts.forward", FORWARD)
    configs[1].drop_decorators("MixtralExperts", "use_experts_implementation")
    with pytest.warns(PatcherWarning, match="may never run"):
        stuck: Any = imported(configs[0])
    free: Any = imported(configs[1])
    stock = logits(transformers.MixtralForCausalLM.from_pretrained(folder))
    loaded = logits(free.MixtralForCausalLM.from_pretrained(folder))
    assert torch.equal(logits(stuck.MixtralForCausalLM.from_pretrained(folder)), stock)  # it is true
    assert not torch.allclose(loaded, stock)
    patcher = configs[1].to_patcher()
    assert torch.equal(logits(transformers.MixtralForCausalLM.from_pretrained(folder, patcher=patcher)), loaded)


def test_what_another_config_drops_is_taken_over() -> None:
    config, other = (PatchConfig(MIXTRAL, "out.py") for _ in range(2))
    other.drop_decorators("MixtralExperts", "use_experts_implementation")
    config.include(other)
    assert "@use_experts_implementation" not in generate(config)
    left = PatchConfig(MIXTRAL, "out.py")
    left.include(other, without=["MixtralExperts"])
    assert "@use_experts_implementation" in generate(left)


def test_a_decorator_that_the_config_binds_anew_is_another_one() -> None:
    config = PatchConfig("transformers.models.mixtral.modeling_mixtral", "patched_modeling_mixtral.py")
    config.drop_import_names("use_experts_implementation")
    config.add_helper("def use_experts_implementation(cls=None, **kwargs):\n    return cls or (lambda cls: cls)\n")
    config.override_method(
        "MixtralExperts.forward", "def forward(self, hidden_states, *args):\n    return hidden_states\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(config)
