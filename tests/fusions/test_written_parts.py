"""What is written into a part is written into memory of its own; where nobody writes, nothing is copied."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    ViTConfig,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from patcher.fusions.finding import discover
from patcher.fusions.fused_module import fused_class_of
from patcher.fusions.gate_up import GateUp
from patcher.fusions.qkv import QKV
from patcher.resolution.resolution import skeleton
from tests.fuzz.compare import compared, module_of
from tests.fuzz.generator import READS, WRITES, source_of
from tests.support.fusing import fuse
from tests.support.sampling import sampled
from tests.support.tiny import DECODER_SIZES, tiny_bert_config

#: what isn't followed, so that a part that is given to it may be written into
NOT_FOLLOWED = ("sum(z * 2", "self.layers", "def inner", "self.peeked", "size += 1")
CALLS = "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)"


def text_of(source: str, path: Path) -> str:
    family: Any = QKV()
    text: str = fused_class_of(family, module_of(source, path))._rewritten["forward"]
    return text


@pytest.mark.parametrize("write", sampled(WRITES, WRITES[::4]))
def test_a_part_that_is_written_into_is_a_copy(write: str, tmp_path: Path) -> None:
    """In values and in gradients it is as with separate projections."""
    source = source_of(f"{CALLS}\nx = x * 1\n{write.format(t='k', u='x')}\nreturn torch.tanh(q * v) + k")

    result = compared(source, tmp_path / "odd.py")

    assert result.status in ("same", "invalid"), result.reason
    assert "k_proj_output.clone()" in text_of(source, tmp_path / "again.py")


@pytest.mark.parametrize("read", [each for each in READS if not any(part in each for part in NOT_FOLLOWED)])
def test_a_part_that_is_read_is_not_copied(read: str, tmp_path: Path) -> None:
    source = source_of(f"{CALLS}\n{read.format(t='k', u='q', n='y')}\nreturn torch.tanh(q * v) + k")

    assert ".clone()" not in text_of(source, tmp_path / "odd.py").replace("k.clone()", "")


def test_parts_that_are_given_back_are_copies(tmp_path: Path) -> None:
    source = source_of(f"{CALLS}\nkept = (q, [k])\nreturn q, k.view(-1), v * 1")

    assert text_of(source, tmp_path / "odd.py").count(".clone()") == 3
    assert compared(source, tmp_path / "again.py").status == "same"


@pytest.mark.parametrize(
    "given",
    [
        "r = k\ns = r",
        "r = k.view(2, 3, 8)\ns = r.transpose(0, 1)",
        "r = [q, k]\nsame = r\ns = same[1]",
        "for s in (q, k):\n    pass",
        "r = [q]\nr.append(k)\ns = r[-1]",
        "r = {}\nr.update(a=k)\ns = r['a']",
        "r = []\nr += [k]\ns = r[0]",
        "s = ((q,) + (k,))[1]",
        "s = k if extra is None else q",
        "s = torch.as_strided(k, (2, 3, 8), k.stride())",
        "s = gives_back(k)",
        "s = self.identity(k)",
        "def same(t):\n    return t.view(2, 3, 8)\n\n\ns = same(k)",
        "s = [t.view(2, 3, 8) for t in (q, k)][1]",
    ],
)
def test_what_may_be_a_view_of_a_part_leaves_the_forward_as_a_copy(given: str, tmp_path: Path) -> None:
    source = source_of(f"{CALLS}\n{given}\nreturn s, v * 2")

    assert ".clone()" in text_of(source, tmp_path / "odd.py")
    assert compared(source, tmp_path / "again.py").status == "same"


def test_each_call_gives_memory_of_its_own(tmp_path: Path) -> None:
    source = source_of(f"{CALLS}\nother = self.k_proj(x)\nother.mul_(2)\nreturn q * k * v + other")

    assert text_of(source, tmp_path / "odd.py").count('shared("k_proj", x).clone()') == 2
    assert compared(source, tmp_path / "again.py").status == "same"


def test_under_autocast_a_part_with_a_bias_has_the_type_of_stock(tmp_path: Path) -> None:
    body = f"with torch.autocast('cpu', torch.bfloat16):\n    {CALLS}\nreturn q * 1, k * 1, v * 1"
    source = source_of(body, {"q": True, "k": False, "v": True})
    fused: Any = module_of(source, tmp_path / "odd.py")
    fused = fuse(QKV(), fused, fused_class_of(QKV(), fused))

    assert [part.dtype for part in fused(torch.randn(2, 3, 8))] == [torch.bfloat16] * 3


def test_a_method_that_is_kept_for_later_is_a_write(tmp_path: Path) -> None:
    source = source_of(f"{CALLS}\nmethod = k.mul_\nmethod(0.5)\nreturn torch.tanh(q + k + v)")

    assert "k_proj_output.clone()" in text_of(source, tmp_path / "odd.py")
    assert compared(source, tmp_path / "again.py").status == "same"


@pytest.mark.parametrize("write", ["k += 1", "k = k.view(2, 3, 8)\nk += 1", "k = self.identity(k)\nk *= q"])
def test_a_part_is_no_memory_of_its_own(write: str, tmp_path: Path) -> None:
    source = source_of(f"{CALLS}\n{write}\nreturn torch.tanh(q * v) + k")

    assert "k_proj_output.clone()" in text_of(source, tmp_path / "odd.py")
    assert compared(source, tmp_path / "again.py").status == "same"


def test_a_container_of_parts_holds_them(tmp_path: Path) -> None:
    body = f"if extra is None:\n    box = [{CALLS[10:]}]\nsame = box\n(same + [1])[1].mul_(0.5)\nreturn sum(box)"
    source = source_of(body)

    assert ".clone()" in text_of(source, tmp_path / "odd.py")
    assert compared(source, tmp_path / "again.py").status == "same"


def test_a_cache_keeps_parts_as_they_are(tmp_path: Path) -> None:
    body = f"{CALLS}\nif extra is not None:\n    k, v = extra.update(k, v, 0)\nreturn torch.tanh(q * k * v)"

    assert ".clone()" not in text_of(source_of(body), tmp_path / "odd.py")


COMMON: list[PretrainedConfig] = [
    T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu"),
    LlamaConfig(**DECODER_SIZES),
    Qwen2Config(**DECODER_SIZES),
    Qwen3Config(**DECODER_SIZES),
    MistralConfig(**DECODER_SIZES),
    GemmaConfig(**DECODER_SIZES),
    tiny_bert_config(),
    ViTConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4),
    GPTNeoXConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4),
]


@pytest.mark.parametrize("config", COMMON, ids=lambda config: config.model_type)
def test_common_models_copy_nothing(config: PretrainedConfig) -> None:
    model = skeleton(MODEL_MAPPING[type(config)], config)
    for family in (QKV(), GateUp()):
        for module in discover(family, model).matches.values():
            fused: Any = fused_class_of(family, module)
            assert "_output.clone()" not in "".join(fused._rewritten.values())
            assert not re.search(r"shared\(.*\)\.clone\(\)", "".join(fused._rewritten.values()))
