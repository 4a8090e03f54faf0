"""No weight twice in memory, and every value that no checkpoint holds is what the replacement gave it (row 7)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from patcher import InvalidPatcherError, Patcher
from tests.replacements import OWN, OwnMLP, same_output
from tests.tiny import save_tiny, tiny_inputs, tiny_llama_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tiny_llama_config(), tmp_path_factory.mktemp("llama"))


class Computing(OwnMLP):
    """Computes buffers and plain tensors, and uses them: its output is wrong if one of them is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("fleeting", torch.arange(1.0, 5.0), persistent=False)
        self.register_buffer("kept", torch.full((3,), 2.0))
        self.register_buffer("counts", torch.arange(4), persistent=False)
        self.register_buffer("exact", torch.full((2,), 1 / 3, dtype=torch.float32), persistent=False)
        self.plain = torch.tensor([0.5, 0.25])
        self.several = [torch.ones(2), torch.tensor(7)]
        self.fixed = (torch.zeros(1), "text")
        self.named = {"mask": torch.tensor([True, False]), "other": 3}
        self.inner = nn.Module()
        self.inner.register_buffer("deep", torch.linspace(0, 1, 5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.fleeting.sum() / 10 * self.kept[0] / 2 * self.plain[0] * 2 * self.several[0][0]
        one = one * self.named["mask"][0] * (self.inner.deep[-1] - self.inner.deep[0]) + self.fixed[0][0]
        return super().forward(x) * one.to(x.dtype)


def assert_computed(module: Any, dtype: torch.dtype = torch.float32) -> None:
    expected = {
        "fleeting": torch.arange(1.0, 5.0, dtype=dtype),
        "kept": torch.full((3,), 2.0, dtype=dtype),
        "counts": torch.arange(4),
        "exact": torch.full((2,), 1 / 3, dtype=torch.float32),
        "plain": torch.tensor([0.5, 0.25], dtype=dtype),
    }
    found = {name: getattr(module, name) for name in expected}
    found |= {"several 0": module.several[0], "several 1": module.several[1], "fixed": module.fixed[0]}
    expected |= {"several 0": torch.ones(2, dtype=dtype), "several 1": torch.tensor(7), "fixed": torch.zeros(1)}
    expected["fixed"] = expected["fixed"].to(dtype)
    found |= {"named": module.named["mask"], "deep": module.inner.deep}
    expected |= {"named": torch.tensor([True, False]), "deep": torch.linspace(0, 1, 5, dtype=dtype)}
    for name, value in expected.items():
        assert found[name].device.type == "cpu", name
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    assert module.fixed[1] == "text"
    assert module.named["other"] == 3


COMPUTING = Patcher({"LlamaMLP": Computing})


# --- while the model is built --------------------------------------------------------------------------------------


def seen_while_building(build: Any) -> list[tuple[str, ...]]:
    """The devices that a replacement's `__init__` sees, of a module of torch, a parameter, a buffer and a tensor."""
    seen = []

    class Looking(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.ones(2))
            self.register_buffer("mask", torch.ones(2))
            self.register_buffer("other", torch.ones(2), persistent=False)
            tensors = (self.gate_proj.weight, self.scale, self.mask, self.other, torch.ones(1))
            seen.append(tuple(tensor.device.type for tensor in tensors))

    build(Patcher({"LlamaMLP": Looking}, new_weights="scale"))
    return seen


def test_parameters_are_on_meta_and_buffers_real_while_a_load_builds(llama: Path) -> None:
    seen = seen_while_building(lambda patcher: LlamaForCausalLM.from_pretrained(llama, patcher=patcher))
    assert seen[:2] == [("meta", "meta", "cpu", "cpu", "cpu")] * 2
    # Built once more for the values of what is new: that parameter is real, the others are not.
    assert seen[2:] == [("meta", "cpu", "cpu", "cpu", "cpu")] * 2


def test_nothing_is_built_twice_where_nothing_is_new(llama: Path) -> None:
    built = []

    class Counted(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            built.append(self)

    LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Counted}))
    assert len(built) == 2


def in_block(patcher: Patcher) -> Any:
    with patcher.applied():
        return LlamaForCausalLM(tiny_llama_config())


@pytest.mark.parametrize(
    "build",
    [lambda patcher: LlamaForCausalLM._from_config(tiny_llama_config(), patcher=patcher), in_block],
    ids=["from_config", "applied"],
)
def test_parameters_are_real_where_no_checkpoint_will_fill_them(build: Any) -> None:
    assert seen_while_building(build)[:2] == [("cpu",) * 5] * 2


