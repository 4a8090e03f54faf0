"""PEFT: an adapter un-fuses the modules whose layers it names, so that PEFT sees the layers of transformers.

    attn.qkv_proj  ->  attn.q_proj, attn.k_proj, attn.v_proj     views of the joined weight

Before PEFT injects an adapter, every fused module whose stock layers are named by the adapter config gets its original
class and layers back. PEFT does the rest: every kind of adapter, training, merging, hot swapping, saving. Experts that
are laid out as layers stay so if the config names these layers; "all-linear" means the linear layers of the stock
model. The layers are new parameters on the memory of the joined one: an optimizer is created after the adapter.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from torch import nn
from transformers import Conv1D

from patcher.compat.models import named_modules
from patcher.compat.seams import Stock, seam, seams_in
from patcher.errors import InvalidPatcherError, PatcherError
from patcher.expressions import matches
from patcher.layouts.carried import ModuleLayouts, carriers, fused_modules
from patcher.loading.in_memory import ADAPTED, unfuse
from patcher.loading.integration import Adapted, Integration, register
from patcher.loading.state_dicts import unstacked_layers
from patcher.patterns import inside

#: How the expressions of `_name_experts` begin: for experts of all layers, and of some.
_WRITTEN = re.compile(r"\.\*\\\.\(\?:|\(\?:[\w\\.|]+\)\\\.(\\d|\(\?:\d)")

#: What `preprocess_corda` and `preprocess_loraga` leave on layers.
_PREPROCESSED = "eigens", "_peft_loraga_grad"


@seam("peft.tuners.tuners_utils:BaseTuner.__init__", "model", "peft_config", "adapter_name", "state_dict")
def construct(
    stock: Stock, self: Any, model: Any, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    """Un-fuse for the first adapter of a model: some kinds read the shapes of layers before they inject anything."""
    config = peft_config.get(adapter_name) if isinstance(peft_config, dict) else peft_config
    state_dict = kwargs.get("state_dict", args[1] if len(args) > 1 else None)
    if hasattr(config, "peft_type"):
        tuner = object.__new__(type(self))  # one of a model that has not injected anything
        nn.Module.__init__(tuner)
        tuner.__dict__["model"] = model
        _prepare(tuner, config, model, state_dict)
    return stock(self, model, peft_config, adapter_name, *args, **kwargs)


@seam("peft.tuners.tuners_utils:BaseTuner.inject_adapter", "model", "adapter_name", "state_dict")
def inject(stock: Stock, self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """Un-fuse for any adapter, including one that is added later."""
    config = self.peft_config[adapter_name]
    _prepare(self, config, model, kwargs.get("state_dict", args[2] if len(args) > 2 else None))
    if _names_experts(config, model):
        _name_experts(config, model)
    return stock(self, model, adapter_name, *args, **kwargs)


@seam("peft.utils.transformers_weight_conversion:convert_peft_config_for_transformers", "peft_config", "model")
def convert_config(stock: Stock, peft_config: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert names of layers of experts to stacks, unless the model has these layers; refuse `_name_experts`' own."""
    experts = str(getattr(peft_config, "target_modules", None)).rpartition(")|")[2]
    if not _names_experts(peft_config, model):
        stock(peft_config, model, *args, **kwargs)
    are_written = _WRITTEN.match(experts) and not getattr(peft_config, "target_parameters", None)
    if are_written and not any(matches(experts, path) for path, _ in named_modules(model)):
        raise InvalidPatcherError(
            f"The adapter has layers of single experts ({experts}), and {type(model).__name__} has none, so their "
            "weights would be left out. Load the model with the patcher that the adapter was trained with, such as "
            "Patcher(fusions='sequential_experts')."
        )


def _prepare(tuner: Any, config: Any, model: Any, state_dict: Any) -> None:
    """Un-fuse the modules that a config targets, or a state dict if that decides which layers have an adapter.

    Raises:
        InvalidPatcherError: if these weights can't be split; nothing has been changed.
    """
    if not carriers(model):
        return
    try:
        targets = _Targets(tuner, config, model, state_dict)
        targets.check_converted()
        targets.check_preprocessed()
        unfuse(model, targets.includes, ADAPTED)
    except PatcherError:
        if not hasattr(model, "peft_config"):  # transformers takes the model for an adapted one by now
            vars(model).pop("_hf_peft_config_loaded", None)
        raise


