"""The semantic router's CPU time for a request, with keyword rules only and with the fast classifiers."""

import time

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
NUM_REQUESTS = 500


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


def main() -> None:
    """Print the table."""
    print(f"{'CPU-ms for a request':<24} {'rules only':>12} {'fast profile':>14}")
    for num_tokens in (32, 128, 512, 2048):
        rules, fast = measure(RULES, num_tokens), measure(FAST, num_tokens)
        print(f"{num_tokens:>5} tokens {'':<11} {rules:>12.3f} {fast:>14.3f}")


if __name__ == "__main__":
    main()
