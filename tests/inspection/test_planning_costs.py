"""What a plan costs, in a process of its own: of a repo only the config and the headers, of a large model seconds."""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from patcher import Patcher, plan
from patcher.resolution.resolution import skeleton
from tests.support import fresh
from tests.support.hub_server import serving
from tests.support.tiny import save_tiny, tiny_llama_config

HUB = """
import sys
from patcher import Patcher, plan

planned = plan("someone/tiny", Patcher(fusions="qkv"))
assert planned.ok, planned.problems
assert planned.model == "LlamaForCausalLM"
print(planned.checkpoint, len(planned.weights))
"""


@pytest.mark.process
@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_of_a_repo_only_the_config_and_the_headers_are_fetched(sharded: bool, tmp_path: Path) -> None:
    config = tiny_llama_config(hidden_size=256, intermediate_size=1024, vocab_size=4096)  # 4 MB, a header is 3 kB
    folder = save_tiny(config, tmp_path / "repo", max_shard_size="1MB" if sharded else "5GB")
    weights = [file.name for file in folder.iterdir() if file.suffix == ".safetensors"]
    assert (len(weights) > 1) == sharded
    with serving(folder) as hub:
        online = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        # An interpreter: the package for hubs reads these when it is imported.
        command = [sys.executable, "-W", "ignore", "-c", HUB]
        done = subprocess.run(command, env={**os.environ, **online}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        name, file, *rest = done.stdout.splitlines()[-1].split()
        sent = dict(hub.sent)
    assert (name, file) == ("someone/tiny", "(model.safetensors.index.json)" if sharded else "(model.safetensors)")
    assert rest == [str(len(plan(folder, Patcher(fusions="qkv")).weights))]
    # The first 100 kB of a file hold nearly any header, so that is what is requested at once.
    assert all(sent[name] <= 100_001 for name in weights)
    assert set(sent) - {""} <= {*weights, "config.json", "model.safetensors.index.json"}
    assert sum(sent[name] for name in weights) < sum((folder / name).stat().st_size for name in weights) / 8


LARGE = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from patcher import Patcher, plan
from tests.support.memory import peak


class OwnMoE(DeepseekV3MoE):
    pass


folder, kind = Path(sys.argv[1]), sys.argv[2]
patcher = Patcher({"DeepseekV3MoE": OwnMoE}) if kind == "mapping" else Patcher(fusions=kind)
started = time.process_time()
planned = plan(folder, patcher)
seconds = time.process_time() - started
assert planned.ok, planned.problems
assert len(planned.replaced) + len(planned.fused) == 58
assert (planned.missing, planned.left_over) == ((), ())
assert len(str(planned)) < 30_000
print(peak() / 2**30)
if seconds > 10:  # or, on a slow machine, twice what torch takes there to make as many linear layers
    started = time.process_time()
    with torch.device("meta"):
        nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(46_183)).state_dict()
    assert seconds < 2 * (time.process_time() - started), seconds
"""


def deepseek_names(scaled: bool) -> list[str]:
    """The names of the checkpoint of DeepSeek-V3, the layer for predicting one more token included."""
    names: list[str] = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]

    def add(name: str) -> None:
        names.extend([name, f"{name}_scale_inv"] if scaled else [name])

    for layer in range(62):
        head = f"model.layers.{layer}."
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_a_layernorm",
            "self_attn.kv_a_layernorm",
        ):
            names.append(f"{head}{norm}.weight")
        for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
            add(f"{head}self_attn.{part}.weight")
        places = ["mlp."]
        if layer >= 3:
            names += [f"{head}mlp.gate.weight", f"{head}mlp.gate.e_score_correction_bias"]
            places = ["mlp.shared_experts.", *(f"mlp.experts.{expert}." for expert in range(256))]
        for place in places:
            for part in ("gate_proj", "up_proj", "down_proj"):
                add(f"{head}{place}{part}.weight")
    tail = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    return [*names, *(f"model.layers.61.{name}.weight" for name in tail)]


SHARDS = [f"model-{number:05d}-of-00163.safetensors" for number in range(1, 164)]


def write_headers(folder: Path, config: DeepseekV3Config, names: list[str]) -> dict[str, str]:
    """Shards of which only the headers are there: the rest of each is a hole. Key -> its file."""
    known = {name: list(value.shape) for name, value in skeleton(DeepseekV3ForCausalLM, config).state_dict().items()}
    expert = [config.moe_intermediate_size, config.hidden_size]

    def tensor(name: str) -> tuple[str, int, list[int]]:
        """The dtype, its bytes, and the shape; a weight with a scale for each block is in float8."""
        if name in scales:
            return "F32", 4, [math.ceil(size / 128) for size in tensor(name.removesuffix("_scale_inv"))[2]]
        shape = known.get(name, expert[::-1] if "down_proj" in name else expert)
        return ("F8_E4M3", 1, shape) if f"{name}_scale_inv" in scales else ("BF16", 2, shape)

    scales = {name for name in names if name.endswith("_scale_inv")}
    files: dict[str, str] = {}
    for number, shard in enumerate(SHARDS):
        header, end = {}, 0
        for name in names[number :: len(SHARDS)]:
            dtype, size, shape = tensor(name)
            begin, end = end, end + size * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            files[name] = shard
        text = json.dumps(header).encode()
        with (folder / shard).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    return files


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "scaled"),
    [
        ("mapping", True),
        pytest.param("mapping", False, marks=pytest.mark.nightly),
        pytest.param("sequential_experts", False, marks=pytest.mark.nightly),
    ],
)
def test_a_model_of_671_billion_parameters_is_planned_in_seconds(kind: str, scaled: bool, tmp_path: Path) -> None:
    names = deepseek_names(scaled)
    assert len(names) == (91_991 if scaled else 46_183)
    config = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], dtype="bfloat16")
    if scaled:
        blocks = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        config.quantization_config = blocks
    config.save_pretrained(tmp_path)
    files = write_headers(tmp_path, config, names)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert float(fresh.run(LARGE, tmp_path, kind).stdout) < 2


@pytest.mark.process
def test_a_hub_that_can_not_be_reached_is_asked_once(tmp_path: Path) -> None:
    """What was meant is most likely a folder, whose name is misspelt."""
    code = """
from patcher import InvalidPatcherError, Patcher, plan

try:
    plan("no_such_folder", Patcher(fusions="qkv"))
except InvalidPatcherError as error:
    print(error)
"""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    online = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env={**os.environ, **online}, capture_output=True, text=True, check=True)
    assert "There is no such folder: write the path of one that is there, or a repo that can" in done.stdout
    assert f"(OSError: http://127.0.0.1:{port} can't be reached: " in done.stdout
    assert "Retry" not in done.stderr
