"""Models that are sharded among processes: tensor, expert and data parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from patcher.compat.models import sizes
from patcher.integrations.parallel.sharing import follow_plan
from patcher.layouts.carried import carriers
from patcher.layouts.sharded import gather_on_rank_zero
from patcher.loading.integration import Integration, register
from patcher.loading.record import record_of


@contextmanager
def gathered(model: PreTrainedModel, arguments: dict[str, Any]) -> Iterator[None]:
    """Save the whole tensors of a model under `fully_shard`, on the first rank; the others wait for its files."""
    config: Any = getattr(model.config, "distributed_config", None)
    is_sharded_by_stock = config is not None and max(sizes(config)) > 1  # transformers gathers these itself
    if is_sharded_by_stock or (record_of(model) is None and not carriers(model)):
        yield
        return
    state_dict = model.state_dict() if arguments["state_dict"] is None else arguments["state_dict"]
    is_sharded = any(isinstance(value, DTensor) for value in state_dict.values())
    if is_sharded:
        arguments["state_dict"] = gather_on_rank_zero(state_dict)
    yield
    if is_sharded:
        distributed.barrier()


register(Integration("parallel", on_routed=follow_plan, on_saved=gathered))
