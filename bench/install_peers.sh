#!/usr/bin/env bash
# Installs what `bench read` compares with into an environment of its own: install_peers.sh PYTHON DIRECTORY NIXL
#
# What cannot be had is said and left out; the bench names it again in its answer. Mooncake needs the machine's libibverbs, beside
# which NIXL crashes at exit, so those libraries are unpacked into DIRECTORY/system, where only Mooncake's processes look.
set -euo pipefail
python=$1
directory=$2
nixl=$3
pip() { "$directory/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
said() { echo "bench read goes on without $1: $2" >&2; }

"$python" -m venv "$directory"
pip install numpy
pip install --no-deps "$nixl" || said NIXL "$nixl cannot be installed here"
pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1 || said Mooncake "its wheel cannot be installed here"
ldconfig -p | grep -q 'libibverbs\.so\.1' && exit 0
mkdir -p "$directory/system"
cd "$directory/system"
download() { apt-get download -qq libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1; }
if ! { download || { apt-get update -qq && download; }; } >/dev/null 2>&1; then
  said Mooncake "it needs libibverbs.so.1 and libnuma.so.1; install them (Debian: libibverbs1 libnuma1)"
  exit 0
fi
for package in *.deb; do dpkg-deb --extract "$package" . && rm "$package"; done
