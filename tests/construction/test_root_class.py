"""The root class, or a sub-model, replaced: what is decided by a model's class goes on to be decided so."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeForCausalLM,
)
from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, apply_rotary_pos_emb

from patcher import Patcher, report
from tests.support import shared
from tests.support.caches import CACHE
from tests.support.checkpoints import same_checkpoint
from tests.support.replacements import OWN, OwnLayer, OwnMLP, same_output
from tests.support.tiny import (
    save_tiny,
    tiny_gpt2_config,
    tiny_inputs,
    tiny_llama_config,
    tiny_mixtral_config,
    tiny_qwen2_moe_config,
)


class SubLlama(LlamaForCausalLM):
    pass


class OwnLlama(LlamaPreTrainedModel, GenerationMixin):
    """No `LlamaForCausalLM`, and says nothing of its own on how it is loaded."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        outputs = self.model(input_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, **{CACHE: outputs[CACHE]})


class BareLlama(PreTrainedModel, GenerationMixin):
    """The same, and derived from no class of the architecture."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    forward = OwnLlama.forward


ROOTS = [SubLlama, OwnLlama]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config(tie_word_embeddings=True))


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("load_class", [AutoModelForCausalLM, LlamaForCausalLM])
def test_the_root_class_can_be_replaced(
    load_class: Any, root: type[PreTrainedModel], llama: Path, tmp_path: Path
) -> None:
    patcher = Patcher({"LlamaForCausalLM": root, "LlamaMLP": OwnMLP})
    model = load_class.from_pretrained(llama, patcher=patcher)
    assert type(model) is root
    assert type(model.model.layers[0].mlp) is OwnMLP
    stock = shared.stock(llama, LlamaForCausalLM)
    assert same_output(model, stock)
    inputs = tiny_inputs(stock.config)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **options), stock.generate(**inputs, **options))
    model.save_pretrained(tmp_path)
    assert same_checkpoint(tmp_path, llama)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((llama / "config.json").read_text())


@pytest.mark.parametrize("root", ROOTS)
def test_the_replaced_root_keeps_what_it_computes(root: type[PreTrainedModel], llama: Path) -> None:
    class Own(root):  # type: ignore[misc,valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("computed", torch.arange(5.0), persistent=False)
            self.plain = torch.arange(3)
            self.gate = nn.Parameter(torch.full((2,), 0.25))

    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaForCausalLM": Own}, new_weights="gate"))
    assert torch.equal(model.computed, torch.arange(5.0))
    assert torch.equal(model.plain, torch.arange(3))
    assert torch.equal(model.gate, torch.full((2,), 0.25))


@pytest.mark.parametrize("root", ROOTS)
def test_a_replaced_root_made_from_a_config_saves_as_the_stock_class(
    root: type[PreTrainedModel], tmp_path: Path
) -> None:
    patcher = Patcher({"LlamaForCausalLM": root})
    for number, model in enumerate(
        [
            AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=patcher),
            LlamaForCausalLM._from_config(tiny_llama_config(), patcher=patcher),
        ]
    ):
        assert type(model) is root
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        assert type(AutoModelForCausalLM.from_pretrained(folder)) is LlamaForCausalLM
    with patcher.applied():
        assert type(LlamaForCausalLM(tiny_llama_config())) is root


# --- what transformers decides by class ----------------------------------------------------------------------------


def lookalike(stock: type[PreTrainedModel], inner: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class with the parts of `stock` that isn't derived from it, and says nothing on how it is loaded."""
    base: Any = stock.__mro__[1]

    class Own(base):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = inner(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor]:
            return (self.lm_head(self.model(input_ids, **kwargs).last_hidden_state),)

    return Own


