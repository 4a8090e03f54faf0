"""What the fusions do to one architecture, beside what stock does to it.

>>> from tests.coverage.checks import examine
>>> result = examine("LlamaForCausalLM", ("qkv", "gate_up"))
>>> {family: (row["status"], row["fusable"], row["fused"]) for family, row in result["families"].items()}
{'qkv': ('passed', 2, 2), 'gate_up': ('passed', 2, 2)}

A row says `passed` where all that the stock model shows to be fusable (see `tests/coverage/truth.py`) is fused, and

- all outputs are stock's: max abs 1e-5 in float32, with eager attention and with sdpa,
- the gradients of all parameters are stock's, taken apart as the weights are,
- a joined projection is called once where stock calls each of its parts once,
- the saved files are byte for byte those that the stock load saves, and the weights that stream are what is in them,
- such a stream makes the stock model what it was, and a fused one too, in place and in any order,
- a save in the fused layout loads again, by its config alone, with the same bits.

Where rounding in float32 exceeds 1e-5, because numbers are large or layers many, the comparison is repeated in
float64, in relation to the largest number.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from patcher.fusions.families import fusion_named
from patcher.fusions.finding import Surroundings
from patcher.verification.inputs import Pass, chosen_passes
from tests.coverage.inputs import particular_passes
from tests.coverage.models import class_named, randomize
from tests.coverage.truth import (
    calls_of,
    modules_with_tied_weights,
    packed_layers,
    patch_projections,
    roles,
    stacks,
)
from tests.support.small_configs import small_configs

__all__ = ["FAMILIES", "FUSIONS", "TOLERANCE", "NotExaminedError", "examine"]

FUSIONS = ("qkv", "kv", "gate_up", "siblings", "patch_embeddings", "sequential_experts")
FAMILIES = (*FUSIONS, "split")
TOLERANCE = 1e-5
#: Parameters of a model that is still examined.
LARGEST = 250_000_000


class NotExaminedError(Exception):
    """Stock itself can't build, save, load or run the model here."""


