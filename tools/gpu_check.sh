#!/usr/bin/env bash
# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
#
# Check mmprefetch on a machine with an NVIDIA GPU, in some 5 minutes (never more than 9 and a half)
# and without a network: versions, kernel, GPU tests, times of the fused pass, traces, a comparison
# with mmengine's loop and loaders after timm's manner, and the tests under torch's CUDA sanitizer.
#
#   tools/gpu_check.sh [--log FILE] [WHEELS_DIR]          exit status 2 without a CUDA device
#   tools/gpu_check.sh --try [--log FILE] [WHEELS_DIR]    try the script itself, on CPU and small
#
# Times are printed and decide nothing: the exit status is 1 where a result is wrong or a step
# crashes. All that is printed goes to FILE too; by default to gpu_check.log in the folder that OUT
# names, else in a temporary one. The traces are put beside it.
#
# PYTHON names the interpreter (default python3). It brings torch 2.11 or newer with triton, numpy,
# cv2 and pytest; timm is measured where it is installed. What else is needed is installed into a
# temporary folder from WHEELS_DIR, and only where it cannot be imported; on a machine with a
# network, fill that folder with
#
#   pip download --no-deps --dest WHEELS_DIR --only-binary :all: --python-version 3.12 \
#       mmengine==0.10.7 addict contourpy cycler fonttools kiwisolver markdown-it-py matplotlib \
#       mdurl packaging pillow platformdirs pygments pyparsing python-dateutil pyyaml rich \
#       'setuptools<80' termcolor yapf
#
# with the Python version of the GPU machine, since some of these wheels are made for one.
set -euo pipefail

# Module that Python imports, and the distribution that has it: what mmengine needs, and that needs.
NEEDED=(
    addict:addict contourpy:contourpy cycler:cycler dateutil:python-dateutil fontTools:fonttools
    kiwisolver:kiwisolver markdown_it:markdown-it-py matplotlib:matplotlib mdurl:mdurl
    mmengine:mmengine packaging:packaging PIL:pillow platformdirs:platformdirs pygments:pygments
    pyparsing:pyparsing rich:rich setuptools:setuptools termcolor:termcolor yaml:pyyaml yapf:yapf
)
BROUGHT=(torch:torch numpy:numpy cv2:opencv-python-headless pytest:pytest)
PYTHON=${PYTHON:-python3}
TOTAL=570  # seconds

usage() {
    echo "usage: $0 [--try] [--log FILE] [WHEELS_DIR]" >&2
    exit 64
}

