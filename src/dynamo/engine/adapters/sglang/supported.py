"""Which SGLang the adapter is written for."""

from dynamo.engine.adapters import installed

SGLANG = installed.Wanted(
    name="SGLang",
    package="sglang",
    how="pip install sglang (it needs a GPU)",
    oldest=(0, 5),
    newest=(0, 5),
)
check = SGLANG.check
