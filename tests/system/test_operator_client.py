"""`dynamo.client` against a real frontend and worker."""

import pytest
from deployment import MODEL

from dynamo import client
from dynamo.base import errors
from waiting import eventually


def test_operator_reads_the_state_and_commands_a_worker(deployment, tmp_path):
    frontend = deployment.frontend()
    one, other = (deployment.mocker("--tick-ms", "20") for _ in range(2))
    frontend.others = [one, other]
    frontend.await_models([MODEL])
    operator, worker = client.Client(frontend.url), client.WorkerClient(one.url)
    states = lambda: [row.state for row in operator.list_workers(MODEL)]  # noqa: E731
    eventually(lambda: states() == ["ready", "ready"], what="two workers")
    assert frontend.chat(max_tokens=2).status_code == 200

    assert operator.is_healthy()
    assert [model.id for model in operator.list_models()] == [MODEL]
    assert list(operator.list_workers("another")) == []
    (row,) = operator.list_usage(model=MODEL)
    assert (row.num_requests, row.output_tokens) == (1, 2)
    assert operator.list_usage(since="2999-01-01") == []
    assert operator.read_planners() == []
    assert len(operator.clear_kv_blocks()["cleared_workers"]) == 2

    (tmp_path / "poet").mkdir()
    (tmp_path / "poet" / "adapter_config.json").write_text("{}")
    worker.load_lora("a/poet", (tmp_path / "poet").as_uri())
    assert list(worker.list_loras()) == ["a/poet"]
    eventually(lambda: len(operator.list_models()) == 2, what="the adapter is listed")
    worker.unload_lora("a/poet")
    assert worker.list_loras() == {}
    worker.sleep()
    assert not worker.is_healthy()
    worker.wake_up()
    assert worker.is_healthy()
    with pytest.raises(errors.InvalidRequest, match="400"):
        worker.load_lora("b", "file:///no/such/adapter")

    with frontend.stream(max_tokens=50, ignore_eos=True) as lines:
        next(lines)
        for process in (one, other):
            process.may_end = True
            client.WorkerClient(process.url).drain()
        assert list(lines)[-1] == "[DONE]"
    assert (one.exit_code(), other.exit_code()) == (0, 0)
    with pytest.raises(errors.Unavailable, match="does not answer"):
        worker.list_loras()
