"""One description, two ways: the models of a generated file, and stock models loaded with a Patcher."""

from __future__ import annotations

import inspect
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaRMSNorm

from patcher import CodegenError, Patcher, UnmatchedPatchError, report
from patcher.codegen import PatchConfig, generate
from tests.codegen import every_kind
from tests.codegen.unwritable import Halves, Unspeakable
from tests.support import fresh, replaced_elsewhere, shared, tiny
from tests.support.comparing import assert_equal_models, logits
from tests.support.replaced_elsewhere import AdaptedMLP, InheritingMLP, JoinedMLP, NegatedMLP, SummingMLP
from tests.support.sampling import sampled

LLAMA = "transformers.models.llama.modeling_llama"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stock checkpoints of tiny models."""
    configs = [tiny.tiny_llama_config(), tiny.tiny_mixtral_config(), tiny.tiny_qwen2_moe_config()]
    return {config.model_type: shared.checkpoint(config) for config in [*configs, tiny.tiny_bert_config()]}


def stock_class(model_type: str) -> type[PreTrainedModel]:
    names = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM"}
    cls: type[PreTrainedModel] = getattr(transformers, names.get(model_type, "BertForMaskedLM"))
    return cls


def config_of(folder: Path) -> PretrainedConfig:
    return transformers.AutoConfig.from_pretrained(folder)


# --- a config, as a Patcher ----------------------------------------------------------------------------------------


def llama_config(*patches: tuple[str, str, str]) -> PatchConfig:
    config = PatchConfig(LLAMA, "x.py")
    for method, target, text in patches:
        getattr(config, method)(target, text)
    return config


SHIFTED = "def rotate_half(x):\n    return x.roll(1, -1)\n"
SCALED = "def forward(self, x):\n    return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n"
ISINSTANCE = (
    "def _init_weights(self, module):\n"
    "    super()._init_weights(module)\n"
    "    self.seen = getattr(self, 'seen', 0) + isinstance(module, LlamaMLP)\n"
)
EXTRA = "def extra_repr(self):\n    return ''\n"
WRAPPED = "def wrapped(original_init, self, config):\n    original_init(self, config)\n    self.mark = 1\n"

#: patches, and the classes that a load has to take others for
AFFECTED = {
    "a method": ([("override_method", "LlamaMLP.forward", SCALED)], {"LlamaMLP"}),
    "a function": ([("replace_function", "rotate_half", SHIFTED)], {"LlamaAttention"}),
    "an init": ([("modify_init", "LlamaDecoderLayer", WRAPPED.replace("config)", "config, layer_idx)"))], {
        "LlamaDecoderLayer"
    }),
    "two": (
        [("override_method", "LlamaMLP.forward", SCALED), ("replace_function", "rotate_half", SHIFTED)],
        {"LlamaMLP", "LlamaAttention"},
    ),
    "a function, and the class that calls it": (
        [("override_method", "LlamaAttention.extra_repr", EXTRA), ("replace_function", "rotate_half", SHIFTED)],
        {"LlamaAttention"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AFFECTED)
def test_a_config_replaces_the_classes_whose_code_differs(case: str) -> None:
    patches, classes = AFFECTED[case]
    patcher = llama_config(*patches).to_patcher()
    assert {*patcher.class_mapping} == classes


def test_a_base_class_that_differs_takes_all_that_inherit_from_it() -> None:
    mapping = llama_config(("override_method", "LlamaPreTrainedModel._init_weights", ISINSTANCE)).to_patcher()
    assert {"LlamaPreTrainedModel", "LlamaModel", "LlamaForCausalLM"} <= set(mapping.class_mapping)
    assert "LlamaMLP" not in mapping.class_mapping


def test_code_that_asks_for_a_patched_class_differs_too() -> None:
    """`isinstance(module, LlamaMLP)` in the shipped file would not know the new class."""
    shipped = PatchConfig("transformers.models.mixtral.modeling_mixtral", "x.py")
    shipped.override_method("MixtralExperts.extra_repr", "def extra_repr(self):\n    return ''\n", new=True)
    mapping = shipped.to_patcher().class_mapping
    assert {"MixtralExperts", "MixtralPreTrainedModel", "MixtralForCausalLM"} <= set(mapping)
    assert "MixtralAttention" not in mapping


@pytest.mark.parametrize("case", [*AFFECTED, "every kind of patch"])
def test_a_config_and_its_file_compute_and_save_the_same(
    case: str, folders: dict[str, Path], imported: Any, tmp_path: Path
) -> None:
    config = every_kind.config if case == "every kind of patch" else llama_config(*AFFECTED[case][0])
    before = config.target_file
    try:
        module, folder = imported(config), folders["llama"]
    finally:
        config.target_file = before
    stock = LlamaForCausalLM.from_pretrained(folder)
    patched = LlamaForCausalLM.from_pretrained(folder, patcher=config.to_patcher())
    assert_equal_models([module.LlamaForCausalLM.from_pretrained(folder), patched], stock, tmp_path / "saved")
    changes = case not in ("an init", "every kind of patch")
    assert torch.allclose(logits(patched), logits(stock), atol=1e-5) != changes


def test_every_model_of_the_module_can_be_loaded(folders: dict[str, Path]) -> None:
    """No model has all classes of a file: `LlamaModel` has no head."""
    patcher = every_kind.config.to_patcher()
    assert "LlamaForSequenceClassification" in patcher.class_mapping
    for cls in (AutoModelForCausalLM, AutoModel):
        model = cls.from_pretrained(folders["llama"], patcher=patcher)
        assert len(report(model).replaced) == 2 + 2 + 5
    head = transformers.LlamaForSequenceClassification._from_config(tiny.tiny_llama_config(), patcher=patcher)
    assert head(**tiny.tiny_inputs(head.config)).shape == (2, 2)  # the patched forward


def test_a_model_of_another_module_raises(folders: dict[str, Path]) -> None:
    patcher = every_kind.config.to_patcher()
    with pytest.raises(UnmatchedPatchError, match=r"no class of the model matches any of 'LlamaAttention', "):
        AutoModel.from_pretrained(folders["bert"], patcher=patcher)


def test_conversions_of_transformers_reach_replaced_models(folders: dict[str, Path], tmp_path: Path) -> None:
    """The root is replaced here, and its experts are still merged as transformers does it."""
    config = PatchConfig("transformers.models.mixtral.modeling_mixtral", "x.py")
    config.override_method("MixtralExperts.extra_repr", "def extra_repr(self):\n    return 'mine'\n", new=True)
    stock = AutoModelForCausalLM.from_pretrained(folders["mixtral"])
    model = AutoModelForCausalLM.from_pretrained(folders["mixtral"], patcher=config.to_patcher())
    assert "mine" in repr(model)
    assert torch.equal(logits(model), logits(stock))
    assert_equal_models([model], stock, tmp_path)


def test_a_config_combines_with_other_patchers(folders: dict[str, Path]) -> None:
    class Mine(LlamaRMSNorm):
        pass

    patcher = llama_config(*AFFECTED["a method"][0]).to_patcher() | Patcher({"LlamaRMSNorm": Mine}, fusions=["qkv"])
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], patcher=patcher)
    assert type(model.model.norm) is Mine
    assert "qkv_proj" in dict(model.model.layers[0].self_attn.named_children())
    assert type(model.model.layers[0].mlp) is not LlamaMLP


def test_the_same_config_is_the_same_patcher_and_can_be_pickled() -> None:
    first, again = (llama_config(*AFFECTED["two"][0]).to_patcher() for _ in range(2))
    assert first == again
    assert pickle.loads(pickle.dumps(first)) == first


ALONE = """
config = PatchConfig("transformers.models.llama.modeling_llama", "x.py")
config.override_method("LlamaMLP.forward", "def forward(self, x):\\n    return x\\n")
print(type(LlamaForCausalLM.from_pretrained({!r}, patcher=config.to_patcher()).model.layers[0].mlp))
"""
IMPORTS = ("from patcher.codegen import PatchConfig\n", "from transformers import LlamaForCausalLM\n")


@pytest.mark.process
@pytest.mark.parametrize(
    "imports",
    [IMPORTS, pytest.param(IMPORTS[::-1], marks=pytest.mark.nightly)],
    ids=["before transformers", "after it"],
)
def test_a_process_that_has_only_the_config_can_load_with_its_patcher(
    imports: tuple[str, str], folders: dict[str, Path]
) -> None:
    """There `from_pretrained` is looked up before `to_patcher()` is called."""
    code = "".join(imports) + ALONE.format(str(folders["llama"]))
    assert "modeling_llama_by_to_patcher_" in fresh.run(code).stdout


@pytest.mark.process
def test_another_process_reads_what_to_do_before_unpickling(tmp_path: Path) -> None:
    path = tmp_path / "patcher.pickle"
    path.write_bytes(pickle.dumps(llama_config(*AFFECTED["two"][0]).to_patcher()))
    code = f"import pickle; pickle.load(open({str(path)!r}, 'rb'))"
    done = fresh.run(code, check=False)
    assert "No module named 'transformers.models.llama.modeling_llama_by_to_patcher_" in done.stderr


def test_source_and_tracebacks_show_the_patched_code(folders: dict[str, Path]) -> None:
    raising = "def forward(self, x):\n    raise ZeroDivisionError  # here\n"
    patcher = llama_config(("override_method", "LlamaMLP.forward", raising)).to_patcher()
    assert "raise ZeroDivisionError  # here" in inspect.getsource(patcher.class_mapping["LlamaMLP"])
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], patcher=patcher)
    with pytest.raises(ZeroDivisionError) as caught:
        logits(model)
    assert "raise ZeroDivisionError  # here" in "".join(traceback.format_exception(caught.value))


def test_the_attention_can_still_be_chosen(folders: dict[str, Path]) -> None:
    """transformers looks into the source of the model's module for that."""
    patcher = llama_config(("override_method", "LlamaPreTrainedModel._init_weights", ISINSTANCE)).to_patcher()
    model = LlamaForCausalLM.from_pretrained(folders["llama"], patcher=patcher)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_a_config_that_changes_no_class_raises() -> None:
    config = PatchConfig(LLAMA, "x.py")
    config.add_import("json")
    with pytest.raises(CodegenError, match=r"to_patcher\(\) would change nothing"):
        config.to_patcher()


