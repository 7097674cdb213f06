"""Which TensorRT-LLM the adapter is written for."""

from dynamo.engine.adapters import installed

TENSORRT_LLM = installed.Wanted(
    name="TensorRT-LLM",
    package="tensorrt_llm",
    how="pip install tensorrt_llm (it needs an NVIDIA GPU)",
    oldest=(1, 1),
    newest=(1, 2),
)
check = TENSORRT_LLM.check
