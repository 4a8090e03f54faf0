"""A runtime `Patcher` as a config: a readable file with its effect on the models of one modeling module."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from patcher.codegen.bridges.conversions import OwnConversions
from patcher.codegen.bridges.dependencies import Dependencies
from patcher.codegen.bridges.fused_layers import FusedLayers, ModuleText
from patcher.codegen.bridges.to_patcher import MADE
from patcher.codegen.spec import create_patch_from_external
from patcher.compat.decorators import replaces_forward
from patcher.compat.modeling_code import unrebound
from patcher.compat.models import named_modules
from patcher.construction.class_rules import ClassRules
from patcher.construction.in_force import InForce
from patcher.functions.models import full_name
from patcher.fusions.experts.linear import LinearExperts
from patcher.fusions.families import fusion_named
from patcher.fusions.fused_module import FusedModule
from patcher.fusions.joined import JoinedProjections
from patcher.fusions.linear_patch_embedding import LinearPatchEmbedding
from patcher.layouts.layouts import Layout
from patcher.layouts.transforms import conversions_of
from patcher.resolution.resolution import NO_CHANGE, Resolution, resolve, skeleton
from patcher.source.reading import file_tree
from patcher.source.scopes import decorator_name, decorators_of, nearest
from patcher.source.texts import dedented
from patcher.spec.forward_of import FLAGS, ForwardOf
from patcher.spec.validation import required_groups

if TYPE_CHECKING:
    from patcher.codegen.config import PatchConfig
    from patcher.spec.patcher import Patcher


def describe_patcher(
    described: PatchConfig, patcher: Patcher, model_class: type[PreTrainedModel], config: PretrainedConfig | None
) -> None:
    """Describe the effect of a patcher in a config; see `PatchConfig.from_patcher`."""
    modeling = importlib.import_module(described.source_module)
    if vars(modeling).get(model_class.__name__) is not model_class:
        raise described.error(
            "from_patcher() needs a model class that its module has by its name, and "
            f"{modeling.__name__} has no such {model_class.__name__!r}. Give a class of a modeling file."
        )
    if patcher.module_mapping:
        raise described.error(
            f"from_patcher() can't write {', '.join(map(repr, patcher.module_mapping))} of a module_mapping into a "
            "file: a path is a place in one model, and a class in a file is that of all modules that are built of it. "
            "Load the model with the patcher, or give the class in a class_mapping."
        )
    config = model_class.config_class() if config is None else config
    description = _Description(described, patcher, skeleton(model_class, config), ModuleText(modeling))
    replaced = description.replaced_classes()
    resolution = NO_CHANGE  # classes alone need no second skeleton
    if patcher.fusions or patcher.function_mapping:
        resolution = resolve(patcher.replace(class_mapping=replaced, alternatives=()), model_class, config)
    stock = {path: unrebound(cls) for path, cls in resolution.original_classes.items()}
    resolution = replace(resolution, original_classes=stock)
    functions = {function.name.partition(":")[2]: function.replacement for function in resolution.functions.replaced}
    targets: dict[Any, list[str]] = {}
    for name, replacement in (*sorted(replaced.items()), *functions.items()):
        targets.setdefault(replacement, []).append(name)
    dependencies = Dependencies(described, modeling, targets)
    for name, cls in sorted(replaced.items()):
        _replace_class(described, name, cls, dependencies)
    modules = dict(named_modules(description.stock))
    layers = FusedLayers(described, description.text, modules, resolution.refused, dependencies.define)
    calling = {caller for function in resolution.functions.replaced for caller in function.callers}
    changed = {path for path, module in modules.items() if type(module).__name__ in calling.union(replaced)}
    for path in sorted(changed.union(resolution.fused)):
        layers.construct_from_file(path, replaced)
    description.replace_functions(resolution, dependencies)
    layouts = description.write_fused(resolution, layers)
    layers.write()
    if not described.patches:
        raise described.error(f"{patcher!r} changes no class and no function of {modeling.__name__}.")
    of_classes = (transform for cls in patcher.class_mapping.values() for transform in conversions_of(cls))
    conversions = (*resolution.transforms, *patcher.extra_weight_conversions, *of_classes)
    declared = (*patcher.filtered_weight_conversion_patterns, *patcher.new_weights, *patcher.dropped_weights)
    if layouts or conversions or declared:
        own_layouts = (name for name, cls in replaced.items() if isinstance(cls, type) and conversions_of(cls))
        converted = sorted({*layers.names, *own_layouts})
        own = OwnConversions(described, description.text, modules, patcher, dependencies, converted)
        own.write(layouts, conversions)
    description.write_heads()
    described.runtime, described.of_runtime = patcher, (*described.patches, *described.helpers)


class _Description(NamedTuple):
    """The effect of a patcher on the classes of a module, without what a file can't express."""

    described: PatchConfig
    patcher: Patcher
    stock: PreTrainedModel
    text: ModuleText

    def replaced_classes(self) -> dict[str, type[nn.Module] | ForwardOf]:
        """Return class of the module -> replacement, for every class key of the patcher."""
        values = {name: vars(self.text.module).get(name) for name in self.text.classes}
        classes = {name: cls for name, cls in values.items() if isinstance(cls, type) and issubclass(cls, nn.Module)}
        rules = ClassRules((InForce(self.patcher, "from_patcher()"),))
        matches = {name: match for name, cls in classes.items() if (match := rules.match(cls)) is not None}
        used = {key for match in matches.values() for _, _, key in rules.matched(match)}
        groups = required_groups(self.patcher.class_mapping, self.patcher.alternatives)
        for key in (group[0] for group in groups if used.isdisjoint(group)):
            raise self.described.error(
                f"no class of {self.text.module.__name__} matches the class key {key!r}. {nearest(key, classes)} "
                "A generated file holds the classes of one module: for a class of another one call from_patcher() "
                "with a model of that module."
            )
        return {name: match.value for name, match in matches.items()}

    def replace_functions(self, resolution: Resolution, dependencies: Dependencies) -> None:
        """Replace the functions of the patcher, which the module itself has to define."""
        functions = resolution.functions
        used = {key for function in functions.replaced for _, key in function.keys}
        for key in (key for key in self.patcher.function_mapping if key not in used):
            hint = nearest(key.rpartition(":")[2], functions.known)
            raise self.described.error(
                f"nothing in {self.described.source_module} that {type(self.stock).__name__} runs calls {key!r}. "
                f"{hint} Correct the key of function_mapping, or take it out."
            )
        for function in functions.replaced:
            home, _, name = function.name.partition(":")
            if home != self.text.module.__name__ or vars(self.text.module).get(name) is not function.original:
                raise self.described.error(
                    f"{function.keys[0][1]!r} of function_mapping is {function.name}, which is not defined in "
                    f"{self.described.source_module}, and a generated file holds the functions of one module. Load "
                    "with the patcher itself."
                )
            replacement = function.replacement
            call = f"from_patcher(), for {full_name(replacement)},"
            if not isinstance(replacement, FunctionType) or MADE in (replacement.__module__ or ""):
                raise self.described.error(
                    f"{call} has no source that a file could hold. Load with the patcher itself."
                )
            self.described.replace_function(name, replacement, name_map=dependencies.add(replacement, call))

    def write_fused(self, resolution: Resolution, layers: FusedLayers) -> Mapping[str, Sequence[Layout]]:
        """Write the fused modules, and return their layouts."""
        if self.patcher.fusions and not resolution.fused:
            refused = "; ".join(sorted(set(resolution.refused.values()))[:3])
            raise self.described.error(
                f"the fusions {list(self.patcher.fusions)!r} find nothing to fuse in "
                f"{type(self.stock).__name__}{': ' + refused if refused else ''}."
            )
        fusions = {path: fusion_named(fusion) for path, fusion in resolution.fusions.items()}
        #: original class, or the fused class itself if it replaces modules of torch -> path -> fused class
        groups: dict[type[nn.Module], dict[str, Any]] = {}
        for path, cls in resolution.fused.items():
            if not issubclass(cls, (JoinedProjections, LinearExperts, LinearPatchEmbedding)):
                raise self.described.refusal(
                    f"{fusions[path]!r} makes a {cls.__name__} of {path}, and a file has the layers of qkv, gate_up, "
                    "kv, siblings, sequential_experts and patch_embeddings"
                )
            original = resolution.original_classes[path] if issubclass(cls, FusedModule) else cls
            if original is not cls and not self.text.defines(original):
                raise self.described.error(
                    f"a fusion takes {path}, a {original.__name__} of {original.__module__}, which is not defined in "
                    f"{self.text.module.__name__}. Call from_patcher() with a model of that module."
                )
            groups.setdefault(original, {})[path] = cls
        for original, fused in sorted(groups.items(), key=lambda item: item[0].__name__):
            cls = next(iter(fused.values()))
            if issubclass(cls, JoinedProjections):
                layers.join(original, fused)
            elif issubclass(cls, LinearExperts):
                layers.replace_experts(original, cls, fused)
            else:
                layers.replace_embeddings(fused)
        return {path: tuple(fusions[path].layouts(layers.modules[path])) for path in resolution.fused}

    def write_heads(self) -> None:
        """Let heads whose `__init__` is that of a mixin, which uses an Auto class, construct the model of the file."""
        for cls in self.text.model_classes():
            mixin: Any = next(base for base in cls.__mro__ if "__init__" in vars(base))
            if mixin.__module__ != "transformers.modeling_layers":
                continue
            code, config_class = inspect.getsource(mixin.__init__), cls.config_class
            mapping = transformers.MODEL_MAPPING if isinstance(config_class, type) else {}
            base: Any = mapping.get(config_class, None)
            construction = "setattr(self, self.base_model_prefix, AutoModel.from_config(config))"
            if construction not in code or base is None or base.__name__ not in self.text.classes:
                continue
            code = code.replace(construction, f"self.{cls.base_model_prefix} = {base.__name__}(config)")
            code = code.replace("super()", f"super({mixin.__name__}, self)")
            code = re.sub(r"(?m)^ *# Similar to .*\n", "", code)
            self.described.override_method(f"{cls.__name__}.__init__", dedented(code), new=True)


