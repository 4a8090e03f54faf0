"""Definitions that are copied into generated files, so that these need torch and transformers only.

>>> parts = nn.Linear(4, 6), nn.Linear(4, 2)
>>> joined = nn.Linear(4, 8)
>>> joined.load_state_dict({"weight": torch.cat([part.weight for part in parts]), "bias": torch.zeros(8)})
<All keys matched successfully>
>>> torch.equal(JoinedPart(joined, 6, 2).weight, parts[1].weight)
True

They are copied one by one. So each uses nothing of this package, keeps its name, and is written for readers of those
files.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from copy import deepcopy
from itertools import accumulate

import torch
from torch import nn
from transformers import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

#: Set in each generated file: the prefix of the class names for which conversions are registered, the names of the
#: classes with converted parameters, and the keys of the conversions of transformers that determine the order of a
#: checkpoint.
OWN_NAME, CONVERTED, STOCK_CONVERSIONS = "", (), ()


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Refit(ConversionOps):
    """Converts original tensors by `forth`, and back by `back`: both take and return a list for each pattern."""

    is_back = False

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name="", model=None, **kwargs):
        inputs = [input_dict[name] for name in source_patterns if name in input_dict] or [*input_dict.values()]
        inputs = [tensors if isinstance(tensors, list) else [tensors] for tensors in inputs]
        name = full_layer_name.replace(target_patterns[0], source_patterns[0]) if self.is_back else full_layer_name
        outputs = (self.back if self.is_back else self.forth)(inputs, len(target_patterns), model, name)
        named = zip(target_patterns, outputs, strict=True)
        return {target.replace("*", str(n)): [tensor] for target, tensors in named for n, tensor in enumerate(tensors)}

    @property
    def reverse_op(self):
        reverse = deepcopy(self)
        reverse.is_back = not self.is_back
        return reverse


class JoinRows(Refit):
    """Concatenates the rows of several layers; the module of the joined layer has the numbers of rows."""

    def forth(self, inputs, *args):
        return [[torch.cat([rows for (rows,) in inputs])]]

    def back(self, inputs, count, model, name):
        owner, layer = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)
        sizes = getattr(model.get_submodule(owner), f"{layer}_sizes")
        return [[rows.clone()] for rows in inputs[0][0].split(sizes)]


class FlattenKernel(Refit):
    """Flattens the kernel of a convolution to the weight of a linear layer over patches."""

    def forth(self, inputs, *args):
        return [[inputs[0][0].flatten(1)]]

    def back(self, inputs, count, model, name):
        return [[inputs[0][0].view(model.get_submodule(name.removesuffix(".linear.weight")).kernel_shape)]]


class SplitExperts(Refit):
    """Splits the stacked parameter of all experts; with `either` it is transposed if its shape says so."""

    def __init__(self, transposed=False, interleaved=False, either=False):
        self.transposed, self.interleaved, self.either = transposed, interleaved, either

    def forth(self, inputs, count, model, name):
        ((whole,),) = inputs
        is_transposed = self.either and whole.shape[-1] != model.get_parameter(name).shape[-1]
        whole = whole.transpose(1, 2) if self.transposed or is_transposed else whole
        parts = [whole[:, n::count] for n in range(count)] if self.interleaved else whole.chunk(count, dim=1)
        return [[expert.clone(memory_format=torch.contiguous_format) for expert in part] for part in parts]

    def back(self, inputs, *args):
        parts = [torch.stack(part) for part in inputs]
        whole = torch.stack(parts, dim=2).flatten(1, 2) if self.interleaved else torch.cat(parts, dim=1)
        return [[whole.transpose(1, 2).contiguous() if self.transposed else whole]]


class ExpertsConverter(WeightConverter):
    """A converter whose targets are parameters of all experts, found by those of the first one."""

    def rename_source_key(self, source_key):
        renamed, pattern = super().rename_source_key(source_key)
        return renamed.replace("*", "0"), pattern

    def convert(self, layer_name, model=None, config=None, loading_info=None, **kwargs):
        """Quantize each layer by itself, as some quantizers take the first of several and drop the others."""
        operation, self.quantization_operation = self.quantization_operation, None
        layers = super().convert(layer_name, model, config, loading_info=loading_info, **kwargs)
        if operation is None:
            return layers
        self.quantization_operation, result = operation, {}  # transformers refuses to reverse it
        shared = {"model": model, "config": config, "missing_keys": loading_info.missing_keys}
        shared |= {"source_patterns": self.source_patterns, "target_patterns": self.target_patterns}
        for name, tensors in layers.items():
            result |= operation.convert({name: tensors}, full_layer_name=name, **shared)
        return result


def converted(model, state_dict, conversions, renamed_first):
    """Convert a state dict: renamings, then at most one converter for each key, or the converter first."""
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    before, after = (renamings, []) if renamed_first else ([], renamings)
    result, collected = {}, {}
    for key in sorted(state_dict, key=dot_natural_key):
        name, pattern = rename_source_key(key, before, converters)
        if pattern is None:
            result[rename_source_key(name, after, [])[0]] = state_dict[key]
        else:
            converter = collected.setdefault(name, deepcopy(by_pattern[pattern]))
            converter.add_tensor(name, key, pattern, state_dict[key])
    for name, converter in collected.items():
        for target, tensor in converter.convert(name, model=model, config=model.config).items():
            result[rename_source_key(target, after, [])[0]] = tensor[0] if isinstance(tensor, list) else tensor
    return result


class OriginalCheckpoints:
    """Models that load, resume from and save checkpoints of the original model."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load a checkpoint of the original."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).check_conversions()
        return loaded

    def check_conversions(self):
        """Raise for converted parameters in a model that has no conversions."""
        converted, around = {globals()[name] for name in CONVERTED}, {}  # model -> whether it has conversions
        for path, module in self.named_modules():
            if isinstance(module, OriginalCheckpoints):
                around[path] = type(module).__name__.startswith(OWN_NAME) and type(module).__module__ == __name__
            owners = [owner for owner in around if f"{path}.".startswith(f"{owner}." if owner else "")]
            if type(module) in converted and not any(around[owner] for owner in owners):
                name = type(self.get_submodule(owners[-1])).__name__
                reason = f"has no conversions, which go by names, for its {type(module).__name__}"
                raise NotImplementedError(f"{name} {reason}: load another model of this file, or the original one.")

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Load a checkpoint of the original too, as `Trainer` does when it resumes."""
        names = self.state_dict().keys()
        if others := {key: tensor for key, tensor in state_dict.items() if key not in names}:
            own = {key: tensor for key, tensor in state_dict.items() if key in names}
            state_dict = own | self.in_own_layout(others)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def in_own_layout(self, state_dict):
        """Convert a checkpoint of the original, as a load does."""
        conversions = get_model_conversion_mapping(self, add_legacy=False)
        return converted(self, state_dict, conversions, renamed_first=True)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Raise for layers of the original, such as those of an adapter, which torch would ignore."""
        names, unknown = {name for name, _ in self.named_modules()}, {}  # layer -> its first key
        for key in state_dict:
            for layer in accumulate(key.removeprefix(prefix).split(".")[:-1], "{}.{}".format):
                if layer not in names:
                    unknown.setdefault(layer, key)
        conversions = get_model_conversion_mapping(self, add_legacy=False) if unknown else []
        converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        for layer, key in unknown.items():
            if rename_source_key(f"{layer}.weight", [], converters)[1] is not None:
                raise RuntimeError(f"{key} is for a layer of the original model only: load it into that.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def in_original_layout(self, state_dict):
        """Reverse the conversions of the load, for a checkpoint of the original."""
        conversions = getattr(self, "_weight_conversions", None)
        known = get_model_conversion_mapping(self, add_legacy=False)
        if conversions is None:  # it wasn't loaded
            self.check_conversions()
            conversions = [conversion for conversion in known if not isinstance(conversion, PrefixChange)]
        else:  # also those of layers that the checkpoint didn't have
            converters = [conversion for conversion in known if isinstance(conversion, WeightConverter)]
            conversions = conversions + [
                item for item in converters if type(item.operations[0]).__module__ == __name__
            ]
        conversions = [conversion.reverse_transform() for conversion in reversed(conversions)]
        return converted(self, state_dict, conversions, renamed_first=False)

    def in_original_order(self, state_dict):
        """Sort a checkpoint by its names, as the original does when it saves."""
        return {key: state_dict[key] for key in sorted(state_dict, key=dot_natural_key)}

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, **kwargs):
        """Save a checkpoint of the original."""
        is_offloaded = {"cpu", "disk"}.intersection(getattr(self, "hf_device_map", {}).values())
        is_special = is_offloaded or getattr(self, "peft_config", None) or hasattr(self, "_patcher_record")
        if kwargs.get("save_original_format", True) and not is_special:
            state_dict = self.state_dict() if state_dict is None else state_dict
            state_dict = remove_tied_weights_from_state_dict(state_dict, self)
            state_dict = self.in_original_order(self.in_original_layout(state_dict))
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        name = next(cls.__name__ for cls in type(self).__mro__ if cls.__module__ == __name__).removeprefix(OWN_NAME)
        if is_main_process and name != type(self).__name__:  # the config has the name of the original class
            self.config.architectures = [name]
            self.config.save_pretrained(save_directory)

    @classmethod
    def prepare_distribute_model(cls, *args, **kwargs):
        """Raise for a load on several processes, as the plans of the original have names of its layers."""
        reason = "is of a generated file, whose layers a distributed_config or tp_plan of the original doesn't fit"
        raise NotImplementedError(f"{cls.__name__} {reason}. Load it whole, or load the original model.")


