"""The value `Patcher`, its names and expressions."""

from __future__ import annotations

import functools
import pickle
import re
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.core_model_loading import WeightRenaming
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, apply_rotary_pos_emb

import patcher
from patcher import Patcher, monkey_patching, presets
from patcher.fusions import QKV, Fusion, GateUp
from tests.project.advice import OwnMLP, Place, Steps, advice, load, same, written
from tests.support.tiny import tiny_llama_config

OWN = Patcher({"LlamaMLP": OwnMLP})


class WideMLP(LlamaMLP):
    def __init__(self, config: Any, scale: int = 1) -> None:
        super().__init__(config)
        self.scale = scale


class Unregistered(Fusion):
    pass


# --- a patcher -----------------------------------------------------------------------------------------------------


@advice("{} takes a patcher.Patcher, found {} ({}); write for instance {}.")
def something_else_than_a_patcher(at: Place) -> Steps:
    for value in ("qkv", [QKV()], {"LlamaMLP": OwnMLP}, OwnMLP, 3):
        said = yield lambda value=value: load(at.llama, patcher=value)  # type: ignore[misc]
        instead = written(said, r"write for instance patcher=(.*)\.$", MyMLP=OwnMLP)
        assert same(load(at.llama, patcher=instead), at.llama)


@advice("{} takes a patcher.Patcher, found {} ({}); write for instance {}.")
def names_of_patchers_where_one_is_asked_about(at: Place) -> Steps:
    for call in (patcher.plan, patcher.diff):
        said = yield lambda call=call: call(at.llama, ["qkv"])  # type: ignore[misc]
        names = {"model": at.llama, "plan": patcher.plan, "diff": patcher.diff, "MyMLP": OwnMLP}
        assert written(said, r"write for instance (.*)\.$", **names)


@advice("found no patcher; write benchmark(model, Patcher(fusions=['qkv']))")
def nothing_to_measure(at: Place) -> Steps:
    short = partial(patcher.benchmark, seconds=1.0, measures=["load"], verify=False)
    said = yield lambda: patcher.benchmark(at.llama)
    assert written(said, r"write (.*)$", model=at.llama, benchmark=short)


@advice("is not a positive number; write benchmark(..., seconds=60).")
def no_time_to_measure(at: Place) -> Steps:
    def benchmark(*_: Any, seconds: float) -> Any:
        return patcher.benchmark(at.llama, OWN, seconds=seconds / 30, measures=["load"], verify=False)

    said = yield lambda: patcher.benchmark(at.llama, OWN, seconds=0)
    assert written(said, r"write (.*)\.$", benchmark=benchmark)


@advice('inputs=tokenizer(texts, return_tensors="pt").')
def inputs_that_are_texts(at: Place) -> Steps:
    def short(inputs: Any) -> Any:
        return patcher.benchmark(at.llama, OWN, inputs=inputs, seconds=1.0, measures=["load"], verify=False)

    def tokenizer(texts: Any, return_tensors: str) -> Any:
        return {"input_ids": torch.tensor([[1, 2, 3]])}

    said = yield lambda: short("a text")
    assert short(written(said, r"write inputs=(.*)\.$", texts=["a text"], tokenizer=tokenizer))


@advice("a Patcher is immutable; use patcher.replace({}=...) for a changed copy")
def a_changed_attribute(at: Place) -> Steps:
    said = yield lambda: setattr(OWN, "strict", False)
    assert not written(said.replace("...", "False"), "use (.*) for", patcher=OWN).strict


@advice("Both patchers replace {}, by {}. Combine after taking one away: ")
def two_replacements_of_one_class(at: Place) -> Steps:
    other = Patcher({"LlamaMLP": WideMLP})
    said = yield lambda: OWN | other
    less = written(said.replace("{...}", "{}"), r"away: (.*)\.$", patcher=OWN)
    assert same(load(at.llama, less | other), at.llama)


@advice('write {"qkv": True}')
def a_fusion_config_that_is_none(at: Place) -> Steps:
    said = yield lambda: Patcher.from_fusion_config(["qkv"])  # type: ignore[arg-type]
    assert same(load(at.llama, Patcher.from_fusion_config(written(said, r"write (.*)\.$"))), at.llama)


# --- arguments -----------------------------------------------------------------------------------------------------