def _replace_class(
    described: PatchConfig, name: str, cls: type[nn.Module] | ForwardOf, dependencies: Dependencies
) -> None:
    if isinstance(cls, ForwardOf):
        cls.on(vars(dependencies.original)[name])  # raises if its signature doesn't fit
        _replace_forward(described, name, cls.layer, dependencies)
        return
    if MADE in cls.__module__:
        raise described.error(
            f"the replacement of {name} was made by to_patcher() of a config. Use that config: "
            "generate(), write(), or include() in another one."
        )
    home = cls.__module__.split(".")[0]
    if home in ("torch", "transformers") and "." not in cls.__qualname__:
        described.patches.append(create_patch_from_external(name, cls.__module__, cls.__name__))
        return
    call = f"from_patcher(), for {cls.__qualname__},"
    described.replace_class(name, cls, name_map=dependencies.add(cls, call))


def _replace_forward(described: PatchConfig, name: str, layer: type[nn.Module], dependencies: Dependencies) -> None:
    call = f"from_patcher(), for forward_of({layer.__qualname__}),"
    if refused := [flag for flag in FLAGS if not getattr(layer, flag, True)]:
        flags = " and ".join(f"{flag} = False" for flag in refused)
        raise described.error(
            f"{call} has a layer with {flags}, which a file can't refuse. Load with the patcher itself."
        )
    forward: Any = layer.forward
    name_map, modeling = dependencies.add(forward, call), dependencies.original
    decorators = map(decorator_name, decorators_of(file_tree(modeling.__file__ or ""), name))
    dropped = list(filter(replaces_forward, decorators))
    if dropped:  # a kernel would run instead
        described.drop_decorators(name, *dropped)
    described.override_method(f"{name}.forward", forward, f"of {layer.__name__}", name_map, keep_decorators=False)
