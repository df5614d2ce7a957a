"""Tells stories of a simulated cluster: one that is given, that of a seed, or random ones for as long as asked (`make soak`).

    python -m kvdir.testing.sim --seed 7            what happens in the history of seed 7, and whether a promise breaks
    python -m kvdir.testing.sim --story FILE        a story from a file, or from - for standard input
    python -m kvdir.testing.sim --duration-s 120    random histories; the first that fails is shrunk and printed

Exit status: 0 when every promise held, 1 when one broke (the story is on standard output), 2 for wrong usage.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from typing import TextIO

import click

from kvdir.errors import InvalidInput
from kvdir.obs.logs import LogfmtFormatter
from kvdir.testing.sim.histories import random_story, tell, verdict, violation_of
from kvdir.testing.sim.story import Story

PROGRESS_S = 5.0


@click.command(help=__doc__.replace("\n    python", "\n\b\n    python", 1))
@click.option("--seed", type=int, help="Tell the history of this seed; with --duration-s: begin with it.")
@click.option("--story", "file", type=click.File("r"), help="Tell the story in this file.")
@click.option("--duration-s", type=float, help="Tell random histories for so many seconds.")
@click.option("--coordinators", default=1, show_default=True, help="Of random histories.")
@click.option("--verbose", is_flag=True, help="Show what the daemons log.")
def main(seed: int | None, file: TextIO | None, duration_s: float | None, coordinators: int, verbose: bool) -> None:
    lines = logging.StreamHandler()
    lines.setFormatter(LogfmtFormatter())
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL, handlers=[lines])
    try:
        if duration_s is not None:
            sys.exit(soak(duration_s, secrets.randbits(40) if seed is None else seed, coordinators=coordinators))
        if file is not None:
            sys.exit(once(Story.parse(file.read())))
        sys.exit(once(random_story(secrets.randbits(40) if seed is None else seed, coordinators=coordinators)))
    except InvalidInput as error:
        raise click.UsageError(str(error)) from None


def once(story: Story) -> int:
    """Tells one story; prints it, and how it went."""
    found = verdict(story)
    if found:
        click.echo(found)
        return 1
    told = tell(story)
    click.echo(story)
    click.echo(
        f"# every promise held: {told.checks} checks over {told.seconds:.1f} simulated seconds and {told.messages} messages; "
        f"right {told.heartbeats:.1f} heartbeats after the healing; digest {told.digest:08x}"
    )
    return 0


def soak(duration_s: float, seed: int, *, coordinators: int = 1) -> int:
    """Random histories, from `seed` on, until the time is up or one fails."""
    click.echo(f"histories from seed {seed} on, for {duration_s:g} s", err=True)
    start_s = shown_s = time.monotonic()
    histories = steps = 0
    while (now_s := time.monotonic()) < start_s + duration_s:
        story = random_story(seed + histories, coordinators=coordinators)
        if violation_of(story) is not None:
            click.echo(f"seed {seed + histories} breaks a promise; shrinking", err=True)
            click.echo(verdict(story))
            return 1
        histories += 1
        steps += len(story.steps)
        if now_s >= shown_s + PROGRESS_S:
            shown_s = now_s
            _progress(histories, steps, now_s - start_s)
    _progress(histories, steps, time.monotonic() - start_s)
    click.echo("every promise held")
    return 0


def _progress(histories: int, steps: int, seconds: float) -> None:
    click.echo(f"{seconds:6.0f} s  {histories} histories, {steps} steps, {histories / seconds:.1f} histories/s", err=True)


if __name__ == "__main__":
    main(prog_name="python -m kvdir.testing.sim")
