#!/usr/bin/env bash
# Try the plan of README.md on a CPU, with the borrowed machine's Python, torch, triton and numpy.
#
#   benchmarks/gpu/rehearse.sh [TRACE]    # packs first; PACK=0 takes the archive that is there
#
# Loads vLLM's slimmed libraries, whose arguments are checked without running them, and runs the checks
# that need no GPU and no vLLM on a CPU. Needs python3.12 (or PYTHON312), a C compiler and 8 GB.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${VENV:-/tmp/gpukit-rehearsal}
stub=$(mktemp -d)
trap 'rm -rf "$stub"' EXIT
step() { echo "$(date -u +%T) $*"; }

step "environment"
if [ ! -e "$venv/installed" ]; then
  "${PYTHON312:-python3.12}" -m venv "$venv"
  # Of the packages that the machine has, those that the checks use.
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.11.0 triton==3.6.0 \
    numpy==2.5.2 transformers==5.17.0 accelerate==1.15.0 peft numba safetensors scipy matplotlib httpx \
    requests psutil pyyaml regex sentencepiece tiktoken pillow prometheus-client einops cloudpickle
  touch "$venv/installed"
fi
if [ "${PACK:-1}" = 1 ]; then
  step "pack"
  benchmarks/gpu/pack.sh "$@"
fi
step "unpack"
rm -rf /tmp/gpukit
export PYTHON=$venv/bin/python
benchmarks/gpu/unpack.sh

step "libraries"
# In place of the driver's library, which machines without a GPU lack.
site=/tmp/gpukit/site
libraries=("$site/vllm/_C_stable_libtorch.abi3.so" "$site/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
for library in "${libraries[@]}"; do
  nm --dynamic --undefined-only "$library"
done | awk '$2 ~ /^cu[A-Z]/ && !seen[$2]++ { print "int " $2 "(void) { return 999; }" }' >"$stub/cuda.c"
cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so.1" "$stub/cuda.c" 2>/dev/null
LD_LIBRARY_PATH=$stub PYTHONPATH=$site:$PWD "$PYTHON" - "${libraries[@]}" <<'PYTHON'
import sys

import torch

from benchmarks.gpu import vllm_checks

for library in sys.argv[1:]:
    torch.ops.load_library(library)
vllm_checks.flash_attention_version = lambda head_size=128: 3
for name, check in vllm_checks.kernel_checks("cpu").items():
    try:
        check()
    except NotImplementedError as error:
        # The arguments fit, and only the device does not.
        assert "from the 'CPU' backend" in str(error), error
        print(f"accepts its arguments: {name}")
    else:
        raise SystemExit(f"{name} ran on a CPU")
PYTHON

step "checks"
OUT=${OUT:-out/gpu-rehearsal} benchmarks/gpu/check.sh --kit --device cpu --size tiny --minutes 30 \
  --state "$stub/state" --only machine,family_attention,step_times,training,fsdp,decoders,figure4
step "end"
