#!/bin/bash
# Run a test suite on a GPU machine: bash scripts/gpu/run.sh SUITE [DEVICE] [--only NAME]
#   SUITE: smoke, correctness, speed, ranks, shapes, rollouts. DEVICE: cuda (default), or cpu with reduced sizes.
# tunekit does not have to be installed: .whl/ (from fetch_wheels.sh) and a directory of links replace the installation.
# Reports are written to $OUT (default: /tmp/gpu-SUITE). The suite ends within SECONDS_LIMIT (default: 560).
set -uo pipefail
suite=${1:?usage: run.sh SUITE [DEVICE]} device=${2:-cuda}
root=$(cd "$(dirname "$0")/../.." && pwd)
export OUT=${OUT:-/tmp/gpu-$suite} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TQDM_DISABLE=1
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}  # as tunekit/cli/main.py sets it
export TUNEKIT_CACHE=${TUNEKIT_CACHE:-/tmp/tunekit-cache}
python=${PYTHON:-python3} home=${GPU_HOME:-/tmp/tunekit-gpu}
mkdir -p "$OUT" "$home/bin" "$home/site"

if compgen -G "$root/.whl/*.whl" > /dev/null && [ ! -e "$home/site/.done" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --upgrade \
    --target "$home/site" "$root"/.whl/*.whl && touch "$home/site/.done" || exit 1
fi
# An installation has recipes/, kernels/ and configs/ inside the package; links do the same.
rm -rf "$home/package" && mkdir -p "$home/package/tunekit"
ln -s "$root"/tunekit/* "$root"/recipes "$root"/kernels "$root"/configs "$home/package/tunekit/"
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$root/tunekit/__init__.py")
mkdir "$home/package/tunekit-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: tunekit\nVersion: %s\n' "$version" > "$home/package/tunekit-$version.dist-info/METADATA"
printf '#!/bin/sh\nexec "%s" -m tunekit.cli "$@"\n' "$(command -v "$python")" > "$home/bin/tune"
chmod +x "$home/bin/tune"
# The package precedes the checkout, whose directory tunekit/ does not contain the links.
export PATH="$home/bin:$PATH" PYTHONSAFEPATH=1
export PYTHONPATH="$home/package:$root:$root/benchmarks:$root/scripts/gpu:$home/site${PYTHONPATH:+:$PYTHONPATH}"
cd "$root" && exec "$python" scripts/gpu/suites.py "$suite" --device "$device" --output "$OUT" --time-limit "${SECONDS_LIMIT:-560}" "${@:3}"