def examine(name: str, families: tuple[str, ...] = FAMILIES) -> dict[str, Any]:
    """A row for each family that finds something in the architecture, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            reference = Reference(class_named(name), Path(folder))
        except NotExaminedError as error:
            reason = str(error).replace(folder, "FOLDER")
            return {"name": name, "status": "not examined", "reason": reason, "families": {}}
        rows = {family: _row(family, reference) for family in families}
    return {
        "name": name,
        "status": "examined",
        "reason": "",
        "families": {family: row for family, row in rows.items() if row["status"] != "nothing"},
    }


# --- stock ---------------------------------------------------------------------------------------------------------


class Reference:
    """What the stock model does, once for all families."""

    def __init__(self, model_class: Any, path: Path) -> None:
        self.model_class, self.path = model_class, path
        self._checkpoint()
        with contextlib.suppress(ValueError, ImportError):  # not every model has it
            self.outputs["sdpa"] = self.run(self.load("checkpoint", attn_implementation="sdpa"))
        self.gradients = gradients_of(self.stock, self.passes)
        self.stock.save_pretrained(path / "stock")
        if difference := unlike_stream(self.stock, path / "stock"):
            raise AssertionError(f"the stock model streams other weights: {difference}")
        self.calls = calls_of(self.stock, lambda: outputs_of(self.stock, self.passes))
        self.stacks = stacks(self.stock, lambda: outputs_of(self.stock, self.passes))
        self.patches = patch_projections(self.stock)
        self.packed = packed_layers(self.stock, lambda: outputs_of(self.stock, self.passes))

    @property
    def keeps_names(self) -> bool:
        """Whether stock saves what it has loaded under the names that it has loaded."""
        checkpoint, stock = (tensors_in(self.path / folder).keys() for folder in ("checkpoint", "stock"))
        return checkpoint == stock

    passes: list[Pass]
    stock: Any
    outputs: dict[str, list[torch.Tensor]]

    def _checkpoint(self) -> None:
        """Save a small model with random weights, and run it."""
        first: Exception | None = None
        try:
            for config in small_configs(self.model_class.config_class):
                try:
                    _check_size(self.model_class, config)
                    torch.manual_seed(0)
                    model = self.model_class(config).eval()
                    randomize(model)
                    self.passes = chosen_passes(model, particular_passes(model))
                    model.save_pretrained(self.path / "checkpoint")
                    self._run_stock()
                    return
                except Exception as error:
                    first = first or error
                    shutil.rmtree(self.path / "checkpoint", ignore_errors=True)
        except Exception as error:
            first = first or error
        if isinstance(first, NotExaminedError):
            raise first
        raise NotExaminedError(_short(first) if first else "no config") from first

    def _run_stock(self) -> None:
        try:
            self.stock = self.load("checkpoint")
            self.outputs = {"eager": self.run(self.stock)}
        except Exception as error:
            raise NotExaminedError(f"stock doesn't run what it has saved: {_short(error)}") from error
        if not any(output.numel() for output in self.outputs["eager"]):
            raise NotExaminedError("stock computes nothing")
        if any(output.isnan().any() for output in self.outputs["eager"]):
            raise NotExaminedError("stock computes numbers that are none (nan)")

    def load(self, folder: str, **options: Any) -> Any:
        """The model from a folder, with what can be compared: eager attention, and experts one after the other."""
        options = {"attn_implementation": "eager"} | options
        model = self.model_class.from_pretrained(self.path / folder, **options).eval()
        for part in model.modules():
            if isinstance(part, PreTrainedModel) and part._can_set_experts_implementation():
                part.set_experts_implementation("eager")
        return model

    def run(self, model: nn.Module) -> list[torch.Tensor]:
        with torch.no_grad():
            return outputs_of(model, self.passes)


def _check_size(model_class: Any, config: Any) -> None:
    from patcher.resolution.resolution import skeleton

    size = sum(parameter.numel() for parameter in skeleton(model_class, config).parameters())
    if size > LARGEST:
        raise NotExaminedError(f"{size / 1e6:.0f} M parameters, even when shrunk")


def gradients_of(model: Any, passes: list[Pass]) -> dict[str, torch.Tensor] | None:
    """The gradients of all parameters, in the layout of the checkpoint; None where stock has none."""
    from patcher.loading.saving import saved_state_dict

    try:
        outputs = [output for output in outputs_of(model, passes) if output.requires_grad]
        if not outputs:
            return None
        torch.stack([output.square().mean() for output in outputs]).sum().backward()
    except (RuntimeError, AssertionError):  # what the model does can't be differentiated, or only in training
        return None
    found = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    model.zero_grad()
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    return saved_state_dict(model, {name: zeros[name] if (g := found.get(name)) is None else g for name in zeros})


# --- one family ----------------------------------------------------------------------------------------------------


def _row(family: str, reference: Reference) -> dict[str, Any]:
    from patcher import Patcher

    patcher = Patcher(fusions=family)
    row: dict[str, Any] = {"fusable": 0, "fused": 0}
    try:
        resolution = patcher.resolve(reference.model_class, reference.stock.config)
        fused = set(resolution.fused)
        expected, unlike = _truth(family, reference)
        row |= {"fusable": len(expected), "fused": len(fused), "unreached": len(fused - expected - unlike)}
        row["modules"] = dict(
            Counter(cls.__name__ for path, cls in resolution.original_classes.items() if path in fused)
        )
        refused = resolution.refused
        reasons = Counter(refused.get(path) or _untold(family, path, reference) for path in sorted(expected - fused))
        row["left"] = dict(Counter(reason for path, reason in refused.items() if path not in expected))
        if wrong := fused & unlike:
            return row | {"status": "WRONG", "reason": f"fused, but stock shows otherwise: {sorted(wrong)[:3]}"}
        if not fused:
            status = "refused" if expected else "left alone" if resolution.refused else "nothing"
            return row | {"status": status, "reason": "; ".join(reasons)[:400]}
        if failure := _compare(family, reference, patcher, row, fused, expected):
            return row | {"status": "FAILED", "reason": failure}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return row | {"status": "FAILED", "reason": f"{_short(error)} ({Path(last.filename).name}:{last.lineno})"}
    finally:
        for name in ("fused", "layout"):
            shutil.rmtree(reference.path / name, ignore_errors=True)
    if not expected:
        return row | {"status": "not reached", "reason": "no pass of the stock model reaches what is fused"}
    if reasons:
        return row | {"status": "partly", "reason": f"{reasons.total()} left alone: {'; '.join(reasons)}"[:400]}
    return row | {"status": "passed", "reason": ""}


def _untold(family: str, path: str, reference: Reference) -> str:
    """Why a module is left alone, where that isn't worth a line of a report."""
    model = reference.stock
    decision = fusion_named(family).decide(path, model.get_submodule(path), Surroundings(model))
    return decision.refusal if decision is not None and decision.refusal else "the fusion doesn't see it"


def _truth(family: str, reference: Reference) -> tuple[set[str], set[str]]:
    """The modules that stock shows to be fusable, and those that it shows not to be."""
    modules = dict(reference.stock.named_modules(remove_duplicate=False))
    tied = modules_with_tied_weights(reference.stock)
    if family == "patch_embeddings":
        return reference.patches - tied, modules.keys() - reference.patches
    if family == "sequential_experts":
        return reference.stacks - tied, set()
    if family == "split":
        return reference.packed - tied, set()
    if family == "siblings":
        return {path for path, calls in reference.calls.items() if _siblings(path, calls, tied)}, set()
    expected, unlike = set(), set()
    for module, calls in reference.calls.items():
        for group in fusion_named(family).groups(calls):  # type: ignore[attr-defined]
            same = all(calls[name] == calls[group[0]] for name in group)
            if family == "kv" and same and _with_their_queries(calls, group):
                continue  # three of one input are for `qkv`
            same = same and not tied.intersection(f"{module}.{name}".lstrip(".") for name in group)
            (expected if same else unlike).add(module)
            break
    return expected, unlike