@pytest.mark.parametrize(
    ("stock", "config"),
    [(MixtralForCausalLM, tiny_mixtral_config()), (Qwen2MoeForCausalLM, tiny_qwen2_moe_config())],
    ids=["mixtral", "qwen2_moe"],
)
@pytest.mark.parametrize("derived", [True, False])
def test_a_replaced_root_keeps_the_conversions_of_its_class(
    stock: Any, config: Any, derived: bool, tmp_path: Path
) -> None:
    """Their checkpoints hold each expert by itself, their modules all of a layer stacked."""
    folder = save_tiny(config, tmp_path / "stock")
    inner = getattr(inspect.getmodule(stock), stock.__name__.replace("ForCausalLM", "Model"))
    own_inner: Any = type("OwnInner", (inner,), {})
    if derived:
        mapping = {stock.__name__: type("Own", (stock,), {}), inner.__name__: own_inner}
    else:
        mapping = {stock.__name__: lookalike(stock, own_inner)}
    # The conversions are found by either class, so neither is left as it was.
    model = AutoModelForCausalLM.from_pretrained(folder, patcher=Patcher(mapping))
    assert (type(model), type(model.model)) == (mapping[stock.__name__], own_inner)
    assert derived == isinstance(model, stock)
    assert same_output(model, stock.from_pretrained(folder))
    model.save_pretrained(tmp_path / "again")
    assert same_checkpoint(tmp_path / "again", folder)


@pytest.mark.parametrize("root", ROOTS)
def test_tied_weights_stay_tied(root: type[PreTrainedModel], tied_llama: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tied_llama, patcher=Patcher({"LlamaForCausalLM": root}))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same_output(model, LlamaForCausalLM.from_pretrained(tied_llama))
    model.save_pretrained(tmp_path)
    assert same_checkpoint(tmp_path, tied_llama)
    made = LlamaForCausalLM._from_config(
        tiny_llama_config(tie_word_embeddings=True), patcher=Patcher({"LlamaForCausalLM": root})
    )
    assert made.lm_head.weight is made.model.embed_tokens.weight


class Fp32Llama(LlamaForCausalLM):
    _keep_in_fp32_modules_strict = ["norm"]  # noqa: RUF012 - as transformers has it


def test_modules_are_kept_in_fp32_as_the_replaced_class_says(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["norm"])
    model = LlamaForCausalLM.from_pretrained(
        llama, dtype=torch.bfloat16, patcher=Patcher({"LlamaForCausalLM": OwnLlama})
    )
    assert {"norm": model.model.norm.weight.dtype, "head": model.lm_head.weight.dtype} == {
        "norm": torch.float32,
        "head": torch.bfloat16,
    }


def test_a_replaced_root_is_used_as_its_class_says(llama: Path) -> None:
    """Whatever `PreTrainedModel` has for its subclasses to change, also what a later release brings."""
    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaForCausalLM": BareLlama}))
    for name in ("_can_compile_fullgraph", "_supports_attention_backend", "supports_gradient_checkpointing"):
        assert getattr(BareLlama, name) == getattr(PreTrainedModel, name)
        assert getattr(model, name) == getattr(LlamaForCausalLM, name) != getattr(BareLlama, name)
    assert not {"config_class", "_auto_class", "model_tags"} & vars(model).keys()


def test_a_replacement_has_the_last_word_on_what_is_kept_in_fp32(llama: Path) -> None:
    patcher = Patcher({"LlamaForCausalLM": Fp32Llama})
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16, patcher=patcher)
    assert model.model.norm.weight.dtype == torch.float32
    assert LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).model.norm.weight.dtype == torch.bfloat16


# --- a device map (row 12) -----------------------------------------------------------------------------------------


