"""Files of models whose checkpoints transformers converts: right by default, by nothing but transformers."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from patcher.codegen import PatchConfig, generate
from patcher.codegen.generation import stock_conversions
from patcher.errors import CodegenError
from patcher.source import modules
from tests.codegen.models import EXPERTS, LATENT, PAIRS, clip, text_config
from tests.support import tiny
from tests.support.comparing import assert_equal_models
from tests.support.sampling import sampled
from tests.support.small_configs import small_configs

#: case -> model class, config, and the inputs where token ids are not enough
CASES: dict[str, tuple[str, Callable[[], PretrainedConfig], dict[str, Any] | None]] = {
    "Mixtral": ("MixtralForCausalLM", tiny.tiny_mixtral_config, None),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", lambda: text_config("Qwen3MoeConfig", **EXPERTS), None),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", lambda: text_config("DeepseekV3Config", **LATENT), None),
    "Qwen2-VL, by the names of its classes": ("Qwen2VLForConditionalGeneration", tiny.tiny_qwen2_vl_config, None),
    "Qwen2-VL, its text and its images alone": ("Qwen2VLModel", tiny.tiny_qwen2_vl_config, None),
    "CLIP, two models in one": ("CLIPModel", clip, PAIRS),
    "CLIP, one of the two": ("CLIPVisionModel", lambda: clip().vision_config, {"pixel_values": PAIRS["pixel_values"]}),
    "Llava, whose parts are of other modules": ("LlavaForConditionalGeneration", tiny.tiny_llava_config, None),
    "FalconH1, which fills buffers of its layers": (
        "FalconH1ForCausalLM", lambda: next(small_configs(transformers.FalconH1Config)), None,
    ),
    "Llama, which has none": ("LlamaForCausalLM", tiny.tiny_llama_config, None),
}  # fmt: skip


SHORT = {
    "FalconH1, which fills buffers of its layers",
    "Mixtral",
    "Qwen2-VL, by the names of its classes",
    "CLIP, two models in one",
}


@pytest.mark.parametrize("case", sampled(CASES, SHORT))
def test_a_file_without_patches_reads_and_writes_the_checkpoints_of_the_original(
    case: str, imported: Callable[[PatchConfig], ModuleType], tmp_path: Path
) -> None:
    name, make, inputs = CASES[case]
    stock_class: type[PreTrainedModel] = getattr(transformers, name)
    config = make()
    folder = tiny.save_tiny(config, tmp_path / "checkpoint", model_class=stock_class)
    described = PatchConfig(stock_class.__module__, "out.py")
    assert "patcher" not in [
        part.module for part in ast.walk(ast.parse(generate(described))) if hasattr(part, "module")
    ]
    model: Any = getattr(imported(described), name).from_pretrained(folder)
    stock = stock_class.from_pretrained(folder)
    assert_equal_models([stock, model], stock, tmp_path / "saved", inputs)  # type: ignore[list-item]


def test_what_no_checkpoint_made_saves_as_stock_does(
    imported: Callable[[PatchConfig], ModuleType], tmp_path: Path
) -> None:
    module: Any = imported(PatchConfig("transformers.models.mixtral.modeling_mixtral", "out.py"))
    stock = transformers.MixtralForCausalLM(tiny.tiny_mixtral_config())
    model = module.MixtralForCausalLM(tiny.tiny_mixtral_config())
    model.load_state_dict(stock.state_dict())
    assert_equal_models([stock, model], stock, tmp_path)


def test_a_class_that_inherits_from_one_of_the_file_is_converted_too(
    imported: Callable[[PatchConfig], ModuleType], tmp_path: Path
) -> None:
    module: Any = imported(PatchConfig("transformers.models.mixtral.modeling_mixtral", "out.py"))
    folder = tiny.save_tiny(tiny.tiny_mixtral_config(), tmp_path / "checkpoint")

    class Mine(module.MixtralForCausalLM):  # type: ignore[name-defined, misc]
        pass

    stock = transformers.MixtralForCausalLM.from_pretrained(folder)
    mine = Mine.from_pretrained(folder)
    for key, value in stock.state_dict().items():
        assert torch.equal(value, mine.state_dict()[key]), key


SOURCES = {
    "a class on one line": ("class A(PreTrainedModel): ...\n", "A"),
    "one line, and no newline": ("class A(PreTrainedModel): pass", "A"),
    "behind a guard": ("if True:\n    class A(PreTrainedModel):\n        x = 1  # one\n", "A"),
    "Windows newlines": ("class A(PreTrainedModel):\r\n    x = 1\r\n\r\n\r\nclass B(A): ...\r\n", "A"),
    "a module's": ("import transformers\n\n\nclass A(transformers.PreTrainedModel):\n    x = 1\n", "A"),
    "of another modeling file": (
        "from ..llama.modeling_llama import LlamaMLP, LlamaPreTrainedModel\n\n\n"
        "class A(LlamaPreTrainedModel):\n    x = 1\n\n\nclass C(LlamaMLP):\n    x = 1\n",
        "A",
    ),
    "a class that has it": ("class A(PreTrainedModel):\n    is_custom_code = None\n", ""),
    "for type checkers": ("if TYPE_CHECKING:\n    class A(PreTrainedModel): ...\n", ""),
}


@pytest.mark.parametrize("case", SOURCES)
def test_where_the_method_goes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module of transformers that nothing is known of: it has no config, so it may be converted."""
    text, expected = SOURCES[case]
    text = "from typing import TYPE_CHECKING\n\nfrom ...modeling_utils import PreTrainedModel\n" + text
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "modeling_made.py").write_bytes(text.encode())
    stock_find = modules.PathFinder.find_spec
    monkeypatch.setattr(
        modules.PathFinder,
        "find_spec",
        lambda name, path=None: stock_find(name, [str(tmp_path), *path] if path and name == "made" else path),
    )
    generated = generate(PatchConfig("transformers.models.made.modeling_made", "out.py"))
    tree = ast.parse(generated)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = [node.name for node in classes if isinstance(last := node.body[-1], ast.FunctionDef) and last.name]
    assert found == ([expected] if expected else [])
    newline = "\r\n" if "\r\n" in text else "\n"
    kept = [line for line in generated.split(newline) if line in text.split(newline)]
    assert all(line in kept for line in text.split(newline)[4:] if "class A" not in line)


