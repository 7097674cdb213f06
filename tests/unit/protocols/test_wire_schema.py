"""What processes say to each other has the fields that `wire_schema.txt` lists, so that no renaming passes unseen.

After a change that other versions understand (a new field with a default), and after one with a new `wire.VERSION`,
write the list with `python tests/unit/protocols/test_wire_schema.py`.
"""

import importlib
import pathlib
import pkgutil
import re

import msgspec

from dynamo import protocols
from dynamo.protocols import wire

SCHEMA = pathlib.Path(__file__).with_name("wire_schema.txt")


def describe_fields():
    """Return a line for each field of each message of `protocols`."""
    lines = [f"wire.VERSION = {wire.VERSION}"]
    for info in pkgutil.iter_modules(protocols.__path__):
        module = importlib.import_module(f"dynamo.protocols.{info.name}")
        for name, message in sorted(vars(module).items()):
            if not isinstance(message, type) or not issubclass(message, msgspec.Struct):
                continue
            if message.__module__ == module.__name__:
                config = message.__struct_config__
                form = "array" if config.array_like else "map"
                tag = (
                    ""
                    if config.tag is None
                    else f", {config.tag_field or 'first'} is {config.tag!r}"
                )
                lines.append(f"{info.name}.{name}: {form}{tag}")
                lines += [f"    {describe_field(f)}" for f in msgspec.structs.fields(message)]
    return lines


def describe_field(field):
    type_ = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    type_ = re.sub(r"\b(typing|msgspec|dynamo\.protocols|dynamo)\.", "", type_)
    return f"{field.encode_name}: {type_}{', required' if field.required else ''}"


def test_messages_have_the_fields_of_the_schema():
    assert describe_fields() == SCHEMA.read_text().splitlines()


if __name__ == "__main__":
    SCHEMA.write_text("\n".join(describe_fields()) + "\n")