@advice("{} must be a mapping, found {} ({}); write for instance Patcher({}={{}}).")
def a_name_in_place_of_the_mapping(at: Place) -> Steps:
    for value in ("qkv", ["qkv", "gate_up"], OwnMLP, 3):
        said = yield lambda value=value: Patcher(value)  # type: ignore[arg-type, misc]
        assert same(load(at.llama, written(said, r"write for instance (.*)\.$", MyMLP=OwnMLP)), at.llama)


@advice("{} must be a mapping, found {} ({}); write for instance Patcher({}={{}}).")
def lists_in_place_of_other_mappings(at: Place) -> Steps:
    for name in ("module_mapping", "function_mapping"):
        said = yield lambda name=name: Patcher(**{name: 3})  # type: ignore[arg-type, misc]
        instead = written(said, r"write for instance (.*)\.$", MyMLP=OwnMLP, my_rotary=apply_rotary_pos_emb)
        assert instead.to_dict()[name]


@advice("a key is the name of a function, or module:name, found {}; write for instance ")
def no_name_of_a_function(at: Place) -> Steps:
    for key in ("modeling_llama.apply_rotary_pos_emb", "transformers.models.llama.modeling_llama:", ":f", 3):
        said = yield lambda key=key: Patcher(function_mapping={key: apply_rotary_pos_emb})  # type: ignore[misc]
        for instead in re.findall(r"'([\w.:]+)'", said.partition("write for instance")[2]):
            assert Patcher(function_mapping={instead: apply_rotary_pos_emb}).function_mapping


@advice("write a function with the parameters of the one that it replaces. Classes belong in class_mapping")
def a_class_for_a_function(at: Place) -> Steps:
    for value in (OwnMLP, "rotary", None):
        yield lambda value=value: Patcher(function_mapping={"apply_rotary_pos_emb": value})  # type: ignore[dict-item, misc]
    assert Patcher(function_mapping={"apply_rotary_pos_emb": apply_rotary_pos_emb}).function_mapping


@advice("a key is the name of a class, an expression, or like(...), found {}; write {}.")
def a_class_as_a_key(at: Place) -> Steps:
    said = yield lambda: Patcher({LlamaMLP: OwnMLP})  # type: ignore[dict-item]
    assert same(load(at.llama, Patcher({written(said, r"write (.*)\.$"): OwnMLP})), at.llama)


@advice("write a subclass that implements {}.")
def an_abstract_class(at: Place) -> Steps:
    class Scaled(LlamaMLP, ABC):
        @abstractmethod
        def scale(self) -> float: ...

    class Doubled(Scaled):
        def scale(self) -> float:
            return 2.0

    yield lambda: Patcher({"LlamaMLP": Scaled})
    assert load(at.llama, Patcher({"LlamaMLP": Doubled})).model.layers[0].mlp.scale() == 2


@advice("write the class itself, derived from the class that it replaces: not an object, its name, or a function ")
def something_for_a_class(at: Place) -> Steps:
    def doubled(config: Any) -> nn.Module:
        return LlamaMLP(config)

    config = LlamaConfig(hidden_size=64, intermediate_size=96)
    for value in (OwnMLP(config), "OwnMLP", 3, doubled, functools.partial(OwnMLP)):
        yield lambda value=value: Patcher({"LlamaMLP": value})  # type: ignore[dict-item, misc]
    assert same(load(at.llama, OWN), at.llama)


@advice("write class {}(nn.Module).")
def a_class_that_is_no_module(at: Place) -> Steps:
    said = yield lambda: Patcher({"LlamaMLP": int})  # type: ignore[dict-item]
    names: dict[str, Any] = {"nn": nn}
    exec(said.partition("write ")[2].removesuffix(".") + ": ...", names)
    assert Patcher({"LlamaMLP": names["int"]}).class_mapping


@advice("{} isn't a regular expression: {}. For a literal text write {}.")
def no_expression(at: Place) -> Steps:
    said = yield lambda: Patcher(new_weights="scales[")
    assert Patcher(new_weights=written(said, r"literal text write (.*)\.$"))


@advice("write a string")
def a_number_as_an_expression(at: Place) -> Steps:
    yield lambda: Patcher(new_weights=[3])  # type: ignore[list-item]
    assert Patcher(new_weights="3")


