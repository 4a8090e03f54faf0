"""`patcher.codegen.verify`: compare the models of a generated file with stock, and with the runtime patch."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from patcher.codegen.bridges.to_patcher import to_patcher
from patcher.codegen.generation.generator import Generated, build
from patcher.codegen.spec import PatchSpec
from patcher.construction.in_force import unpatched
from patcher.display.parts import Notes, Part, Table
from patcher.errors import CodegenError, UnmatchedPatchError
from patcher.source.reading import unwrap
from patcher.spec.patcher import Patcher
from patcher.verification.comparing import error_text
from patcher.verification.inputs import chosen_passes
from patcher.verification.progress import isolated
from patcher.verification.sides import Side, random_checkpoint, small_config
from patcher.verification.verify import HEADS, Judged, Verification, compare

#: The stages beside stock; all but the last beside the runtime patch.
_STAGES = ("outputs", "gradients", "save")
#: The parts of class names in the order in which models are tried: those that contain the others first.
_ORDER = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "For", "")


@dataclass(frozen=True, repr=False)
class FileVerification(Judged):
    """The result of `patcher.codegen.verify`.

    Attributes:
        source: the module that is patched.
        file: the name of the file.
        models: the models of the file beside stock.
        exact: the same models beside the runtime patch, where outputs must be equal to the bit.
        unrun: the patches that no model has run; `partly` lets them pass.
        problems: other errors, such as a runtime patch that can't be loaded.
        skipped: (class, why) of models that could not be run.
        seconds: the time that it took.
    """

    source: str
    file: str
    models: tuple[Verification, ...] = ()
    exact: tuple[Verification, ...] = ()
    unrun: tuple[str, ...] = ()
    partly: bool = False
    problems: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def passed(self) -> bool:
        """Whether models were run, without failures."""
        return bool(self.models) and not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """The texts of all failures."""
        compared = [f"{model.model}: {what}: {text}" for what, model in self._compared for text in model.failures]
        return (*self.problems, *compared, *(f"{text} never ran" for text in self.unrun if not self.partly))

    def _error(self) -> str:
        text = f"{self.file} is wrong:\n  " + "\n  ".join(self.failures or ("nothing was run",))
        return "" if self.passed else text

    @property
    def _compared(self) -> list[tuple[str, Verification]]:
        exact = [("the file and the runtime patch", model) for model in self.exact]
        return [*exact, *(("the file and stock", model) for model in self.models)]

    def _headline(self) -> str:
        gap = max((model.figures("outputs").get("max relative", 0.0) for model in self.models), default=0.0)
        right = f"as its config says, outputs {gap:.2g} (relative) from stock's"
        return f"{self.file}, of {self.source}: {right if self.passed else 'WRONG'} ({self.seconds:.1f} s)"

    def _parts(self) -> Iterator[Part]:
        rows = [(model.model, what, *row) for what, model in self._compared for row in model.rows()]
        yield Table("The models of the file", ("model", "compared", *HEADS), rows)
        yield Notes("Wrong", self.problems, "bad")
        yield Notes("Patches that never ran", self.unrun, "warning" if self.partly else "bad")
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
    """Compare small models of a generated file with stock, and with the runtime patch of the same config.

    >>> from patcher.codegen import PatchConfig, verify
    >>> config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
    >>> _ = config.replace_function("rotate_half", "def rotate_half(x):\\n    return x.roll(x.shape[-1] // 2, -1)\\n")
    >>> result = verify(config)
    >>> (model,) = result.models
    >>> result.passed, model.model, model.figures("outputs")["max abs"] > 0.01  # the sign is missing
    (True, 'LlamaForCausalLM', True)

    Stock, the file, and stock with `config.to_patcher()` load one checkpoint of random weights of a small config, and
    are compared as `patcher.compare` compares any two models. The outputs and gradients of the file and the runtime
    patch must be equal to the bit, and the files that it saves those of stock, byte for byte. The difference of its
    outputs from stock's is only measured, since patches may be meant to change them. Models of the module are run
    until every patch has run.

    Args:
        config: the description of the file.
        model_class: the model to run, or its name; by default those of the module, one with a head first.
        model_config: a small config of it; by default one is generated.
        tolerance: of the outputs beside stock's, relative to their magnitude; ten times that for gradients.
        partly: let patches that never ran pass.
        seed: of the weights.

    Raises:
        CodegenError: the file can't be generated or imported, or has no such model.
        InvalidPatcherError: a tolerance that nothing can meet.
    """
    started = time.perf_counter()
    generated = build(config)
    models: list[Verification] = []
    exact: list[Verification] = []
    problems: list[str] = []
    skipped: list[tuple[str, str]] = []
    patcher: Patcher | None = None  # if it would change nothing, or can't be created
    try:
        patcher = to_patcher(config) if generated.patches else None
    except CodegenError as error:
        if "to_patcher() would change nothing" not in str(error):
            problems.append(f"the runtime patch: {error}")
    with (
        isolated(f"verifying {config.target_file}", seed, ()) as (folder, step),
        _imported(generated, folder) as module,
    ):
        left = _codes_of(generated, module)
        for stock in _candidates(config, importlib.import_module(config.source_module), module, model_class):
            if models and not left and model_class is None:
                break
            step(stock.__name__)
            with _removing_run(left):
                try:
                    small = small_config(stock.config_class) if model_config is None else model_config
                    checkpoint = unpatched(partial(random_checkpoint, stock, small, folder / stock.__name__, seed))
                    chosen_passes(unpatched(partial(stock.from_pretrained, checkpoint)).eval())
                except Exception as error:
                    hint = (
                        "; give model_config= (--model-config FOLDER), a small one with which it runs, or "
                        "model_class= (--model CLASS), a model around it that makes its inputs"
                    )
                    skipped.append((stock.__name__, error_text(error) + (hint if model_config is None else "")))
                    continue
                file = Side(getattr(module, stock.__name__), checkpoint, name="the file")
                allowed = math.inf if tolerance is None else tolerance
                if patcher is not None:
                    try:
                        runtime = Side(stock, checkpoint, patcher=patcher, name="the runtime patch")
                        exact.append(compare(runtime, file, stages=_STAGES[:-1], quick=True, tolerance=0.0))
                    except UnmatchedPatchError:  # of parts that this model doesn't have
                        allowed = 0.0
                    except Exception as error:
                        problems.append(f"{stock.__name__}: the runtime patch can't be loaded: {error_text(error)}")
                theirs = Side(stock, checkpoint, name="stock")
                models.append(compare(theirs, file, stages=_STAGES, quick=True, tolerance=allowed))
    if not models and not problems:
        problems = [f"no model could be run: {'; '.join(map(': '.join, skipped)) or 'there is none'}"]
    return FileVerification(
        source=config.source_module,
        file=config.target_file,
        models=tuple(models),
        exact=tuple(exact),
        unrun=tuple(left) if models else (),
        partly=partly,
        problems=tuple(problems),
        skipped=tuple(skipped),
        seconds=time.perf_counter() - started,
    )


@contextmanager
def _imported(generated: Generated, folder: Path) -> Iterator[ModuleType]:
    """Write the file, and import it from outside of transformers, as its users will."""
    path = folder / generated.config.target_file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(generated.text, "utf-8", newline="")
    name = f"_verified_{path.stem}_{id(generated)}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:
        try:
            exec(compile(generated.text, str(path), "exec", dont_inherit=True), vars(module))
        except Exception as error:
            raise CodegenError(
                f"{generated.config.where}: {generated.config.target_file} can't be imported: {error_text(error)}"
            ) from error
        yield module
    finally:
        del sys.modules[name]


def _candidates(
    config: PatchSpec, original: ModuleType, module: ModuleType, requested: str | type[PreTrainedModel] | None
) -> list[Any]:
    """Return the models of the module that the file has too, in the order in which they are tried."""
    models = {
        name: value
        for name, value in vars(original).items()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.__module__ == original.__name__
        if getattr(value, "config_class", None) is not None and isinstance(vars(module).get(name), type)
    }
    if requested is not None:
        name = requested if isinstance(requested, str) else requested.__name__
        if name not in models:
            raise config.error(f"verify() found no model {name!r} in {original.__name__}, only {', '.join(models)}.")
        return [models[name]]
    bases = {
        base for model in models.values() for base in model.__bases__ if base.__name__.endswith("PreTrainedModel")
    }
    names = [name for name, model in models.items() if model not in bases]
    return [models[name] for name in sorted(names, key=lambda name: [part in name for part in _ORDER].index(True))]


# --- which patches have run


def _codes_of(generated: Generated, module: ModuleType) -> dict[str, set[int]]:
    """Return the ids of the code of the functions of each patch that the author wrote."""
    result: dict[str, set[int]] = {}
    for patch in generated.patches:
        if patch.new and patch in generated.config.of_runtime:
            continue  # generated for loads and saves
        value: Any = module
        for part in patch.definition.split("."):
            value = vars(value).get(part) if isinstance(value, type | ModuleType) else None
        values = list(vars(value).values()) if isinstance(value, type) else [value]
        codes = {id(function.__code__) for function in map(unwrap, values) if isinstance(function, FunctionType)}
        result |= {f"{patch.kind.value} {patch.target}": codes} if codes else {}
    return result


@contextmanager
def _removing_run(left: dict[str, set[int]]) -> Iterator[None]:
    """Remove the patches of which a function is called."""
    called: set[int] = set()

    def record(frame: Any, event: str, _: object) -> None:
        if event == "call":
            called.add(id(frame.f_code))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        yield
    finally:
        sys.setprofile(before)
        for label in [label for label, codes in left.items() if codes & called]:
            del left[label]
