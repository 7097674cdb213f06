import pytest

from dynamo.base import errors
from dynamo.protocols import model_errors


def all_classes(cls=errors.DynamoError):
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in all_classes(sub))]


@pytest.mark.parametrize("cls", all_classes())
def test_error_keeps_its_class_and_message_on_the_wire(cls):
    sent = cls("expected a, got b: do c")
    arrived = errors.from_wire(sent.code, str(sent))

    assert type(arrived) is cls
    assert str(arrived) == str(sent)


def test_each_error_class_has_its_own_code():
    codes = [cls.code for cls in all_classes()]

    assert len(codes) == len(set(codes))


def test_unknown_code_becomes_a_plain_dynamo_error():
    assert type(errors.from_wire("of the future", "boo")) is errors.DynamoError


def test_docstrings_name_every_error_class():
    trees = errors.__doc__ + model_errors.__doc__

    assert all(cls.__name__ in trees for cls in all_classes())
