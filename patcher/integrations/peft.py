"""PEFT: an adapter un-fuses the layers that it names, so that PEFT meets those of transformers.

    attn.qkv_proj  ->  attn.q_proj, attn.k_proj, attn.v_proj     on the storage of the joined weight

Before PEFT puts an adapter into a model, each fused module whose stock layers the config of the adapter names gets its
class and its layers back. From there on all is PEFT's own: every kind of adapter, training, merging, hot swapping,
saving. Experts that are laid out as layers stay, where the config names these layers; "all-linear" means the layers
of stock.
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
from patcher.errors import InvalidPatcherError
from patcher.expressions import matches
from patcher.layouts.carried import ModuleLayouts, carriers, fused_modules
from patcher.loading.integration import Adapted, Integration, register
from patcher.loading.state_dicts import listed_layers
from patcher.loading.unfusing import ADAPTED, unfuse
from patcher.patterns import inside


@seam("peft.tuners.tuners_utils:BaseTuner.__init__", "model", "peft_config", "adapter_name", "state_dict")
def construct(
    stock: Stock, self: Any, model: Any, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    """The first adapter of a model: some kinds look at the shapes of layers before they put anything in."""
    config = peft_config.get(adapter_name) if isinstance(peft_config, dict) else peft_config
    state_dict = kwargs.get("state_dict", args[1] if len(args) > 1 else None)
    if hasattr(config, "peft_type"):
        tuner = object.__new__(type(self))
        nn.Module.__init__(tuner)
        tuner.__dict__["model"] = model
        _prepare(tuner, config, model, state_dict)
    return stock(self, model, peft_config, adapter_name, *args, **kwargs)


@seam("peft.tuners.tuners_utils:BaseTuner.inject_adapter", "model", "adapter_name", "state_dict")
def inject(stock: Stock, self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """Any adapter, also one that is added later."""
    config = self.peft_config[adapter_name]
    _prepare(self, config, model, kwargs.get("state_dict", args[2] if len(args) > 2 else None))
    if _names_experts(config, model):
        _name_experts(config, model)
    return stock(self, model, adapter_name, *args, **kwargs)


@seam("peft.utils.transformers_weight_conversion:convert_peft_config_for_transformers", "peft_config", "model")
def convert_config(stock: Stock, peft_config: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Have a config name stacks of experts in the place of layers, unless it names layers that the model has."""
    if not _names_experts(peft_config, model):
        stock(peft_config, model, *args, **kwargs)


def _prepare(tuner: Any, config: Any, model: Any, state_dict: Any) -> None:
    """Un-fuse what a config names, or a state dict where that says which layers have an adapter.

    Raises:
        InvalidPatcherError: these weights can't be taken apart; nothing has been changed.
    """
    if carriers(model):
        named = _Named(tuner, config, model, state_dict)
        named.check_converted()
        unfuse(model, named.in_fused, ADAPTED)


