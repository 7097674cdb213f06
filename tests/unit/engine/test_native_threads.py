import dataclasses

import pytest

from dynamo.engine.native import config, threads

SMALL = config.parse(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
)
LARGE = dataclasses.replace(SMALL, hidden_size=1024, intermediate_size=3072)


def choose(model, *, requested=None, omp_num_threads=None, cores=8, cpu_max=""):
    found = threads.choose(
        model, requested=requested, omp_num_threads=omp_num_threads, cores=cores, cpu_max=cpu_max
    )
    return found.number


@pytest.mark.parametrize(("model", "expected"), [(SMALL, 1), (LARGE, 8)])
def test_only_large_models_use_all_cores(model, expected):
    assert choose(model) == expected


@pytest.mark.parametrize("model", [SMALL, LARGE])
def test_the_flag_overrides_the_environment_which_overrides_the_rule(model):
    assert choose(model, omp_num_threads="2", cores=2) == 2
    assert choose(model, requested=3, omp_num_threads="2", cores=2) == 3


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [("max 100000\n", 8), ("250000 100000\n", 2), ("50000 100000\n", 1), ("1600000 100000\n", 8)],
)
def test_a_containers_cpu_limit_bounds_the_threads(cpu_max, expected):
    assert choose(LARGE, cpu_max=cpu_max) == expected
