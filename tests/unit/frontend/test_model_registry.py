"""Models appear and vanish with their workers; prefill workers are used while they are registered."""

import asyncio
import shutil
import threading

import pytest
from frontend_rig import NAME, Worker, card_of, outputs

import kv_params
import waiting
from dynamo.base import errors
from dynamo.disagg import config as disagg_config
from dynamo.frontend.model_registry import registry
from dynamo.protocols import generate, instances, kv_transfer, model_card
from dynamo.router import config
from dynamo.runtime import component


async def names(rig):
    return [model["id"] for model in (await rig.client.get("/v1/models")).json()["data"]]


async def test_model_appears_with_its_first_worker_and_vanishes_with_its_last(bare):
    await bare.start()
    seen = [await names(bare)]
    one = await bare.worker()
    two = await bare.worker()
    seen.append(await names(bare))
    await one.runtime.close()
    await bare.until(lambda: len(bare.instances) == 1)
    seen.append(await names(bare))
    await two.runtime.close()
    await bare.until(lambda: not bare.instances)
    seen.append(await names(bare))

    assert seen == [[], ["m"], ["m"], []]


class Loading:
    """Stands before the loading of models: each waits until it is allowed."""

    def __init__(self, monkeypatch):
        self.names = []  # of the models that began to load
        self.may_load = asyncio.Event()
        self.free_names = set()  # of models that do not wait
        load = registry.ModelRegistry._load

        async def load_later(models, records):
            name = records[0].card_json.display_name
            self.names.append(name)
            if name not in self.free_names:
                await self.may_load.wait()
            return await load(models, records)

        monkeypatch.setattr(registry.ModelRegistry, "_load", load_later)


@pytest.fixture
def loading(monkeypatch):
    return Loading(monkeypatch)


async def test_request_waits_for_a_model_that_is_not_loaded_yet(bare, loading):
    await bare.register(Worker, "a", NAME)
    await bare.register(Worker, "b", NAME)
    await bare.start()
    answer = bare.start_task(bare.complete(model="b"))
    await bare.until(lambda: "b" in loading.names)
    loading.may_load.set()

    assert (await answer).status_code == 200


async def test_request_waits_for_a_model_that_has_just_registered(bare, loading):
    """Discovery has its card, and the frontend is not done with it."""
    loading.free_names = {"m"}
    await bare.start()
    await bare.worker()
    await bare.register(Worker, "late", NAME)
    answer = bare.start_task(bare.complete(model="late"))
    unknown = await bare.complete(model="nowhere")
    was_waiting = not answer.done()
    loading.may_load.set()

    assert was_waiting
    assert (await answer).status_code == 200
    assert unknown.status_code == 404


async def test_request_waits_for_a_model_of_a_new_generation_that_has_just_registered(
    bare, loading
):
    """As of workers that replace others on Kubernetes, each generation in a namespace of its own."""
    loading.free_names = {"m"}
    await bare.start(namespace="mine")
    await bare.register(Worker, "m", instances.EndpointName("mine", "backend", "generate"))
    await bare.until(lambda: bare.instances)
    generation = instances.EndpointName("mine-0123abcd", "backend", "generate")
    await bare.register(Worker, "late", generation)
    answer = bare.start_task(bare.complete(model="late"))
    unknown = await bare.complete(model="nowhere")
    was_waiting = not answer.done()
    loading.may_load.set()

    assert was_waiting
    assert (await answer).status_code == 200
    assert unknown.status_code == 404


async def test_files_that_come_slowly_delay_no_other_model(bare, loading):
    loading.free_names = {"m"}
    await bare.start()
    await bare.register(Worker, "slow", NAME)
    await bare.until(lambda: loading.names == ["slow"])
    await bare.worker("m")

    assert await names(bare) == ["m"]
    assert (await bare.chat()).status_code == 200


async def test_few_models_are_loaded_at_a_time(bare, loading):
    """Their tokenizers take memory while they are read."""
    for number in range(registry.MAX_LOADS + 2):
        await bare.register(Worker, f"m{number}", NAME)
    await bare.start()
    await bare.until(lambda: len(loading.names) == registry.MAX_LOADS)
    began = list(loading.names)
    loading.may_load.set()
    await bare.until(lambda: len(bare.instances) == registry.MAX_LOADS + 2)

    assert len(began) == registry.MAX_LOADS


