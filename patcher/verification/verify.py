"""Is the patched model the stock model? `patcher.verify(model, patcher)`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from patcher.display.parts import Bar, Cell, Chart, Notes, Part, Table
from patcher.display.shown import Displayable, pluralize
from patcher.errors import InvalidPatcherError, VerificationError
from patcher.integrations import install
from patcher.patterns import inside
from patcher.spec.patcher import Patcher
from patcher.spec.validation import not_a_patcher
from patcher.verification.checks import TOLERANCES, Run, stages_of
from patcher.verification.comparing import Stage
from patcher.verification.layers import LayerErrors
from patcher.verification.members import Guilty, guilty_of
from patcher.verification.progress import under_way
from patcher.verification.sides import Side, side_of

#: What `Verification.rows` has.
HEADS = ("stage", "", "measured", "allowed", "seconds", "")


class Judged(Displayable):
    """What has passed or failed."""

    _also = ("passed", "failures")

    def _wrong(self) -> str:
        """All that is wrong, "" if nothing is."""
        raise NotImplementedError

    def raise_on_failure(self) -> None:
        """Raise if something is wrong.

        Raises:
            VerificationError: with all that is.
        """
        if text := self._wrong():
            raise VerificationError(text)

    def _verdict(self) -> Cell:
        return Cell("FAILED", "bad") if self._wrong() else Cell("PASSED", "good")


@dataclass(frozen=True)
class Verification(Judged):
    """What `patcher.verify` found, or `patcher.compare`.

    Attributes:
        model: the class of the model.
        checkpoint: where the weights came from.
        patcher: the patcher.
        dtype: what was computed in.
        replaced: how many modules were replaced or fused.
        calling: how many modules call replaced functions.
        floor: the largest difference of stock against stock, eager attention against sdpa; None where it has one only.
        stages: what was checked, in this order.
        seconds: the time that it took.
        guilty: the member of the patcher that is wrong, where it is a single one.
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

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return bool(self.stages) and all(stage.passed for stage in self.stages)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def failures(self) -> tuple[str, ...]:
        """What is wrong, one text for each stage that failed; the module where it begins is named once."""
        return tuple(f"{name}: {message}" for name, message in self._messages.items())

    @property
    def _messages(self) -> dict[str, str]:
        found: dict[str, str] = {}
        named: set[str] = set()
        for stage in self.stages:
            if not stage.passed:
                what, _, where = stage.message.partition("it begins in ")
                found[stage.name] = f"{what}it begins there too" if where and where in named else stage.message
                named.add(where)
        return found

    def _wrong(self) -> str:
        cause = f"\nThe cause is {self.guilty}." if self.guilty else ""
        text = f"{self.model} under {self.patcher} differs from stock:\n  " + "\n  ".join(self.failures) + cause
        return "" if self.passed else text

    def _headline(self) -> str:
        verdict = "the same as stock" if self.passed else "NOT the same as stock"
        counts = [(self.replaced, "replaced")] if self.replaced or not self.calling else []
        counts += [(self.calling, "with calls of replaced functions")] if self.calling else []
        modules = ", ".join(f"{pluralize(count, 'module')} {what}" for count, what in counts)
        return f"{self.model}: {modules}, {verdict} ({self.dtype}, {self.checkpoint}, {self.seconds:.1f} s)"

    def figures(self, stage: str) -> dict[str, float]:
        """What a stage has measured, by name; empty where it wasn't run, or not checked."""
        return next((dict(each.figures) for each in self.stages if each.name == stage and each.checked), {})

    def rows(self) -> Iterator[tuple[str | Cell, ...]]:
        """The stages as rows of a table."""
        for stage in self.stages:
            figures = ", ".join(f"{name} {value:.3g}" for name, value in stage.figures)
            limit = "" if stage.tolerance in (None, math.inf) else f"{stage.tolerance:.1e}"
            state = Cell("-", "dim") if not stage.checked else Cell("passed", "good")
            state = state if stage.passed else Cell("FAILED", "bad")
            message = self._messages.get(stage.name, stage.message)
            yield stage.name, state, figures, limit, f"{stage.seconds:.1f}", message

    def _parts(self) -> Iterator[Part]:
        yield Table("Stages", HEADS, list(self.rows()))
        yield Notes("Cause", [str(self.guilty)] if self.guilty else [], "bad")
        by_layer = sorted((stage for stage in self.stages if stage.layers), key=lambda stage: stage.passed)
        for layers in [stage.layers for stage in by_layer if stage.layers][:1]:  # of the first that failed, if one has
            yield _chart(layers)