def test_the_whole_model_can_be_built_on_meta() -> None:
    with torch.device("meta"), OWN.applied():
        model = LlamaForCausalLM(tiny_llama_config())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert type(model.model.layers[0].mlp) is OwnMLP


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads and resets the peak in /proc")
def test_the_peak_is_that_of_the_plain_load_and_at_most_one_tensor_more(tmp_path: Path) -> None:
    """Two layers of three matrices of 16 MiB: 96 MiB that a real construction would hold beside the weights."""
    folder = save_tiny(tiny_llama_config(intermediate_size=65536), tmp_path)
    code = f"""
        import gc, sys, torch
        from pathlib import Path
        from torch import nn
        from transformers import LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaMLP
        from patcher import InvalidPatcherError, Patcher

        class Same(LlamaMLP):
            pass

        class Eager(nn.Module):
            # touches all of every matrix before it is registered
            def __init__(self, config):
                super().__init__()
                sizes = config.hidden_size, config.intermediate_size
                for name in ("gate_proj", "up_proj", "down_proj"):
                    linear = nn.Linear(1, 1, bias=False)
                    shape = sizes if name == "down_proj" else sizes[::-1]
                    linear.weight = nn.Parameter(torch.ones(shape))
                    setattr(self, name, linear)

        def peak(**options):
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
            model = LlamaForCausalLM.from_pretrained({str(folder)!r}, dtype=torch.float32, **options)
            for parameter in model.parameters():
                parameter.sum()
            return (status("VmHWM") - before) / 1024

        def status(name):
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith(name))

        peak(patcher=Patcher({{"LlamaMLP": Same}}))
        plain = peak()
        print(plain, peak(patcher=Patcher({{"LlamaMLP": Same}})), peak(patcher=Patcher({{"LlamaMLP": Eager}})))
    """
    # What is freed goes back to the system at once, not to a heap whose holes would count.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    plain, same, eager = map(float, done.stdout.split())
    assert plain > 90  # MiB: the weights themselves
    assert same < plain + 8
    assert eager < plain + 16 * 1.05 + 8


def test_another_thread_that_builds_by_hand_meanwhile_gets_real_parameters(llama: Path) -> None:
    inside, built = threading.Event(), threading.Event()

    class Waiting(OwnMLP):
        def __init__(self, config: Any) -> None:
            inside.set()
            assert built.wait(20)
            super().__init__(config)

    def load() -> None:
        LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Waiting}))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        assert inside.wait(20)
        modules = [nn.Linear(3, 3), LlamaMLP(tiny_llama_config()), OwnMLP(tiny_llama_config())]
        modules[0].register_parameter("more", nn.Parameter(torch.ones(2)))
        loose = nn.Parameter(torch.zeros(2))
    finally:
        built.set()
        thread.join()
    assert [type(module) for module in modules] == [nn.Linear, LlamaMLP, OwnMLP]
    parameters = [loose, *(parameter for module in modules for parameter in module.parameters())]
    assert all(parameter.device.type == "cpu" and not vars(parameter) for parameter in parameters)


# --- computed values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_map", [None, "cpu", {"": "cpu"}, "auto", torch.device("cpu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computed_values_are_right_after_a_load(device_map: Any, dtype: torch.dtype, llama: Path) -> None:
    """In bf16 as a module built under that default has them: a float32 that was asked for stays one."""
    options: dict[str, Any] = {"device_map": device_map, "dtype": dtype}
    model = LlamaForCausalLM.from_pretrained(llama, patcher=COMPUTING, **options)
    for layer in model.model.layers:
        assert_computed(layer.mlp, dtype)
        assert layer.mlp.gate_proj.weight.dtype == dtype
    if dtype == torch.float32:
        assert same_output(model, LlamaForCausalLM.from_pretrained(llama))


