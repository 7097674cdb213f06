"""Which SGLang the adapter is written for."""

from dynamo.base import distribution
from dynamo.engine.adapters import installed

SGLANG = installed.Wanted(
    name="SGLang",
    package="sglang",
    how=f"{distribution.install_command('sglang')} (it needs a GPU)",
    oldest=(0, 5),
    newest=(0, 5),
)
check = SGLANG.check