class ConvertedCheckpoints(OriginalCheckpoints):
    """Models of an original that converts checkpoints itself, so these aren't sorted by their own names."""

    def conversions_of_original(self, kind):
        """Return the conversions of a kind that make parameters of the original of a checkpoint."""
        mappings = (get_checkpoint_conversion_mapping(key) or () for key in STOCK_CONVERSIONS)
        conversions = [item for mapping in mappings for item in mapping if isinstance(item, kind)]
        return [item for item in conversions if not item.source_patterns[0].startswith("^")]

    def in_own_layout(self, state_dict):
        """Convert parameters of the original too, by way of the names of a checkpoint."""
        converters = self.conversions_of_original(WeightConverter)
        renaming = [item for item in converters if item.source_patterns != item.target_patterns]
        back = [item.reverse_transform() for item in reversed(renaming)]
        return super().in_own_layout(converted(self, state_dict, back, renamed_first=False))

    def in_original_order(self, state_dict):
        """Sort a checkpoint by the original's parameters, as the original does when it saves."""
        renamings, converters = map(self.conversions_of_original, (WeightRenaming, WeightConverter))
        targets = {pattern: item.target_patterns for item in converters for pattern in item.source_patterns}

        def position(key):
            name, pattern = rename_source_key(key, renamings, converters)
            first, *others = targets.get(pattern, [""])
            names = [name, *(name.replace(first, other) for other in others)]
            return min(map(dot_natural_key, names)), [*targets, None].index(pattern), dot_natural_key(key)

        return {key: state_dict[key] for key in sorted(state_dict, key=position)}