@advice("the empty expression is found everywhere; name what is meant.")
def an_empty_expression(at: Place) -> Steps:
    yield lambda: Patcher(filtered_weight_conversion_patterns="")
    assert Patcher(filtered_weight_conversion_patterns="experts")


@advice("write a WeightConverter or a WeightRenaming of transformers.core_model_loading")
def a_mapping_for_a_conversion(at: Place) -> Steps:
    yield lambda: Patcher(extra_weight_conversions={"a": "b"}.items())  # type: ignore[arg-type]
    assert Patcher(extra_weight_conversions=WeightRenaming("a", "b"))


@advice("Only one can; take one away.")
def two_conversions_of_one_tensor(at: Place) -> Steps:
    one, other = WeightRenaming("a", "b"), WeightRenaming("a", "c")
    yield lambda: Patcher(extra_weight_conversions=[one, other])
    assert Patcher(extra_weight_conversions=[one])


@advice("isn't a version specifier; write for instance '>=5.20,<5.24' or '==5.23.0'.")
def no_specifier(at: Place) -> Steps:
    said = yield lambda: Patcher(transformers="five")
    assert Patcher(transformers=written(said, "for instance ('.*?')"))


@advice("write a text")
def a_number_as_a_fingerprint(at: Place) -> Steps:
    yield lambda: Patcher(fingerprints={"LlamaMLP": [3]})  # type: ignore[list-item]
    assert Patcher(fingerprints={"LlamaMLP": "3"}).fingerprints


@advice("takes groups of class keys, found {}; write {}=[['LlamaMLP', ...]].")
def a_text_for_a_group(at: Place) -> Steps:
    said = yield lambda: Patcher({"LlamaMLP": OwnMLP}, alternatives=["LlamaMLP"])  # type: ignore[list-item]
    groups = written(said.replace(", ...", ""), r"write alternatives=(.*)\.$")
    assert same(load(at.llama, Patcher({"LlamaMLP": OwnMLP}, alternatives=groups)), at.llama)


# --- fusions -------------------------------------------------------------------------------------------------------


@advice("write fusions={}")
def several_names_in_one_text(at: Place) -> Steps:
    for text in ("qkv,gate_up", "qkv, gate_up", "qkv gate_up", "qkv|gate_up", "qkv+gate_up"):
        said = yield lambda text=text: Patcher(fusions=text)  # type: ignore[misc]
        names = written(said, r"write fusions=(.*)\.$")
        assert names == ["qkv", "gate_up"]
        assert same(load(at.llama, Patcher(fusions=names)), at.llama)


@advice("write an object of it, {}()")
def a_family_in_place_of_an_object(at: Place) -> Steps:
    said = yield lambda: Patcher(fusions=QKV)  # type: ignore[arg-type]
    assert same(load(at.llama, Patcher(fusions=written(said, r"an object of it, (.*)\."))), at.llama)


@advice("write a name ({}) or an object of a Fusion subclass")
def a_class_that_is_no_family(at: Place) -> Steps:
    yield lambda: Patcher(fusions=LlamaMLP)  # type: ignore[arg-type]
    assert same(load(at.llama, Patcher(fusions=["qkv", GateUp()])), at.llama)


@advice("write a name, or an object of a Fusion subclass")
def a_number_as_a_fusion(at: Place) -> Steps:
    yield lambda: Patcher(fusions=[3])  # type: ignore[list-item]
    assert same(load(at.llama, Patcher(fusions=["qkv", GateUp()])), at.llama)


@advice("{} takes no mapping, found {}; write Patcher.from_fusion_config({}).")
def a_fusion_config_as_fusions(at: Place) -> Steps:
    said = yield lambda: Patcher(fusions={"qkv": True})  # type: ignore[arg-type]
    assert written(said, r"write (.*)\.$") == Patcher(fusions="qkv")


@advice("{}: modules={} is empty; leave it out to fuse all that can be.")
def no_paths(at: Place) -> Steps:
    yield lambda: QKV(modules=[])
    assert same(load(at.llama, Patcher(fusions=QKV())), at.llama)


