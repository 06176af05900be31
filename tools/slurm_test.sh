#!/usr/bin/env bash
# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
# Usage: [GPUS=8] [GPUS_PER_NODE=8] [CPUS_PER_TASK=5] [SRUN_ARGS=...] tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [flags of tools/test.py]
set -euo pipefail

if [ $# -lt 4 ]; then
    sed -n '3s/^# //p' "$0" >&2
    exit 2
fi
PARTITION=$1
JOB_NAME=$2
CONFIG=$3
CHECKPOINT=$4
shift 4
GPUS=${GPUS:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
TOOLS=$(cd "$(dirname "$0")" && pwd)

# SRUN_ARGS is split into words on purpose.
# shellcheck disable=SC2086
PYTHONPATH="$TOOLS/..${PYTHONPATH:+:$PYTHONPATH}" exec srun -p "$PARTITION" \
    --job-name="$JOB_NAME" \
    --gres=gpu:"$GPUS_PER_NODE" \
    --ntasks="$GPUS" \
    --ntasks-per-node="$GPUS_PER_NODE" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$TOOLS/test.py" "$CONFIG" "$CHECKPOINT" --launcher slurm "$@"