class OwnBlock(nn.Module):
    """A decoder layer that is no `LlamaDecoderLayer`."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.inner = OwnLayer(config, layer_idx)
        for name, module in list(self.inner.named_children()):
            setattr(self, name, module)
        del self.inner

    forward = OwnLayer.forward


@pytest.mark.parametrize("layer", [OwnLayer, OwnBlock])
@pytest.mark.parametrize("root", [LlamaForCausalLM, OwnLlama])
@pytest.mark.filterwarnings("ignore:.*offload.*")
def test_a_replaced_decoder_layer_is_never_split_across_devices(
    layer: Any, root: Any, llama: Path, tmp_path: Path
) -> None:
    """Memory for less than a whole layer beside the embeddings: only a layer that may be split would use it."""
    mapping = {"LlamaDecoderLayer": layer}
    if root is OwnLlama:
        mapping["LlamaForCausalLM"] = root
    stock = shared.stock(llama, LlamaForCausalLM)
    whole = sum(parameter.nbytes for parameter in stock.model.layers[0].parameters())
    mlp = sum(parameter.nbytes for parameter in stock.model.layers[0].mlp.parameters())
    rooms = (whole + mlp, whole + whole // 2, 2 * whole - 8, 2 * whole)
    for room in rooms:
        memory = {"cpu": stock.model.embed_tokens.weight.nbytes + room}
        options: dict[str, Any] = {"device_map": "auto", "max_memory": memory, "offload_folder": tmp_path}
        model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher(mapping), **options)
        assert set(model.hf_device_map.values()) == {"cpu", "disk"}
        assert model.hf_device_map == LlamaForCausalLM.from_pretrained(llama, **options).hf_device_map
        assert not [path for path in model.hf_device_map if path.startswith("model.layers.") and path.count(".") > 2]
    assert "OwnBlock" not in (LlamaForCausalLM._no_split_modules or ())


# --- sub-models ----------------------------------------------------------------------------------------------------


class OwnModel(LlamaModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.computed = torch.arange(4)


@pytest.mark.parametrize("load_class", [AutoModelForCausalLM, LlamaForCausalLM, LlamaModel])
def test_a_sub_model_can_be_replaced(load_class: Any, llama: Path, tmp_path: Path) -> None:
    model = load_class.from_pretrained(llama, patcher=OWN | Patcher({"LlamaModel": OwnModel}))
    inner = model if load_class is LlamaModel else model.model
    assert type(inner) is OwnModel
    assert torch.equal(inner.computed, torch.arange(4))
    assert type(inner.layers[0].mlp) is OwnMLP
    stock = shared.stock(llama, load_class)
    assert same_output(model, stock)
    model.save_pretrained(tmp_path / "patched")
    stock.save_pretrained(tmp_path / "stock")
    assert same_checkpoint(tmp_path / "patched", tmp_path / "stock")
    assert (tmp_path / "patched/config.json").read_text() == (tmp_path / "stock/config.json").read_text()


def test_a_replaced_sub_model_can_be_saved_by_itself(llama: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaModel": OwnModel}))
    model.model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaModel"]
    assert same_output(LlamaModel.from_pretrained(tmp_path), LlamaModel.from_pretrained(llama))


class TurnedHead(LlamaForCausalLM):
    conversion_mapping = WeightConverter("^lm_head.weight$", "head", [Transpose(0, 1)])

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.lm_head
        self.head = nn.Parameter(torch.empty(config.hidden_size, config.vocab_size))

    def lm_head(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.head


class RenamedNorm(LlamaModel):
    conversion_mapping = WeightRenaming("^norm", "last")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.last = self._modules.pop("norm")

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


@pytest.mark.parametrize("load_class", [LlamaForCausalLM, LlamaModel])
@pytest.mark.parametrize("with_head", [True, False])
def test_the_conversions_of_a_class_begin_at_the_model_that_it_replaces(
    load_class: Any, with_head: bool, llama: Path, tmp_path: Path
) -> None:
    folder = llama
    if not with_head:  # keys without the prefix of the base model
        LlamaModel.from_pretrained(llama).save_pretrained(folder := tmp_path / "base")
    patcher = Patcher({"LlamaModel": RenamedNorm})
    if load_class is LlamaForCausalLM and with_head:
        patcher |= Patcher({"LlamaForCausalLM": TurnedHead})
    stock, model = load_class.from_pretrained(folder), load_class.from_pretrained(folder, patcher=patcher)
    if not with_head:  # that of the model is random
        model.load_state_dict(stock.state_dict())
    for each in (model, patcher.apply(stock), Patcher().apply(model)):
        assert same_output(each, stock)
        each.save_pretrained(tmp_path / "patched")
        stock.save_pretrained(tmp_path / "stock")
        assert same_checkpoint(tmp_path / "patched", tmp_path / "stock")


def test_modules_are_named_by_path_in_a_class_with_a_method_of_the_name_of_a_module(llama: Path) -> None:
    patcher = Patcher({"LlamaForCausalLM": TurnedHead}, module_mapping={"model.layers.0.mlp": OwnMLP})
    model, stock = (LlamaForCausalLM.from_pretrained(llama, patcher=each) for each in (patcher, None))
    assert [type(layer.mlp) for layer in model.model.layers] == [OwnMLP, type(stock.model.layers[0].mlp)]
    assert same_output(model, stock)


def test_a_replaced_sub_model_of_a_config_saves_as_stock(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(tiny_llama_config(), patcher=Patcher({"LlamaModel": RenamedNorm}))
    model.model.save_pretrained(tmp_path)
    _, info = LlamaModel.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] | info["unexpected_keys"] == set()


def test_a_replaced_gpt2_ties_its_head(tmp_path: Path) -> None:
    class OwnGPT2(GPT2LMHeadModel):
        pass

    folder = save_tiny(tiny_gpt2_config(), tmp_path / "stock")
    model = AutoModelForCausalLM.from_pretrained(folder, patcher=Patcher({"GPT2LMHeadModel": OwnGPT2}))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert same_output(model, GPT2LMHeadModel.from_pretrained(folder))
    model.save_pretrained(tmp_path / "again")
    assert same_checkpoint(tmp_path / "again", folder)


class LaterLayer(LlamaForCausalLM):
    """Adds a layer after `post_init`, by a class of its own or of a subclass."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.later = LlamaDecoderLayer(config, 0)


