"""`patch_embeddings`: what the convolution gives, for inputs of any size; the same checkpoint; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    CLIPVisionConfig,
    CLIPVisionModel,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    PixtralVisionConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    SegformerConfig,
    SegformerModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTModel,
)

from patcher import InvalidPatcherError, PatchConflictError, Patcher, UnmatchedPatchError, report
from patcher.fusions import Fusion
from patcher.fusions.linear_patch_embedding import LinearPatchEmbedding
from patcher.fusions.patch_embeddings import PatchEmbeddings
from tests.support import shared
from tests.support.checkpoints import same_checkpoint
from tests.support.fusing import fuse
from tests.support.tiny import (
    DECODER_SIZES,
    build_tiny,
    save_tiny,
    tiny_inputs,
    tiny_llama_config,
    tiny_llava_config,
    tiny_qwen2_vl_config,
)

FUSED = Patcher(fusions="patch_embeddings")
TOKENS = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TEXT: dict[str, Any] = DECODER_SIZES | {"rope_parameters": ROPE}
VISION: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 48}
IMAGE_MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}


class Operations(TorchDispatchMode):
    """The products and convolutions that are run inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.run: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func) or "convolution" in str(func):
            self.run.append(str(func))
        return func(*args, **(kwargs or {}))


def linear_form(convolution: nn.Module) -> LinearPatchEmbedding:
    made = fuse(PatchEmbeddings(), convolution, LinearPatchEmbedding)
    assert isinstance(made, LinearPatchEmbedding)
    return made


def qwen2_5_vl() -> Qwen2_5_VLConfig:
    vision = VISION | {"out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 16}
    return Qwen2_5_VLConfig(vision_config=vision, text_config=TEXT, **TOKENS)


def qwen3_vl() -> Qwen3VLConfig:
    vision = VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return Qwen3VLConfig(vision_config=vision, text_config=TEXT | {"head_dim": 16}, **TOKENS)


def glm4v() -> Glm4vConfig:
    vision = VISION | {"out_hidden_size": 64, "image_size": 16}
    return Glm4vConfig(vision_config=vision, text_config=TEXT, **TOKENS)


VISION_LANGUAGE = [
    pytest.param(tiny_qwen2_vl_config, nn.Conv3d, id="Qwen2-VL"),
    pytest.param(qwen2_5_vl, nn.Conv3d, id="Qwen2.5-VL"),
    pytest.param(qwen3_vl, nn.Conv3d, id="Qwen3-VL"),
    pytest.param(glm4v, nn.Conv3d, id="GLM-4V"),
    pytest.param(tiny_llava_config, nn.Conv2d, id="Llava"),
]
IMAGE = [
    pytest.param(ViTConfig(**IMAGE_MODEL), id="ViT"),
    pytest.param(CLIPVisionConfig(**IMAGE_MODEL), id="CLIP"),
    pytest.param(SiglipVisionConfig(**IMAGE_MODEL), id="SigLIP"),
    pytest.param(SiglipVisionConfig(**IMAGE_MODEL | {"patch_size": 8}), id="SigLIP, incomplete patches"),
    pytest.param(PixtralVisionConfig(**IMAGE_MODEL | {"head_dim": 16}), id="Pixtral"),
]


def inputs_of(config: PretrainedConfig) -> dict[str, Any]:
    if config.model_type == "llava":
        return tiny_inputs(config)
    inputs = tiny_inputs(tiny_qwen2_vl_config())
    if config.model_type == "glm4v":
        inputs["input_ids"][:, 1:7] = torch.tensor([122, 120, 120, 120, 120, 123])
    return inputs


@pytest.mark.parametrize(("make", "kind"), VISION_LANGUAGE)
def test_a_vision_language_model_gives_what_stock_gives(make: Any, kind: type, tmp_path: Path) -> None:
    config = make()
    save_tiny(config, tmp_path, model_class=AutoModelForImageTextToText)
    stock = shared.stock(tmp_path, AutoModelForImageTextToText)
    fused = AutoModelForImageTextToText.from_pretrained(tmp_path, patcher=FUSED)
    inputs = inputs_of(config)

    assert any(isinstance(module, kind) for module in stock.modules())
    assert not any(isinstance(module, kind) for module in fused.modules())
    torch.testing.assert_close(fused(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)
    # an image that isn't looked at would give the same logits
    other = inputs | {"pixel_values": inputs["pixel_values"] + 1}
    assert not torch.allclose(fused(**other).logits, fused(**inputs).logits, atol=1e-3)


@pytest.mark.parametrize(("make", "kind"), VISION_LANGUAGE)
@pytest.mark.parametrize("max_shard_size", ["5GB", "50KB"])
def test_the_weights_are_those_of_the_checkpoint_and_go_back_into_it(
    make: Any, kind: type, max_shard_size: str, tmp_path: Path
) -> None:
    """Row 5: `fusion_config` leaves the weight of Qwen2-VL random, and saves it."""
    save_tiny(make(), tmp_path / "checkpoint", model_class=AutoModelForImageTextToText, max_shard_size=max_shard_size)
    stock = shared.stock(tmp_path / "checkpoint", AutoModelForImageTextToText)
    fused, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "checkpoint", patcher=FUSED, output_loading_info=True
    )
    stock.save_pretrained(tmp_path / "stock", max_shard_size=max_shard_size)
    fused.save_pretrained(tmp_path / "fused", max_shard_size=max_shard_size)

    assert not info["missing_keys"]
    path = next(path for path, was, _ in report(fused).fused if was == kind.__name__)
    torch.testing.assert_close(
        fused.get_submodule(path).linear.weight, stock.get_submodule(path).weight.flatten(1), atol=0, rtol=0
    )
    assert same_checkpoint(tmp_path / "fused", tmp_path / "stock")


@pytest.mark.parametrize("config", IMAGE)
def test_an_image_model_gives_what_stock_gives_and_the_same_gradients(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    save_tiny(config, tmp_path, model_class=AutoModel)
    stock = shared.stock(tmp_path, AutoModel)
    fused = AutoModel.from_pretrained(tmp_path, patcher=FUSED)
    images = torch.randn(2, 3, config.image_size, config.image_size)
    outputs = [model(pixel_values=images).last_hidden_state for model in (stock, fused)]
    for output in outputs:
        output.square().mean().backward()
    ((path, _, _),) = report(fused).fused

    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        fused.get_submodule(path).linear.weight.grad,
        stock.get_submodule(path).weight.grad.flatten(1),
        atol=1e-5,
        rtol=1e-4,
    )


def test_it_costs_nobody_else_anything(tmp_path: Path) -> None:
    """Row 4: after one load with `fusion_config` every later load is fused."""
    save_tiny(tiny_qwen2_vl_config(), tmp_path)
    Qwen2VLForConditionalGeneration.from_pretrained(tmp_path, patcher=FUSED)

    later = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path)

    assert isinstance(later.model.visual.patch_embed.proj, nn.Conv3d)


