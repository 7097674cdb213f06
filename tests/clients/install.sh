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
for client in pydantic_ai aiperf guidellm; do
  test -x "$into/$client/bin/python" || python3 -m venv "$into/$client"
done
install "$into/pydantic_ai" pydantic_ai
install "$into/aiperf" aiperf
# guidellm needs torch, and takes any: pip finds the CPU's build where there is one, uv takes CUDA's of 5 GB
"$into/guidellm/bin/python" -m pip install --quiet 'torch==2.13.0' && install "$into/guidellm" guidellm
npm install --silent --no-fund --no-audit --prefix "$into/npm" @anthropic-ai/claude-code @openai/codex || echo "not installed: Claude Code and Codex"
