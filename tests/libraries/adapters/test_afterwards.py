"""What people do with a model that has adapters: on a fused one it does what it does on the stock one, or raises."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from transformers import AutoModelForCausalLM

from patcher import InvalidPatcherError, PatchedWeightsError, Patcher
from tests.support.adapters import (
    SEVEN,
    as_peft_model,
    assert_close,
    assert_same_files,
    base,
    config,
    new_adapter,
    tensors_of,
    train,
    trained,
)
from tests.support.checkpoints import saved
from tests.support.comparing import logits

pytestmark = [  # what peft says of a second adapter, and of one that is deleted
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted:UserWarning"),
]
FUSED = Patcher(fusions=["qkv", "gate_up"])


@pytest.fixture(scope="module")
def two(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Adapters of other layers and ranks, and one of the layers and ranks of the first."""
    root = tmp_path_factory.mktemp("two")
    settings: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]},
        {"target_modules": ["q_proj", "k_proj"], "r": 3, "lora_alpha": 5, "rank_pattern": {"k_proj": 2}},
        {"target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"]},
    ]
    for number, each in enumerate(settings):
        new_adapter(base(llama), root / str(number), seed=number, **each)
    return root / "0", root / "1", root / "2"


@pytest.fixture
def pair(llama: Path, two: tuple[Path, Path, Path]) -> list[Any]:
    """A fused model and a stock one, with two adapters."""
    found = [as_peft_model(llama, two[0], patcher=patcher) for patcher in (FUSED, None)]
    for model in found:
        model.load_adapter(two[1], "other")
    return found


def active(*names: str) -> Callable[[Any], None]:
    return lambda model: model.base_model.set_adapter(list(names))


def weighted(model: Any) -> None:
    model.add_weighted_adapter(["default", "other"], [0.3, 0.7], "sum", combination_type="cat")
    model.set_adapter("sum")


def deleted(model: Any) -> None:
    model.delete_adapter("default")
    model.set_adapter("other")


def merged(model: Any) -> None:
    active("default", "other")(model)
    model.merge_adapter()


def unmerged(model: Any) -> None:
    merged(model)
    model.unmerge_adapter()


ACTIONS: list[Callable[[Any], Any]] = [
    active("other"),
    active("default", "other"),
    weighted,
    deleted,
    merged,
    unmerged,
    lambda model: model.base_model.disable_adapter_layers(),
    lambda model: model.base_model.model.model.layers[0].self_attn.o_proj.set_scale("default", 0.5),
]


@pytest.mark.parametrize("act", ACTIONS)
def test_it_computes_what_the_stock_model_does(act: Callable[[Any], Any], pair: list[Any], tmp_path: Path) -> None:
    for model in pair:
        act(model)
    assert_close(logits(pair[0]), logits(pair[1]))
    if act is not weighted:  # there they have other ranks, and compute the same
        for number, model in enumerate(pair):
            model.save_pretrained(tmp_path / str(number))
        for path in (tmp_path / "0").rglob("adapter_model.safetensors"):
            assert_same_files(path.parent, tmp_path / "1" / path.parent.relative_to(tmp_path / "0"))


def test_a_sum_is_saved_for_stock(pair: list[Any], llama: Path, tmp_path: Path) -> None:
    model = pair[0]
    weighted(model)
    model.save_pretrained(tmp_path, selected_adapters=["sum"])
    assert_close(logits(as_peft_model(llama, tmp_path / "sum")), logits(pair[0]))
    for kind in ("svd", "linear", "ties"):
        with pytest.raises(InvalidPatcherError, match=f"combination_type='{kind}' would mix them"):
            model.add_weighted_adapter(["default", "other"], [0.3, 0.7], kind, combination_type=kind, density=0.5)
        assert kind not in model.peft_config


def test_a_sum_of_what_was_trained_on_joined_layers(llama: Path, tmp_path: Path) -> None:
    trained(llama, tmp_path / "one", FUSED, target_modules=["qkv_proj", "o_proj"])
    trained(llama, tmp_path / "two", FUSED, target_modules=["qkv_proj"], r=2)
    found = []
    for patcher in (FUSED, None):
        model = PeftModel.from_pretrained(base(llama, patcher=patcher), tmp_path / "one", is_trainable=True)
        model.load_adapter(tmp_path / "two", "other")
        weighted(model)
        found.append(logits(model))
    assert_close(*found)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_what_it_is_a_copy_of(copied: Callable[[Any], Any], pair: list[Any], tmp_path: Path) -> None:
    model = copied(pair[0])
    model.set_adapter("other")
    pair[1].set_adapter("other")
    assert_close(logits(model), logits(pair[1]))
    for number, each in enumerate((model, pair[1])):
        each.save_pretrained(tmp_path / str(number))
    assert_same_files(tmp_path / "0" / "other", tmp_path / "1" / "other")
    with pytest.raises(InvalidPatcherError, match=r"The adapter of model\.layers\.1\.self_attn\.qkv_proj is made of"):
        train(model)


def test_it_is_not_trained_later_on(pair: list[Any]) -> None:
    model = pair[0]
    model.set_adapter("other")  # which makes it one to be trained, for peft
    expected = logits(model)
    model.eval()(input_ids=torch.arange(1, 5).unsqueeze(0)).logits.sum()  # with gradients, and none is asked for
    with pytest.raises(InvalidPatcherError, match="and is being trained: that would fill the zeros between them"):
        train(model)
    assert torch.equal(logits(model), expected)


