"""`kvdir story`: what touched a node or a block lately, and `kvdir quota`: what is watched, and what would be deleted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvdir.cli.output import CommandFailed, Exit, emit, output_option, stack, table
from kvdir.cli.query import client_options
from kvdir.config import show_bytes
from kvdir.errors import InvalidInput

if TYPE_CHECKING:
    from kvdir.client.sync import Client
    from kvdir.core.quota_views import QuotasView, QuotaView
    from kvdir.rpc.story_codec import StoryAnswer

_FINGERPRINT_DIGITS = range(16, 65)


@click.command()
@click.argument("what", metavar="FINGERPRINT|NODE")
@click.option("--node", "is_node", is_flag=True, help="WHAT is a node name, although it looks like a fingerprint.")
@click.option("--limit", default=50, show_default=True, help="The newest so many entries.")
@output_option
@client_options
def story(client: Client, what: str, is_node: bool, limit: int, output: str) -> None:
    """What touched a node or a block lately, oldest first, as far back as the coordinator's bounded log goes.

    Sixteen or more hexadecimal digits are a fingerprint, or the beginning of one; everything else is a node name.

    \b
    Examples:
      kvdir story node-3
      kvdir story 8899aabbccddeeff --output json
    """
    fingerprint = b"" if is_node else _fingerprint(what)
    answer = client.story(node="" if fingerprint else what, fingerprint=fingerprint, max_entries=limit)
    now_s = time.monotonic()
    document = {
        "of": what,
        "reaches_back_s": round(answer.reaches_back_s, 3),
        "entries": [
            {
                "age_s": round(now_s - entry.at_s, 3),
                "node": entry.node,
                "epoch": f"{entry.epoch:016x}",
                "kind": entry.kind,
                "seq": entry.seq,
                "words": entry.words,
            }
            for entry in answer.entries
        ],
    }
    emit(document, lambda: _story_view(answer, now_s), output=output)


def _fingerprint(text: str) -> bytes:
    """Empty when it is none."""
    digits = text.lower().removeprefix("0x")
    if len(digits) not in _FINGERPRINT_DIGITS or set(digits) - set("0123456789abcdef"):
        return b""
    if len(digits) % 2:
        raise InvalidInput(f"{text!r} has an odd number of hexadecimal digits: give whole bytes, or --node if it is a name")
    return bytes.fromhex(digits)


def _story_view(answer: StoryAnswer, now_s: float) -> object:
    rows = [
        (f"{now_s - entry.at_s:,.1f} s", entry.node, f"{entry.epoch:016x}"[:8], entry.kind, entry.seq or "", entry.words)
        for entry in answer.entries
    ]
    nothing = "" if rows else "nothing in "
    caption = f"{nothing}the last {answer.reaches_back_s:,.0f} s, which is as far as the log goes"
    return table(["ago #", "node", "epoch", "what", "seq #", "words"], rows, caption=caption)


# -- quotas ----------------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--require", is_flag=True, help="Exit with 5 unless every total is trusted.")
@output_option
@client_options
def quota(client: Client, require: bool, output: str) -> None:
    """Quotas and orphans: what is used, how far that is trusted, and what is, or would be, deleted.

    Nothing is deleted on a total that is not trusted, and nothing at all unless the coordinator was started with
    --quota-enforce or --forget-enforce.
    """
    view = client.quotas()
    document: dict[str, Any] = msgspec.to_builtins(view)
    document["quotas"] = [_quota_document(item) for item in view.quotas]
    document["orphans"] = [msgspec.to_builtins(item) | {"epoch": f"{item.epoch:016x}"} for item in view.orphans]
    emit(document, lambda: _quotas_view(view), output=output)
    doubtful = [item.subject for item in view.quotas if not item.used_bytes.trusted]
    if require and doubtful:
        raise CommandFailed(
            f"totals of {', '.join(doubtful)} are not trusted: `kvdir trust` says which streams; nothing is evicted until then",
            exit=Exit.UNTRUSTED,
            slug="untrusted",
        )


def _quota_document(item: QuotaView) -> dict[str, Any]:
    return {
        "subject": item.subject,
        "limit_bytes": item.limit_bytes,
        "used_bytes": item.used_bytes.value,
        "trusted": item.used_bytes.trusted,
        "reason": item.used_bytes.reason,
        "verdict": item.verdict,
        "words": item.words,
        "older_than_s": item.older_than_s,
        "shares": [
            {"node": share.node, "namespace": share.namespace_digest.hex(), "max_blocks": share.max_blocks}
            for share in item.shares
        ],
        "evicted_blocks": item.evicted_blocks,
        "refused": item.refused,
    }


def _quotas_view(view: QuotasView) -> object:
    rows = [
        (
            item.subject,
            f"{'' if item.used_bytes.trusted else '~'}{show_bytes(item.used_bytes.value)}",
            show_bytes(item.limit_bytes),
            item.verdict,
            f"{item.evicted_blocks:,}",
            f"{item.refused:,}",
            item.words,
        )
        for item in view.quotas
    ]
    heads = ["quota of", "used #", "limit #", "verdict", "evicted blocks #", "refused #", "why"]
    mode = "quotas are enforced" if view.enforcing else "dry run: nothing is evicted (--quota-enforce)"
    quotas = table(heads, rows, caption=mode if rows else "no quotas: start the coordinator with --quota none=10GiB")
    gone = [(item.node, f"{item.silent_s:,.0f} s", f"{item.blocks:,}", item.spared or "they go") for item in view.orphans]
    if not gone:
        return quotas
    mode = "orphans are forgotten" if view.orphans_enforcing else "dry run: nothing is forgotten (--forget-enforce)"
    return stack(quotas, table(["orphan", "silent #", "blocks #", "its entries"], gone, caption=mode))
