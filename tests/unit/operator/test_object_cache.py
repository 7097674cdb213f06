"""What the operator believes of an object whose end it has seen."""

from dynamo.operator import object_cache, objects

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


def test_object_that_goes_while_others_are_asked_is_passed_over():
    owners = [{"kind": KEY[0], "name": KEY[2], "uid": "u1"}]
    metadata = {"name": "w", "namespace": KEY[1], "uid": "u2", "resourceVersion": "2"}
    deployment = {"kind": "Deployment", "metadata": metadata | {"ownerReferences": owners}}
    cache = object_cache.ObjectCache()
    cache.apply_event("ADDED", component(1))
    cache.apply_event("ADDED", deployment)
    observed = cache.observe(component(1), "")
    before = observed.owned_by(component(1), "Deployment")
    cache.apply_event("DELETED", deployment)

    assert before == [deployment]
    assert observed.owned_by(component(1), "Deployment") == []


def test_nothing_of_an_owner_and_its_objects_is_kept_when_all_are_gone():
    owners = [{"kind": KEY[0], "name": KEY[2], "uid": "u1"}]
    metadata = {"name": "w", "namespace": KEY[1], "uid": "u2", "ownerReferences": owners}
    cache = object_cache.ObjectCache()
    cache.apply_event("ADDED", component(1))
    for event, revision in (("ADDED", "2"), ("MODIFIED", "4"), ("DELETED", "5")):
        deployment = {"kind": "Deployment", "metadata": {**metadata, "resourceVersion": revision}}
        if event == "MODIFIED":  # as it ends after its owner
            cache.apply_event("DELETED", component(3))
        cache.apply_event(event, deployment)

    assert not cache._owned


def test_object_without_a_spec_has_no_replicas_that_an_apply_puts_back():
    sources = {"kind": "ConfigMap", "metadata": {"name": "sources"}, "data": {"a": "b"}}

    assert objects.explain_scaling(sources, sources) is None


def test_models_are_looked_at_when_another_one_has_unloaded_an_adapter_that_may_be_theirs():
    cache = object_cache.ObjectCache()
    leaving, staying = (
        {"kind": "DynamoModel", "metadata": {"name": name, "namespace": "default", "uid": name}}
        for name in ("a", "b")
    )
    cache.apply_event("ADDED", staying)
    leaving["metadata"]["deletionTimestamp"] = "2026-11-23T10:00:00Z"

    assert object_cache.key_of(staying) in cache.roots_of(leaving)
