"""What a run of `Trainer` is told that can't go on as it is."""

from __future__ import annotations

from patcher import PatchedWeightsError, Patcher
from tests.project.advice import Place, Steps, advice, load, written
from tests.support.comparing import logits
from tests.support.trainer import MIDDLE, losses, trained


@advice(
    "Load the model with the patcher of that run, without one if it had none.",
    ' Or begin with a new optimizer: load the weights with from_pretrained("{}", patcher=...), and call train() '
    "without resume_from_checkpoint=.",
    error=PatchedWeightsError,
)
def an_optimizer_of_other_parameters(at: Place) -> Steps:
    fused = Patcher(fusions="qkv")
    stock = trained(load(at.llama), at.tmp / "run")
    middle = at.tmp / "run" / MIDDLE
    said = yield lambda: trained(load(at.llama, fused), at.tmp / "resumed", middle)
    assert losses(trained(load(at.llama), at.tmp / "resumed", middle)) == losses(stock)
    folder = written(said, r'from_pretrained\(("[^"]*"), patcher=\.\.\.\)')
    model, expected = load(folder, fused), logits(load(folder))
    assert abs(logits(model) - expected).max() < 1e-5
    assert len(losses(trained(model, at.tmp / "new"))) == len(losses(stock))
