#!/usr/bin/env bash
# Install the clients of tests/clients into the environment DIRECTORY, and those that conflict into environments in it.
#     tests/clients/install.sh DIRECTORY
# What cannot be installed here is said, and its tests are skipped.
set -uo pipefail
here=$(dirname "$(realpath "$0")")
mkdir -p "$1"
into=$(realpath "$1")
test -x "$into/bin/uv" || { python3 -m venv "$into" && "$into/bin/python" -m pip install --quiet uv; } || exit 1
install() { "$into/bin/uv" pip install --quiet --python "$1/bin/python" --requirement "$here/$2.txt" || echo "not installed: $2"; }
install "$into" requirements
test -x "$into/pydantic_ai/bin/python" || "$into/bin/uv" venv --quiet "$into/pydantic_ai"
install "$into/pydantic_ai" pydantic_ai
npm install --silent --no-fund --no-audit --prefix "$into/npm" @anthropic-ai/claude-code @openai/codex || echo "not installed: Claude Code and Codex"
