"""What generated files hold besides patched code, so that they need torch and transformers only.

>>> parts = nn.Linear(4, 6), nn.Linear(4, 2)
>>> joined = nn.Linear(4, 8)
>>> joined.load_state_dict({"weight": torch.cat([each.weight for each in parts]), "bias": torch.zeros(8)})
<All keys matched successfully>
>>> torch.equal(JoinedPart(joined, 6, 2).weight, parts[1].weight)
True

The generator copies definitions of this module into the files, one by one. So each uses nothing of this package, its
names stay, and its text is for the readers of those files.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import nn
from transformers import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

#: What the generator writes once for each file: the prefix of the class names under which conversions are registered,
#: and the keys under which transformers has those that the order of a checkpoint follows.
OWN_NAME, STOCK_CONVERSIONS = "", ()


# --- checkpoints ----------------------------------------------------------------------------------------------------


class SplitRows(ConversionOps):
    """One layer as the checkpoint's several; the modules that have such layers say how many rows are whose."""

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name, model, **kwargs):
        (rows,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        joined = full_layer_name.replace(target_patterns[0], source_patterns[0]).removesuffix(".weight")
        owner, _, name = joined.removesuffix(".bias").rpartition(".")
        listed = {tuple(getattr(each, f"{name}_sizes", ())) for each in model.modules()}
        sizes = [each for each in listed if sum(each) == len(rows)]
        if len(sizes) != 1:  # this layer's: by its name, which isn't yet that of the checkpoint
            sizes = [getattr(model.get_submodule(owner), f"{name}_sizes")]
        return {part: piece.clone() for part, piece in zip(target_patterns, rows.split(sizes[0]), strict=True)}

    @property
    def reverse_op(self):
        return JoinRows()


class JoinRows(Concatenate):
    """Several of the checkpoint's layers as one, row by row."""

    @property
    def reverse_op(self):
        return SplitRows()


class UnflattenKernel(ConversionOps):
    """The weight of a linear layer as that of the convolution that it computes."""

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, model, **kwargs):
        (weight,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        layers = [each for each in model.modules() if isinstance(each, LinearPatchEmbedding)]
        shapes = {each.kernel_shape for each in layers if each.linear.weight.shape == weight.shape}
        if len(shapes) != 1:
            raise ValueError(f"a weight of {tuple(weight.shape)} can't be told apart: such layers have {shapes}")
        (shape,) = shapes
        return {target_patterns[0]: weight.view(shape)}

    @property
    def reverse_op(self):
        return FlattenKernel()


class FlattenKernel(ConversionOps):
    """The kernel of a convolution as the weight of a linear layer over flattened patches."""

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        (kernel,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        return {target_patterns[0]: kernel.flatten(1)}

    @property
    def reverse_op(self):
        return UnflattenKernel()


class StackExperts(ConversionOps):
    """Parameters of each expert as the checkpoint's one of all experts."""

    def __init__(self, transposed=False, interleaved=False, either=False):
        self.transposed, self.interleaved, self.either = transposed, interleaved, either

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        parts = [torch.stack(input_dict[pattern]) for pattern in source_patterns]
        if self.interleaved:
            whole = torch.stack(parts, dim=2).flatten(1, 2)
        else:
            whole = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return {target_patterns[0]: whole.transpose(1, 2).contiguous() if self.transposed else whole}

    @property
    def reverse_op(self):
        return SeparateExperts(self.transposed, self.interleaved, self.either)


class SeparateExperts(StackExperts):
    """The checkpoint's one parameter of all experts as those of each; `either` way round, by its shape."""

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name, model, **kwargs):
        (whole,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        is_other = self.either and whole.shape[-1] != model.get_parameter(full_layer_name).shape[-1]
        whole = whole.transpose(1, 2) if self.transposed or is_other else whole
        count = len(target_patterns)
        parts = [whole[:, n::count] for n in range(count)] if self.interleaved else whole.chunk(count, dim=1)
        return {
            pattern.replace("*", str(number)): piece.clone(memory_format=torch.contiguous_format)
            for pattern, part in zip(target_patterns, parts, strict=True)
            for number, piece in enumerate(part)
        }

    @property
    def reverse_op(self):
        return StackExperts(self.transposed, self.interleaved, self.either)


class ExpertsConverter(WeightConverter):
    """A converter whose targets are parameters of every expert; the first of them stands for all."""

    def rename_source_key(self, source_key):
        renamed, pattern = super().rename_source_key(source_key)
        return renamed.replace("*", "0"), pattern


def converted(model, state_dict, conversions, renamed_first):
    """A state dict after conversions: renamings, then one converter at most, or the other way round."""
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
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


def in_own_layout(model, state_dict):
    """A state dict whose tensors of the original's checkpoints have become those that the model has."""
    known = model.state_dict().keys()
    if state_dict.keys() <= known:
        return state_dict
    others = {key: tensor for key, tensor in state_dict.items() if key not in known}
    own = {key: tensor for key, tensor in state_dict.items() if key in known}
    return own | converted(model, others, get_model_conversion_mapping(model, add_legacy=False), True)


def in_original_layout(model, state_dict):
    """A state dict as the original's checkpoints have it: what its load has converted, the other way round."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # it wasn't loaded
        for kind in {type(each) for each in model.modules() if type(each).__module__ != __name__}:
            if any(each.__module__ == __name__ and each.__name__.startswith(OWN_NAME) for each in kind.__mro__):
                raise NotImplementedError(f"{kind.__name__} has no conversions, which go by names. Load a checkpoint.")
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [each for each in conversions if not isinstance(each, PrefixChange)]
    return converted(model, state_dict, [each.reverse_transform() for each in reversed(conversions)], False)


def in_original_order(state_dict):
    """A checkpoint in the order of the original's parameters, in which that one writes it, file by file."""
    conversions = [each for key in STOCK_CONVERSIONS for each in get_checkpoint_conversion_mapping(key) or ()]
    conversions = [each for each in conversions if not each.source_patterns[0].startswith("^")]
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    targets = {pattern: each.target_patterns for each in converters for pattern in each.source_patterns}

    def place(key):
        name, pattern = rename_source_key(key, renamings, converters)
        first, *others = targets.get(pattern, [""])
        names = [name, *(name.replace(first, each) for each in others)]
        return min(map(dot_natural_key, names)), [*targets, None].index(pattern), dot_natural_key(key)

    return {key: state_dict[key] for key in sorted(state_dict, key=place)}


def in_natural_order(state_dict):
    """A checkpoint in the order of its names, in which the original writes it, file by file."""
    return {key: state_dict[key] for key in sorted(state_dict, key=dot_natural_key)}


def load_state_dict(self, state_dict, *args, **kwargs):
    """Take a checkpoint of the original too, as `Trainer` has it when it resumes."""
    return super().load_state_dict(in_own_layout(self, state_dict), *args, **kwargs)


def _load_from_state_dict(self, state_dict, prefix, *args):
    """Refuse what is for layers of the original, the weights of an adapter for one: torch would leave them out."""
    absent = {}  # layers that this model doesn't have -> the first key of each
    for key in state_dict:
        module, layer = self, ""
        for name in key.removeprefix(prefix).split(".")[:-1]:
            layer, module = f"{layer}.{name}".removeprefix("."), module._modules.get(name)
            if module is None:
                absent.setdefault(layer, key)
                break
    conversions = get_model_conversion_mapping(self, add_legacy=False) if absent else []
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    for layer, key in absent.items():
        if rename_source_key(f"{layer}.weight", [], converters)[1] is not None:
            raise RuntimeError(f"{key} is for a layer of the original model only: load it into that.")
    super()._load_from_state_dict(state_dict, prefix, *args)


def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, **kwargs):
    """Write a checkpoint of the original."""
    offloaded = {"cpu", "disk"}.intersection(getattr(self, "hf_device_map", {}).values())
    otherwise = offloaded or getattr(self, "peft_config", None) or hasattr(self, "_patcher_record")
    if kwargs.get("save_original_format", True) and not otherwise:
        state_dict = self.state_dict() if state_dict is None else state_dict
        state_dict = remove_tied_weights_from_state_dict(state_dict, self)
        state_dict = in_original_order(in_original_layout(self, state_dict))
        kwargs["save_original_format"] = False
    super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
    name = next(each.__name__ for each in type(self).__mro__ if each.__module__ == __name__).removeprefix(OWN_NAME)
    if is_main_process and name != type(self).__name__:  # the config names the class of the original
        self.config.architectures = [name]
        self.config.save_pretrained(save_directory)


def prepare_distribute_model(cls, *args, **kwargs):
    """Refuse a load that is split over processes: the plans of the original name other layers than these."""
    reason = "is of a generated file, whose layers a distributed_config or tp_plan of the original doesn't fit"
    raise NotImplementedError(f"{cls.__name__} {reason}. Load it whole, or load the original model.")


# --- layers ---------------------------------------------------------------------------------------------------------


class JoinedPart:
    """One of several linear layers that were joined, for code that looks at it: its rows, and what it computes."""

    def __init__(self, joined, start, size, bias=None):
        rows = slice(start, start + size)
        self.weight, self.bias = joined.weight[rows], bias if joined.bias is None else joined.bias[rows]
        for part, whole in ((self.weight, joined.weight), (self.bias, joined.bias)):
            if part is not None and whole is not None:  # a model initialises what wasn't loaded
                part._is_hf_initialized = getattr(whole, "_is_hf_initialized", False)

    def __call__(self, hidden_states):
        return nn.functional.linear(hidden_states, self.weight, self.bias)


class SharedInput:
    """Joined layers in one call of a forward: one product for all that are given the same tensor.

    The layer is called for the first input. A part that is given that very tensor gets its rows of the product, and
    one that is given another is computed by itself.
    """

    def __init__(self, module, parts, joined) -> None:
        self.module, self.parts, self.joined = module, parts, joined
        self.input, self.products, self.given = None, (), []

    def __call__(self, name, features):
        module = self.module
        if features is not self.input:
            if self.input is not None and name not in self.given:
                return getattr(module, name)(features)
            # The first input, or the next one after all that: each part is given one after the other.
            self.input, self.given = features, []
            product = getattr(module, self.joined)(features)
            self.products = product.split(getattr(module, f"{self.joined}_sizes"), dim=-1)
        self.given.append(name)
        part, bias = self.products[self.parts.index(name)], getattr(module, f"{name}_bias", None)
        # The type is that of the product: under autocast it isn't that of the bias.
        return part if bias is None else part + bias.to(part.dtype)


def are_values(given) -> bool:
    """Whether all are tensors, numbers, caches or containers of these, which read nothing of a module."""
    for each in given:
        if isinstance(each, dict):
            if not are_values(each.values()):
                return False
        elif isinstance(each, list | tuple):
            if not are_values(each):
                return False
        elif each is not None and not isinstance(each, torch.Tensor | int | float | str | Cache):
            return False
    return True


class LinearPatchEmbedding(nn.Module):
    """A convolution of stride = kernel size as a linear layer: one product over patches that are cut already.

    It takes the arguments of the convolution, and has its attributes. Whole images, which would have to be cut, are
    convolved with the same weight.
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
        if weight.dtype.itemsize == 1 or type(weight) is not nn.Parameter:  # quantized: it passes for what it was
            return torch.empty((), dtype=self.dtype, device=weight.device).expand(self.kernel_shape)
        kernel = weight.view(self.kernel_shape)
        kernel._is_hf_initialized = getattr(weight, "_is_hf_initialized", False)
        return kernel

    @property
    def bias(self):
        return self.linear.bias

    def forward(self, images):
        rank = len(self.kernel_size)
        if images.dim() == rank + 1:
            return self(images.unsqueeze(0)).squeeze(0)
        counts = [size // patch for size, patch in zip(images.shape[2:], self.kernel_size, strict=True)]
        if max(counts) > 1 and type(self.linear) is nn.Linear:
            convolve = nn.functional.conv2d if rank == 2 else nn.functional.conv3d
            return convolve(images, self.weight, self.bias, self.stride)
        for axis, patch in enumerate(self.kernel_size, 2):
            images = images.unfold(axis, patch, patch)
        # (batch, channels, *counts, *kernel_size) -> (batch, *counts, channels, *kernel_size)
        patches = images.movedim(1, 1 + rank)
        output = self.linear(patches.reshape(patches.shape[0] * math.prod(counts), -1))
        return output.view(patches.shape[0], *counts, self.out_channels).movedim(-1, 1)


class ListedExperts(nn.Module):
    """Experts that are modules: the children that have numbers as names. It is indexed as a list of them."""

    def __len__(self):
        return sum(name.isdigit() for name in self._modules)

    def __iter__(self):
        return iter([self[number] for number in range(len(self))])

    def __getitem__(self, number):
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        position = int(number)
        name = str(position + len(self) if position < 0 else position)
        if name not in self._modules or name.startswith("-"):
            raise IndexError(f"expert {position} of {len(self)}")
        return self._modules[name]

    def every_expert_runs(self) -> bool:
        """Whether experts without tokens run too, on no rows: their gradients are zero then, and not None."""
        is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # since torch 2.7
        if is_exporting() or any(hasattr(parameter, "placements") for parameter in self.parameters()):
            return True
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
