"""The semantic cache: what hits, what does not, and its bounds."""

import msgspec
import pytest

from dynamo.semantic import cache, config, question_meaning, request_view
from dynamo.testing import clock
from semantic_configs import COMPLETION, CONFIG, SUM, chat, make_router


def key_of(body, headers=None, tenant=""):
    return cache.make_key(request_view.RequestView(body), headers or {}, tenant)


def make_cache(at=None, **settings):
    return cache.SemanticCache(config.CacheSettings(**settings), at or clock.VirtualClock())


@pytest.mark.parametrize(
    ("question", "other"),
    [
        ("What is the capital of France?", "Please tell me the capital of France"),
        ("Can you explain photosynthesis?", "explain photosynthesis!"),
        ("What's a hash table?", "what is the hash table"),
        ("What is a hash table?", "Please explain to me what a hash table is."),
        ("How do I reset my router?", "Show me how to reset my router"),
        ("How does a vaccine work?", "Explain how vaccines work"),
        ("Write me a poem", "Could you write a poem?"),
        ("How tall is Mount Everest?", "What is the height of Mount Everest?"),
        ("How do I sort a list in Python?", "How to sort a Python list?"),
        ("What is the longest river in Africa?", "Which river in Africa is the longest?"),
        ("How far is the moon from the earth?", "Distance between the earth and the moon"),
        ("Australia's capital", "What is the capital of Australia?"),
        ("Kidney stone symptoms", "kidney stone symptoms"),
        ("Define: Entropy. Be short!", "Please define entropy. be short"),
        ("Hi, How do I sort a list?", "I'd like to know how to sort a list"),
        ("Buy a TV", "buy a television"),
        ("Which symptoms does the flu have?", "What are the symptoms of the flu?"),
        ("How many bones does a human have?", "How many bones are in a human?"),
        ('What is a "hash table"?', "what is a hash table ?"),
        ("It's 3, no: 4. Why?!", "it\u2019s 3 no 4, why"),
        ("What is the capital of France, please?", "Can you please tell me the capital of France?"),
        ("How do I get gum out of hair?", "How do I remove gum from hair?"),
        ("Who wrote 'Hamlet'?", "Who is the author of Hamlet?"),
        ("What is the difference between TCP and UDP?", "Differences between UDP and TCP"),
        ("How do git fetch and git pull differ?", "How does git pull differ from git fetch?"),
        ("Distance from Paris to Rome", "How far is Rome from Paris?"),
        ("tell me a joke please", "Tell me a joke"),
        ("How do you say cheese in French?", "Translate cheese to French"),
    ],
)
def test_same_question_in_other_words_hits(question, other):
    store = make_cache()
    store.store(key_of(chat(question)), COMPLETION)

    assert store.find(key_of(chat(other)), 0.8).body == COMPLETION


