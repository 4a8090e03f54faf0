"""What a module mapping finds in a model that is being built, and with which arguments its replacements are made."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, LlamaModel, LlamaPreTrainedModel
from transformers.pytorch_utils import Conv1D

from patcher import Patcher, UnmatchedPatchError, like
from patcher.errors import InvalidPatcherError, PatchConflictError, PatchConstructionError
from tests.support.replacements import OwnMLP
from tests.support.tiny import tiny_llama_config


class PartsConfig(PretrainedConfig):
    model_type = "parts-of-many-kinds"
    width: int = 32


class Parts(PreTrainedModel):
    """Modules of torch with all sorts of arguments, one at two paths, a copy, and one that is called for by name."""

    config_class = PartsConfig

    def __init__(self, config: PartsConfig) -> None:
        super().__init__(config)
        width = config.width
        self.plain = nn.Linear(width, 2 * width)
        self.bare = nn.Linear(in_features=width, out_features=width, bias=False)
        self.wide = nn.Linear(width, width, dtype=torch.float64)
        self.table = nn.Embedding(5, width, padding_idx=1)
        self.norm = nn.LayerNorm(width, eps=1e-3, bias=False)
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=2, padding=1, bias=False)
        self.dropped = nn.Dropout(0.25)
        self.heads = nn.MultiheadAttention(width, 2)
        self.listed = nn.ModuleList([nn.Linear(width, width)])
        self.turned = Conv1D(2 * width, width)
        self.shared = nn.Linear(width, width)
        self.again = self.shared
        self.mlp = LlamaMLP(LlamaConfig(hidden_size=width, intermediate_size=2 * width, mlp_bias=True))
        self.copied = copy.deepcopy(self.mlp)
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x)


def built(mapping: dict[str, type[nn.Module]], **more: Any) -> Any:
    with Patcher(module_mapping=mapping, **more).applied():
        return Parts(PartsConfig())


def kept(*parents: type[nn.Module]) -> Any:
    """A class that keeps the arguments that it was made with."""

    class Kept(*parents):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.__dict__["given"] = (args, kwargs)
            super().__init__(*args, **kwargs)

    return Kept


@pytest.mark.parametrize(
    ("path", "parent", "changed"),
    [
        ("plain", nn.Linear, {}),
        ("bare", nn.Linear, {"bias": False}),
        ("wide", nn.Linear, {"dtype": torch.float64}),
        ("table", nn.Embedding, {"padding_idx": 1}),
        ("norm", nn.LayerNorm, {"eps": 1e-3, "bias": False}),
        ("patches", nn.Conv2d, {"stride": (2, 2), "padding": (1, 1), "bias": False}),
        ("dropped", nn.Dropout, {"p": 0.25}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_torchs_own_get_the_arguments_that_their_attributes_tell(path: str, parent: Any, changed: Any) -> None:
    stock = Parts(PartsConfig()).get_submodule(path)
    cls = kept(parent)
    module = built({path: cls}).get_submodule(path)
    assert type(module) is cls
    assert repr(module).partition("(")[2] == repr(stock).partition("(")[2]
    for name, value in stock.state_dict().items():
        assert (value.shape, value.dtype) == (module.state_dict()[name].shape, module.state_dict()[name].dtype)
    assert changed.items() <= module.given[1].items()


def test_what_a_replacement_does_not_take_is_left_out_where_it_is_the_default() -> None:
    class Only(nn.Module):
        def __init__(self, in_features: int, out_features: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(out_features, in_features))

    assert built({"plain": Only}).plain.weight.shape == (64, 32)
    with pytest.raises(PatchConstructionError, match=r"Only\(32, 32, bias=False\)"):
        built({"bare": Only})


@pytest.mark.parametrize(("path", "expected"), [("mlp", "config"), ("turned", (64, 32))])
def test_those_of_transformers_get_what_modeling_code_gave_them(path: str, expected: Any) -> None:
    parent = type(Parts(PartsConfig()).get_submodule(path))
    args, kwargs = built({path: kept(parent)}).get_submodule(path).given
    assert args == expected or isinstance(args[0], LlamaConfig)
    assert not kwargs


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("heads", r"a MultiheadAttention of torch, whose constructor takes bias"),
        ("listed", r"a ModuleList of torch, whose constructor takes modules"),
        ("copied", r"the constructor arguments of the LlamaMLP there aren't known: it is a copy"),
    ],
)
def test_arguments_that_nobody_can_know_are_an_error(path: str, reason: str) -> None:
    with pytest.raises(PatchConstructionError, match=rf"names {path}, .*{reason}.*Give the class of"):
        Patcher(module_mapping={path: OwnMLP}).resolve(Parts, PartsConfig())
    with pytest.raises(PatchConstructionError, match=reason):
        built({path: OwnMLP})


def test_a_module_at_two_paths_needs_both() -> None:
    cls = kept(nn.Linear)
    with pytest.raises(UnmatchedPatchError, match=r"'shared' names shared, which is again as well: .* add 'again'"):
        built({"shared": cls})
    model = built({"shared": cls, "again": cls})
    assert type(model.shared) is cls
    assert model.again is model.shared
    with pytest.raises(UnmatchedPatchError, match=r"'shared' names shared, .*; add 'again' with the same class"):
        built({"shared": cls, "again": kept(nn.Linear)})


def test_two_patterns_of_one_module_are_a_conflict_unless_they_ask_for_the_same() -> None:
    first, other = kept(nn.Linear), kept(nn.Linear)
    with pytest.raises(
        PatchConflictError, match=r"'\*\*\.plain' and '\*\*\.\*\*\.plain' both match the module plain, .*add the exact"
    ):
        Patcher(module_mapping={"**.plain": first, "**.**.plain": other}).resolve(Parts, PartsConfig())
    assert type(built({"**.plain": first, "**.**.plain": first}).plain) is first
    assert type(built({"**.plain": first, "plain": other}).plain) is other


def test_a_key_means_nothing_inside_of_what_it_has_replaced() -> None:
    class Around(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.mlp = OwnMLP(config)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x)

    with Patcher(module_mapping={"**.mlp": Around}).applied():
        model = LlamaForCausalLM(tiny_llama_config())
    assert [type(layer.mlp).__name__ for layer in model.model.layers] == ["Around", "Around"]
    assert type(model.model.layers[0].mlp.mlp) is OwnMLP
    inner = Patcher(module_mapping={"model.layers.0.mlp": Around, "model.layers.0.mlp.mlp.up_proj": kept(nn.Linear)})
    with inner.applied():
        model = LlamaForCausalLM(tiny_llama_config())
    assert type(model.model.layers[0].mlp.mlp.up_proj).__name__ == "Kept"


def test_the_model_itself_is_named_by_its_class() -> None:
    with pytest.raises(InvalidPatcherError, match=r"'\(root\)' is the model itself; .*class_mapping"):
        Patcher(module_mapping={"(root)": OwnMLP})


def test_a_key_of_class_mapping_is_refused() -> None:
    with pytest.raises(InvalidPatcherError, match=r"module_mapping: like\('LlamaMLP'\) is a key of class_mapping"):
        Patcher(module_mapping={like("LlamaMLP"): OwnMLP})


def test_a_replacement_that_raises_leaves_stock_behind() -> None:
    class Raising(nn.Module):
        def __init__(self, config: Any) -> None:
            raise RuntimeError("not today")

    with pytest.raises(PatchConstructionError, match="not today"):
        built({"mlp": Raising})
    assert type(Parts(PartsConfig()).mlp) is LlamaMLP
    assert LlamaMLP.__init__.__qualname__ == "LlamaMLP.__init__"
    assert not hasattr(LlamaMLP.__init__, "__wrapped__")


class Referring(LlamaPreTrainedModel):
    """Beside its modules it has attributes, or hooks, that lead to some of them."""

    refer: Any = None

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        type(self).refer(self, self.model.layers[0].mlp)
        self.post_init()


class Holder:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


REFERENCES = {
    "in a list": lambda model, mlp: setattr(model, "kept", [mlp]),
    "by its method": lambda model, mlp: setattr(model, "kept", mlp.forward),
    "in a partial": lambda model, mlp: setattr(model, "kept", functools.partial(mlp)),
    "in a closure": lambda model, mlp: setattr(model, "kept", lambda x: mlp(x)),
    "in an object": lambda model, mlp: setattr(model, "kept", Holder(mlp)),
    "to a part of it": lambda model, mlp: setattr(model, "kept", {"up": mlp.up_proj}),
    "in a hook": lambda model, mlp: model.register_forward_hook(lambda module, args, output: mlp.up_proj.weight.sum()),
}


@pytest.mark.parametrize("reference", REFERENCES)
def test_what_else_refers_to_a_module_that_is_replaced_or_fused_is_an_error(
    reference: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """It went on using the module of before, with weights that nothing has read."""
    monkeypatch.setattr(Referring, "refer", REFERENCES[reference])
    Referring(tiny_llama_config()).save_pretrained(tmp_path)
    attribute = r"_forward_hooks" if reference == "in a hook" else "kept"
    by_path = Patcher(module_mapping={"model.layers.{0..1}.mlp": OwnMLP})
    said = rf"names model\.layers\.0\.mlp, and {attribute} refers to model\.layers\.0\.mlp.* Replace what is around"
    for loaded in (
        lambda: Referring.from_pretrained(tmp_path, patcher=by_path),
        lambda: Referring._from_config(tiny_llama_config(), patcher=by_path),
    ):
        with pytest.raises(PatchConstructionError, match=said):
            loaded()
    if reference == "to a part of it":
        for fused in (
            lambda: Referring.from_pretrained(tmp_path, patcher=Patcher(fusions="gate_up")),
            lambda: Referring._from_config(tiny_llama_config(), patcher=Patcher(fusions="gate_up")),
        ):
            with pytest.raises(
                PatchConstructionError, match=rf"{attribute} refers to model\.layers\.0\.mlp\.up_proj, wh"
            ):
                fused()
    by_class = Referring.from_pretrained(tmp_path, patcher=Patcher({"LlamaMLP": OwnMLP}))
    assert type(by_class.model.layers[0].mlp) is OwnMLP


@pytest.mark.parametrize("reference", [name for name in REFERENCES if name not in ("in a closure", "in a hook")])
def test_what_else_refers_to_a_module_in_memory_is_an_error(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Referring, "refer", lambda model, mlp: None)
    model = Referring(tiny_llama_config())
    REFERENCES[reference](model, model.model.layers[0].mlp)
    own = Patcher({"LlamaMLP": OwnMLP})
    with pytest.raises(
        InvalidPatcherError, match=r"kept refers to model\.layers\.0\.mlp.* apply the patcher, and change"
    ):
        own.apply(model)
    del model.kept
    patched = own.apply(model)
    REFERENCES[reference](patched, patched.model.layers[0].mlp)
    with pytest.raises(InvalidPatcherError, match=r"kept refers to model\.layers\.0\.mlp"):
        Patcher().apply(patched)
