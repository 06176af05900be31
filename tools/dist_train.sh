#!/usr/bin/env bash
# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
# Usage: tools/dist_train.sh CONFIG PROCESSES [flags of tools/train.py]
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '3s/^# //p' "$0" >&2
    exit 2
fi
CONFIG=$1
PROCESSES=$2
shift 2
TOOLS=$(cd "$(dirname "$0")" && pwd)

# The module form of torchrun, so that it is the one of the python in use.
PYTHONPATH="$TOOLS/..${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$PROCESSES" \
    "$TOOLS/train.py" "$CONFIG" --launcher pytorch "$@"
