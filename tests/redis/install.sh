#!/bin/sh
# redis-server for the tests: the one that is here, or by apt when we may.
command -v redis-server >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq && exec apt-get install -y -qq redis-server
fi
echo "there is no redis-server here: apt-get install redis-server (Debian, Ubuntu), dnf install redis, or brew install redis" >&2
exit 1