@pytest.mark.parametrize(
    ("question", "other"),
    [
        ("What is 2 plus 3?", "What is 2 plus 4?"),
        ("What is 3 + 2?", "What is 3 - 2?"),
        ("Shift the curve to the left", "Shift the curve to the right"),
        ("log of x in base 2", "log of 2 in base x"),
        ("Is it safe to fly?", "Is it not safe to fly?"),
        ("Can I eat it?", "Can't I eat it?"),
        ("Who is Ann Lee?", "Who is Bob Lee?"),
        ("Who is the president?", "Who was the president?"),
        ("Does A imply B?", "Does B imply A?"),
        ("Which drugs are safe?", "Are drugs safe?"),
        ("What does a lion eat?", "Does a lion eat?"),
        (
            "Does the king of Spain like the queen of Rome",
            "Does the king of Rome like the queen of Spain",
        ),
        ("Is life in Rome as good as life in Bonn?", "Is life in Bonn as good as life in Rome?"),
        ("Tom's wife and Ann's boss", "Ann's wife and Tom's boss"),
        (
            "How is a list in C different from a set in Go?",
            "How is a list in Go different from a set in C?",
        ),
        ("How old is Ann?", "How old was Ann?"),
        ("How many people live in Rome?", "How many people were in Rome?"),
        ("How long should I learn Spanish?", "How long does it take to learn Spanish?"),
        ("Who was my king?", "Who was the king?"),
        ("Who was my king?", "Who is my king?"),
        ("Is Ann a doctor?", "Does Ann have a doctor?"),
        ("Who is the boss?", "Who has the boss?"),
        ("What is a cat?", "What does a cat have?"),
        ("Is there life on Mars?", "Is that life on Mars?"),
        ("What does ! mean in Bash?", "What does : mean in Bash?"),
        ("What is the ASCII code of !", "What is the ASCII code of ?"),
        (
            "What is the difference between ; and , in C",
            "What is the difference between : and ; in C",
        ),
        ("What does std:: mean?", "What does std mean?"),
        ("What does cd .. do?", "What does cd . do?"),
        ("What is a.b in Python?", "What is a:b in Python?"),
        ("What is 5!", "What is 5?"),
        ("Is the comma right in: Let's eat, grandma", "Is the comma right in: Let's eat grandma"),
        ("Is it a good sign if she writes :)", "Is it a good sign if she writes ;)"),
        ("How do I handle stress?", "How do you handle stress?"),
        ("How do birds fly?", "How did birds fly?"),
        ("How do I fly?", "How should I fly?"),
        ("Can I fly?", "How can I fly?"),
        ("Tell me what drugs are safe", "Are drugs safe?"),
        ("Did he write me?", "Did he write?"),
        ("How much vitamin A is in it?", "How much vitamin is in it?"),
        ("Convert a string to an int in C", "Convert an int to a string in C"),
        ("Is yoga good for cats?", "Are cats good for yoga?"),
        ("Does A imply B in logic?", "Does B imply A in logic?"),
        ("How do I turn on the light?", "How do I turn off the light?"),
        ("What do spiders eat?", "What eats spiders?"),
        ("What is a dog's breed?", "What is a dog breed?"),
        ("Where is the dogs' house?", "Where is the dogs house?"),
        ("Polish verbs", "polish verbs"),
        ("Name a Polish verb", "Name a polish verb"),
        ("How large is the US?", "How large is us?"),
        ("Is IT hard?", "Is it hard?"),
        ("Sort a list in C", "Sort a list in c"),
        ("What is a MB?", "What is a mB?"),
        ("How do you say please in French?", "How do you say thank you in French?"),
        ("How do I get data from a table?", "How do I delete data from a table?"),
        ("How do I get text out of a PDF?", "How do I remove text from a PDF?"),
        ("What is a form in HTML?", "What is HTML?"),
        ("What is the term of a patent?", "What is a patent?"),
        ("What is my IP address?", "What is an IP address?"),
        ("How long should I fast?", "How long can I fast?"),
        ("Who is the greatest player?", "Who is the biggest player?"),
        ("Is the difference between in and on big?", "Is the difference between at and on big?"),
        (
            "What is the difference between that and which?",
            "What is the difference between a and an?",
        ),
        # the words themselves are the matter
        ("How many letters are in doctor?", "How many letters are in physician?"),
        ("What rhymes with car?", "What rhymes with automobile?"),
        ("What is a synonym of large?", "What is a synonym of big?"),
        ("Fix the grammar: She have a cats", "Fix the grammar: She have a cat"),
        ("Translate my dog to French", "Translate the dog to French"),
        ("How do you spell movies?", "How do you spell movie?"),
        # synonyms that are told apart, or asked about
        ("Difference between big and large?", "Difference between large and huge?"),
        ("What is a flat?", "What is an apartment?"),
        # a text that comes with the question
        ("Is it a statement or a question: it is", "Is it a statement or a question: is it"),
        ("Which mood has 'the film is easy'?", "Which mood has 'the movie is simple'?"),
        (
            "Summarize this.\nThe dogs of a child bark.",
            "Summarize this.\nThe dog of the kids bark.",
        ),
        ("Write a poem about cats", "Write poems about cats"),
        # each of what is compared has words of its own
        (
            "Difference between a public key and a private token?",
            "Difference between a public token and a private key?",
        ),
        (
            "How do Python lists and Java arrays differ?",
            "How do Python arrays and Java lists differ?",
        ),
        ("How far is North Paris from South Rome?", "How far is North Rome from South Paris?"),
        ("What is the difference of 9 and 4?", "What is the difference of 4 and 9?"),
    ],
)
def test_question_of_another_meaning_misses(question, other):
    store = make_cache()
    store.store(key_of(chat(question)), COMPLETION)

    assert store.find(key_of(chat(other)), 0.0) is None


