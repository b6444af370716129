#!/usr/bin/env bash
# Checks and times the plug-in for vLLM on a machine with a GPU, in under 8 minutes. Not run until a
# GPU has run it.
#
#   bench/gpu_vllm.sh PYTHON MODEL [OUT]
#
# PYTHON  an interpreter with vLLM for that GPU (a version in kvnotes/vllm/scheduler_name.py) and
#         with what kvnotes needs; kvnotes itself is taken from this checkout
# MODEL   a folder with config.json, weights and tokenizer, as for `kvnotes vllm serve`
# OUT     folder of the results; bench/results/gpu by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 2 ] || { sed -n '2,12p' "$0"; exit 2; }
python=$1 model=$2 out=${3:-bench/results/gpu}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" KVNOTES_HOME="${KVNOTES_HOME:-$PWD/.cache}"
mkdir -p "$out"

timed() { # timed SECONDS NAME COMMAND...: goes on after a failure, and says so
  local limit=$1 name=$2 status=0
  shift 2
  echo "== $name"
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1 || status=$?
  tail -n 3 "$out/$name.txt"
  echo "$name $status" >>"$out/status.txt"
}

: >"$out/status.txt"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpu.txt"
"$python" -c "import torch, vllm; print(vllm.__version__, torch.__version__)" | tee -a "$out/gpu.txt"

# right: both forms of a jump against the embedded engine in float32, contamination, failures
for form in splice preemption requeue stock_scheduler windows; do
  timed 70 "test-$form" "$python" -m pytest -q -W ignore \
    --show-capture=no "tests/vllm/test_$form.py"
done

# fast: a server in bfloat16, every arm of the online experiment, for two minutes
timed 130 serve "$python" -m kvnotes.cli.main bench serve --model "$model" --dtype bfloat16 \
  --lengths 2048 --requests 20 --out "$out" --quiet

cat "$out/status.txt"
! grep -v ' 0$' "$out/status.txt"