class Elsewhere(LaterLayer):
    """A class whose objects are of a subclass."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(Below)


class Below(Elsewhere):
    pass


class OfAClassMadeForIt(LaterLayer):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(type("Made", (cls,), {}) if cls is OfAClassMadeForIt else cls)


class Factory(LlamaPreTrainedModel):
    """A class that constructs an object of another one."""

    def __new__(cls, config: Any) -> Any:
        return LaterLayer(config)


class OfAPartial(LaterLayer):
    __init__ = functools.partialmethod(LaterLayer.__init__)  # type: ignore[assignment]


class PostInitAtLast(type(LlamaForCausalLM)):  # type: ignore[misc]
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().__call__(*args, **kwargs)
        model.post_init()
        return model


class ByMetaclass(LlamaPreTrainedModel, metaclass=PostInitAtLast):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.later = LlamaDecoderLayer(config, 0)


class PartFirst(LlamaPreTrainedModel):
    def __init__(self, config: Any) -> None:
        model = LlamaModel(config)
        super().__init__(config)
        self.model = model
        self.later = LlamaDecoderLayer(config, 0)
        self.post_init()


@pytest.mark.parametrize(
    "cls", [LaterLayer, Elsewhere, OfAClassMadeForIt, Factory, OfAPartial, ByMetaclass, PartFirst]
)
def test_what_is_built_after_post_init_or_by_another_class_is_fused_too(cls: Any, tmp_path: Path) -> None:
    stock = cls(tiny_llama_config())
    stock.save_pretrained(tmp_path)
    model = cls.from_pretrained(tmp_path, patcher=Patcher(fusions="qkv"))
    assert report(model).fused[0] == ("later.self_attn", "LlamaAttention", "FusedLlamaAttention")
    model.save_pretrained(tmp_path / "again")
    assert same_checkpoint(tmp_path, tmp_path / "again")


def negated(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return apply_rotary_pos_emb(-q, -k, *args, **kwargs)


class ScaledAttention(LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return output * 3, weights


class LaterAttention(LlamaForCausalLM):
    """Puts another attention into a layer after `post_init`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].self_attn = ScaledAttention(config, 0)


class TwicePostInit(LaterAttention):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.post_init()


BY_PATH = Patcher(module_mapping={"model.layers.*.mlp": OwnMLP})


@pytest.mark.parametrize("cls", [LaterAttention, TwicePostInit])
@pytest.mark.parametrize(
    "patcher",
    [
        Patcher(fusions="qkv"),
        BY_PATH,
        BY_PATH | Patcher(fusions="qkv"),
        Patcher(function_mapping={"apply_rotary_pos_emb": negated}),
        BY_PATH | Patcher(function_mapping={"apply_rotary_pos_emb": negated}, fusions="qkv"),
    ],
    ids=["fusion", "path", "path and fusion", "function", "all"],
)
def test_what_replaces_a_module_after_post_init_is_what_runs(patcher: Patcher, cls: Any, tmp_path: Path) -> None:
    stock = cls(tiny_llama_config())
    stock.save_pretrained(tmp_path)
    inputs = tiny_inputs(stock.config)
    model = cls.from_pretrained(tmp_path, patcher=patcher)
    torch.testing.assert_close(model(**inputs).logits, stock.eval()(**inputs).logits)
