"""The coordinator's live page (docs/page.md): what it shows (copies, rates, document), to whom (feed, routes, answers), and
its looks (static).
"""
