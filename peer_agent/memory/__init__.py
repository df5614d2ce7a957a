"""Memory that blocks live in.

layout.py  byte layout of the arena: superblock, size classes, slot header (the same numbers as csrc/slot.hpp)
arena.py   the mapped memory file: create, open, verify, close
slots.py   capacity planning: what the configured bytes really hold, and refusals
"""
