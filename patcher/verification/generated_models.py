"""One model of a generated file, beside stock and beside the runtime patch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from patcher.construction.in_force import unpatched
from patcher.errors import UnmatchedPatchError
from patcher.spec.patcher import Patcher
from patcher.verification.comparing import Pair, UncheckedError, said
from patcher.verification.inputs import NoInputsError, Pass, chosen_passes
from patcher.verification.numerics import Difference, differences
from patcher.verification.saved import save_stage
from patcher.verification.small_configs import small_configs
from patcher.verification.training import learned
from patcher.verification.verify import random_checkpoint


@dataclass(frozen=True)
class VerifiedModel:
    """One model of a generated file, beside stock and beside the runtime patch.

    Attributes:
        name: its class.
        patched: whether the runtime patch changes it.
        inputs: how many inputs it was run on.
        outputs: the largest difference of its outputs from stock's: (absolute, relative).
        gradients: the same of its gradients, in the layout of the checkpoint; None where stock can't be trained.
        tensors: how many tensors it saves.
        failures: what is wrong.
    """

    name: str
    patched: bool
    inputs: int
    outputs: tuple[float, float]
    gradients: tuple[float, float] | None
    tensors: int
    failures: tuple[str, ...] = ()


class ModelRun:
    """Stock, file and runtime patch of one model."""

    def __init__(
        self,
        stock_class: Any,
        file_class: Any,
        patcher: Patcher | None,
        scratch: Path,
        tolerance: float | None,
        seed: int,
    ) -> None:
        self.stock_class, self.file_class, self.patcher = stock_class, file_class, patcher
        self.scratch, self.tolerance, self.seed = scratch, tolerance, seed
        self.failures: list[str] = []

    def verified(self, config: PretrainedConfig | None) -> VerifiedModel:
        """What is found of it.

        Raises:
            UncheckedError: stock can't be run.
        """
        stock, passes = self._stock(config)
        models = {"file": self._loaded("the file", self.file_class)}
        if self.patcher is not None:
            models["runtime patch"] = self._loaded("the runtime patch", self.stock_class, patcher=self.patcher)
        patched = models.get("runtime patch") is not None
        outputs, trained = self._computed(stock, models, passes)
        tensors = self._saved(stock, models)
        return VerifiedModel(
            self.stock_class.__name__, patched, len(passes), outputs, trained, tensors, tuple(self.failures)
        )

    def _stock(self, config: PretrainedConfig | None) -> tuple[Any, list[Pass]]:
        errors: list[str] = []
        try:
            configs = iter([config]) if config is not None else small_configs(self.stock_class.config_class)
            for number, each in enumerate(configs):
                try:
                    folder = self.scratch / f"checkpoint_{number}"
                    unpatched(partial(random_checkpoint, self.stock_class, each, folder, self.seed))
                    stock = _aligned(self.stock_class.from_pretrained(folder))
                    passes = chosen_passes(stock)
                except NoInputsError as error:
                    errors.append(f"it runs with no inputs: {error}")
                except Exception as error:  # a config that is no use
                    errors.append(said(error))
                else:
                    self.folder = folder
                    return stock, passes
        except Exception as error:  # no config can be made
            errors.append(said(error))
        raise UncheckedError(errors[0] if errors else "no small config")

    def _loaded(self, what: str, cls: Any, **options: Any) -> Any:
        try:
            return _aligned(cls.from_pretrained(self.folder, **options))
        except UnmatchedPatchError:
            if options:  # of parts that this model doesn't have
                return None
            raise
        except Exception as error:
            self.failures.append(f"{what} can't be loaded: {said(error)}")
            return None

    def _computed(self, stock: Any, models: dict[str, Any], passes: list[Pass]) -> tuple[Any, Any]:
        """How far the file is from stock, in outputs and in gradients; what is wrong besides is noted."""
        expected = {one.name: one.results(stock) for one in passes}
        found: dict[str, tuple[dict[str, Any], Any]] = {}
        trainable = True
        try:
            with torch.enable_grad():
                gradients = learned(stock, passes, self.seed)[1]
        except Exception:  # stock itself
            trainable, gradients = False, {}
        for what, model in models.items():
            if model is None:
                continue
            try:
                with torch.enable_grad():
                    results = {one.name: {k: v.detach() for k, v in one.results(model).items()} for one in passes}
                    found[what] = results, learned(model, passes, self.seed)[1] if trainable else {}
            except Exception as error:
                self.failures.append(f"the {what} raises {said(error)}")
        if len(found) == 2:
            (one, first), (other, second) = found.values()
            self._must_equal([(name, one[name], other[name]) for name in one], "outputs")
            self._must_equal([("all inputs", first, second)], "gradients")
        if "file" not in found:
            return (float("inf"), float("inf")), None
        results, trained = found["file"]
        gaps = [differences(results[name], expected[name]) for name in results]
        worst = max(gaps, key=lambda gap: gap.share, default=Difference(0.0, 0.0, 0.0))
        learnt = differences(trained, gradients) if trainable else None
        unpatched_model = self.patcher is not None and models.get("runtime patch") is None
        for gap, factor, what in ((worst, 1.0, "outputs"), (learnt, 10.0, "gradients")):
            allowed = 0.0 if unpatched_model else None if self.tolerance is None else factor * self.tolerance
            if gap is not None and allowed is not None and not gap.within(allowed):
                self.failures.append(f"the file's {what} are {gap.absolute:.3g} from stock's, in {gap.where}")
        return (worst.absolute, worst.relative), None if learnt is None else (learnt.absolute, learnt.relative)

    def _must_equal(self, pairs: list[tuple[str, dict[str, Any], dict[str, Any]]], what: str) -> None:
        for name, mine, theirs in pairs:
            gap = differences(mine, theirs)
            if gap.absolute:
                place = f"on {name}, in {gap.where}"
                self.failures.append(f"{what} of file and runtime patch differ {place}: by {gap.absolute:.3g}")
                return

    def _saved(self, stock: Any, models: dict[str, Any]) -> int:
        count = 0
        for number, (what, model) in enumerate(models.items()):
            if model is None:
                continue
            try:
                stage = save_stage(Pair(stock, model), self.scratch / f"saved_{number}")
            except UncheckedError:
                continue
            except Exception as error:
                self.failures.append(f"the {what} can't be saved: {said(error)}")
                continue
            count = int(stage.figures[0][1])
            if not stage.passed:
                self.failures.append(f"the {what} saves another checkpoint than stock: {stage.message}")
        return count


def _aligned(model: Any) -> Any:
    """The model, its weights where memory is allocated for them: where they lie in a file decides the last bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()