def test_a_file_that_can_not_be_imported_raises() -> None:
    config = llama_config(*AFFECTED["a method"][0])
    config.add_import("no_such_module_anywhere")
    with pytest.raises(CodegenError, match="can't be imported: ModuleNotFoundError: No module named 'no_such_module"):
        config.to_patcher()


# --- a Patcher, as a config ----------------------------------------------------------------------------------------


GATE_UP = WeightConverter(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight", operations=[Concatenate(0)])
NEGATED = WeightConverter(
    "mlp.down_proj.weight", "mlp.negated.weight", operations=[replaced_elsewhere.Negate(times=3)]
)

PATCHERS: dict[str, tuple[str, Patcher]] = {
    "a class that inherits": ("llama", Patcher({"LlamaMLP": InheritingMLP})),
    "a helper named like a builtin": ("llama", Patcher({"LlamaMLP": SummingMLP})),
    "a class of torch": ("llama", Patcher({"LlamaRMSNorm": nn.RMSNorm})),
    "one of several classes": (
        "llama",
        Patcher({"LlamaMLP": InheritingMLP, "X": InheritingMLP}, alternatives=[["X", "LlamaMLP"]]),
    ),
    "an expression": ("llama", Patcher({"^Llama.*MLP$": InheritingMLP})),
    "a conversion": ("llama", Patcher({"LlamaMLP": JoinedMLP}, extra_weight_conversions=GATE_UP)),
    "an operation of one's own": ("llama", Patcher({"LlamaMLP": NegatedMLP}, extra_weight_conversions=NEGATED)),
    "qkv": ("llama", Patcher(fusions="qkv")),
    "qkv and gate_up": ("llama", Patcher(fusions=["qkv", "gate_up"])),
    "a class and a fusion": ("llama", Patcher({"LlamaMLP": InheritingMLP}, fusions=["qkv"])),
    "qkv of BERT, with biases": ("bert", Patcher(fusions="qkv")),
    "qkv of Qwen2-MoE, whose experts transformers merges": ("qwen2_moe", Patcher(fusions="qkv")),
    "experts of Mixtral as layers": ("mixtral", Patcher(fusions="sequential_experts")),
    "experts of Qwen2-MoE as layers, and qkv": ("qwen2_moe", Patcher(fusions=["sequential_experts", "qkv"])),
}


IN_CI = {
    "a class that inherits",
    "a helper named like a builtin",
    "an expression",
    "a conversion",
    "an operation of one's own",
}
IN_CI |= {"a class and a fusion", "experts of Qwen2-MoE as layers, and qkv"}


@pytest.mark.parametrize("case", sampled(PATCHERS, IN_CI))
def test_a_patcher_its_file_and_the_patcher_of_its_file_compute_and_save_the_same(
    case: str, folders: dict[str, Path], imported: Any, tmp_path: Path
) -> None:
    model_type, patcher = PATCHERS[case]
    folder, cls = folders[model_type], stock_class(model_type)
    config = PatchConfig.from_patcher(patcher, cls, config=config_of(folder))
    generated = getattr(imported(config), cls.__name__)
    models = [
        cls.from_pretrained(folder, patcher=patcher),
        generated.from_pretrained(folder),
        cls.from_pretrained(folder, patcher=config.to_patcher()),
    ]
    assert type(models[1]) is generated
    names = {name for name, _ in models[0].named_parameters()}
    assert all({name for name, _ in model.named_parameters()} == names for model in models)
    assert_equal_models(models, cls.from_pretrained(folder), tmp_path / "saved")


@pytest.mark.parametrize("made", ["_from_config", "__call__"])
def test_a_model_of_the_file_that_no_checkpoint_made_saves_the_original_layout(
    made: str, folders: dict[str, Path], imported: Any, tmp_path: Path
) -> None:
    folder = folders["llama"]
    module = imported(PatchConfig.from_patcher(Patcher(fusions=["qkv", "gate_up"]), LlamaForCausalLM))
    loaded = module.LlamaForCausalLM.from_pretrained(folder)
    build = module.LlamaForCausalLM._from_config if made == "_from_config" else module.LlamaForCausalLM
    model = build(tiny.tiny_llama_config())
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(LlamaForCausalLM.from_pretrained(folder)))


