"""The rooms of the package and what may know what, as `patcher/` is: read from its source, without importing it."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from tests.support.architecture import (
    circles,
    frame_users,
    not_public,
    private_attributes,
    private_imports,
    room,
    upward,
)
from tests.support.imports import Module, modules_of

ROOT = Path(__file__).parents[2]

#: Every room imports only from those above it, and from beside itself without a circle.
ORDER = (
    "errors",
    "expressions",
    "patterns",
    "source",
    "compat",
    "display",
    "checkpoints",
    "layouts",
    "fusions",
    "spec",
    "construction",
    "functions",
    "resolution",
    "loading",
    "integrations",
    "codegen",
    "inspection",
    "verification",
    "publishing",
    "training",
    "monkey_patching",
    "",  # `patcher` itself: the public names, resolved when they are first used
    "presets",
    "cli",
    "__main__",
)
#: The rooms of `codegen`, in the same way.
CODEGEN = ("spec", "generation", "bridges", "files", "config")
#: Rooms whose place is known and that nobody has needed yet.
TO_COME: set[str] = set()
#: The functions that may import what is below them: methods of the value that act by what is built on it, and
#: what a pickle runs where it is read, which installs the hook.
LATE = {
    ("patcher.layouts.carried", "_unpickled"),
    ("patcher.loading.record", "_unpickled"),
    ("patcher", "__getattr__"),
    ("patcher.spec.patcher", "Patcher.applied"),
    ("patcher.spec.patcher", "Patcher.apply"),
    ("patcher.spec.patcher", "Patcher.resolve"),
}
#: What is documented of transformers besides its top-level names. All else is known to `compat/` only.
DOCUMENTED = {
    "transformers.core_model_loading": "weight conversions, which users write (docs: main_classes/weight_conversion)",
    "transformers.utils.logging": "docs: main_classes/logging",
}
#: Underscore names of others than transformers that have no public equivalent.
OTHERS_OWN = {
    "_modules": "torch: children, `None` included",
    "_parameters": "torch: parameters, `None` included",
    "_buffers": "torch: buffers, `None` included",
    "_non_persistent_buffers_set": "torch: which buffers are not saved",
    "_forward_hooks": "torch: whether a module has hooks",
    "_forward_pre_hooks": "torch: the same",
    "_backward_hooks": "torch: the same",
    "_backward_pre_hooks": "torch: the same",
    "_python_dispatch": "torch: the module of TorchDispatchMode",
    "_getframe": "sys: see FRAMES",
    "_asdict": "named tuples",
    "_replace": "named tuples",
    "_apply_gate": "transformers: declared by classes of experts, a user's own too",
    "_hf_hook": "accelerate: what moves the inputs of a module to the device of its weights",
    "_initializing": "importlib: whether a module is still being executed",
    "_at_fork_reinit": "threading: as the standard library's own modules do",
}
#: The functions that look at frames, and why each must.
FRAMES = {
    "patcher.construction.construction:calling_module": "who constructs: modeling code, or somebody else",
    "patcher.errors:calling_frame": "the first line not ours: where a warning is said",
}
#: What users import from: presets, examples and notebooks get by with it.
PUBLIC = (
    "patcher",
    "patcher.codegen",
    "patcher.errors",
    "patcher.fusions",
    "patcher.monkey_patching",
    "patcher.presets",
)


def none_of(lines: list[str]) -> None:
    assert not lines, "\n" + "\n".join(lines)


@cache
def house() -> dict[str, Module]:
    return modules_of(ROOT / "patcher")


def test_there_are_the_rooms_that_are_drawn() -> None:
    assert {room(name) for name in house()} == set(ORDER) - TO_COME


def test_no_circle() -> None:
    none_of(circles(house(), LATE))


def test_imports_run_one_way() -> None:
    none_of(upward(house(), ORDER, LATE))


def test_imports_inside_of_codegen_run_one_way() -> None:
    # As a package of its own: `patcher.codegen.spec` is the room `spec` of it.
    inside = {name.removeprefix("patcher."): module for name, module in house().items() if ".codegen." in name}
    assert {name.split(".")[1] for name in inside} == set(CODEGEN)
    rank = {name: number for number, name in enumerate(CODEGEN)}
    none_of(
        [
            f"{name}:{each.line} imports {each.module}"
            for name, module in inside.items()
            for each in module.imports
            if each.module.startswith("patcher.codegen.")
            and rank[name.split(".")[1]] < rank[each.module.split(".")[2]]
        ]
    )


def test_the_late_imports_that_are_exempt_exist() -> None:
    used = {(module.name, each.function) for module in house().values() for each in module.imports}
    assert LATE - {("patcher", "__getattr__")} <= used


def test_the_package_itself_imports_only_its_errors_and_what_waits_for_transformers() -> None:
    imported = {each.module for each in house()["patcher"].imports if not each.function and "patcher" in each.module}
    assert imported <= {"patcher", "patcher.errors", "patcher.source.importing"}


def test_loading_and_codegen_do_not_know_each_others_inside() -> None:
    inside = [
        f"{module.name}:{each.line} imports {each.module}"
        for module in house().values()
        for each in module.imports
        if room(module.name) == "codegen" and each.module.startswith("patcher.loading.")
    ]
    none_of(inside)


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def outside_of_compat() -> dict[str, Module]:
    return {name: module for name, module in house().items() if room(name) != "compat"}


#: Attributes of its library that an integration knows.
INTEGRATIONS_OWN = {
    "_prepare_adapter_config": "peft: the targets of an adapter where its config names none",
    "_check_target_module_exists": "peft: whether an adapter takes a layer, by each kind's own rule",
}


def test_private_names_of_transformers_are_known_in_one_room_only() -> None:
    none_of(private_imports(outside_of_compat(), "transformers", DOCUMENTED, is_module))


def test_private_attributes_of_others_are_known_in_one_room_only() -> None:
    none_of(private_attributes(outside_of_compat(), OTHERS_OWN | INTEGRATIONS_OWN))


def test_frames_are_looked_at_in_two_functions() -> None:
    none_of(sorted(frame_users(house()) ^ set(FRAMES)))
    assert len(FRAMES) == 2


def public() -> dict[str, list[str]]:
    submodules = [name.rpartition(".")[2] for name in PUBLIC]
    return {name: [*importlib.import_module(name).__all__, *submodules] for name in PUBLIC}


@pytest.mark.parametrize("folder", ["examples", "patcher/presets"])
def test_what_shows_the_use_gets_by_with_public_names(folder: str) -> None:
    if folder == "patcher/presets":
        modules = {name: module for name, module in house().items() if room(name) == "presets"}
    else:
        modules = modules_of(ROOT / folder)

    assert modules
    none_of([line for module in modules.values() for line in not_public(module, "patcher", public())])