@pytest.mark.parametrize(
    ("question", "other"),
    [
        ("What does print('3' * 2) print?", "What does print(3 * 2) print?"),
        ('Is "1" + "2" a number?', "Is 1 + 2 a number?"),
        ("What is 5! / 3!?", "What is 5 / 3?"),
        ("Let f(x) = x^2. What is f'(3)?", "Let f(x) = x^2. What is f(3)?"),
        ("What is x?\nfor i in y:\n    x += 1\n    x *= 2", "What is x?\nfor i in y:\n    x += 1\nx *= 2"),
    ],
)  # fmt: skip
def test_quotes_and_indents_of_code_are_compared_exactly(question, other):
    assert key_of(chat(question)).digest != key_of(chat(other)).digest
    assert key_of(chat(question)).digest == key_of(chat(question)).digest


def test_words_of_a_long_question_are_compared_as_they_are():
    text = "word " * 120

    meanings = [question_meaning.read_meaning(text + form) for form in ("why", "how come")]

    assert meanings[0].key != meanings[1].key


def test_articles_and_plurals_of_a_long_question_count():
    """It brings a text with it, whose words may be the matter."""
    texts = [f"Who is meant here? {'A word. ' * 80}{end}" for end in ("The cats.", "A cat.")]

    keys = [key_of(chat(text)) for text in texts]

    assert keys[0].digest != keys[1].digest


def test_everything_else_is_compared_exactly():
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    last = {"role": "user", "content": "go on"}
    keys = [
        key_of(chat([*history, last])),
        key_of(chat([last])),
        key_of(chat([last], "other")),
        key_of(chat([last], temperature=0)),
        key_of(chat([{"role": "system", "content": "s"}, last])),
        key_of(chat([last]), tenant="t"),
    ]

    assert len({key.digest for key in keys}) == len(keys)
    assert key_of(chat([last], stream=True)).digest == keys[1].digest


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "https://example.com/A"}},
        {"type": "file", "file": {"file_id": "A"}},
    ],
)
def test_parts_beside_the_text_are_compared_exactly(part):
    text = {"type": "text", "text": "What is said here?"}
    changed = msgspec.json.decode(msgspec.json.encode(part).replace(b"A", b"B"))
    keys = [
        key_of(chat([{"role": "user", "content": parts}]))
        for parts in ([text, part], [text, changed], [text])
    ]

    assert len({key.digest for key in keys}) == 3
    assert key_of(chat(text["text"])).digest == keys[2].digest


@pytest.mark.parametrize(
    "fields",
    [
        *({"tools": [{}]}, {"seed": 1}, {"seed": 0}, {"n": 2}),
        *({"return_token_ids": True}, {"prompt_logprobs": 0}, {"echo": True}),
    ],
)
def test_request_with_side_effects_has_no_key(fields):
    assert key_of(chat("hello", **fields)) is None


@pytest.mark.parametrize("directive", ["no-cache", "No-Cache", "max-age=0, NO-STORE"])
def test_client_can_bypass_the_cache(directive):
    assert key_of(chat("hello"), {"cache-control": directive}) is None


def test_answer_that_explains_itself_is_not_given_again():
    assert key_of(chat("hello"), {"x-dynamo-explain": "1"}) is None