def test_a_class_that_inherits_from_one_of_the_file_reads_and_writes_the_original_too(
    folders: dict[str, Path], imported: Any, tmp_path: Path
) -> None:
    module = imported(PatchConfig.from_patcher(Patcher(fusions=["qkv"]), LlamaForCausalLM))

    class Mine(module.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        pass

    model = Mine.from_pretrained(folders["llama"])
    assert type(model) is Mine
    assert_equal_models([model], LlamaForCausalLM.from_pretrained(folders["llama"]), tmp_path / "saved")


def test_the_fused_class_stands_as_code() -> None:
    text = generate(PatchConfig.from_patcher(Patcher(fusions="qkv"), LlamaForCausalLM))
    fused = text[text.index("class FusedLlamaAttention(LlamaAttention):") :].split("\n\n\n")[0]
    assert (
        "self.qkv_proj = nn.Linear(config.hidden_size, sum(self.qkv_proj_sizes), bias=config.attention_bias)" in fused
    )
    assert "self.qkv_proj(hidden_states).split(self.qkv_proj_sizes, dim=-1)" in fused
    assert "q_proj = " not in fused.replace("qkv_proj = ", "")
    assert "self.self_attn = FusedLlamaAttention(config=config, layer_idx=layer_idx)" in text


def test_a_replacement_of_a_notebook_is_copied(imported: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """Its class has no file, its methods have one."""
    import linecache

    cell = (
        "class CellMLP(Shipped):\n"
        "    # of a cell\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) * FACTOR\n"
    )
    name = str(tmp_path / "ipykernel_1" / "123.py")
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"Shipped": LlamaMLP, "FACTOR": 3.0, "__name__": "__main__"}
    exec(compile(cell, name, "exec"), namespace)
    patcher = Patcher({"LlamaMLP": namespace["CellMLP"]})
    config = PatchConfig.from_patcher(patcher, LlamaForCausalLM)
    assert "    # of a cell\n" in generate(config)
    assert "\nFACTOR = 3.0\n" in generate(config)
    model = imported(config).LlamaForCausalLM.from_pretrained(folders["llama"])
    expected = LlamaForCausalLM.from_pretrained(folders["llama"], patcher=patcher)
    assert torch.equal(logits(model), logits(expected))


def test_a_hand_written_config_of_a_model_with_experts_gets_the_conversions(
    imported: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = PatchConfig("transformers.models.mixtral.modeling_mixtral", "x.py")
    config.override_method("MixtralExperts.extra_repr", "def extra_repr(self):\n    return 'mine'\n", new=True)
    model = imported(config).MixtralForCausalLM.from_pretrained(folders["mixtral"])
    assert_equal_models([model], AutoModelForCausalLM.from_pretrained(folders["mixtral"]), tmp_path / "saved")


def test_an_operation_of_a_notebook_stands_in_front_of_the_constant_that_uses_it(
    imported: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import linecache

    cell = "import copy\n\n" + inspect.getsource(replaced_elsewhere.Negate)
    name = str(tmp_path / "ipykernel_1" / "456.py")
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "__main__", **vars(transformers.core_model_loading)}
    namespace["__name__"] = "__main__"
    exec(compile(cell, name, "exec"), namespace)
    conversion = WeightConverter("mlp.down_proj.weight", "mlp.negated.weight", operations=[namespace["Negate"]()])
    patcher = Patcher({"LlamaMLP": NegatedMLP}, extra_weight_conversions=conversion)
    module = imported(PatchConfig.from_patcher(patcher, LlamaForCausalLM))
    assert module.Negate.__module__ == module.__name__
    model = module.LlamaForCausalLM.from_pretrained(folders["llama"])
    stock = LlamaForCausalLM.from_pretrained(folders["llama"])
    assert torch.equal(logits(model), logits(stock))
    assert_equal_models([model], stock, tmp_path / "saved")


class Never(Halves):
    target_modules_patterns = ("no such path",)


def user_of_an_object() -> type[nn.Module]:
    unnamed = object()

    class Uses(LlamaMLP):
        def forward(self, x: Any) -> Any:
            return unnamed

    return Uses


def clashing() -> type[nn.Module]:
    def repeat_kv(x: Any) -> Any:
        return x

    class Clashes(LlamaMLP):
        def forward(self, x: Any) -> Any:
            return repeat_kv(x)

    return Clashes


class BuildingLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp = LlamaMLP(config)


def scaled(cls: type[nn.Module], factor: float) -> type[nn.Module]:
    class Scaled(cls):  # type: ignore[misc,valid-type]
        def forward(self, x: Any) -> Any:
            return super().forward(x) * factor

    return Scaled


ERRORS: dict[str, tuple[Patcher, str]] = {
    "a key of another module": (
        Patcher({"LlamaMPL": InheritingMLP}),
        "no class of transformers.models.llama.modeling_llama matches the class key 'LlamaMPL'. Nearest: LlamaMLP",
    ),
    "a Patcher that a config made": (
        llama_config(*AFFECTED["two"][0]).to_patcher(),
        r"the replacement of Llama\w+ was made by to_patcher\(\) of a config",
    ),
    "nothing": (Patcher(), r"Patcher\(\) changes no class"),
    "a fusion with nothing to do": (Patcher(fusions=Never()), r"the fusions \[Never\(\)\] find nothing to fuse"),
    "a family of one's own": (
        Patcher(fusions=Halves()),
        r"Halves\(\) makes a Halved of model\.layers\.0\.mlp, and a file has the layers of qkv, .* the patcher itself",
    ),
    "a conversion without text": (
        Patcher({"LlamaMLP": JoinedMLP}, (), WeightConverter(["a", "b"], "c", operations=[Unspeakable()])),
        "a, b -> c .* can't be written into the file: Unspeakable doesn't keep its argument 'secret'",
    ),
    "weights that a constructor makes": (
        Patcher({"LlamaMLP": AdaptedMLP}, new_weights=r"mlp\.adapter$"),
        r"can't write new_weights=\['mlp\\\\.adapter\$'\] into a file: there models are built without values",
    ),
    "a conversion with groups": (
        Patcher({"LlamaMLP": JoinedMLP}, (), WeightConverter(["(a|b)c", "d"], "e", operations=[Concatenate(0)])),
        "has a group in its patterns, which transformers can't write back. Write names without groups",
    ),
    "a value without text": (
        Patcher({"LlamaMLP": user_of_an_object()}),
        "uses 'unnamed', <object object .*>, which can't be written as text",
    ),
    "a name of the module with another meaning": (Patcher({"LlamaMLP": clashing()}), "has another 'repeat_kv'"),
    "a class that is replaced as well": (
        Patcher({"LlamaDecoderLayer": BuildingLayer, "LlamaMLP": InheritingMLP}),
        "BuildingLayer, uses LlamaMLP, which the patcher replaces: this code has the class of transformers.*at a load",
    ),
    "one name for two values": (
        Patcher({"LlamaMLP": scaled(LlamaMLP, 2.0), "LlamaRMSNorm": scaled(LlamaRMSNorm, 3.0)}),
        "uses 'factor', and another replacement uses another 'factor'. Give the one in .* a name of its own",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_a_file_can_not_say_raises(case: str) -> None:
    patcher, message = ERRORS[case]
    with pytest.raises(CodegenError, match=message):
        PatchConfig.from_patcher(patcher, LlamaForCausalLM, config=tiny.tiny_llama_config())


def test_a_renaming_is_written() -> None:
    dropped, renaming = "old.*buffer", WeightRenaming("old_proj", "gate_proj")
    patcher = Patcher({"LlamaMLP": InheritingMLP}, extra_weight_conversions=renaming, dropped_weights=dropped)
    text = generate(PatchConfig.from_patcher(patcher, LlamaForCausalLM))
    assert '        WeightRenaming("old_proj", "gate_proj"),\n' in text
    assert f"LlamaPreTrainedModel._keys_to_ignore_on_load_unexpected = ['{dropped}']\n" in text


def test_conversions_that_are_filtered_are_not_registered() -> None:
    patcher = Patcher({"MixtralRMSNorm": nn.RMSNorm}, filtered_weight_conversion_patterns="block_sparse_moe")
    text = generate(PatchConfig.from_patcher(patcher, transformers.MixtralForCausalLM))
    registered = text[text.index("\nregister_checkpoint_conversion_mapping(") :]
    assert "block_sparse_moe" not in registered
    assert "MergeModulelist(), Concatenate(dim=1)" in registered