def _chart(layers: LayerErrors) -> Chart:
    bars: list[Bar] = []
    layer = ""
    holds = [path for path, _ in layers.errors if f"{layers.begins}.".startswith(inside(path))]
    for path, error in layers.errors:
        is_inside = bool(layer) and path.startswith(inside(layer))
        layer = layer if is_inside else path
        note = "it begins here" if holds and path == max(holds, key=len) else ""
        if note and layers.begins != path:
            note += f", in {str(layers.begins).removeprefix(inside(path))}"
        bars.append(Bar(path.removeprefix(inside(layer)) or "(the model)", error, is_inside, note))
    return Chart(
        f"How far the output of each layer is from stock's, relative, on {layers.inputs}", bars, layers.allowed
    )


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
    """Load a model stock and patched, and compare what they compute, what they learn and what they save.

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
    >>> verification.raise_on_failure()  # and print(verification) shows what was measured

    Both run on the same inputs: rows of English by the model's own tokenizer (random ids where it has none), images
    and sounds by its processor (in the shapes of the config where it has none). The stages:

    - `outputs`: lengths of 1 to 200 tokens and past a window of up to 512, batches of 1 to 17 rows, padding on both
      sides and in the middle, given positions, a cache token by token and in chunks, calls after one another; the
      arguments are as they were afterwards, and every replaced module is reached.
    - `arguments`: every argument of `forward` that stock reacts to, `labels` and `logits_to_keep` for two.
    - `recorded`: under eager attention, with all that can be recorded: attentions, hidden states, ...
    - `windows`: windows of more than 16 tokens, made that short, so that texts and caches are past them.
    - `precision`: each replaced module alone in half precision, on inputs of the usual size and scaled up, beside
      a float64 computation: its error is at most 2.5 times that of stock, or 1.2 times where it does an operation
      in half precision for which stock upcasts.
    - `generation`: greedy, of a padded batch. `gradients`: in the original layout, with ten times the tolerance.
    - `training`: outputs and gradients in training mode, without dropout; then each dropout alone. Where the same seed
      doesn't give the same, mean, variance, and what rows share are those of stock over 48 draws, within six standard
      errors: a patch may draw in another order.
    - `save`: byte for byte what stock saves, but for declared `new_weights`; `reload`: by stock.

    Of layers that are alike in class, shapes and settings most is run on the first two, the middle and the last; two
    texts, a prompt in chunks, generation, training with its gradients and what is saved go through all of them, and
    what is wrong on a few is looked at on all, which decides. Where `outputs` fails, the stages that compute the same
    in another way aren't checked. After a failure `guilty` is the member of the patcher (a key, a fusion, a
    conversion) that fails alone, or without which the others pass.

    Tolerances are relative to the magnitude of stock's outputs. In float32 1e-5, about a hundred roundings (6e-8
    each), and a hundredth of what the smallest of real mistakes makes; in bfloat16 3e-2 and in float16 4e-3, a few
    roundings of a layer's result. Or, if that is more, twice the difference that stock has with itself, between its
    eager attention and sdpa.

    A model of fewer than 268 million parameters is computed by one thread, others by no more than there are
    processors. Threads, random states, default dtype, gradient mode and the verbosity of transformers are what they
    were when it returns or raises, and what it finds doesn't depend on them.

    Args:
        model: a repo id, a folder, or a config: then a small random checkpoint of it is made, so give a small config.
        patcher: what to verify.
        model_class: the class of model, or an Auto class; by default what the config names.
        stages: the names of those to run, by default all; `load` always is.
        quick: run `outputs` on a short row, a padded batch and a prompt in chunks, and in place of `save` the stage
            `weights`, which compares what would be saved without a file: a tenth of the time, for what is wrong
            everywhere (a weight, a layer, the order in which weights are joined).
        dtype: what to compute in.
        seed: of random ids and weights.
        progress: show the stages as they go, and what is left; by default where stderr is a terminal, or in a
            notebook, and transformers' progress bars are on.
        options: more keyword arguments of `from_pretrained`.

    Raises:
        InvalidPatcherError: no patcher, no model that could be verified, or no such stage.
    """
    if not isinstance(patcher, Patcher):
        raise not_a_patcher("verify(model, {})", patcher)
    names = _checked(dtype, stages, quick)
    with under_way("verifying", seed, names, progress) as (scratch, step):
        stock = side_of(model, options, scratch, seed, model_class)
        run = Run(stock, replace(stock, patcher=patcher), dtype, seed, scratch, step, quick)
        return _found(run, names, repr(patcher))


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
    """Compare any two models as `verify` compares stock and patched: what they compute, learn and save.

    >>> import patcher
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    >>> model, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    >>> bool(patcher.compare(model, model, quick=True))
    True
    >>> patcher.compare(model, other, quick=True).failures[0].partition(";")[0]  # doctest: +ELLIPSIS
    'outputs: on a short row they differ by ...

    Models in memory stay as they are; stages that need them in another type, or under another config, aren't checked.

    Args:
        first: a model, a repo id or a folder: what failures call stock.
        second: another one, which is to be the same.
        stages: those to run, as in `verify`.
        quick: run less, as in `verify`.
        tolerance: how far outputs may be apart, relative to the magnitude of the first one's, in place of that of
            `verify`: 0 for the same to the bit.
        dtype: what to compute in; by default that of a model in memory, else float32.
        seed: of random ids.
        progress: show the stages as they go, as in `verify`.
        options: keyword arguments of `from_pretrained` for both, `trust_remote_code=True` for one.

    Raises:
        InvalidPatcherError: something that is neither a model nor the place of one.
    """
    theirs, mine = (_side(each, options) for each in (first, second))
    models = [side.model for side in (theirs, mine) if side.model is not None]
    dtype = dtype or (models[0].dtype if models else torch.float32)
    names = _checked(dtype, stages, quick)
    with under_way("comparing", seed, names, progress) as (scratch, step), _kept(models):
        return _found(
            Run(theirs, mine, dtype, seed, scratch, step, quick, tolerance), names, f"the model {mine.place}"
        )


