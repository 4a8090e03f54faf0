"""`patcher.verify` and `patcher.compare`, and their result."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from patcher.display.parts import Cell, Notes, Part, Table, bar
from patcher.display.shown import Displayable, pluralize
from patcher.errors import InvalidPatcherError, VerificationError
from patcher.integrations import install
from patcher.patterns import compress, inside
from patcher.spec.patcher import Patcher
from patcher.spec.validation import not_a_patcher
from patcher.verification.checks import QUICK, STAGES, TOLERANCES, Run
from patcher.verification.comparing import Stage, requested
from patcher.verification.layers import LayerErrors
from patcher.verification.members import Guilty, guilty_of
from patcher.verification.progress import isolated
from patcher.verification.sides import Side, side_of

#: The columns of `Verification.rows`.
HEADS = ("stage", "", "measured", "allowed", "seconds", "")


class Judged(Displayable):
    """A result that passes or fails."""

    _also = ("passed", "failures")

    def _error(self) -> str:
        """The text of all failures, "" if there is none."""
        raise NotImplementedError

    def raise_on_failure(self) -> None:
        """Raise if there are failures.

        Raises:
            VerificationError: with all of them.
        """
        if text := self._error():
            raise VerificationError(text)

    def _verdict(self) -> Cell:
        return Cell("FAILED", "bad") if self._error() else Cell("PASSED", "good")


@dataclass(frozen=True, repr=False)
class Verification(Judged):
    """The result of `patcher.verify` or `patcher.compare`.

    Attributes:
        model: the class of the model.
        checkpoint: the source of the weights.
        patcher: the patcher.
        dtype: the dtype of the computation.
        replaced: the number of replaced and fused modules.
        calling: the number of modules that call replaced functions.
        floor: the largest difference of eager attention and sdpa on stock, None if it doesn't have both.
        stages: the stages, in their order.
        seconds: the time that it took.
        guilty: the member of the patcher that causes the failure, if it is a single one.
        reference: what it was compared with.
    """

    model: str
    checkpoint: str
    patcher: str
    dtype: str
    replaced: int = 0
    calling: int = 0
    floor: float | None = None
    stages: tuple[Stage, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    guilty: Guilty | None = None
    reference: str = "stock"

    @property
    def passed(self) -> bool:
        """Whether all stages passed."""
        return bool(self.stages) and all(stage.passed for stage in self.stages)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def failures(self) -> tuple[str, ...]:
        """A text for each failed stage."""
        return tuple(f"{stage.name}: {stage.message}" for stage in self.stages if not stage.passed)

    def _error(self) -> str:
        cause = f"\nThe cause is {self.guilty}." if self.guilty else ""
        text = f"{self.model} under {self.patcher} differs from {self.reference}:\n  " + "\n  ".join(self.failures)
        return "" if self.passed else text + cause

    def _headline(self) -> str:
        verdict = f"{'' if self.passed else 'NOT '}the same as {self.reference}"
        modules = [f"{pluralize(self.replaced, 'module')} replaced"] if self.replaced or not self.calling else []
        if self.calling:
            modules.append(
                f"{pluralize(self.calling, 'module')} {'calls' if self.calling == 1 else 'call'} replaced functions"
            )
        where = f"({self.dtype}, {self.checkpoint}, {self.seconds:.1f} s)"
        return f"{self.model}: {', '.join(modules)}, {verdict} {where}"

    def figures(self, stage: str) -> dict[str, float]:
        """Return the figures of a stage by name, {} if it wasn't run or checked."""
        return next((dict(item.figures) for item in self.stages if item.name == stage and item.checked), {})

    def rows(self) -> Iterator[tuple[str | Cell, ...]]:
        """Yield the stages as rows of a table."""
        for stage in self.stages:
            figures = ", ".join(f"{name} {value:.3g}" for name, value in stage.figures)
            limit = "" if stage.tolerance in (None, math.inf) else f"{stage.tolerance:.1e}"
            state = Cell("-", "dim") if not stage.checked else Cell("passed", "good")
            state = state if stage.passed else Cell("FAILED", "bad")
            yield stage.name, state, figures, limit, f"{stage.seconds:.1f}", stage.message

    def _parts(self) -> Iterator[Part]:
        yield Table("Stages", HEADS, list(self.rows()))
        yield Notes("Cause", [str(self.guilty)] if self.guilty else [], "bad")
        for layers in [stage.layers for stage in self.stages if stage.layers][:1]:  # of the first that failed
            title = f"How far the output of each layer is from stock's, relative, on {layers.inputs}"
            yield Table(title, ("", "", "at most", ""), list(_errors(layers)))


_NOTHING = "These stages compare nothing; name others, or none, for all."


