#!/bin/sh
# Certificates for tests, into directory $1: ca.pem signs node.pem, other.pem (a second node), client.pem (may not be a server),
# here.pem (named 127.0.0.1) and expired.pem; foreign-ca.pem signs foreign.pem. Keys beside them; node-encrypted.key is node.key under a password.
set -eu
command -v openssl >/dev/null || { echo "certificates for tests need the openssl tool: apt-get install openssl" >&2; exit 1; }
mkdir -p "$1"
cd "$1"

key() { openssl ecparam -genkey -noout -name prime256v1 -out "$1.key"; }
ca() { key "$1" && openssl req -x509 -new -key "$1.key" -subj "/CN=kvdir test $1" -days 3650 -out "$1.pem"; }
# NAME CA DAYS [EXTENSION]
leaf() {
    key "$1"
    openssl req -new -key "$1.key" -subj "/CN=kvdir test $1" -out "$1.csr"
    printf '%s\n' "basicConstraints = CA:FALSE" ${4:+"$4"} > "$1.ext"
    openssl x509 -req -in "$1.csr" -CA "$2.pem" -CAkey "$2.key" -CAcreateserial -days "$3" -extfile "$1.ext" -out "$1.pem" 2>/dev/null
}

ca ca
ca foreign-ca
leaf node ca 3650
leaf other ca 3650
leaf expired ca -1
leaf client ca 3650 "extendedKeyUsage=clientAuth"
leaf here ca 3650 "subjectAltName=IP:127.0.0.1"
leaf foreign foreign-ca 3650
openssl ec -in node.key -aes128 -passout pass:secret -out node-encrypted.key 2>/dev/null