def test_modules_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modeling_of_others.py").write_text(
        "from transformers import PreTrainedModel\n\n\nclass MixtralModel(PreTrainedModel):\n    x = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "is_custom_code" not in generate(PatchConfig("modeling_of_others", "out.py"))


def test_what_can_not_be_read_counts_as_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = PatchConfig("transformers.models.llama.modeling_llama", "out.py")
    assert "is_custom_code" not in generate(llama)
    stock_conversions.converted.cache_clear()
    monkeypatch.setattr(stock_conversions, "_TABLE", "transformers.no_such_table")
    try:
        assert "    def is_custom_code(cls):\n" in generate(llama)
    finally:
        monkeypatch.undo()
        stock_conversions.converted.cache_clear()


def test_the_names_that_are_read_are_those_that_transformers_has() -> None:
    known = stock_conversions.converted()
    assert known is not None
    conversions = importlib.import_module("transformers.conversion_mapping")
    assert {name for name in known if conversions.get_checkpoint_conversion_mapping(name)} >= {"mixtral", "ViTModel"}
    conversions.get_checkpoint_conversion_mapping("mixtral")
    own = conversions.USER_REGISTERED_MAPPINGS  # those that generated files have registered
    assert conversions._checkpoint_conversion_mapping_cache.keys() - own <= known


def test_a_config_that_says_it_itself_is_left_alone() -> None:
    config = PatchConfig("transformers.models.mixtral.modeling_mixtral", "out.py")
    config.override_method("MixtralModel.is_custom_code", "@classmethod\ndef f(cls):\n    return True", new=True)
    assert generate(config).count("def is_custom_code") == 1


def test_the_method_is_in_a_class_that_takes_the_place_of_the_original() -> None:
    config = PatchConfig("transformers.models.mixtral.modeling_mixtral", "out.py")
    config.replace_class("MixtralPreTrainedModel", "class Base(PreTrainedModel):\n    config_class = MixtralConfig\n")
    text = generate(config)
    assert "    config_class = MixtralConfig\n\n    @classmethod\n    def is_custom_code(cls):" in text
    assert "MixtralPreTrainedModel.is_custom_code" in text.partition("# Differs:")[2].partition("# ---")[0]


def test_a_class_under_another_name_than_the_one_that_is_looked_up_is_refused() -> None:
    config = PatchConfig("transformers.models.qwen2_vl.modeling_qwen2_vl", "out.py")
    config.add_helper_after("Qwen2VLModel", "class Mine(Qwen2VLModel):\n    pass\n")
    with pytest.raises(CodegenError, match=r"Mine inherits from Qwen2VLModel, whose checkpoints .* by the name of"):
        generate(config)


@pytest.mark.parametrize("right", [True, False])
def test_an_initialisation_that_writes_over_loaded_weights_is_refused(
    right: bool, imported: Callable[[PatchConfig], ModuleType], tmp_path: Path
) -> None:
    config = PatchConfig("transformers.models.mixtral.modeling_mixtral", "out.py")
    write = "init.zeros_(module.weight)" if right else "module.weight.data.zero_()"
    config.override_method(
        "MixtralPreTrainedModel._init_weights",
        f"def f(self, module):\n    if isinstance(module, nn.Linear):\n        {write}\n",
    )
    if not right:
        with pytest.raises(CodegenError, match=r"writes with module\.weight\.data\.zero_\(\), also over weights that"):
            generate(config)
        return
    folder = tiny.save_tiny(tiny.tiny_mixtral_config(), tmp_path / "checkpoint")
    model: Any = imported(config).MixtralForCausalLM.from_pretrained(folder)
    stock = transformers.MixtralForCausalLM.from_pretrained(folder)
    for key, value in stock.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


@pytest.mark.parametrize("name", ["dac", "clip", "timm_wrapper", "encoder_decoder"])
def test_the_classes_are_those_that_inherit_from_no_other_model_of_the_file(name: str) -> None:
    module = f"transformers.models.{name}.modeling_{name}"
    found = stock_conversions._base_models(ast.parse(generate(PatchConfig(module, "out.py"))))
    original = __import__(module, fromlist=["x"])
    own = [
        value
        for value in vars(original).values()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.__module__ == module
    ]
    first = {value.__name__ for value in own if not any(base in own for base in value.__mro__[1:])}
    assert {node.name for node in found} == first