def _siblings(path: str, calls: dict[str, Any], tied: set[str]) -> bool:
    """Whether several linear layers of a module always receive the same tensors."""
    given = [tuple(each) for name, each in calls.items() if f"{path}.{name}".lstrip(".") not in tied]
    return len(given) > len(set(given))


def _with_their_queries(calls: dict[str, Any], group: tuple[str, ...]) -> bool:
    """Whether queries receive what their keys and values do."""
    triples = fusion_named("qkv").groups(calls)  # type: ignore[attr-defined]
    return any(triple[1:] == group and calls[triple[0]] == calls[group[0]] for triple in triples)


def _compare(
    family: str, reference: Reference, patcher: Any, row: dict[str, Any], fused: set[str], expected: set[str]
) -> str:
    """What is wrong with the fused model, or ""."""
    row["max_abs"] = 0.0
    model: Any = None
    for attention, outputs in reversed(reference.outputs.items()):  # eager last: it goes on
        model = reference.load("checkpoint", attn_implementation=attention, patcher=patcher)
        row["max_abs"] = max(row["max_abs"], distance(outputs, reference.run(model)))
    gradients = gradients_of(model, reference.passes)
    if (gradients is None) is not (reference.gradients is None):
        return "only one of the two can be trained"
    row["gradients"] = gradient_distance(reference.gradients, gradients)
    if max(row["max_abs"], row["gradients"] or 0.0) > TOLERANCE and (failure := _exactly(reference, patcher, row)):
        return failure
    if family in ("qkv", "kv", "gate_up", "siblings") and (
        failure := _called_as_often(reference, model, expected & fused)
    ):
        return failure
    if family == "patch_embeddings" and (failure := _patch_by_patch(reference.stock, model, row)):
        return failure
    if family == "split" and (failure := _other_roles(reference, model, expected & fused, row)):
        return failure
    model.save_pretrained(reference.path / "fused")
    if difference := _unlike_files(reference.path / "stock", reference.path / "fused"):
        return f"saves other files: {difference}"
    model.save_pretrained(reference.path / "layout", save_original_format=False)
    again = reference.load("layout")
    difference = unlike_stream(model, reference.path / "stock") or _not_refilled(model, reference.stock)
    if reference.keeps_names:
        difference = difference or _not_refilled(reference.stock, again)
    else:  # and from the fused layout it isn't known which names the checkpoint had
        difference = difference or unlike_stream(again, reference.path / "checkpoint")
    if difference:
        return f"streams other weights: {difference}"
    mine, theirs = model.state_dict(), again.state_dict()
    if mine.keys() != theirs.keys() or not all(_same_bits(mine[key], theirs[key]) for key in mine):
        return "the fused layout loads as another model"
    # The same bits at other addresses are multiplied in another order.
    if relative(reference.run(model), reference.run(again)) > TOLERANCE:
        with in_float64():
            pair = reference.load("checkpoint", dtype=torch.float64, patcher=patcher), again.double()
            if relative(*map(reference.run, pair)) > TOLERANCE:
                return "the fused layout computes something else"
    return ""


def _exactly(reference: Reference, patcher: Any, row: dict[str, Any]) -> str:
    """The comparison where rounding is no excuse: in float64, by the size of the numbers."""
    with in_float64():
        stock, model = (reference.load("checkpoint", dtype=torch.float64, patcher=one) for one in (None, patcher))
        outputs = relative(reference.run(stock), reference.run(model))
        gradients = gradient_distance(*(gradients_of(one, reference.passes) for one in (stock, model))) or 0.0
    row["relative_float64"] = outputs
    if outputs > TOLERANCE or gradients > TOLERANCE:
        return f"outputs differ by {outputs:.1e}, gradients by {gradients:.1e} of their size, in float64"
    return ""


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Also for what modeling code makes itself."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _called_as_often(reference: Reference, model: Any, paths: set[str]) -> str:
    """A joined projection that is called for each of its parts would be right, and slower than stock."""
    calls = calls_of(model, lambda: outputs_of(model, reference.passes))
    for path in sorted(paths):
        joined = model.get_submodule(path)._joined
        stock = reference.calls[path][joined.projections[0]]
        if (mine := len(calls.get(path, {}).get(joined.name, ()))) != len(stock):
            return f"{path}: stock calls each projection {len(stock)} times, the joined one is called {mine} times"
    return ""


