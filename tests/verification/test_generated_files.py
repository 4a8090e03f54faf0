"""`patcher.codegen.verify` and `patcher codegen verify`: what is right passes, and each wrong is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from patcher.cli import app
from patcher.codegen import PatchConfig, verify
from patcher.errors import CodegenError, VerificationError
from tests.support import tiny

LLAMA = "transformers.models.llama.modeling_llama"


def llama(*patches: tuple[str, str, str]) -> PatchConfig:
    config = PatchConfig(LLAMA, "patched_modeling_llama.py")
    for method, target, text in patches:
        getattr(config, method)(target, text)
    return config


def small() -> LlamaConfig:
    return tiny.tiny_llama_config(num_hidden_layers=1)


RIGHT = (
    "replace_function",
    "rotate_half",
    "def f(x):\n    a, b = x.chunk(2, -1)\n    return torch.cat((-b, a), -1)\n",
)
OTHER = ("override_method", "LlamaMLP.forward", "def forward(self, x):\n    return self.down_proj(self.up_proj(x))\n")
BUFFER = (
    "def more(original_init, self, config):\n    original_init(self, config)\n"
    "    self.register_buffer('mine', torch.ones(1))\n"
)
HOME = (
    "def forward(self, x):\n    return self.down_proj(self.up_proj(x)) * (1 + __name__.startswith('transformers'))\n"
)
FAILS = (
    "def forward(self, x):\n    if not __name__.startswith('transformers'):\n        raise ValueError('here')\n"
    "    return x\n"
)
UNUSED = ("override_method", "LlamaForTokenClassification.mine", "def f(self):\n    pass\n")


def test_what_is_right_passes_and_what_differs_from_stock_is_told_in_numbers() -> None:
    found = verify(llama(RIGHT), model_config=small())
    assert found.passed, str(found)
    for (model,) in (found.models, found.exact):
        assert model.model == "LlamaForCausalLM"
        assert [model.figures(stage)["max abs"] for stage in ("outputs", "gradients")] == [0, 0]
    other = verify(llama(OTHER), model_config=small())
    assert other.passed
    assert other.models[0].figures("outputs")["max abs"] > 0.01
    assert "LlamaForCausalLM" in str(other)
    stages = {stage["name"]: stage["figures"] for stage in other.to_dict()["models"][0]["stages"]}
    assert stages["outputs"] == other.models[0].figures("outputs")
    strict = verify(llama(OTHER), model_config=small(), tolerance=1e-5)
    assert [text.partition(" differ ")[0] for text in strict.failures] == [
        "LlamaForCausalLM: the file and stock: outputs: on a short row they",
    ]
    assert "begins in model.layers.0.mlp (" in strict.failures[0]
    with pytest.raises(VerificationError, match=r"patched_modeling_llama\.py is wrong:\n  LlamaForCausalLM: the file"):
        strict.raise_on_failure()


WRONG: dict[str, tuple[tuple[str, str, str], str]] = {
    "another checkpoint": (
        ("modify_init", "LlamaMLP", BUFFER),
        r"the file and stock: save: .*mine",
    ),
    "another result in a file": (
        ("override_method", "LlamaMLP.forward", HOME),
        r"the file and the runtime patch: outputs: on a short row they differ by .*, in logits; it begins in .*mlp \(",
    ),
    "an error": (("override_method", "LlamaMLP.forward", FAILS), r"on a short row the file raises ValueError: here"),
    "no forward": (
        ("override_method", "LlamaMLP.__init__", "def f(self, config):\n    raise ValueError('never')\n"),
        r"the file and stock: load: ValueError: never",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told(case: str) -> None:
    patch, message = WRONG[case]
    found = verify(llama(patch), model_class="LlamaForCausalLM", model_config=small(), partly=True)
    assert not found.passed
    with pytest.raises(VerificationError, match=message):
        found.raise_on_failure()


def test_an_error_of_the_runtime_patch_is_not_said_to_be_that_of_stock() -> None:
    both = "def forward(self, x):\n    raise ValueError('in both')\n"
    found = verify(llama(("override_method", "LlamaMLP.forward", both)), model_config=small())
    text = (
        "outputs: the runtime patch runs on none of the inputs that were tried; the first error: ValueError: in both"
    )
    assert text in found.failures[0]


def test_patches_that_never_ran_are_told_and_may_pass() -> None:
    config = llama(RIGHT, UNUSED)
    found = verify(config, model_class="LlamaForCausalLM", model_config=small())
    assert found.unrun == ("override method LlamaForTokenClassification.mine",)
    assert found.failures == ("override method LlamaForTokenClassification.mine never ran",)
    assert verify(config, model_class="LlamaForCausalLM", model_config=small(), partly=True).passed


def test_models_are_run_until_every_patch_has_run() -> None:
    text = "def f(self, *args, **kwargs):\n    return super().forward(*args, **kwargs)\n"
    found = verify(llama(RIGHT, ("override_method", "LlamaForTokenClassification.forward", text)))
    assert found.passed, str(found)
    names = [model.model for model in found.models]
    assert names[0] == "LlamaForCausalLM"
    assert names[-1] == "LlamaForTokenClassification"


def test_a_model_whose_checkpoint_is_converted_and_a_decorator_that_dispatches() -> None:
    config = PatchConfig("transformers.models.mixtral.modeling_mixtral", "patched_modeling_mixtral.py")
    text = "def forward(self, hidden_states, *args):\n    return hidden_states\n"
    config.override_method("MixtralExperts.forward", text)
    with pytest.warns(UserWarning, match="may never run"):
        stuck = verify(config, model_class="MixtralForCausalLM")
    assert stuck.unrun == ("override method MixtralExperts.forward",)
    config.drop_decorators("MixtralExperts", "use_experts_implementation")
    assert verify(config).passed
    text = "@classmethod\ndef f(cls):\n    return True\n"
    config.override_method("MixtralPreTrainedModel.is_custom_code", text, new=True)  # the fault of old
    assert "the file and stock: save: " in "".join(verify(config).failures)


def test_what_can_not_be_run_raises_or_is_told() -> None:
    with pytest.raises(CodegenError, match=r"verify\(\) found no model 'Llama' in .*, only .*LlamaForCausalLM"):
        verify(llama(RIGHT), model_class="Llama")
    config = llama(RIGHT)
    config.add_post_import_block("raise ValueError('broken')")
    with pytest.raises(CodegenError, match=r"patched_modeling_llama\.py can't be imported: ValueError: broken"):
        verify(config)
    bad = tiny.tiny_llama_config(num_key_value_heads=3)
    found = verify(llama(RIGHT), model_class="LlamaForCausalLM", model_config=bad)
    assert not found.passed
    assert found.failures[0].startswith("no model could be run: LlamaForCausalLM: ")


CONFIG = """
from patcher.codegen import PatchConfig

