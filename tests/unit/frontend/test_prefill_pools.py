"""Prefill workers come and go, and are used while they are registered."""

import pytest
from frontend_rig import Worker, outputs

import kv_params
from dynamo.base import errors
from dynamo.disagg import config as disagg_config
from dynamo.protocols import generate, instances, kv_transfer, model_card
from dynamo.router import config

PREFILL = instances.EndpointName("dynamo", "prefill", "generate")
PARAMS = kv_params.of_connector(remote_block_ids=[1])
REPORT = kv_transfer.TransferReport(transfer_ms=2.5, num_blocks=3)
ASKED = {"nvext": {"extra_fields": ["worker_id", "timing"]}}


async def prefill_worker(rig, endpoint=PREFILL, **fields):
    """One that computes whatever comes."""
    kind = model_card.WorkerType.PREFILL
    worker = await rig.register(Worker, "m", endpoint, worker_type=kind, **fields)
    done = generate.FinishReason.LENGTH
    worker.script = [generate.Output((1,), done, kv_transfer_params=PARAMS)]
    return worker


@pytest.fixture
async def pools(bare):
    """A frontend in mode kv that has all prompts computed elsewhere, and a decode worker."""
    await bare.start(
        routing=config.RoutingConfig(router_mode="kv"),
        prefill=disagg_config.PrefillRoutingConfig(max_local_prefill_length=0),
    )
    bare.decode = await bare.worker(worker_type=model_card.WorkerType.DECODE)
    return bare


def is_split(rig):
    ((replicas,),) = [model.replicas.values() for model in rig.frontend.models.ready]
    return replicas.route.open_stream != replicas.route._decode.open_stream


async def test_prefill_worker_is_used_while_it_is_registered(pools):
    worker = await prefill_worker(pools)
    await pools.until(lambda: is_split(pools))
    answers = [await pools.chat()]
    await worker.runtime.close()
    await pools.until(lambda: not is_split(pools))
    answers.append(await pools.chat())

    assert [one.status_code for one in answers] == [200, 200]
    assert len(worker.requests) == 1
    assert [one.kv_transfer_params for one in pools.decode.requests] == [PARAMS, None]


async def test_prefill_worker_that_registered_first_is_used(bare):
    await bare.start(routing=config.RoutingConfig(router_mode="kv"))
    await prefill_worker(bare)
    await bare.worker(worker_type=model_card.WorkerType.DECODE)

    await bare.until(lambda: is_split(bare))


async def test_prefill_workers_are_not_used_in_other_router_modes(rig, caplog):
    worker = await prefill_worker(rig)
    await rig.worker("other")  # by now it is known
    await rig.chat()

    assert not worker.requests
    assert rig.one.requests[0].kv_transfer_params is None


async def test_prefill_worker_with_other_files_or_namespace_is_not_used(pools, caplog):
    there = instances.EndpointName("elsewhere", "prefill", "generate")
    await prefill_worker(pools, there)
    stranger = await prefill_worker(pools, files={})
    await pools.until(lambda: "ignored the prefill worker" in caplog.text)
    answer = await pools.chat()

    assert answer.status_code == 200
    assert not is_split(pools)
    assert not stranger.requests


async def test_nvext_names_the_prefill_worker_and_its_times(pools):
    worker = await prefill_worker(pools)
    await pools.until(lambda: is_split(pools))
    first, *rest = outputs("hello")
    told = {"kv_transfer_params": kv_transfer.KvTransferParams(report=REPORT)}
    pools.decode.script = [generate.Output(first.token_ids, cached_tokens=2, **told), *rest]
    whole = (await pools.chat(**ASKED)).json()["nvext"]
    stream = await pools.chat(stream=True, **ASKED)

    ids = {
        "prefill_worker_id": worker.instance.instance_id,
        "decode_worker_id": pools.decode.instance.instance_id,
    }
    assert whole["worker_id"] == ids
    assert whole["timing"]["prefill_time_ms"] > 0
    assert whole["timing"]["kv_transfer_time_ms"] == 2.5
    assert whole["timing"]["kv_transfer_blocks"] == 3
    assert kv_transfer.REPORT_ANNOTATION in pools.decode.requests[0].annotations
    assert "kv_transfer_report" not in stream.text
    assert '"kv_transfer_blocks":3' in stream.text


async def test_decode_worker_reports_its_prefill_worker(rig):
    first, *rest = outputs("hello")
    report = kv_transfer.TransferReport(
        transfer_ms=1, num_blocks=2, prefill_worker_id=77, prefill_ms=5
    )
    told = kv_transfer.KvTransferParams(report=report)
    rig.one.script = [
        generate.Output(first.token_ids, cached_tokens=2, kv_transfer_params=told),
        *rest,
    ]
    answer = (await rig.chat(**ASKED)).json()["nvext"]

    assert answer["worker_id"]["prefill_worker_id"] == 77
    assert answer["timing"]["prefill_time_ms"] == 5


async def test_missing_transfer_report_is_ignored(rig):
    first, *rest = outputs("hello")
    rig.one.script = [
        generate.Output(
            first.token_ids, cached_tokens=2, kv_transfer_params=kv_params.of_connector(a=1)
        ),
        *rest,
    ]
    timing = (await rig.chat(**ASKED)).json()["nvext"]["timing"]

    assert "kv_transfer_time_ms" not in timing


async def test_migrated_request_is_prefilled_again(pools):
    other = await pools.worker(worker_type=model_card.WorkerType.DECODE)
    worker = await prefill_worker(pools)
    await pools.until(lambda: is_split(pools))

    def lose(call, request):
        call.send(generate.Output((104,)))
        call.fail(errors.WorkerLost("x"))

    def live(call, request):
        call.send(generate.Output((105,), generate.FinishReason.LENGTH))
        call.finish()

    lost = [lose]
    for one in (pools.decode, other):
        one.script = lambda call, request: (lost.pop() if lost else live)(call, request)
    answer = await pools.chat()
    resumed = max((*pools.decode.requests, *other.requests), key=lambda one: one.num_resumed)

    assert answer.json()["choices"][0]["message"]["content"] == "hi"
    assert len(worker.requests) == 2
    assert resumed.num_resumed == 1
    assert resumed.kv_transfer_params == PARAMS


async def test_several_prompts_and_choices_are_prefilled(pools):
    worker = await prefill_worker(pools)
    await pools.until(lambda: is_split(pools))
    pools.decode.script = [*outputs("ab"), *outputs("cd", index=1)]
    answer = await pools.complete(["one", "two"], n=2)

    assert [one["text"] for one in answer.json()["choices"]] == ["ab", "cd", "ab", "cd"]
    assert [one.sampling_options.n for one in worker.requests] == [1, 1]


async def test_request_is_refused_without_a_prefill_worker_if_enforced(bare):
    await bare.start(
        routing=config.RoutingConfig(router_mode="kv"),
        prefill=disagg_config.PrefillRoutingConfig(enforce_disagg=True),
    )
    await bare.worker(worker_type=model_card.WorkerType.DECODE)
    answer = await bare.chat()

    assert answer.status_code == 503
    assert "no prefill worker" in answer.json()["error"]["message"]
