#!/bin/sh
# Certificates for tests, into directory $1; keys beside them. What CA ca signs:
#   node, other, expired (ended yesterday), client (may not be a server), here (named 127.0.0.1): for the tcp plane; no other names
#   coordinator, agent-a, agent-b, engine-a, router, admin: spiffe://kvdir.test/coordinator, .../agent/a, ..., and the names
#     kvdir, localhost, 127.0.0.1; agent-a-2 is a renewed agent-a, coordinator-2 a renewed coordinator
#   named (only DNS name elsewhere.test), nameless (only a SPIFFE id), past (agent-a, ended yesterday), soon (ends in a day)
#   and for each further argument PATH: spiffe://kvdir.test/PATH, in files named with - for /
# foreign-ca signs foreign and foreign-a (named as agent-a). node-encrypted.key is node.key under a password; edwards
# has a key that gRPC does not speak.
set -eu
command -v openssl >/dev/null || { echo "certificates for tests need the openssl tool: apt-get install openssl" >&2; exit 1; }
mkdir -p "$1"
cd "$1"
shift

key() { openssl ecparam -genkey -noout -name prime256v1 -out "$1.key"; }
ca() { key "$1" && openssl req -x509 -new -key "$1.key" -subj "/CN=kvdir test $1" -days 3650 -out "$1.pem"; }
# NAME CA DAYS [EXTENSION]
leaf() {
    key "$1"
    openssl req -new -key "$1.key" -subj "/CN=kvdir test $1" -out "$1.csr"
    printf '%s\n' "basicConstraints = CA:FALSE" ${4:+"$4"} > "$1.ext"
    openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -CAcreateserial -days "$3" -extfile "$1.ext" -out "$1.pem" 2>/dev/null
}
# NAME CA DAYS PATH: who that is, and where it may serve; agent/a is also a.agent.test
who() {
    leaf "$1" "$2" "$3" \
        "subjectAltName=URI:spiffe://kvdir.test/$4,DNS:kvdir,DNS:localhost,DNS:$(basename "$4").$(dirname "$4" | tr -d .).test,IP:127.0.0.1"
}

ca ca
ca foreign-ca
leaf node ca 3650
leaf other ca 3650
leaf expired ca -1
leaf client ca 3650 "extendedKeyUsage=clientAuth"
leaf here ca 3650 "subjectAltName=IP:127.0.0.1"
leaf foreign foreign-ca 3650
who coordinator ca 3650 coordinator
who coordinator-2 ca 3650 coordinator
who agent-a ca 3650 agent/a
who agent-a-2 ca 3650 agent/a
who agent-b ca 3650 agent/b
who engine-a ca 3650 engine/a
who router ca 3650 router
who admin ca 3650 admin
who past ca -1 agent/a
who soon ca 1 agent/a
who foreign-a foreign-ca 3650 agent/a
for path; do who "$(echo "$path" | tr / -)" ca 3650 "$path"; done
leaf named ca 3650 "subjectAltName=DNS:elsewhere.test"
leaf nameless ca 3650 "subjectAltName=URI:spiffe://kvdir.test/agent/a"
openssl genpkey -algorithm ed25519 -out edwards.key 2>/dev/null
openssl req -new -key edwards.key -subj "/CN=kvdir test edwards" -out edwards.csr
openssl x509 -req -in edwards.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 3650 -extfile agent-a.ext -out edwards.pem 2>/dev/null
openssl ec -in node.key -aes128 -passout pass:secret -out node-encrypted.key 2>/dev/null
