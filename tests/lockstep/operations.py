"""What users do to a model: each operation runs on the stock model and on the patched one, with the same choices.

    @operation
    def scale(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any: ...

An operation returns the model that it leaves. What it puts into `seen` must be equal on both sides.
"""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_model, save_model
from torch import nn
from torch.nn.utils import (
    clip_grad_norm_,
    parameters_to_vector,
    parametrizations,
    parametrize,
    prune,
    vector_to_parameters,
)
from torch.optim.swa_utils import AveragedModel

from patcher import (
    Patcher,
    checkpoint_weights,
    fused_parameters,
    load_checkpoint_weights,
    load_original_optimizer_state_dict,
    load_original_state_dict,
    original_optimizer_state_dict,
    original_state_dict,
    report,
)
from tests.coverage.checks import tensors_in
from tests.lockstep.patchers import FUSIONS
from tests.lockstep.subjects import Side, Stock, saved_tensors

Seen = dict[str, Any]
Operation = Callable[[Side, Stock, Random, Seen], Any]
#: name -> the operation
OPERATIONS: dict[str, Operation] = {}

JOINED = ["q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v", "gate_proj", "up_proj", "wi_0", "wi_1"]
OTHERS = ["o_proj", "out_proj", "down_proj", "dense", "o", "wo"]
BLOCKS = ["self_attn", "attn", "attention", "self", "encoder_attn", "SelfAttention", "EncDecAttention", "mlp"]
LISTS = ["layers", "layer", "h", "block", "blocks"]
WORDS = [*JOINED, "attn", "mlp", "norm", "embed", "experts", "layers.0", "bias"]


class NotHereError(Exception):
    """The operation makes no sense for this model."""


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__.replace("_", " ")] = function
    return function


def chosen(choice: Random, items: Iterable[Any]) -> Any:
    """Return one of some items.

    Raises:
        NotHereError: if there is none.
    """
    if not (items := list(items)):
        raise NotHereError
    return choice.choice(items)


def random_values(choice: Random, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(choice.randint(0, 1000))
    return 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)


@contextmanager
def evaluated(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


# --- values ----------------------------------------------------------------------------------------------------------


def optimizer_of(model: Any, choice: Random) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise NotHereError
    if choice.random() < 0.5:
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)


def loss_of(side: Side, model: Any) -> torch.Tensor:
    outputs = [output.double().pow(2).mean() for output in side.run(model) if output.requires_grad]
    if not outputs:
        raise NotHereError
    return torch.stack(outputs).sum()