# --- the module ------------------------------------------------------------------------------------------------------


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, torch.Tensor]:
    kernel = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    channels, features = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    kind = {2: nn.Conv2d, 3: nn.Conv3d}[len(kernel)]
    size = [draw(st.integers(patch, 3 * patch + 1)) for patch in kernel]
    batch = draw(st.sampled_from([(), (0,), (1,), (3,)]))
    bias = draw(st.booleans())
    return kind(channels, features, tuple(kernel), tuple(kernel), bias=bias), torch.randn(*batch, channels, *size)


@settings(max_examples=80, deadline=None)
@given(convolutions(), st.booleans())
def test_it_computes_the_convolution_for_inputs_of_any_size(
    case: tuple[nn.Module, torch.Tensor], channels_last: bool
) -> None:
    convolution, image = case
    if channels_last and image.dim() == 4:
        image = image.contiguous(memory_format=torch.channels_last)
    linear = linear_form(convolution)

    torch.testing.assert_close(linear(image), convolution(image), atol=1e-5, rtol=1e-5)


def test_whole_images_are_convolved_and_patches_multiplied() -> None:
    """Whichever is faster; measured by `tests.benchmarks.bench_patch_embeddings`."""
    convolution = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4))
    image, patches = torch.randn(2, 3, 2, 16, 17), torch.randn(5, 3, 2, 4, 4)
    expected = convolution(image)
    linear = linear_form(convolution)

    assert torch.equal(linear(image), expected)
    with Operations() as operations:
        linear(image)
        linear(patches)
    assert operations.run == ["aten.convolution.default", "aten.addmm.default"]


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) * 2


def hooked(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda module, inputs, output: output * 2)
    return linear


def reclassed(linear: nn.Linear) -> nn.Linear:
    linear.__class__ = Doubled
    return linear


def rebound(linear: nn.Linear) -> nn.Linear:
    stock = linear.forward
    linear.forward = lambda input: stock(input) * 2  # type: ignore[method-assign]  # noqa: A006 - as nn.Linear has it
    return linear


@pytest.mark.parametrize("change", [hooked, reclassed, rebound])
def test_a_linear_layer_that_is_more_than_its_weight_is_called_for_whole_images_too(change: Any) -> None:
    linear, image = linear_form(nn.Conv2d(3, 8, 4, 4)), torch.randn(2, 3, 16, 17)
    expected = linear(image) * 2

    linear.linear = change(linear.linear)

    torch.testing.assert_close(linear(image), expected)