async def test_thread_that_loads_a_model_ends(bare, monkeypatch):
    """What a tokenizer library keeps for each thread that encodes goes with it."""
    threads = []
    load_preprocessor = registry.loading.load_preprocessor

    def load(*args, **options):
        threads.append(threading.current_thread())
        return load_preprocessor(*args, **options)

    monkeypatch.setattr(registry.loading, "load_preprocessor", load)
    await bare.start()
    await bare.worker()
    (thread,) = threads
    thread.join(waiting.PATIENT_S)

    assert not thread.is_alive()


async def test_worker_that_leaves_while_its_model_is_loaded_is_not_listed(bare, loading):
    loading.free_names = {"m"}
    await bare.start()
    leaving = await bare.register(Worker, "slow", NAME)
    await bare.until(lambda: loading.names == ["slow"])
    await leaving.runtime.close()
    await bare.worker("m")  # discovery has told of both
    loading.may_load.set()
    await bare.until(lambda: not bare.frontend.models._refreshing_names)

    assert await names(bare) == ["m"]
    assert [*bare.frontend.models._models] == ["m"]


async def test_worker_that_started_before_the_frontend_is_found(bare):
    await bare.start()
    await bare.worker()

    assert await names(bare) == ["m"]


async def test_model_answers_under_its_aliases_and_is_listed_once(bare):
    await bare.start()
    await bare.worker("m", aliases=("./org/m", "org/m"))
    await bare.worker("other", aliases=("org/m", "m"))
    answers = [await bare.chat(model=name) for name in ("m", "./org/m", "org/m", "other")]
    unknown = await bare.chat(model="org/x")

    assert [answer.status_code for answer in answers] == [200] * 4
    assert answers[2].json()["model"] == "m"
    assert unknown.status_code == 404
    assert await names(bare) == ["m", "other"]


async def test_alias_of_a_lost_model_is_still_known(bare):
    await bare.start(worker_wait_secs=0.0)
    one = await bare.worker("m", aliases=("org/m",))
    await one.runtime.close()
    await bare.until(lambda: not bare.instances)
    answer = await bare.chat(model="org/m")

    assert answer.status_code == 503
    assert "the model 'm'" in answer.text


async def test_router_takes_the_block_size_of_new_workers_when_the_old_ones_are_gone(bare, caplog):
    def router():
        ((replicas,),) = [model.replicas.values() for model in bare.frontend.models.ready]
        return replicas.route._decode

    def block_size():
        return router().scheduler.block_size

    await bare.start(routing=config.RoutingConfig(router_mode="kv"))
    old = [await bare.worker(kv_cache_block_size=16) for _ in range(2)]
    await bare.worker(kv_cache_block_size=32)
    before = block_size()
    await old[0].runtime.close()
    await bare.until(lambda: len(bare.instances) == 2)
    during, former = block_size(), router()
    await old[1].runtime.close()
    await bare.until(lambda: block_size() == 32)

    assert (before, during) == (16, 16)
    assert caplog.text.count("its KV blocks have 32 tokens, theirs 16") == 1
    assert not former.instance_ids
    assert (await bare.chat()).status_code == 200


async def test_model_is_as_the_oldest_worker_that_is_left_describes_it(rig):
    def limits():
        (model,) = rig.frontend.models.ready
        return model.card.context_length, model.preparer.context_length

    before, (route,) = limits(), rig.frontend.models.ready[0].replicas.values()
    await rig.worker(context_length=before[0] * 2)
    during = limits()
    await rig.one.runtime.close()
    await rig.until(lambda: limits() != before)

    assert during == before
    assert limits() == (before[0] * 2,) * 2
    (left,) = rig.frontend.models.ready[0].replicas.values()
    assert left.route is route.route
    assert (await rig.chat()).status_code == 200


@pytest.fixture
def other_dir(model_dir, tmp_path):
    """A model of other files."""
    folder = tmp_path / "other"
    shutil.copytree(model_dir, folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "other"}')
    return folder


