"""`qkv` and `gate_up`: the same outputs and gradients, the same checkpoint, and reasons for what is left alone."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    GPTNeoXConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from patcher import (
    PatchedWeightsError,
    Patcher,
    UnmatchedPatchError,
    report,
)
from patcher.fusions.fused_module import fused_class_of
from patcher.fusions.qkv import QKV as Family  # noqa: N811
from tests.support.checkpoints import same_checkpoint
from tests.support.fusing import fuse
from tests.support.tiny import (
    DECODER_SIZES,
    ENCODER_DECODER_SIZES,
    build_tiny,
    randomize,
    save_tiny,
    tiny_bert_config,
    tiny_gpt2_config,
    tiny_inputs,
    tiny_llama_config,
    tiny_llava_config,
)
from tests.support.written_modules import written_module

BOTH = Patcher(fusions=["qkv", "gate_up"])
QKV = Patcher(fusions="qkv")
T5_SIZES: dict[str, Any] = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}

CASES = [
    pytest.param(tiny_llama_config(), BOTH, id="llama, grouped queries"),
    pytest.param(tiny_llama_config(num_key_value_heads=1), BOTH, id="llama, one key head"),
    pytest.param(tiny_llama_config(num_key_value_heads=4), BOTH, id="llama, as many key heads"),
    pytest.param(tiny_llama_config(attention_bias=True, mlp_bias=True), BOTH, id="llama, biases"),
    pytest.param(Qwen2Config(**DECODER_SIZES), BOTH, id="qwen2, biases in attention only"),
    pytest.param(tiny_bert_config(), QKV, id="bert"),
    pytest.param(tiny_llava_config(), BOTH, id="llava, two towers"),
]


@pytest.mark.crossed
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("config", "patcher"), CASES)
def test_outputs_are_those_of_stock(
    config: PretrainedConfig, patcher: Patcher, attention: str, tmp_path: Path
) -> None:
    model_class = type(build_tiny(config))
    save_tiny(config, tmp_path)
    stock = model_class.from_pretrained(tmp_path, attn_implementation=attention)
    fused = model_class.from_pretrained(tmp_path, attn_implementation=attention, patcher=patcher)
    inputs = tiny_inputs(config)

    assert report(fused).fused
    torch.testing.assert_close(fused(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)


@pytest.mark.crossed
@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
@pytest.mark.parametrize(("config", "patcher"), CASES)
def test_saving_writes_what_stock_writes(
    config: PretrainedConfig, patcher: Patcher, max_shard_size: str, tmp_path: Path
) -> None:
    model_class = type(build_tiny(config))
    save_tiny(config, tmp_path / "checkpoint", max_shard_size=max_shard_size, dtype=torch.bfloat16)
    for name, options in {"stock": {}, "fused": {"patcher": patcher}}.items():
        model = model_class.from_pretrained(tmp_path / "checkpoint", **options)
        model.save_pretrained(tmp_path / name, max_shard_size=max_shard_size)

    assert same_checkpoint(tmp_path / "fused", tmp_path / "stock")
    assert "fusion_config" not in json.loads((tmp_path / "fused" / "config.json").read_text())


@pytest.mark.parametrize(("config", "patcher"), CASES)
def test_gradients_are_those_of_stock(config: PretrainedConfig, patcher: Patcher) -> None:
    stock = build_tiny(config)
    fused = patcher.apply(stock)
    inputs = tiny_inputs(config)
    for model in (stock, fused):
        model(**inputs).logits.square().mean().backward()

    for path, module in fused.named_modules():
        other = stock.get_submodule(path) if not path.endswith(("qkv_proj", "gate_up_proj")) else None
        joined = getattr(module, "_joined", None)
        if joined is not None and other is not None:
            gradients = [getattr(other, name).weight.grad for name in joined.projections]
            result = getattr(module, joined.name).weight.grad
            if result is None:  # a layer that the model doesn't use
                assert gradients == [None] * len(gradients)
            else:
                torch.testing.assert_close(result, torch.cat(gradients), atol=1e-6, rtol=1e-4)
        for name, parameter in module.named_parameters(recurse=False):
            if other is not None:
                expected_gradient = other.get_parameter(name).grad
                if expected_gradient is not None:
                    torch.testing.assert_close(parameter.grad, expected_gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("config", "patcher"), CASES)
def test_a_model_made_from_scratch_has_the_values_of_stock(
    config: PretrainedConfig, patcher: Patcher, tmp_path: Path
) -> None:
    model_class = type(build_tiny(config))
    torch.manual_seed(1)
    stock = model_class(config)
    torch.manual_seed(1)
    with patcher.applied():
        fused = model_class(config)
    stock.save_pretrained(tmp_path / "stock")
    fused.save_pretrained(tmp_path / "fused")

    assert report(fused).fused
    assert same_checkpoint(tmp_path / "fused", tmp_path / "stock")


# --- encoders and decoders: one class serves self and cross attention ------------------------------------------------


@pytest.mark.parametrize(
    ("model_class", "config", "parents"),
    [
        (BartForConditionalGeneration, BartConfig(**ENCODER_DECODER_SIZES, max_position_embeddings=64), ".self_attn"),
        (T5ForConditionalGeneration, T5Config(**T5_SIZES, decoder_start_token_id=0), ".SelfAttention"),
        (
            WhisperForConditionalGeneration,
            WhisperConfig(**ENCODER_DECODER_SIZES, max_source_positions=32, max_target_positions=64),
            ".self_attn",
        ),
    ],
)
def test_self_attention_is_fused_and_cross_attention_is_not(
    model_class: Any, config: PretrainedConfig, parents: str, tmp_path: Path
) -> None:
    stock = model_class(config)
    randomize(stock)
    stock.eval().save_pretrained(tmp_path / "stock")
    fused = model_class.from_pretrained(tmp_path / "stock", patcher=QKV)
    fused.save_pretrained(tmp_path / "fused")
    if model_class is WhisperForConditionalGeneration:
        inputs = {"input_features": torch.randn(1, 80, 64)}
    else:
        inputs = {"input_ids": torch.arange(3, 15)[None]}
    inputs["decoder_input_ids"] = torch.arange(5, 11)[None]

    found = report(fused)
    assert len(found.fused) == 4
    assert all(path.endswith(parents) for path, _, _ in found.fused)
    assert len(found.refused) == 2
    assert all("cross attention" in reason for _, reason in found.refused)
    torch.testing.assert_close(fused(**inputs).logits, stock(**inputs).logits, atol=1e-5, rtol=0)
    assert same_checkpoint(tmp_path / "fused", tmp_path / "stock")


def test_a_fused_module_used_for_cross_attention_after_all_is_right() -> None:
    stock = BartForConditionalGeneration(BartConfig(**ENCODER_DECODER_SIZES, max_position_embeddings=64)).eval()
    fused = QKV.apply(stock)
    inputs, others = torch.randn(1, 5, 64), torch.randn(1, 7, 64)

    result, _ = fused.model.encoder.layers[0].self_attn(inputs, key_value_states=others)
    expected, _ = stock.model.encoder.layers[0].self_attn(inputs, key_value_states=others)

    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


# --- what is left alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
        ),
        tiny_gpt2_config(),
    ],
    ids=["gpt_neox", "gpt2"],
)
def test_a_model_without_separate_projections_says_so(config: PretrainedConfig) -> None:
    with pytest.raises(UnmatchedPatchError, match="'qkv' found no module that it can fuse"):
        AutoModelForCausalLM.from_config(config, patcher=QKV)


class _Other(nn.Linear):
    pass


def _hooked(self: nn.Module) -> None:
    self.k_proj.register_forward_hook(lambda *_: None)


def _tied(self: nn.Module) -> None:
    self.k_proj.weight = self.v_proj.weight


def _another_type(self: nn.Module) -> None:
    self.v_proj = _Other(64, 32, bias=False)


def _absent(self: nn.Module) -> None:
    self.v_proj = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hooked, "k_proj has hooks"),
        (_tied, "k_proj.weight is tied"),
        (_another_type, "v_proj is a _Other, not an nn.Linear"),
        (_absent, "v_proj is absent"),
    ],
)
def test_a_module_that_is_not_like_the_others_is_left_alone(
    change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock_init = LlamaAttention.__init__

    def __init__(self: LlamaAttention, config: Any, layer_idx: int) -> None:  # noqa: N807
        stock_init(self, config, layer_idx)
        if layer_idx == 1:
            change(self)

    monkeypatch.setattr(LlamaAttention, "__init__", __init__)
    resolution = QKV.resolve(LlamaForCausalLM, tiny_llama_config())

    assert list(resolution.fused) == ["model.layers.0.self_attn"]
    assert resolution.refused == {"model.layers.1.self_attn": reason}


def _attention(body: str, tmp_path: Path) -> nn.Module:
    """An attention whose forward computes q, k and v so, from code in a file of its own."""
    source = (
        "import torch\nfrom transformers.models.llama.modeling_llama import LlamaAttention\n\n\n"
        "class Odd(LlamaAttention):\n"
        "    def forward(self, x, other=None, **kwargs):\n"
        f"{textwrap.indent(body, ' ' * 8)}\n"
        "        return q.sum(-1) + k.sum(-1) + v.sum(-1)\n"
    )
    odd: nn.Module = written_module(source, tmp_path / "odd_modeling.py").Odd(tiny_llama_config(), 0)
    return odd


UNDERSTOOD = {
    "one after the other": "q = self.q_proj(x)\nk = self.k_proj(x)\nv = self.v_proj(x)",
    "in one line": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)",
    "under another name": "y = x\nq = self.q_proj(x)\nk = self.k_proj(y)\nv = self.v_proj(y)",
    "in a branch": (
        "if other is None:\n    other = x\nq = self.q_proj(x)\nk, v = self.k_proj(other), self.v_proj(other)"
    ),
    "the first in a branch": (
        "if other is not None:\n    k, v = self.k_proj(other), self.v_proj(other)\n"
        "else:\n    k, v = self.k_proj(x), self.v_proj(x)\nq = self.q_proj(x)"
    ),
    "changed in place": "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)\nq /= 3\nk.mul_(2)",
    "inside of an expression": (
        "q = self.q_proj(x).view(x.shape[0], -1, 4, 16)[..., 0]\nk, v = self.k_proj(x), self.v_proj(x)"
    ),
    "under a condition": (
        "q = self.q_proj(x)\nk, v = q, q\nif x.shape[0] == 2:\n    k, v = self.k_proj(x), self.v_proj(x)"
    ),
    "with comments and strings": (
        '# before\nq = self.q_proj(x)  # behind\ntext = """\n  two\nlines"""\n'
        "k = self.k_proj(x) + len(text)\nv = self.v_proj(x)"
    ),
}


@pytest.mark.parametrize("given", ["one", "two", "other"])
@pytest.mark.parametrize("name", UNDERSTOOD)
def test_a_forward_that_is_understood_computes_what_it_did(name: str, given: str, tmp_path: Path) -> None:
    stock = _attention(UNDERSTOOD[name], tmp_path)
    randomize(stock)  # type: ignore[arg-type]
    fused = copy.deepcopy(stock)
    family = Family()
    fused = fuse(family, fused, fused_class_of(family, fused))
    inputs = torch.randn(1 if given == "one" else 2, 5, 64)
    others = {"other": torch.randn(2, 5, 64)} if given == "other" else {}

    results = [module(inputs, **others) for module in (stock, fused)]
    for result in results:
        result.square().sum().backward()

    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-5)
    gradients = [getattr(stock, part).weight.grad for part in ("q_proj", "k_proj", "v_proj")]
    gradients = [
        torch.zeros(rows, 64) if one is None else one for one, rows in zip(gradients, (64, 32, 32), strict=True)
    ]
    torch.testing.assert_close(fused.qkv_proj.weight.grad, torch.cat(gradients), atol=1e-3, rtol=1e-4)


def test_a_checkpoint_that_lacks_a_projection_is_an_error(tmp_path: Path) -> None:
    save_tiny(tiny_llama_config(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(
        PatchedWeightsError, match=r"the checkpoint lacks:\n  model.layers.1.self_attn.k_proj.weight\n"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path, patcher=QKV)


# --- the rewritten class ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fused() -> Any:
    return BOTH.apply(build_tiny(tiny_llama_config()))


def test_a_fused_module_is_still_one_of_its_class(fused: Any) -> None:
    attention, mlp = fused.model.layers[0].self_attn, fused.model.layers[0].mlp

    assert isinstance(attention, LlamaAttention)
    assert isinstance(mlp, LlamaMLP)
    assert [name for name, _ in attention.named_children()] == ["qkv_proj", "o_proj"]
    assert [name for name, _ in mlp.named_children()][:2] == ["gate_up_proj", "down_proj"]
    assert type(attention.qkv_proj) is nn.Linear
    assert attention.qkv_proj.out_features == 64 + 32 + 32
    assert not attention._forward_hooks


def test_the_source_of_what_runs_can_be_read(fused: Any) -> None:
    cls = type(fused.model.layers[0].self_attn)

    method, whole = inspect.getsource(cls.forward), inspect.getsource(cls)

    line = (
        "q_proj_output, k_proj_output, v_proj_output = self.qkv_proj(hidden_states).split(self.qkv_proj_sizes, dim=-1)"
    )
    assert method in whole
    assert line in method
    # All else is what transformers has.
    stock = inspect.getsource(LlamaAttention.forward).splitlines()
    changed = [text for text in method.splitlines() if text not in stock]
    assert len(changed) == 4


def test_the_parts_can_still_be_looked_at() -> None:
    stock = build_tiny(tiny_llama_config(attention_bias=True))
    attention, before = BOTH.apply(stock).model.layers[0].self_attn, stock.model.layers[0].self_attn
    inputs = torch.randn(2, 3, 64)

    for name in ("q_proj", "k_proj", "v_proj"):
        part, original = getattr(attention, name), getattr(before, name)
        assert torch.equal(part.weight, original.weight)
        assert torch.equal(part.bias, original.bias)
        assert (part.in_features, part.out_features) == (original.in_features, original.out_features)
        torch.testing.assert_close(part(inputs), original(inputs), atol=1e-5, rtol=0)


def test_loads_share_a_class(fused: Any) -> None:
    again = BOTH.apply(build_tiny(tiny_llama_config()))

    assert type(again.model.layers[1].self_attn) is type(fused.model.layers[0].self_attn)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_fused_model_can_be_copied_and_pickled(fused: Any, copied: Any) -> None:
    inputs = tiny_inputs(fused.config)

    assert torch.equal(copied(fused)(**inputs).logits, fused(**inputs).logits)


def test_nothing_is_left_on_stock_classes() -> None:
    before = {cls: dict(vars(cls)) for cls in (LlamaAttention, LlamaMLP)}

    BOTH.apply(build_tiny(tiny_llama_config()))

    assert {cls: dict(vars(cls)) for cls in before} == before


def test_threads_do_not_disturb_each_other(fused: Any) -> None:
    inputs = [tiny_inputs(fused.config, seed=seed) for seed in range(4)]
    with torch.no_grad():
        expected = [fused(**one).logits for one in inputs]
    wrong: list[int] = []

    def run(number: int) -> None:
        with torch.no_grad():
            for _ in range(10):
                if not torch.equal(fused(**inputs[number]).logits, expected[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong


def test_generation_with_a_cache_is_that_of_stock(fused: Any) -> None:
    stock = Patcher().apply(fused)
    inputs = tiny_inputs(fused.config)
    options = {"max_new_tokens": 8, "do_sample": False}

    assert torch.equal(fused.generate(**inputs, **options), stock.generate(**inputs, **options))