try=no log= wheels=
while (( $# )); do
    case $1 in
        --try) try=yes ;;
        --log)
            (( $# > 1 )) || usage
            log=$2
            [[ $log == /* ]] || log=$PWD/$log
            shift
            ;;
        -*) usage ;;
        *)
            [[ -z $wheels ]] || usage
            if [[ ! -d $1 ]]; then
                echo "$0: WHEELS_DIR '$1' is not a folder" >&2
                exit 64
            fi
            wheels=$(cd "$1" && pwd)
            ;;
    esac
    shift
done
cd "$(dirname "$0")/.."

# Of pairs module:distribution, print the distributions of those that cannot be imported.
missing() {
    "$PYTHON" - "$@" <<'PY'
import importlib.machinery, sys
for pair in sys.argv[1:]:
    module, distribution = pair.split(':')
    # Nothing is imported: setuptools, once imported, lets others see what it has inside.
    if importlib.machinery.PathFinder.find_spec(module) is None:
        print(distribution)
PY
}

brought=$(missing "${BROUGHT[@]}")
if [[ -n $brought ]]; then
    echo "$0: $PYTHON has to bring, and does not have:" $brought >&2
    exit 64
fi
if [[ $try == no ]] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
then
    echo "$0: torch finds no CUDA device here. Run it on a machine with an NVIDIA GPU, with the" \
        'CUDA build of torch; --try tries the script itself on CPU.' >&2
    exit 2
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH=$PWD:$site PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

absent=$(missing "${NEEDED[@]}")
if [[ -n $absent ]]; then
    if [[ -z $wheels ]]; then
        echo "$0: these are not installed here:" $absent "- give the folder that has their" \
            "wheels: $0 WHEELS_DIR (see the head of this script)." >&2
        exit 64
    fi
    lacking=$("$PYTHON" - "$wheels" $absent <<'PY'
import pathlib, re, sys
plain = lambda name: re.sub(r'[-_.]+', '-', name).lower()
there = {plain(path.name.split('-')[0]) for path in pathlib.Path(sys.argv[1]).glob('*.whl')}
print(*[name for name in sys.argv[2:] if plain(name) not in there])
PY
    )
    if [[ -n $lacking ]]; then
        echo "$0: $wheels has no wheel of: $lacking (see the head of this script)." >&2
        exit 64
    fi
    # Nothing but these: what the interpreter brings, torch above all, is neither fetched nor
    # replaced.
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-index \
        --no-deps --find-links "$wheels" --target "$site" $absent
    # setuptools in a folder of its own does not bring distutils back until it is imported.
    if [[ " "$absent" " == *setuptools* ]]; then
        echo 'import setuptools' >"$site/sitecustomize.py"
    fi
fi

if [[ -z $log ]]; then
    log=${OUT:-$(mktemp -d)}/gpu_check.log
fi
logs=$(dirname "$log")
mkdir -p "$logs"
exec > >(tee "$log") 2>&1
tee=$!
echo "log: $log"

"$PYTHON" - <<'PY'
import importlib, platform
import matplotlib.figure, mmengine.runner, pytest, torch
import mmprefetch
import distutils.errors  # mmengine asks for it when a runner is made

print('python', platform.python_version(), platform.machine())
for name in ('torch', 'triton', 'timm', 'numpy', 'cv2', 'mmengine', 'mmprefetch'):
    try:
        print(name, importlib.import_module(name).__version__)
    except Exception as error:
        print(name, 'cannot be imported:', repr(error))
print('CUDA', torch.version.cuda, 'cuDNN', torch.backends.cudnn.version())
for index in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(index))
PY

failed=()
# step NAME SECONDS COMMAND...: what is cut short by its time is an error of tests alone.
step() {
    local name=$1 limit=$2 left=$(( TOTAL - SECONDS )) status=0
    shift 2
    printf '\n== %s (after %d s)\n' "$name" "$SECONDS"
    if (( left < 10 )); then
        echo 'left out: there is no time left'
        return
    fi
    timeout --kill-after=10 "$(( limit < left ? limit : left ))" "$@" || status=$?
    if (( status == 124 )) && [[ $name != tests* ]]; then
        echo "stopped after $limit s"
    elif (( status )); then
        failed+=("$name (exit status $status)")
    fi
}

tests=("$PYTHON" -m pytest -q -p no:cacheprovider -o faulthandler_timeout=100 --durations=5
       tests/test_gpu.py)
measure=() trace=(--keep "$logs") compare=()
if [[ $try == yes ]]; then
    export OMP_NUM_THREADS=1
    measure+=(--device cpu --small)
    trace=(--steps 3)
    compare+=(--no-amp)
fi
# The first step compiles the kernel's variants, which may take minutes.
step 'tests of the kernel' 240 "${tests[@]}" -k kernel
step 'tests of the engine' 200 "${tests[@]}" -k 'not kernel'
step 'fused pass' 90 "$PYTHON" tools/gpu_check_kernel.py "${measure[@]}"
step 'traces' 100 "$PYTHON" tools/gpu_check_trace.py "${measure[@]}" "${trace[@]}"
step 'comparison' 220 "$PYTHON" tools/gpu_check_compare.py "${measure[@]}" "${compare[@]}"
if [[ $try == no ]]; then  # the sanitizer itself needs a device
    step 'tests under the CUDA sanitizer' 90 \
        env TORCH_CUDA_SANITIZER=1 "${tests[@]}" -k 'not kernel'
fi

status=0
if (( ${#failed[@]} )); then
    printf '\nfailed: %s\n' "${failed[@]}"
    status=1
else
    printf '\nall passed, in %d s\n' "$SECONDS"
fi
echo "log: $log"
# Let the log be written to its end.
exec >&- 2>&-
wait "$tee" || true
exit "$status"
