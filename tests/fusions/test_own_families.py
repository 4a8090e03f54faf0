"""Families of one's own on the engine that the shipped ones stand on: found, read, saved, pickled, checked."""

from __future__ import annotations

import ast
import copy
import itertools
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import patcher.fusions
from patcher import (
    InvalidPatcherError,
    PatchConflictError,
    PatchConstructionError,
    PatchedWeightsError,
    Patcher,
    report,
)
from patcher.compat.models import is_initialized, mark_initialized
from patcher.fusions import (
    QKV,
    Fusion,
    GateUp,
    Layout,
    PatchEmbeddings,
    Projections,
    Rows,
    SequentialExperts,
    Siblings,
)
from patcher.fusions.methods import NotUnderstoodError
from patcher.layouts.carried import fused_modules, separated
from patcher.patterns import compress
from tests.support import shared
from tests.support.comparing import logits
from tests.support.surgery import fuse
from tests.support.tiny import build_tiny, tiny_inputs, tiny_llama_config, tiny_mixtral_config, tiny_qwen2_vl_config

FAMILIES = ("qkv", "kv", "gate_up", "patch_embeddings", "sequential_experts", "siblings", "split")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_shipped_families_are_made_of_public_names(name: str) -> None:
    """Besides errors, and the layers, forwards and layouts of a family itself."""
    own = {"sequential_experts": "experts.", "patch_embeddings": "linear_patch_embedding"}
    source = (Path(patcher.fusions.__file__).parent / f"{name}.py").read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if (node.module or "").startswith("patcher")]

    assert ours
    for node in ours:
        if node.module == "patcher.fusions":
            assert {alias.name for alias in node.names} <= set(patcher.fusions.__all__)
        else:
            is_own = name in own and str(node.module).startswith(f"patcher.fusions.{own[name]}")
            assert is_own or node.module == "patcher.errors"


