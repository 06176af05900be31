#!/usr/bin/env bash
# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
# Usage: tools/dist_test.sh CONFIG CHECKPOINT PROCESSES [flags of tools/test.py]
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '3s/^# //p' "$0" >&2
    exit 2
fi
CONFIG=$1
CHECKPOINT=$2
PROCESSES=$3
shift 3
TOOLS=$(cd "$(dirname "$0")" && pwd)

# The module form of torchrun, so that it is the one of the python in use.
PYTHONPATH="$TOOLS/..${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$PROCESSES" \
    "$TOOLS/test.py" "$CONFIG" "$CHECKPOINT" --launcher pytorch "$@"
