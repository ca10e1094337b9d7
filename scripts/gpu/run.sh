#!/bin/bash
# One call on a GPU machine: bash scripts/gpu/run.sh CALL [device] [--only JOB]
#   CALL: smoke, correctness, speed, ranks, shapes, rollouts. device: cuda (default), or cpu with reduced sizes.
# Works without an installed tunekit: .whl/ (from fetch_wheels.sh) and a tree of links stand in for an installation.
# Reports go to $OUT (default: /tmp/gpu-CALL); every call ends within SECONDS_LIMIT (default: 560).
set -uo pipefail
call=${1:?usage: run.sh CALL [device]} device=${2:-cuda}
root=$(cd "$(dirname "$0")/../.." && pwd)
export OUT=${OUT:-/tmp/gpu-$call} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TQDM_DISABLE=1
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}  # as tunekit/cli/main.py sets it
export TUNEKIT_CACHE=${TUNEKIT_CACHE:-/tmp/tunekit-cache}
python=${PYTHON:-python3} home=${GPU_HOME:-/tmp/tunekit-gpu}
mkdir -p "$OUT" "$home/bin" "$home/site"

if compgen -G "$root/.whl/*.whl" > /dev/null && [ ! -e "$home/site/.done" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --upgrade \
    --target "$home/site" "$root"/.whl/*.whl && touch "$home/site/.done" || exit 1
fi
# pyproject.toml installs recipes/, kernels/ and configs/ inside the package: links do the same.
rm -rf "$home/package" && mkdir -p "$home/package/tunekit"
ln -s "$root"/tunekit/* "$root"/recipes "$root"/kernels "$root"/configs "$home/package/tunekit/"
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$root/tunekit/__init__.py")
mkdir "$home/package/tunekit-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: tunekit\nVersion: %s\n' "$version" > "$home/package/tunekit-$version.dist-info/METADATA"
printf '#!/bin/sh\nexec "%s" -m tunekit.cli "$@"\n' "$(command -v "$python")" > "$home/bin/tune"
chmod +x "$home/bin/tune"
# The package comes before the checkout, whose folder tunekit/ lacks the links; tests/ and benchmarks/ come from it.
export PATH="$home/bin:$PATH" PYTHONSAFEPATH=1
export PYTHONPATH="$home/package:$root:$root/benchmarks:$root/scripts/gpu:$home/site${PYTHONPATH:+:$PYTHONPATH}"
cd "$root" && exec "$python" scripts/gpu/calls.py "$call" --device "$device" --output "$OUT" --seconds "${SECONDS_LIMIT:-560}" "${@:3}"
