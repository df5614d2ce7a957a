"""The coordinator's live page (docs/page.md): what it shows (copies, document, rates), who gets it (feed, routes), and how it looks (static)."""
