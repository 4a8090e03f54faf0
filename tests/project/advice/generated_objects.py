"""Files that do what a Patcher does: which objects of a class change, which models hold them, and patched models."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaModel, LlavaForConditionalGeneration

from patcher import Patcher, PatcherWarning, report
from patcher.codegen import PatchConfig, generate
from patcher.fusions import QKV
from tests.codegen.unwritable import Halves
from tests.project.advice import Place, Steps, advice, load, same, written
from tests.project.advice.generated_models import FUSED, LLAMA, arrives, close, file_of, imported, own_module
from tests.support.bringing import BringingMLP
from tests.support.replacements import OwnMLP
from tests.support.tiny import save_tiny, tiny_llama_config, tiny_llava_config

#: what is advised, and fusions that no file can do
FUSIONS: dict[str, tuple[str, list[Any]]] = {
    "a_family_of_ones_own": ("{}. Load with the patcher itself.", [Halves()]),
    "one_of_a_list": ("{}. Load with the patcher itself.", [QKV(modules="model.layers.0.self_attn")]),
}


def fusion_case(name: str, text: str, fusions: list[Any]) -> None:
    @advice(text, name=name)
    def steps(at: Place) -> Steps:
        yield lambda: file_of(Patcher(fusions=fusions))
        model = load(at.llama, Patcher(fusions=fusions))
        assert len(report(model).fused) == len(fusions)
        assert same(model, at.llama)


for _name, _fusion in FUSIONS.items():
    fusion_case(_name, *_fusion)


@advice("Load the model with the patcher, or give the class in a class_mapping.")
def a_path_in_a_generated_file(at: Place) -> Steps:
    by_path = Patcher(module_mapping={"**.mlp": OwnMLP})
    yield lambda: file_of(by_path)
    assert same(load(at.llama, by_path), at.llama)
    assert arrives(at, Patcher({"LlamaMLP": OwnMLP}))
    assert arrives(at, Patcher({"LlamaMLP": BringingMLP}))  # with the conversions that it brings


@advice("Call from_patcher() with {}, or load with the patcher itself.")
def a_part_that_an_auto_class_builds(at: Place) -> Steps:
    config = tiny_llava_config()
    folder = save_tiny(config, at.tmp / "llava")
    patcher = Patcher(fusions="gate_up")
    said = yield lambda: file_of(patcher, LlavaForConditionalGeneration, config)
    assert "from_patcher() with LlamaModel, or" in said
    with imported(at, file_of(patcher, LlamaModel, config.text_config)) as module:
        close(module.LlamaModel.from_pretrained(at.llama), LlamaModel.from_pretrained(at.llama))
    stock = LlavaForConditionalGeneration.from_pretrained(folder)
    close(LlavaForConditionalGeneration.from_pretrained(folder, patcher=patcher), stock)


@advice("{}. Load with the patcher itself.")
def a_config_with_some_of_the_biases(at: Place) -> Steps:
    without, some = tiny_llama_config(bias_of_q=False), tiny_llama_config(bias_of_q=True)
    text = generate(PatchConfig(LLAMA, "biased.py"))
    with own_module(at, text.replace("bias=config.attention_bias", "bias=config.bias_of_q", 1)) as stock:
        said = yield lambda: file_of(FUSED, stock.LlamaForCausalLM, without)
        assert "LlamaAttention.__init__ doesn't build each fused layer in a line of its own" in said
        folder = save_tiny(some, at.tmp / "biased", model_class=stock.LlamaForCausalLM)
        expected = stock.LlamaForCausalLM.from_pretrained(folder)
        close(stock.LlamaForCausalLM.from_pretrained(folder, patcher=FUSED), expected)
        with imported(at, file_of(FUSED, stock.LlamaForCausalLM, some)) as module:
            close(module.LlamaForCausalLM.from_pretrained(folder), expected)


QWEN2_VL = "transformers.models.qwen2_vl.modeling_qwen2_vl"


@advice("Call it {}, with replace_class({}).")
def a_class_by_another_name(at: Place) -> Steps:
    config = PatchConfig(QWEN2_VL, "out.py")
    mine = "class Mine(Qwen2VLModel):\n    mark = 1\n"
    config.add_helper_after("Qwen2VLModel", mine)
    said = yield lambda: generate(config)
    assert "replace_class('Qwen2VLModel')" in said
    replaced = PatchConfig(QWEN2_VL, "out.py")
    replaced.replace_class("Qwen2VLModel", mine)
    assert "class Qwen2VLModel(OriginalQwen2VLModel):\n    mark = 1\n" in generate(replaced)


@advice("Use a function of transformers.initialization, which leaves those alone, such as init.normal_({}).")
def an_initialisation_that_writes(at: Place) -> Steps:
    def config(line: str) -> PatchConfig:
        made = PatchConfig("transformers.models.mixtral.modeling_mixtral", "out.py")
        text = "def f(self, module):\n    super()._init_weights(module)\n    if isinstance(module, nn.Linear):\n"
        text += f"        {line}\n"
        made.override_method("MixtralPreTrainedModel._init_weights", text)
        return made

    said = yield lambda: generate(config("module.weight.data.zero_()"))
    assert "init.normal_(module.weight)" in said
    with imported(at, config("init.normal_(module.weight)")) as module:
        assert same(module.MixtralForCausalLM.from_pretrained(at.moe), at.moe)


@advice("Leave the decorator out with config.drop_decorators({}, {}).", error=PatcherWarning)
def a_method_that_a_decorator_keeps_from_running(at: Place) -> Steps:
    def config() -> PatchConfig:
        made = PatchConfig("transformers.models.mixtral.modeling_mixtral", "out.py")
        text = "def forward(self, hidden_states, top_k_index, top_k_weights):\n    return hidden_states * 0 + 5\n"
        made.override_method("MixtralExperts.forward", text)
        return made

    said = yield lambda: generate(config())
    right = config()
    written(said, r"with (config\.drop_decorators\(.*?\))\.", config=right)
    with imported(at, right) as module:
        model = module.MixtralForCausalLM.from_pretrained(at.moe)
        hidden = torch.ones(1, 2, model.config.hidden_size)
        assert (model.model.layers[0].mlp.experts(hidden, None, None) == 5).all()
