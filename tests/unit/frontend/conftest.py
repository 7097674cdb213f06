"""A model whose tokens are bytes, and a frontend that serves it."""

import contextlib
import json
import logging

import openai
import pytest
import tokenizers
from frontend_rig import EOS, Rig
from tokenizers import decoders, models, pre_tokenizers

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A model whose tokens are bytes: token 104 is "h"."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = {}
    for char in pre_tokenizers.ByteLevel.alphabet():
        ids = tokenizers.Tokenizer(models.BPE({char: 0}, []))
        ids.decoder = decoders.ByteLevel()
        text = ids.decode([0])
        alphabet[char] = ord(text) if len(text) == 1 and ord(text) < 128 else None
    free = iter(range(128, 256))
    vocab = {c: n if n is not None else next(free) for c, n in sorted(alphabet.items())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 257, "eos_token_id": EOS}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
async def bare(model_dir):
    """A frontend that is not started yet."""
    async with contextlib.AsyncExitStack() as stack:
        yield Rig(model_dir, stack)


@pytest.fixture
async def rig(bare):
    """A running frontend with one worker."""
    await bare.start()
    bare.one = await bare.worker()
    return bare


@pytest.fixture
async def client(rig):
    """OpenAI's own client of the running frontend."""
    async with openai.AsyncOpenAI(
        base_url=rig.frontend.url + "/v1", api_key="none", max_retries=0
    ) as made:
        yield made


@pytest.fixture
async def impatient(bare):
    """A running frontend with one worker, where no request waits for a worker."""
    await bare.start(worker_wait_secs=0)
    bare.one = await bare.worker()
    return bare


@pytest.fixture(autouse=True)
def quiet_libraries():
    """httpx logs each request, which hides what we log."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