DEVICE_MAPS: dict[str, Any] = {
    "a layer on disk": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
    "an mlp on disk": {
        "model.embed_tokens": "cpu",
        "model.layers.0.self_attn": "disk",
        "model.layers.0.mlp": "disk",
        "model.layers.0.input_layernorm": "cpu",
        "model.layers.0.post_attention_layernorm": "cpu",
        "model.layers.1": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
    "all on disk": {"": "disk"},
    "auto": "auto",
}


def offloaded(folder: Path, name: str, where: Path, **options: Any) -> Any:
    if name == "auto":
        options["max_memory"] = {"cpu": 300_000}
    return LlamaForCausalLM.from_pretrained(folder, device_map=DEVICE_MAPS[name], offload_folder=where, **options)


@pytest.mark.parametrize("name", DEVICE_MAPS)
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_computed_values_are_right_where_a_part_is_on_disk(
    name: str, offload_buffers: bool, llama: Path, tmp_path: Path
) -> None:
    options = {"offload_buffers": offload_buffers}
    model = offloaded(llama, name, tmp_path / "patched", patcher=COMPUTING, **options)
    assert "disk" in model.hf_device_map.values()
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    if not offload_buffers:
        for layer in model.model.layers:
            assert_computed(layer.mlp)
    stock = LlamaForCausalLM.from_pretrained(llama)
    assert same_output(model, stock)
    assert same_output(model, stock)  # the weights went back to the disk, and came again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computed_values_are_right_without_a_checkpoint(dtype: torch.dtype) -> None:
    for model in (
        AutoModelForCausalLM.from_config(tiny_llama_config(), dtype=dtype, patcher=COMPUTING),
        LlamaForCausalLM._from_config(tiny_llama_config(), dtype=dtype, patcher=COMPUTING),
    ):
        for layer in model.model.layers:
            assert_computed(layer.mlp, dtype)
    with COMPUTING.applied():
        model = LlamaForCausalLM(tiny_llama_config())
    assert_computed(model.model.layers[0].mlp)


class HalvedRotary(LlamaRotaryEmbedding):
    """Its name and its attributes are such that transformers initialises its buffers once more."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.inv_freq = self.inv_freq / 2


@pytest.mark.parametrize("way", ["load", "load in bf16", "from_config", "applied"])
def test_what_transformers_would_compute_again_is_left_as_the_replacement_computed_it(way: str, llama: Path) -> None:
    patcher = Patcher({"LlamaRotaryEmbedding": HalvedRotary})
    if way == "applied":
        model: Any = in_block(patcher)
    elif way == "from_config":
        model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=patcher)
    else:
        dtype = torch.bfloat16 if "bf16" in way else torch.float32
        model = LlamaForCausalLM.from_pretrained(llama, dtype=dtype, patcher=patcher)
    stock = LlamaRotaryEmbedding(tiny_llama_config()).inv_freq
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, stock / 2)
    assert torch.equal(model.model.rotary_emb.original_inv_freq, stock)


def test_a_saved_buffer_comes_from_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    class Counting(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("steps", torch.tensor([3.0]))

    model = LlamaForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Counting}))
    assert model.model.layers[0].mlp.steps.item() == 3
    state = dict(model.state_dict())
    state["model.layers.1.mlp.steps"] = torch.tensor([8.0])
    del state["model.layers.0.mlp.steps"]
    again = LlamaForCausalLM.from_pretrained(
        None, config=model.config, state_dict=state, patcher=Patcher({"LlamaMLP": Counting})
    )
    assert [layer.mlp.steps.item() for layer in again.model.layers] == [3, 8]


# --- new weights ---------------------------------------------------------------------------------------------------


class Marked(nn.Parameter):
    """A kind of parameter of its own."""


class Adapted(OwnMLP):
    """New weights of every kind, each with values that only `__init__` gives."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.down = nn.Linear(size, 4)
        nn.init.constant_(self.down.weight, 0.5)
        self.up = nn.Linear(4, size, bias=False)
        nn.init.zeros_(self.up.weight)
        self.random = nn.Linear(3, 3)
        nn.init.uniform_(self.random.weight, 5, 6)
        self.norm = nn.LayerNorm(3)
        nn.init.constant_(self.norm.weight, 3)
        self.table = nn.Embedding(4, 2)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(8.0).view(4, 2))
        self.nested = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"deep": nn.Linear(2, 2)}))
        for parameter in self.nested.parameters():
            nn.init.constant_(parameter, 0.25)
        self.frozen = nn.Parameter(torch.full((2,), 8.0), requires_grad=False)
        self.gate_proj.weight.requires_grad_(False)
        self.first = nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.first.weight, 7)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.alias = self.first.weight
        self.wide = nn.Parameter(torch.full((2,), 1 / 3, dtype=torch.float64))
        self.single = nn.Parameter(torch.full((2,), 1 / 3, dtype=torch.float32))
        self.whole = nn.Parameter(torch.tensor([1, 2], dtype=torch.int8), requires_grad=False)
        self.marked = Marked(torch.full((2,), 9.0))
        self.listed = nn.ParameterList([nn.Parameter(torch.full((1,), float(index))) for index in range(3)])
        self.late = None
        self.late = nn.Parameter(torch.full((2,), 4.0))
        self.filled = nn.Parameter(torch.empty(2))
        self.filled.data.fill_(6.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


NEW = ("down", "up", "random", "norm", "table", "nested", "first", "second", "alias", "wide", "single", "whole")
NEW += ("marked", "listed", "late", "filled", "frozen")
ADAPTED = Patcher({"LlamaMLP": Adapted}, new_weights=rf"\.mlp\.({'|'.join(NEW)})(\.|$)")


def assert_initial(module: Any, dtype: torch.dtype = torch.float32) -> None:
    values = {
        "down.weight": 0.5,
        "up.weight": 0,
        "norm.weight": 3,
        "nested.0.weight": 0.25,
        "nested.0.bias": 0.25,
        "nested.1.deep.weight": 0.25,
        "first.weight": 7,
        "second.weight": 7,
        "alias": 7,
        "marked": 9,
        "late": 4,
        "filled": 6,
        "listed.0": 0,
        "listed.2": 2,
    }
    for name, value in values.items():
        parameter = module.get_parameter(name)
        assert isinstance(parameter, nn.Parameter), name
        assert (parameter == value).all(), (name, parameter)
        assert parameter.dtype == dtype, name
        assert parameter.device.type == "cpu", name
        assert parameter.requires_grad, name
    assert module.random.weight.min() >= 5
    assert module.random.weight.max() <= 6
    assert module.random.weight.unique().numel() > 1
    assert torch.equal(module.table.weight, torch.arange(8.0, dtype=dtype).view(4, 2))
    assert torch.equal(module.wide, torch.full((2,), 1 / 3, dtype=torch.float64))
    assert torch.equal(module.single, torch.full((2,), 1 / 3, dtype=torch.float32))
    assert torch.equal(module.whole, torch.tensor([1, 2], dtype=torch.int8))
    assert not module.whole.requires_grad
    assert module.second.weight is module.first.weight
    assert module.alias is module.first.weight
    assert type(module.marked) is Marked
    assert torch.equal(module.frozen, torch.full((2,), 8.0, dtype=dtype))
    trained = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert trained == {"gate_proj.weight", "whole", "frozen"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device_map", [None, "cpu"])
def test_new_weights_keep_what_init_gave_them(dtype: torch.dtype, device_map: Any, llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=ADAPTED, dtype=dtype, device_map=device_map)
    stock = LlamaForCausalLM.from_pretrained(llama, dtype=dtype)
    for layer, other in zip(model.model.layers, stock.model.layers, strict=True):
        assert_initial(layer.mlp, dtype)
        assert torch.equal(layer.mlp.gate_proj.weight, other.mlp.gate_proj.weight)
    if dtype == torch.float32:
        assert same_output(model, stock)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_weights_keep_what_init_gave_them_in_a_model_from_a_config(dtype: torch.dtype) -> None:
    model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=ADAPTED, dtype=dtype)
    for layer in model.model.layers:
        assert_initial(layer.mlp, dtype)
        # What is not new is initialised as the model does it: by a normal distribution of a small width.
        assert 0.5 < layer.mlp.gate_proj.weight.float().std() / model.config.initializer_range < 2


def test_new_weights_keep_what_init_gave_them_in_a_model_built_in_a_block() -> None:
    model = in_block(ADAPTED)
    for layer in model.model.layers:
        assert_initial(layer.mlp)


def test_new_weights_are_kept_when_they_are_saved_and_loaded(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=ADAPTED)
    with torch.no_grad():
        for parameter in model.model.layers[0].mlp.up.parameters():
            parameter.fill_(11)
    again = LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict(), patcher=ADAPTED)
    assert (again.model.layers[0].mlp.up.weight == 11).all()
    assert (again.model.layers[1].mlp.up.weight == 0).all()


