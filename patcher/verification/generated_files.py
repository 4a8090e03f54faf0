"""Is a generated file right? `patcher.codegen.verify(config)`, and `patcher codegen verify` on the command line."""

from __future__ import annotations

import importlib
import inspect
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
from patcher.spec.patcher import Patcher
from patcher.verification.comparing import error_text
from patcher.verification.inputs import chosen_passes
from patcher.verification.progress import under_way
from patcher.verification.sides import Side, random_checkpoint, small_config
from patcher.verification.verify import HEADS, Judged, Verification, compare

#: What is compared of a file, on the quick inputs: beside stock all of it, beside the runtime patch what is computed.
_STAGES = ("outputs", "gradients", "save")
#: Which models of a module are tried first: those that hold the others.
_ORDER = ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "For", "")
#: The file and the line of a function: code objects of the same text are equal wherever they are.
_Place = tuple[str, int]


@dataclass(frozen=True)
class FileVerification(Judged):
    """What `patcher.codegen.verify` found.

    Attributes:
        source: the module that is patched.
        file: the name of the file.
        models: the models of the file that were run, each beside stock.
        exact: those that the runtime patch changes, beside stock under it: the same to the bit.
        unrun: the patches that no model has run; `partly` lets them pass.
        problems: what else is wrong: what can't be loaded, or made.
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
        """Whether nothing is wrong."""
        return bool(self.models) and not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """What is wrong, a text for each."""
        found = [f"{each.model}: {what}: {text}" for what, each in self._compared for text in each.failures]
        return (*self.problems, *found, *(f"{text} never ran" for text in self.unrun if not self.partly))

    def _wrong(self) -> str:
        text = f"{self.file} is wrong:\n  " + "\n  ".join(self.failures or ("nothing was run",))
        return "" if self.passed else text

    @property
    def _compared(self) -> list[tuple[str, Verification]]:
        exact = [("the file and the runtime patch", each) for each in self.exact]
        return [*exact, *(("the file and stock", each) for each in self.models)]

    def _headline(self) -> str:
        apart = max((model.figures("outputs").get("max relative", 0.0) for model in self.models), default=0.0)
        right = f"as its config says, outputs {apart:.2g} (relative) from stock's"
        return f"{self.file}, of {self.source}: {right if self.passed else 'WRONG'} ({self.seconds:.1f} s)"

    def _parts(self) -> Iterator[Part]:
        rows = [(each.model, what, *row) for what, each in self._compared for row in each.rows()]
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
    >>> found = verify(config)
    >>> (model,) = found.models
    >>> found.passed, model.model, model.figures("outputs")["max abs"] > 0.01  # the sign is missing
    (True, 'LlamaForCausalLM', True)

    A checkpoint of random weights is made by stock, of a small config. It is read by stock, by the file, and by stock
    with `config.to_patcher()`, and they are compared as `patcher.compare` compares any two models. File and runtime
    patch must compute the same to the bit, outputs and gradients, and the file saves what stock saves, byte for byte.
    How far it is from stock is only measured: the author of a patch knows what is to differ. Models of the
    module are run until every patch has run.

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
    models: list[Verification] = []
    exact: list[Verification] = []
    problems: list[str] = []
    skipped: list[tuple[str, str]] = []
    patcher: Patcher | None = None  # where it would change nothing, or can't be made
    try:
        patcher = to_patcher(config) if generated.patches else None
    except CodegenError as error:
        if "to_patcher() would change nothing" not in str(error):
            problems.append(f"the runtime patch: {error}")
    with (
        under_way(f"verifying {config.target_file}", seed, ()) as (folder, step),
        _imported(generated, folder) as module,
    ):
        left = _places_of(generated, module)
        for stock in _candidates(config, importlib.import_module(config.source_module), module, model_class):
            if models and not left and model_class is None:
                break
            step(stock.__name__)
            with _running(left):
                try:
                    small = small_config(stock.config_class) if model_config is None else model_config
                    checkpoint = unpatched(partial(random_checkpoint, stock, small, folder / stock.__name__, seed))
                    chosen_passes(unpatched(partial(stock.from_pretrained, checkpoint)).eval())
                except Exception as error:
                    hint = "; give model_config= (--model-config FOLDER), a small one with which it runs"
                    skipped.append((stock.__name__, error_text(error) + (hint if model_config is None else "")))
                    continue
                file = Side(getattr(module, stock.__name__), checkpoint, name="the file")
                allowed = math.inf if tolerance is None else tolerance
                if patcher is not None:
                    try:
                        runtime = Side(stock, checkpoint, patcher=patcher)
                        exact.append(compare(runtime, file, stages=_STAGES[:-1], quick=True, tolerance=0.0))
                    except UnmatchedPatchError:  # of parts that this model doesn't have
                        allowed = 0.0
                    except Exception as error:
                        problems.append(f"{stock.__name__}: the runtime patch can't be loaded: {error_text(error)}")
                models.append(compare(Side(stock, checkpoint), file, stages=_STAGES, quick=True, tolerance=allowed))
    if not models and not problems:
        problems = [f"no model could be run: {'; '.join(': '.join(each) for each in skipped) or 'there is none'}"]
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
    """The file, written and imported as others will import it: from outside of transformers."""
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
    """The models of the module that the file has as well, in the order in which they are tried."""
    found = {
        name: value
        for name, value in vars(original).items()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.__module__ == original.__name__
        if getattr(value, "config_class", None) is not None and isinstance(vars(module).get(name), type)
    }
    if requested is not None:
        name = requested if isinstance(requested, str) else requested.__name__
        if name not in found:
            raise config.error(f"verify() found no model {name!r} in {original.__name__}, only {', '.join(found)}.")
        return [found[name]]
    bases = {base for value in found.values() for base in value.__bases__ if base.__name__.endswith("PreTrainedModel")}
    names = [name for name, value in found.items() if value not in bases]
    return [found[name] for name in sorted(names, key=lambda each: [part in each for part in _ORDER].index(True))]


# --- which patches have run


def _places_of(generated: Generated, module: ModuleType) -> dict[str, set[_Place]]:
    """Each patch of the author whose code can run, and where the functions are that it has written or imported."""
    found: dict[str, set[_Place]] = {}
    for patch in generated.patches:
        if patch.new and patch in generated.config.of_runtime:
            continue  # how the models of a file read and write, and heads that they may not have
        parts = patch.definition.split(".")
        if parts[-1] in ("setter", "deleter", "getter") and len(parts) > 2:
            parts.pop()
        value: Any = module
        for part in parts:
            value = vars(value).get(part) if isinstance(value, type | ModuleType) else None
        values = list(vars(value).values()) if isinstance(value, type) else [value]
        values += [each for one in values if isinstance(one, property) for each in (one.fget, one.fset, one.fdel)]
        functions = (inspect.unwrap(getattr(each, "__func__", each)) for each in values)
        codes = [each.__code__ for each in functions if isinstance(each, FunctionType)]
        found[f"{patch.kind.value} {patch.target}"] = {(code.co_filename, code.co_firstlineno) for code in codes}
    return {label: places for label, places in found.items() if places}


@contextmanager
def _running(left: dict[str, set[_Place]]) -> Iterator[None]:
    """Within, what runs is noted; afterwards only those are left that haven't."""
    seen: set[_Place] = set()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        for label in [label for label, places in left.items() if places & seen]:
            del left[label]