def _other_roles(reference: Reference, model: Any, paths: set[str], row: dict[str, Any]) -> str:
    """What is called by the name of another part, of one layer for each way of taking such a layer apart."""
    kinds: dict[Any, str] = {}
    for path in sorted(paths):
        kinds.setdefault((type(model.get_submodule(path.rpartition(".")[0])), type(model.get_submodule(path))), path)
    found = [roles(model, path, lambda: outputs_of(model, reference.passes)) for path in kinds.values()]
    row["roles"] = dict(Counter(each for each in found if each in ("confirmed", "unknown")))
    return next((each for each in found if each not in row["roles"]), "")


def _patch_by_patch(stock: nn.Module, model: nn.Module, row: dict[str, Any]) -> str:
    """Each convolution by itself, in float64: the passes may have left some out."""
    worst = 0.0
    for path, module in model.named_modules():
        if type(module).__name__ != "LinearPatchEmbedding":
            continue
        before, after = copy.deepcopy(stock.get_submodule(path)).double(), copy.deepcopy(module).double()
        for size in (2, 3):
            shape = [size * patch + size - 2 for patch in module.kernel_size]
            image = torch.randn(2, module.in_channels, *shape, dtype=torch.float64)
            with torch.no_grad():
                worst = max(worst, distance([before(image)], [after(image)]))
    return f"a convolution differs by {worst:.1e} in float64" if worst > 1e-9 else ""


# --- comparing -----------------------------------------------------------------------------------------------------


def outputs_of(model: nn.Module, passes: list[Pass]) -> list[torch.Tensor]:
    return [output for one in passes for output in one.of(model)]


def distance(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference; infinities must stand at the same places, and what is no number is infinitely far."""
    if [output.shape for output in expected] != [output.shape for output in found]:
        return float("inf")
    worst = 0.0
    for first, second in zip(expected, found, strict=True):
        if first.numel():
            difference = torch.where(first == second, torch.zeros_like(first), (first - second).abs())
            worst = max(worst, difference.nan_to_num(nan=float("inf")).max().item())
    return worst


def relative(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference, in relation to the largest finite number where that is above 1."""
    numbers = [output[output.isfinite()].abs() for output in expected]
    largest = max((values.max().item() for values in numbers if values.numel()), default=0.0)
    return distance(expected, found) / max(1.0, largest)


def gradient_distance(expected: dict[str, torch.Tensor] | None, found: dict[str, torch.Tensor] | None) -> float | None:
    """The largest difference of gradients, in relation to the largest of each where that is above 1; None without."""
    if expected is None or found is None:
        return None
    if expected.keys() != found.keys():
        return float("inf")
    worst = 0.0
    for key, gradient in expected.items():
        if gradient.numel() and gradient.is_floating_point():
            scale = max(1.0, gradient.abs().nan_to_num().max().item())
            worst = max(worst, distance([gradient], [found[key]]) / scale)
    return worst


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _unlike_files(one: Path, other: Path) -> str:
    names = {path.name for folder in (one, other) for path in folder.iterdir()}
    for name in sorted(names):
        if not (one / name).exists() or not (other / name).exists():
            return f"{name} is only one of them"
        if (one / name).read_bytes() != (other / name).read_bytes():
            return name
    return ""


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def unlike_stream(model: nn.Module, folder: Path) -> str:
    """Which of the weights that stream aren't those of the files."""
    from patcher import checkpoint_metadata, checkpoint_weights

    expected, found, shown = tensors_in(folder), dict(checkpoint_weights(model)), checkpoint_metadata(model)
    if other := sorted((found.keys() ^ expected.keys()) | (found.keys() ^ shown.keys())):
        return f"{other[0]} is only in one of both"
    for name, value in expected.items():
        if not _same_bits(value, found[name]) or (shown[name].dtype, shown[name].shape) != (value.dtype, value.shape):
            return name
    return ""


def _not_refilled(source: nn.Module, target: nn.Module) -> str:
    """Which parameter of a model isn't what it was, after the weights of another one of the same have gone into it."""
    from patcher import checkpoint_weights, load_checkpoint_weights

    before = {name: (value.data_ptr(), value.clone()) for name, value in target.state_dict().items()}
    own = {at for at, _ in before.values()}
    for _, value in checkpoint_weights(target):
        if value.is_floating_point() and value.untyped_storage().data_ptr() in own:
            value.fill_(0.5)
    load_checkpoint_weights(target, reversed([*checkpoint_weights(source)]))
    after = target.state_dict()
    return next((n for n, (at, v) in before.items() if after[n].data_ptr() != at or not _same_bits(after[n], v)), "")


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:240] if isinstance(error, NotExaminedError) else f"{type(error).__name__}: {text}"[:240]
