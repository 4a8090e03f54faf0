"""`transformers.pipeline`: pass `patcher=` to the load; unknown arguments go to the pipeline."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from patcher.compat.seams import Stock, seam, seams_in
from patcher.errors import InvalidPatcherError
from patcher.loading.integration import Integration, register
from patcher.spec.patcher import Patcher


@seam("transformers.pipelines:pipeline", "model", "model_kwargs", follow=True)
def pipeline(stock: Stock, *args: Any, patcher: Patcher | None = None, **kwargs: Any) -> Any:
    """Pass the patcher to the load of the model.

    Raises:
        InvalidPatcherError: if there are two patchers, or the model is loaded already.
    """
    if patcher is None:
        return stock(*args, **kwargs)
    arguments = inspect.signature(stock).bind(*args, **kwargs)
    model = arguments.arguments.get("model")
    if isinstance(model, nn.Module):
        raise _too_late()
    options = arguments.arguments.get("model_kwargs") or {}
    if options.get("patcher") is not None:
        raise InvalidPatcherError(
            "pipeline was given two patchers, by patcher= and in model_kwargs=; write patcher=a | b alone."
        )
    arguments.arguments["model_kwargs"] = {**options, "patcher": patcher}
    return stock(*arguments.args, **arguments.kwargs)


@seam("transformers.pipelines:Pipeline.__init__", "model")
def make_pipeline(stock: Stock, self: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a patcher for a model that is loaded already."""
    if kwargs.pop("patcher", None) is not None:
        raise _too_late()
    stock(self, *args, **kwargs)


def _too_late() -> InvalidPatcherError:
    return InvalidPatcherError(
        "patcher= is for the load of a model, and this pipeline was given one that is loaded; write "
        'model=patcher.apply(model), or pipeline(..., model="repo", model_kwargs={"patcher": patcher}).'
    )


register(Integration("pipelines", seams_in(__name__)))
