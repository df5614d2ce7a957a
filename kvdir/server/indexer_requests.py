"""Requests of the indexer API, from bodies as routers send them: JSON, or msgpack where the body says so.

Owns: names, types and defaults of fields in the dialects that exist, which differ in names only as far as can be read without
guessing (docs/engines/routers.md lists them): RFC Mooncake #1403 and Mooncake's conductor say `model`, Dynamo's indexer
`model_name`; a request that says `model_name` is answered as Dynamo answers. Fields that are not known are passed over; a field
that is there but of another type is refused, by name. Token ids and salts are never repeated in an error. Pure.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvdir.engines.events import adapter_of
from kvdir.errors import InvalidInput
from kvdir.hashing.tokens import as_tokens

DEFAULT_TENANT = "default"
MAX_NAME = 256
"""Characters of a model, tenant, instance or adapter."""
_HEX = re.compile(r"0x[0-9a-fA-F]{1,64}|[0-9a-fA-F]{32}|[0-9a-fA-F]{64}", re.ASCII)
_HASH_FIELDS = ("seq_hashes", "block_hash", "block_hashes")
PIECE_BYTES = 64 * 2**10
"""Some 10,000 tokens, a millisecond."""
MSGPACK_ARRAY_BYTES = 2**20
_MSGPACK_ARRAYS = (0xDC, 0xDD)
_DIALECTS = {"vllm": "vllm", "sglang": "sglang", "mooncake": "mooncake", "dynamo": "dynamo"}


class Api(enum.Enum):
    """Whose answers are expected."""

    RFC = "model"
    DYNAMO = "model_name"


class BadRequest(InvalidInput):
    """reason: a slug. field: which one it is about, "" for the whole. status: of HTTP."""

    status = HTTPStatus.BAD_REQUEST

    def __init__(self, words: str, *, reason: str, field: str = "") -> None:
        super().__init__(words)
        self.reason = reason
        self.field = field


class NotFound(BadRequest):
    """A model or registration that nobody knows."""

    status = HTTPStatus.NOT_FOUND


class Conflict(BadRequest):
    """A registration that contradicts another one."""

    status = HTTPStatus.CONFLICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """tokens: of the prompt, uint32; None for a query by hash. hashes: as given, big endian for numbers. local: hashes are of
    single blocks, not yet rolling. block_tokens: 0 for any. instance_id: only this one; "" for all. adapter: "none" for the
    base model.
    """

    api: Api
    model: str
    tenant: str
    tokens: npt.NDArray[np.uint32] | None = None
    hashes: tuple[bytes, ...] = ()
    local: bool = False
    block_tokens: int = 0
    instance_id: str = ""
    adapter: str = "none"
    adapter_path: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An event publisher. instance_id: as text; given: as it was sent. dialect: whose events. node: of the agent beside it, or
    "". hash_scheme, hash_seed: "" for what engines of that kind use by themselves.
    """

    api: Api
    model: str
    tenant: str
    instance_id: str
    given: str | int
    endpoint: str
    replay: str
    dialect: str
    block_tokens: int
    dp_rank: int | None
    adapter: str
    salt: str
    hash_scheme: str
    hash_seed: str
    node: str

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.tenant, self.instance_id, self.dp_rank or 0)

    def alike(self, other: Registration) -> bool:
        """Whether both ask for the same, in whatever words."""
        return replace(self, api=other.api, given=other.given) == other

    @property
    def shown_key(self) -> str:
        """As the RFC's answer to /unregister names it."""
        return f"{self.instance_id}|{self.tenant}|{self.dp_rank or 0}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unregistration:
    """dp_rank: None for all of the instance."""

    api: Api
    tenant: str
    instance_id: str
    dp_rank: int | None


def read_body(body: bytes, *, msgpack: bool) -> Mapping[str, Any]:
    """The object in a body. Raises BadRequest.

    Decoding holds up every other thread, so of a large body the token ids come as an array and hashes as a list, both decoded
    in pieces of PIECE_BYTES; and a large value of any other field is left as it is, which is of no known type.
    """
    kind, codec = ("msgpack", msgspec.msgpack) if msgpack else ("JSON", msgspec.json)
    try:
        fields = codec.decode(body, type=dict[str, msgspec.Raw])
        return {
            name: codec.decode(raw) if len(raw) <= PIECE_BYTES else _long(name, raw, msgpack) for name, raw in fields.items()
        }
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body must be one {kind} object", reason="invalid_json") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid {kind}: {error}", reason="invalid_json") from error