async def clashing(rig, folder):
    """A worker that serves other files under the same name, registered but refused."""
    runtime = await rig._stack.enter_async_context(
        await component.DistributedRuntime.in_memory(rig.cluster, item_type=generate.Output)
    )
    name = instances.EndpointName("dynamo", "other", "generate")
    return await runtime.register(name, lambda call: call.finish(), card_of(folder).record_for)


async def test_each_worker_of_a_model_gets_as_many_requests_whatever_endpoint_it_has(bare):
    """As while the workers of a new generation replace others one by one."""
    await bare.start()
    workers = [await bare.worker() for _ in range(3)]
    other = instances.EndpointName("dynamo-0123abcd", "backend", "generate")
    workers.append(await bare.register(Worker, "m", other))
    await bare.until(lambda: len(bare.instances) == 4)
    for _ in range(12):
        await bare.chat()

    assert [len(worker.calls) for worker in workers] == [3, 3, 3, 3]


async def test_later_worker_with_other_files_is_refused(rig, other_dir, caplog):
    await clashing(rig, other_dir)
    await rig.until(lambda: "refused instance" in caplog.text)

    assert [one.component for one in rig.instances] == ["backend"]
    assert (await rig.chat()).status_code == 200


async def test_refused_worker_is_served_once_the_others_are_gone(rig, other_dir, caplog):
    second = await clashing(rig, other_dir)
    await rig.until(lambda: "refused instance" in caplog.text)
    await rig.one.runtime.close()
    await rig.until(lambda: rig.instances == [second])

    assert await names(rig) == ["m"]


async def test_model_with_unreadable_files_is_not_listed_and_requests_say_why(
    rig, tmp_path, model_dir, caplog
):
    folder = tmp_path / "gone"
    shutil.copytree(model_dir, folder)
    card = card_of(folder, "lost")
    shutil.rmtree(folder)
    runtime = await rig._stack.enter_async_context(
        await component.DistributedRuntime.in_memory(rig.cluster, item_type=generate.Output)
    )
    name = instances.EndpointName("dynamo", "other", "generate")
    await runtime.register(name, lambda call: call.finish(), card.record_for)
    await rig.until(lambda: "cannot serve the model 'lost'" in caplog.text)
    answer = await rig.chat(model="lost")
    counted = await rig.metrics()

    assert await names(rig) == ["m"]
    assert counted['dynamo_frontend_model_ready{model="lost"}'] == 0
    assert "serving the model 'lost'" not in caplog.text
    assert answer.status_code == 503
    assert "cannot read" in answer.json()["error"]["message"]


async def test_model_is_served_once_its_files_can_be_read(
    rig, tmp_path, model_dir, caplog, monkeypatch
):
    monkeypatch.setattr(registry, "RELOAD_S", 0.01)
    folder, away = tmp_path / "late", tmp_path / "away"
    shutil.copytree(model_dir, folder)
    card = card_of(folder, "late")
    folder.rename(away)
    runtime = await rig._stack.enter_async_context(
        await component.DistributedRuntime.in_memory(rig.cluster, item_type=generate.Output)
    )
    name = instances.EndpointName("dynamo", "other", "generate")
    await runtime.register(name, lambda call: call.finish(), card.record_for)
    await rig.until(lambda: "cannot serve the model 'late'" in caplog.text)
    away.rename(folder)
    await rig.until(lambda: len(rig.frontend.models.ready) == 2)

    assert await names(rig) == ["late", "m"]
    assert caplog.text.count("cannot serve the model 'late'") == 1


async def test_model_that_its_worker_renames_is_served_by_the_new_name_alone(rig):
    """As by a second `register_model` of an endpoint."""
    instance = rig.one.instance
    record = card_of(rig.model_dir, "renamed").record_for(instance)[1]
    await rig.one.runtime.records.change(instance.card_key, lambda _: record)
    async with asyncio.timeout(waiting.PATIENT_S):
        while await names(rig) != ["renamed"]:
            await asyncio.sleep(0)

    assert (await rig.complete(model="renamed")).status_code == 200


