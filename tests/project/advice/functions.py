"""Functions that can't be replaced for one model, and what can be done instead."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from patcher import Patcher, report
from patcher.codegen import PatchConfig, generate
from tests.functions import functions
from tests.functions.modeling_tiny import Part, TinyConfig, TinyModel
from tests.project.advice import Place, Steps, advice, load, same, written
from tests.support.tiny import tiny_llama_config

ONES = torch.ones(1, 4)


def tripled(value: Any) -> Any:
    return value * 3


def made(patcher: Patcher) -> Any:
    return TinyModel._from_config(TinyConfig(), patcher=patcher)


modeling_llama_half = modeling_llama.rotate_half


def instead(said: str, cls: type[nn.Module]) -> Patcher:
    """The patcher that an error advises: another class in the place of one that it names."""
    name, field = written_words(said)
    return Patcher(**{field: {name: cls}})


def written_words(said: str) -> tuple[str, str]:
    words = said.rpartition("Replace ")[2].rstrip(".").split(" as a whole instead, with ")
    return words[0], words[1]


class LatePart(Part):
    def forward(self, x: Any) -> Any:
        return tripled(self.linear(x) + self.offset)


@advice("Replace {} as a whole instead, with class_mapping.")
def a_function_in_a_table(at: Place) -> Steps:
    said = yield lambda: made(Patcher(function_mapping={"late": tripled}))
    assert torch.equal(made(instead(said, LatePart))(ONES), 3 * made(Patcher())(ONES))


def own_attention_under_a_name(at: Place, said: str) -> None:
    """What is advised gives the outputs of stock, with padding too: nothing registers masks by itself."""
    lines = re.findall(r"transformers\.(\w+)\.register\('mine', ([\w.]+(?:\['\w+'\])?)\)", said)
    for interface, value in lines:
        function = eval(value, {"transformers": transformers, "function": functions.counted_eager})
        getattr(transformers, interface).register("mine", function)
    ids, mask = torch.tensor([[3, 4, 5]]), torch.tensor([[0, 1, 1]])
    functions.CALLS.clear()
    try:
        model = load(at.llama, attn_implementation=written(said, r"and attn_implementation=('mine')"))
        assert torch.allclose(model(ids, mask).logits[:, 1:], load(at.llama)(ids, mask).logits[:, 1:], atol=1e-5)
        assert functions.CALLS == ["eager"] * 2
    finally:
        for interface, _ in lines:
            getattr(transformers, interface)._global_mapping.pop("mine")


@advice(
    " under {}={}: load the model with {}='eager' (in Python; commands have no such option)",
    "in place of the function_mapping give your function a name that loads may choose, with masks: transformers.",
)
def a_function_that_the_chosen_attention_does_not_call(at: Place) -> Steps:
    patcher = Patcher(function_mapping={"eager_attention_forward": functions.counted_eager})
    said = yield lambda: load(at.llama, patcher)
    implementation = written(said, r"load the model with attn_implementation=('\w+')")
    ids = torch.tensor([[3, 4]])
    functions.CALLS.clear()
    load(at.llama, patcher, attn_implementation=implementation)(ids)
    assert functions.CALLS == ["eager"] * 2
    own_attention_under_a_name(at, said)


@advice(
    "For an attention of this model alone {}; or {}",
    "write function_mapping={'eager_attention_forward': function} and attn_implementation='eager'",
)
def an_attention_of_the_table(at: Place) -> Steps:
    said = yield lambda: load(at.llama, Patcher(function_mapping={"sdpa_attention_forward": functions.counted_eager}))
    mapping = written(
        said, r"function_mapping=({'eager_attention_forward': function})", function=functions.counted_eager
    )
    implementation = written(said, r"} and attn_implementation=('\w+')")
    functions.CALLS.clear()
    load(at.llama, Patcher(function_mapping=mapping), attn_implementation=implementation)(torch.tensor([[3, 4]]))
    assert functions.CALLS == ["eager"] * 2
    own_attention_under_a_name(at, said)


class Beginning(TinyModel):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.first = 15.0


@advice("Replace {} as a whole instead, with class_mapping.")
def a_function_that_the_model_calls_first_of_all(at: Place) -> Steps:
    said = yield lambda: made(Patcher(function_mapping={"beginning": tripled}))
    assert torch.equal(made(instead(said, Beginning))(ONES), 3 * made(Patcher())(ONES))


class NotFinal(nn.Module):
    def forward(self, x: Any) -> Any:
        return tripled(x)


@advice(
    "Register the hook on the result, one that calls your function; if an __init__ registers it, replace the class "
    "that has the __init__ instead, with class_mapping."
)
def a_function_that_a_hook_calls(at: Place) -> Steps:
    stock, patcher = load(at.llama), Patcher(function_mapping={"rotate_half": functions.counted_half})
    handle = stock.lm_head.register_forward_hook(lambda module, args, output: modeling_llama_half(output))
    expected = stock(torch.tensor([[3, 4]])).logits
    yield lambda: patcher.apply(stock)
    handle.remove()
    patched = patcher.apply(stock)
    patched.lm_head.register_forward_hook(lambda module, args, output: functions.counted_half(output))
    assert torch.equal(patched(torch.tensor([[3, 4]])).logits, expected)


@advice("no class can be derived from it ({}). Replace the class, with class_mapping.")
def a_function_that_a_final_class_calls(at: Place) -> Steps:
    said = yield lambda: made(Patcher(function_mapping={"last": tripled}))
    name = said.partition("function_mapping: ")[2].partition(" ")[0]
    assert torch.equal(made(Patcher({name: NotFinal}))(ONES), 3 * made(Patcher())(ONES))


@advice(": the model calls another function of that name; write {} for any")
def a_function_of_another_model(at: Place) -> Steps:
    key = "transformers.models.mistral.modeling_mistral:rotate_half"
    said = yield lambda: load(at.llama, Patcher(function_mapping={key: functions.counted_half}))
    name = written(said, r"write (\S+) for any")
    assert len(report(load(at.llama, Patcher(function_mapping={name: functions.counted_half}))).functions) == 1


# --- as a file -----------------------------------------------------------------------------------------------------


def file_of(patcher: Patcher) -> str:
    return generate(PatchConfig.from_patcher(patcher, LlamaForCausalLM, config=tiny_llama_config()))


@advice("nothing in {} that {} runs calls {}. {} Correct the key of function_mapping, or take it out.")
def a_misspelt_function_for_a_file(at: Place) -> Steps:
    said = yield lambda: file_of(Patcher(function_mapping={"rotate_hal": functions.counted_half}))
    name = said.partition("Nearest: ")[2].partition(".")[0].partition(",")[0]
    assert "def original_rotate_half(x)" in file_of(Patcher(function_mapping={name: half_again}))


def half_again(x: Any) -> Any:
    return rotate_half(x)


rotate_half = modeling_llama.rotate_half


@advice(
    "which is not defined in {}, and a generated file holds the functions of one module. Load with the patcher itself."
)
def a_function_of_another_module_for_a_file(at: Place) -> Steps:
    patcher = Patcher(function_mapping={"create_causal_mask": functions.counted_mask})
    yield lambda: file_of(patcher)
    assert same(load(at.llama, patcher), at.llama)


class Rope:
    def __call__(self, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


@advice("{} has no source that a file could hold. Load with the patcher itself.")
def an_object_that_is_called(at: Place) -> Steps:
    patcher = Patcher(function_mapping={"apply_rotary_pos_emb": Rope()})
    yield lambda: file_of(patcher)
    assert same(load(at.llama, patcher), at.llama)
