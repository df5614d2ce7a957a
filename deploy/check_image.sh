#!/usr/bin/env bash
# Builds deploy/Containerfile without Docker and runs what came out: both commands as uid 65532 without capabilities in a
# read-only root, a coordinator and two agents with an arena each, and a block from one to the other. On demand (make
# image-check), as root on Debian: the first run makes a base of it (two minutes, kept in ${KVDIR_CACHE:-~/.cache/kvdir}).
# Says the image's size and fails beyond 300 MB. Needs buildah and debootstrap (apt), and the package indexes of apt and pip.
set -euo pipefail
cd "$(dirname "$0")/.."
LIMIT_MB=300
SUITE=bookworm
BASE=docker.io/library/debian:12-slim
[ "$(id -u)" = 0 ] || { echo "run it as root: it makes a root file system and chroots into it" >&2; exit 1; }
missing=()
for tool in buildah debootstrap; do command -v "$tool" >/dev/null || missing+=("$tool"); done
if ((${#missing[@]})); then apt-get update -qq && apt-get install -y -qq "${missing[@]}"; fi

cache="${KVDIR_CACHE:-$HOME/.cache/kvdir}"
work="$(mktemp -d)"
mkdir -p "$cache"
pids=()
finish() {
  for pid in "${pids[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
  wait
  for name in a b none; do umount "$work/$name" 2>/dev/null || true; done
  [ -z "${container:-}" ] || buildah umount "$container" >/dev/null || true
  [ -z "${container:-}" ] || buildah rm "$container" >/dev/null || true
  rm -rf "$work"
}
trap finish EXIT
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
export CONTAINERS_STORAGE_CONF="$work/storage.conf"
printf '[storage]\ndriver = "vfs"\nrunroot = "%s/run"\ngraphroot = "%s/storage"\n' "$work" "$work" > "$CONTAINERS_STORAGE_CONF"

# --- a base, as debian:12-slim is one: minimal, without documentation
if [ ! -e "$cache/base-$SUITE.tar" ]; then
  mirror="$(apt-get indextargets --format '$(SITE)' "Codename: $SUITE" | head -1)"
  debootstrap --variant=minbase "$SUITE" "$work/base" "${mirror:-http://deb.debian.org/debian}" >&2
  rm -rf "$work"/base/var/cache/apt/* "$work"/base/var/lib/apt/lists/* "$work"/base/usr/share/{doc,man,info,locale}/*
  printf 'path-exclude /usr/share/%s/*\n' doc man info locale > "$work/base/etc/dpkg/dpkg.cfg.d/slim"
  tar -C "$work/base" --one-file-system -cf "$cache/base-$SUITE.tar.new" . && mv "$cache/base-$SUITE.tar"{.new,}
  rm -rf "$work/base"
fi
scratch="$(buildah from scratch)"
buildah add -q "$scratch" "$cache/base-$SUITE.tar" / >/dev/null
buildah commit -q --rm "$scratch" "$BASE" >/dev/null

# --- the build; the index that pip uses here goes in as a secret, and so into no layer
secrets=()
python3 -m pip config list 2>/dev/null | python3 -c '
import ast, sys
settings = dict(line.strip().split("=", 1) for line in sys.stdin if "=" in line)
values = {name.split(".", 1)[1]: ast.literal_eval(text) for name, text in settings.items() if name.startswith("global.")}
out = {key: value for key, value in values.items() if key in ("index-url", "extra-index-url", "trusted-host", "proxy")}
out = {key: " ".join(part for part in value.split() if "file:" not in part) for key, value in out.items()}
ca = values.get("cert")
print("[global]", *(f"{key} = {value}" for key, value in out.items() if value), *(["cert = /run/secrets/ca.crt"] if ca else []), sep="\n")
print(ca or "", file=sys.stderr)' > "$work/pip.conf" 2> "$work/ca"
secrets+=(--secret "id=pip.conf,src=$work/pip.conf")
ca="$(cat "$work/ca")"
[ -z "$ca" ] || secrets+=(--secret "id=ca.crt,src=$ca")
began=$SECONDS
buildah bud -q --pull-never --isolation chroot "${secrets[@]}" --build-arg REVISION="$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" \
  -f deploy/Containerfile -t kvdir:check . > "$work/build.log" 2>&1 || { tail -40 "$work/build.log" >&2; exit 1; }
container="$(buildah from --pull-never kvdir:check)"
root="$(buildah mount "$container")"
size_mb="$(du -sm --apparent-size "$root" | cut -f1)"
echo "built in $((SECONDS - began)) s; $size_mb MB: $(cd "$root" && du -sm --apparent-size usr opt/kvdir var | tr '\t\n' ' ')"
[ "$size_mb" -lt "$LIMIT_MB" ] || { (cd "$root" && du -m --apparent-size . | sort -n | tail -25) >&2; echo "larger than $LIMIT_MB MB" >&2; exit 1; }

# --- in it: own mounts, read-only root, own memory at /run/kvdir, nobody's user, no capabilities
within() { # DIRECTORY_OF_/run/kvdir COMMAND...
  local memory="$1"
  shift
  # shellcheck disable=SC2016  # for the inner shell
  exec unshare --mount --propagation private -- bash -ec '
    root="$1" memory="$2"; shift 2
    mount --bind "$root" "$root"
    mount -t tmpfs -o mode=1777,size=64m tmpfs "$root/tmp"
    mount -t tmpfs -o size=64m tmpfs "$root/run"
    mkdir "$root/run/kvdir" && mount --bind "$memory" "$root/run/kvdir"
    mount -t proc proc "$root/proc"
    mkdir -p "$root/dev" && mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    for device in null zero random urandom; do touch "$root/dev/$device" && mount --bind "/dev/$device" "$root/dev/$device"; done
    mount -o remount,bind,ro "$root"
    exec env -i PATH=/opt/kvdir/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1 chroot "$root" \
      setpriv --reuid 65532 --regid 65532 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all -- "$@"
  ' bash "$root" "$memory" "$@"
}
memory() { mkdir "$work/$1" && mount -t tmpfs -o "size=512m,uid=65532,gid=65532" tmpfs "$work/$1"; }
ready() { # FILE
  timeout 180 bash -c 'until grep -q "\"ready\"" "$1"; do sleep 0.1; done' _ "$1" || { cat "$1" "$1.log" >&2; exit 1; }
}
for name in a b none; do memory "$name"; done
(within "$work/none" kvdir --help) > /dev/null
(within "$work/none" peer-agent --help) > /dev/null
if (within "$work/none" touch /opt/kvdir/written) 2>/dev/null; then echo "the root can be written to" >&2; exit 1; fi
(within "$work/none" kvdir serve --listen 127.0.0.1:7400 --http-listen 127.0.0.1:7401 --output json) > "$work/c.out" 2> "$work/c.out.log" &
pids+=($!)
ready "$work/c.out"
for name in a b; do # the same path in both, as in two pods; nothing but the network between them
  port=$([ $name = a ] && echo 7410 || echo 7420)
  (within "$work/$name" peer-agent serve --node $name --coordinators 127.0.0.1:7400 --accept-bytes 32MiB --accept-namespaces 1 \
    --replica --listen "127.0.0.1:$port" --http-listen "127.0.0.1:$((port + 1))" --arena-path /run/kvdir/arena \
    --engine-listen unix:/run/kvdir/agent.sock --output json) > "$work/$name.out" 2> "$work/$name.out.log" &
  pids+=($!)
  ready "$work/$name.out"
done
seed="$(date +%s%N)"
for step in "a store" "b load"; do
  read -r name verb <<< "$step"
  (within "$work/$name" python3 - "$verb" unix:/run/kvdir/agent.sock "$seed") < deploy/exchange.py
done
(within "$work/none" kvdir nodes)
for pid in "${pids[@]}"; do kill -TERM "$pid"; done
for pid in "${pids[@]}"; do wait "$pid"; done
pids=()
echo "image-check: well"