@pytest.mark.parametrize("value", [b"", b"{}", b"\xff", b"null"])
async def test_malformed_card_is_ignored(rig, value, caplog):
    await rig.one.runtime.discovery.put(instances.CARDS + "a/b/c/1", value)
    await rig.until(lambda: "ignored the model card" in caplog.text)

    assert await names(rig) == ["m"]


async def test_only_the_configured_namespace_is_served(bare):
    await bare.start(namespace="mine")
    runtime = await bare._stack.enter_async_context(
        await component.DistributedRuntime.in_memory(bare.cluster, item_type=generate.Output)
    )
    for namespace, name in (("theirs", "a"), ("mine", "b")):
        endpoint = instances.EndpointName(namespace, "backend", "generate")
        await runtime.register(
            endpoint, lambda call: call.finish(), card_of(bare.model_dir, name).record_for
        )
    await bare.until(lambda: bare.instances)

    assert await names(bare) == ["b"]


async def test_facts_of_the_card_are_shown_in_metrics(rig):
    await rig.worker("Big", runtime_config=model_card.ModelRuntimeConfig(total_kv_blocks=77))
    counted = await rig.metrics()

    assert counted['dynamo_frontend_model_total_kv_blocks{model="big"}'] == 77
    assert counted['dynamo_frontend_model_context_length{model="m"}'] == 200
    assert counted['dynamo_frontend_model_workers{model="m"}'] == 1
    assert counted['dynamo_frontend_model_ready{model="m"}'] == 1


async def test_model_without_workers_is_not_ready_in_metrics(rig):
    await rig.one.runtime.close()
    await rig.until(lambda: not rig.instances)
    counted = await rig.metrics()

    assert counted['dynamo_frontend_model_workers{model="m"}'] == 0
    assert counted['dynamo_frontend_model_ready{model="m"}'] == 0


async def test_very_long_model_name_is_not_echoed_in_full(rig):
    answer = await rig.chat(model="x" * 10_000)

    assert answer.status_code == 404
    assert len(answer.content) < 500


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
    bare.decode = await bare.worker(worker_type=model_card.WorkerType.DECODE, kv_cache_block_size=1)
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


async def test_router_of_prefill_workers_that_have_left_knows_no_other(pools):
    def router():
        ((replicas,),) = [model.replicas.values() for model in pools.frontend.models.ready]
        return replicas.route._prefill

    old = await prefill_worker(pools, kv_cache_block_size=16)
    await prefill_worker(pools, kv_cache_block_size=32)
    await pools.until(lambda: router() is not None and len(router().instance_ids) == 2)
    former = router()
    await old.runtime.close()
    await pools.until(lambda: router().scheduler.block_size == 32)

    assert not former.instance_ids
    assert (await pools.chat()).status_code == 200


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


async def test_prefill_workers_are_used_after_an_update_of_the_weights(bare):
    await bare.start(
        routing=config.RoutingConfig(router_mode="kv"),
        prefill=disagg_config.PrefillRoutingConfig(max_local_prefill_length=0),
    )
    models, workers = bare.frontend.models, []
    for weights in ("old", "new"):
        kind = model_card.WorkerType.DECODE
        decode = await bare.worker(worker_type=kind, kv_cache_block_size=1, weights=weights)
        workers.append((await prefill_worker(bare, weights=weights), decode))
    await bare.until(lambda: len(models.prefill_workers) == 2)
    for old in workers[0]:
        await old.runtime.close()
    await bare.until(lambda: len(models.prefill_workers) == 1)
    await bare.until(lambda: not (models._changed_names or models._refreshing_names))
    answer = await bare.chat()

    prefill, decode = workers[1]
    assert answer.status_code == 200
    assert len(prefill.requests) == 1
    assert [one.kv_transfer_params for one in decode.requests] == [PARAMS]


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
    other = await pools.worker(worker_type=model_card.WorkerType.DECODE, kv_cache_block_size=1)
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
        worker_wait_secs=0,
    )
    await bare.worker(worker_type=model_card.WorkerType.DECODE)
    answer = await bare.chat()

    assert answer.status_code == 503
    assert "no prefill worker" in answer.json()["error"]["message"]
