"""What is known to write into nothing that it is given, and to change no mode: what a forward is made of.

Three kinds: those whose result is a number or a shape, those whose result has memory of its own, and those whose
result may share memory with an argument. What isn't listed is followed into its source, or nothing is known of it.
"""

from __future__ import annotations

import builtins
import logging
import math
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import nn

from patcher.compat.models import is_exporting

#: The result is no tensor, and holds none.
PLAIN = "plain"
#: The result has memory of its own.
FRESH = "fresh"
#: The result may be an argument, or a view of one.
SHARED = "shared"

_PLAIN = (
    "size dim numel nelement ndimension item tolist get_device is_floating_point is_complex is_nonzero element_size "
    "equal allclose is_same_size is_tensor is_grad_enabled is_inference_mode_enabled is_autocast_enabled "
    "is_autocast_cpu_enabled get_autocast_dtype get_autocast_gpu_dtype get_autocast_cpu_dtype get_default_dtype "
    "broadcast_shapes result_type promote_types can_cast finfo iinfo device Size"
).split()
_FRESH = (
    "abs absolute acos add addbmm addcdiv addcmul addmm addmv all amax amin aminmax any arange argmax argmin argsort "
    "argwhere asin atan atan2 baddbmm bernoulli bilinear bincount bitwise_and bitwise_not bitwise_or bitwise_xor bmm "
    "bucketize cat cdist ceil celu clamp clamp_max clamp_min clip clone complex concat conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d cos cosh cosine_similarity count_nonzero cross cummax cummin "
    "cumprod cumsum diff dist div divide dot elu embedding empty empty_like eq erf erfc erfinv exp exp2 expm1 eye "
    "flip floor floor_divide fmod frac full full_like gather ge gelu glu greater greater_equal group_norm gt "
    "hardshrink hardsigmoid hardswish hardtanh heaviside histc index_add index_copy index_fill index_select "
    "isfinite isin isinf isnan isneginf isposinf kron kthvalue layer_norm le leaky_relu lerp less "
    "less_equal lgamma linear linspace log log10 log1p log2 log_softmax logaddexp logcumsumexp logical_and "
    "logical_not logical_or logical_xor logit logsigmoid logspace logsumexp lt masked_fill masked_scatter "
    "masked_select matmul max maximum mean median min minimum mish mm mode mul multinomial multiply mv nan_to_num ne "
    "neg negative new_empty new_full new_ones new_tensor new_zeros nonzero norm normalize not_equal one_hot ones "
    "ones_like outer polar pow prelu prod quantile rand rand_like randint randint_like randn randn_like randperm "
    "reciprocal relu relu6 remainder repeat repeat_interleave rms_norm roll rot90 round rsqrt "
    "scaled_dot_product_attention "
    "scatter scatter_add scatter_reduce searchsorted select_scatter selu sgn sigmoid sign silu sin sinc sinh "
    "slice_scatter softmax softmin softplus softshrink softsign sort sqrt square stack std std_mean sub subtract sum "
    "tan tanh tanhshrink tensor tensordot threshold tile topk trace tril tril_indices triu triu_indices true_divide "
    "trunc unique unique_consecutive vander var var_mean vdot vector_norm where xlogy zeros zeros_like "
    "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d lp_pool1d lp_pool2d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d interpolate grid_sample "
    "affine_grid fold"
).split()
_SHARED = (
    "view view_as reshape reshape_as transpose swapaxes swapdims permute movedim moveaxis squeeze unsqueeze flatten "
    "unflatten ravel expand expand_as narrow select chunk split split_with_sizes tensor_split unbind hsplit vsplit "
    "diagonal t adjoint unfold broadcast_to broadcast_tensors atleast_1d atleast_2d atleast_3d detach real imag "
    "view_as_complex view_as_real to type_as type float half bfloat16 double int long short bool cpu cuda contiguous "
    "einsum dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout pad positive conj resolve_conj "
    "resolve_neg meshgrid as_tensor pixel_shuffle pixel_unshuffle cartesian_prod block_diag"
).split()
#: Of these the result may be a tuple or a list of tensors.
SEVERAL = frozenset(
    "max min sort topk median mode kthvalue std_mean var_mean aminmax cummax cummin unique nonzero where split chunk "
    "split_with_sizes unbind tensor_split hsplit vsplit meshgrid broadcast_tensors atleast_1d atleast_2d "
    "atleast_3d".split()
)
#: Methods of dicts, lists, strings and caches that only read.
_READING = "get keys values items index count startswith endswith format join lower upper strip replace copy".split()
_READING_PLAIN = (
    "get_seq_length get_max_cache_shape get_usable_length get_max_length get_mask_sizes is_compileable "
    "is_recording_past get_query_offset has_previous_state".split()
)

#: Methods of a cache, and how many of their arguments the result may be: it keeps them in memory of its own.
CACHING = {"get_conv_state": 0, "get_recurrent_state": 0, "update_conv_state": 1, "update_recurrent_state": 1}
#: Methods of distributions.
_OF_DISTRIBUTIONS = "icdf cdf log_prob".split()

_BUILTINS_OF_ALL = "tuple list dict set frozenset zip enumerate reversed sorted min max sum slice Normal".split()

