"""The description of a patched modeling file: which definitions of a module are patched, how, and why.

Whatever can be validated without the modeling file is validated here, at the line of the config; the rest when the
file is generated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from patcher.codegen.spec import Block, Helper, Import, Names, Patch, PatchKind, PatchSpec, check_description
from patcher.errors import CodegenError
from patcher.source.reading import Location, Source, caller, read_source

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from patcher.spec.patcher import Patcher

T = TypeVar("T")
#: The names of a replacement that the file writes differently.
NameMap = Mapping[str, str] | None

# Conversions from and to a Patcher are imported lazily: configs and generation need neither torch nor transformers.


class PatchConfig(PatchSpec):
    r"""What to change in one modeling module, and the file to write it to.

    >>> config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
    >>> @config.replace_function("rotate_half", description="one kernel less")
    ... def rotate_half(x):
    ...     return x.roll(x.shape[-1] // 2, -1)
    >>> config.patches[0].source.name
    'rotate_half'

    Patches are added by decorators, by calls with a class or a function, or as text.

    Args:
        source_module: the dotted name of the patched module. It is read, never imported.
        target_file: the name of the generated file.
        description: what the generated file is for, for its header.

    Raises:
        CodegenError: if a name can't be that of a module or a file.
    """

    # -- patches of definitions ---------------------------------------------------------------------------------

    def replace_class(
        self, target: str, replacement: Any = None, description: str = "", name_map: NameMap = None
    ) -> Callable[[T], T]:
        """Replace the class `target`, including its decorators, by a class under its name.

        If the replacement inherits from the class it replaces, that one is kept in the file as `OriginalTarget`.
        """
        return self._register(PatchKind.REPLACE_CLASS, target, replacement, description, name_map)

    def replace_function(
        self, target: str, replacement: Any = None, description: str = "", name_map: NameMap = None
    ) -> Callable[[T], T]:
        """Replace the function `target` of the module by a function under its name.

        If the replacement calls the function it replaces, that one is kept in the file as `original_target`.
        """
        return self._register(PatchKind.REPLACE_FUNCTION, target, replacement, description, name_map)

    def override_method(
        self,
        target: str,
        replacement: Any = None,
        description: str = "",
        name_map: NameMap = None,
        *,
        keep_decorators: bool = True,
        new: bool | None = None,
    ) -> Callable[[T], T]:
        """Replace or add the method `target`, `"Class.method"`; the rest of the class is unchanged.

        Args:
            target: the method.
            replacement: the function, or its text; without it, the call is a decorator.
            description: the reason.
            name_map: names to write differently, `{"OldMLP": "NewMLP"}`; `{"MLP": "MLP"}` is the file's own `MLP`.
            keep_decorators: keep the original's decorators in front of the replacement's own.
            new: True if the class has no such method. Needed only if it has one with a similar name.
        """
        options = {"keep_decorators": keep_decorators, "new": new}
        return self._register(PatchKind.OVERRIDE_METHOD, target, replacement, description, name_map, **options)

    def modify_init(
        self, target: str, replacement: Any = None, description: str = "", name_map: NameMap = None
    ) -> Callable[[T], T]:
        """Wrap the `__init__` of the class `target` with a function `(original_init, self, ...)`."""
        return self._register(PatchKind.MODIFY_INIT, target, replacement, description, name_map)

    # -- what patches need --------------------------------------------------------------------------------------

    def add_import(
        self,
        module: str,
        names: str | Iterable[str] | None = None,
        alias: str | None = None,
        is_from_import: bool = True,
    ) -> None:
        """Add `from module import names`, or `import module as alias`, after the imports of the file.

        Args:
            module: the dotted, absolute name.
            names: the names to import, each `"name"` or `"name as other"`; without names the module is imported.
            alias: the name to bind instead, for a module or a single name.
            is_from_import: False imports the module, and takes no names.

        Raises:
            CodegenError: for names or combinations of arguments that can't be written as an import.
        """
        words = [names] if isinstance(names, str) else names or ()
        pairs = [[part.strip() for part in word.partition(" as ")[::2]] for word in words]
        problem = ""
        if pairs and not is_from_import:
            problem = "was given names and is_from_import=False. Leave one of them out."
        elif alias and len(pairs) > 1:
            problem = f"was given one alias for {len(pairs)} names. Write names=['name as other', ...]."
        named = [word for name, bound in pairs for word in (name, bound or name)]
        for word in (*module.split("."), *named, alias or "x"):
            if not problem and not word.isidentifier():
                problem = f"can't be written: {word!r} isn't a name. "
                problem += "A generated file imports by absolute names, such as 'torch.nn.functional'."
        if problem:
            raise CodegenError(f"{caller()}: add_import({module!r}) {problem}")
        for name, bound in pairs or [["", ""]]:
            other = alias or bound
            self.imports.append(Import(module, name, other if other != name else "", caller()))

    def add_post_import_block(self, code: str, description: str = "") -> None:
        """Add statements after the imports: constants, guarded imports, registrations."""
        self.blocks.append(replace(Block.of(code), description=description))

    def drop_import_names(self, *names: str) -> None:
        """Drop names from the imports of the file, usually because something else binds them."""
        self.dropped.update(names)

    def exclude_from_output(self, *names: str) -> None:
        """Drop classes, functions and constants from the file and its `__all__`."""
        self.excluded.update(names)

    def drop_decorators(self, target: str, *names: str) -> None:
        """Drop decorators of a class or a function by name, such as one that keeps a patched method from running.

        >>> config = PatchConfig("transformers.models.mixtral.modeling_mixtral", "patched_modeling_mixtral.py")
        >>> config.drop_decorators("MixtralExperts", "use_experts_implementation")

        Decorators of a method are dropped by `override_method(..., keep_decorators=False)`, those of a replaced class
        automatically.

        Raises:
            CodegenError: if no name is passed.
        """
        where = caller()
        if not names:
            raise CodegenError(f"{where}: drop_decorators({target!r}) names no decorator. Add their names.")
        self.undecorated |= {(target, name): where for name in names}

    def add_helper(self, helper: Any = None, description: str = "", name_map: NameMap = None) -> Any:
        """Add a class or function that patches use, after the imports. A decorator, with or without a call."""
        return self._add_helper("", helper, description, name_map)

    def add_helper_after(
        self, anchor: str, helper: Any = None, description: str = "", name_map: NameMap = None
    ) -> Any:
        """Like `add_helper`, but right after the definition `anchor` of the file.

        So a helper comes behind what it needs while the file is imported, such as its base class. A replacement that
        needs a later definition is added as a helper behind it, and its original left out by `exclude_from_output`.
        """
        return self._add_helper(anchor, helper, description, name_map)

    def include(self, other: PatchSpec, without: Iterable[str] = ()) -> None:
        """Add everything of another config, except the patches, helpers and exclusions of some targets.

        Raises:
            CodegenError: if `without` has a target that the other config doesn't have, or the other config is one of
                `from_patcher` with classes that only its models have.
        """
        if other.renamed or other.bases or other.endings:
            raise CodegenError(
                f"{caller()}: include() can't take {other!r}, which from_patcher() has made: its models have names "
                "and conversions of their own. Add the patches to that config instead."
            )
        skipped = set(without)
        known = {*(patch.target for patch in other.patches), *(helper.__name__ for helper in other.helpers)}
        known |= {*other.excluded, *other.dropped, *(target for target, _ in other.undecorated)}
        for name in sorted(skipped - known):
            raise CodegenError(
                f"{caller()}: include(without=...) names {name!r}, which {other!r} does not have. "
                f"It has {', '.join(sorted(known)) or 'nothing'}."
            )
        for patch in other.patches:
            if patch.target not in skipped:
                patch.check(self.patches)
                self.patches.append(patch)
        for helper in other.helpers:
            if helper.__name__ not in skipped:
                self.helpers.add(helper)
        self.undecorated |= {pair: where for pair, where in other.undecorated.items() if pair[0] not in skipped}
        for names, added in ((self.excluded, other.excluded), (self.dropped, other.dropped)):
            names.update(Names((name, where) for name, where in added.items() if name not in skipped))
        self.imports.extend(other.imports)
        self.blocks.extend(other.blocks)

    # -- conversion from and to a Patcher -----------------------------------------------------------------------

    def to_patcher(self) -> Patcher:
        """Return a Patcher with the same effect: models of the module that it loads compute what the file's would.

        >>> config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
        >>> _ = config.override_method("LlamaMLP.extra_repr", "def extra_repr(self): return 'mine'", new=True)
        >>> list(config.to_patcher().class_mapping)
        ['LlamaMLP']

        The text of the file is executed, not written. The Patcher replaces the classes that are patched or use a
        patched name. No model has all classes of a modeling file, so a load needs to contain only one of them. A
        process that unpickles the Patcher, or one of its classes, has to call `to_patcher()` of the same config first.

        Raises:
            CodegenError: if the file can't be generated or imported, or no class of it differs.
        """
        from patcher.codegen.bridges.to_patcher import to_patcher

        return to_patcher(self)

    @classmethod
    def from_patcher(
        cls,
        patcher: Patcher,
        model_class: type[PreTrainedModel],
        *,
        config: PretrainedConfig | None = None,
        target_file: str = "",
    ) -> PatchConfig:
        """Return the config of a readable file with the effect of a Patcher on the models of a module.

        >>> from transformers import LlamaForCausalLM
        >>> from patcher import Patcher
        >>> PatchConfig.from_patcher(Patcher(fusions=["gate_up"]), LlamaForCausalLM).description
        'What a patcher does to the models of this module.'

        Replacements are copied with what they use of their own module, and fused classes are written out. The file
        imports torch, transformers and what the replacements import. Its models load and save checkpoints of the
        original.

        Args:
            patcher: the Patcher.
            model_class: a model of the module.
            config: decides what is fused; by default, a config with the defaults of its class.
            target_file: the name of the file, `patched_<module>.py` by default.

        Raises:
            CodegenError: if the patcher changes other modules, or layers of one class in different ways.
        """
        from patcher.codegen.bridges.from_patcher import describe_patcher

        module = model_class.__module__
        name = f"the patcher {patcher.name!r}" if patcher.name else "a patcher"
        target_file = target_file or f"patched_{module.rpartition('.')[2]}.py"
        described = cls(module, target_file, f"What {name} does to the models of this module.")
        describe_patcher(described, patcher, model_class, config)
        return described

    # -- registration -------------------------------------------------------------------------------------------

    def _register(
        self, kind: PatchKind, target: str, replacement: Any, description: str, name_map: NameMap, **options: Any
    ) -> Callable[[T], T]:
        where, call = caller(), f"{kind.method}({target!r})"
        check_description(description, call, where)

        def register(obj: Any) -> Any:
            source = read_source(obj, call, where)
            if source.is_class != (kind is PatchKind.REPLACE_CLASS):
                expected = "a class" if kind is PatchKind.REPLACE_CLASS else "a function"
                raise CodegenError(f"{where}: {call} needs {expected}, and {source.name!r} isn't one.")
            names = _renamed_words(name_map, source, call, where)
            patch = Patch(kind, target, obj, source, description or "", names, where, **options)
            patch.check(self.patches)
            self.patches.append(patch)
            return obj

        return register if replacement is None else register(replacement)

    def _add_helper(self, after: str, helper: Any, description: str, name_map: NameMap) -> Any:
        where, call = caller(), f"add_helper_after({after!r})" if after else "add_helper"

        def register(obj: Any) -> Any:
            helper = Helper.of(obj, after)
            for known in (known for known in self.helpers if known.__name__ == helper.__name__):
                raise CodegenError(
                    f"{where}: {call} adds {helper.__name__!r}, which is already a helper, added at "
                    f"{known.where}. Rename one."
                )
            names = _renamed_words(name_map, helper.source, call, where) or helper.name_map
            about = description or helper.description
            self.helpers.add(replace(helper, description=about, name_map=names, after=after))
            return obj

        return register if helper is None else register(helper)


def _renamed_words(name_map: NameMap, source: Source, call: str, where: Location) -> tuple[tuple[str, str], ...]:
    """Return the names in a source that a `name_map` has, each with its new name, which may be the same."""
    pairs = sorted((name_map or {}).items(), key=lambda pair: -len(pair[0]))  # the longest matching key wins
    for name in (name for pair in pairs for name in pair):
        if not name.isidentifier():
            raise CodegenError(
                f"{where}: the name_map of {call} maps names and what they begin with, and {name!r} isn't a name."
            )
    renamed = {}
    for word in set(re.findall(r"[^\W\d]\w*", source.text)):
        for old, new in pairs:
            if (new_word := _renamed(word, old, new)) != word or word == old:
                renamed[word] = new_word
                break
    return tuple(sorted(renamed.items()))


def _renamed(word: str, old: str, new: str) -> str:
    """Return a name with its first words replaced: `_Qwen3VLModel` is `_Qwen3VLMoeModel` for `Qwen3VL: Qwen3VLMoe`.

    Only the words of names in CamelCase are known; any other `old` is a whole name.
    """
    underscores = re.match("_*", word).group()  # type: ignore[union-attr]
    rest = word.removeprefix(underscores + old)
    if word == old:
        return new
    return underscores + new + rest if old[0].isupper() and rest != word and rest[:1].isupper() else word