config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
config.override_method("LlamaMLP.forward", "def forward(self, x):\\n    return self.down_proj(self.up_proj(x))\\n")
"""


def test_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "a_patch_gen_config.py"
    path.write_text(CONFIG)
    small().save_pretrained(tmp_path / "config")
    command = ["codegen", "verify", str(path), "--model-config", str(tmp_path / "config")]
    right = CliRunner().invoke(app, command)
    assert right.exit_code == 0, right.output
    (far,) = re.findall(r"modeling_llama: as its config says, outputs (\S+) \(relative\) from", right.output)
    assert float(far) > 0.01
    wrong = CliRunner().invoke(app, [*command, "--tolerance", "1e-6", "--json"])
    assert wrong.exit_code == 1
    assert json.loads(wrong.stdout)[0]["passed"] is False
    assert CliRunner().invoke(app, ["codegen", "verify", str(tmp_path / "none.py")]).exit_code == 1
    impossible = CliRunner().invoke(app, [*command, "--tolerance", "-1"])
    assert impossible.exit_code == 2
    assert "error: tolerance=-1.0 can't be met; write 0, for bitwise equality, or more." in impossible.output


def test_an_architecture_whose_sizes_depend_on_each_other_needs_a_config() -> None:
    config = PatchConfig("transformers.models.mamba2.modeling_mamba2", "patched_modeling_mamba2.py")
    text = "def forward(self, hidden_states):\n    return hidden_states\n"
    config.override_method("MambaRMSNormGated.forward", text)
    found = verify(config, model_class="Mamba2ForCausalLM")
    assert not found.passed
    assert "give model_config= (--model-config FOLDER), a small one with which it runs" in str(found)


def test_a_tower_without_inputs_of_its_own_is_run_by_the_model_around_it() -> None:
    config = PatchConfig("transformers.models.qwen2_vl.modeling_qwen2_vl", "patched_modeling_qwen2_vl.py")
    config.override_method("VisionMlp.forward", "def forward(self, x):\n    return self.fc2(self.act(self.fc1(x)))\n")
    found = verify(config, model_class="Qwen2VisionTransformerPretrainedModel")
    assert not found.passed
    assert "runs, or model_class= (--model CLASS), a model around it that makes its inputs" in found.skipped[0][1]
    assert verify(config, model_class="Qwen2VLForConditionalGeneration").passed
