"""Which TensorRT-LLM the adapter is written for."""

from dynamo.base import distribution
from dynamo.engine.adapters import installed

TENSORRT_LLM = installed.Wanted(
    name="TensorRT-LLM",
    package="tensorrt_llm",
    how=f"{distribution.install_command('trtllm')} (it needs an NVIDIA GPU)",
    oldest=(1, 1),
    newest=(1, 2),
)
check = TENSORRT_LLM.check
