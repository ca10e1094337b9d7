#!/bin/bash
# Download the wheels that are missing on the GPU machine (Python 3.12, x86-64) to .whl/, which git ignores:
#   bash scripts/gpu/fetch_wheels.sh
# The machine has torch, triton, transformers, peft, huggingface_hub, safetensors, tokenizers, jinja2, pyarrow, fsspec,
# pyyaml, numpy, tqdm, matplotlib, pandas, xxhash, pytest, pytest-xdist and hypothesis. Missing dependencies of tunekit:
# omegaconf and datasets, which needs dill and multiprocess. trl is for tests, bitsandbytes and Liger for comparisons.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
exclude=$(git rev-parse --git-path info/exclude)
mkdir -p "$(dirname "$exclude")"
grep -qx '/.whl/' "$exclude" 2>/dev/null || echo '/.whl/' >> "$exclude"
rm -rf .whl
platforms=()
for version in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 -d .whl \
  'omegaconf==2.4.0' 'datasets>=4.0' 'dill<0.4.2' 'multiprocess<0.70.20' \
  bitsandbytes trl liger-kernel
# The device tool transfers up to 64 MiB: keep only the CUDA 13 library of bitsandbytes.
zip -q -d .whl/bitsandbytes-*.whl '*_cuda11*' '*_cuda12*' '*_cuda132*' '*_rocm*' '*_xpu*'
for wheel in .whl/*.whl; do
  echo "$(basename "$wheel")  requires: $(unzip -p "$wheel" '*/METADATA' | grep '^Requires-Dist' | grep -v extra |
    sed 's/Requires-Dist: //' | tr '\n' ',' )"
done
du -sh .whl
