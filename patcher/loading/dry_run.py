"""A load up to where it would read."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from patcher.errors import PatcherError
from patcher.loading.hooks.loads import DRY_RUN
from patcher.loading.load import DryRun, Loaded, Request
from patcher.spec.patcher import Patcher


def dry_run(
    model_class: type[PreTrainedModel], patcher: Patcher, checkpoint: dict[str, Any], asked: DryRun, **options: Any
) -> tuple[Request | None, PatcherError | None]:
    """Take a load to where it would read: how far it came, and what it would raise on its way there.

    Raises:
        Exception: what transformers raises there, of its own.
    """
    results: list[Request] = []
    token = DRY_RUN.set((asked, results))
    error: PatcherError | None = None
    try:
        model_class.from_pretrained(None, state_dict=checkpoint, patcher=patcher, **options)
    except PatcherError as raised:
        error = raised
    except Exception:
        # What transformers goes on to do with the weights, of a model that has none, says nothing.
        if not (results and isinstance(results[-1], Loaded)):
            raise
    finally:
        DRY_RUN.reset(token)
    return (results[-1] if results else None), error
