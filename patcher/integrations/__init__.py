"""Integrations with other libraries, one file per library: any of them can be deleted without touching the rest.

A file registers its `Integration` when it is imported, and it is imported when its library is.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from patcher.loading.hooks import install_core
from patcher.loading.integration import install_seams_of
from patcher.source.importing import when_imported

#: Integration -> the modules of its library in which it has seams; importing any of them imports the integration.
INTEGRATIONS = {
    "accelerate": ("accelerate.utils.modeling",),
    "exporters": ("transformers.exporters.utils",),
    "gguf": ("transformers.quantizers.quantizer_gguf",),
    "kernels": ("transformers.integrations.hub_kernels",),
    "parallel": ("transformers.distributed.tensor_parallel",),
    "peft": ("peft.tuners.tuners_utils", "peft.utils.transformers_weight_conversion"),
    "pipelines": ("transformers.pipelines",),
    "quantizers": ("transformers.quantizers.base",),
    "trainer": ("transformers.trainer_utils", "transformers.trainer"),
}

_installed = False


def install() -> None:
    """Add the argument `patcher=` to `from_pretrained` and `from_config`. Using any public name does it, once.

    >>> import inspect
    >>> import patcher
    >>> from transformers import LlamaForCausalLM
    >>> patcher.install()
    >>> inspect.signature(LlamaForCausalLM.from_pretrained).parameters["patcher"]
    <Parameter "patcher: patcher.spec.patcher.Patcher | None = None">

    Type checkers accept a value of any type, since transformers declares these methods with `**kwargs`. A value that
    isn't a patcher is refused when they are called.

    Raises:
        PatcherError: if this release of transformers lacks a seam that the hook relies on.
    """
    global _installed
    if _installed:
        return
    install_core()
    for name, modules in INTEGRATIONS.items():
        for module in modules:
            when_imported(module, functools.partial(_import_integration, name))
    _installed = True  # last, so that another thread doesn't return before the hooks are in place


def _import_integration(name: str, module: ModuleType) -> None:
    importlib.import_module(f"{__name__}.{name}")
    install_seams_of(name)
