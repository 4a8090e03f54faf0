"""`Patcher.apply`: what it can't copy, and what a replacement would lose."""

from __future__ import annotations

import types
from typing import Any

import torch
from accelerate import dispatch_model  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, TorchAoConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import Patcher, fusions, original_state_dict, report
from tests.project.advice import OwnMLP, Place, Steps, advice, load, same
from tests.project.advice.construction import AttendingConfig, AttendingModel
from tests.support.processes import one_process
from tests.support.replacements import JOINED
from tests.support.tiny import tiny_inputs

QKV, OWN = Patcher(fusions="qkv"), Patcher({"LlamaMLP": OwnMLP})


@torch.no_grad()
def computes_the_same(one: Any, other: Any) -> bool:
    inputs = tiny_inputs(other.config)
    return torch.allclose(one.eval()(**inputs).logits, other.eval()(**inputs).logits, atol=1e-5)


@advice("take the model out of its wrapper")
def a_wrapped_model(at: Place) -> Steps:
    wrapped = nn.Sequential(load(at.llama))
    yield lambda: Patcher(fusions="qkv").apply(wrapped)  # type: ignore[arg-type]
    assert same(Patcher(fusions="qkv").apply(wrapped[0]), at.llama)  # type: ignore[arg-type]


@advice("load one, and write patcher.apply(model)")
def no_model(at: Place) -> Steps:
    for value in ([1], str(at.llama)):
        yield lambda value=value: QKV.apply(value)  # type: ignore[arg-type, misc]
    assert same(QKV.apply(load(at.llama)), at.llama)


class Classifier(LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any, classes: int) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, classes)


class DefaultClassifier(Classifier):
    def __init__(self, config: Any, classes: int = 3) -> None:
        super().__init__(config, classes)


class ConfiguredClassifier(Classifier):
    def __init__(self, config: Any) -> None:
        super().__init__(config, config.num_labels)


@advice("Give the arguments of its __init__ after the config defaults, or read their values from the config.")
def a_model_class_with_arguments(at: Place) -> Steps:
    given = Classifier.from_pretrained(at.llama, classes=3)
    yield lambda: OWN.apply(given)
    yield lambda: OWN.resolve(Classifier, given.config)
    for cls in (DefaultClassifier, ConfiguredClassifier):
        model = cls.from_pretrained(at.llama, num_labels=3)
        assert same(OWN.apply(model), at.llama)
        assert OWN.resolve(cls, model.config).replaced


@advice("Load it without a patcher, and load the state dict patcher.original_state_dict(model) into that.")
def a_copy_of_a_replaced_module(at: Place) -> Steps:
    stock = AttendingModel(AttendingConfig())
    model = AttendingModel._from_config(AttendingConfig(), patcher=OWN)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        model.copied.up_proj.weight.fill_(1.0)
    yield lambda: Patcher().apply(model)
    stock.load_state_dict(original_state_dict(model))
    assert type(stock.copied) is LlamaMLP
    assert stock.copied.up_proj.weight.eq(1.0).all()


@advice("Load it again with patcher=...")
def a_quantized_model(at: Place) -> Steps:
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = load(at.llama, quantization_config=config)
    yield lambda: Patcher(fusions="qkv").apply(model)
    assert load(at.llama, Patcher(fusions="qkv"), quantization_config=config).model.layers[0].self_attn.qkv_proj


@advice("Load it again with patcher=..., device_map=...")
def an_offloaded_model(at: Place) -> Steps:
    options = {"device_map": {"model": "disk", "lm_head": "cpu"}, "offload_folder": str(at.tmp / "disk")}
    model = load(at.llama, **options)
    yield lambda: Patcher(fusions="qkv").apply(model)
    assert same(load(at.llama, Patcher(fusions="qkv"), **options), at.llama)


@advice("Cast the model to one dtype first, with model.to(...).")
def a_model_of_several_dtypes(at: Place) -> Steps:
    model = load(at.llama)
    model.model.layers[0].mlp.gate_proj.to(torch.bfloat16)
    yield lambda: JOINED.apply(model)
    patched = JOINED.apply(model.to(torch.float32))
    inputs = {"input_ids": torch.tensor([[3, 4, 5]])}
    assert torch.allclose(patched(**inputs).logits, model(**inputs).logits, atol=1e-5)


@advice("Save it with save_pretrained, and load that with patcher=...")
def a_split_model(at: Place) -> Steps:
    with one_process():
        torch.distributed.init_device_mesh("cpu", (1,))
        model: Any = fully_shard(load(at.llama, QKV))
        yield lambda: Patcher().apply(model)
        model.save_pretrained(at.tmp / "saved")
    assert same(load(at.tmp / "saved", QKV), at.llama)


@advice("Load it again with patcher=..., device_map=...")
def a_model_that_is_spread_over_devices(at: Place) -> Steps:
    model = dispatch_model(load(at.llama), {"": "cpu"}, force_hooks=True)
    yield lambda: QKV.apply(model)
    assert same(load(at.llama, QKV, device_map={"": "cpu"}), at.llama)


@advice("Register it on the result.")
def a_hook_on_a_gradient(at: Place) -> Steps:
    def hold(model: Any) -> Any:
        model.lm_head.weight.register_hook(lambda gradient: 0 * gradient)
        return model

    yield lambda: QKV.apply(hold(load(at.llama)))
    model = hold(QKV.apply(load(at.llama)))
    model(**tiny_inputs(model.config)).logits.sum().backward()
    assert not model.lm_head.weight.grad.any()


