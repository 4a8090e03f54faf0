"""Is a generated file right? `patcher.codegen.verify(config)`, and `patcher codegen verify` on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from patcher.codegen.bridges.to_patcher import to_patcher
from patcher.codegen.generation.generator import Generated, build
from patcher.codegen.spec import PatchSpec
from patcher.construction.in_force import unpatched
from patcher.display.parts import Table
from patcher.display.shown import Shown
from patcher.errors import CodegenError, UnmatchedPatchError, VerificationError
from patcher.spec.patcher import Patcher
from patcher.verification.checks import Run
from patcher.verification.comparing import Stage, UncheckedError, said
from patcher.verification.inputs import chosen_passes
from patcher.verification.progress import progress, quiet
from patcher.verification.ran_patches import RanPatches
from patcher.verification.sides import Side
from patcher.verification.small_configs import small_config
from patcher.verification.verify import global_state_kept, random_checkpoint

#: What is compared of a file, on the quick inputs: beside stock all of it, beside the runtime patch what is computed.
_STAGES = ("load", "outputs", "gradients", "save")
_COUNTS = (("outputs", "inputs"), ("save", "tensors"))
#: Which models of a module are tried first: those that hold the others.
_ORDER = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "For", "")


@dataclass(frozen=True)
class VerifiedModel:
    """One model of a generated file, beside stock and beside the runtime patch.

    Attributes:
        name: its class.
        patched: whether the runtime patch changes it.
        stages: what was compared with stock.
        failures: what is wrong.
    """

    name: str
    patched: bool
    stages: tuple[Stage, ...]
    failures: tuple[str, ...] = ()

    def figures(self, stage: str) -> dict[str, float]:
        """What a stage has measured."""
        return next((dict(each.figures) for each in self.stages if each.name == stage and each.checked), {})

    @property
    def outputs(self) -> tuple[float, float]:
        """The largest difference of its outputs from stock's: (absolute, relative)."""
        found = self.figures("outputs")
        return found.get("max abs", math.inf), found.get("max relative", math.inf)

    @property
    def gradients(self) -> tuple[float, float] | None:
        """The same of its gradients, in the layout of the checkpoint; None where stock can't be trained."""
        found = self.figures("gradients")
        return (found["max abs"], found["max relative"]) if found else None

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        stages = {stage.name: dict(stage.figures) for stage in self.stages}
        return vars(self) | {"stages": stages, "outputs": self.outputs, "gradients": self.gradients}


@dataclass(frozen=True)
class FileVerification(Shown):
    """What `patcher.codegen.verify` found.

    Attributes:
        source: the module that is patched.
        file: the name of the file.
        models: what was run, in this order.
        unrun: the patches that no model has run.
        failures: what is wrong.
        skipped: (class, why) of models that could not be run.
        seconds: the time that it took.
    """

    source: str
    file: str
    models: tuple[VerifiedModel, ...] = ()
    unrun: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return bool(self.models) and not self.failures

    def raise_on_failure(self) -> None:
        """Raise if something is wrong.

        Raises:
            VerificationError: with all that is.
        """
        if not self.passed:
            raise VerificationError(f"{self.file} is wrong:\n  " + "\n  ".join(self.failures or ("nothing was run",)))

    def to_dict(self) -> dict[str, Any]:
        """All of it in dicts, lists, texts and numbers, for JSON; `passed` besides."""
        return super().to_dict() | {"models": [model.to_dict() for model in self.models], "passed": self.passed}

    def _headline(self) -> str:
        apart = max((model.outputs[1] for model in self.models), default=0.0)
        right = f"as its config says, outputs {apart:.2g} (relative) from stock's"
        return f"{self.file}, of {self.source}: {right if self.passed else 'WRONG'} ({self.seconds:.1f} s)"

    def _parts(self) -> Iterator[Table]:
        rows: list[tuple[str, ...]] = []
        for each in self.models:
            figures = [each.outputs, each.gradients]
            apart = [f"{one[0]:.3g} ({one[1]:.3g})" if one is not None else "-" for one in figures]
            state = "FAILED" if each.failures else "passed" if each.patched else "unpatched"
            counts = [f"{each.figures(stage).get(what, 0):g}" for stage, what in _COUNTS]
            rows.append((each.name, state, counts[0], *apart, counts[1]))
        heads = ("model", "", "inputs", "outputs (relative)", "gradients (relative)", "tensors saved")
        yield Table("Models, and how far they are from stock", heads, rows)
        yield Table("Wrong", ("what",), [(text,) for text in self.failures])
        yield Table("Patches that never ran", ("patch",), [(text,) for text in self.unrun])
        yield Table("Not run", ("model", "why"), list(self.skipped))