@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (2, 4, 4, 4), (2, 3, 3, 8), (2, 3, 8, 3)])
def test_what_the_convolution_refuses_is_refused(shape: tuple[int, ...]) -> None:
    convolution = nn.Conv2d(3, 8, 4, 4)
    with pytest.raises(RuntimeError, match=r"channels|Kernel size"):
        convolution(torch.randn(shape))

    with pytest.raises(RuntimeError, match=r"channels|Kernel size|is invalid for input of size"):
        linear_form(convolution)(torch.randn(shape))


def test_it_has_the_attributes_of_the_convolution() -> None:
    convolution = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), dtype=torch.bfloat16)
    linear = linear_form(convolution)

    names = "in_channels out_channels kernel_size stride padding dilation groups padding_mode training".split()
    assert {name: getattr(linear, name) for name in names} == {name: getattr(convolution, name) for name in names}
    assert linear.weight.dtype == torch.bfloat16
    assert linear.bias is linear.linear.bias


@pytest.mark.libraries
def test_it_compiles_whole_and_exports_with_sizes_left_open() -> None:
    linear = linear_form(nn.Conv2d(3, 8, 4, 4)).eval()
    compiled = torch.compile(linear, fullgraph=True, backend="eager", dynamic=True)
    size = torch.export.Dim("size", min=8, max=64)
    exported = torch.export.export(
        linear, (torch.randn(2, 3, 16, 16),), dynamic_shapes=({2: size, 3: torch.export.Dim.AUTO},)
    ).module()

    for shape in [(2, 3, 16, 16), (2, 3, 18, 23)]:
        image = torch.randn(shape)
        torch.testing.assert_close(compiled(image), linear(image))
        torch.testing.assert_close(exported(image), linear(image))


# --- which -----------------------------------------------------------------------------------------------------------

REFUSED = [
    (nn.Conv2d(3, 8, 4, 2), "overlap"),
    (nn.Conv2d(3, 8, 4, 5), "gaps between its patches"),
    (nn.Conv2d(3, 8, 4, 4, padding=1), "pads its input"),
    (nn.Conv2d(3, 8, 1, 1), "one pixel"),
    (nn.Conv2d(3, 8, 4, 4, dilation=2), "dilated"),
    (nn.Conv2d(4, 8, 4, 4, groups=2), "2 groups"),
    (nn.Conv1d(3, 8, 4, 4), r"an nn\.Conv2d"),
    (nn.LazyConv2d(8, 4, 4), "LazyConv2d"),
    (nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 4, 4)), "ParametrizedConv2d"),
]


@pytest.mark.parametrize(("module", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_no_patch_projection_is_refused_with_the_reason(module: nn.Module, reason: str) -> None:
    family = PatchEmbeddings()

    assert not family.is_fusable(module)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(family.refusal(module))


def test_a_convolution_with_hooks_is_left_alone() -> None:
    convolution = nn.Conv2d(3, 8, 4, 4)
    convolution.register_forward_hook(lambda *_: None)

    assert PatchEmbeddings().refusal(convolution) == "it has hooks"


def test_padding_called_valid_is_none() -> None:
    assert PatchEmbeddings().is_fusable(nn.Conv2d(3, 8, 4, 4, padding="valid"))


def test_instances_of_one_class_are_decided_one_by_one(tmp_path: Path) -> None:
    """Segformer's patch embeddings overlap, the reductions of its attention don't."""
    sizes = {"hidden_sizes": [16, 16], "depths": [1, 1], "sr_ratios": [2, 1], "num_attention_heads": [1, 1]}
    sizes |= {"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
    config = SegformerConfig(num_encoder_blocks=2, **sizes)
    resolution = FUSED.resolve(SegformerModel, config)

    assert [path.rpartition(".")[2] for path in resolution.fused] == ["sequence_reduction"]
    assert {reason for path, reason in resolution.refused.items() if "patch_embeddings" in path} == {
        "its patches overlap (kernel (7, 7), stride (4, 4))",
        "its patches overlap (kernel (3, 3), stride (2, 2))",
    }


def test_a_model_without_any_is_an_error() -> None:
    with pytest.raises(UnmatchedPatchError, match="'patch_embeddings' found no module that it can fuse"):
        type(build_tiny(tiny_llama_config()))._from_config(tiny_llama_config(), patcher=FUSED)


# --- asking for it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"patch_embeddings": True}, FUSED),
        ({"patch_embeddings": {}}, FUSED),
        ({"patch_embeddings": False}, Patcher()),
        ({"patch_embeddings": {"modules": "*.visual.**"}}, Patcher(fusions=PatchEmbeddings("*.visual.**"))),
    ],
)
def test_the_form_of_fusion_config(config: dict[str, Any], expected: Patcher) -> None:
    assert Patcher.from_fusion_config(config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"patch_embedings": True}, "did you mean 'patch_embeddings'"),
        ({"patch_embeddings": 1}, "takes True, False or a mapping of options, found 1"),
        ({"patch_embeddings": {"module": "visual"}}, "doesn't take the options"),
        ({"patch_embeddings": {"modules": [3]}}, r"PatchEmbeddings: modules: 3 \(int\) isn't a path of a module"),
    ],
)
def test_what_it_can_not_mean_is_an_error(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=message):
        Patcher.from_fusion_config(config)