class Turned(nn.Module):
    """A linear layer without bias whose weight lies the other way round."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.empty(in_features, out_features))

    @classmethod
    def from_module(cls, linear: nn.Linear) -> Turned:
        return cls(linear.in_features, linear.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.columns


class Transposed(Layout):
    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.T.contiguous() for tensor in tensors]

    separate = fuse


class TurnedDown(Fusion):
    target_modules_patterns = (r"\.down_proj$",)

    def is_fusable(self, module: nn.Module) -> bool:
        return type(module) is nn.Linear and module.bias is None

    def layouts(self, module: nn.Module) -> Iterable[Layout]:
        return [Transposed("weight", "columns")]

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return Turned


class Local(Fusion):
    """Its class is made in a function, and built from the arguments of the constructor."""

    target_modules_patterns = (r"\.mlp$",)

    def is_fusable(self, module: nn.Module) -> bool:
        return True

    def make_fused_class(self, original_cls: Any) -> type[nn.Module]:
        class Doubled(original_cls):  # type: ignore[misc]
            def forward(self, x: torch.Tensor) -> Any:
                return super().forward(x) * 2

        return Doubled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


def load(folder: Path, *fusions: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, patcher=Patcher(fusions=fusions) if fusions else None)


@pytest.mark.parametrize("beside", [(), ("gate_up",), ("qkv", "gate_up")])
def test_one_inside_of_another_is_given_back(beside: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    model, inputs = load(folder, TurnedDown(), *beside), tiny_inputs(tiny_llama_config())

    torch.testing.assert_close(logits(model, inputs), logits(load(folder), inputs), atol=1e-4, rtol=1e-4)
    for number, each in enumerate((model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        each.save_pretrained(tmp_path / str(number))
        files = [path / "model.safetensors" for path in (folder, tmp_path / str(number))]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert list(separated(fused_modules(each), each.state_dict())[0]) == list(load(folder).state_dict())


class TurnedProjections(TurnedDown):
    target_modules_patterns = (r"_proj$",)


@pytest.mark.parametrize("fusions", [(TurnedProjections(), "qkv"), ("qkv", TurnedProjections())], ids=str)
def test_a_layer_that_another_fusion_joins_is_a_conflict(fusions: tuple[Any, ...], folder: Path) -> None:
    with pytest.raises(PatchConflictError, match=r"both claim model\.layers\.0\.self_attn\.q_proj\.weight; use one"):
        load(folder, *fusions)
    model = load(folder, TurnedProjections("**.{0..1}.mlp.**"), "qkv")
    torch.testing.assert_close(logits(model), logits(load(folder)), atol=1e-4, rtol=1e-4)


def test_what_a_fusion_has_made_may_be_fused_again() -> None:
    mlp = LlamaMLP(tiny_llama_config())
    stock = {key: value.clone() for key, value in mlp.state_dict().items()}
    fuse(mlp, Rows(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight"))
    mlp.gate_up_proj = fuse(mlp.gate_up_proj, Transposed("weight", "columns"), into=Turned)
    assert set(mlp.state_dict()) == {"gate_up_proj.columns", "down_proj.weight"}

    given_back, _ = separated(fused_modules(mlp), mlp.state_dict())
    assert list(given_back) == list(stock)
    assert all(torch.equal(given_back[key], stock[key]) for key in stock)


def test_a_module_is_put_in_place_in_the_mode_that_it_has() -> None:
    for training in (True, False):
        linear = nn.Linear(3, 2, bias=False).train(training)
        assert fuse(linear, Transposed("weight", "columns"), into=Turned).training == training


@pytest.mark.parametrize("marked", [("gate_proj",), ("gate_proj", "up_proj")])
def test_a_weight_passes_for_initialized_where_all_its_parts_are(marked: tuple[str, ...]) -> None:
    mlp = LlamaMLP(tiny_llama_config())
    for name in marked:
        mark_initialized(mlp.get_submodule(name).weight)
    fuse(mlp, Rows(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight"))
    assert is_initialized(mlp.gate_up_proj.weight) == (len(marked) == 2)


def test_a_layout_that_leaves_a_part_of_a_layer_behind_is_an_error() -> None:
    mlp = LlamaMLP(tiny_llama_config(mlp_bias=True))
    with pytest.raises(
        PatchConstructionError, match=r"take parameters of up_proj and leave bias\. Say what these become"
    ):
        fuse(mlp, Rows("up_proj.weight", "other.weight"))

    fuse(mlp, Rows("up_proj.weight", "other.weight"), Rows("up_proj.bias", "other.bias"))
    assert {"other.weight", "other.bias"} < set(mlp.state_dict())


@pytest.mark.parametrize("fusion", [TurnedDown(), Local()])
def test_two_loads_get_one_class_and_it_pickles(fusion: Fusion, folder: Path) -> None:
    models = [load(folder, fusion), load(folder, type(fusion)())]
    classes = [{type(model.get_submodule(path)) for path, *_ in report(model).fused} for model in models]
    assert classes[0] == classes[1]
    assert len(classes[0]) == 1

    inputs = tiny_inputs(tiny_llama_config())
    again = pickle.loads(pickle.dumps(models[0]))
    assert torch.equal(logits(again, inputs), logits(models[0], inputs))
    assert {type(again.get_submodule(path)) for path, *_ in report(again).fused} == classes[0]


def test_a_model_of_a_config_starts_with_the_weights_of_stock() -> None:
    torch.manual_seed(0)
    stock = LlamaForCausalLM(tiny_llama_config())
    torch.manual_seed(0)
    with Patcher(fusions=[TurnedDown(), "qkv", "gate_up"]).applied():
        fused = LlamaForCausalLM(tiny_llama_config())
    inputs = tiny_inputs(tiny_llama_config())
    torch.testing.assert_close(logits(fused.eval(), inputs), logits(stock.eval(), inputs), atol=1e-4, rtol=1e-4)


# --- what does not fit -----------------------------------------------------------------------------------------------


class TooMany(Turned):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(1))


class Forgotten(TurnedDown):
    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return TooMany


class Nowhere(TurnedDown):
    def layouts(self, module: nn.Module) -> Iterable[Layout]:
        return [Transposed("kernel", "columns")]


class Twisted(Transposed):
    """Takes the columns in the opposite order, and leaves them so."""

    def fuse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.T.flip(0).contiguous() for tensor in tensors]


def test_a_layout_that_does_not_restore_values_is_not_saved(folder: Path, tmp_path: Path) -> None:
    family = type("Mine", (TurnedDown,), {"layouts": lambda *_: [Twisted("weight", "columns")]})
    with pytest.raises(PatchedWeightsError, match=r"\[Twisted\] doesn't restore the values that it converts"):
        load(folder, family()).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_parameter_that_no_layout_gives_is_an_error(folder: Path) -> None:
    message = r"TooMany\.from_module\(\) gives a module with the parameters .*'scale'.* Say what each parameter"
    with pytest.raises(PatchConstructionError, match=message):
        load(folder, Forgotten())


def test_a_layout_of_a_parameter_that_is_not_there_is_an_error(folder: Path) -> None:
    with pytest.raises(Exception, match=r"takes kernel, and Linear has no such parameter; it has weight\."):
        load(folder, Nowhere())


class Fickle(LlamaForCausalLM):
    """Its first layer is built otherwise the second time."""

    seldom: ClassVar[Iterator[type[nn.Module]]]

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.model.layers[0].mlp = next(self.seldom)(config)
        self.post_init()


class OtherMLP(LlamaMLP):
    pass


@pytest.fixture
def fickle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets which classes are built first; after them it is always the other one."""
    return lambda *kinds: monkeypatch.setattr(
        Fickle, "seldom", itertools.chain(kinds, itertools.repeat(OtherMLP)), raising=False
    )


