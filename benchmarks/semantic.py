"""The semantic router's CPU time for a request, with keyword rules only and with the fast classifiers, and its memory.

The memory is that of a process that routes different requests of different conversations and caches their answers.
"""

import argparse
import sys
import time
from pathlib import Path

import msgspec

from dynamo.base import clock
from dynamo.semantic import config_file, router
from dynamo.semantic.classifiers import profile

RULES = """
default_model: general
keyword_rules:
  - {name: code, keywords: [python, "c++", function, compile, bug]}
  - {name: urgent, operator: AND, keywords: [urgent, please]}
decisions:
  - name: code_decision
    rules: {conditions: [{type: keyword, name: code}]}
    modelRefs: [{model: coder}]
    plugins: [{type: system_prompt, configuration: {system_prompt: Write code.}}]
"""
FAST = (
    RULES.replace("decisions:", "prompt_guard: {enabled: true}\ndecisions:").replace(
        "plugins: [", "plugins: [{type: pii, configuration: {}}, "
    )
    + """
  - name: math_decision
    rules: {conditions: [{type: domain, name: math}]}
    modelRefs: [{model: general}]
"""
)
SENTENCE = "The function of the village council was to decide which fields were sown in spring. "
CACHED = (
    FAST.replace("{type: pii", "{type: semantic-cache, configuration: {}}, {type: pii")
    + "semantic_cache: {enabled: true, max_entries: 1000}\n"
)
NUM_REQUESTS = 500
MOST_GROWTH_MB = 64  # of the process, from the first tenth of the requests to the last


def measure(text: str, num_tokens: int) -> float:
    """Return the CPU-milliseconds of a request with a prompt of some `num_tokens` tokens."""
    fast = profile.load_profile()
    loaded = config_file.parse(text.encode(), fast.categories)
    made = router.SemanticRouter(loaded, fast, clock.SystemClock())
    prompt = (SENTENCE * num_tokens)[: num_tokens * 4 + num_tokens // 2]
    bodies = [
        msgspec.json.encode(
            {"model": "auto", "messages": [{"role": "user", "content": f"{number} {prompt}"}]}
        )
        for number in range(NUM_REQUESTS)
    ]
    for body in bodies[:50]:
        made.route(body, {})
    start = time.process_time()
    for body in bodies:
        made.route(body, {})
    return (time.process_time() - start) / NUM_REQUESTS * 1000


def measure_memory(num_requests: int) -> bool:
    """Print the resident memory after each tenth of the requests; return whether it stays bounded."""
    fast = profile.load_profile()
    made = router.SemanticRouter(
        config_file.parse(CACHED.encode(), fast.categories), fast, clock.SystemClock()
    )
    choice = {"index": 0, "message": {"role": "assistant", "content": SENTENCE * 10}}
    answer = msgspec.json.encode({"choices": [choice | {"finish_reason": "stop"}]})
    grown = []
    for number in range(1, num_requests + 1):
        text = f"{number}: which function of python has the name of{number * 7919}? {SENTENCE}"
        messages = [{"role": "user", "content": text}]
        body = msgspec.json.encode({"model": "auto", "messages": messages})
        outcome = made.route(body, {"x-session-id": str(number)})
        if outcome.cache_key is not None:
            made.cache.store(outcome.cache_key, answer)
        if number % (num_requests // 10) == 0:
            grown.append(resident_mb())
            print(
                f"{number:>8} requests: {grown[-1]:.0f} MB, {len(made.cache)} answers, "
                f"{len(made.conversations)} keys of conversations",
                flush=True,
            )
    return grown[-1] - grown[0] <= MOST_GROWTH_MB


def resident_mb() -> float:
    """Return the memory of this process that is resident, in megabytes."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1000


def main() -> int:
    """Print the table, and the memory; return 1 if it grows beyond its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="requests for the memory")
    options = parser.parse_args()
    print(f"{'CPU-ms for a request':<24} {'rules only':>12} {'fast profile':>14}")
    for num_tokens in (32, 128, 512, 2048):
        rules, fast = measure(RULES, num_tokens), measure(FAST, num_tokens)
        print(f"{num_tokens:>5} tokens {'':<11} {rules:>12.3f} {fast:>14.3f}")
    return 0 if measure_memory(options.requests) else 1


if __name__ == "__main__":
    sys.exit(main())