def test_merged_for_good_it_is_saved_in_the_original_format(pair: list[Any], tmp_path: Path) -> None:
    expected = logits(pair[1])
    model = pair[0].merge_and_unload()
    model.save_pretrained(tmp_path)
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_unloaded_it_is_the_base_again(pair: list[Any], llama: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchedWeightsError, match="Take it off before saving"):
        pair[0].get_base_model().save_pretrained(tmp_path / "with")
    assert saved(pair[0].unload(), tmp_path / "ours") == saved(base(llama), tmp_path / "stock")


def test_adapters_of_transformers_itself(llama: Path, two: tuple[Path, Path, Path], tmp_path: Path) -> None:
    found = []
    for patcher in (FUSED, None):
        model = base(llama, patcher=patcher)
        model.load_adapter(str(two[0]))
        model.load_adapter(str(two[1]), "other")
        model.set_adapter("other")
        found.append([logits(model)])
        model.save_pretrained(tmp_path / str(patcher is None))
        model.disable_adapters()
        found[-1].append(logits(model))
        model.enable_adapters()
        model.delete_adapter("other")
        model.set_adapter("default")
        found[-1].append(logits(model))
        model.delete_adapter("default")
        found[-1].append(logits(model))
    for one, other in zip(*found, strict=True):
        assert_close(one, other)
    assert_same_files(tmp_path / "True", tmp_path / "False")


def test_one_is_put_in_the_place_of_another(llama: Path, two: tuple[Path, Path, Path]) -> None:
    found = []
    for patcher in (FUSED, None):
        model = as_peft_model(llama, two[0], patcher=patcher)
        hotswap_adapter(model, str(two[2]), "default", torch_device="cpu")
        by_transformers = base(llama, patcher=patcher)
        by_transformers.load_adapter(str(two[0]))
        by_transformers.load_adapter(str(two[2]), "default", hotswap=True)
        again = as_peft_model(llama, two[0], patcher=patcher)
        again.load_adapter(two[2], "default")
        found.append([logits(each) for each in (model, by_transformers, again)])
    for one, other in zip(*found, strict=True):
        assert_close(one, other)
    model = as_peft_model(llama, two[0], patcher=FUSED)
    with pytest.raises((InvalidPatcherError, PatchedWeightsError)):
        hotswap_adapter(model, str(two[1]), "default", torch_device="cpu")


def test_a_model_of_a_patcher_that_fuses_nothing_is_let_alone(llama: Path, two: tuple[Path, Path, Path]) -> None:
    from tests.support.replacements import OwnMLP

    model = as_peft_model(llama, two[0], patcher=Patcher({"LlamaMLP": OwnMLP}))
    assert_close(logits(model), logits(as_peft_model(llama, two[0])))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (LoraConfig(target_modules=["q_proj", "o_proj"]), r"Write target_modules=\['o_proj', 'qkv_proj'\]"),
        (LoraConfig(), r"asked for model.layers.\{0..1\}.self_attn.q_proj, model.layers.\{0..1\}.self_attn.v_proj"),
        (LoraConfig(target_modules=SEVEN), r"'down_proj', 'gate_up_proj', 'o_proj', 'qkv_proj'"),
        (LoraConfig(target_modules=r".*\.up_proj"), r"Write target_modules=\['gate_up_proj'\]"),
        (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "is a IA3 for"),
        (LoraConfig(target_modules=["o_proj"], modules_to_save=["q_proj"]), r"modules_to_save=\['q_proj'\] means"),
        (LoraConfig(target_modules=["o_proj"], modules_to_save=["mlp"]), r"modules_to_save=\['mlp'\] means"),
    ],
    ids=["some", "default", "seven", "expression", "IA3", "a part to save", "a module to save"],
)
def test_a_new_one_of_layers_that_are_joined(settings: Any, match: str, llama: Path) -> None:
    model = base(llama, patcher=FUSED)
    with pytest.raises(InvalidPatcherError, match=match):
        get_peft_model(model, settings)
    with pytest.raises(InvalidPatcherError, match=match):
        model.add_adapter(copy.deepcopy(settings))


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_one_that_changes_the_weights_beneath(start: str, llama: Path, tmp_path: Path) -> None:
    get_peft_model(base(llama), config(target_modules=["q_proj"], init_lora_weights=start)).save_pretrained(tmp_path)
    with pytest.raises(InvalidPatcherError, match=f"The adapter has init_lora_weights='{start}'"):
        as_peft_model(llama, tmp_path, patcher=FUSED)
    assert tensors_of(tmp_path)


@dataclass
class LaterConfig(LoraConfig):
    """LoRA as a later peft may have it."""

    use_something_new: bool = False


def test_a_setting_that_nobody_knows_is_refused(llama: Path, tmp_path: Path) -> None:
    new_adapter(base(llama), tmp_path, target_modules=["q_proj"])
    model = base(llama, patcher=FUSED)
    for changes in ({"use_something_new": True}, {"use_qalora": True}, {"layer_replication": [(0, 1)]}):
        asked = LaterConfig(target_modules=["q_proj"], r=4, **changes)
        with pytest.raises(InvalidPatcherError, match=f"The adapter has {next(iter(changes))}="):
            PeftModel.from_pretrained(model, tmp_path, config=asked)
    PeftModel.from_pretrained(model, tmp_path, config=LaterConfig(target_modules=["q_proj"], r=4, qalora_group_size=4))
