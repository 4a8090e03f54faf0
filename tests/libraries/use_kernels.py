"""`use_kernels=True` and `kernel_config=` beside `patcher=`; run by `test_kernels.py`, where transformers takes them.

KernelConfig knows no CPU, so the tests derive one that does; the rest is transformers and `kernels` as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from kernels import LocalLayerRepository, use_kernel_forward_from_hub, use_kernel_mapping
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, KernelConfig, LlamaForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.monkey_patching import get_patch_mapping
from transformers.utils import is_kernels_available

from patcher import Patcher, forward_of, like, report
from patcher.errors import InvalidPatcherError
from tests.support.local_kernels import written_kernels
from tests.support.tiny import DECODER_SIZES, tiny_llama_config

TOKENS = torch.arange(12)[None] + 3
#: A KernelConfig that inherits no mapping has the package say of all other layers that they have no kernel.
pytestmark = pytest.mark.filterwarnings(r"ignore:\nNo kernel mapping found")


class Doubled(LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class OtherParameters(LlamaRMSNorm):
    def forward(self, hidden_states, *, factor=2):
        return factor * super().forward(hidden_states)


class Halved(nn.Module):
    weight: torch.Tensor

    def forward(self, hidden_states):
        return hidden_states * self.weight / 2


class MyMLP(LlamaMLP):
    def forward(self, x):
        return super().forward(x) / 2


class MyExperts(GptOssExperts):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) / 2


def unrotated(q, k, cos, sin, unsqueeze_dim=1):
    return q, k


def turned(x):
    return -x


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert is_kernels_available()
    return written_kernels(tmp_path_factory.mktemp("kernel"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stock")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_llama_config()).save_pretrained(path)
    return path


@pytest.fixture
def kernel(folder: Path) -> Callable[..., Any]:
    def mapped(**names: str) -> Any:
        layers = {name: {"cpu": LocalLayerRepository(folder, layer_name=layer)} for name, layer in names.items()}
        return use_kernel_mapping(layers, inherit_mapping=False)

    return mapped


class OnCPU(KernelConfig):
    """A KernelConfig for layers of a folder, with the device that transformers has no table entry for."""

    def sanitize_kernel_mapping(self, model: Any) -> None:
        self.store_registered_layer_names(model)

    def create_compatible_mapping(self, model: Any, **options: Any) -> None:
        repositories = {name: value[0].split(":") for name, value in self.kernel_mapping.items()}  # (name, options)
        self.kernel_mapping = {
            name: {"cpu": LocalLayerRepository(Path(path), layer_name=layer)}
            for name, (path, layer) in repositories.items()
        }


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def load(path: Path, patcher: Patcher | None, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, patcher=patcher, **options)


KEPT = {
    "a class": Patcher({"LlamaRMSNorm": Doubled}),
    "alike": Patcher({like("LlamaRMSNorm"): Doubled}),
    "at a path": Patcher(module_mapping={"model.norm": Doubled}),
    "a forward": Patcher({"LlamaRMSNorm": forward_of(Halved)}),
    "with other parameters": Patcher({"LlamaRMSNorm": OtherParameters}),
    "another class": Patcher({"LlamaMLP": MyMLP}),
    "a function": Patcher(function_mapping={"apply_rotary_pos_emb": unrotated}),
    "a function that one with a kernel calls": Patcher(function_mapping={"rotate_half": turned}),
    "fused": Patcher({"LlamaRMSNorm": Doubled}, fusions=["qkv", "gate_up"]),
}


@pytest.mark.parametrize("patcher", KEPT.values(), ids=KEPT.keys())
def test_what_is_replaced_stays_and_the_rest_gets_its_kernel(
    patcher: Patcher, checkpoint: Path, kernel: Callable[..., Any]
) -> None:
    without = load(checkpoint, patcher)
    with kernel(RMSNorm="Norm"):
        model = load(checkpoint, patcher, use_kernels=True)
    assert model.use_kernels
    torch.testing.assert_close(logits(model), logits(without))
    check_forwards(model, "Norm.forward")
    with kernel(RMSNorm="Zeros"):  # as transformers does where the mode of the model changes
        model.train().eval()
    check_forwards(model, "Zeros.forward")


def check_forwards(model: Any, name: str) -> None:
    """Every norm that isn't replaced has the forward of that name, and no other has."""
    replaced = {path for path, *_ in report(model).replaced}
    for path, module in model.named_modules():
        if isinstance(module, LlamaRMSNorm):
            assert (module.forward.__func__.__qualname__ == name) == (path not in replaced), path


