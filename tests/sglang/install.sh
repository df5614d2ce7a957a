#!/usr/bin/env bash
# SGLang without its dependencies, for tests of the HiCache backend: 40 MB to fetch, kept in ${KVDIR_CACHE:-~/.cache/kvdir}.
# Its storage interface needs only torch, which the environment of tests/vllm has. Prints the folder. Usage: install.sh PYTHON
set -euo pipefail
version=0.5.23
cache="${KVDIR_CACHE:-$HOME/.cache/kvdir}"
site="$cache/sglang-$version"
mkdir -p "$cache"
exec 9>"$site.lock"
flock 9 # two checkouts may want it at once
if [ ! -e "$site/.installed" ]; then
  rm -rf "$site"
  "$1" -m pip install --quiet --disable-pip-version-check --no-deps --target "$site" "sglang==$version" >&2
  touch "$site/.installed"
fi
echo "$site"
