"""Claude Code with its default settings, not interactively. Its prompt has some 34,000 tokens.

The simulated engine never ends its turn, so an answer that Claude Code has read ends by its limit of tokens.
"""

import json

import client_rig


def test_claude_code_reads_an_answer(simulated, tmp_path):
    command = client_rig.find_client("npm/node_modules/.bin/claude")
    said = client_rig.run_client(
        *(command, "-p", "Say hello", "--output-format", "json"),
        statuses=(0, 1),
        HOME=str(tmp_path),
        ANTHROPIC_BASE_URL=simulated.url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL=simulated.model,
        ANTHROPIC_SMALL_FAST_MODEL=simulated.model,
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="64",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    result = json.loads(said[said.index("{") :].splitlines()[0])

    assert "exceeded the 64 output token maximum" in result["result"]
    assert result["usage"]["output_tokens"] >= 64
