"""Weights that stream."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft import AdaptionPromptConfig, LoraConfig, PromptTuningConfig, get_peft_model
from torch import distributed as dist, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import BitsAndBytesConfig, QuantoConfig
from transformers.core_model_loading import WeightConverter
from transformers.models.llama.modeling_llama import LlamaMLP

from patcher import Patcher, checkpoint_weights, load_checkpoint_weights
from tests.project.advice import Place, Steps, advice, load, same, written
from tests.support.computing import Twice, TwiceInPlace
from tests.support.processes import one_process
from tests.support.tiny import save_tiny, tiny_llama_config

QKV = Patcher(fusions="qkv")


def adapted(at: Place, *targets: str, **options: Any) -> Any:
    model: Any = get_peft_model(load(at.llama, **options), LoraConfig(target_modules=list(targets)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    return model


def filled(at: Place, weights: Any) -> Any:
    model = load(at.llama)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint_weights(model, weights)
    return model


@advice(
    '{} has an adapter, and adapters={} doesn\'t say what becomes of it. Write adapters="merged" for weights that '
    'compute what the model does, or adapters="left out".'
)
def weights_with_an_adapter(at: Place) -> Steps:
    model = adapted(at, "q_proj")
    said = yield lambda: checkpoint_weights(model)
    merged, left_out = (
        written(said, pattern, dict=dict)
        for pattern in (r"Write adapters=(\"merged\")", r"or adapters=(\"left out\")")
    )
    assert same(filled(at, checkpoint_weights(model, adapters=left_out)), at.llama)
    ids = torch.arange(3, 12)[None]
    engine = filled(at, checkpoint_weights(model, adapters=merged))
    assert torch.allclose(engine(ids).logits, model.eval()(ids).logits, atol=1e-4)


@advice(
    "only_on={} isn't one of the {} processes, so no process would get the weights. Write the rank of one, only_on=0, "
    "or leave it out."
)
def weights_for_a_process_that_there_is_not(at: Place) -> Steps:
    said = yield lambda: next(checkpoint_weights(load(at.llama), only_on=3))
    assert same(filled(at, checkpoint_weights(load(at.llama), only_on=written(said, r"only_on=(0),"))), at.llama)
    assert same(filled(at, checkpoint_weights(load(at.llama))), at.llama)


@advice(
    "The adapter of {} is merged into its weights, so they can't be separated from it. Unmerge it first "
    '(unmerge_adapter()), or write adapters="merged".'
)
def weights_with_an_adapter_that_is_merged(at: Place) -> Steps:
    model = adapted(at, "q_proj")
    model.merge_adapter()
    yield lambda: checkpoint_weights(model, adapters="left out")
    ids = torch.arange(3, 12)[None]
    engine = filled(at, checkpoint_weights(model, adapters="merged"))
    assert torch.allclose(engine(ids).logits, model.eval()(ids).logits, atol=1e-4)
    model.unmerge_adapter()
    assert same(filled(at, checkpoint_weights(model, adapters="left out")), at.llama)


@advice('An adapter can\'t be merged into {}: it is {}. Write adapters="left out", and give the engine the adapter.')
def an_adapter_of_one_of_two_tied_weights(at: Place) -> Steps:
    folder = save_tiny(tiny_llama_config(tie_word_embeddings=True), at.tmp / "tied")
    config = LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    with warnings.catch_warnings(action="ignore"):  # PEFT's own
        model, engine = (get_peft_model(load(folder), config) for _ in range(2))
    yield lambda: checkpoint_weights(model, adapters="merged")
    load_checkpoint_weights(engine, checkpoint_weights(model, adapters="left out"))
    adapter = {name: value for name, value in model.state_dict().items() if "lora" in name}
    engine.load_state_dict(adapter, strict=False)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(engine.eval()(ids).logits, model.eval()(ids).logits)


@advice(
    'The adapter of {} can\'t be merged into weights: {}. Write adapters="left out", and give the engine the adapter.'
)
def an_adapter_that_is_a_prompt(at: Place) -> Steps:
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = get_peft_model(load(at.llama), config)
    yield lambda: checkpoint_weights(model, adapters="merged")
    engine = get_peft_model(filled(at, checkpoint_weights(model, adapters="left out")), config)
    engine.load_state_dict({name: each for name, each in model.state_dict().items() if "prompt" in name}, strict=False)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(engine.eval()(ids).logits, model.eval()(ids).logits)


@advice("Stream the base model, loaded without this adapter, and give the engine the adapter.")
def an_adapter_around_attention(at: Place) -> Steps:
    config = AdaptionPromptConfig(adapter_len=2, adapter_layers=1, target_modules="self_attn", task_type="CAUSAL_LM")
    model = get_peft_model(load(at.llama), config)
    yield lambda: checkpoint_weights(model, adapters="left out")
    engine = get_peft_model(filled(at, checkpoint_weights(load(at.llama))), config)
    engine.load_state_dict(
        {name: each for name, each in model.state_dict().items() if "adaption" in name}, strict=False
    )
    ids = torch.arange(3, 12)[None]
    assert torch.equal(engine.eval()(ids).logits, model.eval()(ids).logits)


@advice("can't save them, so they have no checkpoint. Stream those of the model that isn't quantized.")
def weights_that_a_quantizer_cannot_save(at: Place) -> Steps:
    model = load(at.llama, quantization_config=QuantoConfig(weights="int8"))
    yield lambda: checkpoint_weights(model)
    assert same(filled(at, checkpoint_weights(load(at.llama))), at.llama)


@advice(
    "{} of {} {}, so nothing can be written into it in place. Load the weights anew with from_pretrained, in full "
    "precision and in memory."
)
def weights_for_a_quantized_model(at: Place) -> Steps:
    model = load(at.llama, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    yield lambda: load_checkpoint_weights(model, checkpoint_weights(load(at.llama)))
    assert same(load(at.llama), at.llama)


class HalfMLP(LlamaMLP):
    """Its down projection holds twice the values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


