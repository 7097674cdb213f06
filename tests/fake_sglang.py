"""What the adapter uses of SGLang, in the shapes of its sources (0.5.23), over a `FakeModel`.

`srt/entrypoints/engine.py` (Engine), `srt/managers/tokenizer_manager.py` (`_handle_batch_output`: output_ids,
meta_info), `srt/managers/schedule_batch.py` (finish reasons), `srt/managers/load_snapshot.py`.
"""

import argparse
import contextlib
import importlib
import json
import sys
import types

import msgspec
import zmq

import fake_model

ADAPTER = "dynamo.engine.adapters.sglang"


class ServerArgs:
    def __init__(self, **fields):
        vars(self).update(fields)

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", required=True)
        parser.add_argument("--served-model-name")
        parser.add_argument("--tp-size", type=int, default=1)
        parser.add_argument("--dp-size", type=int, default=1)
        parser.add_argument("--disable-radix-cache", action="store_true")
        parser.add_argument("--kv-events-config")
        parser.add_argument("--enable-hierarchical-cache", action="store_true")
        parser.add_argument("--hicache-storage-backend")
        parser.add_argument("--enable-priority-scheduling", action="store_true")
        parser.add_argument("--schedule-low-priority-values-first", action="store_true")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace):
        if args.tp_size < 1:
            raise ValueError("tp_size must be positive")
        return cls(**vars(args))


class TokenizerManager:
    def __init__(self, model):
        self.model_config = types.SimpleNamespace(
            context_len=fake_model.CONTEXT, vocab_size=fake_model.VOCABULARY
        )
        self.load_snapshot_reader = self
        self.by_rid = {}
        self._model = model

    def auto_create_handle_loop(self):
        pass

    def abort_request(self, rid):
        for name, request in self.by_rid.items():
            if name.startswith(rid) and request.end is None:
                self._model.abort(request)

    async def flush_cache(self, timeout_s):
        while self._model.running or self._model.waiting:
            await fake_model.asyncio.sleep(0)
        self._model.forget()
        return types.SimpleNamespace(success=True, message="")

    def read_all(self):
        return [
            types.SimpleNamespace(
                dp_rank=0,
                num_running_reqs=len(self._model.running),
                num_waiting_reqs=len(self._model.waiting),
                num_used_tokens=sum(len(one.prompt) for one in self._model.running),
                max_running_requests=fake_model.SLOTS,
                cache_hit_rate=0.0,
            )
        ]


class Engine:
    def __init__(self, server_args):
        self.server_args = server_args
        self.model = fake_model.FakeModel()
        self._publish(json.loads(server_args.kv_events_config))
        self.tokenizer_manager = TokenizerManager(self.model)
        total = {"max_total_num_tokens": fake_model.BLOCKS * fake_model.BLOCK}
        self._scheduler_init_result = types.SimpleNamespace(scheduler_infos=[total])

    def shutdown(self):
        self.model.is_dead = True
        self._context.destroy(linger=0)

    def _publish(self, config):
        """`srt/disaggregation/kv_events.py`: a tagged map for each event, in a batch that is an array."""
        self._context, self._num_batches = zmq.Context(), 0
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.connect(config["endpoint"])
        self.model.on_known, self.model.on_forget = self._stored, self._cleared

    def _stored(self, parent, prefix):
        self._tell(
            {
                "type": "BlockStored",
                "block_hashes": [hash(prefix)],
                "parent_block_hash": hash(parent) if parent else None,
                "token_ids": list(prefix[-fake_model.BLOCK :]),
                "block_size": fake_model.BLOCK,
                "lora_id": None,
                "medium": "GPU",
            }
        )

    def _cleared(self):
        self._tell({"type": "AllBlocksCleared"})

    def _tell(self, event):
        if not self._num_batches:
            assert self._pub.recv() == b"\x01"  # the subscriber is there
        number = self._num_batches.to_bytes(8, "big")
        self._pub.send_multipart((b"", number, msgspec.msgpack.encode([0.5, [event], 0])))
        self._num_batches += 1

    async def async_generate(self, *, input_ids, rid, stream, sampling_params, **wanted):
        assert stream
        if sampling_params["frequency_penalty"] > 2:
            raise ValueError("frequency_penalty must be in [-2, 2]")
        return self._answer(input_ids, rid, sampling_params, wanted)

    async def _answer(self, input_ids, rid, params, wanted):
        ends = () if params["ignore_eos"] else params["stop_token_ids"]
        request = self.model.ask(
            input_ids,
            max_tokens=params["max_new_tokens"],
            ends=ends,
            min_tokens=params["min_new_tokens"],
        )
        self.tokenizer_manager.by_rid[rid] = request
        end, num_completed = None, 0
        while end is None:
            tokens, end = await request.steps.get()
            num_completed += len(tokens)
            meta = {"id": rid, "finish_reason": _reason(end), "cached_tokens": request.num_cached}
            meta["completion_tokens"] = num_completed
            if wanted["return_logprob"]:
                meta |= _logprobs(request, tokens, wanted)
            yield {"output_ids": tokens, "meta_info": meta}


def _reason(end):
    match end:
        case None:
            return None
        case "length":
            return {"type": "length", "length": 1}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case _:
            return {"type": "stop", "matched": end}


def _logprobs(request, tokens, wanted):
    num_top = wanted["top_logprobs_num"]
    meta = {"output_token_logprobs": [(-0.1, token, None) for token in tokens]}
    meta["input_token_logprobs"] = (
        [(None if i == 0 else -0.1, token, None) for i, token in enumerate(request.prompt)]
        if wanted["logprob_start_len"] == 0
        else []
    )
    if num_top:
        meta["output_top_logprobs"] = [_top(token, num_top) for token in tokens]
        meta["input_top_logprobs"] = [
            None if one[0] is None else _top(one[1], num_top)
            for one in meta["input_token_logprobs"]
        ]
    return meta


def _top(token, num_top):
    return [(value, name, None) for name, value in fake_model.scored(token, num_top).items()]


def get_schedule():
    return types.SimpleNamespace(
        page_size=fake_model.BLOCK,
        chunked_prefill_size=64,
        max_prefill_tokens=16384,
        max_running_requests=None,
    )


MODULES = {
    "sglang.srt.entrypoints.engine": {"Engine": Engine},
    "sglang.srt.runtime_context": {"get_schedule": get_schedule},
    "sglang.srt.server_args": {"ServerArgs": ServerArgs},
}


@contextlib.contextmanager
def adapter():
    """The adapter, which believes that SGLang is there."""
    with faked(MODULES, ADAPTER):
        yield importlib.import_module(ADAPTER)


@contextlib.contextmanager
def faked(modules, package):
    """Modules with these contents can be imported; afterwards neither they nor the package are known any more."""
    before = dict(sys.modules)
    for name, content in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            sys.modules.setdefault(parent, types.ModuleType(parent))
        vars(sys.modules[name]).update(content)
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith((package, *(name.split(".")[0] for name in modules))):
                del sys.modules[name]
