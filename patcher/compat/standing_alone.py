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

#: What the generator writes once for each file: the prefix of the class names under which conversions are registered,
#: and the keys under which transformers has those that the order of a checkpoint follows.
OWN_NAME, STOCK_CONVERSIONS = "", ()


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Refit(ConversionOps):
    """Tensors of the original as those of a layer here, by `forth`, and back: lists of them, one for each pattern."""

    is_back = False

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name="", model=None, **kwargs):
        given = [input_dict[each] for each in source_patterns if each in input_dict] or [*input_dict.values()]
        given = [each if isinstance(each, list) else [each] for each in given]
        own = full_layer_name.replace(target_patterns[0], source_patterns[0]) if self.is_back else full_layer_name
        made = (self.back if self.is_back else self.forth)(given, len(target_patterns), model, own)
        named = zip(target_patterns, made, strict=True)
        return {name.replace("*", str(n)): tensor for name, tensors in named for n, tensor in enumerate(tensors)}

    @property
    def reverse_op(self):
        reverse = deepcopy(self)
        reverse.is_back = not self.is_back
        return reverse


class JoinRows(Refit):
    """Several of the original's layers as one, row by row; the module that has it says how many rows are whose."""

    def forth(self, given, *about):
        return [[torch.cat([rows for (rows,) in given])]]

    def back(self, given, count, model, own):
        owner, layer = own.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)
        sizes = getattr(model.get_submodule(owner), f"{layer}_sizes")
        return [[rows.clone()] for rows in given[0][0].split(sizes)]


class FlattenKernel(Refit):
    """The kernel of a convolution as the weight of a linear layer over flattened patches."""

    def forth(self, given, *about):
        return [[given[0][0].flatten(1)]]

    def back(self, given, count, model, own):
        return [[given[0][0].view(model.get_submodule(own.removesuffix(".linear.weight")).kernel_shape)]]


class SplitExperts(Refit):
    """The original's one parameter of all experts as those of each; `either` way round, by its shape."""

    def __init__(self, transposed=False, interleaved=False, either=False):
        self.transposed, self.interleaved, self.either = transposed, interleaved, either

    def forth(self, given, count, model, own):
        ((whole,),) = given
        is_other = self.either and whole.shape[-1] != model.get_parameter(own).shape[-1]
        whole = whole.transpose(1, 2) if self.transposed or is_other else whole
        parts = [whole[:, n::count] for n in range(count)] if self.interleaved else whole.chunk(count, dim=1)
        return [[each.clone(memory_format=torch.contiguous_format) for each in part] for part in parts]

    def back(self, given, *about):
        parts = [torch.stack(part) for part in given]
        whole = torch.stack(parts, dim=2).flatten(1, 2) if self.interleaved else torch.cat(parts, dim=1)
        return [[whole.transpose(1, 2).contiguous() if self.transposed else whole]]


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


class OriginalCheckpoints:
    """Models that read checkpoints of the original, resume from them, and write them as that one does."""

    def load_state_dict(self, state_dict, *args, **kwargs):
        """Take a checkpoint of the original too, as `Trainer` has it when it resumes."""
        known = self.state_dict().keys()
        if others := {key: tensor for key, tensor in state_dict.items() if key not in known}:
            own = {key: tensor for key, tensor in state_dict.items() if key in known}
            conversions = get_model_conversion_mapping(self, add_legacy=False)
            state_dict = own | converted(self, others, conversions, renamed_first=True)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Refuse what is for layers of the original, the weights of an adapter for one: torch would leave them out."""
        known, absent = {name for name, _ in self.named_modules()}, {}  # layer -> its first key
        for key in state_dict:
            for layer in accumulate(key.removeprefix(prefix).split(".")[:-1], "{}.{}".format):
                if layer not in known:
                    absent.setdefault(layer, key)
        conversions = get_model_conversion_mapping(self, add_legacy=False) if absent else []
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        for layer, key in absent.items():
            if rename_source_key(f"{layer}.weight", [], converters)[1] is not None:
                raise RuntimeError(f"{key} is for a layer of the original model only: load it into that.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def in_original_layout(self, state_dict):
        """A state dict as the original's checkpoints have it: what its load has converted, the other way round."""
        conversions = getattr(self, "_weight_conversions", None)
        if conversions is None:  # it wasn't loaded
            for kind in {type(each) for each in self.modules() if type(each).__module__ != __name__}:
                if any(each.__module__ == __name__ and each.__name__.startswith(OWN_NAME) for each in kind.__mro__):
                    name = kind.__name__
                    raise NotImplementedError(f"{name} has no conversions, which go by names. Load a checkpoint.")
            conversions = get_model_conversion_mapping(self, add_legacy=False)
            conversions = [each for each in conversions if not isinstance(each, PrefixChange)]
        conversions = [each.reverse_transform() for each in reversed(conversions)]
        return converted(self, state_dict, conversions, renamed_first=False)

    def in_original_order(self, state_dict):
        """A checkpoint in the order of its names, in which the original writes it, file by file."""
        return {key: state_dict[key] for key in sorted(state_dict, key=dot_natural_key)}

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, **kwargs):
        """Write a checkpoint of the original."""
        offloaded = {"cpu", "disk"}.intersection(getattr(self, "hf_device_map", {}).values())
        otherwise = offloaded or getattr(self, "peft_config", None) or hasattr(self, "_patcher_record")
        if kwargs.get("save_original_format", True) and not otherwise:
            state_dict = self.state_dict() if state_dict is None else state_dict
            state_dict = remove_tied_weights_from_state_dict(state_dict, self)
            state_dict = self.in_original_order(self.in_original_layout(state_dict))
            kwargs["save_original_format"] = False
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        name = next(each.__name__ for each in type(self).__mro__ if each.__module__ == __name__).removeprefix(OWN_NAME)
        if is_main_process and name != type(self).__name__:  # the config names the class of the original
            self.config.architectures = [name]
            self.config.save_pretrained(save_directory)

    @classmethod
    def prepare_distribute_model(cls, *args, **kwargs):
        """Refuse a load that is split over processes: the plans of the original name other layers than these."""
        reason = "is of a generated file, whose layers a distributed_config or tp_plan of the original doesn't fit"
        raise NotImplementedError(f"{cls.__name__} {reason}. Load it whole, or load the original model.")


class ConvertedCheckpoints(OriginalCheckpoints):
    """Models of an original whose checkpoints aren't in the order of their own names: it has others itself."""

    def in_original_order(self, state_dict):
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