async def test_entry_ends_with_its_time():
    at = clock.VirtualClock()
    store = make_cache(at, ttl_seconds=60)
    key = key_of(chat("hello"))
    store.store(key, COMPLETION)

    await at.advance(61)

    assert store.find(key, 0) is None
    assert store.num_bytes == 0


@pytest.mark.parametrize(("policy", "remaining"), [("fifo", "bc"), ("lru", "ac"), ("lfu", "ac")])
def test_full_cache_evicts_by_its_policy(policy, remaining):
    store = make_cache(max_entries=2, eviction_policy=policy)
    keys = {name: key_of(chat(f"question {name}x")) for name in "abc"}
    for name in "ab":
        store.store(keys[name], COMPLETION)
    store.find(keys["a"], 0)
    store.store(keys["c"], COMPLETION)

    assert "".join(name for name in keys if store.find(keys[name], 0)) == remaining


def test_tenant_can_remove_its_entries():
    store = make_cache()
    store.store(key_of(chat("hello"), tenant="a"), COMPLETION)
    store.store(key_of(chat("hello"), tenant="b"), COMPLETION)

    assert store.invalidate("a") == 1
    assert len(store) == 1


@pytest.mark.parametrize("finish", ["length", "tool_calls", None])
def test_incomplete_answer_is_not_stored(finish):
    store = make_cache()
    completion = msgspec.json.decode(COMPLETION)
    completion["choices"][0]["finish_reason"] = finish
    store.store(key_of(chat("hello")), msgspec.json.encode(completion))

    assert len(store) == 0


def test_hit_is_replayed_as_a_stream_and_recorded_again():
    made = make_router()
    first = made.route(chat(SUM), {})
    made.cache.store(first.cache_key, COMPLETION)

    hit = made.route(chat(SUM + ".", stream=True), {})

    assert dict(hit.answer.headers)["x-vsr-cache-hit"] == "true"
    recorder = cache.StreamRecorder()
    for start in range(0, len(hit.answer.body), 7):
        recorder.feed(hit.answer.body[start : start + 7])
    choice = msgspec.json.decode(recorder.body())["choices"][0]
    assert choice["message"]["content"] == "It is four."


