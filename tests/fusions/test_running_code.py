"""A fused class is made of the code that runs, of nothing else, and no longer than that is what runs (rows 26, 27)."""

from __future__ import annotations

import copy
import functools
import gc
import linecache
import pickle
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, SwiftFormerConfig, SwiftFormerForImageClassification
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from patcher import InvalidPatcherError, PatchConstructionError, Patcher, UnmatchedPatchError, report
from patcher.fusions import GateUp, Siblings
from patcher.fusions.fused_module import fused_class, fused_class_of
from patcher.fusions.methods import NotUnderstoodError, method_to_rewrite, read_function
from patcher.fusions.qkv import QKV
from patcher.fusions.rewrite import compile_subclass
from tests.support.fusing import fuse
from tests.support.tiny import build_tiny, tiny_inputs, tiny_llama_config, tiny_mixtral_config
from tests.support.written_modules import written_module

PARTS = "self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)"
MODEL = f"""
import torch
from torch import nn


def helper(t):
    return t * 2


class Child(nn.Module):
    def forward(self, t):
        return t + 1


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        {PARTS}
        self.child = Child()

    def forward(self, x):
        q = self.q_proj(x)
        y = helper(x) + self.child(x) + self.own(x)
        k, v = self.k_proj(x), self.v_proj(x)
        return torch.tanh(q + k + v + y)

    def own(self, t):
        return t
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of Python that stays imported."""
    module = written_module(MODEL, tmp_path / "odd_modeling.py")
    monkeypatch.setitem(sys.modules, "odd_modeling", module)
    return module


def fused(module: nn.Module) -> Any:
    return fuse(QKV(), copy.deepcopy(module), fused_class_of(QKV(), module))


def writes(*given: Any) -> Any:
    return given[-1].mul_(0.5)


# --- another tool rebinds what is called -----------------------------------------------------------------------------


def gate_up_again(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)) * 0.5
    return result


