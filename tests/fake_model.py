"""A fake model that computes a token per step for each running request, with the timing and memory of an engine.

Fakes of libraries that cannot run here (`fake_sglang`, `fake_trtllm`) convert its results to those libraries' types.
"""

import asyncio
import collections

CONTEXT, BLOCK, BLOCKS, SLOTS, VOCABULARY = 512, 16, 24, 8, 200


class FakeRequest:
    def __init__(self, prompt, max_tokens, ends, min_tokens):
        self.prompt, self.ends, self.min_tokens = list(prompt), set(ends), min_tokens
        room = CONTEXT - len(self.prompt)
        self.max_tokens = room if max_tokens is None else min(max_tokens, room)
        self.tokens = []
        self.num_cached = 0
        self.end = None  # length, abort, or the token that it stopped at
        self.steps = asyncio.Queue()

    def step(self):
        sequence = self.prompt + self.tokens
        self.tokens.append(next_token(sequence))
        is_free = len(self.tokens) >= self.min_tokens
        if self.tokens[-1] in self.ends and is_free:
            self.end = self.tokens[-1]
        elif len(self.tokens) >= self.max_tokens:
            self.end = "length"

    def say(self):
        self.steps.put_nowait((self.tokens[-1:], self.end))


class FakeModel:
    def __init__(self):
        self.waiting, self.running = collections.deque(), []
        self.is_dead = False
        self.on_known = lambda parent, prefix: (
            None
        )  # called with each new block, and that before it
        self.on_forget = lambda: None
        self._known = set()
        self._work = asyncio.Event()
        self._task = None

    def ask(self, prompt, *, max_tokens, ends=(), min_tokens=0):
        request = FakeRequest(prompt, max_tokens, ends, min_tokens)
        self.waiting.append(request)
        self._work.set()
        self._task = self._task or asyncio.ensure_future(self._run())
        return request

    def abort(self, request):
        request.end = "abort"
        for where in (self.waiting, self.running):
            if request in where:
                where.remove(request)
        request.steps.put_nowait(([], "abort"))

    def forget(self):
        self._known.clear()
        self.on_forget()

    def close(self):
        if self._task is not None:
            self._task.cancel()

    async def _run(self):
        while not self.is_dead:
            self._work.clear()
            await self._step()
            if not self.running and not self.waiting:
                await self._work.wait()

    async def _step(self):
        began = self._admit()
        for request in self.running:
            request.step()
            request.say()
        for request in began:
            self._learn(request.prompt)
        for request in self.running:
            if request.end is not None:
                self._learn(request.prompt + request.tokens)
        self.running = [request for request in self.running if request.end is None]
        await asyncio.sleep(0)

    def _learn(self, tokens):
        parent = None
        for prefix in prefixes(tokens):
            if prefix not in self._known:
                self._known.add(prefix)
                self.on_known(parent, prefix)
            parent = prefix

    def _admit(self):
        began = []
        while self.waiting and len(self.running) < SLOTS:
            request = self.waiting.popleft()
            request.num_cached = BLOCK * sum(one in self._known for one in prefixes(request.prompt))
            self.running.append(request)
            began.append(request)
        return began


def next_token(sequence):
    return 3 + (31 * sum(sequence[-8:]) + 7 * len(sequence)) % (VOCABULARY - 3)


def prefixes(tokens):
    """What a later prompt may share: whole blocks, and never the last token."""
    ends = range(BLOCK, len(tokens), BLOCK)
    return [tuple(tokens[:end]) for end in ends]


def scored(token, num_top):
    """Log probabilities of the chosen token and the likeliest ones, by token, best first."""
    return {(token + i) % VOCABULARY: -0.1 - i for i in range(max(1, num_top))}
