"""What people do with a model that has adapters: on a fused one it does what it does on the stock one, or raises."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter
from transformers import AutoModelForCausalLM

from patcher import Patcher
from tests.support.adapters import (
    as_peft_model,
    assert_close,
    assert_same_files,
    base,
    new_adapter,
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
    for each in pair:  # of whatever kind
        each.add_weighted_adapter(["default", "other"], [0.3, 0.7], "svd", combination_type="svd", svd_rank=3)
        each.set_adapter("svd")
    assert_close(logits(pair[0]), logits(pair[1]))


def test_a_sum_of_what_was_trained_on_a_fused_model(llama: Path, tmp_path: Path) -> None:
    trained(llama, tmp_path / "one", FUSED, target_modules=["q_proj", "v_proj", "o_proj"])
    trained(llama, tmp_path / "two", FUSED, target_modules=["q_proj"], r=2)
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
    assert_close(logits(train(model)), logits(train(pair[1])))


def test_merged_for_good_it_is_saved_in_the_original_format(pair: list[Any], tmp_path: Path) -> None:
    expected = logits(pair[1])
    model = pair[0].merge_and_unload()
    model.save_pretrained(tmp_path)
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_unloaded_it_is_the_base_again(pair: list[Any], llama: Path, tmp_path: Path) -> None:
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
    with pytest.raises(RuntimeError, match="Hot swapping the adapter did not succeed"):  # of peft itself
        hotswap_adapter(model, str(two[1]), "default", torch_device="cpu")


def test_a_model_of_a_patcher_that_fuses_nothing_is_let_alone(llama: Path, two: tuple[Path, Path, Path]) -> None:
    from tests.support.replacements import OwnMLP

    model = as_peft_model(llama, two[0], patcher=Patcher({"LlamaMLP": OwnMLP}))
    assert_close(logits(model), logits(as_peft_model(llama, two[0])))