def gate_up_writes(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate = self.act_fn(self.gate_proj(x))
    x.mul_(0.5)
    result: torch.Tensor = self.down_proj(gate * self.up_proj(x))
    return result


def attention_again(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return self.o_proj(self.q_proj(hidden_states) + self.k_proj(hidden_states) * self.v_proj(hidden_states)), None


@pytest.mark.parametrize(
    ("cls", "forward", "fusion", "path"),
    [
        (LlamaMLP, gate_up_again, "gate_up", "mlp"),
        (LlamaAttention, attention_again, "qkv", "self_attn"),
    ],
)
def test_a_forward_that_is_rebound_runs_in_the_next_load_and_no_longer_than_it_is(
    cls: Any, forward: FunctionType, fusion: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_llama_config(num_hidden_layers=1, num_key_value_heads=4)
    stock: Any = build_tiny(config)
    inputs, patcher = tiny_inputs(config), Patcher(fusions=fusion)
    before, old = stock(**inputs).logits, patcher.apply(stock)

    with monkeypatch.context() as rebound:
        rebound.setattr(cls, "forward", forward)
        new, expected = patcher.apply(stock), stock(**inputs).logits
        assert not torch.allclose(expected, before, atol=1e-3)
        assert len(report(new).fused) == 1
        torch.testing.assert_close(new(**inputs).logits, expected, atol=1e-5, rtol=0)
    again = patcher.apply(stock)

    torch.testing.assert_close(again(**inputs).logits, before, atol=1e-5, rtol=0)
    layers: list[Any] = [type(model.model.layers[0].get_submodule(path)) for model in (old, new, again)]
    assert layers[0] is not layers[1] is not layers[2]
    assert [list(layer._rewritten) for layer in layers] == [["forward"]] * 3
    torch.testing.assert_close(new(**inputs).logits, expected, atol=1e-5, rtol=0)  # as it was when it was fused


def test_a_forward_that_writes_now_is_refused_and_what_was_fused_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Any = build_tiny(tiny_llama_config(num_hidden_layers=1))
    patcher, inputs = Patcher(fusions="gate_up"), tiny_inputs(stock.config)
    model, expected = patcher.apply(stock), stock(**inputs).logits
    monkeypatch.setattr(LlamaMLP, "forward", gate_up_writes)

    with pytest.raises(
        UnmatchedPatchError, match=r"between the projections: 'x\.mul_\(0\.5\)' \(it may write in place"
    ):
        patcher.apply(stock)
    assert not patcher.resolve(type(stock), stock.config).fused
    torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=0)


def test_a_code_object_that_is_exchanged_is_seen(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = odd.Odd()
    assert QKV().is_fusable(module)

    def forward(self: Any, x: torch.Tensor) -> Any:
        q = self.q_proj(x)
        x.add_(1)
        return q + self.k_proj(x) + self.v_proj(x)

    monkeypatch.setattr(odd.Odd.forward, "__code__", forward.__code__)

    assert "'x.add_(1)' (it may write in place)" in QKV().refusal(module)


REBINDS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "'helper(x)' (": lambda odd: (odd, "helper"),
    "'self.child(x)' (": lambda odd: (odd.Child, "forward"),
    "'self.own(x)' (": lambda odd: (odd.Odd, "own"),
}


@pytest.mark.parametrize("reason", REBINDS)
def test_what_a_forward_calls_is_looked_at_again(reason: str, odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = odd.Odd()
    assert QKV().is_fusable(module)

    with monkeypatch.context() as rebound:
        rebound.setattr(*REBINDS[reason](odd), writes)
        assert f"between the projections: {reason}" in QKV().refusal(module)
    assert QKV().is_fusable(module)


def test_a_hook_or_another_child_is_looked_at_again(odd: Any) -> None:
    module = odd.Odd()
    assert QKV().is_fusable(module)

    handle = module.child.register_forward_hook(print)
    assert "Child has hooks" in QKV().refusal(module)
    handle.remove()
    assert QKV().is_fusable(module)
    module.child = nn.ReLU(inplace=True)
    assert "ReLU has inplace=True" in QKV().refusal(module)
    module.child.inplace = False
    assert QKV().is_fusable(module)


def test_a_wrapper_around_a_forward_is_refused(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    forward = odd.Odd.forward

    @functools.wraps(forward)
    def wrapped(self: Any, *given: Any) -> Any:
        return forward(self, *given) * 2

    monkeypatch.setattr(odd.Odd, "forward", wrapped)

    assert "forward is wrapped by something that its source doesn't show" in QKV().refusal(odd.Odd())


def test_two_functions_of_one_name_are_refused(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd.Odd, "other", odd.Odd.forward, raising=False)

    assert QKV().refusal(odd.Odd()) == "two of its methods are functions of one name"


# --- the file is another one now -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (
            "self.v_proj(x)\n",
            "self.v_proj(x + 1)\n",
            "the source of forward isn't what runs: odd_modeling.py was changed",
        ),
        (
            "q + k + v + y)",
            "q - k + v + y)",
            "the source of forward isn't what runs: odd_modeling.py was changed after",
        ),
        ("tanh", "sin", "the source of forward isn't what runs"),
        ("return t * 2", "return t * 3", "the source of helper isn't what runs: odd_modeling.py was changed"),
        ("return t + 1", "return t.add_(1)", "the source of forward isn't what runs: odd_modeling.py was changed"),
        ("import torch\n", "import torch\n\nONE = 1\nTWO = 2\n", "can't be read|isn't what runs"),
    ],
)
def test_a_file_that_was_edited_after_its_import_is_refused(
    before: str, after: str, reason: str, tmp_path: Path
) -> None:
    path, text = tmp_path / "odd_modeling.py", "#\n" * len(before + after) + MODEL  # at lines of its own
    module = written_module(text, path).Odd()
    assert MODEL.count(before) == 1
    path.write_text(text.replace(before, after))

    assert re.search(reason, QKV().refusal(module)), QKV().refusal(module)


def test_a_class_that_has_moved_to_the_place_of_another_is_refused(tmp_path: Path) -> None:
    """Its code is in the file still, and its place has code of the same name."""
    head, classes = MODEL.split("class Odd")
    other = "class Odd" + classes.replace("q + k", "q - k").replace("Odd", "Two")
    path = tmp_path / "odd_modeling.py"
    module = written_module(f"{head}class Odd{classes}\n\n{other}", path).Odd()
    path.write_text(f"{head}{other}\n\nclass Odd{classes}")

    assert "isn't what runs" in QKV().refusal(module)


def test_a_file_with_the_same_code_in_its_place_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "odd_modeling.py"
    module = written_module(MODEL, path).Odd()
    path.write_text(MODEL.replace("return torch.tanh", "return  torch.tanh"))

    assert QKV().is_fusable(module)


def test_defaults_are_those_in_force(tmp_path: Path) -> None:
    def fused_with(default: str, written: str = "") -> Any:
        # A file of its own: bytecode goes by the second in which a file was written.
        path, text = tmp_path / f"odd_{default[0]}.py", MODEL.replace("(self, x)", "(self, x, *, n={0})")
        text = text.replace("+ y)", "+ y) * n")
        module = written_module(text.replace("{0}", default), path).Odd()
        path.write_text(text.replace("{0}", written or default))
        made, x = fused(module), torch.randn(2, 8)
        torch.testing.assert_close(made(x), module(x), atol=1e-5, rtol=0)
        return made

    assert type(fused_with("1.0")).forward.__kwdefaults__ == {"n": 1.0}
    assert type(fused_with("2.0")).forward.__kwdefaults__ == {"n": 2.0}  # of another file, with the same code
    assert type(fused_with("3.0", "4.0")).forward.__kwdefaults__ == {"n": 3.0}  # edited after its import


# --- how long classes live -------------------------------------------------------------------------------------------


def test_a_fused_class_is_freed_with_its_original(tmp_path: Path) -> None:
    def used() -> list[weakref.ref[Any]]:
        module = written_module(MODEL, tmp_path / "odd_modeling.py").Odd()
        made = fused(module)
        made(torch.randn(2, 8)).sum().backward()
        pickle.dumps(type(made)._made_by.fusion)
        return [weakref.ref(type(module)), weakref.ref(type(made))]

    classes = used()
    gc.collect()
    (tmp_path / "other").mkdir()  # the module of a class that is gone goes when the next one is made
    fused(written_module(MODEL, tmp_path / "other" / "odd_modeling.py").Odd())
    gc.collect()

    assert [each() for each in classes] == [None, None]


def test_a_class_of_a_function_is_freed() -> None:
    def made() -> weakref.ref[Any]:
        class Own(LlamaMLP):
            pass

        module = Own(tiny_llama_config())
        family = GateUp()
        fuse(family, module, fused_class_of(family, module))
        assert module(torch.randn(1, 2, 64)).shape == (1, 2, 64)
        return weakref.ref(Own)

    found = made()
    gc.collect()

    assert found() is None


# --- where a pickle is read ------------------------------------------------------------------------------------------


def test_a_pickle_is_read_where_the_code_is_the_same_only(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fused(odd.Odd())
    data, x = pickle.dumps(module), torch.randn(2, 8)
    torch.testing.assert_close(pickle.loads(data)(x), module(x))

    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.q_proj(x) - self.k_proj(x) - self.v_proj(x)

    monkeypatch.setattr(odd.Odd, "forward", forward)

    with pytest.raises(PatchConstructionError, match=r"Odd\.forward has other code here than where this was fused"):
        pickle.loads(data)


def test_a_pickle_is_not_read_where_a_tool_has_wrapped_the_code(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data, forward = pickle.dumps(fused(odd.Odd())), odd.Odd.forward
    monkeypatch.setattr(odd.Odd, "forward", functools.wraps(forward)(lambda self, x: forward(self, x) * 2))

    with pytest.raises(NotUnderstoodError, match="forward is wrapped by something that its source doesn't show"):
        pickle.loads(data)


def test_a_pickle_of_experts_is_not_read_where_a_tool_has_wrapped_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = Patcher(fusions="sequential_experts").apply(build_tiny(tiny_mixtral_config()))
    data, forward = pickle.dumps(patched), MixtralExperts.forward
    monkeypatch.setattr(MixtralExperts, "forward", functools.wraps(forward)(lambda *args: forward(*args) * 2))

    with pytest.raises(InvalidPatcherError, match="sequential_experts can't fuse MixtralExperts: what the"):
        pickle.loads(data)


# --- methods that can't be read or written ---------------------------------------------------------------------------

METHODS = """
import functools
import torch
from torch import nn


def around(function):
    @functools.wraps(function)
    def wrapped(*args):
        return function(*args)
    return wrapped


def make(number):
    class Closed(nn.Module):
        def forward(self, x):
            return self.q_proj(x) + number
    return Closed


class Wrapped(nn.Module):
    def forward(self, x):
        return self.q_proj(x)


Wrapped.forward = around(Wrapped.forward)
Closed = make(1)


class Generating(nn.Module):
    def forward(self, x):
        yield self.q_proj(x)


class Short(nn.Module):
    def forward(self, x, y=None): return self.q_proj(x)


class Options:
    def __init__(self, number):
        self.number, self.owner = number, self


def by_options(options):
    def decorate(function):
        @functools.wraps(function)
        def scaled(*args):
            return function(*args) * options.number
        return scaled
    return decorate


def times(number):
    def decorate(function):
        @functools.wraps(function)
        def scaled(*args):
            return function(*args) * number
        return scaled
    return decorate


number = 2


class Decorated(nn.Module):
    @times(number)
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return self.q_proj(x)


class ByOptions(nn.Module):
    @by_options(Options(number))
    def forward(self, x):
        return self.q_proj(x)


class DecoratedAndWrapped(nn.Module):
    @times(2)
    def forward(self, x):
        return self.q_proj(x)


class Later(nn.Module):
    @times(number * 1.0)
    def forward(self, x):
        return self.q_proj(x)


def make_decorated(number):
    class Made(nn.Module):
        @times(number)
        def forward(self, x):
            return self.q_proj(x)
    return Made


class ByItsClass(nn.Module):
    one = 1

    def forward(self, x, y=one):
        return self.q_proj(x)


DecoratedAndWrapped.forward = around(DecoratedAndWrapped.forward)
Made = make_decorated(3)
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Wrapped", "forward is wrapped by something that its source doesn't show"),
        ("Closed", "forward uses number of the function around it"),
        ("Generating", "forward is a generator"),
        ("DecoratedAndWrapped", "forward is wrapped by something that its source doesn't show"),
        ("Made", "forward is wrapped by something that its source doesn't show"),
        ("ByItsClass", r"the definition of forward can't be run outside of its class \(NameError: name 'one'"),
    ],
)
def test_a_method_that_is_not_what_its_source_shows_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    cls = getattr(written_module(METHODS, tmp_path / "odd_modeling.py"), name)

    with pytest.raises(NotUnderstoodError, match=reason):
        method_to_rewrite(cls, "forward")


def test_decorators_are_run_again_where_they_do_the_same(tmp_path: Path) -> None:
    module = written_module(METHODS, tmp_path / "odd_modeling.py")
    assert method_to_rewrite(module.Decorated, "forward").attribute is module.Decorated.forward
    method_to_rewrite(module.Later, "forward")
    method_to_rewrite(module.ByOptions, "forward")

    module.number = 5

    for cls in (module.Decorated, module.Later, module.ByOptions):
        with pytest.raises(NotUnderstoodError, match="forward is wrapped by something that its source doesn't show"):
            method_to_rewrite(cls, "forward")


def test_an_error_of_the_moment_is_not_kept_as_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = "runs = []\n\ndef once(function):\n    runs.append(1)\n    if len(runs) == 2:\n"
    once += "        raise ValueError('not now')\n    return function\n\n"
    text = MODEL.replace("class Odd", f"{once}class Odd")
    first, _, last = text.rpartition("    def forward(self, x):")
    written = written_module(f"{first}    @once\n    def forward(self, x):{last}", tmp_path / "odd_modeling.py")
    module = written.Odd()
    monkeypatch.setitem(sys.modules, written.Odd.__module__, written)  # of other classes nothing is kept

    assert "can't be run outside of its class (ValueError: not now)" in QKV().refusal(module)
    assert QKV().is_fusable(module)


def test_a_source_that_could_not_be_read_is_read_again(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def findsource(code: Any) -> Any:
        raise OSError("not now")

    with monkeypatch.context() as patch:
        patch.setattr("inspect.findsource", findsource)
        with pytest.raises(NotUnderstoodError, match=r"can't be read \(not now\)"):
            read_function(odd.Odd.forward)

    assert read_function(odd.Odd.forward).name == "forward"


def test_a_function_without_source_is_refused() -> None:
    scope: dict[str, Any] = {"nn": nn}
    exec("class Odd(nn.Module):\n    def forward(self, x):\n        return self.q_proj(x)\n", scope)
    forward: Any = lambda self, x: x  # noqa: E731

    with pytest.raises(NotUnderstoodError, match="the source of forward can't be read"):
        read_function(scope["Odd"].forward)
    with pytest.raises(NotUnderstoodError, match=r"the source of <lambda> can't be read .*as a def"):
        read_function(forward)
    odd = scope["Odd"]()
    odd.q_proj, odd.k_proj, odd.v_proj = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    assert "the source of forward can't be read" in QKV().refusal(odd)


def test_methods_of_several_files_are_not_put_into_one_class(tmp_path: Path) -> None:
    mine = written_module(METHODS, tmp_path / "odd_modeling.py").Short
    (tmp_path / "other").mkdir()
    other = written_module(METHODS, tmp_path / "other" / "odd_modeling.py").Short
    methods = [(method, method.source) for method in (method_to_rewrite(cls, "forward") for cls in (mine, other))]

    with pytest.raises(NotUnderstoodError, match="its methods come from different files"):
        compile_subclass("Odd", "Odd.", (mine,), methods)


def test_a_method_whose_decorator_looks_at_its_file_is_refused() -> None:
    config = SwiftFormerConfig(image_size=32, depths=[1, 1], embed_dims=[8, 16], mlp_ratio=2, downsamples=[True, True])
    model = SwiftFormerForImageClassification(config)
    assert isinstance(model.dist_head, nn.Linear)  # beside `head`, in a forward that auto_docstring decorates

    with pytest.raises(UnmatchedPatchError, match=r"forward can't be defined in another file \(IndexError: "):
        Patcher(fusions=[Siblings(modules="(root)")]).apply(model)

    assert not [name for name in (*sys.modules, *linecache.cache) if "FusedSwiftFormerForImage" in name]


@pytest.mark.parametrize("head", ["", "\n        y = 1; "])
def test_statements_that_have_no_line_of_their_own_are_refused(head: str, tmp_path: Path) -> None:
    text = MODEL[: MODEL.index("    def forward(self, x):\n        q")]
    calls = "return self.q_proj(x) + self.k_proj(x) + self.v_proj(x)"
    module = written_module(f"{text}    def forward(self, x): {head}{calls}\n", tmp_path / "odd_modeling.py").Odd()

    if head:  # asked at run time
        assert QKV().is_fusable(module)
    else:
        assert "two statements share a line (odd_modeling.py:" in QKV().refusal(module)


def test_a_class_is_the_same_as_long_as_it_is_current(odd: Any) -> None:
    module = odd.Odd()
    recipe = QKV().recipe(module)

    assert fused_class(QKV(), odd.Odd, recipe) is fused_class(QKV(), odd.Odd, recipe)
    assert "apply_rotary_pos_emb" in vars(modeling_llama)


def test_a_partialmethod_that_is_gone_again_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config, stock = tiny_llama_config(), LlamaAttention.forward
    with monkeypatch.context() as patch:
        patch.setattr(LlamaAttention, "forward", functools.partialmethod(stock))
        with pytest.raises(UnmatchedPatchError):
            LlamaForCausalLM._from_config(config, patcher=Patcher(fusions="qkv"))
    model = LlamaForCausalLM._from_config(config, patcher=Patcher(fusions="qkv"))
    assert hasattr(model.model.layers[0].self_attn, "qkv_proj")
