"""Asking who would answer."""

import pytest

QUERY = {"annotations": ["query_instance_id"]}


async def test_instance_query_answers_worker_and_tokens_without_a_request(rig):
    answer = await rig.complete("hi", stream=True, nvext=QUERY)
    counted = await rig.metrics()

    assert answer.text == (
        f'event: worker_instance_id\n: "{rig.one.instance.instance_id}"\n\n'
        'event: token_data\n: "[104,105]"\n\n'
        "data: [DONE]\n\n"
    )
    assert rig.one.requests == []
    assert counted['dynamo_frontend_inflight_requests{model="m"}'] == 0
    assert counted['dynamo_frontend_id_queries_total{model="m"}'] == 1


async def test_instance_and_tokens_of_the_answer_can_be_sent_back(rig):
    other = await rig.worker()
    chosen = {"backend_instance_id": other.instance.instance_id, "token_data": [104, 105]}
    told = await rig.complete("", stream=True, nvext=QUERY | chosen)
    await rig.complete("", nvext=chosen)

    assert f': "{other.instance.instance_id}"' in told.text
    assert other.prompts == ["hi"]


@pytest.mark.parametrize("instance_id", [12345])
async def test_query_for_an_absent_worker_is_a_503(rig, instance_id):
    nvext = QUERY | {"backend_instance_id": instance_id}
    answer = await rig.chat(stream=True, nvext=nvext)

    assert answer.status_code == 503
