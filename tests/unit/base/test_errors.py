import pytest

from dynamo.base import errors


def all_classes(cls=errors.DynamoError):
    return [cls, *(found for sub in cls.__subclasses__() for found in all_classes(sub))]


@pytest.mark.parametrize("cls", all_classes())
def test_an_error_crosses_the_wire_as_itself(cls):
    sent = cls("expected a, got b: do c")
    arrived = errors.from_wire(sent.code, str(sent))

    assert type(arrived) is cls
    assert str(arrived) == str(sent)


def test_each_class_has_a_code_of_its_own():
    codes = [cls.code for cls in all_classes()]

    assert len(codes) == len(set(codes))


def test_a_code_that_we_do_not_know_is_an_error_all_the_same():
    assert type(errors.from_wire("of the future", "boo")) is errors.DynamoError


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    assert all(cls.__name__ in errors.__doc__ for cls in all_classes())