def _found(run: Run, names: Iterable[str], patcher: str) -> Verification:
    """What these stages of a run find, and which member of the patcher is wrong."""
    started = time.perf_counter()
    stages = tuple(run.stages(names))
    guilty = None
    if run.mine.patcher is not None and not all(stage.passed for stage in stages):
        run.step("which member it is")
        guilty = guilty_of(run, run.mine.patcher, stages)
    return Verification(
        model=run.theirs.class_name,
        checkpoint=run.theirs.place,
        patcher=patcher,
        dtype=str(run.dtype).removeprefix("torch."),
        replaced=len(run.patched),
        calling=run.calling,
        floor=run.floor,
        stages=stages,
        seconds=time.perf_counter() - started,
        guilty=guilty,
    )


def _side(model: Any, options: dict[str, Any]) -> Side:
    if isinstance(model, Side):
        return model
    if isinstance(model, PreTrainedModel):
        return Side(model=model, name="the second model")
    if not isinstance(model, str | os.PathLike):
        raise InvalidPatcherError(
            f"compare takes models, repo ids and folders, found {model!r} ({type(model).__name__}); "
            "for a config, write verify(config, patcher)."
        )
    return replace(side_of(model, options, Path(), 0), name=str(model))


def _checked(dtype: torch.dtype, stages: Iterable[str] | None, quick: bool) -> tuple[str, ...]:
    if dtype not in TOLERANCES:
        raise InvalidPatcherError(
            f"dtype={dtype!r} can't be compared; write one of {', '.join(map(str, TOLERANCES))}."
        )
    install()
    return stages_of(stages, quick)


@contextmanager
def _kept(models: Iterable[PreTrainedModel]) -> Iterator[None]:
    """Afterwards models of the caller are in the mode in which they were, and have the gradients that they had."""
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