#: method -> kind, for a method of a value of which nothing else is known.
METHODS: dict[str, str] = {
    **dict.fromkeys([*_PLAIN, *_READING_PLAIN], PLAIN),
    **dict.fromkeys([*_FRESH, *_OF_DISTRIBUTIONS], FRESH),
    **dict.fromkeys([*_SHARED, *_READING], SHARED),
}
#: Functions whose result may share memory with any argument; that of others may with the first only.
OF_ALL = frozenset(
    "einsum broadcast_tensors meshgrid atleast_1d atleast_2d atleast_3d cartesian_prod".split()
    + [*_BUILTINS_OF_ALL, *_READING]
)
#: Attributes of a tensor that are none themselves.
PLAIN_ATTRIBUTES = frozenset(
    "shape dtype device ndim layout is_cuda is_cpu is_mps is_meta is_nested is_sparse is_quantized "
    "is_leaf requires_grad".split()
)

_BUILTINS = {
    **dict.fromkeys(
        "len isinstance issubclass int float bool str repr abs all any type round id hash callable hasattr print "
        "range divmod ord chr format".split(),
        PLAIN,
    ),
    **dict.fromkeys((name for name in _BUILTINS_OF_ALL if hasattr(builtins, name)), SHARED),
}
#: Methods by which what is given ends up in a list, a dict or a set.
STORING = frozenset("append appendleft extend insert add setdefault update".split())

#: Classes of torch whose forward writes into nothing that it is given, unless they are told to by `inplace`.
_FRESH_MODULES = (
    "Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d LayerNorm RMSNorm GroupNorm "
    "BatchNorm1d BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d InstanceNorm3d LocalResponseNorm Embedding "
    "GELU SiLU ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GLU Mish Hardswish Hardsigmoid Hardtanh Hardshrink Softshrink "
    "Tanhshrink Threshold Sigmoid LogSigmoid Tanh Softmax LogSoftmax Softmin Softmax2d Softplus Softsign "
    "AvgPool1d AvgPool2d AvgPool3d MaxPool1d MaxPool2d MaxPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d "
    "AdaptiveMaxPool1d AdaptiveMaxPool2d Upsample"
).split()
_SHARED_MODULES = (
    "Identity Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout Flatten Unflatten PixelShuffle "
    "PixelUnshuffle ZeroPad1d ZeroPad2d ConstantPad1d ConstantPad2d Fold Unfold"
).split()
#: class -> kind
MODULES: dict[type[Any], str] = {
    **{getattr(nn, name): FRESH for name in _FRESH_MODULES},
    **{getattr(nn, name): SHARED for name in _SHARED_MODULES},
}
#: Settings of these by which they write into what they are given, or into their own weight.
WRITING_SETTINGS = ("inplace", "max_norm")


def _known() -> Iterator[tuple[Any, str]]:
    for name, kind in METHODS.items():
        for home in (torch, F, torch.special, torch.linalg, torch.fft, torch.Tensor, torch.nn.functional):
            found = getattr(home, name, None)
            if found is not None and not isinstance(found, ModuleType):
                yield found, kind
    for name, kind in _BUILTINS.items():
        yield getattr(builtins, name), kind
    for name in vars(math):
        if callable(getattr(math, name)):
            yield getattr(math, name), PLAIN
    for plain in (
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
        is_exporting,
        torch.onnx.is_in_onnx_export,
        torch.cuda.is_available,
        torch.backends.cuda.is_flash_attention_available,
        warnings.warn,
    ):
        yield plain, PLAIN
    yield torch.distributions.Normal, SHARED


#: function or class -> kind; those of torch, `torch.nn.functional`, `math` and the built-in ones
FUNCTIONS: dict[Any, str] = dict(_known())


def kind_of_function(found: Any) -> str:
    """What kind of operation a function or class is; "" if it isn't known."""
    if isinstance(found, type) and issubclass(found, BaseException):
        return PLAIN
    try:
        return FUNCTIONS.get(found, "")
    except TypeError:  # without a hash
        return ""


#: What an `AttentionInterface` gives: a function that reads what it is given, and gives back tensors of its own.
ATTENTION = object()
#: What `ACT2FN` gives: a module that computes element by element.
ACTIVATION = object()
FUNCTIONS[ACTIVATION] = SHARED
#: Wrappers that do nothing to what they pass on: this one moves weights of the module.
_TRANSPARENT = {("transformers.integrations.accelerate", "force_accelerate_hooks")}


def unwrapped(function: Any) -> Any:
    """What a wrapper of transformers wraps that does nothing to what it passes on; other functions as they are."""
    code = getattr(function, "__code__", None)
    home = getattr(function, "__globals__", {}).get("__name__", "")
    if code is not None and (home, code.co_qualname.partition(".")[0]) in _TRANSPARENT:
        return unwrapped(function.__wrapped__)
    return function


def of_table(found: tuple[Any, ...]) -> Any:
    """What an entry of a table of transformers is, of attention functions or of activations; None of other objects."""
    if len(found) == 1 and isinstance(found[0], transformers.AttentionInterface):
        return ATTENTION
    if len(found) == 1 and isinstance(found[0], dict) and type(found[0]).__module__ == "transformers.activations":
        return ACTIVATION
    return None


def is_logger(found: Any) -> bool:
    return isinstance(found, logging.Logger | logging.LoggerAdapter)


def writes_in_place(name: str) -> bool:
    """Whether a method of tensors writes into its tensor, by its name."""
    return name.endswith("_") and not name.endswith("__") and hasattr(torch.Tensor, name)