class _Targets:
    """The modules of the stock model that an adapter config targets, matched by PEFT's own functions."""

    def __init__(self, tuner: Any, config: Any, model: nn.Module, state_dict: Any) -> None:
        from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

        self.tuner, self.model = tuner, model
        self.config = config = copy.deepcopy(config)
        self.all_linear, self.names_experts = _means_all_linear(config), _names_experts(config, model)
        if hasattr(getattr(model, "config", None), "model_type"):
            from peft.utils import transformers_weight_conversion

            transformers_weight_conversion.convert_peft_config_for_transformers(config, model=model, conversions=None)
        if hasattr(config, "target_modules") and not self.all_linear:
            with suppress(ValueError):  # PEFT has no default targets for the architecture, and raises later itself
                self.config = tuner._prepare_adapter_config(config, tuner.get_model_config(model))
        settings = vars(config)
        self.parameters = tuple(settings.get("target_parameters") or ())
        self.modules_to_save = [name for name in settings.get("modules_to_save") or () if isinstance(name, str)]
        self.patterns = [*(settings.get("rank_pattern") or ()), *(settings.get("alpha_pattern") or ())]
        self.all_biases = settings.get("bias") == "all"  # trained and saved with the adapter, by their names
        self.in_state_dict: set[str] | None = None
        if state_dict is not None:
            prefix = PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type]
            self.in_state_dict = {key.rsplit(f".{prefix}", 1)[0].removeprefix("_orig_mod.") for key in state_dict}

    def includes(self, path: str, carried: ModuleLayouts) -> bool:
        """Whether a fused module, or a layer or parameter of it, is targeted."""
        # The original may itself be a layer that PEFT adapts.
        is_layer = issubclass(carried.original or nn.Module, nn.Linear | Conv1D | nn.Conv2d | nn.Conv3d)
        return self._includes(path, carried.stock, _layers(path, carried.fused), is_layer)

    def check_converted(self) -> None:
        """Refuse weights that a class mapping has converted: their rows can't be attributed to stock layers.

        Raises:
            InvalidPatcherError: if the adapter targets such weights; the message has an alternative.
        """
        for path, module, carried in carriers(self.model):
            for layout in carried.converted:
                if self._includes(path, layout.stock, (), is_layer=False):
                    raise InvalidPatcherError(
                        f"The adapter names layers of {path or 'the model'} whose weights a class mapping converts "
                        f"({layout}), so they can't have an adapter as on the stock model. Name the layers of "
                        f"{type(module).__qualname__}, or load the model without this class mapping."
                    )

    def check_preprocessed(self) -> None:
        """Refuse initial values that PEFT has computed from layers of the model: it didn't find fused ones.

        Raises:
            InvalidPatcherError: if the adapter targets fused layers.
        """
        if any(name in vars(module) for module in self.model.modules() for name in _PREPROCESSED):
            for path, _, carried in fused_modules(self.model):
                if self.includes(path, carried):
                    raise InvalidPatcherError(
                        f"init_lora_weights={self.config.init_lora_weights!r} was prepared on the fused model, where "
                        f"PEFT didn't find the layers of {path}. Un-fuse it by model = Patcher().apply(model), and "
                        "prepare that."
                    )

    def _includes(self, path: str, stock: Iterable[str], fused_layers: Iterable[str], is_layer: bool) -> bool:
        names = {f"{inside(path)}{name}" for name in stock}
        layers = _layers(path, stock)
        if any(name == target or name.endswith(f".{target}") for name in names for target in self.parameters):
            return True
        paths = {path, *layers, *(path[: dot.start()] for dot in re.finditer(r"\.", path))}
        if any(module.endswith(name) for module in paths for name in self.modules_to_save):
            return True
        if self.all_biases and any("bias" in name for name in names):  # as PEFT finds them
            return True
        if any(matches(rf"(.*\.)?({pattern})", layer) for layer in layers for pattern in self.patterns):
            return True
        if self.in_state_dict is not None:
            return not self.in_state_dict.isdisjoint(layers)
        if self.all_linear:  # the linear layers of the stock model: neither experts nor a convolution
            return bool(layers) or bool(fused_layers)
        if is_layer:  # a single layer in the stock model, with linear layers in it here
            layers = {path}
        if layers:
            return any(map(self._is_target, layers))
        # Layers of experts, which the name of another layer may match.
        return not self.names_experts and any(map(self._is_target, fused_layers))

    def _is_target(self, name: str) -> bool:
        """Whether PEFT adapts a layer of that name, or is configured to exclude it."""
        if getattr(self.config, "target_modules", None) is None and not hasattr(self.config, "target_parameters"):
            return False
        match = self.tuner._check_target_module_exists(self.config, name)
        return bool(match) or type(match).__name__ == "_ExcludedModule"