@advice("{}: {} ({}) isn't a path of a module; write for instance 'model.layers.{0..3}.mlp'.")
def no_text_as_a_path(at: Place) -> Steps:
    said = yield lambda: GateUp(modules=[3])  # type: ignore[list-item]
    path = written(said, "for instance ('.*?')").replace("0..3", "0..1")
    assert same(load(at.llama, Patcher(fusions=GateUp(modules=path))), at.llama)


@advice("the empty path is ambiguous; write {} for the model itself, '**' for all.")
def an_empty_path(at: Place) -> Steps:
    yield lambda: GateUp(modules="")
    assert same(load(at.llama, Patcher(fusions=GateUp(modules="**"))), at.llama)


@advice("names with one dot between them, {0..3} or {0,2..5} for numbers in ascending order")
def what_looks_like_a_path(at: Place) -> Steps:
    wrong = {
        r"model\.layers\.\d+\.mlp": "model.layers.*.mlp",
        "model..mlp": "model.layers.0.mlp",
        "model.layers.{a}.mlp": "model.layers.{0..1}.mlp",
        "model.layers.x{0}.mlp": "model.layers.{0..1}.mlp",
        "model.lay*.0.mlp": "model.*.0.mlp",
    }
    for path, instead in wrong.items():
        yield lambda path=path: GateUp(modules=path)  # type: ignore[misc]
        assert same(load(at.llama, Patcher(fusions=GateUp(modules=instead))), at.llama)


@advice("Narrow one of them, or add the exact {}, which wins: {}: ...")
def two_expressions_of_one_class(at: Place) -> Steps:
    both = {"^LlamaML": OwnMLP, "aMLP$": WideMLP}
    said = yield lambda: load(at.llama, Patcher(both))
    name = written(said, r"which wins: ('.*'): \.\.\.")
    assert same(load(at.llama, Patcher({"^LlamaML": OwnMLP, name: OwnMLP})), at.llama)
    with_both = Patcher({**both, name: OwnMLP}, strict=True)
    assert with_both.resolve(LlamaForCausalLM, LlamaConfig(num_hidden_layers=1)).replaced


@advice("Narrow one of them, or add the exact {}, which wins: {}: ...")
def two_patterns_of_one_path(at: Place) -> Steps:
    both = {"**.mlp": OwnMLP, "model.layers.*.mlp": WideMLP}
    said = yield lambda: load(at.llama, Patcher(module_mapping=both))
    path = written(said, r"which wins: ('.*'): \.\.\.")
    assert Patcher(module_mapping={"**.mlp": OwnMLP, path: WideMLP}).resolve(LlamaForCausalLM, tiny_llama_config())
    narrow = {"**.0.mlp": OwnMLP, "model.layers.1.mlp": WideMLP}
    assert same(load(at.llama, Patcher(module_mapping=narrow)), at.llama)


@advice("{} is the model itself; give its class in class_mapping={...}, by its name.")
def the_path_of_the_model_itself(at: Place) -> Steps:
    yield lambda: Patcher(module_mapping={"(root)": LlamaForCausalLM})
    assert same(load(at.llama, Patcher({"LlamaForCausalLM": LlamaForCausalLM})), at.llama)


@advice("The fusions {} and {} both claim {}; use one.")
def two_fusions_of_one_module(at: Place) -> Steps:
    part = GateUp(modules="model.layers.0.mlp")
    yield lambda: load(at.llama, Patcher(fusions=["gate_up", part]))
    assert same(load(at.llama, Patcher(fusions=part)), at.llama)


@advice("which the {} replaces by {}; take one of them away.")
def a_fusion_of_a_replaced_module(at: Place) -> Steps:
    yield lambda: load(at.llama, OWN | Patcher(fusions="gate_up"))
    assert same(load(at.llama, OWN), at.llama)


# --- names of the package ------------------------------------------------------------------------------------------


@advice("write {}.{}")
def a_misspelt_name(at: Place) -> Steps:
    for module, name in ((presets, "LLAMA_FUSED"), (patcher, "Pacher"), (patcher.fusions, "QVK")):
        said = yield lambda module=module, name=name: getattr(module, name)  # type: ignore[misc]
        assert written(said, r"write (.*)\.$", patcher=patcher)


