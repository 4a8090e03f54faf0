"""`modules=`: a family only where it is asked for, at paths in the language that reports print."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PretrainedConfig

from patcher import (
    CodegenError,
    InvalidPatcherError,
    PatchConflictError,
    PatchedWeightsError,
    Patcher,
    PatcherWarning,
    UnmatchedPatchError,
    plan,
    presets,
    report,
)
from patcher.codegen import PatchConfig, generate
from patcher.fusions import QKV, Decision, Fusion, GateUp, PatchEmbeddings, SequentialExperts
from tests.support import shared
from tests.support.checkpoints import assert_saved_alike
from tests.support.tiny import (
    build_tiny,
    save_tiny,
    tiny_inputs,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_vl_config,
)

LAYERS = tiny_llama_config(num_hidden_layers=4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(LAYERS)


def load(folder: Path, *fusions: str | Fusion, **options: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, patcher=Patcher(fusions=fusions, **options))


def fused(model: Any) -> list[str]:
    return [path for path, _, _ in report(model).fused]


def layers(name: str, *numbers: int) -> list[str]:
    return [f"model.layers.{number}.{name}" for number in numbers]


# --- only there ------------------------------------------------------------------------------------------------------

FAMILIES: list[tuple[PretrainedConfig, Callable[[Any], Fusion], Any, list[str]]] = [
    (LAYERS, QKV, "model.layers.{1..2}.self_attn", layers("self_attn", 1, 2)),
    (LAYERS, QKV, ["model.layers.0.*", "**.{3}.self_attn"], layers("self_attn", 0, 3)),
    (LAYERS, GateUp, "model.layers.{0,2..3}.**", layers("mlp", 0, 2, 3)),
    (tiny_mixtral_config(), SequentialExperts, "*.layers.1.mlp.experts", ["model.layers.1.mlp.experts"]),
    (tiny_qwen2_vl_config(), PatchEmbeddings, "model.visual.**", ["model.visual.patch_embed.proj"]),
]


@pytest.mark.parametrize(("config", "family", "modules", "paths"), FAMILIES, ids=[str(each[2]) for each in FAMILIES])
def test_a_family_is_applied_only_there(
    config: PretrainedConfig, family: Callable[[Any], Fusion], modules: Any, paths: list[str], tmp_path: Path
) -> None:
    model_class, inputs = type(build_tiny(config)), tiny_inputs(config)
    folder = save_tiny(config, tmp_path / "checkpoint")
    patcher = Patcher(fusions=family(modules))
    model, stock = model_class.from_pretrained(folder, patcher=patcher), model_class.from_pretrained(folder)

    assert fused(model) == paths
    assert list(patcher.resolve(model_class, config).fused) == paths
    assert [path for path, _, _ in plan(folder, patcher).fused] == paths
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], stock(**inputs)[0])
    assert_saved_alike(model, stock, tmp_path)
    assert_saved_alike(model, stock, tmp_path / "sharded", max_shard_size="100KB")
    with pytest.raises(PatchedWeightsError, match="which no name describes"):
        model.save_pretrained(tmp_path / "layout", save_original_format=False)


@pytest.mark.parametrize(
    "fusions",
    [
        [QKV("model.layers.0.self_attn"), QKV("model.layers.{2..3}.self_attn"), "gate_up"],
        [QKV("model.layers.{0,2..3}.self_attn"), GateUp("**.{0..3}.mlp")],
    ],
    ids=["two of a family", "two families"],
)
def test_several_are_applied_each_in_its_place(fusions: list[Any], llama: Path, tmp_path: Path) -> None:
    model, stock = load(llama, *fusions), LlamaForCausalLM.from_pretrained(llama)

    assert sorted(fused(model)) == sorted([*layers("self_attn", 0, 2, 3), *layers("mlp", 0, 1, 2, 3)])
    assert_saved_alike(model, stock, tmp_path)
    again = pickle.loads(pickle.dumps(model))
    assert_saved_alike(again, stock, tmp_path / "pickled")
    made = AutoModelForCausalLM.from_config(LAYERS, patcher=Patcher(fusions=fusions))
    assert fused(made) == fused(model)


@pytest.mark.parametrize("other", ["qkv", QKV("**.self_attn"), presets.LLAMA_FUSED_PROJECTIONS], ids=str)
def test_two_of_a_family_that_overlap_conflict(other: Any, llama: Path) -> None:
    patcher = other if isinstance(other, Patcher) else Patcher(fusions=other)
    with pytest.raises(PatchConflictError, match=r"both claim model\.layers\.1\.self_attn; use one"):
        LlamaForCausalLM.from_pretrained(llama, patcher=patcher | Patcher(fusions=QKV("model.layers.1.self_attn")))


# --- what is asked for and isn't there -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            "model.layers.{0..3}.self_atn",
            r"is requested at 'model\.layers\.\{0\.\.3\}\.self_atn', where the model has no module; "
            r"nearest: model\.layers\.\{0\.\.3\}\.self_attn",
        ),
        ("model.layers.{4..9}.self_attn", r"has no module; nearest: model\.layers\.\{0\.\.3\}\.self_attn"),
        (["model.layers.0.self_attn", "zzz"], r"is requested at 'zzz', where the model has no module\n"),
        (
            "model.layers.1",
            r"can't fuse any module that 'model\.layers\.1' names; what is inside .* would be model\.layers\.1\.\*\*",
        ),
        (["**.self_attn", "**.mlp"], r"can't fuse any module that '\*\*\.mlp' names"),
    ],
    ids=str,
)
def test_a_path_that_nothing_is_fused_at_is_an_error(modules: Any, message: str, llama: Path) -> None:
    fusion = QKV(modules)
    with pytest.raises(UnmatchedPatchError, match=rf"in LlamaForCausalLM:\n  fusions: QKV\(modules=.* {message}"):
        load(llama, fusion)
    with pytest.raises(UnmatchedPatchError, match=message):
        AutoModelForCausalLM.from_config(LAYERS, patcher=Patcher(fusions=fusion))
    with pytest.raises(UnmatchedPatchError, match=message), Patcher(fusions=fusion).applied():
        LlamaForCausalLM(LAYERS)
    assert any(re.search(message, f"{problem}\n") for problem in plan(llama, Patcher(fusions=fusion)).problems)
    with pytest.warns(PatcherWarning, match=message):
        model = load(llama, fusion, strict=False)
    assert set(fused(model)) <= {*layers("self_attn", 0, 1, 2, 3)}


def test_why_what_a_path_names_is_refused_is_said(llama: Path) -> None:
    class Refuses(QKV):
        def decide(self, path: str, module: nn.Module, surroundings: Any) -> Decision | None:
            return Decision(refusal="it is a Tuesday") if path.endswith("self_attn") else None

    message = r"that 'model\.layers\.2\.self_attn' names; it refused model\.layers\.2\.self_attn \(it is a Tuesday\)\n"
    with pytest.raises(UnmatchedPatchError, match=message):
        load(llama, Refuses("model.layers.2.self_attn"))


def test_in_a_block_a_path_may_be_of_any_of_its_models(llama: Path) -> None:
    patcher = Patcher(fusions=QKV(["layers.0.self_attn", "model.layers.1.self_attn"]))
    with patcher.applied():
        whole = LlamaForCausalLM.from_pretrained(llama)
        base = type(whole.model).from_pretrained(llama)

    assert fused(whole) == ["model.layers.1.self_attn"]
    assert fused(base) == ["layers.0.self_attn"]


# --- the value -------------------------------------------------------------------------------------------------------


def test_it_is_a_value() -> None:
    one, other = QKV(["b.*", "a"]), QKV(modules=iter(["a", "b.*", "a"]))
    assert one == other != QKV("a") != GateUp("a")
    assert hash(one) == hash(other)
    assert repr(one) == "QKV(modules=('a', 'b.*'))"
    assert QKV() == QKV(()) != one
    assert repr(Patcher(fusions=[QKV(), GateUp(), one])) == f"Patcher(fusions=['qkv', 'gate_up', {one!r}])"
    patcher = Patcher(fusions=[one, "gate_up"])
    assert pickle.loads(pickle.dumps(patcher)) == patcher == patcher | Patcher(fusions=other)
    data = {"schema": 1, "fusions": [{"name": "qkv", "options": {"modules": ["a", "b.*"]}}, "gate_up"]}
    assert patcher.to_dict() == data
    assert Patcher.from_dict(data) == patcher
    assert Patcher.from_fusion_config({"qkv": {"modules": ["b.*", "a"]}, "gate_up": True}) == patcher


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([], r"QKV: modules=\[\] is empty; leave it out to fuse all that can be"),
        ("", r"QKV: modules: the empty path is ambiguous"),
        (r"\.self_attn$", r"QKV: modules: '\\\\.self_attn\$' isn't a path of modules: "),
        (3, r"QKV: modules: 3 \(int\) isn't a path of a module"),
        (["a", None], r"QKV: modules: None \(NoneType\) isn't a path of a module"),
    ],
)
def test_what_is_no_path_is_refused_at_once(modules: Any, message: str) -> None:
    with pytest.raises(InvalidPatcherError, match=message):
        QKV(modules)
    if modules != "":
        with pytest.raises(InvalidPatcherError, match=message):
            Patcher.from_fusion_config({"qkv": {"modules": modules}})


class Own(Fusion):
    """With an `__init__` of its own, which knows nothing of the base's."""

    def __init__(self, ending: str) -> None:
        self.ending = ending

    def decide(self, path: str, module: nn.Module, surroundings: Any) -> Decision | None:
        return super().decide(path, module, surroundings) if path.endswith(self.ending) else None

    def is_fusable(self, module: nn.Module) -> bool:
        return True

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return type(f"Own{original_cls.__name__}", (original_cls,), {})


