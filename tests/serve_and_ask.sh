#!/usr/bin/env bash
# Run a command that serves a model, send it the request that it prints, stop it, and check that nothing is left.
#     tests/serve_and_ask.sh PORT COMMAND...     (COMMAND listens on PORT and prints a curl line)
set -euo pipefail
port=$1
shift
log=$(mktemp)
"$@" > "$log" 2>&1 &
serve=$!
trap 'kill -TERM "$serve" 2>/dev/null || true; rm -f "$log"' EXIT
for _ in $(seq 300); do
  grep -q '^ *curl ' "$log" && break
  kill -0 "$serve" 2>/dev/null || { cat "$log"; echo "$1 ended before it was ready"; exit 1; }
  sleep 0.2
done
cat "$log"
curl_line=$(grep -m1 -A3 '^ *curl ' "$log" | sed -n '/curl/,/}.$/p')
answer=$(bash -c "$curl_line")
echo "$answer"
grep -q '"content"' <<< "$answer"

kill -TERM "$serve"
wait "$serve" || true
if curl -s -m 2 "http://127.0.0.1:$port/live" > /dev/null; then echo "$1 left a process behind"; exit 1; fi
echo "$*: served the built-in model and left nothing behind"