@advice("Compile the result instead.")
def a_compiled_layer(at: Place) -> Steps:
    model = load(at.llama)
    model.model.layers[0].compile(backend="eager")
    yield lambda: QKV.apply(model)
    patched: Any = QKV.apply(load(at.llama))
    patched.model.layers[0].compile(backend="eager")
    assert same(patched, at.llama)


@advice("Bind it to its module with types.MethodType(function, module), or apply the patcher first.")
def a_closure(at: Place) -> Steps:
    def hold(model: Any) -> Any:
        forward = model.lm_head.forward
        model.lm_head.forward = lambda x: 2 * forward(x)
        return model

    def bind(model: Any) -> Any:
        model.lm_head.forward = types.MethodType(lambda self, x: 2 * nn.Linear.forward(self, x), model.lm_head)
        return model

    yield lambda: QKV.apply(hold(load(at.llama)))
    expected = hold(load(at.llama))
    assert computes_the_same(QKV.apply(bind(load(at.llama))), expected)
    assert computes_the_same(hold(QKV.apply(load(at.llama))), expected)


@advice("Take off what was added to it, or load it again with patcher=...")
def what_can_not_be_copied(at: Place) -> Steps:
    model = load(at.llama)
    model.model.scale = model.lm_head.weight * 2
    yield lambda: QKV.apply(model)
    del model.model.scale
    assert same(QKV.apply(model), at.llama)
    assert same(load(at.llama, QKV), at.llama)


class Doubled(fusions.Fusion):
    """Its class has no `from_module`."""

    target_modules_patterns = (r"\.mlp$",)

    def is_fusable(self, module: nn.Module) -> bool:
        return True

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return type("DoubledMLP", (original_cls,), {"forward": lambda self, x: 2 * original_cls.forward(self, x)})


class DoubledInPlace(Doubled):
    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        made = super().make_fused_class(original_cls)

        def from_module(cls: type[nn.Module], module: LlamaMLP) -> nn.Module:
            return cls(module.config)

        made.from_module = classmethod(from_module)  # type: ignore[attr-defined]
        return made


@advice("Give it a from_module, or load the model again with patcher=...")
def a_class_that_is_constructed_anew(at: Place) -> Steps:
    yield lambda: Patcher(fusions=Doubled()).apply(load(at.llama))
    loaded = load(at.llama, Patcher(fusions=Doubled()))
    assert computes_the_same(Patcher(fusions=DoubledInPlace()).apply(load(at.llama)), loaded)
    assert same(Patcher().apply(loaded), at.llama)


class GoesOn(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[0].mlp = LlamaMLP(config)


class EndsWithPostInit(LlamaForCausalLM):
    def post_init(self) -> None:
        self.model.layers[0].mlp = LlamaMLP(self.config)
        super().post_init()


@advice("Let post_init be the last that it calls, or give the fused class a from_module.")
def a_model_that_changes_what_a_family_has_constructed(at: Place) -> Steps:
    yield lambda: GoesOn.from_pretrained(at.llama, patcher=Patcher(fusions=Doubled()))
    for cls, fusion in ((EndsWithPostInit, Doubled()), (GoesOn, DoubledInPlace())):
        model = cls.from_pretrained(at.llama, patcher=Patcher(fusions=fusion))
        assert len(report(model).fused) == 2
        assert same(Patcher().apply(model), at.llama)


@advice("Apply the patcher first, and add it then.")
def a_layer_that_was_added(at: Place) -> Steps:
    def hold(model: Any) -> Any:
        model.adapter = LlamaMLP(model.config)
        return model

    yield lambda: OWN.apply(hold(load(at.llama)))
    assert type(hold(OWN.apply(load(at.llama))).adapter) is LlamaMLP


@advice("Undo that, apply the patcher, and change the result.")
def a_layer_that_was_changed(at: Place) -> Steps:
    def hold(model: Any) -> Any:
        model.model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.ones(96))
        return model

    for patcher, before in ((OWN, None), (Patcher(), OWN)):  # there and back
        model = load(at.llama, before)
        yield lambda patcher=patcher, model=model: patcher.apply(hold(model))  # type: ignore[misc]
        model.model.layers[0].mlp.up_proj.bias = None
        assert computes_the_same(hold(patcher.apply(model)), hold(load(at.llama)))


@advice("Remove them, and register them on the result.")
def hooks_on_what_is_replaced(at: Place) -> Steps:
    def hold(model: Any) -> Any:
        return model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 2 * output)

    model = load(at.llama)
    handle = hold(model)
    yield lambda: OWN.apply(model)
    handle.remove()
    patched = OWN.apply(model)
    for each in (patched, model):
        hold(each)
    assert computes_the_same(patched, model)


@advice("Merge it or unload it, or apply the patcher first.")
def an_adapter_on_what_is_replaced(at: Place) -> Steps:
    from peft import LoraConfig, inject_adapter_in_model

    def hold(model: Any) -> Any:
        torch.manual_seed(0)
        return inject_adapter_in_model(LoraConfig(target_modules=["up_proj"], init_lora_weights=False), model)

    model = hold(load(at.llama))
    yield lambda: OWN.apply(model)
    assert computes_the_same(hold(OWN.apply(load(at.llama))), model)


@advice("Untie it, and tie the result.")
def ties_that_a_replacement_can_not_have(at: Place) -> Steps:
    def tie(model: Any, name: str) -> Any:
        first, second = (layer.mlp for layer in model.model.layers)
        getattr(first, name).weight = getattr(second, name).weight
        return model

    yield lambda: JOINED.apply(tie(load(at.llama), "up_proj"))
    model: Any = tie(JOINED.apply(load(at.llama)), "gate_up_proj")
    assert model.model.layers[0].mlp.gate_up_proj.weight is model.model.layers[1].mlp.gate_up_proj.weight
