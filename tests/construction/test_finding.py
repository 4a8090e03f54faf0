"""A class is replaced wherever modeling code finds it: sub-models, tables, aliases, remote code, late imports."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    LlamaForCausalLM,
    MobileBertConfig,
)
from transformers.models.jamba import modeling_jamba
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import PatchConstructionError, Patcher, UnmatchedPatchError
from tests.support import fresh, shared
from tests.support.replacements import OWN, OwnMLP, classes, same_output
from tests.support.tiny import (
    remote_code_model,
    save_tiny,
    tiny_jamba_config,
    tiny_llama_config,
    tiny_llava_config,
)


class OwnLayerNorm(nn.LayerNorm):
    pass


class OwnReLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


# --- sub-models and tables -----------------------------------------------------------------------------------------


def test_the_text_tower_of_a_vision_language_model_is_patched(tmp_path: Path) -> None:
    folder = save_tiny(tiny_llava_config(), tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(folder, patcher=OWN)
    assert classes(model)["OwnMLP"] == classes(model)["CLIPMLP"] == 2
    assert same_output(model, AutoModelForImageTextToText.from_pretrained(folder))
    assert classes(AutoModelForImageTextToText.from_config(tiny_llava_config(), patcher=OWN))["OwnMLP"] == 2


def test_one_expression_patches_both_towers(tmp_path: Path) -> None:
    class Halved(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.size = config.hidden_size

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    patcher = Patcher({"^(CLIP|Llama)MLP$": Halved}, dropped_weights=r"\.mlp\.")
    model = AutoModelForImageTextToText.from_pretrained(save_tiny(tiny_llava_config(), tmp_path), patcher=patcher)
    assert sorted(module.size for module in model.modules() if isinstance(module, Halved)) == [32, 32, 64, 64]


def test_a_class_that_is_reached_through_a_table_is_patched(tmp_path: Path) -> None:
    class OwnMambaLayer(modeling_jamba.JambaMambaDecoderLayer):
        pass

    folder = save_tiny(tiny_jamba_config(), tmp_path)
    before = dict(modeling_jamba.ALL_DECODER_LAYER_TYPES)
    model = AutoModelForCausalLM.from_pretrained(folder, patcher=Patcher({"JambaMambaDecoderLayer": OwnMambaLayer}))
    names = [type(layer).__name__ for layer in model.model.layers]
    assert names == ["OwnMambaLayer", "OwnMambaLayer", "JambaAttentionDecoderLayer", "OwnMambaLayer"]
    assert before == modeling_jamba.ALL_DECODER_LAYER_TYPES
    assert same_output(model, AutoModelForCausalLM.from_pretrained(folder))


def mobilebert_config() -> MobileBertConfig:
    sizes = {"vocab_size": 128, "hidden_size": 64, "embedding_size": 32, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "intra_bottleneck_size": 32}
    return MobileBertConfig(**sizes, normalization_type="layer_norm", max_position_embeddings=64)


def test_a_class_of_torch_in_a_table_of_a_model_is_patched_and_torch_is_not(tmp_path: Path) -> None:
    from transformers.models.mobilebert import modeling_mobilebert

    folder = save_tiny(mobilebert_config(), tmp_path, model_class=AutoModelForMaskedLM)
    before = modeling_mobilebert.NORM2FN["layer_norm"]
    init = nn.LayerNorm.__init__
    with Patcher({"LayerNorm": OwnLayerNorm}).applied():
        assert nn.LayerNorm is before
        assert nn.LayerNorm.__init__ is init
        assert type(nn.LayerNorm(4)) is nn.LayerNorm
        model = AutoModelForMaskedLM.from_pretrained(folder)
        stock = classes(model)["OwnLayerNorm"]
    assert stock > 2 * 4
    assert modeling_mobilebert.NORM2FN["layer_norm"] is before is nn.LayerNorm
    plain = shared.stock(folder, AutoModelForMaskedLM)
    assert "OwnLayerNorm" not in classes(plain)
    assert torch.equal(model(torch.arange(5)[None]).logits.detach(), plain(torch.arange(5)[None]).logits.detach())


def test_a_class_of_torch_that_only_torchs_own_namespace_names_is_not_matched(llama: Path) -> None:
    class OwnLinear(nn.Linear):
        pass

    with pytest.raises(
        UnmatchedPatchError,
        match="no class of the model matches 'Linear': the model has it, but not from modeling code",
    ):
        LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"Linear": OwnLinear}))


def test_an_activation_of_torch_is_patched_where_transformers_lists_it(tmp_path: Path) -> None:
    """`ACT2FN` is a dict of a kind of its own."""
    folder = save_tiny(tiny_llama_config(hidden_act="relu"), tmp_path)
    model = LlamaForCausalLM.from_pretrained(folder, patcher=Patcher({"ReLU": OwnReLU}))
    assert [type(layer.mlp.act_fn) for layer in model.model.layers] == [OwnReLU] * 2
    assert same_output(model, LlamaForCausalLM.from_pretrained(folder))
    assert type(LlamaForCausalLM.from_pretrained(folder).model.layers[0].mlp.act_fn) is nn.ReLU
    model = LlamaForCausalLM.from_pretrained(folder, patcher=Patcher(module_mapping={"**.act_fn": OwnReLU}))
    assert [type(layer.mlp.act_fn) for layer in model.model.layers] == [OwnReLU] * 2


# --- the ways in which modeling code can name a class --------------------------------------------------------------

SYNTHETIC = """
import torch
import torch.nn as nn
import transformers.models.llama.modeling_llama as llama
from torch.nn import LayerNorm as Normalise
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaMLP as Aliased

