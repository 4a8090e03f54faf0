"""Pairs of models of one checkpoint, one as stock loads it and one under a patcher, in float64."""

from __future__ import annotations

import copy
import hashlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import BartConfig, PretrainedConfig, PreTrainedModel, T5Config

from patcher import Patcher, original_state_dict
from patcher.codegen import PatchConfig, generate
from patcher.verification.inputs import Pass, chosen_passes
from patcher.verification.passes import fitted, floating_tensors
from tests.coverage.checks import tensors_in
from tests.coverage.inputs import particular_passes
from tests.coverage.models import class_named, randomize
from tests.lockstep.patchers import patcher_named
from tests.support import tiny
from tests.support.small_configs import small_configs
from tests.support.written_modules import written_module

#: How a model comes by a patcher: at its load, in memory, or by a generated file with its effect.
WAYS = ("patcher=", "applied()", "apply()")
IN_FILE = "a file"
#: parameters of the largest model
LARGEST = 3_000_000
T5_SIZES = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
TINY: dict[str, tuple[str, PretrainedConfig]] = {
    "llama": ("LlamaForCausalLM", tiny.tiny_llama_config(attention_bias=True)),
    "tied llama": ("LlamaForCausalLM", tiny.tiny_llama_config(tie_word_embeddings=True, num_hidden_layers=3)),
    "qwen3": ("Qwen3ForCausalLM", tiny.tiny_qwen3_config()),
    "mixtral": ("MixtralForCausalLM", tiny.tiny_mixtral_config()),
    "qwen2_moe": ("Qwen2MoeForCausalLM", tiny.tiny_qwen2_moe_config()),
    "bert": ("BertForMaskedLM", tiny.tiny_bert_config()),
    "gpt2": ("GPT2LMHeadModel", tiny.tiny_gpt2_config()),
    "llava": ("LlavaForConditionalGeneration", tiny.tiny_llava_config()),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", tiny.tiny_qwen2_vl_config()),
    "bart": ("BartForConditionalGeneration", BartConfig(**tiny.ENCODER_DECODER_SIZES)),
    "t5": ("T5ForConditionalGeneration", T5Config(**T5_SIZES, feed_forward_proj="gated-gelu")),
}


class NoSubjectError(Exception):
    """Stock itself can't construct, load or run the model here."""


@dataclass
class Side:
    """One of the two models.

    Attributes:
        model: the model.
        load: how its class loads a folder.
        construct: how its class constructs a model of a config.
        run: returns its outputs.
        patcher: None for the stock model, and for a model of a generated file.
        held: returns its weights in the original layout.
        passes: what `run` runs.
    """

    model: Any
    load: Callable[..., Any]
    construct: Callable[..., Any]
    run: Callable[[Any], list[torch.Tensor]]
    patcher: Patcher | None
    held: Callable[[Any], Mapping[str, torch.Tensor]] = original_state_dict
    passes: Sequence[Pass] = ()

    @property
    def loading(self) -> dict[str, Patcher]:
        """The arguments of a load like the one that the model is from."""
        return {} if self.patcher is None else {"patcher": self.patcher}


@dataclass
class Stock:
    """What the stock model has before an operation, for both sides."""

    model: Any
    modules: tuple[str, ...]
    state_dict: Mapping[str, torch.Tensor]
    original_state_dict: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: Any) -> Stock:
        """Copies, as an operation may change the model."""
        modules = tuple(path for path, _ in model.named_modules())
        originals = {name: tensor.clone() for name, tensor in original_state_dict(model).items()}
        return cls(model, modules, {name: tensor.clone() for name, tensor in model.state_dict().items()}, originals)

    def paths(self, *names: str) -> list[str]:
        """Return the paths of modules by the last part of their path."""
        return sorted(path for path in self.modules if path.rpartition(".")[2] in names)


