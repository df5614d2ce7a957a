#!/usr/bin/env bash
# A virtual environment with Helm's own library, made once for each requirements.txt and kept in ${KVDIR_CACHE:-~/.cache/kvdir}: some
# 480 MB that nobody else needs. Also the openssl tool, by apt when we may. Prints the path of its python. Usage: install.sh PYTHON
set -euo pipefail
python="$1"
here="$(cd "$(dirname "$0")" && pwd)"
if ! command -v openssl >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get update -qq && apt-get install -y -qq openssl; } >&2
fi
key="$({ cat "$here/requirements.txt" "$here/install.sh"; "$python" -VV; } | sha256sum | cut -c1-12)"
cache="${KVDIR_CACHE:-$HOME/.cache/kvdir}"
venv="$cache/helm-$key"
mkdir -p "$cache"
exec 9>"$venv.lock"
flock 9 # two checkouts may want it at once
if [ ! -e "$venv/.installed" ]; then
  echo "installing Helm's library and schemas of Kubernetes into $venv: once, half a minute, 480 MB" >&2
  "$python" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --requirement "$here/requirements.txt" >&2
  touch "$venv/.installed"
fi
echo "$venv/bin/python"