@pytest.mark.parametrize("fusion", [GateUp(), Local()])
@pytest.mark.parametrize("made", ["from_config", "from_pretrained"])
def test_a_model_is_built_once_and_what_stands_is_fused(
    fusion: Fusion, made: str, folder: Path, fickle: Callable[..., None]
) -> None:
    fickle(LlamaMLP)  # whatever is built after that is another one
    patcher = Patcher(fusions=[fusion])
    if made == "from_config":
        model = Fickle._from_config(AutoConfig.from_pretrained(folder), patcher=patcher)
    else:
        model = Fickle.from_pretrained(folder, patcher=patcher)
        if fusion == GateUp():
            torch.testing.assert_close(logits(model), logits(LlamaForCausalLM.from_pretrained(folder)))
    assert [was for _, was, _ in report(model).fused] == ["LlamaMLP", "LlamaMLP"]


class Copying(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.model.layers[0].mlp = copy.deepcopy(self.model.layers[1].mlp)
        self.post_init()


@pytest.mark.parametrize("made", ["from_config", "from_pretrained"])
def test_a_copy_can_not_be_built_again(made: str, folder: Path) -> None:
    def make(fusion: Fusion) -> Any:
        patcher = Patcher(fusions=[fusion])
        if made == "from_pretrained":
            return Copying.from_pretrained(folder, patcher=patcher)
        return Copying._from_config(AutoConfig.from_pretrained(folder), patcher=patcher)

    message = r"Local\(\) takes model\.layers\.0\.mlp, .* aren't known: it is a copy .* Leave it out of the fusion"
    with pytest.raises(PatchConstructionError, match=message):
        make(Local())
    model = make(Local(modules="model.layers.1.mlp"))
    assert [path for path, *_ in report(model).fused] == ["model.layers.1.mlp"]


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class DownTwice(TurnedDown):
    def layouts(self, module: nn.Module) -> Iterable[Layout]:
        return ()

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return Twice


@pytest.mark.parametrize("made", ["from_config", "from_pretrained"])
def test_a_module_of_torch_is_built_again_by_its_attributes(made: str, folder: Path) -> None:
    patcher = Patcher(fusions=[DownTwice()])
    if made == "from_pretrained":
        model = AutoModelForCausalLM.from_pretrained(folder, patcher=patcher)
        stock = load(folder).state_dict()
        assert all(torch.equal(value, stock[name]) for name, value in model.state_dict().items())
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), patcher=patcher)
    assert {type(layer.mlp.down_proj) for layer in model.model.layers} == {Twice}
    assert {was for _, was, _ in report(model).fused} == {"Linear"}


# --- a shipped family whose subclass says more ----------------------------------------------------------------------

SHIPPED = [
    (QKV, tiny_llama_config, "model.layers.{0..1}.self_attn"),
    (GateUp, tiny_llama_config, "model.layers.{0..1}.mlp"),
    (Siblings, tiny_llama_config, "model.layers.{0..1}.self_attn"),
    (SequentialExperts, tiny_mixtral_config, "model.layers.{0..1}.mlp.experts"),
    (PatchEmbeddings, tiny_qwen2_vl_config, "model.visual.patch_embed.proj"),
]


@pytest.mark.parametrize(("family", "config", "path"), SHIPPED, ids=[family.__name__ for family, *_ in SHIPPED])
def test_a_subclass_of_a_shipped_family_fuses_what_its_patterns_and_is_fusable_accept(
    family: Any, config: Callable[[], Any], path: str
) -> None:
    class Elsewhere(family):  # type: ignore[misc]
        target_modules_patterns = (r"layers\.1\.",)

    class Never(family):  # type: ignore[misc]
        def is_fusable(self, module: nn.Module) -> bool:
            return super().is_fusable(module) and False

    cls = type(build_tiny(config()))
    whole, never, elsewhere = (Patcher(fusions=each()).resolve(cls, config()) for each in (family, Never, Elsewhere))
    assert path in compress(whole.fused)
    assert (never.fused, set(never.refused.values())) == ({}, {"is_fusable() is False"})
    assert never.refused.keys() == whole.fused.keys()
    assert set(elsewhere.fused) == {key for key in whole.fused if "layers.1." in key}