# --- layers ---------------------------------------------------------------------------------------------------------


class JoinedPart:
    """One of several joined linear layers, with its rows as weight and bias."""

    def __init__(self, joined, start, size, bias=None):
        rows = slice(start, start + size)
        self.weight, self.bias = joined.weight[rows], bias if joined.bias is None else joined.bias[rows]
        for part, whole in ((self.weight, joined.weight), (self.bias, joined.bias)):
            if part is not None and whole is not None:  # or transformers would initialize it
                part._is_hf_initialized = getattr(whole, "_is_hf_initialized", False)

    def __call__(self, hidden_states):
        return nn.functional.linear(hidden_states, self.weight, self.bias)


class SharedInput:
    """Joined layers during one forward: a single matmul for all parts that are called with the same tensor.

    The joined layer is called with the first input. A part that is called with that very tensor gets its slice of the
    product, and any other call is computed separately.
    """

    def __init__(self, module, parts, joined) -> None:
        self.module, self.parts, self.joined = module, parts, joined
        self.input, self.products, self.given = None, (), []

    def __call__(self, name, features):
        module = self.module
        if features is not self.input:
            if self.input is not None and name not in self.given:
                return getattr(module, name)(features)
            # The first input, or the next one of a sequence of inputs.
            self.input, self.given = features, []
            product = getattr(module, self.joined)(features)
            self.products = product.split(getattr(module, f"{self.joined}_sizes"), dim=-1)
        self.given.append(name)
        part, bias = self.products[self.parts.index(name)], getattr(module, f"{name}_bias", None)
        # Under autocast the product has another dtype than the bias.
        return part if bias is None else part + bias.to(part.dtype)


