#!/bin/sh
# Programs of make test-ops: those that are here, the others by apt when we may.
missing=
command -v prometheus >/dev/null && command -v promtool >/dev/null || missing="$missing prometheus"
command -v prometheus-alertmanager >/dev/null || command -v alertmanager >/dev/null || missing="$missing prometheus-alertmanager"
command -v chromium >/dev/null || missing="$missing chromium"
command -v openssl >/dev/null || missing="$missing openssl"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  # shellcheck disable=SC2086  # words on purpose
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive exec apt-get install -y -qq --no-install-recommends $missing
fi
echo "make test-ops needs$missing: apt-get install$missing (Debian, Ubuntu)" >&2
exit 1
