"""No weight twice in memory, and what a replacement computes is right after the load (row 7)."""

from __future__ import annotations

import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding
from transformers.utils import logging

from patcher import Patcher
from tests.support import fresh, shared
from tests.support.offloaded import DEVICE_MAPS, offloaded
from tests.support.replacements import OWN, OwnMLP, in_block, same_output
from tests.support.tiny import save_tiny, tiny_llama_config


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared.checkpoint(tiny_llama_config())


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


def test_a_parameter_that_is_moved_to_meta_is_freed_at_once(llama: Path) -> None:
    freed: list[bool] = []

    class Eager(LlamaMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            weight = nn.Parameter(torch.zeros(self.gate_proj.weight.shape, device="cpu"))
            reference = weakref.ref(weight)
            self.gate_proj.weight = weight
            del weight
            freed.append(reference() is None)

    AutoModelForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Eager}))

    assert freed == [True, True]


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads and resets the peak in /proc")
def test_the_peak_is_that_of_the_plain_load_and_at_most_one_tensor_more(tmp_path: Path) -> None:
    """Two layers of three matrices of 16 MiB: 96 MiB that a real construction would hold beside the weights."""
    folder = save_tiny(tiny_llama_config(intermediate_size=65536), tmp_path)
    code = f"""
        import ctypes, gc, torch
        from pathlib import Path
        from torch import nn
        from transformers import LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaMLP
        from patcher import Patcher

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

        # What is freed goes back to the system at once, not to a heap whose holes would count: M_MMAP_THRESHOLD.
        ctypes.CDLL(None).mallopt(-3, 1_000_000)

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
    plain, same, eager = map(float, fresh.run(textwrap.dedent(code)).stdout.split())
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
    stock = shared.stock(llama, LlamaForCausalLM)
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


class HalvedRotaryEmbedding(LlamaRotaryEmbedding):
    """Its name and its attributes are such that transformers initialises its buffers once more."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.inv_freq = self.inv_freq / 2


@pytest.mark.parametrize("way", ["load", "load in bf16", "from_config", "applied"])
def test_what_transformers_would_compute_again_is_left_as_the_replacement_computed_it(way: str, llama: Path) -> None:
    patcher = Patcher({"LlamaRotaryEmbedding": HalvedRotaryEmbedding})
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


def test_a_saved_buffer_comes_from_the_checkpoint(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Counting(OwnMLP):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("steps", torch.tensor([3.0]))

    patcher = Patcher({"LlamaMLP": Counting}, new_weights=r"\.steps$")
    logger = logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model = LlamaForCausalLM.from_pretrained(llama, patcher=patcher)
    finally:
        logger.removeHandler(caplog.handler)
    assert "LOAD REPORT" not in caplog.text  # declared as new, and with the value of `__init__`
    assert model.model.layers[0].mlp.steps.item() == 3
    state = dict(model.state_dict())
    state["model.layers.1.mlp.steps"] = torch.tensor([8.0])
    del state["model.layers.0.mlp.steps"]
    again = LlamaForCausalLM.from_pretrained(
        None, config=model.config, state_dict=state, patcher=Patcher({"LlamaMLP": Counting})
    )
    assert [layer.mlp.steps.item() for layer in again.model.layers] == [3, 8]


class Recording(TorchFunctionMode):
    """A mode of somebody else's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_modes_of_the_caller_are_in_place_after_a_load(llama: Path) -> None:
    with torch.device("cpu"), Recording() as mode, torch.device("cpu"):
        before = _get_current_function_mode_stack()
        model = AutoModelForCausalLM.from_pretrained(llama, patcher=Patcher({"LlamaMLP": Computing}), device_map="cpu")
        assert _get_current_function_mode_stack() == before
        assert mode in before
    assert _get_current_function_mode_stack() == []
    assert_computed(model.model.layers[0].mlp)
