"""Projects with generated files: configs in files, the command line, and files whose originals have changed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from patcher.codegen import CheckResult, check, write
from patcher.codegen.files.projects import load_configs
from patcher.errors import CodegenError
from tests.codegen.checked import CONFIG, SOURCE
from tests.project.advice import Place, Steps, advice
from tests.project.advice.generated_files import edited, importable
from tests.project.advice.models import command, in_folder


@advice(
    "{}: there is no such config. Give the path of a file, or the name of a module.",
    "{}: there is no module {}. Give the name of a config's module, or the path of its file, which ends in .py.",
)
def a_config_that_is_not_there(at: Place) -> Steps:
    (at.tmp / "checked_patch_gen_config.py").write_text(CONFIG)
    with in_folder(at.tmp):
        for wrong in ("gone.py", "gone", "gone.config"):
            yield lambda wrong=wrong: load_configs(wrong)  # type: ignore[misc]
        for right in ("checked_patch_gen_config.py", "checked_patch_gen_config"):
            with importable(at.tmp):
                assert [config.target_file for config in load_configs(right)] == ["patched_modeling_checked.py"]


@advice(
    "{}: this module defines no PatchConfig. Write `config = PatchConfig(...)`.",
    "Define one, `config = PatchConfig(...)`.",
)
def a_module_without_a_config(at: Place) -> Steps:
    path = at.tmp / "empty_patch_gen_config.py"
    path.write_text("from patcher.codegen import PatchConfig\n")
    for name in (None, "config"):
        with importable(at.tmp):
            said = yield lambda name=name: load_configs(str(path), name)  # type: ignore[misc]
        code = said.partition("`")[2].partition("`")[0].replace("...", "'json.decoder', 'out.py'")
        right = at.tmp / "defined_patch_gen_config.py"
        right.write_text(path.read_text() + code)
        with importable(at.tmp):
            assert [config.target_file for config in load_configs(str(right), name)] == ["out.py"]


def project(at: Place, search_root: str) -> None:
    (at.tmp / "pyproject.toml").write_text(f'[tool.patcher.codegen]\nsearch_root = "{search_root}"\n')
    for folder in ("configs", "lib"):
        (at.tmp / folder).mkdir(exist_ok=True)
    (at.tmp / "configs" / "checked_patch_gen_config.py").write_text(CONFIG)
    (at.tmp / "lib" / "modeling_checked.py").write_text(SOURCE)


@advice(
    "Name a config, or use --list, --all or --check.",
    "no *_patch_gen_config.py here; set search_root in [tool.patcher.codegen] of pyproject.toml",
)
def a_command_that_says_too_little(at: Place) -> Steps:
    def listed() -> None:
        raise CodegenError(command("codegen", "--list"))

    project(at, "lib")
    with in_folder(at.tmp), importable(at.tmp / "lib"):
        yield listed
        project(at, "configs")
        assert "modeling_checked -> patched_modeling_checked.py" in command("codegen", "--list")
        said = yield lambda: command("codegen")
        for words in (["configs/checked_patch_gen_config.py"], *re.findall("--[a-z]+", said.partition("use")[2])):
            asked = [words] if isinstance(words, str) else words
            assert "checked" in command("codegen", *asked)
    generated = at.tmp / "configs" / "generated" / "patched_modeling_checked.py"
    assert "return x + 1" in generated.read_text()


@advice("{}: this config is the module {}, and {} is imported by that name. Rename one.")
def two_packages_of_one_name(at: Place) -> Steps:
    configs = [at.tmp / folder / "package_named_twice" / "a_patch_gen_config.py" for folder in ("one", "other")]
    for config in configs:
        config.parent.mkdir(parents=True)
        (config.parent / "__init__.py").touch()
        config.write_text(CONFIG)
    load_configs(str(configs[0]))
    yield lambda: load_configs(str(configs[1]))
    renamed = configs[1].parent.rename(at.tmp / "other" / "package_of_another_name")
    assert len(load_configs(str(renamed / configs[1].name))) == 1


@advice(
    "{} {}. Leave {} out.",
    "{} is the file of {} already. Give one another target_file.",
)
def options_that_cannot_act_together(at: Place) -> Steps:
    project(at, "configs")
    config = "configs/checked_patch_gen_config.py"
    with in_folder(at.tmp), importable(at.tmp / "lib"):
        command("codegen", "--all")
        for words, out in (
            (("--list", "-v"), "-v"),
            (("--check", "--dry-run"), "--dry-run"),
            ((config, "--all"), config),
            ((config, "--fix"), "--fix"),
        ):
            said = yield lambda words=words: command("codegen", *words)  # type: ignore[misc]
            assert f"Leave {'CONFIG' if out == config else out} out" in said
            assert "checked" in command("codegen", *(word for word in words if word != out))
        assert "checked" in command("codegen", config, "--fix", "--check")
        other = at.tmp / "configs" / "other_patch_gen_config.py"
        other.write_text(CONFIG)
        yield lambda: command("codegen", "--all", "-o", "out")
        other.unlink()
        right = at.tmp / "configs" / "right_patch_gen_config.py"
        right.write_text(CONFIG.replace("patched_modeling_checked.py", "right.py"))
        assert command("codegen", "--all", "-o", "out").count("wrote") == 2


# --- files whose originals changed --------------------------------------------------------------------------------


@contextlib.contextmanager
def drifted(at: Place) -> Iterator[Callable[..., CheckResult]]:
    """A project with a file of a module that has changed since. Gives what checks it, and raises what is wrong."""
    (at.tmp / "pyproject.toml").touch()
    module, config = at.tmp / "modeling_drifted.py", at.tmp / "drifted_patch_gen_config.py"
    module.write_text("def f(x):\n    a = 1\n    b = 2\n    c = 3\n    d = 4\n    return x\n")
    patch = "def f(x):\\n    a = 1\\n    b = 2\\n    c = 3\\n    d = 4\\n    return x + 1"
    config.write_text(
        "from patcher.codegen import PatchConfig\n\nconfig = PatchConfig('modeling_drifted', 'out.py')\n"
        f"config.replace_function('f', '{patch}')\n"
    )

    def checked(**options: bool) -> CheckResult:
        (result,) = check([str(config)], **options)
        if not result.ok:
            raise CodegenError(str(result))
        return result

    with importable(at.tmp), contextlib.chdir(at.tmp):
        write(load_configs(str(config))[0], diff=True)
        module.write_text(module.read_text().replace("a = 1", "a = 7"))
        yield checked


@advice("Change the patch if it must follow, then take the new original over by generating the file again: {}")
def changed_original(at: Place) -> Steps:
    with drifted(at) as checked:
        said = yield lambda: checked(fix=True)
        config = at.tmp / "drifted_patch_gen_config.py"
        config.write_text(edited(config.read_text(), ("a = 1", "a = 7")))
        (words,) = re.findall(r"generating the file again: patcher codegen (.*)", said)
        command("codegen", *words.split())
        assert "a = 7" in (at.tmp / "generated" / "out.py").read_text()
        assert checked().ok
