"""The description of a patched modeling file: which definitions of which module become what, and why.

A config only describes. Everything that can be judged without the modeling file is judged here, on the line that
says it; the rest when the file is generated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from patcher.codegen.registration import PatchRegistration

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from patcher.spec.patcher import Patcher

__all__ = ["PatchConfig"]

# What works on classes is imported where it is called: describing and generating need neither torch nor transformers.


class PatchConfig(PatchRegistration):
    r"""What to change in one modeling module, and the file to write it to.

    >>> config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
    >>> @config.replace_function("rotate_half", description="one kernel less")
    ... def rotate_half(x):
    ...     return x.roll(x.shape[-1] // 2, -1)
    >>> config.patches[0].source.name
    'rotate_half'

    Patches are given as decorators, as calls with a class or a function, or as text.

    Args:
        source_module: the dotted name of the module that is patched. It is read, never imported.
        target_file: the name of the generated file.
        description: what the generated file is for; it stands in its header.

    Raises:
        CodegenError: for names that can't be a module or a file.
    """

    def add_conversions(self, patcher: Patcher | None = None) -> None:
        """Have the models of the file read and write checkpoints of the original.

        >>> from patcher.codegen import generate
        >>> config = PatchConfig("transformers.models.mixtral.modeling_mixtral", "patched_modeling_mixtral.py")
        >>> config.add_conversions()
        >>> "from_pretrained = runtime.from_pretrained" in generate(config)
        True

        A constant of the file holds the conversions, `new_weights` and `dropped_weights` of the Patcher; its classes
        and fusions are not looked at. Without a Patcher the models get the conversions that transformers has: by
        itself it gives them to its own classes only, so a file of a model with experts needs this.

        Raises:
            CodegenError: a conversion can't be written as text.
        """
        from patcher.codegen.checkpoint_methods import add_conversions
        from patcher.spec.patcher import Patcher

        add_conversions(self, Patcher() if patcher is None else patcher)

    # -- and at run time ----------------------------------------------------------------------------------------

    def to_patcher(self) -> Patcher:
        """A Patcher with the same effect: the models of the module, loaded with it, compute what the file's would.

        >>> config = PatchConfig("transformers.models.llama.modeling_llama", "patched_modeling_llama.py")
        >>> _ = config.override_method("LlamaMLP.extra_repr", "def extra_repr(self): return 'mine'", new=True)
        >>> list(config.to_patcher().class_mapping)
        ['LlamaMLP']

        The text of the file is executed, not written. Of its classes the Patcher replaces those whose code differs,
        by what was patched or by a patched name that they use. No model has all classes of a modeling file, so a load
        must meet one of them only. A process that unpickles the Patcher, or one of its classes, has to call
        `to_patcher()` of the same config first.

        Raises:
            CodegenError: the file can't be generated or imported, or no class of it differs.
        """
        from patcher.codegen.to_patcher import to_patcher

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
        """The config of the readable file that does to the models of a module what a Patcher does to them.

        >>> from transformers import LlamaForCausalLM
        >>> from patcher import Patcher
        >>> PatchConfig.from_patcher(Patcher(fusions=["gate_up"]), LlamaForCausalLM).description
        'What a patcher does to the models of this module.'

        Replacements are copied with what they use of their own module, fused forwards stand as code. The models of
        the file read and write checkpoints of the original, by a constant that holds the conversions.

        Args:
            patcher: what the file is to do.
            model_class: a model of the module.
            config: decides what is fused; without one, the defaults of the model's config class.
            target_file: the name of the file, `patched_<module>.py` by default.

        Raises:
            CodegenError: the patcher reaches other modules, or does what one class for all layers can't.
        """
        from patcher.codegen.from_patcher import describe_patcher

        module = model_class.__module__
        name = f"the patcher {patcher.name!r}" if patcher.name else "a patcher"
        target_file = target_file or f"patched_{module.rpartition('.')[2]}.py"
        described = cls(module, target_file, f"What {name} does to the models of this module.")
        describe_patcher(described, patcher, model_class, config)
        return described