def _long(name: str, raw: msgspec.Raw, msgpack: bool) -> Any:
    if name not in ("token_ids", *_HASH_FIELDS):
        return raw
    packed = memoryview(raw)
    if not msgpack:
        if packed[0] != ord("["):
            return raw
        return _token_pieces(packed) if name == "token_ids" else [item for piece in _pieces(packed) for item in piece]
    if packed[0] in _MSGPACK_ARRAYS and len(packed) > MSGPACK_ARRAY_BYTES:
        raise BadRequest(
            f"{name}: an array in msgpack may have {MSGPACK_ARRAY_BYTES} bytes: send token_ids as bytes, 4 a token, or JSON",
            reason="out_of_range",
            field=name,
        )
    return msgspec.msgpack.decode(packed)


def _token_pieces(packed: memoryview) -> npt.NDArray[np.uint32]:
    pieces: list[npt.NDArray[np.uint32]] = []
    for piece in _pieces(packed):
        try:
            pieces.append(as_tokens(piece))
        except InvalidInput as error:
            words = f"token_ids: from position {sum(map(len, pieces))} on, {error}"
            raise BadRequest(words, reason="invalid_type", field="token_ids") from error
    return np.concatenate(pieces)


def _pieces(packed: memoryview) -> Iterator[list[Any]]:
    """Of a flat array in JSON, cut at commas. One that is not flat is cut where it is invalid."""
    text = bytes(packed)
    start, end = 1, len(text) - 1
    while start < end:
        comma = text.find(b",", start + PIECE_BYTES, end)
        stop = end if comma < 0 else comma
        yield msgspec.json.decode(b"[" + text[start:stop] + b"]", type=list[Any])
        start = stop + 1


def read_query(body: Mapping[str, Any], *, by_hash: bool) -> Query:
    """Of /query or /query_by_hash. Raises BadRequest."""
    api = _api(body)
    if body.get("lora_id") is not None and not body.get("lora_name"):
        raise BadRequest("lora_id does not say which adapter: give lora_name", reason="unsupported", field="lora_id")
    salt = _text(body, "cache_salt")
    if by_hash and salt:
        raise BadRequest(
            "the hashes must have been made with cache_salt already: leave it out here",
            reason="unsupported",
            field="cache_salt",
        )
    return Query(
        api=api,
        model=_required(body, api.value),
        tenant=_tenant(body),
        tokens=None if by_hash else _tokens(body),
        hashes=_hashes(body) if by_hash else (),
        local=by_hash and "block_hashes" in body,
        block_tokens=_count(body, "block_size", least=1, most=2**20, default=0),
        instance_id=_identity(body, default=""),
        adapter=adapter_of(_text(body, "lora_name") or None),
        adapter_path=_text(body, "lora_path"),
        cache_salt=salt,
    )


def read_registration(body: Mapping[str, Any]) -> Registration:
    """Of /register. Raises BadRequest."""
    api = Api.DYNAMO if "model_name" in body else Api.RFC
    kind = _text(body, "type") or "vLLM"
    dialect = _DIALECTS.get(kind.lower())
    if dialect is None:
        raise BadRequest(f"type {kind!r} is none of vLLM, SGLang, Mooncake, Dynamo", reason="invalid_value", field="type")
    _only_group_zero(body)
    scheme, seed = _hashing(body)
    model = next((name for name in ("modelname", "model_name", "model") if name in body), "modelname")
    return Registration(
        api=api,
        model=_required(body, model),
        tenant=_tenant(body),
        instance_id=_identity(body),
        given=body["instance_id"],
        endpoint=_required(body, "endpoint"),
        replay=_text(body, "replay_endpoint"),
        dialect=dialect,
        block_tokens=_count(body, "block_size", least=1, most=2**20),
        dp_rank=_rank(body),
        adapter=adapter_of(_text(body, "lora_name") or None),
        salt=_text(body, "additionalsalt") or _text(body, "additional_salt"),
        hash_scheme=scheme,
        hash_seed=seed,
        node=_text(body, "node"),
    )


def read_unregistration(body: Mapping[str, Any]) -> Unregistration:
    """Of /unregister. Raises BadRequest."""
    api = Api.DYNAMO if "model_name" in body else Api.RFC
    return Unregistration(api=api, tenant=_tenant(body), instance_id=_identity(body), dp_rank=_rank(body))


def _api(body: Mapping[str, Any]) -> Api:
    return Api.DYNAMO if "model_name" in body and "model" not in body else Api.RFC


def _missing(field: str) -> BadRequest:
    return BadRequest(f"{field} is required", reason="missing", field=field)


def _wrong_type(field: str, what: str) -> BadRequest:
    return BadRequest(f"{field} must be {what}", reason="invalid_type", field=field)