class Sharing(OwnMLP):
    """One new parameter under three names, one of them in a module of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.third = self.second.weight


SHARING = Patcher({"LlamaMLP": Sharing}, new_weights=r"first\.weight$")


@pytest.mark.parametrize("named", ["first.weight", "second.weight", "third", "second.weight third"])
def test_a_parameter_of_several_names_is_read_by_any_of_them(named: str, llama: Path) -> None:
    state = dict(LlamaForCausalLM.from_pretrained(llama).state_dict())
    for layer in range(2):
        for name in named.split():
            state[f"model.layers.{layer}.mlp.{name}"] = torch.full((2, 2), float(layer + 1))
    config = tiny_llama_config()
    strict = Patcher({"LlamaMLP": Sharing})
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state, patcher=strict)
    for number, layer in enumerate(model.model.layers, 1):
        assert (layer.mlp.first.weight == number).all()
        assert layer.mlp.first.weight is layer.mlp.second.weight
        assert layer.mlp.first.weight is layer.mlp.third


@pytest.mark.parametrize("way", ["load", "from_config", "applied"])
def test_a_model_with_a_new_parameter_of_several_names_can_be_saved_and_read(
    way: str, llama: Path, tmp_path: Path
) -> None:
    if way == "load":
        model: Any = LlamaForCausalLM.from_pretrained(llama, patcher=SHARING)
    elif way == "from_config":
        model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=SHARING)
    else:
        model = in_block(SHARING)
    with torch.no_grad():
        model.model.layers[1].mlp.third.fill_(13)
    model.save_pretrained(tmp_path)
    names = [key for key in load_file(tmp_path / "model.safetensors") if "layers.1.mlp" in key and "proj" not in key]
    assert len(names) == 1
    again = LlamaForCausalLM.from_pretrained(tmp_path, patcher=SHARING)
    assert (again.model.layers[1].mlp.second.weight == 13).all()
    assert again.model.layers[1].mlp.second.weight is again.model.layers[1].mlp.third
    stock = Patcher().apply(again)
    assert type(stock.model.layers[1].mlp) is LlamaMLP
    assert same_output(stock, model)


@pytest.mark.parametrize("name", DEVICE_MAPS)
def test_new_weights_are_right_where_a_part_is_on_disk(name: str, llama: Path, tmp_path: Path) -> None:
    class Added(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.adapter = nn.Linear(config.hidden_size, config.hidden_size)
            nn.init.zeros_(self.adapter.weight)
            nn.init.zeros_(self.adapter.bias)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale + self.adapter(x)

    model = offloaded(
        llama, name, tmp_path / "patched", patcher=Patcher({"LlamaMLP": Added}, new_weights="adapter|scale")
    )
    stock = LlamaForCausalLM.from_pretrained(llama)
    assert same_output(model, stock)
    assert same_output(model, stock)


def test_a_new_weight_that_goes_to_the_disk_needs_a_folder(llama: Path) -> None:
    patcher = Patcher({"LlamaMLP": Sharing}, new_weights="first")
    text = r"mlp\.third is not in the checkpoint, and the device map puts it on the disk: say where, with offload_folder"
    with pytest.raises(InvalidPatcherError, match=text):
        LlamaForCausalLM.from_pretrained(llama, device_map=DEVICE_MAPS["a layer on disk"], patcher=patcher)


@pytest.mark.filterwarnings("ignore:The replaced modules and the checkpoint")
def test_a_weight_that_is_missing_without_leave_keeps_what_init_gave_it(llama: Path) -> None:
    patcher = ADAPTED.replace(new_weights=(), strict=False)
    model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
    assert_initial(model.model.layers[1].mlp)


@pytest.mark.filterwarnings("ignore:The replaced modules and the checkpoint")
def test_a_weight_of_another_shape_keeps_what_init_gave_it(llama: Path) -> None:
    class Wider(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.up_proj = nn.Linear(config.hidden_size + 1, 2)
            nn.init.constant_(self.up_proj.weight, 5)
            nn.init.constant_(self.up_proj.bias, 6)

    model = LlamaForCausalLM.from_pretrained(
        llama, ignore_mismatched_sizes=True, patcher=Patcher({"LlamaMLP": Wider}, strict=False)
    )
    assert model.model.layers[0].mlp.up_proj.weight.shape == (2, 65)
    assert (model.model.layers[0].mlp.up_proj.weight == 5).all()
    assert (model.model.layers[0].mlp.up_proj.bias == 6).all()


def test_two_loads_from_one_seed_are_alike(llama: Path) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(LlamaForCausalLM.from_pretrained(llama, patcher=ADAPTED))
    first, second = (model.model.layers[0].mlp.random.weight for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, models[0].model.layers[1].mlp.random.weight)


# --- afterwards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patcher", [OWN, COMPUTING, ADAPTED], ids=["same weights", "buffers", "new weights"])
@pytest.mark.parametrize("way", ["load", "disk", "from_config", "applied"])
def test_nothing_marks_the_tensors_of_a_finished_model(
    patcher: Patcher, way: str, llama: Path, tmp_path: Path
) -> None:
    if way == "load":
        model: Any = LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
    elif way == "disk":
        model = offloaded(llama, "a layer on disk", tmp_path, patcher=patcher)
    elif way == "from_config":
        model = LlamaForCausalLM._from_config(tiny_llama_config(), patcher=patcher)
    else:
        model = in_block(patcher)
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        assert not [attribute for attribute in vars(tensor) if "patcher" in attribute], name


def test_a_finished_model_trains_like_any_other(llama: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, patcher=ADAPTED).train()
    inputs = tiny_inputs(model.config)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert model.model.layers[0].mlp.up.weight.grad.abs().sum() > 0
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    assert model.model.layers[0].mlp.gate_proj.weight.grad is None
