"""Models whose layers processes share: tensor, expert and data parallelism."""

from __future__ import annotations

from patcher.integrations.parallel.saving import gathered
from patcher.integrations.parallel.sharing import follow_plan
from patcher.loading.integration import Integration, register

register(Integration("parallel", on_routed=follow_plan, on_saved=gathered))
