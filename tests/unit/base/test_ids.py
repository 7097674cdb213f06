import uuid

from dynamo.base import ids


def test_instance_ids_are_positive_and_fit_a_signed_word():
    made = {ids.new_instance_id() for _ in range(100)}

    assert len(made) == 100
    assert all(0 < instance_id < 2**63 for instance_id in made)


def test_request_ids_are_different_uuids_of_version_4():
    made = {ids.new_request_id() for _ in range(100)}

    assert len(made) == 100
    assert all(str(uuid.UUID(one)) == one for one in made)
    assert {(uuid.UUID(one).version, uuid.UUID(one).variant) for one in made} == {
        (4, uuid.RFC_4122)
    }


def test_trace_and_span_ids_have_the_lengths_of_w3c_trace_context():
    assert len(ids.new_trace_id()) == 32
    assert len(ids.new_span_id()) == 16
