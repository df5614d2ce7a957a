"""How engines and routers name blocks: the fingerprint chains of other projects and our own, from tokens.

    kvdir.hashing.fingerprints(tokens, scheme="vllm:sha256_cbor", block_tokens=16)

Rules: a scheme is named in the namespace (hash_scheme, hash_seed) and computed as its project computes it, bit for bit; what
cannot be computed (an unknown seed, extra keys of a scheme whose form we do not know) is refused, never approximated. Only
whole blocks have fingerprints. Pure: no clock, I/O or environment. Token ids and extra keys (salts) never get into an error
message. Does not: decide which scheme a namespace has (its file, or the engine's shim). Formats and their sources:
docs/hashing.md.
"""

from kvdir.hashing.chain import fingerprints
from kvdir.hashing.extra import vllm_extra
from kvdir.hashing.probing import explain_mismatch, probe
from kvdir.hashing.schemes import BUILTIN, LOW64, OPAQUE, SCHEMES, Naming, Scheme, parse

__all__ = [
    "BUILTIN",
    "LOW64",
    "OPAQUE",
    "SCHEMES",
    "Naming",
    "Scheme",
    "explain_mismatch",
    "fingerprints",
    "parse",
    "probe",
    "vllm_extra",
]