def verify(
    config: PatchSpec,
    *,
    model_class: str | type[PreTrainedModel] | None = None,
    model_config: PretrainedConfig | None = None,
    tolerance: float | None = None,
    partly: bool = False,
    seed: int = 0,
) -> FileVerification:
    """Run small models of a generated file beside stock and beside the runtime patch of the same config.

    >>> from patcher.codegen import PatchConfig, verify
    >>> config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
    >>> _ = config.replace_function("rotate_half", "def rotate_half(x):\\n    return x.roll(x.shape[-1] // 2, -1)\\n")
    >>> found = verify(config)
    >>> found.passed, found.models[0].name, found.models[0].outputs[0] > 0.01  # the sign is missing
    (True, 'LlamaForCausalLM', True)

    A checkpoint of random weights is made by stock, of a small config. It is read by stock, by the file, and by stock
    with `config.to_patcher()`. File and runtime patch must compute the same to the bit, outputs and gradients, and
    both save what stock saves, byte for byte. How far they are from stock is told in numbers: only the author of a
    patch knows what is to differ. Models of the module are run until every patch has run.

    Args:
        config: the description of the file.
        model_class: the model to run, or its name; by default those of the module, one with a head first.
        model_config: a small config of it; by default one is made.
        tolerance: how far outputs may be from stock's, relative to their magnitude; ten times that for gradients.
        partly: let patches that never ran pass.
        seed: of the weights.

    Raises:
        CodegenError: the file can't be generated or imported, or there is no such model.
    """
    started = time.perf_counter()
    generated = build(config)
    models: list[VerifiedModel] = []
    skipped: list[tuple[str, str]] = []
    with (
        tempfile.TemporaryDirectory() as name,
        global_state_kept(seed),
        progress(f"verifying {config.target_file}", {}) as step,
        quiet(),
        _imported(generated, name) as module,
    ):
        original = importlib.import_module(config.source_module)
        patcher, wrong = _patcher(config, generated)
        ran = RanPatches(generated, module)
        for number, stock in enumerate(_candidates(config, original, module, model_class)):
            if models and not ran.missing() and model_class is None:
                break
            step(stock.__name__)
            scratch = Path(name) / str(number)
            try:
                with ran.noted():
                    folder = _checkpoint(stock, model_config, scratch, seed)
                    side = Side(getattr(module, stock.__name__), folder, name="the file", aligned=True)
                    models.append(_verified(Side(stock, folder, aligned=True), side, patcher, scratch, tolerance))
            except UncheckedError as error:
                skipped.append((stock.__name__, str(error)))
        unrun = tuple(ran.missing()) if models else ()
    failures = [*wrong, *(f"{model.name}: {text}" for model in models for text in model.failures)]
    failures += [] if partly else [f"{text} never ran" for text in unrun]
    if not models:
        failures += [f"no model could be run: {'; '.join(': '.join(each) for each in skipped) or 'there is none'}"]
    return FileVerification(
        source=config.source_module,
        file=config.target_file,
        models=tuple(models),
        unrun=unrun,
        failures=tuple(failures),
        skipped=tuple(skipped),
        seconds=time.perf_counter() - started,
    )


