"""The coordinator on a store that it shares with others (`kvdir serve --store`): none keeps blocks, all are one directory.

agents ──Publish──▶ session ──write, save──▶ [ BlockStore ] ◀──nodes, roster── link ◀── lookups
"""