def test_the_option_names_what_is_fused() -> None:
    both = FUSED.resolve(Glm4vForConditionalGeneration, glm4v())
    only = Patcher(fusions=PatchEmbeddings("**.patch_embed.proj")).resolve(Glm4vForConditionalGeneration, glm4v())

    assert list(both.fused) == ["model.visual.patch_embed.proj", "model.visual.downsample"]
    assert list(only.fused) == ["model.visual.patch_embed.proj"]


class Other(Fusion):
    target_modules_patterns = (r"patch_embed\.proj$",)

    def is_fusable(self, module: nn.Module) -> bool:
        return True

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return original_cls


def test_two_fusions_that_claim_one_module_conflict() -> None:
    with pytest.raises(PatchConflictError, match=r"both claim model\.visual\.patch_embed\.proj"):
        Patcher(fusions=["patch_embeddings", Other()]).resolve(Qwen2VLForConditionalGeneration, tiny_qwen2_vl_config())


# --- with other things -----------------------------------------------------------------------------------------------


class DoubledMLP(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * self.fc2(torch.relu(self.fc1(hidden_states)))  # type: ignore[no-any-return]


def test_it_combines_with_other_fusions_and_with_replacements(tmp_path: Path) -> None:
    config = CLIPVisionConfig(**IMAGE_MODEL)
    save_tiny(config, tmp_path, model_class=AutoModel)
    mapping = Patcher({"CLIPMLP": DoubledMLP})
    replaced = CLIPVisionModel.from_pretrained(tmp_path, patcher=mapping)
    both = CLIPVisionModel.from_pretrained(tmp_path, patcher=mapping | Patcher(fusions=["patch_embeddings", "qkv"]))
    images = torch.randn(2, 3, 28, 28)

    torch.testing.assert_close(both(images)[0], replaced(images)[0], atol=1e-5, rtol=0)
    assert len(report(both).fused) == 1 + config.num_hidden_layers


def test_a_model_made_without_a_checkpoint_starts_with_the_values_of_stock() -> None:
    config = ViTConfig(**IMAGE_MODEL)
    torch.manual_seed(1)
    stock = ViTModel(config).eval()
    torch.manual_seed(1)
    with FUSED.applied():
        fused = ViTModel(config).eval()
    images = torch.randn(1, 3, 28, 28)

    torch.testing.assert_close(fused(images)[0], stock(images)[0], atol=1e-5, rtol=0)


def test_it_is_applied_to_a_model_in_memory_and_taken_back() -> None:
    stock = build_tiny(SiglipVisionConfig(**IMAGE_MODEL), model_class=SiglipVisionModel)
    images = torch.randn(1, 3, 28, 28)
    fused = FUSED.apply(stock)
    back = Patcher().apply(fused)

    torch.testing.assert_close(fused(images)[0], stock(images)[0], atol=1e-5, rtol=0)
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in back.state_dict().items())


@pytest.mark.libraries
def test_quantized_it_still_takes_images(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    config = SiglipVisionConfig(**IMAGE_MODEL)
    save_tiny(config, tmp_path, model_class=AutoModel)
    images = torch.randn(2, 3, 28, 28)
    expected = AutoModel.from_pretrained(tmp_path)(images)[0]
    quantized = AutoModel.from_pretrained(
        tmp_path,
        patcher=FUSED,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["head"]),
    )
    ((path, _, _),) = report(quantized).fused

    assert isinstance(quantized.get_submodule(path).linear, bnb.nn.Linear8bitLt)
    torch.testing.assert_close(quantized(images)[0], expected, atol=0.5, rtol=0)


def test_the_weights_of_a_base_model_reach_a_model_with_a_head_and_back(tmp_path: Path) -> None:
    from transformers import ViTForImageClassification

    config = ViTConfig(**IMAGE_MODEL)
    save_tiny(config, tmp_path / "head", model_class=ViTForImageClassification)
    fused = ViTModel.from_pretrained(tmp_path / "head", patcher=FUSED, add_pooling_layer=False)
    fused.save_pretrained(tmp_path / "base")

    saved, original = load_file(tmp_path / "base/model.safetensors"), load_file(tmp_path / "head/model.safetensors")
    assert saved
    assert all(torch.equal(value, original[f"vit.{name}"]) for name, value in saved.items())