def _text(body: Mapping[str, Any], field: str) -> str:
    """ "" when it is absent or null."""
    value = body.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong_type(field, "text")
    if len(value) > MAX_NAME:
        raise BadRequest(f"{field} has more than {MAX_NAME} characters", reason="out_of_range", field=field)
    return value


def _required(body: Mapping[str, Any], field: str) -> str:
    if body.get(field) is None:
        raise _missing(field)
    value = _text(body, field)
    if not value:
        raise BadRequest(f"{field} must not be empty", reason="invalid_value", field=field)
    return value


def _number_or_text(body: Mapping[str, Any], field: str) -> str:
    """Early drafts of the RFC, and Dynamo, have numbers for identities."""
    value = body.get(field)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(body, field)


def _tenant(body: Mapping[str, Any]) -> str:
    """Dynamo's routing group is the same division by another name."""
    return _number_or_text(body, "routing_group") or _number_or_text(body, "tenant_id") or DEFAULT_TENANT


def _identity(body: Mapping[str, Any], default: str | None = None) -> str:
    value = _number_or_text(body, "instance_id")
    if not value and default is None:
        raise _missing("instance_id")
    return value or default or ""


def _count(body: Mapping[str, Any], field: str, *, least: int, most: int, default: int | None = None) -> int:
    value = body.get(field)
    if value is None:
        if default is None:
            raise _missing(field)
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(field, "a whole number")
    if not least <= value <= most:
        raise BadRequest(f"{field} must be from {least} to {most}", reason="out_of_range", field=field)
    return value


def _rank(body: Mapping[str, Any]) -> int | None:
    return None if body.get("dp_rank") is None else _count(body, "dp_rank", least=0, most=65_535)


def _only_group_zero(body: Mapping[str, Any]) -> None:
    if _count(body, "cache_group", least=0, most=2**31, default=0):
        raise BadRequest(
            "every cache group of the stream is followed: leave cache_group out", reason="unsupported", field="cache_group"
        )


def _hashing(body: Mapping[str, Any]) -> tuple[str, str]:
    """(scheme, seed): from our own fields, or the profile of Mooncake's conductor; empty where neither says."""
    profile = body.get("hash_profile")
    if profile is None:
        return _text(body, "hash_scheme"), _text(body, "hash_seed")
    if not isinstance(profile, dict):
        raise _wrong_type("hash_profile", "an object")
    if _required(profile, "strategy") != "vllm_v1":
        raise BadRequest("hash_profile.strategy: only vllm_v1 is known", reason="invalid_value", field="strategy")
    return f"vllm:{_required(profile, 'algorithm')}", _required(profile, "python_hash_seed")


def _tokens(body: Mapping[str, Any]) -> npt.NDArray[np.uint32]:
    value = body.get("token_ids")
    if value is None:
        raise _missing("token_ids")
    if isinstance(value, bytes):  # msgpack of Mooncake's conductor: little-endian int32, 4 bytes a token
        if len(value) % 4:
            raise BadRequest("token_ids must be 4 bytes a token", reason="invalid_value", field="token_ids")
        value = np.frombuffer(value, "<i4")
    elif not isinstance(value, list | np.ndarray):
        raise BadRequest("token_ids must be an array", reason="not_array", field="token_ids")
    try:
        return as_tokens(value)
    except InvalidInput as error:
        raise BadRequest(f"token_ids: {error}", reason="invalid_type", field="token_ids") from error


def _hashes(body: Mapping[str, Any]) -> tuple[bytes, ...]:
    field = next((name for name in _HASH_FIELDS if name in body), "")
    if not field:
        raise _missing("seq_hashes")
    values = body[field]
    if not isinstance(values, list):
        raise BadRequest(f"{field} must be an array", reason="not_array", field=field)
    out = tuple(_hash(value, field, at) for at, value in enumerate(values))
    if len({len(item) for item in out}) > 1:
        raise BadRequest(f"{field}: hashes of different widths in one list", reason="invalid_value", field=field)
    return out


def _hash(value: Any, field: str, at: int) -> bytes:
    """Numbers of 64 bits, signed or not, as number or text; hexadecimal text and bytes of 8, 16 or 32."""
    if isinstance(value, str):
        if _HEX.fullmatch(value):
            digits = value.removeprefix("0x")
            width = next(width for width in (16, 32, 64) if len(digits) <= width)
            return bytes.fromhex(digits.zfill(width))
        if value.isascii() and value.removeprefix("-").isdigit() and len(value) <= 20:
            value = int(value)
    if isinstance(value, bytes) and len(value) in (8, 16, 32):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64:
        return (value % 2**64).to_bytes(8, "big")
    raise BadRequest(
        f"{field}[{at}] is no hash: a number of 64 bits, or 8, 16 or 32 bytes as hexadecimal text",
        reason="invalid_type",
        field=field,
    )
