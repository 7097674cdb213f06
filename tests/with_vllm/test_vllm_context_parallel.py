"""The blocks of vLLM whose ranks share the tokens of each (decode context parallelism), of which a CPU has none."""

import importlib.util
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: make test-vllm", allow_module_level=True)

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from dynamo.engine.adapters.vllm import engine, versions

pytestmark = pytest.mark.filterwarnings("ignore")


def test_engine_reports_blocks_of_the_size_that_vllms_events_have(monkeypatch):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    init_none_hash(sha256)
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=50, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        max_model_len=512,
        scheduler_block_size=32,
        hash_block_size=32,
        enable_kv_cache_events=True,
        dcp_world_size=2,
    )
    request = Request(
        request_id="a",
        prompt_token_ids=list(range(100)),
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        block_hasher=get_request_block_hasher(32, sha256),
    )
    manager.allocate_slots(request, 100)
    monkeypatch.setattr(versions, "max_images", lambda config: None)
    facts = engine._facts(
        SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1, decode_context_parallel_size=2),
            reasoning_config=None,
            cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=50),
            model_config=SimpleNamespace(
                max_model_len=512,
                max_logprobs=20,
                get_vocab_size=lambda: 100,
                skip_tokenizer_init=False,
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512),
        ),
        (),
    )

    (event,) = manager.take_events()
    assert event.block_size == facts.kv_block_size