def _layers(path: str, parameters: Iterable[str]) -> set[str]:
    """Return the paths of the layers in a module that have these parameters, without the module itself."""
    return {f"{inside(path)}{owner}" for name in parameters if (owner := name.rpartition(".")[0])}


def _names_experts(config: Any, model: nn.Module) -> bool:
    """Whether a config targets layers of experts whose weights the stock model has stacked in one parameter.

    In a new adapter, a name such as `gate_proj` targets them. An adapter that is read from a file may be one of the
    stock model, which has no such layers, so only an unambiguous name targets them there: see `_name_experts`.
    """
    targets = getattr(config, "target_modules", None)
    if not targets or getattr(config, "target_parameters", None):
        return False
    if _means_all_linear(config):  # fused modules will be un-fused
        fused = tuple(inside(path) for path, *_ in fused_modules(model))
        return not all(layer.startswith(fused) for layer in unstacked_layers(model))
    named = _named_experts(config, model)
    return bool(named) and (not config.inference_mode or any(_is_unambiguous(targets, layer) for layer in named))


def _named_experts(config: Any, model: nn.Module) -> list[str]:
    from peft.tuners.tuners_utils import check_target_module_exists

    return [layer for layer in sorted(unstacked_layers(model)) if check_target_module_exists(config, layer)]


def _is_unambiguous(targets: Any, layer: str) -> bool:
    """Whether targets match a layer of an expert as such, not any layer of the same last name."""
    if not isinstance(targets, str):
        return any("." in name and f".{layer}".endswith(f".{name}") for name in targets)
    *around, _, _, name = layer.split(".")  # model.layers.0.mlp, experts, 3, gate_proj
    other = ".".join((*around, name))
    expressions = targets, targets.rpartition(")|")[2]
    return any(matches(expression, layer) and not matches(expression, other) for expression in expressions)


def _name_experts(config: Any, model: nn.Module) -> None:
    """Target the experts of a config unambiguously, so that it targets them when it is read again.

    It is an expression because PEFT shortens a list of many names to their common suffixes.

    Raises:
        InvalidPatcherError: if the config sets `layers_to_transform`, which PEFT would compare with expert indices.
    """
    targets, named = config.target_modules, _named_experts(config, model)
    if _means_all_linear(config) or any(_is_unambiguous(targets, layer) for layer in named):
        return
    others = targets if isinstance(targets, str) else rf"(?:.*\.)?(?:{'|'.join(map(re.escape, sorted(targets)))})"
    if (chosen := getattr(config, "layers_to_transform", None)) is not None:
        before = re.escape(re.split(r"\.\d+\.", named[0])[0])
        chosen = "|".join(map(str, [chosen] if isinstance(chosen, int) else chosen))
        expression = rf"{before}\.(?:{chosen})\.{others}"
        raise InvalidPatcherError(
            f"The adapter names layers of experts ({named[0]}), and layers_to_transform="
            f"{config.layers_to_transform!r} would be indices of experts there. Leave it out, and write "
            f"target_modules as an expression: {expression!r}."
        )
    paths = [layer.split(".") for layer in named]
    stacks, names = ("|".join(sorted({path[position] for path in paths})) for position in (-3, -1))
    experts = rf".*\.(?:{stacks})\.\d+\.(?:{names})"
    layers = unstacked_layers(model)
    if len(named) < sum(matches(experts, layer) for layer in layers):
        experts = _expression_of(named, layers)
    config.target_modules = f"(?:{others})|{experts}"