class OwnWithPaths(Own):
    def __init__(self, ending: str, modules: str) -> None:
        super(Own, self).__init__(modules)
        self.ending = ending


def test_a_family_of_ones_own_may_take_it_or_not(llama: Path) -> None:
    assert repr(Own("mlp")) == "Own(ending='mlp')"
    assert fused(load(llama, Own("mlp"))) == layers("mlp", 0, 1, 2, 3)
    assert fused(load(llama, OwnWithPaths("mlp", "model.layers.{0..1}.*"))) == layers("mlp", 0, 1)
    with pytest.raises(UnmatchedPatchError, match=r"can't fuse any module that 'model\.norm' names"):
        load(llama, OwnWithPaths("mlp", "model.norm"))


# --- as a file -------------------------------------------------------------------------------------------------------


def test_a_file_has_one_forward_for_a_class() -> None:
    def generated(modules: str) -> str:
        fusion = QKV(modules)
        return generate(PatchConfig.from_patcher(Patcher(fusions=fusion), LlamaForCausalLM, config=LAYERS))

    assert "self.qkv_proj(hidden_states)" in generated("**.self_attn")
    with pytest.raises(CodegenError, match=r"model\.layers\.3\.self_attn is not fused, and others of its class"):
        generated("model.layers.{0..2}.self_attn")