TABLE = {"ours": LlamaMLP, "torch's": nn.LayerNorm}
LISTED = [LlamaMLP, nn.LayerNorm]
FIXED = (LlamaMLP, nn.LayerNorm)
WITH_ARGUMENTS = {"norm": (nn.LayerNorm, {"eps": 0.5})}
Assigned = nn.LayerNorm


class Kinds(dict):
    def __getitem__(self, key):
        raise AssertionError("read by somebody")

    def __iter__(self):
        raise AssertionError("iterated by somebody")

    def raw(self, key):
        return dict.__getitem__(self, key)


KINDS = Kinds(norm=nn.LayerNorm)


class Holder:
    mlp_class = LlamaMLP


def late(config):
    from transformers.models.llama.modeling_llama import LlamaMLP

    return LlamaMLP(config)


def from_arguments(config):
    cls, kwargs = WITH_ARGUMENTS["norm"]
    return cls(config.hidden_size, **kwargs)
"""


@pytest.fixture
def synthetic() -> Iterator[ModuleType]:
    """Modeling code as transformers would have loaded it from a repository."""
    module = ModuleType("transformers_modules.synthetic")
    sys.modules[module.__name__] = module
    exec(textwrap.dedent(SYNTHETIC), vars(module))
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize(
    "expression",
    [
        "LlamaMLP(config)",
        "Aliased(config)",
        "llama.LlamaMLP(config)",
        "TABLE['ours'](config)",
        "LISTED[0](config)",
        "FIXED[0](config)",
        "Holder.mlp_class(config)",
        "late(config)",
        "[cls(config) for cls in FIXED[:1]][0]",
        "getattr(llama, 'LlamaMLP')(config=config)",
    ],
)
def test_a_class_of_transformers_is_found_however_it_is_named(synthetic: ModuleType, expression: str) -> None:
    vars(synthetic)["config"] = tiny_llama_config()
    with OWN.applied():
        built = eval(expression, vars(synthetic))
    assert type(built) is OwnMLP
    assert type(eval(expression, vars(synthetic))) is LlamaMLP


@pytest.mark.parametrize(
    "expression",
    [
        "Normalise(8)",
        "Assigned(8)",
        'TABLE["torch\'s"](8)',
        "LISTED[1](8)",
        "FIXED[1](8)",
        "[cls(8) for cls in FIXED[1:]][0]",
        "from_arguments(config)",
        "__import__('sys').modules[__name__].Normalise(8)",
        "KINDS.raw('norm')(8)",
    ],
)
def test_a_class_of_torch_is_found_where_modeling_code_has_bound_it(synthetic: ModuleType, expression: str) -> None:
    vars(synthetic)["config"] = tiny_llama_config()
    before = {name: value for name, value in vars(synthetic).items() if name != "__builtins__"}
    contents = [dict(synthetic.TABLE), list(synthetic.LISTED), dict(synthetic.WITH_ARGUMENTS)]
    with Patcher({"LayerNorm": OwnLayerNorm}).applied():
        built = eval(expression, vars(synthetic))
        assert isinstance(built, synthetic.Normalise)
        assert synthetic.Normalise == nn.LayerNorm
        assert type("Sub", (synthetic.Normalise,), {}).__mro__[1] is nn.LayerNorm
        assert type(nn.LayerNorm(8)) is nn.LayerNorm
    assert type(built) is OwnLayerNorm
    assert type(eval(expression, vars(synthetic))) is nn.LayerNorm
    assert all(vars(synthetic)[name] is value for name, value in before.items())
    assert contents == [synthetic.TABLE, synthetic.LISTED, synthetic.WITH_ARGUMENTS]
    assert synthetic.LISTED[1] is nn.LayerNorm


def test_a_subclass_that_modeling_code_defines_is_no_object_of_the_class(synthetic: ModuleType) -> None:
    exec("class Sub(LlamaMLP): pass\nclass SubNorm(Normalise): pass", vars(synthetic))
    with Patcher({"LlamaMLP": OwnMLP, "LayerNorm": OwnLayerNorm}, strict=False).applied() as patcher:
        assert type(synthetic.Sub(tiny_llama_config())).__name__ == "Sub"
        assert type(synthetic.SubNorm(8)).__name__ == "SubNorm"
        LlamaMLP(tiny_llama_config())
        eval("Normalise(8)", vars(synthetic))
    assert patcher.class_mapping["LlamaMLP"] is OwnMLP


def test_users_own_code_is_no_modeling_code_for_classes_of_torch() -> None:
    with pytest.raises(UnmatchedPatchError, match="'LayerNorm'"), Patcher({"LayerNorm": OwnLayerNorm}).applied():
        assert type(nn.LayerNorm(8)) is nn.LayerNorm


# --- remote code ---------------------------------------------------------------------------------------------------


def remote_class(folder: Path, name: str) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(f"modeling_tiny_remote.{name}", folder)


def test_remote_code_is_patched(tmp_path: Path) -> None:
    folder = remote_code_model(tmp_path / "remote_patched")
    patcher = Patcher({"TinyRemoteMLP": OwnMLP})
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, patcher=patcher)
    assert classes(model)["OwnMLP"] == 2
    stock = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert "OwnMLP" not in classes(stock)
    assert same_output(model, stock)
    made = AutoModelForCausalLM.from_config(stock.config, trust_remote_code=True, patcher=patcher)
    assert classes(made)["OwnMLP"] == 2


def test_remote_code_that_is_first_imported_in_a_block_is_patched(tmp_path: Path) -> None:
    folder = remote_code_model(tmp_path / "remote_first_seen_in_a_block")
    with Patcher({"TinyRemoteMLP": OwnMLP}).applied():
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert classes(model)["OwnMLP"] == 2


def test_the_root_class_of_remote_code_is_patched(tmp_path: Path) -> None:
    folder = remote_code_model(tmp_path / "remote_root")
    stock = remote_class(folder, "TinyRemoteForCausalLM")
    own = type("OwnRemote", (stock,), {})
    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, patcher=Patcher({"TinyRemoteForCausalLM": own})
    )
    assert type(model) is own
    assert same_output(model, stock.from_pretrained(folder))


# --- modules that are imported while the model is built ------------------------------------------------------------


def in_new_process(code: str) -> str:
    return fresh.run(textwrap.dedent(code), warn="error").stdout.strip()


@pytest.mark.process
@pytest.mark.nightly
def test_a_modeling_module_that_is_first_imported_during_the_construction_is_covered(tmp_path: Path) -> None:
    folder = save_tiny(tiny_llava_config(), tmp_path)
    code = f"""
        import sys
        from torch import nn
        from transformers import LlavaForConditionalGeneration
        from patcher import Patcher

        class Own(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
                self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
                self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

        name = "transformers.models.llama.modeling_llama"
        assert name not in sys.modules
        watched = list(sys.meta_path)
        model = LlavaForConditionalGeneration.from_pretrained({str(folder)!r}, patcher=Patcher({{"LlamaMLP": Own}}))
        assert name in sys.modules
        assert sys.meta_path == watched
        assert type(sys.modules[name].__spec__.loader).__module__ == "_frozen_importlib_external"
        assert sys.modules[name].__loader__ is sys.modules[name].__spec__.loader
        assert "_patcher" not in sys.modules[name].LlamaMLP.__init__.__qualname__
        assert sys.modules[name].LlamaMLP.__init__.__module__ == name
        assert not hasattr(sys.modules[name].LlamaMLP.__init__, "__wrapped__")
        print([type(layer.mlp).__name__ for layer in model.model.language_model.layers])
    """
    assert in_new_process(code) == "['Own', 'Own']"


@pytest.mark.process
def test_a_modeling_module_that_is_first_imported_in_a_block_is_covered() -> None:
    code = """
        import sys
        import torch
        from torch import nn
        from transformers import AutoConfig
        from patcher import Patcher

        class Own(nn.LayerNorm):
            pass

        class OwnGelu(nn.GELU):
            pass

        sizes = {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 2}
        config = AutoConfig.for_model("bloom", **sizes)
        assert "transformers.models.bloom.modeling_bloom" not in sys.modules
        with Patcher({"LayerNorm": Own, "BloomGelu": OwnGelu}).applied():
            from transformers import BloomForCausalLM
            model = BloomForCausalLM(config)
        kinds = (nn.LayerNorm, nn.GELU)
        print(sorted({type(module).__name__ for module in model.modules() if isinstance(module, kinds)}))
        from transformers.models.bloom import modeling_bloom
        assert modeling_bloom.LayerNorm is nn.LayerNorm
        assert vars(modeling_bloom)["LayerNorm"] is nn.LayerNorm
    """
    assert in_new_process(code) == "['Own', 'OwnGelu']"


# --- replacements that are unusual themselves ----------------------------------------------------------------------


class Wrapping(nn.Module):
    """Holds an object of the very class that it replaces."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner = LlamaMLP(config)
        self.more = nn.ModuleList([modeling_llama.LlamaMLP(config) for _ in range(1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.more[0](x)


def test_a_replacement_can_wrap_the_class_that_it_replaces(llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": Wrapping}, new_weights=r"\.mlp\.", dropped_weights=r"\.mlp\.")
    model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
    for layer in model.model.layers:
        assert type(layer.mlp) is Wrapping
        assert type(layer.mlp.inner) is type(layer.mlp.more[0]) is LlamaMLP
    with OWN.applied():  # not even where something else replaces it
        assert type(Wrapping(tiny_llama_config()).inner) is OwnMLP


def test_modeling_code_that_a_replacement_calls_is_patched(llama: Path) -> None:
    class Layer(modeling_llama.LlamaDecoderLayer):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)  # builds a LlamaMLP

    model = LlamaForCausalLM.from_pretrained(llama, patcher=OWN | Patcher({"LlamaDecoderLayer": Layer}))
    assert [(type(layer), type(layer.mlp)) for layer in model.model.layers] == [(Layer, OwnMLP)] * 2


def test_two_stock_classes_can_be_swapped(tmp_path: Path) -> None:
    attention, mamba = modeling_jamba.JambaAttentionDecoderLayer, modeling_jamba.JambaMambaDecoderLayer
    patcher = Patcher({"JambaAttentionDecoderLayer": mamba, "JambaMambaDecoderLayer": attention})
    config = tiny_jamba_config()
    model = AutoModelForCausalLM.from_config(config, patcher=patcher)
    names = [type(layer) for layer in model.model.layers]
    assert names == [attention, attention, mamba, attention]
    stock = [type(layer) for layer in AutoModelForCausalLM.from_config(config).model.layers]
    assert stock == [mamba, mamba, attention, mamba]


def test_a_stock_class_can_replace_another_and_its_subclass(llama: Path) -> None:
    class Base(LlamaMLP):
        pass

    class Derived(Base):
        pass

    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Derived}))
    assert type(model.model.layers[0].mlp) is Derived


class Counted(LlamaMLP):
    def __new__(cls, config: Any) -> Counted:
        return super().__new__(cls)


class Registering(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class Registered(OwnMLP, metaclass=Registering):
    pass


@pytest.mark.parametrize("replacement", [Counted, Registered])
def test_a_replacement_that_makes_its_objects_itself_is_refused(replacement: Any, llama: Path) -> None:
    said = rf"{replacement.__name__} has a __new__, or a metaclass with a __call__, .*Move its code into __init__"
    with pytest.raises(PatchConstructionError, match=said):
        LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": replacement}))