def _expression_of(named: Iterable[str], layers: Iterable[str]) -> str:
    """Return an expression that matches some layers of experts and no others."""
    numbers: list[dict[tuple[str, str], set[str]]] = [{}, {}]  # (stack, name) -> the indices of experts
    for indices, paths in zip(numbers, (named, layers), strict=True):
        for stack, number, name in (path.rsplit(".", 2) for path in paths):
            indices.setdefault((stack, name), set()).add(number)
    stacks: dict[str, list[str]] = {}
    for (stack, name), chosen in numbers[0].items():
        number = r"\d+" if chosen == numbers[1][stack, name] else f"(?:{'|'.join(sorted(chosen))})"
        stacks.setdefault(rf"{number}\.{name}", []).append(re.escape(stack))
    return "|".join(rf"(?:{'|'.join(paths)})\.{layer}" for layer, paths in stacks.items())


def _means_all_linear(config: Any) -> bool:
    from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND

    targets = getattr(config, "target_modules", None)
    return isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND


def adapted(model: nn.Module, merged: bool, around: nn.Module) -> Adapted:
    """Return the modules that adapters wrap, for streaming of weights.

    Raises:
        InvalidPatcherError: if an adapter is merged into weights that are requested without it, or can't be merged.
    """
    if "peft" not in sys.modules:  # PEFT may not be installed, and a model with an adapter has imported it
        return {}
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base_modules: dict[str, tuple[nn.Module, Callable[[], nn.Module] | None]] = {}
    for peft_model in (module for _, module in named_modules(around) if isinstance(module, PeftModel)):
        config = peft_model.active_peft_config
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if merged and (config.is_prompt_learning or kind == "XLORA"):  # X-LoRA weighs its adapters for each token
            raise _cannot_merge(f"{type(peft_model).__name__} ({kind})", "it changes inputs, not weights")
        if config.is_prompt_learning:
            base_modules[type(peft_model).__name__] = model, None
    for path, module in named_modules(model):
        is_wrapper = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        is_unknown = not is_wrapper and type(module).__module__.startswith("peft.")
        if not (is_wrapper or is_unknown) or path.startswith(tuple(map(inside, base_modules))):
            continue
        if is_unknown:
            raise InvalidPatcherError(
                f"{path} is a {type(module).__name__} of PEFT, and which module of the model it wraps isn't known. "
                "Stream the base model, loaded without this adapter, and give the engine the adapter."
            )
        wrapper: Any = module
        merge = merged and not wrapper.disable_adapters
        if not merge and any(getattr(part, "merged", False) for part in module.modules()):
            raise InvalidPatcherError(
                f"The adapter of {path} is merged into its weights, so they can't be separated from it. Unmerge it "
                'first (unmerge_adapter()), or write adapters="merged".'
            )
        if merge and wrapper.active_adapters and hasattr(wrapper, "modules_to_save"):
            wrapper = wrapper.modules_to_save[wrapper.active_adapters[0]]  # the trained copy
        wrapper = getattr(wrapper, "token_adapter", getattr(wrapper, "original_module", wrapper))
        if not isinstance(wrapper, BaseTunerLayer):
            base_modules[path] = wrapper, None
        else:
            is_unmerged = merge and not set(wrapper.active_adapters) <= set(wrapper.merged_adapters)
            merging = functools.partial(_merge, wrapper, path) if is_unmerged else None
            base_modules[path] = wrapper.get_base_layer(), merging
    return base_modules


def _merge(layer: Any, path: str) -> nn.Module:
    """Return a copy of a layer with its adapters merged into it.

    Raises:
        InvalidPatcherError: if PEFT can't merge them.
    """
    part: Any = copy.deepcopy(layer)
    while hasattr(part, "base_layer"):  # adapters of parameters may be nested around one module
        try:
            part.merge()
        except Exception as error:
            raise _cannot_merge(path, f"PEFT says {type(error).__name__}: {str(error)[:300]}") from error
        part = part.base_layer
    return part  # type: ignore[no-any-return]


def _cannot_merge(where: str, reason: str) -> InvalidPatcherError:
    return InvalidPatcherError(
        f'The adapter of {where} can\'t be merged into weights: {reason}. Write adapters="left out", and give the '
        "engine the adapter."
    )


register(Integration("peft", seams_in(__name__), adapted=adapted))