def event(**fields):
    chunk = {"id": "a", "created": 1, "model": "m", "choices": [], **fields}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_stream_is_replayed_with_its_reasoning_and_its_usage(name):
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    recorder = cache.StreamRecorder()
    for delta in ({name: "Two "}, {name: "twos."}, {"content": "4"}):
        recorder.feed(event(choices=[{"index": 0, "delta": delta}]))
    recorder.feed(event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]))
    recorder.feed(event(usage=usage) + b"data: [DONE]\n\n")
    made = make_router()
    made.cache.store(made.route(chat(SUM), {}).cache_key, recorder.body())

    whole = msgspec.json.decode(made.route(chat(SUM), {}).answer.body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = made.route(chat(SUM, **options), {}).answer.body.decode()

    message = {"role": "assistant", name: "Two twos.", "content": "4"}
    assert (whole["choices"][0]["message"], whole["usage"]) == (message, usage)
    assert f'"{name}":"Two twos."' in stream
    assert '"choices":[],"usage":{"prompt_tokens":3' in stream


@pytest.mark.parametrize("is_recorded", [False, True])
def test_replayed_chunks_have_the_fields_of_those_of_a_server(is_recorded):
    completion = msgspec.json.decode(COMPLETION) | {"system_fingerprint": "fp"}
    completion["choices"][0]["message"] |= {"tool_calls": [], "annotations": [], "audio": None}
    made = make_router()
    key, options = made.route(chat(SUM), {}).cache_key, {"include_usage": True}
    made.cache.store(key, msgspec.json.encode(completion))
    if is_recorded:
        recorder = cache.StreamRecorder()
        recorder.feed(made.route(chat(SUM, stream=True), {}).answer.body)
        made.cache.store(key, recorder.body())

    body = made.route(chat(SUM, stream=True, stream_options=options), {}).answer.body
    chunks = [msgspec.json.decode(row[6:]) for row in body.split(b"\n\n")[:-2]]

    assert {chunk["system_fingerprint"] for chunk in chunks} == {"fp"}
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert "usage" not in made.route(chat(SUM, stream=True), {}).answer.body.decode()


def test_stream_that_was_cut_off_has_no_body():
    recorder = cache.StreamRecorder()
    recorder.feed(b'data: {"id":"a","created":1,"model":"m","choices":[]}\n\n')

    assert recorder.body() is None


def test_answers_stay_within_their_bytes():
    store = make_cache(max_megabytes=1)
    completion = msgspec.json.decode(COMPLETION)
    completion["choices"][0]["message"]["content"] = "x" * 400_000
    for number in range(4):
        store.store(key_of(chat(f"question {number}")), msgspec.json.encode(completion))

    assert len(store) == 2
    assert store.num_bytes < 2**20


def test_less_similar_question_misses():
    store = make_cache()
    store.store(key_of(chat("a the of what is life")), COMPLETION)

    assert store.find(key_of(chat("life")), 1.0) is None


@pytest.mark.parametrize("keeps_text", [True, False])
def test_stream_that_is_too_long_to_be_kept_tells_its_usage(keeps_text):
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    recorder = cache.StreamRecorder(keeps_text=keeps_text)
    for _ in range(9):
        recorder.feed(event(choices=[{"index": 0, "delta": {"content": "x" * cache.MAX_BODY}}]))
    recorder.feed(event(usage=usage) + b"data: [DONE]\n\n")

    assert recorder.body() is None
    assert recorder.usage == usage


def test_stream_with_an_event_that_is_too_long_to_be_read_has_no_body():
    recorder = cache.StreamRecorder()
    long = event(choices=[{"index": 0, "delta": {"content": "x" * 2 * cache.MAX_BODY}}])
    for start in range(0, len(long), 2**16):
        recorder.feed(long[start : start + 2**16])
    end = {"index": 0, "delta": {"content": "."}, "finish_reason": "stop"}
    recorder.feed(event(choices=[end]) + b"data: [DONE]\n\n")

    assert recorder.body() is None


@pytest.mark.parametrize("event", [b"data: {", b"data: 3", b'data: {"id":1}'])
def test_stream_of_another_shape_has_no_body(event):
    recorder = cache.StreamRecorder()
    recorder.feed(event + b"\n\ndata: [DONE]\n\n")
    recorder.feed(b"more")

    assert recorder.body() is None


PARTS = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "4"}]


@pytest.mark.parametrize(
    "choice",
    [
        {"index": 0, "delta": {"content": PARTS}},
        {"index": 0, "delta": {"reasoning_content": PARTS}},
        {"index": "0", "delta": {"content": "4"}},
        {"index": 0, "delta": {"refusal": "I will not."}},
        {"index": 0, "delta": {"audio": {"data": "UklGRg=="}}},
        {"index": 0, "delta": {"function_call": {"name": "f"}}},
    ],
)
def test_stream_of_parts_has_no_body(choice):
    recorder = cache.StreamRecorder()
    recorder.feed(event(choices=[{"index": 0, "delta": {"content": ""}}]))
    recorder.feed(event(choices=[{**choice, "finish_reason": "stop"}]) + b"data: [DONE]\n\n")

    assert recorder.body() is None


@pytest.mark.parametrize(
    "body",
    [
        msgspec.json.encode(
            {"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": PARTS}}]}
        ),
        b'{"choices": [{"finish_reason": "stop", "message": {"content": "4"}}]}',
        COMPLETION.replace(b"It is", b"It \xff"),
        COMPLETION.replace(b'"content":"It is four."', b'"content":null,"refusal":"No."'),
        b"[" * 100_000,
    ],
)
def test_answer_that_cannot_be_given_again_is_not_kept(body):
    store = make_cache()

    assert not store.store(key_of(chat(SUM)), body)