def _checkpoint(stock: Any, config: PretrainedConfig | None, scratch: Path, seed: int) -> Path:
    """One of random weights, of a config with which stock runs.

    Raises:
        UncheckedError: it doesn't run.
    """
    try:
        small = small_config(stock.config_class) if config is None else config
        unpatched(partial(random_checkpoint, stock, small, scratch / "checkpoint", seed))
        chosen_passes(unpatched(partial(stock.from_pretrained, scratch / "checkpoint")).eval())
    except Exception as error:
        hint = "; give model_config= (--model-config FOLDER), a small one with which it runs" if config is None else ""
        raise UncheckedError(f"{said(error)}{hint}") from error
    return scratch / "checkpoint"


def _verified(
    stock: Side, file: Side, patcher: Patcher | None, scratch: Path, tolerance: float | None
) -> VerifiedModel:
    """The file beside the runtime patch, which is to be the same to the bit, and beside stock."""

    def stages(theirs: Side, allowed: float, names: tuple[str, ...]) -> tuple[Stage, ...]:
        folder = scratch / f"{len(names)} stages"
        return tuple(Run(theirs, file, torch.float32, 0, folder, names, quick=True, allowed=allowed).stages())

    allowed = math.inf if tolerance is None else tolerance
    exact: tuple[Stage, ...] = ()
    failures: list[str] = []
    if patcher is not None:
        runtime = Side(stock.cls, stock.folder, patcher=patcher, aligned=True)
        try:
            exact = stages(runtime, 0.0, _STAGES[:-1])
        except UnmatchedPatchError:  # of parts that this model doesn't have
            allowed = 0.0
        except Exception as error:
            failures.append(f"the runtime patch can't be loaded: {said(error)}")
    found = stages(stock, allowed, _STAGES)
    for other, compared in (("the runtime patch", exact), ("stock", found)):
        for stage in compared:
            if not stage.passed:
                failures.append(f"the file and {other}: {stage.name}: {stage.message}")
    if not found[0].passed:
        failures = [f"the file can't be loaded: {found[0].message}"]
    return VerifiedModel(stock.class_name, bool(exact), found, tuple(failures))


@contextmanager
def _imported(generated: Generated, folder: str) -> Iterator[ModuleType]:
    """The file, written and imported as others will import it: from outside of transformers."""
    path = Path(folder, generated.config.target_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(generated.text.removeprefix("\ufeff"), generated.source.encoding, newline="")
    name = f"_verified_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise CodegenError(
                f"{generated.config.where}: {generated.config.target_file} can't be imported: {said(error)}"
            ) from error
        yield module
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def _patcher(config: PatchSpec, generated: Generated) -> tuple[Patcher | None, list[str]]:
    """The runtime patch; None where it would change nothing."""
    if not generated.patches:
        return None, []
    try:
        return to_patcher(config), []
    except CodegenError as error:
        if "to_patcher() would change nothing" in str(error):
            return None, []
        return None, [f"the runtime patch: {error}"]


def _candidates(
    config: PatchSpec, original: ModuleType, module: ModuleType, asked: str | type[PreTrainedModel] | None
) -> list[type[PreTrainedModel]]:
    """The models of the module that the file has as well, in the order in which they are tried."""
    found = {
        name: value
        for name, value in vars(original).items()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.__module__ == original.__name__
        if getattr(value, "config_class", None) is not None and isinstance(vars(module).get(name), type)
    }
    if asked is not None:
        name = asked if isinstance(asked, str) else asked.__name__
        if name not in found:
            raise config.error(f"verify() found no model {name!r} in {original.__name__}, only {', '.join(found)}.")
        return [found[name]]
    bases = {base for value in found.values() for base in value.__bases__ if base.__name__.endswith("PreTrainedModel")}
    names = [name for name, value in found.items() if value not in bases]
    return [found[name] for name in sorted(names, key=lambda each: [part in each for part in _ORDER].index(True))]
