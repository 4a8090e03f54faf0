"""Models whose layers processes share: tensor, expert and data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patcher.compat.parallel import sizes
from patcher.integrations.parallel.sharing import follow_plan
from patcher.layouts.carried import carriers
from patcher.layouts.sharded import gathered_on_first
from patcher.loading.integration import Integration, register
from patcher.loading.record import record_of


@contextmanager
def gathered(model: PreTrainedModel, given: dict[str, Any]) -> Iterator[None]:
    """Save whole tensors of what `fully_shard` has split, from the first process; the others wait for its files."""
    config: Any = getattr(model.config, "distributed_config", None)
    is_split_by_stock = config is not None and max(sizes(config)) > 1  # it puts the pieces together itself
    if is_split_by_stock or (record_of(model) is None and not carriers(model)):
        yield
        return
    state_dict = model.state_dict() if given["state_dict"] is None else given["state_dict"]
    is_split = any(isinstance(value, DTensor) for value in state_dict.values())
    if is_split:
        given["state_dict"] = gathered_on_first(state_dict)
    yield
    if is_split:
        distributed.barrier()


register(Integration("parallel", on_routed=follow_plan, on_saved=gathered))
