"""The changes that a load made: `patcher.report(model)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from patcher.compat.conversions import source_patterns, used_conversions
from patcher.display.parts import Part, Table
from patcher.errors import InvalidPatcherError
from patcher.inspection.parts import Patched, added_conversions, fields_of_record, routes_of_fusions
from patcher.inspection.unseen import ORDER
from patcher.layouts.transforms import describe
from patcher.loading.record import patched_now


@dataclass(frozen=True, repr=False)
class Report(Patched):
    """The report of a patched model.

    Attributes:
        conversions_added: the conversions that preceded those of transformers.
        conversions_fired: (conversion, how many parameters it made or renamed) of the conversions that were used.
        unchecked: the added conversions that joined several tensors, in an order that only `verify` can check.
        seconds: (step, seconds) of construction, reading and the total.
    """

    conversions_added: tuple[str, ...] = ()
    conversions_fired: tuple[tuple[str, int], ...] = ()
    unchecked: tuple[str, ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as dicts, lists, strings and numbers, for JSON."""
        return super().to_dict() | {"seconds": dict(self.seconds)}

    def _parts(self) -> Iterable[Part]:
        fired = dict(self.conversions_fired)
        added = self.conversions_added
        used = [("added", text, f"{fired[text]} parameters" if text in fired else "-") for text in added]
        kept = [item for item in fired.items() if item[0] not in added]
        used += [("kept", text, f"{count} parameters" if count else "used") for text, count in kept]
        yield from self._patched_parts("effect", used)
        # Names and shapes fit even if sources of the same shape are swapped.
        order = (ORDER, "patcher.verify(model, patcher)")
        yield Table("Not seen by a load", ("what", "seen by"), [order] if self.unchecked else [])

    def _headline(self) -> str:
        if self.tree is None:
            return f"{self.model}: not patched"
        text = f"{self.model}: {self._counted('replaced')}"
        seconds = dict(self.seconds)
        if "total" in seconds:
            steps = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if name != "total")
            text += f", loaded in {seconds['total']:.2f} s ({steps})"
        return text


def report(model: nn.Module) -> Report:
    """Return what was patched in a model.

    >>> import patcher
    >>> from patcher import Patcher
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4)
    >>> model = AutoModelForCausalLM.from_config(config, patcher=Patcher(fusions="qkv"))
    >>> print(patcher.report(model))
    LlamaForCausalLM: 2 modules replaced
    LlamaForCausalLM
    ├── model  LlamaModel
    │   ├── embed_tokens  Embedding
    │   ├── layers.{0..1}  LlamaDecoderLayer
    │   │   ├── self_attn  LlamaAttention -> FusedLlamaAttention
    │   │   │   └── q_proj.weight, k_proj.weight, v_proj.weight -> qkv_proj.weight  Rows
    │   │   ├── mlp  LlamaMLP
    ...

    The report of a stock model says so.

    Args:
        model: a model in memory, loaded, built from a config or by hand, or a wrapper of some, such as a `PeftModel`.

    Raises:
        InvalidPatcherError: if it isn't a module.
    """
    if not isinstance(model, nn.Module):
        raise InvalidPatcherError(f"report takes a model, found {model!r}; write report(model).")
    if not isinstance(model, PreTrainedModel):
        # in wrappers, such as those of torch.compile, PEFT and DistributedDataParallel
        models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        if models and {*models} <= {*models[0].modules()}:
            model = models[0]
    if (record := patched_now(model)) is None:
        return Report(type(model).__name__)
    parameters = Counter[str]()
    for route in record.routes:
        for text in {describe(conversion.transform) for conversion in route.added}:
            parameters[text] += len(route.parameters)
    kept = used_conversions(model) if record.read and isinstance(model, PreTrainedModel) else ()
    fired = [*parameters.items(), *((describe(transform), 0) for transform in kept)]
    fused = list(routes_of_fusions(model))
    fired += Counter(route.text for route in fused).items() if record.read else ()
    joining = {describe(transform) for transform in record.added if len(source_patterns(transform)) > 1}
    return Report(
        **fields_of_record(type(model).__name__, model, record, [*fused, *record.routes]),
        conversions_added=tuple(added_conversions(record, model)),
        conversions_fired=tuple(fired),
        unchecked=tuple(text for text, _ in fired if text in joining),
        seconds=tuple(record.seconds.items()),
        warnings=record.warnings,
    )