def doubled(operation: type[Twice]) -> Patcher:
    conversion = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", operations=[operation()])
    return Patcher({"LlamaMLP": HalfMLP}, extra_weight_conversions=conversion)


@advice(
    "A conversion of {} writes into the tensors that it is given, so a save would change the model. Write its "
    "operations without that."
)
def an_operation_that_writes_to_what_it_is_given(at: Place) -> Steps:
    yield lambda: list(checkpoint_weights(load(at.llama, doubled(TwiceInPlace))))
    assert same(filled(at, checkpoint_weights(load(at.llama, doubled(Twice)))), at.llama)


@advice("Weights are those of one model of transformers, and {} contains {}. Pass the model itself.")
def weights_of_several_models(at: Place) -> Steps:
    both = nn.ModuleList([load(at.llama), load(at.llama, QKV)])
    yield lambda: checkpoint_weights(both)
    assert same(filled(at, checkpoint_weights(both[1])), at.llama)


@advice("Use torch.distributed.fsdp.fully_shard instead.")
def weights_that_are_split_without_shapes(at: Place) -> Steps:
    with one_process():
        with warnings.catch_warnings(action="ignore"):  # that one process splits nothing
            split = FullyShardedDataParallel(load(at.llama), device_id=torch.device("cpu"))
        yield lambda: checkpoint_weights(split)
        mesh = dist.init_device_mesh("cpu", (1,))
        assert same(filled(at, checkpoint_weights(fully_shard(load(at.llama), mesh=mesh))), at.llama)


@advice("Pass all tensors of one checkpoint, or write strict=False to keep the other values.")
def weights_of_which_some_are_missing(at: Place) -> Steps:
    weights, model = dict(checkpoint_weights(load(at.llama))), load(at.llama, QKV)
    some = {name: value for name, value in weights.items() if "k_proj" not in name}
    with torch.no_grad():
        model.lm_head.weight.zero_()
    yield lambda: load_checkpoint_weights(model, some)
    assert same(model, at.llama)
    load_checkpoint_weights(model, weights)
    assert same(model, at.llama)
