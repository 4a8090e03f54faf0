"""Replacements that can't be built, or can't be followed, as a load builds them."""

from __future__ import annotations

import contextlib
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.utils.deprecation import deprecate_kwarg

from patcher import Patcher
from patcher.construction import lock
from tests.project.advice import OwnMLP, Place, Steps, advice, load, same, written
from tests.support.replacements import OfOlderReleases
from tests.support.shared import checkpoint
from tests.support.tiny import tiny_llama_config

QKV = Patcher(fusions="qkv")


def instead_of_mlp(cls: type[nn.Module], **options: Any) -> Patcher:
    return Patcher({"LlamaMLP": cls}, **options)


class NoBeginning(LlamaMLP):
    def __init__(self, config: Any) -> None:
        self.config = config


class Beginning(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config = config


@advice("{}.__init__ doesn't call super().__init__(), so there is no module to put into the model: call it first.")
def an_init_that_does_not_call_that_of_the_module(at: Place) -> Steps:
    yield lambda: load(at.llama, instead_of_mlp(NoBeginning))
    assert same(load(at.llama, instead_of_mlp(Beginning)), at.llama)


class Flat(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.empty(out_features * in_features))


class FlatInForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return input @ self.weight.flatten().view(self.weight.shape).T


@advice("Keep the parameter in the replacement, under its name and in its shape, and compute from it in forward.")
def a_replacement_without_the_parameter_that_is_tied(at: Place) -> Steps:
    folder = checkpoint(tiny_llama_config(tie_word_embeddings=True))
    yield lambda: load(folder, Patcher(module_mapping={"lm_head": Flat}))
    assert same(load(folder, Patcher(module_mapping={"lm_head": FlatInForward})), folder)


class OfBoth(LlamaMLP):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(args[0] if args else kwargs.get("x", kwargs.get("states")))


@advice("Call it {}; for older releases too, take kwargs.get({}, kwargs.get({})).")
def a_parameter_under_the_name_of_older_releases(at: Place) -> Steps:
    """What transformers 5.24 did to caches, `past_key_values` before, to the parameter of an MLP."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LlamaMLP, "forward", deprecate_kwarg("states", "99.0.0", new_name="x")(LlamaMLP.forward))
        yield lambda: load(at.llama, instead_of_mlp(OfOlderReleases))
        assert same(load(at.llama, instead_of_mlp(OfBoth)), at.llama)


class LinearLike(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class Attending(nn.Module):
    """Has what nobody can tell the arguments of."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(config.hidden_size, 1)
        self.mlp = LlamaMLP(config)


class OwnAttending(Attending):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = LinearLike()


class AttendingConfig(PretrainedConfig):
    model_type = "advised-attention"
    hidden_size = 8


class AttendingModel(PreTrainedModel):
    config_class = AttendingConfig

    def __init__(self, config: Any, attending: type[nn.Module] = Attending) -> None:
        super().__init__(config)
        self.layer = attending(tiny_llama_config())
        self.shared = nn.Linear(2, 2)
        self.again = self.shared
        self.copied = copy.deepcopy(self.layer.mlp)
        self.post_init()


class OwnAttendingModel(AttendingModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.copied = LinearLike()


def attending(**given: Any) -> Any:
    with Patcher(**given).applied():
        return AttendingModel(AttendingConfig())


@advice("and that isn't among its attributes. {}", "Replace what is around it, {}, by a class that builds it.")
def a_module_of_torch_with_arguments_that_nobody_knows(at: Place) -> Steps:
    said = yield lambda: attending(module_mapping={"layer.inner": LinearLike})
    path = written(said, "around it, ('.*'), by")
    assert type(attending(module_mapping={path: OwnAttending}).layer.inner) is LinearLike


@advice("there aren't known: it is {}. {}", "Give the class of the model another in a class_mapping, one that ")
def a_part_of_the_model_with_arguments_that_nobody_knows(at: Place) -> Steps:
    yield lambda: attending(module_mapping={"copied": LinearLike})
    assert type(attending(class_mapping={"AttendingModel": OwnAttendingModel}).copied) is LinearLike


@advice("is replaced where both are named; add {} with the same class")
def one_module_at_two_paths(at: Place) -> Steps:
    other = type("Other", (LinearLike,), {})
    said = yield lambda: attending(module_mapping={"shared": LinearLike})
    path = written(said, "add ('.*') with")
    yield lambda: attending(module_mapping={"shared": LinearLike, path: other})
    model = attending(module_mapping={"shared": LinearLike, path: LinearLike})
    assert type(model.shared) is type(model.again) is LinearLike


class Calling(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.noted = True
        return made


@advice("existing object becomes one of the replacement. Move its code into __init__.")
def a_model_with_a_metaclass(at: Place) -> Steps:
    class Called(LlamaForCausalLM, metaclass=Calling):
        pass

    class Noted(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.noted = True

    yield lambda: load(at.llama, Patcher({"LlamaForCausalLM": Called}))
    model = load(at.llama, Patcher({"LlamaForCausalLM": Noted}))
    assert model.noted
    assert same(model, at.llama)


class GivenAnInit(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)


class Factory(LlamaPreTrainedModel):
    def __new__(cls, config: Any) -> Any:
        return LlamaForCausalLM(config)


@advice("Load it without the quantizer, or without the patcher.")
def a_quantizer_for_a_class_that_constructs_another(at: Place) -> Steps:
    quantizer = BitsAndBytesConfig(load_in_8bit=True)
    yield lambda: Factory.from_pretrained(at.llama, patcher=QKV, quantization_config=quantizer)
    assert same(Factory.from_pretrained(at.llama, patcher=QKV), at.llama)
    assert Factory.from_pretrained(at.llama, quantization_config=quantizer).is_quantized


@advice("or another tool has replaced its __init__. Define it, and use that tool, before the block begins.")
def a_model_whose_init_is_replaced_in_a_block(at: Place) -> Steps:
    stock = GivenAnInit.__init__

    def by_the_tool(self: Any, config: Any) -> None:
        LlamaForCausalLM.__init__(self, config)

    def wrong() -> None:
        with instead_of_mlp(OwnMLP).applied():
            GivenAnInit.__init__ = by_the_tool  # type: ignore[method-assign]
            GivenAnInit(tiny_llama_config())

    try:
        yield wrong
        with instead_of_mlp(OwnMLP).applied():
            assert type(GivenAnInit(tiny_llama_config()).model.layers[0].mlp) is OwnMLP
        assert GivenAnInit.__init__ is by_the_tool
    finally:
        GivenAnInit.__init__ = stock  # type: ignore[method-assign]


# --- what is computed ----------------------------------------------------------------------------------------------


class Lengths(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("lengths", self.gate_proj.weight.detach().norm(dim=1), persistent=False)


class LengthsInForward(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lengths = self.gate_proj.weight.detach().float().norm(dim=1)
        return super().forward(x)


class ZerosLike(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.delta = nn.Parameter(torch.zeros_like(self.gate_proj.weight))


class Zeros(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.delta = nn.Parameter(torch.zeros(self.gate_proj.weight.shape))


@advice("and shapes are wanted, parameters are on the meta device, without values: compute it in forward. What ")
def a_value_of_a_weight(at: Place) -> Steps:
    yield lambda: load(at.llama, instead_of_mlp(Lengths))
    model = load(at.llama, instead_of_mlp(LengthsInForward))
    model(input_ids=torch.tensor([[3, 4]]))
    assert model.model.layers[0].mlp.lengths.any()
    said = yield lambda: load(at.llama, instead_of_mlp(ZerosLike, new_weights="delta"))
    assert said.endswith("is made from that: torch.zeros(weight.shape), not torch.zeros_like(weight).")
    assert not load(at.llama, instead_of_mlp(Zeros, new_weights="delta")).model.layers[0].mlp.delta.any()


class Taught(LlamaMLP):
    """Has a model in it, which it loads itself or is given."""

    source: Any = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        is_model = isinstance(self.source, nn.Module)
        self.teacher = self.source if is_model else LlamaForCausalLM.from_pretrained(self.source)


@advice("transformers doesn't load a model inside of another one: load it before, and let __init__ take that object.")
def a_load_inside_of_a_load(at: Place) -> Steps:
    inside = type("Inside", (Taught,), {"source": at.llama})
    yield lambda: load(at.llama, instead_of_mlp(inside, new_weights="teacher"))
    teacher = load(at.llama)
    given = type("Given", (Taught,), {"source": teacher})
    model = load(at.llama, instead_of_mlp(given, new_weights="teacher"))
    assert model.model.layers[0].mlp.teacher is teacher
    assert same(model, at.llama)
    assert same(teacher, at.llama)


# --- threads, and what else takes part -----------------------------------------------------------------------------


@advice("load that model first, and pass it in.")
def an_init_that_waits_for_a_load(at: Place) -> Steps:
    failed: list[BaseException] = []

    def attempt() -> None:
        try:
            load(at.llama)
        except BaseException as error:
            failed.append(error)

    class Waiting(LlamaMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if not failed:
                thread = threading.Thread(target=attempt)
                thread.start()
                thread.join()

    def wrong() -> None:
        load(at.llama, instead_of_mlp(Waiting))
        raise failed[0]

    seconds = lock.WAIT_SECONDS
    lock.WAIT_SECONDS = 1.0
    try:
        yield wrong
    finally:
        lock.WAIT_SECONDS = seconds
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(load, at.llama).result()
    handed = type("Handed", (Taught,), {"source": before})
    assert same(load(at.llama, instead_of_mlp(handed, new_weights="teacher")), at.llama)


@advice(
    "Load the model before the ZeRO-3 config is created (HfDeepSpeedConfig, or TrainingArguments with deepspeed=), or "
)
def a_load_while_parameters_are_partitioned(at: Place) -> Steps:
    def stage(number: int) -> HfDeepSpeedConfig:
        config = HfDeepSpeedConfig({"zero_optimization": {"stage": number}, "train_micro_batch_size_per_gpu": 1})
        set_hf_deepspeed_config(config)  # which holds it weakly
        return config

    model = load(at.llama, QKV)
    try:
        kept = stage(3)
        said = yield lambda: load(at.llama, QKV)
        assert said.endswith("or use ZeRO stage 2.")
        kept = stage(2)
        assert same(load(at.llama, QKV), at.llama)
        del kept
    finally:
        unset_hf_deepspeed_config()
    assert same(model, at.llama)


class NoModelInit(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        self.config = config


class ModelInit(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)


@advice("follow it: derive it from PreTrainedModel, and call super().__init__(config).")
def a_model_that_does_not_begin_as_one(at: Place) -> Steps:
    yield lambda: NoModelInit.from_pretrained(at.llama, patcher=instead_of_mlp(OwnMLP))
    assert same(ModelInit.from_pretrained(at.llama, patcher=instead_of_mlp(OwnMLP)), at.llama)


class Body(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mlp = LlamaMLP(config)


class BodyThatEnds(Body):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.post_init()


@advice("are tied: let it end with that call.")
def a_model_that_does_not_end_as_one(at: Place) -> Steps:
    patched = instead_of_mlp(OwnMLP)
    BodyThatEnds(tiny_llama_config()).save_pretrained(at.tmp)
    yield lambda: Body.from_pretrained(at.tmp, patcher=patched)
    assert type(BodyThatEnds.from_pretrained(at.tmp, patcher=patched).mlp) is OwnMLP
    yield lambda: Body._from_config(tiny_llama_config(), patcher=patched)
    assert type(BodyThatEnds._from_config(tiny_llama_config(), patcher=patched).mlp) is OwnMLP


class NoContexts(LlamaForCausalLM):
    @classmethod
    def get_init_context(cls, *args: Any, **kwargs: Any) -> Any:
        return [torch.device("meta")]


class MoreContexts(LlamaForCausalLM):
    @classmethod
    def get_init_context(cls, *args: Any, **kwargs: Any) -> Any:
        return [*super().get_init_context(*args, **kwargs), contextlib.nullcontext()]


@advice("so nothing was patched: let it return those of super().get_init_context(...) as well.")
def a_model_that_is_built_in_other_contexts(at: Place) -> Steps:
    yield lambda: NoContexts.from_pretrained(at.llama, patcher=QKV)
    assert same(MoreContexts.from_pretrained(at.llama, patcher=QKV), at.llama)
