"""Command-line options out of a config dataclass, and the page docs/configuration.md out of the same declarations.

Rules: a setting is declared once (kvdir/config.py); the flag, its help, the environment variable, the TOML key and the line in
the docs follow from that. Values reach `load` as text, so that every fault, from whatever source, is reported at once.
Does not: give a meaning to any setting.

    python -m kvdir.cli.options > docs/configuration.md
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kvdir.cli.output import emit, table
from kvdir.config import Setting, load, masked, settings, show_bytes

NAMESPACE_FILES = """
## Namespace files

`peer-agent serve --namespaces` takes one TOML or JSON file for each namespace. Every field is required and says the effective
value, because two engines share blocks only if all of them are equal; `auto`, `default`, empty and unknown values are
refused, all faults at once. `peer-agent serve --dry-run` shows how many blocks the arena then holds.

```toml
model = "llama-3.1-8b"
weights = "sha256:5f1c..."          # digest or revision of the weights
kv_dtype = "bfloat16"               # effective element type of the cache
layout = "NHD"                      # order of elements inside a block
block_tokens = 16
position = "rope:theta=500000"
parallel = "replicated"             # or the part this holder has, such as "tp=0/4"
adapter = "none"                    # or name and digest of a LoRA adapter
hash_scheme = "vllm:sha256_cbor"    # how the engine computes fingerprints (docs/hashing.md)
hash_seed = "0"                     # for vLLM: PYTHONHASHSEED
cache_policy = "exact"              # or in which way blocks are altered
# tenant_salt_file = "salt.txt"     # 8 bytes or more; only a digest is kept. tenant_salt gives it in place
# share = 1.0                       # part of the arena, relative to the other namespaces
# prefill_tokens_per_s = 8000       # how fast engines recompute, of those that do not say it; decides which hits pay
# bytes_override = 0                # bytes of a block, where the engine pads; 0: by geometry
# part = 0                          # only one of the groups below is in these blocks, kept apart; see docs/state.md

[[groups]]                          # state groups, in engine order
kind = "full"                       # full, sliding_window, mla, recurrent, index, draft
layers = 32
kv_heads = 8                        # on one rank
head_dim = 128
# tensors = 2                       # 1 for mla and index
# window_tokens = 4096              # sliding_window only
# state_bytes = 0                   # recurrent only
# block_tokens = 16                 # of this group's blocks, where groups differ
# bytes_override = 0                # of this group's blocks, where the engine pads
```
"""

Function = Callable[..., Any]

DOCUMENTED = ("kvdir.cli.serve:serve", "peer_agent.cli.serve:serve")
"""The daemons. By name, because kvdir never imports peer_agent."""

HEADER = "| setting | default | flag, environment | what it does |\n|---|---|---|---|"


def config_options(cls: type, *, prefix: str) -> Callable[[Function], Function]:
    """Options for every setting of `cls`, --config FILE and --print-config; the command gets the loaded config first.

    prefix: of the environment variables, such as "KVDIR_". Place it directly above the function, below `@click.command`;
    `output_option` may stand on either side. ConfigError (exit code 3) names every fault.
    """
    declared = settings(cls)

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(*args: Any, config_file: Path | None, print_config: bool, **params: Any) -> Any:
            flags = {item.name: _flag_value(item, params.pop(_parameter(item))) for item in declared}
            config: Any
            config, sources = load(cls, prefix=prefix, file=config_file, flags=flags)
            if print_config:
                output = (click.get_current_context().params.get("output")) or "table"
                return _print_config(config, declared, sources, output=output)
            return function(config, *args, **params)

        command.__kvdir_config__ = (cls, prefix)  # type: ignore[attr-defined]
        decorated: Function = command
        for option in reversed([*_extra_options(prefix), *(_option(item, prefix) for item in declared)]):
            decorated = option(decorated)
        return decorated

    return decorate


def _extra_options(prefix: str) -> list[Callable[[Function], Function]]:
    return [
        click.option(
            "--config",
            "config_file",
            type=click.Path(dir_okay=False, path_type=Path),
            help=f"TOML file of settings; flags and {prefix}* variables override it.",
        ),
        click.option("--print-config", is_flag=True, help="Print each setting, its value and its source, and end."),
    ]


def _option(item: Setting, prefix: str) -> Callable[[Function], Function]:
    help = f"{item.help}  [default: {show_default(item)}; {prefix}{item.name.upper()}]"
    names = (item.flag, _parameter(item))
    if item.kind is bool:
        return click.option(f"{item.flag}/--no-{item.flag[2:]}", _parameter(item), default=None, help=help)
    metavar = item.metavar or _metavar(item)
    return click.option(*names, metavar=metavar, multiple=item.kind is tuple, default=None, help=help)


def _parameter(item: Setting) -> str:
    """Prefixed, because a setting called `output` or `config` must not collide with the command's own parameters."""
    return f"setting_{item.name}"


def _flag_value(item: Setting, raw: Any) -> Any:
    return ",".join(raw) if item.kind is tuple and raw else raw


def _metavar(item: Setting) -> str:
    if item.name.endswith("_bytes"):
        return "SIZE"
    if item.name.endswith("_s"):
        return "SECONDS"
    if item.name.endswith("_ms"):
        return "MS"
    return {int: "N", float: "X", tuple: "A,B"}.get(item.kind, "TEXT")


def show_default(item: Setting) -> str:
    """The default, for people."""
    value = item.default
    if value is None or value in ((), ""):
        return "none"
    if item.kind is int and item.name.endswith("_bytes"):
        return show_bytes(value)
    if item.kind is tuple:
        return ",".join(value)
    return str(value).lower() if item.kind is bool else str(value)


def _print_config(config: object, declared: list[Setting], sources: Mapping[str, str], *, output: str) -> None:
    """Without secrets: people show this to others."""
    values = {item.name: masked(getattr(config, item.name)) for item in declared}
    document = {name: {"value": value, "source": sources[name]} for name, value in values.items()}
    rows = [(name, _shown(value), sources[name]) for name, value in values.items()]
    emit(document, lambda: table(["setting", "value", "source"], rows), output=output)


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def configuration_page(commands: Sequence[str] = DOCUMENTED) -> str:
    """docs/configuration.md for commands named "module:attribute", each decorated with `config_options`."""
    parts = [
        "# Configuration\n",
        "<!-- Written by `make docs` from the declarations in the code; edit those. -->\n",
        "Precedence: defaults < `--config` file (TOML) < environment < flags. Unknown keys and unreadable values are refused",
        "at start, all of them at once; `--print-config` shows each value and where it came from. Sizes take `4096`, `128KiB`,",
        "`1.5GiB`; lists take commas.",
    ]
    for name in commands:
        module, _, attribute = name.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        cls, prefix = command.callback.__kvdir_config__
        program = "kvdir" if module.startswith("kvdir.") else "peer-agent"
        parts += ["", f"## `{program} {command.name}`", "", HEADER]
        parts += [_row(item, prefix) for item in settings(cls)]
    return "\n".join(parts) + "\n" + NAMESPACE_FILES


def _row(item: Setting, prefix: str) -> str:
    help = item.help.replace("|", "\\|")
    return f"| `{item.name}` | {show_default(item)} | `{item.flag}`, `{prefix}{item.name.upper()}` | {help} |"


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