def _errors(layers: LayerErrors) -> Iterator[tuple[str | Cell, ...]]:
    """Yield the errors of layers as rows of a table; the logarithms of 1e-9 to 1 are the length of a bar."""
    around = [path for path, _ in layers.errors if f"{layers.begins}.".startswith(inside(path))]
    innermost = max(around, key=len, default=None)

    def drawn(row: tuple[str, float]) -> tuple[Cell, str]:
        path, error = row
        share = 1 + math.log10(error) / 9 if 0 < error < math.inf else float(error > 0)
        where = str(layers.begins).removeprefix(inside(path))
        note = "" if path != innermost else "it begins here" if where == path else f"it begins here, in {where}"
        return bar(max(0.0, share), "good" if error <= layers.allowed else "bad"), note

    for (cell, note), run in groupby(layers.errors, drawn):
        paths, errors = zip(*run, strict=True)
        number = f"{max(errors):.2g}" if any(errors) else "the same"
        for path in compress(paths):
            yield path or "(the model)", cell, number, Cell(note, "bad")


def verify(
    model: Any,
    patcher: Patcher,
    *,
    model_class: Any = None,
    stages: Iterable[str] | None = None,
    quick: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> Verification:
    """Load a model stock and patched, and compare their outputs, their gradients and the files that they save.

    >>> import tempfile, patcher
    >>> from patcher import Patcher
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     LlamaForCausalLM(config).save_pretrained(folder)
    ...     verification = patcher.verify(folder, Patcher(fusions=["qkv", "gate_up"]))
    >>> verification.passed, [stage.name for stage in verification.stages]
    (True, ['load', 'outputs', 'arguments', 'recorded', 'windows', 'precision', 'generation', 'gradients',
    'training', 'save', 'reload'])
    >>> verification.raise_on_failure()  # print(verification) shows all figures

    Both run on the same inputs: rows of English by the tokenizer of the model (random ids without one), images and
    sounds by its processor (in the shapes of the config without one). The stages:

    - `outputs`: lengths of 1 to 200 tokens and past a window of up to 512, batches of 1 to 17 rows, padding on both
      sides and in the middle, explicit positions, a cache token by token and in chunks, repeated calls. Arguments must
      not change, and every replaced module must be reached.
    - `arguments`: every argument of `forward` that changes stock's outputs, such as `labels` and `logits_to_keep`.
    - `recorded`: under eager attention, with attentions, hidden states and all else that can be recorded.
    - `windows`: windows of more than 16 tokens, shortened to 16, so that texts and caches exceed them.
    - `precision`: each replaced module alone, on inputs scaled down, where the epsilon of a norm counts, with ten
      times the tolerance; and in half precision, on inputs of the usual size and scaled up, beside a float64
      computation: its error is at most 2.5 times that of stock, or 1.2 times where it does an operation in half
      precision for which stock upcasts.
    - `generation`: greedy, of a padded batch. `gradients`: in the original layout, with ten times the tolerance.
    - `training`: outputs and gradients in training mode, without dropout, then with each dropout alone. A patch may
      draw random numbers in another order; then mean, variance and what rows share over 48 draws must be those of
      stock, within six standard errors.
    - `save`: byte for byte what stock saves, except declared `new_weights`. `reload`: the saved files, by stock.

    Most runs use the first two, the middle and the last of layers with equal classes, shapes and settings; two texts,
    a prompt in chunks, generation, training and saves use all, and decide where a run with a few layers differs. If
    `outputs` fails, the stages that compute the same in another way aren't checked. After a failure, `guilty` is the
    member of the patcher (a key, a fusion, a conversion) that fails alone, or without which the others pass.

    Tolerances are relative to the magnitude of stock's outputs: in float32 1e-5, about a hundred roundings (6e-8
    each) and a hundredth of the effect of the smallest real mistakes; in bfloat16 3e-2 and in float16 4e-3, a few
    roundings of a layer's result; or twice the difference of stock's eager attention and sdpa, if that is larger.

    A model of fewer than 268 million parameters uses one thread, others no more than there are processors. Threads,
    random states, default dtype, gradient mode and the verbosity of transformers are restored at the end, and don't
    affect the result.

    Args:
        model: a repo id, a folder, or a small config, for which a checkpoint of random weights is saved.
        patcher: the patcher to verify.
        model_class: the class of the model, or an Auto class; by default the one that the config names.
        stages: the names of the stages to run, by default all; `load` always runs.
        quick: run `outputs` on a short row, a padded batch and a prompt in chunks, and `weights` instead of `save`,
            which compares without writing files. It takes a tenth of the time, and finds what is wrong everywhere: a
            weight, a layer, the order in which weights are joined.
        dtype: the dtype of the computation.
        seed: of random ids and weights.
        progress: show a bar with the stages; by default on a terminal or in a notebook, if transformers' progress bars
            are enabled.
        options: more keyword arguments of `from_pretrained`.

    Raises:
        InvalidPatcherError: not a patcher, not a model that can be verified, an unknown stage, or only stages that
            compare nothing of this model.
    """
    if not isinstance(patcher, Patcher):
        raise not_a_patcher("verify(model, {})", patcher)
    names = _checked(dtype, stages, quick)
    with isolated("verifying", seed, names, progress) as (scratch, step):
        mine = replace(side_of(model, options, scratch, seed, model_class), patcher=patcher)
        run = Run(replace(mine, patcher=None, name="stock"), mine, dtype, seed, scratch, step, quick)
        return _verification(run, names, repr(patcher))


def compare(
    first: Any,
    second: Any,
    *,
    stages: Iterable[str] | None = None,
    quick: bool = False,
    tolerance: float | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> Verification:
    """Compare any two models as `verify` compares stock and patched.

    >>> import patcher
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    >>> model, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    >>> bool(patcher.compare(model, model, quick=True))
    True
    >>> patcher.compare(model, other, quick=True).failures[0].partition(";")[0]  # doctest: +ELLIPSIS
    'outputs: on a short row they differ by ...

    Models in memory aren't changed; stages that need them in another dtype, or under another config, aren't checked.

    Args:
        first: a model, a repo id or a folder, in the place of stock.
        second: the one to compare with it.
        stages: the stages to run, as in `verify`.
        quick: run less, as in `verify`.
        tolerance: the tolerance of outputs, relative to the magnitude of the first one's, instead of that of `verify`;
            0 for bitwise equality.
        dtype: the dtype of the computation; by default that of a model in memory, else float32.
        seed: of random ids.
        progress: show a bar with the stages, as in `verify`.
        options: keyword arguments of `from_pretrained` for both, such as `trust_remote_code=True`.

    Raises:
        InvalidPatcherError: neither a model nor a repo id or folder, or a tolerance that nothing can meet.
    """
    theirs, mine = _side(first, options, "the first model"), _side(second, options, "the second model")
    models = [side.model for side in (theirs, mine) if side.model is not None]
    dtype = dtype or (models[0].dtype if models else torch.float32)
    names = _checked(dtype, stages, quick, tolerance)
    with isolated("comparing", seed, names, progress) as (scratch, step), _restored(models):
        run = Run(theirs, mine, dtype, seed, scratch, step, quick, tolerance)
        return _verification(run, names, f"the model {mine.place}")


def _verification(run: Run, names: Iterable[str], patcher: str) -> Verification:
    """Run the stages, and look for the member of the patcher that causes a failure."""
    started = time.perf_counter()
    stages = tuple(run.stages(names))
    if all(stage.passed and (stage.name == "load" or not stage.checked) for stage in stages):
        reasons = "".join(f"\n  {stage.name}: {stage.message}" for stage in stages if stage.message)
        raise InvalidPatcherError(f"{_NOTHING}{reasons}")
    guilty = None
    if run.mine.patcher is not None and not run.missed and not all(stage.passed for stage in stages):
        run.step("which member it is")
        guilty = guilty_of(run, run.mine.patcher, stages)
    return Verification(
        model=run.theirs.class_name,
        checkpoint=run.theirs.place,
        patcher=patcher,
        dtype=str(run.dtype).removeprefix("torch."),
        replaced=run.replaced,
        calling=run.calling,
        floor=run.floor,
        stages=stages,
        seconds=time.perf_counter() - started,
        guilty=guilty,
        reference=run.theirs.name,
    )


def _side(model: Any, options: dict[str, Any], name: str) -> Side:
    if isinstance(model, Side):
        return model
    if isinstance(model, PreTrainedModel):
        return Side(model=model, name=name)
    if isinstance(model, nn.Module):
        raise InvalidPatcherError(
            f"compare takes a PreTrainedModel, found a {type(model).__name__}; pass the model inside of it, as "
            "peft_model.get_base_model()."
        )
    if not isinstance(model, str | os.PathLike):
        raise InvalidPatcherError(
            f"compare takes models, repo ids and folders, found {model!r} ({type(model).__name__}); "
            "for a config, write verify(config, patcher)."
        )
    return replace(side_of(model, options, Path(), 0), name=str(model))


def _checked(
    dtype: torch.dtype, stages: Iterable[str] | None, quick: bool, tolerance: float | None = None
) -> tuple[str, ...]:
    if dtype not in TOLERANCES:
        raise InvalidPatcherError(
            f"dtype={dtype!r} can't be compared; write one of {', '.join(map(str, TOLERANCES))}."
        )
    if tolerance is not None and not tolerance >= 0:  # nan too
        raise InvalidPatcherError(f"tolerance={tolerance!r} can't be met; write 0, for bitwise equality, or more.")
    install()
    if stages is None:
        return QUICK if quick else tuple(name for name in STAGES if name != "weights")
    if not (names := requested("stage", stages, STAGES)) or names == ("load",):
        raise InvalidPatcherError(_NOTHING)
    return ("load", *(name for name in names if name != "load"))


@contextmanager
def _restored(models: Iterable[PreTrainedModel]) -> Iterator[None]:
    """Restore the modes and the gradients of the caller's models at the end."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    gradients = [(parameter, parameter.grad) for model in models for parameter in model.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
