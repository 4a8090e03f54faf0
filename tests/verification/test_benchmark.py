"""What pays is named, what doesn't isn't, and it takes the time that it is given."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ViTConfig, WhisperConfig, WhisperForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import patcher
from patcher import Benchmark, InvalidPatcherError, Patcher, benchmark, forward_of, presets
from patcher.verification.benchmark import as_python
from patcher.verification.rounds import ALL, STEPS, batches_of, joined, measured_members
from tests.support import shared
from tests.support.replacements import JOINED
from tests.support.tiny import tiny_bert_config, tiny_llama_config
from tests.verification.models import T5, VIT
from tests.verification.plainly_wrong import Scaled


class Same(LlamaMLP):
    pass


class Slow(LlamaRMSNorm):
    """Right, and takes its time."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return super().forward(hidden_states)


class Slower(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return super().forward(hidden_states)


class Fast(LlamaMLP):
    """Wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Eager(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class RaisesInTraining(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise NotImplementedError("no backward pass")
        return super().forward(x)


NOTHING, SLOW, FAST = Patcher({"LlamaMLP": Same}), Patcher({"LlamaRMSNorm": Slow}), Patcher({"LlamaMLP": Fast})


def measured(model: Any, *patchers: Patcher, seconds: float = 4.0, rounds: int = 0, **options: Any) -> Benchmark:
    """Benchmark some patchers; a machine that is busy with other work takes longer for so many rounds."""
    for limit in (seconds, 4 * seconds, 16 * seconds):
        found = benchmark(model, *patchers, seconds=limit, progress=False, **options)
        if found.rounds >= rounds:
            break
    return found


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nearly all of it is in its MLP."""
    return shared.checkpoint(tiny_llama_config(intermediate_size=8192, num_hidden_layers=4))


def test_the_part_that_pays_is_named(wide: Path) -> None:
    found = measured(wide, FAST | SLOW, verify=False, seconds=8.0, rounds=6)

    assert found.best == FAST, found
    assert [each.patcher for each in found.measured] == [FAST | SLOW, FAST, SLOW]
    assert {each.patcher: each.pays for each in found.measured}[SLOW] is False
    assert found.measured[2].gains[ALL].verdict == "worse"
    kinds = {name.split(",")[0] for name in found.stock}
    assert kinds >= {"load", "prefill", "decode", "training step"}
    scope: dict[str, Any] = {}
    exec(found.python, scope)
    assert scope["patcher"] == FAST
    assert f"measured on {found.date}: {found.machine}; Python" in found.python
    assert "from tests.verification.test_benchmark import Fast" in str(found)


def test_it_is_a_value_in_text_html_and_json(wide: Path) -> None:
    found = measured(
        wide, FAST, verify=False, measures=["prefill"], inputs={"input_ids": torch.tensor([[1, 2, 3]])}, rounds=6
    )
    data = json.loads(json.dumps(found.to_dict()))

    assert data["best"] == repr(FAST)
    assert list(found.stock) == ["prefill, 1 x 3 tokens"]
    assert data["measured"][0]["gains"]["prefill, 1 x 3 tokens"]["verdict"] == "better"
    assert "better" in found._repr_html_()
    assert "█" in found._repr_html_()
    assert "█" in str(found)


def nothing_pays(model: Any, seed: int) -> bool:
    return measured(model, NOTHING, SLOW, verify=False, seconds=1.5, seed=seed).best is None


def test_a_patch_that_does_nothing_does_not_pay(llama: Path) -> None:
    paid = sum(not nothing_pays(llama, seed) for seed in range(4))
    if paid > 1:  # by chance once in 70 times, where one run in twenty is wrong: more of them tell
        paid += sum(not nothing_pays(llama, seed) for seed in range(4, 12))
    assert paid <= 3


@pytest.mark.nightly
def test_a_patch_that_does_nothing_pays_once_in_twenty_runs(llama: Path) -> None:
    # Three of forty, where one in twenty is right, are exceeded by chance once in seven times; five once in 70.
    assert sum(nothing_pays(llama, seed) for seed in range(40)) >= 35


# One second is over before a busy machine has done anything.
@pytest.mark.parametrize("seconds", [pytest.param(1.0, marks=pytest.mark.nightly), 3.0])
def test_it_takes_the_time_that_it_is_given(llama: Path, seconds: float) -> None:
    measured(llama, NOTHING, seconds=0.1)  # what is imported by it
    started = time.perf_counter()
    found = measured(llama, Patcher(fusions=["qkv", "gate_up"]), seconds=seconds)
    taken = time.perf_counter() - started
    assert taken <= 2 * seconds
    assert abs(found.seconds - taken) < 0.5


def test_in_no_time_nothing_is_said(llama: Path) -> None:
    found = measured(llama, NOTHING, seconds=1e-3)
    assert (found.best, found.measured) == (None, ())
    assert "no round was finished; give it more time: seconds=60" in str(found)


def test_what_is_wrong_is_not_measured(llama: Path) -> None:
    found = measured(llama, Patcher({"LlamaAttention": Scaled}), NOTHING, seconds=2.0, rounds=1)
    assert [each.patcher for each in found.measured] == [NOTHING]
    ((wrong, why), *others) = found.left_out
    assert wrong == Patcher({"LlamaAttention": Scaled})
    assert "it differs from stock: outputs: on a short row they differ by" in why
    assert [why.split(" by ")[0] for _, why in others] == ["its outputs differ from stock's"]  # of both together


def test_what_no_import_finds_is_left_out_in_json_too(llama: Path) -> None:
    class Wrong(Scaled):
        pass

    found = measured(llama, Patcher({"LlamaAttention": Wrong}), seconds=1.0, measures=["prefill"])
    ((left_out),) = json.loads(json.dumps(found.to_dict()))["left_out"]
    assert left_out["patcher"].endswith("<locals>.Wrong})")
    text = as_python(Patcher(function_mapping={"apply_rotary_pos_emb": lambda *args: args}))
    assert "# Not importable: what is in <>" in text


def test_prompts_are_no_longer_than_a_decoder_takes(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 128}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(**sizes, **tokens, max_target_positions=32)
    model = WhisperForCausalLM(config)
    side: Any = SimpleNamespace(folder=tmp_path, options={})
    for batch in batches_of(model, side, seconds=1e6, seed=0):
        assert model(**batch).logits.shape[1] == 32 - STEPS


def test_what_fails_somewhere_is_not_measured_and_the_reason_is_given(llama: Path) -> None:
    found = measured(llama, Patcher({"LlamaMLP": RaisesInTraining}), seconds=2.0, rounds=1)
    assert (found.measured, found.best) == ((), None)
    ((_, why),) = found.left_out
    assert why.startswith("training step, ")
    assert "NotImplementedError: no backward pass" in why


def test_members_for_other_models_are_left_out_without_a_word(llama: Path) -> None:
    mapping = {"LlamaMLP": Same, "LlamaRMSNorm": Slow, "GemmaMLP": Same, "Gemma2MLP": Same}
    both = Patcher(mapping, alternatives=[list(mapping)], transformers=">=5")
    found = measured(llama, both, measures=["load"], verify=False, rounds=1)
    assert len(found.measured) == 3
    assert found.left_out == ()
    assert "transformers=" not in str(found)
    assert found.measured[0].label == "Patcher(class_mapping={'LlamaMLP': Same}) and 3 more"
    missing = measured(llama, Patcher({"GemmaMLP": Same}, transformers=">=5"), measures=["load"], verify=False)
    ((_, why),) = missing.left_out
    assert "no class of the model matches 'GemmaMLP'" in why
    assert "transformers=" not in str(missing)


@pytest.mark.parametrize("config", [tiny_bert_config(), T5, VIT], ids=lambda config: config.model_type)
def test_what_generates_no_text_is_run_forward(config: Any) -> None:
    fusion = "patch_embeddings" if isinstance(config, ViTConfig) else "qkv"
    found = measured(config, Patcher(fusions=[fusion]), rounds=1)
    assert {name.split(",")[0] for name in found.stock} == {"load", "memory", "forward", "training step"}
    assert found.measured, found


def test_a_load_can_be_measured_alone(llama: Path) -> None:
    found = measured(llama, NOTHING, measures=["load"], verify=False, rounds=1)
    assert list(found.stock) == ["load"]
    assert [list(each.gains) for each in found.measured] == [["load"]]
    assert found.best is None


def test_patchers_that_contradict_are_beside_one_another(llama: Path) -> None:
    found = measured(llama, NOTHING, JOINED, rounds=1)
    assert [each.patcher for each in found.measured] == [NOTHING, JOINED]


@pytest.mark.nightly
def test_of_many_members_those_that_gain_are_joined_in_the_end(wide: Path) -> None:
    slow = Patcher(module_mapping={f"model.layers.{number}.input_layernorm": Slower for number in range(3)})
    found = measured(wide, FAST | slow, verify=False, measures=["prefill"], seconds=16.0)
    assert found.best == FAST, found
    found = measured(wide, slow | SLOW, verify=False, measures=["prefill"], seconds=4.0)
    assert found.best is None


def test_members_and_their_subsets() -> None:
    assert joined([]) == []
    three = Patcher({"LlamaMLP": Same, "LlamaRMSNorm": Slow}, fusions=["qkv"], name="three")
    members = measured_members(three)
    assert members == [NOTHING, SLOW, Patcher(fusions=["qkv"])]
    assert measured_members(JOINED) == [JOINED]  # it converts


@pytest.mark.parametrize("given", [
    NOTHING, JOINED, Patcher({"LlamaMLP": forward_of(Eager)}), presets.LLAMA_FUSED_PROJECTIONS,
    Patcher({patcher.like("LlamaRMSNorm"): Slow}), Patcher(fusions=[patcher.fusions.QKV(modules="model.layers.0.*")]),
])  # fmt: skip
def test_a_patcher_as_python(given: Patcher) -> None:
    scope: dict[str, Any] = {}
    exec(as_python(given), scope)
    assert scope["patcher"] == given


def test_arguments_are_checked(llama: Path) -> None:
    with pytest.raises(InvalidPatcherError, match=r"found no patcher; write benchmark\(model, Patcher\("):
        benchmark(llama)
    with pytest.raises(InvalidPatcherError, match=r"benchmark takes a patcher\.Patcher, found \('qkv',\)"):
        benchmark(llama, ("qkv",))  # type: ignore[arg-type]
    for seconds in (0, -1.0, "x"):
        with pytest.raises(InvalidPatcherError, match=r"not a positive number; write benchmark\(\.\.\., seconds=60"):
            measured(llama, NOTHING, seconds=seconds)
    with pytest.raises(InvalidPatcherError, match="there is no such measure; they are load, memory, prefill"):
        measured(llama, NOTHING, measures=["speed"])
    with pytest.raises(InvalidPatcherError, match="stock can't be run on inputs="):
        measured(llama, NOTHING, inputs={"no_such": torch.ones(1)}, verify=False)
    with pytest.raises(InvalidPatcherError, match=r"write inputs=tokenizer\(texts"):
        measured(llama, NOTHING, inputs=["a text"], verify=False)


@pytest.mark.nightly
def test_on_a_real_model_the_choice_is_as_good_as_the_best_subset(smollm2: Path) -> None:
    given = Patcher(fusions=["qkv", "gate_up"])
    options: dict[str, Any] = {"dtype": torch.bfloat16, "measures": ["decode", "prefill"]}
    started = time.perf_counter()
    found = benchmark(smollm2, given, seconds=60, progress=False, **options)
    assert time.perf_counter() - started <= 120
    again = benchmark(smollm2, given, seconds=240, seed=1, progress=False, **options)
    # What longer rounds don't tell from stock isn't better than it.
    ratios = {each.patcher: gain.ratio if gain.differs else 1.0 for each in again.measured if (gain := each.whole)}
    ratios |= {None: 1.0}
    assert ratios[found.best] <= 1.02 * min(ratios.values()), again
