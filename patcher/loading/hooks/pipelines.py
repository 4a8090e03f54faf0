"""What stands at the places where `transformers.pipeline` loads a model, and makes a pipeline of it.

`pipeline` hands what it doesn't know to the pipeline and nothing of it to the load. Users bind the function before
anything is hooked, so the hook is in what it calls.
"""

from __future__ import annotations

from typing import Any

from patcher.compat.hooks import Stock
from patcher.errors import InvalidPatcherError, calling_frame


def load_model(stock: Stock, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Give the load the `patcher=` that `pipeline` was called with.

    It is taken out of the keyword arguments of the function that calls. Where a release keeps them elsewhere, the
    patcher stays with those of the pipeline, and making that raises.
    """
    given = calling_frame(("patcher.",)).f_locals.get("kwargs")
    patcher = given.pop("patcher", None) if isinstance(given, dict) else None
    if patcher is None:
        return stock(model, *args, **kwargs)
    if kwargs.get("patcher") is not None:
        raise InvalidPatcherError(
            "pipeline was given two patchers, by patcher= and in model_kwargs=; write patcher=a | b alone."
        )
    return stock(model, *args, **kwargs | {"patcher": patcher})


def make_pipeline(stock: Stock, self: Any, *args: Any, patcher: Any = None, **kwargs: Any) -> None:
    """A patcher that has got here has come too late for any load."""
    if patcher is not None:
        raise InvalidPatcherError(
            "patcher= is for the load of a model, and this pipeline was given one that is loaded; write "
            "model=patcher.apply(model), or load it with from_pretrained(..., patcher=patcher)."
        )
    stock(self, *args, **kwargs)