class _Named:
    """What the config of an adapter names of the stock model, as PEFT itself compares names."""

    def __init__(self, tuner: Any, config: Any, model: nn.Module, state_dict: Any) -> None:
        from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

        self.tuner, self.model = tuner, model
        self.config = config = copy.deepcopy(config)
        self.all_linear, self.names_experts = _means_all_linear(config), _names_experts(config, model)
        if hasattr(getattr(model, "config", None), "model_type"):
            from peft.utils import transformers_weight_conversion

            transformers_weight_conversion.convert_peft_config_for_transformers(config, model=model, conversions=None)
        if hasattr(config, "target_modules") and not self.all_linear:
            with suppress(ValueError):  # PEFT knows no targets for the architecture, and says so itself
                self.config = tuner._prepare_adapter_config(config, tuner.get_model_config(model))
        given = vars(config)
        self.parameters = tuple(given.get("target_parameters") or ())
        self.saved = [name for name in given.get("modules_to_save") or () if isinstance(name, str)]
        self.patterns = [*(given.get("rank_pattern") or ()), *(given.get("alpha_pattern") or ())]
        self.in_state_dict: set[str] | None = None
        if state_dict is not None:
            prefix = PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type]
            self.in_state_dict = {key.rsplit(f".{prefix}", 1)[0].removeprefix("_orig_mod.") for key in state_dict}

    def in_fused(self, path: str, carried: ModuleLayouts) -> bool:
        """Whether something of a fused module is named."""
        # It may itself be a layer in stock, which PEFT knows.
        is_layer = issubclass(carried.original or nn.Module, nn.Linear | Conv1D | nn.Conv2d | nn.Conv3d)
        return self._is_named(path, carried.stock, _layers(path, carried.fused), is_layer)

    def check_converted(self) -> None:
        """Refuse what a class mapping has converted: which of its rows are those of a stock layer isn't known.

        Raises:
            InvalidPatcherError: with what can be done instead.
        """
        for path, module, carried in carriers(self.model):
            for layout in carried.converted:
                if self._is_named(path, layout.stock, (), is_whole=False):
                    raise InvalidPatcherError(
                        f"The adapter names layers of {path or 'the model'} whose weights a class mapping converts "
                        f"({layout}), so they can't have one as on the stock model. Name the layers of "
                        f"{type(module).__qualname__}, or load the model without this class mapping."
                    )

    def _is_named(self, path: str, stock: Iterable[str], own: Iterable[str], is_whole: bool) -> bool:
        names = {f"{inside(path)}{name}" for name in stock}
        layers = _layers(path, stock)
        if any(name == each or name.endswith(f".{each}") for name in names for each in self.parameters):
            return True
        around = {path, *layers, *(path[: dot.start()] for dot in re.finditer(r"\.", path))}
        if any(place.endswith(name) for place in around for name in self.saved):
            return True
        if any(matches(rf"(.*\.)?({pattern})", place) for place in layers for pattern in self.patterns):
            return True
        if self.in_state_dict is not None:
            return not self.in_state_dict.isdisjoint(layers)
        if self.all_linear:  # which means what is linear in stock: neither experts nor a convolution
            return bool(layers) or bool(own)
        if is_whole:  # linear layers here, and one layer in stock
            layers = {path}
        if layers:
            return any(map(self._is_target, layers))
        # Layers of experts, which the name of another layer may fit.
        return not self.names_experts and any(map(self._is_target, own))

    def _is_target(self, name: str) -> bool:
        """Whether PEFT adapts a layer of that name, or is configured to leave it out."""
        if getattr(self.config, "target_modules", None) is None and not hasattr(self.config, "target_parameters"):
            return False
        found = self.tuner._check_target_module_exists(self.config, name)
        return bool(found) or type(found).__name__ == "_ExcludedModule"


def _layers(path: str, parameters: Iterable[str]) -> set[str]:
    """The layers of parameters of a module, but for the module itself."""
    return {f"{inside(path)}{owner}" for name in parameters if (owner := name.rpartition(".")[0])}


def _names_experts(config: Any, model: nn.Module) -> bool:
    """Whether a config names layers of experts that stock has as stacks in one parameter.

    A name such as `gate_proj` may mean them in a new adapter. In one that is read from a file it may be that of an
    adapter of stock, which has no such layers, so only what can't mean another layer does: see `_name_experts`.
    """
    targets = getattr(config, "target_modules", None)
    if not targets or getattr(config, "target_parameters", None):
        return False
    if _means_all_linear(config):  # what is fused will be un-fused
        fused = tuple(inside(path) for path, *_ in fused_modules(model))
        return not all(layer.startswith(fused) for layer in listed_layers(model))
    named = _named_experts(config, model)
    return bool(named) and (not config.inference_mode or any(_is_meant(targets, layer) for layer in named))


def _named_experts(config: Any, model: nn.Module) -> list[str]:
    from peft.tuners.tuners_utils import check_target_module_exists

    return [layer for layer in sorted(listed_layers(model)) if check_target_module_exists(config, layer)]


def _is_meant(targets: Any, layer: str) -> bool:
    """Whether targets name a layer of an expert, and not just any of the same last name."""
    if not isinstance(targets, str):
        return any("." in name and f".{layer}".endswith(f".{name}") for name in targets)
    *around, _, _, name = layer.split(".")  # model.layers.0.mlp, experts, 3, gate_proj
    other = ".".join((*around, name))
    return any(matches(each, layer) and not matches(each, other) for each in (targets, targets.rpartition(")|")[2]))