def test_caller_deletes_the_entry_that_it_was_given_and_no_other_caller_does():
    made = make_router()
    first = made.route(chat(SUM), {}, "ann")
    made.cache.store(first.cache_key, COMPLETION)
    name = dict(made.route(chat(SUM), {}, "ann").answer.headers)["x-vsr-cache-key"]

    assert not made.cache.delete(name, "bob")
    assert not made.cache.delete("no name", "ann")
    deleting = made.route(chat(SUM), {cache.DELETE_HEADER: f"{'0' * 32}, {name}"}, "ann")

    assert deleting.answer is None
    assert dict(deleting.explanation.headers())["x-vsr-cache-key"] == name
    assert len(made.cache) == 0


def test_conversations_of_other_decisions_do_not_share_an_answer():
    cached = (
        "plugins: [{type: semantic-cache, configuration: {enabled: true}}]\n  - name: sums_decision"
    )
    made = make_router(CONFIG.replace("- name: sums_decision", f"  {cached}", 1))
    for session, opening in (("1", SUM), ("2", "python")):
        made.route(chat(opening), {"x-session-id": session})
    first = made.route(chat("and now?"), {"x-session-id": "1"})
    if first.cache_key is not None:
        made.cache.store(first.cache_key, COMPLETION)

    second = made.route(chat("and now?"), {"x-session-id": "2"})

    assert (first.explanation.decision, second.explanation.decision) == (
        "sums_decision",
        "code_decision",
    )
    assert second.answer is None


def test_other_wording_that_another_decision_takes_misses():
    cached = "plugins: [{type: semantic-cache, configuration: {enabled: true}}]"
    keywords = CONFIG.replace("[solve, equation]", "[repair, automobile]")
    made = make_router(
        keywords.replace("[python, ", "[car, ").replace(
            "effort: high}]", f"effort: high}}]\n    {cached}"
        )
    )
    first = made.route(chat("How do I repair a car?"), {})
    made.cache.store(first.cache_key, COMPLETION)

    second = made.route(chat("How do I repair an automobile?"), {})

    decisions = [outcome.explanation.decision for outcome in (first, second)]
    assert decisions == ["code_decision", "sums_decision"]
    assert second.answer is None
    assert second.cache_key.digest == first.cache_key.digest


def test_changed_configuration_gives_no_answers_of_the_former():
    made = make_router()
    made.cache.store(made.route(chat(SUM), {}).cache_key, COMPLETION)

    made = made.with_config(made.loaded)
    num_kept = len(made.cache)
    made = made.with_config(make_router(CONFIG.replace("default_model: general", "")).loaded)

    assert num_kept == 1
    assert len(made.cache) == 0


@pytest.mark.parametrize(
    ("configuration", "section", "expected"),
    [
        ("similarity_threshold: 0", "similarity_threshold: 0.9", 0),
        ("enabled: true", "similarity_threshold: 0", 0),
        ("enabled: true", "max_entries: 3", 0.8),
    ],
)
def test_threshold_of_the_decision_counts_before_that_of_the_cache(
    monkeypatch, configuration, section, expected
):
    text = CONFIG.replace(
        "semantic-cache, configuration: {enabled: true}",
        f"semantic-cache, configuration: {{{configuration}}}",
    )
    made = make_router(text.replace("max_entries: 3", section))
    thresholds = []
    monkeypatch.setattr(made.cache, "find", lambda key, threshold: thresholds.append(threshold))
    made.route(chat(SUM), {})

    assert thresholds == [expected]


def test_quotes_without_end_are_read_once():
    """Parted in all ways, these would take the rest of the day."""
    quotes = '"' * 1_000_000

    assert question_meaning.read_signs(f"say{quotes},, now") == [f"{quotes},,"]
    assert question_meaning.read_signs(f"say{quotes}, now") == []