@dataclass
class Subject:
    """A checkpoint of a small model with random weights."""

    name: str
    folder: Path
    model_class: Any
    passes: list[Pass] = field(default_factory=list)

    @classmethod
    def write(cls, name: str, folder: Path) -> Subject:
        """Write the checkpoint of a tiny model, or of any architecture by the name of its class.

        Raises:
            NoSubjectError: if stock can't run it, it is too large, or its output is random.
        """
        class_name, config = TINY.get(name, (name, None))
        subject = cls(name, folder, class_named(class_name))
        first: Exception | None = None
        try:
            for small in small_configs(subject.model_class.config_class) if config is None else [config]:
                try:
                    subject._write(small)
                    return subject
                except Exception as error:
                    first = first or error
        except ImportError as error:  # of a config that needs another library
            first = error
        raise NoSubjectError(f"{name}: {first}") from first

    def _write(self, config: PretrainedConfig) -> None:
        with torch.device("meta"):
            if sum(parameter.numel() for parameter in self.model_class(copy.deepcopy(config)).parameters()) > LARGEST:
                raise NoSubjectError("large")
        torch.manual_seed(0)
        model = _exact(self.model_class(config))
        randomize(model)
        passes = chosen_passes(model, particular_passes(model))
        single = [chosen for chosen in passes if not chosen.calls and not chosen.learns]
        self.passes = [replace(single[0], arguments=_in_double(single[0].arguments))]
        model.save_pretrained(self.folder)
        stock = self.side()
        outputs = zip(stock.run(stock.model), stock.run(stock.model), strict=True)
        if not all(torch.equal(first, second) for first, second in outputs):  # NaN too
            raise NoSubjectError("it computes something else each time")

    def sides(self, patcher: str, way: str) -> tuple[Side, Side]:
        """Load the checkpoint as stock does, and with a patcher by its name, in one of the ways.

        Raises:
            PatcherError: if the model is refused, or a file can't have that effect.
        """
        stock = self.side()
        named = patcher_named(patcher, stock.model)
        if way == IN_FILE:
            generated = replace(self, model_class=self._class_in_file(named, stock.model.config)).side()
            stock.held = generated.held = saved_tensors
            return stock, generated
        patched = Side(None, self._load, self._construct, self._run, named, passes=self.passes)
        match way:
            case "patcher=":
                patched.model = self._load(self.folder, patcher=named)
            case "applied()":
                with named.applied():
                    patched.model = self._load(self.folder)
            case _:
                patched.model = named.apply(self._load(self.folder))
        return stock, patched

    def _class_in_file(self, patcher: Patcher, config: PretrainedConfig) -> Any:
        text = generate(PatchConfig.from_patcher(patcher, self.model_class, config=config))
        name = f"generated_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        if name not in sys.modules:  # where it stays, for pickles of its models
            sys.modules[name] = written_module(text, self.folder / f"{name}.py")
        return getattr(sys.modules[name], self.model_class.__name__)

    def side(self) -> Side:
        """Load the checkpoint as stock does."""
        return Side(self._load(self.folder), self._load, self._construct, self._run, None, passes=self.passes)

    def _load(self, folder: Any, **options: Any) -> Any:
        loaded = self.model_class.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager", **options)
        return (_exact(loaded[0]), *loaded[1:]) if isinstance(loaded, tuple) else _exact(loaded)

    def _construct(self, config: PretrainedConfig) -> Any:
        return _exact(self.model_class._from_config(copy.deepcopy(config), dtype=torch.float64))

    def _run(self, model: Any) -> list[torch.Tensor]:
        outputs = list[torch.Tensor]()
        was_training = model.training
        model.eval()  # the two sides draw other random numbers
        for one in self.passes:
            part = model.get_submodule(one.path) if one.path else model
            called = part if one.method == "forward" else getattr(part, one.method)
            outputs += floating_tensors(called(**fitted(one.arguments, model)))
        model.train(was_training)
        return outputs


def saved_tensors(model: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Return what a model saves."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **options)
        return tensors_in(Path(folder))


def _exact(model: Any) -> Any:
    """Let a model compute in float64 all it can: other implementations of experts don't."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module._can_set_experts_implementation():
            module.set_experts_implementation("eager")
    return model.eval()


def _in_double(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _in_double(item) for name, item in value.items()}
    return type(value)(map(_in_double, value)) if type(value) in (list, tuple) else value