def test_a_replacement_may_choose_a_kernel(checkpoint: Path, kernel: Callable[..., Any]) -> None:
    @use_kernel_forward_from_hub("Chosen")
    class Chosen(LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    patcher = Patcher({"LlamaRMSNorm": Chosen})
    with kernel(Chosen="Norm"):
        model = load(checkpoint, patcher, use_kernels=True)
    torch.testing.assert_close(logits(model), logits(load(checkpoint, None)))


def test_a_kernel_doesnt_bypass_what_is_replaced_below_it(tmp_path: Path, folder: Path) -> None:
    torch.manual_seed(0)
    config = GptOssConfig(**DECODER_SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    one_layer = Patcher(module_mapping={"model.layers.0.mlp.experts": MyExperts})
    for patcher, replaced in ((None, ()), (one_layer, (0,))):
        config = OnCPU({"MegaBlocksMoeMLP": f"{folder}:Zeros"}, use_local_kernel=True)
        model = load(tmp_path, patcher, use_kernels=True, kernel_config=config)
        for number, layer in enumerate(model.model.layers):
            assert ("forward" in vars(layer.mlp)) == (number not in replaced)


def test_nothing_is_left_for_a_plain_load(checkpoint: Path, kernel: Callable[..., Any]) -> None:
    before = logits(load(checkpoint, None)), dict(vars(LlamaRMSNorm)), get_patch_mapping()
    with kernel(RMSNorm="Zeros"):
        load(checkpoint, Patcher({"LlamaMLP": MyMLP}), use_kernels=True)
        plain = load(checkpoint, None)
    assert "forward" not in vars(plain.model.norm)
    assert torch.equal(logits(plain), before[0])
    assert dict(vars(LlamaRMSNorm)) == before[1]
    assert get_patch_mapping() == before[2] == {}


def test_a_kernel_config_is_followed(checkpoint: Path, folder: Path) -> None:
    config = OnCPU({"RMSNorm": f"{folder}:Norm"}, use_local_kernel=True)
    model = load(checkpoint, Patcher(module_mapping={"model.norm": Doubled}), use_kernels=True, kernel_config=config)
    assert type(model.model.norm).forward is Doubled.forward
    assert "forward" not in vars(model.model.norm)
    assert model.model.layers[0].input_layernorm.forward.__func__.__qualname__ == "Norm.forward"


def test_a_kernel_that_brings_classes_is_refused_and_its_class_works(checkpoint: Path, folder: Path) -> None:
    conversions = get_checkpoint_conversion_mapping("llama")
    config = OnCPU({"LlamaMLP": f"{folder}:Built"}, use_local_kernel=True)
    given = copy.deepcopy(vars(config))
    with pytest.raises(InvalidPatcherError, match=r"replaces LlamaMLP by BuiltLayout, .*class_mapping"):
        load(checkpoint, Patcher({"LlamaRMSNorm": Doubled}), kernel_config=config, use_kernels=True)
    assert get_patch_mapping() == {}
    assert get_checkpoint_conversion_mapping("llama") == conversions
    assert vars(config) == given
    assert type(load(checkpoint, None).model.layers[0].mlp) is LlamaMLP

    module = kernels.get_local_kernel(folder)
    built = type("Built", (module.BuiltLayout,), {"forward": module.layers.Built.forward})
    model = load(checkpoint, Patcher({"LlamaMLP": built}))
    torch.testing.assert_close(logits(model), logits(load(checkpoint, None)))
