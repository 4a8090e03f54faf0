"""A runtime `Patcher` as a config: the readable file of what it does to the models of one modeling module."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from patcher import matching, seams
from patcher.codegen.config import PatchConfig
from patcher.codegen.dependencies import Dependencies
from patcher.codegen.executing import CONVERSIONS
from patcher.codegen.patches import create_patch_from_external
from patcher.codegen.rendering import render_conversions
from patcher.errors import CodegenError
from patcher.fusions.joined import JoinedProjections
from patcher.resolution import Resolution, resolve, skeleton

if TYPE_CHECKING:
    from patcher.patcher import Patcher

__all__ = ["from_patcher"]


def from_patcher(
    patcher: Patcher, model_class: type[PreTrainedModel], config: PretrainedConfig | None, target_file: str
) -> PatchConfig:
    """See `PatchConfig.from_patcher`."""
    shipped = importlib.import_module(model_class.__module__)
    stem = shipped.__name__.rpartition(".")[2]
    described = PatchConfig(
        shipped.__name__,
        target_file or f"patched_{stem}.py",
        f"What {_called(patcher)} does to the models of this module.",
    )
    if vars(shipped).get(model_class.__name__) is not model_class:
        raise CodegenError(
            f"{described.where}: from_patcher() needs a model class that its module has by its name, and "
            f"{shipped.__name__} has no such {model_class.__name__!r}. Give a class of a modeling file."
        )
    if config is None:
        config = model_class.config_class()
    replaced = _replaced_classes(patcher, shipped, described)
    resolution = resolve(patcher.replace(class_mapping=replaced), model_class, config)
    fused = _fused_classes(patcher, resolution, model_class, config, shipped, described)
    own = {name: cls for name, cls in fused.items() if not issubclass(cls, JoinedProjections)}
    targets = {cls: name for name, cls in (*replaced.items(), *own.items())}
    dependencies = Dependencies(described, shipped, targets)
    for name, cls in sorted(replaced.items()):
        _replace(described, name, cls, dependencies, "")
    for name, cls in sorted(fused.items()):
        if issubclass(cls, JoinedProjections):
            _join(described, vars(shipped)[name], cls)
        else:
            _replace(described, name, cls, dependencies, "fused")
    if not described.patches:
        raise CodegenError(f"{described.where}: {patcher!r} changes no class of {shipped.__name__}.")
    converted = (*resolution.fusion_transforms, *patcher.extra_weight_conversions)
    declared = (*patcher.filtered_weight_conversion_patterns, *patcher.new_weights, *patcher.dropped_weights)
    if converted or declared or _has_conversions(model_class, config):
        described.add_conversions(patcher.replace(extra_weight_conversions=converted))
    return described


def add_conversions(described: PatchConfig, patcher: Patcher) -> None:
    """See `PatchConfig.add_conversions`."""
    shipped = importlib.import_module(described.source_module)
    text = render_conversions(patcher, described, Dependencies(described, shipped, {}))
    described.add_post_import_block(text, "how checkpoints of the original become those of the models here, and back")
    _load_and_save(described, shipped)


def _called(patcher: Patcher) -> str:
    return f"the patcher {patcher.name!r}" if patcher.name else "a patcher"


def _module_classes(shipped: ModuleType) -> dict[str, type[nn.Module]]:
    return {
        name: value
        for name, value in vars(shipped).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == shipped.__name__
    }


def _replaced_classes(patcher: Patcher, shipped: ModuleType, described: PatchConfig) -> dict[str, type[nn.Module]]:
    """Class of the module -> replacement, for every class key of the patcher."""
    own = _module_classes(shipped)
    found: dict[str, type[nn.Module]] = {}
    hit: set[str] = set()
    for name in own:
        key = matching.find_key(name, patcher.class_mapping)
        if key is not None:
            found[name] = patcher.class_mapping[key]
            hit.update(matching.hits(name, patcher.class_mapping))
    for group in patcher.any_of:
        if hit.intersection(group):
            hit.update(group)
    for key in patcher.class_mapping:
        if key not in hit:
            near = matching.nearest(key, own)
            hint = f"Nearest: {', '.join(near)}. " if near else ""
            raise CodegenError(
                f"{described.where}: no class of {shipped.__name__} matches the class key {key!r}. "
                f"{hint}A generated file holds the classes of one "
                "module: for a class of another one call from_patcher() with a model of that module."
            )
    return found


def _fused_classes(
    patcher: Patcher,
    resolution: Resolution,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    shipped: ModuleType,
    described: PatchConfig,
) -> dict[str, type[nn.Module]]:
    """Class of the module -> its fused class: a file has one forward for a class, so all objects must be fused."""
    found: dict[str, type[nn.Module]] = {}
    own = _module_classes(shipped)
    if not resolution.fused:
        if patcher.fusions:
            refused = "; ".join(sorted(set(resolution.refused.values()))[:3])
            raise CodegenError(
                f"{described.where}: the fusions {list(patcher.fusions)!r} find nothing to fuse in "
                f"{model_class.__name__}{': ' + refused if refused else ''}."
            )
        return found
    for path, cls in resolution.fused.items():
        original = resolution.originals[path]
        if own.get(original.__name__) is not original:
            raise CodegenError(
                f"{described.where}: a fusion takes {path}, a {original.__name__} of {original.__module__}, which is "
                f"not defined in {shipped.__name__}. Call from_patcher() with a model of that module."
            )
        if found.setdefault(original.__name__, cls) is not cls:
            raise CodegenError(
                f"{described.where}: {original.__name__} is fused in more than one way in {model_class.__name__}, "
                "and a file has one way for a class. Load with the patcher itself."
            )
    for path, module in skeleton(model_class, config).named_modules():
        if found.get(type(module).__name__) is not None and path not in resolution.fused:
            reason = resolution.refused.get(path, "")
            raise CodegenError(
                f"{described.where}: {path} is not fused{f' ({reason})' if reason else ''}, and others of its class, "
                f"{type(module).__name__}, are: a file has one forward for a class. Load with the patcher itself."
            )
    return found


def _replace(
    described: PatchConfig, name: str, cls: type[nn.Module], dependencies: Dependencies, description: str
) -> None:
    home = cls.__module__.split(".")[0]
    if home in ("torch", "transformers") and "<locals>" not in cls.__qualname__:
        described.patches.append(create_patch_from_external(name, cls.__module__, cls.__qualname__, description))
        return
    asked = f"from_patcher(), for {cls.__qualname__},"
    described.replace_class(name, cls, description, dependencies.bring(cls, asked))


# --- projections that are joined -----------------------------------------------------------------------------------

_JOIN = '''
def joined_linear(module, names, joined):
    """Put one nn.Linear in the place of several with the same input: its rows are theirs, in the order of the names.

    The module keeps how many rows each had as `<joined>_sizes`.
    """
    parts = [module._modules.pop(name) for name in names]
    biased = [part.bias is not None for part in parts]
    sizes = [part.out_features for part in parts]
    linear = nn.Linear(parts[0].in_features, sum(sizes), bias=all(biased), device="meta")
    linear.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]))
    if all(biased):
        linear.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]))
    elif any(biased):  # they are added after the split
        for name, part in zip(names, parts):
            if part.bias is not None:
                module.register_parameter(f"{name}_bias", part.bias)
    setattr(module, joined, linear)
    setattr(module, f"{joined}_sizes", sizes)
'''


def _join(described: PatchConfig, original: type[nn.Module], fused: Any) -> None:
    """The rewritten methods of a class whose projections are joined, and its `__init__`."""
    joined, name = fused._joined, original.__name__
    listed = ", ".join(joined.projections)
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(fused))).body
    assert isinstance(node, ast.ClassDef)
    text = textwrap.dedent(inspect.getsource(fused)).splitlines(keepends=True)
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    rewritten = {method.name for method in methods}
    for method in methods:
        first = min([method.lineno, *(decorator.lineno for decorator in method.decorator_list)])
        code = textwrap.dedent("".join(text[first - 1 : method.end_lineno]))
        if f"super().{method.name}(" in code:
            raise CodegenError(
                f"{described.where}: whether {name}.{method.name} is fused is decided call by call, and a file has "
                "one forward for a class. Load with the patcher itself."
            )
        described.override_method(f"{name}.{method.name}", code, f"{listed} are one {joined.name}")
    _check_uses(described, original, joined.projections, rewritten)
    wrapper = (
        "def with_joined(original_init, self, *args, **kwargs):\n"
        "    original_init(self, *args, **kwargs)\n"
        f"    joined_linear(self, {list(joined.projections)!r}, {joined.name!r})\n"
    )
    described.modify_init(name, wrapper.replace("'", '"'), f"one {joined.name} in place of {listed}")
    if all(helper.source.name != "joined_linear" for helper in described.helpers):
        described.add_helper(_JOIN, "projections of one input as one")
        _import_torch(described, sys.modules[original.__module__])


def _import_torch(described: PatchConfig, shipped: ModuleType) -> None:
    """`torch` and `nn`, unless the file has them; it may have written `import torch.nn as nn`."""
    if vars(shipped).get("torch") is not torch:
        described.add_import("torch", is_from_import=False)
    if vars(shipped).get("nn") is not nn:
        described.add_import("torch", names=["nn"])


def _check_uses(
    described: PatchConfig, original: type[nn.Module], projections: tuple[str, ...], rewritten: set[str]
) -> None:
    """Nothing else in the class, or in one that inherits from it, may look for what is joined."""
    for cls in [original, *_subclasses(original)]:
        for name, value in vars(cls).items():
            inner = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
            if not inspect.isfunction(inner) or name == "__init__" or (cls is original and name in rewritten):
                continue
            tree = ast.parse(textwrap.dedent(inspect.getsource(inner)))
            used = {part.attr for part in ast.walk(tree) if isinstance(part, ast.Attribute)} & set(projections)
            if used:
                raise CodegenError(
                    f"{described.where}: {cls.__name__}.{name} uses {', '.join(sorted(used))} as well, which the "
                    "file would no longer have. Load with the patcher itself."
                )


def _subclasses(cls: type[nn.Module]) -> list[type[nn.Module]]:
    return [
        other
        for other in matching.module_subclasses()
        if other is not cls and issubclass(other, cls) and other.__module__ == cls.__module__
    ]


# --- loading and saving --------------------------------------------------------------------------------------------

_SHIPPED = '''
def shipped_class(cls):
    """The class of transformers in whose checkpoints a class of this file, or one that inherits from it, lives."""
    own = next(base for base in cls.__mro__ if base.__module__ == __name__)
    return getattr(shipped, own.__name__)
'''

_WITH = f'''
def with_conversions(cls, patcher):
    """What a load of the shipped class has to do to become one of `cls`."""
    own = {CONVERSIONS}.replace(class_mapping={{shipped_class(cls).__name__: cls}})
    return own if patcher is None else own | patcher
'''

_METHODS = {
    "from_pretrained": (
        '''
@classmethod
def from_pretrained(cls, *args, patcher=None, **kwargs):
    """Read a checkpoint of the shipped model."""
    return shipped_class(cls).from_pretrained(*args, patcher=with_conversions(cls, patcher), **kwargs)
''',
        "checkpoints of the original are converted",
    ),
    "_from_config": (
        '''
@classmethod
def _from_config(cls, config, *args, patcher=None, **kwargs):
    """Build a model that saves as the shipped one does."""
    return shipped_class(cls)._from_config(config, *args, patcher=with_conversions(cls, patcher), **kwargs)
''',
        "what is made without a checkpoint saves one of the original",
    ),
    "save_pretrained": (
        '''
def save_pretrained(self, *args, **kwargs):
    """Write a checkpoint of the shipped model."""
    if report(self).patchers:
        return super().save_pretrained(*args, **kwargs)
    # Made by a call of the class, which knows nothing of conversions: a model that does, with the same weights.
    with torch.device("meta"):
        model = self._from_config(self.config)
    model.load_state_dict(self.state_dict(), assign=True)
    return model.save_pretrained(*args, **kwargs)
''',
        "so is what is made by a call of the class",
    ),
}


def _load_and_save(described: PatchConfig, shipped: ModuleType) -> None:
    """Have the models of the file read and write the checkpoints of the original."""
    package, _, stem = shipped.__name__.rpartition(".")
    _import_torch(described, shipped)
    described.add_import(package, names=[f"{stem} as shipped"])
    described.add_import("patcher", names=["report"])
    described.add_helper(_SHIPPED)
    described.add_helper(_WITH)
    for name, cls in _module_classes(shipped).items():
        bases = [base for base in cls.__mro__[1:] if base.__module__ == shipped.__name__]
        if not issubclass(cls, PreTrainedModel) or any(issubclass(base, PreTrainedModel) for base in bases):
            continue
        for method, (text, why) in _METHODS.items():
            if method in vars(cls):
                raise CodegenError(
                    f"{described.where}: {name} has a {method} of its own, which the file would have to replace. "
                    "Load with the patcher itself."
                )
            described.override_method(f"{name}.{method}", text, why, new=True)


def _has_conversions(model_class: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    # transformers gives these to its own classes only, and so not to those of a file.
    return bool(seams.stock_conversions(skeleton(model_class, config), legacy=False))
