"""What other libraries do with patched models, one file each: each can be taken out without touching the rest.

A file registers its `Integration` when it is imported, and it is imported when its library is.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from patcher.loading.hooks import install_core
from patcher.loading.integration import install_seams_of
from patcher.source.importing import when_imported

#: Integration -> the modules of its library of which one brings it: all in which it has seams.
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
    """Teach `from_pretrained` and `from_config` the argument `patcher=`. Done once; using any public name does it.

    >>> import inspect
    >>> import patcher
    >>> from transformers import LlamaForCausalLM
    >>> patcher.install()
    >>> inspect.signature(LlamaForCausalLM.from_pretrained).parameters["patcher"]
    <Parameter "patcher: patcher.spec.patcher.Patcher | None = None">

    Type checkers accept it, and a value of another type as well: transformers declares these methods with `**kwargs`.
    What isn't a patcher is refused when they are called.

    Raises:
        PatcherError: this release of transformers lacks a seam that the hook relies on.
    """
    global _installed
    if _installed:
        return
    install_core()
    for name, modules in INTEGRATIONS.items():
        for module in modules:
            when_imported(module, functools.partial(_bring, name))
    _installed = True  # not before, for another thread that comes meanwhile


def _bring(name: str, module: ModuleType) -> None:
    importlib.import_module(f"{__name__}.{name}")
    install_seams_of(name)