def train(side: Side, model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(side, model).backward()
        optimizer.step()
    optimizer.zero_grad()


@operation
def training(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    train(side, side.model, optimizer_of(side.model, choice))
    return side.model


@operation
def training_with_checkpointing(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    if not side.model.supports_gradient_checkpointing:
        raise NotHereError
    side.model.gradient_checkpointing_enable()
    try:
        train(side, side.model, optimizer_of(side.model, choice))
    finally:
        side.model.gradient_checkpointing_disable()
    return side.model


@operation
def training_that_resumes(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    seed = choice.random()
    optimizer = optimizer_of(side.model, Random(seed))
    train(side, side.model, optimizer)
    state, model = original_optimizer_state_dict(side.model, optimizer), copy.deepcopy(side.model)
    resumed = optimizer_of(model, Random(seed))
    load_original_optimizer_state_dict(model, resumed, through_file(state))
    train(side, model, resumed)
    return model


@operation
def clipped_step(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    optimizer = optimizer_of(side.model, choice)
    optimizer.zero_grad()
    for _ in range(2):
        loss_of(side, side.model).backward()
    seen["norm"] = clip_grad_norm_(side.model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return side.model


@operation
def gradients(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    side.model.zero_grad()
    loss_of(side, side.model).backward()
    fused = fused_parameters(side.model)
    for name, parameter in side.model.named_parameters():
        for part in fused.get(name, ()):
            gradient = parameter.grad
            seen[part.name] = None if gradient is None else gradient.narrow(part.dim, part.start, part.length).clone()
        if name not in fused:
            seen[name] = parameter.grad
    shapes = {name: value.dim() for name, value in stock.state_dict.items()}
    for name in [name for name in seen if "expert" in name or shapes.get(name, 0) > 2]:  # of other shapes when fused
        del seen[name]
    side.model.zero_grad()
    return side.model


@operation
def scaled(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    with torch.no_grad():
        for parameter in side.model.parameters():
            parameter.mul_(1.01)
    return side.model


@operation
def frozen(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    word, trains = choice.choice(BLOCKS + ["norm", "embed_tokens", "0", "experts"]), choice.random() < 0.3
    for path in stock.paths(word):
        side.model.get_submodule(path).requires_grad_(trains)
    return side.model


@operation
def a_moving_average(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    average = AveragedModel(side.model, avg_fn=averaged)
    with torch.no_grad():
        for parameter in side.model.parameters():
            parameter.mul_(1.05)
    average.update_parameters(side.model)
    average.update_parameters(side.model)
    return average.module


def averaged(average: torch.Tensor, value: torch.Tensor, count: Any) -> torch.Tensor:
    return 0.9 * average + 0.1 * value


@operation
def through_a_vector(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    vector = parameters_to_vector(side.model.parameters())
    vector_to_parameters((1.01 * vector).detach(), side.model.parameters())
    side.model.tie_weights()
    return copy.deepcopy(side.model)


@operation
def cast(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    return side.model.float().double()


@operation
def in_shared_memory(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    return side.model.share_memory()


@operation
def counted(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    seen["parameters"] = side.model.num_parameters()
    seen["trained"] = side.model.num_parameters(only_trainable=True)
    seen["bytes"] = side.model.get_memory_footprint(return_buffers=False)
    return side.model


@operation
def another_attention(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    side.model.set_attn_implementation(choice.choice(["eager", "sdpa"]))
    return side.model


@operation
def generated(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    if not side.model.can_generate():
        raise NotHereError
    with evaluated(side.model):
        seen["tokens"] = side.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    return side.model


# --- copies and files ------------------------------------------------------------------------------------------------


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@operation
def deepcopied(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    return copy.deepcopy(copy.copy(side.model) if choice.random() < 0.5 else side.model)


@operation
def pickled(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    return pickle.loads(pickle.dumps(side.model)) if choice.random() < 0.5 else through_file(side.model)


def check_loadable(model: Any) -> None:
    """Raise NotHereError for what stock saves and doesn't load: the magnitudes of DoRA are random after a load."""
    if any("lora_magnitude_vector" in name for name, _ in model.named_parameters()):
        raise NotHereError


def loaded(side: Side, seen: Seen, *arguments: Any, **options: Any) -> Any:
    """Load a model whose weights are all there: others are random."""
    model, info = side.load(*arguments, output_loading_info=True, **options)
    if info["missing_keys"]:
        raise NotHereError
    seen |= {name: sorted(map(str, info[name])) for name in ("unexpected_keys", "mismatched_keys")}
    return model


@operation
def saved(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    """Loaded again by the same load, or by stock's."""
    check_loadable(side.model)
    size, options = choice.choice(["50KB", "5GB"]), {} if choice.random() < 0.3 else side.loading
    seen["tensors"] = saved_tensors(side.model)
    with tempfile.TemporaryDirectory() as folder:
        side.model.save_pretrained(folder, max_shard_size=size)
        return loaded(side, seen, folder, **options)


@operation
def saved_in_the_runtime_layout(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    check_loadable(side.model)
    with tempfile.TemporaryDirectory() as folder:
        if side.patcher is not None:
            side.model.save_pretrained(folder, save_original_format=False)
        if not list(Path(folder).glob("*.patcher*")):  # nothing has another layout
            side.model.save_pretrained(folder)
        return loaded(side, seen, folder)


@operation
def saved_from_a_state_dict(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    doubled = {name: 2 * value for name, value in side.model.state_dict().items()}
    seen["tensors"] = saved_tensors(side.model, state_dict=doubled)
    return side.model


@operation
def loaded_from_memory(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    state = {name: 1.1 * value for name, value in stock.original_state_dict.items()}
    return loaded(side, seen, None, config=copy.deepcopy(side.model.config), state_dict=state, **side.loading)


@operation
def loaded_with_one_layer(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    if not hasattr(side.model.config, "num_hidden_layers") or hasattr(side.model.config, "layer_types"):
        raise NotHereError
    check_loadable(side.model)
    with tempfile.TemporaryDirectory() as folder:
        side.model.save_pretrained(folder)
        return loaded(side, seen, folder, num_hidden_layers=1, **side.loading)


@operation
def saved_by_safetensors(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    model = copy.deepcopy(side.model)
    with tempfile.TemporaryDirectory() as folder, changed(copy.deepcopy(model)) as other:
        save_model(model, f"{folder}/model.safetensors")
        load_model(other, f"{folder}/model.safetensors")
    return other


@contextmanager
def changed(model: Any) -> Iterator[Any]:
    """A model whose values are to be overwritten."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    yield model
    model.tie_weights()


@operation
def own_state_dict(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    values, assign = {name: value.clone() for name, value in side.model.state_dict().items()}, choice.random() < 0.5
    with changed(copy.deepcopy(side.model)) as model:
        model.load_state_dict(values, assign=assign)
    return model


@operation
def state_dict_of_stock(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    way = choice.choice(["load_state_dict", "assign", "load_original_state_dict"])
    with changed(side.model) as model:
        if way == "load_original_state_dict":
            load_original_state_dict(model, {name: 1.1 * value for name, value in stock.original_state_dict.items()})
        else:
            values = {name: 1.1 * value for name, value in stock.state_dict.items()}
            model.load_state_dict(values, assign=way == "assign")
    return model


@operation
def some_of_the_state_dict_of_stock(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    words = choice.sample(WORDS, 3)
    values = {key: 1.1 * value for key, value in stock.state_dict.items() if any(word in key for word in words)}
    seen["unexpected"] = sorted(side.model.load_state_dict(values, strict=False).unexpected_keys)
    return side.model


@operation
def its_original_state_dict(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    values = {name: value.clone() for name, value in original_state_dict(side.model).items()}
    assign, buffers = choice.random() < 0.3, {name: value.clone() for name, value in side.model.named_buffers()}
    with changed(copy.deepcopy(side.model)) as model:
        if choice.random() < 0.5:
            model.to("meta").to_empty(device="cpu")
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        model.tie_weights()
        load_original_state_dict(model, values, assign=assign)
    return model


@operation
def the_state_dict_of_a_part(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    parents = sorted({path.rpartition(".")[0] for path in stock.modules} - {""})
    path = chosen(choice, parents)
    values = {key: 1.1 * value for key, value in stock.state_dict.items() if key.startswith(f"{path}.")}
    part, assign = side.model.get_submodule(path), choice.random() < 0.3
    part.load_state_dict({key.removeprefix(f"{path}."): value for key, value in values.items()}, assign=assign)
    return side.model


@operation
def streamed(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    weights = [(name, tensor.clone()) for name, tensor in checkpoint_weights(side.model)]
    seen |= dict(weights)
    weights.sort()
    choice.shuffle(weights)
    with changed(copy.deepcopy(side.model)) as model:
        load_checkpoint_weights(model, weights)
    return model


@operation
def constructed_and_filled(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    check_not_adapted(side.model)
    values = {name: value.clone() for name, value in original_state_dict(side.model).items()}
    with (side.patcher or Patcher()).applied():
        model = side.construct(side.model.config)
    if load_original_state_dict(model, values, strict=False).missing_keys:
        raise NotHereError
    model.tie_weights()
    return model


# --- parts -----------------------------------------------------------------------------------------------------------


def part_of(side: Side, stock: Stock, choice: Random, names: list[str]) -> tuple[Any, str, Any]:
    """Return a linear layer of the stock model, the module around it, and its name there."""
    parent, _, name = chosen(choice, stock.paths(*names)).rpartition(".")
    module = side.model.get_submodule(parent)
    linear = getattr(module, name, None)
    if not isinstance(getattr(linear, "weight", None), torch.Tensor) or linear.weight.dim() != 2:
        raise NotHereError
    return module, name, linear


@operation
def a_part_is_written(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    module, name, part = part_of(side, stock, choice, JOINED)
    way = choice.choice(["mul_", "copy_", "row", "data", "Parameter", "Linear", "load_state_dict", "requires_grad"])
    values = random_values(choice, *part.weight.shape)
    with torch.no_grad():
        match way:
            case "mul_":
                part.weight.mul_(1.5)
            case "copy_":
                part.weight.data.copy_(values)
            case "row":
                part.weight[0] = 3.0
            case "data":
                part.weight.data = values
            case "Parameter":
                part.weight = nn.Parameter(values)
            case "Linear":
                setattr(module, name, linear(values, bias=part.bias is not None))
            case "load_state_dict":
                part.load_state_dict({"weight": values}, strict=False)
            case "requires_grad":
                part.weight.requires_grad = False
    return side.model


def linear(values: torch.Tensor, *, bias: bool, of: type[nn.Linear] = nn.Linear) -> nn.Linear:
    layer = of(values.shape[1], values.shape[0], bias=bias, dtype=torch.float64)
    layer.weight.data.copy_(values)
    if bias:
        layer.bias.data.fill_(0.1)
    return layer


class Doubled(nn.Linear):
    def forward(self, *arguments: Any) -> torch.Tensor:
        return 2 * super().forward(*arguments)


@operation
def a_linear_layer_is_changed(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    module, name, part = part_of(side, stock, choice, JOINED + OTHERS)
    way, values = choice.choice(["subclass", "bias", "no bias", "hook"]), random_values(choice, *part.weight.shape)
    match way:
        case "subclass":
            setattr(module, name, linear(values, bias=False, of=Doubled))
        case "bias":
            part.bias = nn.Parameter(values[:, 0].clone())
        case "no bias":
            part.bias = None
        case "hook":
            part.register_forward_hook(scaled_output)
    return side.model


@operation
def a_part_is_pruned(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    _, _, part = part_of(side, stock, choice, JOINED + OTHERS)
    prune.l1_unstructured(part, "weight", 0.3)
    if choice.random() < 0.5:
        prune.remove(part, "weight")
    return side.model


@operation
def a_part_is_parametrized(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    _, _, part = part_of(side, stock, choice, JOINED + OTHERS)
    parametrizations.weight_norm(part)
    if choice.random() < 0.5:
        parametrize.remove_parametrizations(part, "weight")
    return side.model


@operation
def a_part_is_read(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    _, _, part = part_of(side, stock, choice, JOINED)
    seen |= {"weight": part.weight.detach().clone(), "sizes": (part.in_features, part.out_features)}
    seen["output"] = part(random_values(choice, 2, part.weight.shape[1])).detach()
    seen["bias"] = None if part.bias is None else part.bias.detach().clone()
    return side.model


# --- modules ---------------------------------------------------------------------------------------------------------


def scaled_output(module: nn.Module, arguments: Any, output: Any) -> Any:
    return (1.01 * output[0], *output[1:]) if isinstance(output, tuple) else 1.01 * output


def scaled_input(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
    if arguments:
        return (0.99 * arguments[0], *arguments[1:]), keywords
    return arguments, {**keywords, "hidden_states": 0.99 * keywords["hidden_states"]}


@operation
def a_hook_is_added(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    module = side.model.get_submodule(chosen(choice, stock.paths(*BLOCKS, *OTHERS)))
    if choice.random() < 0.5:
        module.register_forward_hook(scaled_output)
    else:
        module.register_forward_pre_hook(scaled_input, with_kwargs=True)
    return side.model


@operation
def something_is_added(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    module = side.model.get_submodule(chosen(choice, stock.paths(*BLOCKS)))
    name, kind, values = f"added_{choice.randint(0, 9)}", choice.randint(0, 3), random_values(choice, 3, 3)
    if hasattr(module, name):
        raise NotHereError
    if kind == 0:
        module.register_buffer(name, values)
    else:
        setattr(module, name, [nn.Parameter(values), values, linear(values, bias=True)][kind - 1])
    return side.model


@operation
def layers_are_rearranged(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    path = chosen(choice, stock.paths(*LISTS))
    layers, way = side.model.get_submodule(path), choice.choice(["swap", "copy", "from stock"])
    is_list = isinstance(layers, nn.ModuleList) and len(layers) > 1
    if not is_list or len({type(layer) for layer in stock.model.get_submodule(path)}) > 1:
        raise NotHereError
    last = len(layers) - 1
    if way == "swap":
        layers[0], layers[last] = layers[last], layers[0]
    elif way == "copy":
        layers[last] = copy.deepcopy(layers[0])
    else:
        layers[last] = copy.deepcopy(stock.model.get_submodule(path)[last])
    return side.model


@operation
def a_layer_has_the_values_of_another(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    path = chosen(choice, stock.paths(*LISTS))
    layers = side.model.get_submodule(path)
    if len({type(layer) for layer in stock.model.get_submodule(path)}) > 1 or len(layers) < 2:
        raise NotHereError
    layers[0].load_state_dict(layers[-1].state_dict())
    return side.model


@operation
def embeddings_are_untied(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    if not isinstance(layer := side.model.get_output_embeddings(), nn.Linear):
        raise NotHereError
    layer.weight = nn.Parameter(1.1 * layer.weight.detach())
    return side.model


@operation
def embeddings_are_resized(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    if not hasattr(side.model.config, "vocab_size"):
        raise NotHereError
    torch.manual_seed(0)
    side.model.resize_token_embeddings(choice.choice([120, 140]), mean_resizing=False)
    return side.model


# --- patchers and adapters -------------------------------------------------------------------------------------------


@operation
def the_way_back(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    return side.model if side.patcher is None else Patcher().apply(side.model)


@operation
def applied_again(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    patcher = side.patcher if choice.random() < 0.5 else choice.choice(list(FUSIONS.values()))
    return side.model if side.patcher is None else patcher.apply(side.model)


@operation
def reported(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    if side.patcher is not None:
        assert str(report(side.model))
        assert report(side.model).to_dict()
    return side.model


def check_not_adapted(model: Any) -> None:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise NotHereError


def adapter(side: Side, stock: Stock, choice: Random) -> LoraConfig:
    """A config whose names mean the same layers on both sides: those of experts are there in one layout only."""
    check_not_adapted(side.model)
    names = {path.rpartition(".")[2] for path in stock.paths(*JOINED, *OTHERS)}
    if any(path.endswith("experts") for path in stock.modules):
        names -= {"gate_proj", "up_proj", "down_proj"}
    targets = [chosen(choice, sorted(names)) for _ in range(2)]
    return LoraConfig(r=2, target_modules=targets, init_lora_weights=False, use_dora=choice.random() < 0.2)


def fill_adapters(model: Any, choice: Random, prefix: str = "lora_") -> None:
    for name, parameter in sorted(model.named_parameters()):
        if prefix in name:
            parameter.data = random_values(choice, *parameter.shape)


@operation
def an_adapter_is_added(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    side.model.add_adapter(adapter(side, stock, choice))
    fill_adapters(side.model, choice)
    return side.model


@operation
def an_adapter_is_merged(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    model, merges = get_peft_model(side.model, adapter(side, stock, choice)), choice.random() < 0.7
    fill_adapters(model, choice)
    train(side, model, optimizer_of(model, choice), steps=1)
    base = model.merge_and_unload() if merges else model.unload()
    return base.requires_grad_(True)


@operation
def an_adapter_is_loaded(side: Side, stock: Stock, choice: Random, seen: Seen) -> Any:
    an_adapter_is_added(side, stock, choice, seen)
    check_loadable(side.model)
    with tempfile.TemporaryDirectory() as folder:
        side.model.save_pretrained(folder)
        seen["tensors"] = tensors_in(Path(folder))
        side.model.delete_adapter("default")
        side.model.load_adapter(folder)
    return side.model