def test_one_pattern_is_written_without_a_tuple() -> None:
    class Second(QKV):
        target_modules_patterns = r"layers\.1\."

    resolution = Patcher(fusions=Second()).resolve(LlamaForCausalLM, tiny_llama_config())
    assert list(resolution.fused) == ["model.layers.1.self_attn"]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("layers.(1",), "'layers.(1' isn't a regular expression: missing ), unterminated subpattern"),
        ((3,), "3 (int) isn't an expression; write a string."),
        (None, "takes an expression or a list of them, found None"),
        ("", "the empty expression is found everywhere"),
    ],
)
def test_invalid_patterns_are_refused_by_the_patcher(patterns: Any, message: str) -> None:
    family = type("Mine", (QKV,), {"target_modules_patterns": patterns})
    with pytest.raises(InvalidPatcherError, match=rf"Mine\.target_modules_patterns.*{re.escape(message)}"):
        Patcher(fusions=family())


@pytest.mark.parametrize(
    ("name", "instead"), [("layouts", "decide"), ("recipe", "decide"), ("make_fused_class", "make_class")]
)
@pytest.mark.parametrize("family", [Projections, QKV, GateUp])
def test_what_a_joining_family_would_never_call_is_refused(family: type[Projections], name: str, instead: str) -> None:
    message = rf"Mine\.{name}\(\) would never be called: .* Override {instead}\(\) instead\."
    with pytest.raises(InvalidPatcherError, match=message):
        type("Mine", (family,), {name: lambda self, *arguments: ()})


WRONG: list[tuple[str, Any, str]] = [
    ("make_fused_class", lambda self, cls: None, r"Mine\(\)\.make_fused_class\(LlamaMLP\) must return a subclass of "),
    ("make_fused_class", lambda self, cls: int, r"must return a subclass of nn\.Module, found <class 'int'>"),
    ("make_transforms", lambda self, *arguments: ["x"], "must return weight transforms, found 'x'"),
    (
        "make_transforms",
        lambda self, *arguments: None,
        r"The fusion Mine\(\) can't be applied .*: TypeError: 'NoneType'",
    ),
    (
        "layouts",
        lambda self, module: ["x"],
        "can't be applied to LlamaForCausalLM: AttributeError: 'str' object has no",
    ),
    ("is_fusable", lambda self, module: module.none, "AttributeError: 'LlamaMLP' object has no attribute 'none'"),
]


@pytest.mark.parametrize(("name", "method", "message"), WRONG, ids=[f"{name}-{said}" for name, _, said in WRONG])
def test_what_a_family_does_wrong_is_an_error_of_ours_that_names_it(
    name: str, method: Any, message: str, folder: Path
) -> None:
    """`pipeline` would try other classes after a built-in error."""
    family = type("Mine", (Local,), {name: method})
    for call in (lambda: load(folder, family()), lambda: Patcher(fusions=family()).apply(load(folder))):
        with pytest.raises((InvalidPatcherError, PatchConstructionError), match=message):
            call()


def test_a_refusal_without_a_reason_is_a_refusal() -> None:
    family = type("Mine", (Local,), {"is_fusable": lambda *_: False, "refusal": lambda *_: None})
    resolution = Patcher(fusions=family()).resolve(LlamaForCausalLM, tiny_llama_config())
    assert (resolution.fused, set(resolution.refused.values())) == ({}, {"is_fusable() is False"})


def test_a_class_alone_is_fused_where_its_code_says_enough() -> None:
    model = Patcher(fusions="qkv").apply(build_tiny(tiny_llama_config()))
    before = logits(model, tiny_inputs(model.config))
    for layer in model.model.layers:
        layer.self_attn.__class__ = QKV().make_fused_class(LlamaAttention)
    assert torch.equal(logits(model, tiny_inputs(model.config)), before)
    with pytest.raises(NotUnderstoodError, match=r"between the projections: .* \(act_fn isn't known\)"):
        GateUp().make_fused_class(LlamaMLP)
    with pytest.raises(InvalidPatcherError, match="qkv finds no projections in LlamaMLP"):
        QKV().make_fused_class(LlamaMLP)
