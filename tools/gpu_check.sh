#!/usr/bin/env bash
# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
#
# Check mmprefetch on a machine with an NVIDIA GPU, in under 5 minutes and without a network: the
# GPU tests, the same under torch's CUDA sanitizer, then stock / timm-style / mmprefetch compared.
#
#   tools/gpu_check.sh [WHEELS_DIR]          exit status 2 where there is no CUDA device
#   tools/gpu_check.sh --try [WHEELS_DIR]    try the script itself, on CPU and small
#
# PYTHON names the interpreter (default python3). It brings torch 2.11 or newer with triton, numpy,
# cv2 and pytest. What else is needed is installed into a temporary folder from WHEELS_DIR, and
# only where it cannot be imported; on a machine with a network, fill that folder with
#
#   pip download --no-deps --dest WHEELS_DIR --only-binary :all: --python-version 3.12 \
#       mmengine==0.10.7 addict contourpy cycler fonttools kiwisolver markdown-it-py matplotlib \
#       mdurl pillow platformdirs pygments pyparsing python-dateutil pyyaml rich 'setuptools<80' \
#       termcolor yapf
#
# with the Python version of the GPU machine, since some of these wheels are made for one.
set -euo pipefail

# Module that Python imports, and the distribution that has it.
NEEDED=(
    addict:addict contourpy:contourpy cycler:cycler dateutil:python-dateutil distutils:setuptools
    fontTools:fonttools kiwisolver:kiwisolver markdown_it:markdown-it-py matplotlib:matplotlib
    mdurl:mdurl mmengine:mmengine PIL:pillow platformdirs:platformdirs pygments:pygments
    pyparsing:pyparsing rich:rich termcolor:termcolor yaml:pyyaml yapf:yapf
)
PYTHON=${PYTHON:-python3}

try=no
if [[ ${1:-} == --try ]]; then
    try=yes
    shift
fi
if (( $# > 1 )) || [[ ${1:-} == -* ]]; then
    echo "usage: $0 [--try] [WHEELS_DIR]" >&2
    exit 64
fi
wheels=
if (( $# == 1 )); then
    if [[ ! -d $1 ]]; then
        echo "$0: WHEELS_DIR '$1' is not a folder" >&2
        exit 64
    fi
    wheels=$(cd "$1" && pwd)
fi
cd "$(dirname "$0")/.."

"$PYTHON" -c 'import torch; print("torch", torch.__version__)'
if [[ $try == no ]] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
then
    echo "$0: torch finds no CUDA device here. Run it on a machine with an NVIDIA GPU, with the" \
        'CUDA build of torch; --try tries the script itself on CPU.' >&2
    exit 2
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH=$PWD:$site PYTHONDONTWRITEBYTECODE=1

missing() {
    "$PYTHON" - "$@" <<'PY'
import importlib.util, sys
for pair in sys.argv[1:]:
    module, distribution = pair.split(':')
    if importlib.util.find_spec(module) is None:
        print(distribution)
PY
}

mapfile -t absent < <(missing "${NEEDED[@]}")
if (( ${#absent[@]} )); then
    if [[ -z $wheels ]]; then
        echo "$0: these are not installed here: ${absent[*]}. Give the folder that has their" \
            "wheels: $0 WHEELS_DIR (see the head of this script)." >&2
        exit 64
    fi
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
        --find-links "$wheels" --target "$site" "${absent[@]}"
    # setuptools in a folder of its own does not bring distutils back until it is imported.
    if [[ " ${absent[*]} " == *' setuptools '* ]]; then
        echo 'import setuptools' >"$site/sitecustomize.py"
    fi
fi
"$PYTHON" -c 'import distutils, matplotlib.figure, mmengine.runner, mmprefetch, pytest
print("mmengine", mmengine.__version__)'

failed=()
step() {
    local name=$1 limit=$2
    shift 2
    printf '\n== %s\n' "$name"
    timeout "$limit" "$@" || failed+=("$name (exit status $?)")
}

tests=("$PYTHON" -m pytest -q -p no:cacheprovider tests/test_gpu.py)
compare=("$PYTHON" tools/gpu_check_compare.py)
if [[ $try == yes ]]; then
    export OMP_NUM_THREADS=1
    compare+=(--device cpu --small --no-amp)
fi
step 'GPU tests' 90 "${tests[@]}"
if [[ $try == no ]]; then  # the sanitizer itself needs a device
    step 'GPU tests under the CUDA sanitizer' 90 env TORCH_CUDA_SANITIZER=1 "${tests[@]}"
fi
step 'comparison' 110 "${compare[@]}"

if (( ${#failed[@]} )); then
    printf '\nfailed: %s\n' "${failed[@]}"
    exit 1
fi
printf '\nall passed\n'