def are_values(given) -> bool:
    """Whether all are tensors, numbers, texts, caches or containers of these."""
    for value in given:
        if isinstance(value, dict):
            if not are_values(value.values()):
                return False
        elif isinstance(value, list | tuple):
            if not are_values(value):
                return False
        elif value is not None and not isinstance(value, torch.Tensor | int | float | str | Cache):
            return False
    return True


class LinearPatchEmbedding(nn.Module):
    """A convolution with stride = kernel size as a linear layer over patches.

    It has the arguments and attributes of the convolution. Images of several patches are convolved with the same
    weight.
    """

    def __init__(self, in_channels, out_channels, kernel_size, stride=None, padding=0, bias=True, *, rank=2):
        super().__init__()
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, 1
        self.kernel_size = (kernel_size,) * rank if isinstance(kernel_size, int) else tuple(kernel_size)
        strides = (stride,) * rank if isinstance(stride, int) else tuple(stride or (1,) * rank)
        if strides != self.kernel_size or padding not in (0, "valid", (0,) * rank):
            raise ValueError(f"patches of {self.kernel_size} at steps of {strides}, padded {padding}, aren't apart")
        self.stride, self.padding, self.dilation = self.kernel_size, (0,) * rank, (1,) * rank
        self.linear = nn.Linear(in_channels * math.prod(self.kernel_size), out_channels, bias=bias)
        self.kernel_shape = (out_channels, in_channels, *self.kernel_size)
        self.dtype = self.linear.weight.dtype

    @property
    def weight(self):
        weight = self.linear.weight
        if weight.dtype.itemsize == 1 or type(weight) is not nn.Parameter:  # quantized
            kernel = torch.empty((), dtype=self.dtype, device=weight.device).expand(self.kernel_shape)
            kernel._is_hf_initialized = True
        else:
            kernel = weight.view(self.kernel_shape)
            kernel._is_hf_initialized = getattr(weight, "_is_hf_initialized", False)
        return kernel

    @property
    def bias(self):
        return self.linear.bias

    def is_plain(self):
        return type(self.linear) is nn.Linear

    def forward(self, images):
        rank = len(self.kernel_size)
        if images.dim() == rank + 1:
            return self(images.unsqueeze(0)).squeeze(0)
        counts = [size // patch for size, patch in zip(images.shape[2:], self.kernel_size, strict=True)]
        if max(counts) > 1 and self.is_plain():
            convolve = nn.functional.conv2d if rank == 2 else nn.functional.conv3d
            return convolve(images, self.linear.weight.view(self.kernel_shape), self.bias, self.stride)
        for axis, patch in enumerate(self.kernel_size, 2):
            images = images.unfold(axis, patch, patch)
        # (batch, channels, *counts, *kernel_size) -> (batch, *counts, channels, *kernel_size)
        patches = images.movedim(1, 1 + rank)
        width = self.in_channels * math.prod(self.kernel_size)
        output = self.linear(patches.reshape(patches.shape[0] * math.prod(counts), width))
        return output.view(patches.shape[0], *counts, self.out_channels).movedim(-1, 1)


class ExpertLayers(nn.Module):
    """The layers of an expert. It is called, so that hooks on it run."""

    def forward(self, rows, run):
        return run(self, rows)


class ListedExperts(nn.Module):
    """Experts as modules: the children whose names are indices. It is indexed as a list."""

    def __len__(self):
        return sum(name.isdigit() for name in self._modules)

    def __iter__(self):
        return iter([self[index] for index in range(len(self))])

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = int(index)
        name = str(position + len(self) if position < 0 else position)
        if name not in self._modules or name.startswith("-"):
            raise IndexError(f"expert {position} of {len(self)}")
        return self._modules[name]

    def every_expert_runs(self) -> bool:
        """Whether experts without tokens run on zero rows too, so that their gradients are zero and not None."""
        is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # since torch 2.7
        if is_exporting() or any(hasattr(parameter, "placements") for parameter in self.parameters()):
            return True
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
