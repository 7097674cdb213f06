#!/usr/bin/env bash
# Package the example graph by `dynamo build`, unpack the archive beside an empty environment with the wheel, serve it there
# over the simulated engine, and send it the curl of the article (README, docs/articles.md).
#     tests/build_and_serve.sh WHEEL PYTHON       (PYTHON: an environment of ours, whose `dynamo build` is used)
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
python=$(realpath --no-symlinks "$2") # the link itself: only it leads to its environment
port=${PORT:-18020}
model=deepseek-ai/DeepSeek-R1-Distill-Llama-8B

work=$(mktemp -d)
serve=
trap '[ -z "$serve" ] || kill -TERM "$serve" 2>/dev/null || true; rm -rf "$work"' EXIT
export DYNAMO_HOME="$work/home"
built=$(cd "$here/examples/llm" && "$python" -m dynamo.cli build graphs.agg:Frontend --output "$work")
echo "$built"
grep -q 'Successfully built frontend:' <<< "$built"

unset PYTHONPATH
"$python" -m venv "$work/empty"
mkdir "$work/unpacked"
tar -xzf "$work"/frontend-*.tar.gz -C "$work/unpacked"
"$work/empty/bin/pip" install --quiet --constraint "$work/unpacked/requirements.lock" "$wheel[sdk]"
cd "$work/unpacked/src"
# configs/agg.yaml has flags of vLLM, which the simulated engine does not take.
echo "{Frontend: {port: $port, served_model_name: $model}, VllmWorker: {}}" > "$work/agg.yaml"
"$work/empty/bin/dynamo" serve graphs.agg:Frontend -f "$work/agg.yaml" \
  --VllmWorker.ServiceArgs.module=dynamo.mocker > "$work/log" 2>&1 &
serve=$!
for _ in $(seq 300); do
  grep -q 'answers at' "$work/log" && break
  kill -0 "$serve" 2>/dev/null || { cat "$work/log"; echo "the graph ended before it answered"; exit 1; }
  sleep 0.2
done
cat "$work/log"
answer=$(curl -sS "localhost:$port/v1/chat/completions" -H 'Content-Type: application/json' -d "{
    \"model\": \"$model\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello, how are you?\"}],
    \"stream\": false, \"max_tokens\": 300}")
echo "$answer"
grep -q '"content"' <<< "$answer"
kill -TERM "$serve"
wait "$serve" || true
serve=
echo "the archive of dynamo build serves in an empty environment"
