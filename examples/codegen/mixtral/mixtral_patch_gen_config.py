"""Mixtral with each expert as plain linear layers, from the description of a runtime Patcher.

patcher codegen examples/codegen/mixtral/mixtral_patch_gen_config.py --diff

transformers stacks the weights of all experts in one parameter, which quantizers and adapters for linear layers don't
see. In this file an expert is three `nn.Linear`; the checkpoints that it reads and writes stay those of the original.
"""

from transformers import MixtralForCausalLM

from patcher import Patcher
from patcher.codegen import PatchConfig

config = PatchConfig.from_patcher(
    Patcher(fusions=["sequential_experts"], name="Mixtral with experts as layers"), MixtralForCausalLM
)