def _name_experts(config: Any, model: nn.Module) -> None:
    """Have a config name the experts as such, so that it means them when it is read again.

    As an expression: of many names PEFT keeps the ends that they share.

    Raises:
        InvalidPatcherError: it names layers by number as well, for which PEFT takes the numbers of experts.
    """
    targets, named = config.target_modules, _named_experts(config, model)
    if _means_all_linear(config) or any(_is_meant(targets, layer) for layer in named):
        return
    paths = [layer.split(".") for layer in named]
    stacks, names = ("|".join(sorted({path[place] for path in paths})) for place in (-3, -1))
    experts = rf".*\.(?:{stacks})\.\d+\.(?:{names})"
    if getattr(config, "layers_to_transform", None) is not None:
        raise InvalidPatcherError(
            f"The adapter names layers of experts ({named[0]}), and layers_to_transform="
            f"{config.layers_to_transform!r} would be numbers of experts there. Write target_modules as an expression "
            f"instead: {experts!r}."
        )
    others = targets if isinstance(targets, str) else rf"(?:.*\.)?(?:{'|'.join(map(re.escape, sorted(targets)))})"
    config.target_modules = f"(?:{others})|{experts}"


def _means_all_linear(config: Any) -> bool:
    from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND

    targets = getattr(config, "target_modules", None)
    return isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND


def adapted(model: nn.Module, merged: bool, around: nn.Module) -> Adapted:
    """The modules that adapters are around, for weights that stream.

    Raises:
        InvalidPatcherError: an adapter is part of the weights that are requested without it, or can't be part of them.
    """
    if "peft" not in sys.modules:  # it may not be installed; whoever has put an adapter on has imported it
        return {}
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: dict[str, tuple[nn.Module, Callable[[], nn.Module] | None]] = {}
    for peft_model in (each for _, each in named_modules(around) if isinstance(each, PeftModel)):
        config = peft_model.active_peft_config
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if merged and (config.is_prompt_learning or kind == "XLORA"):  # that weighs its adapters anew for each token
            raise _unmerged(f"{type(peft_model).__name__} ({kind})", "it changes what the weights are given, not them")
        if config.is_prompt_learning:
            found[type(peft_model).__name__] = model, None
    for path, module in named_modules(model):
        is_around = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        is_strange = not is_around and type(module).__module__.startswith("peft.")
        if not (is_around or is_strange) or path.startswith(tuple(map(inside, found))):
            continue
        if is_strange:
            raise InvalidPatcherError(
                f"{path} is a {type(module).__name__} of PEFT, around a module of the model that it doesn't tell. "
                "Stream the base model, loaded without this adapter, and give the engine the adapter."
            )
        at: Any = module
        is_wanted = merged and not at.disable_adapters
        if not is_wanted and any(getattr(part, "merged", False) for part in module.modules()):
            raise InvalidPatcherError(
                f"The adapter of {path} is merged into its weights, so they can't be told from it. Unmerge it first "
                '(unmerge_adapter()), or write adapters="merged".'
            )
        if is_wanted and at.active_adapters and hasattr(at, "modules_to_save"):
            at = at.modules_to_save[at.active_adapters[0]]  # trained in its place
        at = getattr(at, "token_adapter", getattr(at, "original_module", at))
        if not isinstance(at, BaseTunerLayer):
            found[path] = at, None
        else:
            is_changed = is_wanted and not set(at.active_adapters) <= set(at.merged_adapters)
            found[path] = at.get_base_layer(), functools.partial(_merged, at, path) if is_changed else None
    return found


def _merged(layer: Any, path: str) -> nn.Module:
    """What PEFT makes of a layer and its adapters, of a copy.

    Raises:
        InvalidPatcherError: nothing, as it can't be merged.
    """
    part: Any = copy.deepcopy(layer)
    while hasattr(part, "base_layer"):  # of adapters for parameters there may be several around one module
        try:
            part.merge()
        except Exception as error:
            raise _unmerged(path, f"PEFT says {type(error).__name__}: {str(error)[:300]}") from error
        part = part.base_layer
    return part  # type: ignore[no-any-return]


def _unmerged(where: str, reason: str) -> InvalidPatcherError:
    return InvalidPatcherError(
        f'The adapter of {where} can\'t be merged into weights: {reason}. Write adapters="left out", and give the '
        "engine the adapter."
    )


register(Integration("peft", seams_in(__name__), adapted=adapted))
