"""Change the module classes of a Hugging Face model for one load, and save the original checkpoint back.

>>> from patcher import Patcher
>>> Patcher(fusions=["qkv", "gate_up"])  # for from_pretrained(..., patcher=)
Patcher(fusions=['qkv', 'gate_up'])
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from patcher import errors
from patcher.errors import *  # noqa: F403
from patcher.source.importing import after_imports_of, is_being_imported

if TYPE_CHECKING:
    from patcher import codegen as codegen, fusions as fusions, monkey_patching as monkey_patching, presets as presets
    from patcher.fusions.base import Fusion as Fusion
    from patcher.inspection.diff import ClassDiff as ClassDiff, Diff as Diff, diff as diff
    from patcher.inspection.plan import Plan as Plan, plan as plan
    from patcher.inspection.report import Report as Report, report as report
    from patcher.integrations import install as install
    from patcher.loading.new_weights import load_new_weights as load_new_weights, save_new_weights as save_new_weights
    from patcher.loading.state_dicts import (
        load_original_state_dict as load_original_state_dict,
        original_state_dict as original_state_dict,
    )
    from patcher.loading.streaming import (
        checkpoint_metadata as checkpoint_metadata,
        checkpoint_weights as checkpoint_weights,
        load_checkpoint_weights as load_checkpoint_weights,
    )
    from patcher.publishing import Exported as Exported, export as export
    from patcher.resolution.resolution import Resolution as Resolution
    from patcher.spec.fingerprints import fingerprint as fingerprint
    from patcher.spec.forward_of import ForwardOf as ForwardOf, forward_of as forward_of
    from patcher.spec.like import Like as Like, like as like
    from patcher.spec.patcher import Patcher as Patcher
    from patcher.training.optimizer_state import (
        load_original_optimizer_state_dict as load_original_optimizer_state_dict,
        original_optimizer_state_dict as original_optimizer_state_dict,
    )
    from patcher.training.parts import Part as Part, fused_parameters as fused_parameters
    from patcher.verification.benchmark import Benchmark as Benchmark, benchmark as benchmark
    from patcher.verification.comparing import Stage as Stage
    from patcher.verification.verify import Verification as Verification, compare as compare, verify as verify

    __version__: str

#: module of this package -> the public names in it
_NAMES = {
    "fusions.base": "Fusion",
    "inspection.diff": "ClassDiff Diff diff",
    "inspection.plan": "Plan plan",
    "inspection.report": "Report report",
    "integrations": "install",
    "loading.new_weights": "load_new_weights save_new_weights",
    "loading.state_dicts": "load_original_state_dict original_state_dict",
    "loading.streaming": "checkpoint_metadata checkpoint_weights load_checkpoint_weights",
    "publishing": "Exported export",
    "resolution.resolution": "Resolution",
    "spec.fingerprints": "fingerprint",
    "spec.forward_of": "ForwardOf forward_of",
    "spec.like": "Like like",
    "spec.patcher": "Patcher",
    "training.optimizer_state": "load_original_optimizer_state_dict original_optimizer_state_dict",
    "training.parts": "Part fused_parameters",
    "verification.benchmark": "Benchmark benchmark",
    "verification.comparing": "Stage",
    "verification.verify": "Verification compare verify",
}
_HOMES = {name: f"patcher.{module}" for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("codegen", "errors", "fusions", "monkey_patching", "presets")

__all__ = [*errors.__all__, *_HOMES, "__version__"]


def _installed() -> bool:
    """Install the hook once `modeling_utils` is imported and no module of transformers is being imported."""
    imported = [name for name in list(sys.modules) if name.startswith("transformers.")]
    if "transformers.modeling_utils" not in imported or any(map(is_being_imported, imported)):
        return False
    # Importing transformers must not fail because of this package. The first use of a public name raises instead.
    with contextlib.suppress(errors.PatcherError, ImportError, AttributeError):
        errors.public_name("patcher.integrations", "install")()
    return True


def __getattr__(name: str) -> Any:
    # Imported lazily, so that `import patcher` is fast; using any public name installs the hook.
    if name in _MODULES:
        return importlib.import_module(f"patcher.{name}")
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("patcher")
    elif name not in _HOMES:
        raise errors.no_such_name("patcher", name, __dir__())
    else:
        errors.public_name("patcher.integrations", "install")()
        value = errors.public_name(_HOMES[name], name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])


# Using a public name installs the hook too, but in `Model.from_pretrained(..., patcher=patcher.Patcher(...))` Python
# looks the method up before that.
after_imports_of("patcher", lambda name: name.startswith("transformers."), _installed)