@advice(
    "{} doesn't name a model: write the path of an existing folder, or a repo that can be reached; ",
    "for a model in memory write model.config. ({})",
)
def presets_of_what_names_no_model(at: Place) -> Steps:
    yield lambda: presets.for_model(str(at.tmp / "absent"))
    assert presets.for_model(at.llama)
    model = load(at.llama)
    said = yield lambda: presets.for_model(model)
    assert presets.for_model(written(said, r"write (model\S*)\. ", model=model))


@advice("Pass overwrite=True to replace it.", error=ValueError)
def a_patch_that_is_registered_already(at: Place) -> Steps:
    mapping = {"NoSuchClassAnywhere": OwnMLP}
    monkey_patching.register_patch_mapping(mapping)
    try:
        yield lambda: monkey_patching.register_patch_mapping({"NoSuchClassAnywhere": WideMLP})
        monkey_patching.register_patch_mapping({"NoSuchClassAnywhere": WideMLP}, overwrite=True)
    finally:
        monkey_patching.unregister_patch_mapping(["NoSuchClassAnywhere"])


@advice("{}: a group without class keys matches no model; take it out.")
def a_group_without_keys(at: Place) -> Steps:
    yield lambda: OWN.replace(alternatives=[[], ["LlamaMLP"]])
    assert OWN.replace(alternatives=[["LlamaMLP"]]) == OWN


@advice("{}: {} expressions are too many, at most {} are searched; fold those that differ in numbers alone.")
def more_expressions_than_are_searched(at: Place) -> Steps:
    yield lambda: Patcher(OWN.class_mapping, dropped_weights=[rf"layers\.{number}\.extra" for number in range(1000)])
    assert Patcher(OWN.class_mapping, dropped_weights=r"layers\.\d+\.extra")


# --- as data -------------------------------------------------------------------------------------------------------


@advice("Put it into a module of its own, or pickle the patcher.")
def a_class_that_no_import_finds(at: Place) -> Steps:
    class Local(LlamaMLP):
        pass

    yield lambda: Patcher({"LlamaMLP": Local}).to_dict()
    assert Patcher.from_dict(OWN.to_dict(), allowed=[OwnMLP]) == OWN


@advice("Pickle the patcher, or take the fusion out and pass it in code.")
def a_fusion_without_a_name(at: Place) -> Steps:
    given = Patcher(fusions=["qkv", Unregistered()])
    yield lambda: given.to_dict()
    assert pickle.loads(pickle.dumps(given)) == given
    assert Patcher.from_dict(given.replace(fusions="qkv").to_dict()) | Patcher(fusions=Unregistered()) == given


class CarryingMLP(LlamaMLP):
    conversion_mapping = (WeightRenaming("old", "up_proj"),)


@advice("can't be written as data. Put it into the `conversion_mapping` of the class that needs it, ")
def a_conversion_as_data(at: Place) -> Steps:
    yield lambda: Patcher({"LlamaMLP": OwnMLP}, extra_weight_conversions=CarryingMLP.conversion_mapping).to_dict()
    given = Patcher({"LlamaMLP": CarryingMLP})
    assert Patcher.from_dict(given.to_dict(), allowed=[CarryingMLP]) == pickle.loads(pickle.dumps(given)) == given


@advice("write it with Patcher.to_dict(), or install the release of patcher that wrote it.")
def data_of_another_release(at: Place) -> Steps:
    yield lambda: Patcher.from_dict({"schema": 2})
    assert Patcher.from_dict(Patcher(fusions="qkv").to_dict()) == Patcher(fusions="qkv")


@advice("If you trust that code, write Patcher.from_dict(data, allowed=[{}]).")
def a_class_that_is_not_allowed(at: Place) -> Steps:
    data = OWN.to_dict()
    said = yield lambda: Patcher.from_dict(data)
    assert written(said, r"write (.*)\.$", data=data) == OWN


@advice("{} can't be imported: {}: {}. Install the package that has it, or correct the name.")
def a_class_that_cannot_be_imported(at: Place) -> Steps:
    data = OWN.to_dict()
    wrong = {**data, "class_mapping": {"LlamaMLP": "tests.project.advice:OwnMPL"}}
    yield lambda: Patcher.from_dict(wrong, allowed="tests.project.advice:OwnMPL")
    assert Patcher.from_dict(data, allowed="tests.project.advice:OwnMLP") == OWN
