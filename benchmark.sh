#!/usr/bin/env bash
# Runs a named grid of algorithms, environments and seeds; see tools/benchmark.py.
#
#   ./benchmark.sh --help                 # all grids and options
#   ./benchmark.sh laptop --workers 2     # two runs at a time; the same command again goes on
#   ./benchmark.sh laptop --dry-run       # what it would do
#
# The variable PYTHON names the interpreter (default: python).

python=${PYTHON:-python}
if ! command -v "$python" >/dev/null; then
  echo "error: $python is missing: set PYTHON to an interpreter that has the requirements" >&2
  exit 2
fi
exec "$python" "$(dirname "$0")/tools/benchmark.py" "$@"
