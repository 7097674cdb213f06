"""What the operator believes of an object whose end it has seen."""

from dynamo.operator import object_cache

KEY = ("DynamoComponentDeployment", "default", "g-prefill")


def component(version, uid="u1"):
    metadata = {"name": KEY[2], "namespace": KEY[1], "uid": uid, "resourceVersion": str(version)}
    return {"kind": KEY[0], "metadata": metadata}


def test_late_answer_to_a_write_does_not_bring_a_deleted_object_back():
    cache = object_cache.ObjectCache()
    cache.apply_event("ADDED", component(1))
    cache.apply_event("DELETED", component(3))

    assert not cache.put(component(2))  # the answer came after the event of the watch
    assert cache.get(KEY) is None


def test_a_successor_of_the_same_name_is_known():
    cache = object_cache.ObjectCache()
    cache.apply_event("ADDED", component(1))
    cache.apply_event("DELETED", component(3))

    assert cache.put(component(4, uid="u2"))
    assert cache.get(KEY) == component(4, uid="u2")


def test_an_object_that_the_cluster_has_again_is_known():
    cache = object_cache.ObjectCache()
    cache.apply_event("DELETED", component(3))

    assert cache.apply_event("ADDED", component(1))
    assert cache.put(component(2))


def test_only_so_many_deleted_objects_are_remembered(monkeypatch):
    monkeypatch.setattr(object_cache, "MAX_GONE", 1)
    cache = object_cache.ObjectCache()
    cache.apply_event("DELETED", component(1, uid="u1"))
    cache.apply_event("DELETED", component(2, uid="u2"))

    assert cache.put(component(1, uid="u1"))
    assert not cache.put(component(2, uid="u2"))
