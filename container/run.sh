#!/usr/bin/env bash
# run.sh [-it] [--framework NAME] [--image IMAGE] [-v|--mount HOST:CONTAINER] [--gpus all|none] [--dry-run] [-- COMMAND]: run the image
set -euo pipefail
framework=native image="" gpus="" run="" command=() flags=(--rm --network host --ipc host)
[ -e /dev/nvidiactl ] && gpus=all
while [ $# -gt 0 ]; do
    case "$1" in
    -it | -i | -t) flags+=("$1"); [ ${#command[@]} -gt 0 ] || command=(bash); shift ;;
    --framework) framework=$(tr '[:upper:]' '[:lower:]' <<<"$2"); shift 2 ;;
    --image) image=$2; shift 2 ;;
    --gpus) gpus=${2#none}; shift 2 ;;
    -v | --mount) flags+=(-v "$2"); shift 2 ;;
    --dry-run) run=echo; shift ;;
    -h | --help) sed -n 2p "$0" | cut -c3-; exit ;;
    --) shift; command=("$@"); break ;;
    *) echo "run.sh: expected the flags that --help shows, got $1" >&2; exit 2 ;;
    esac
done
[ -z "$gpus" ] || flags+=(--gpus "$gpus")
mount_cache() { # FOLDER PLACE: one that is missing would be made by Docker, for root alone
    case "$1" in /*) folder=$1 ;; *) folder=$PWD/$1 ;; esac # Docker takes another path for the name of a volume
    [ -n "$run" ] || mkdir -p "$folder"
    flags+=(-v "$folder:$2")
}
mount_cache "${HF_HOME:-${HOME:?expected HOME or HF_HOME}/.cache/huggingface}" /models
[ -z "${HF_HUB_CACHE:-}" ] || mount_cache "$HF_HUB_CACHE" /models/hub
# As this user, whose caches these are; torch asks for a name.
$run docker run "${flags[@]}" --user "$(id -u):$(id -g)" -e HOME=/tmp -e USER=dynamo \
    "${image:-dynamo:latest-$framework}" ${command[@]+"${command[@]}"}
